"""Arguments: what they accept, what they refuse and say, and that they survive a round trip."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser, TrainingArguments

from hf_gradguard import DEFENSES, GradGuardConfig
from recipes.command_line import parse_arguments


def make(**settings: Any) -> GradGuardConfig:
    return GradGuardConfig(output_dir="out", use_cpu=True, **settings)


def parse(*flags: str) -> GradGuardConfig:
    (config,) = HfArgumentParser(GradGuardConfig).parse_args_into_dataclasses(
        ["--output_dir", "out", "--use_cpu", *flags]
    )
    return config


def test_defaults_protect_nothing_by_silence() -> None:
    config = make()
    assert config.defense is None
    assert config.defense_kwargs is None
    assert not config.share_input_embeddings
    assert config.clients_per_process == 1
    assert config.noise_seed is None
    assert config.model_name_or_path is None


def test_a_pickled_config_has_no_seed_of_noise() -> None:
    """Trackers pickle arguments beside a model by themselves; a copy in this process has all."""
    config = make(noise_seed=7, weight_decay=0.5)
    loaded = pickle.loads(pickle.dumps(config))
    assert (loaded.noise_seed, loaded.weight_decay) == (None, 0.5)
    for copied in (copy.copy(config), copy.deepcopy(config), dataclasses.replace(config)):
        assert (copied.noise_seed, copied.weight_decay) == (7, 0.5)
        assert type(copied) is GradGuardConfig
    first = make(defense="pruning", defense_kwargs={"ratio": 0.5})
    copied = copy.deepcopy(first)
    assert copied.defense_kwargs is not None
    copied.defense_kwargs["ratio"] = 0.9
    assert first.defense_kwargs == {"ratio": 0.5}


def test_training_arguments_keep_their_defaults() -> None:
    config, stock = make(), TrainingArguments(output_dir="out", use_cpu=True)
    own = {field.name for field in dataclasses.fields(GradGuardConfig)} - {
        field.name for field in dataclasses.fields(TrainingArguments)
    }
    assert {k: v for k, v in config.to_dict().items() if k not in own} == stock.to_dict()


@pytest.mark.parametrize("name", DEFENSES)
def test_every_defense_is_accepted_by_name(name: str) -> None:
    assert make(defense=name).defense == name
    assert make(defense=name, defense_kwargs={}).defense_kwargs == {}


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"defense": "gausian_noise"},
            ValueError,
            r"no defense 'gausian_noise'.*gaussian_noise.*optimal_pruning",
        ),
        (
            {"defense": "dp_sgd", "defense_kwargs": {"clip": -1.0}},
            ValueError,
            r"clip must be .* above 0, but is -1",
        ),
        (
            {"defense": "dp_sgd", "defense_kwargs": {"norm": 1.0}},
            TypeError,
            r"dp_sgd has no setting norm.*clip",
        ),
        ({"defense_kwargs": [1]}, ValueError, r"defense_kwargs must be a dict, or JSON.*\[1\]"),
        ({"batch_statistics": "none"}, ValueError, r"one of local, shared, frozen, but is 'none'"),
        (
            {"clients_per_process": 0},
            ValueError,
            r"clients_per_process must be at least 1, but is 0",
        ),
        ({"noise_seed": -1}, ValueError, r"noise_seed must be at least 0, but is -1"),
        (
            {"leakage_logging_steps": -1},
            ValueError,
            r"leakage_logging_steps must be at least 0, but is -1",
        ),
        ({"leakage_num_probes": 0}, ValueError, r"leakage_num_probes must be at least 1, but is 0"),
        (
            {"leakage_limit": 0.0},
            ValueError,
            r"leakage_limit must be a finite number above 0, but is 0",
        ),
        (
            {"leakage_limit": float("nan")},
            ValueError,
            r"leakage_limit must be a finite number above 0, but is nan",
        ),
        (
            {"leakage_action": "warn"},
            ValueError,
            r"leakage_action must be one of skip, stop, but is 'warn'",
        ),
    ],
)
def test_bad_values_are_refused_with_the_way_out(
    settings: dict[str, Any], error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        make(**settings)


CHOICES: dict[str, tuple[Any, ...]] = {
    "batch_statistics": ("local", "shared", "frozen"),
    "partition": ("iid", "dirichlet"),
    "leakage_action": ("skip", "stop"),
    "protect_labels": (None, "randomized_response"),
    "noise_for": ("message", "sum"),
    "private_metrics": ("console", "log"),
}
NEEDS: dict[Any, dict[str, Any]] = {
    "dirichlet": {"num_clients": 4},
    "randomized_response": {"label_epsilon": 1.0},
    "sum": {"secure_aggregation": True},
}
KINDS: dict[str, tuple[Any, ...]] = {
    "true or false": (1, None, "perhaps"), "a whole number": (2.0, "2", True),
    "a number": ("0.5", True), "text": (3, True),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_choices(name: str) -> None:
    for choice in CHOICES[name]:
        assert getattr(make(**{name: choice}, **NEEDS.get(choice, {})), name) == choice
    with pytest.raises(ValueError, match=f"{name} must be one of .*, but is 'another'"):
        make(**{name: "another"}, label_epsilon=1.0 if name == "protect_labels" else None)


@pytest.mark.parametrize(
    "name", ["dirichlet_alpha", "leakage_limit", "label_epsilon", "secure_aggregation_range"]
)
@pytest.mark.parametrize("number", [0.0, -1.0, math.inf, math.nan])
def test_what_must_be_above_zero(name: str, number: float) -> None:
    needs = {"protect_labels": "randomized_response"} if name == "label_epsilon" else {}
    with pytest.raises(ValueError, match=f"{name} must be a finite number above 0"):
        make(**{name: number}, **needs)
    assert getattr(make(**{name: 1e-9}, **needs), name) == 1e-9


@pytest.mark.parametrize("name", [
    field.name for field in dataclasses.fields(GradGuardConfig)
    if field.name in GradGuardConfig.__annotations__
    and field.name not in ("defense", "defense_kwargs", "withhold")
])  # fmt: skip
def test_every_setting_has_its_type(name: str) -> None:
    """A text in the place of a number, or of yes or no, would mean something else silently."""
    annotation = GradGuardConfig.__annotations__[name]
    called = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text"}
    for wrong in KINDS[kind := called[annotation.partition(" | ")[0]]]:
        with pytest.raises(ValueError, match=f"{name} must be {kind}"):
            make(**{name: wrong})


def test_defense_settings_are_json_on_the_command_line() -> None:
    config = parse("--defense", "dp_sgd", "--defense_kwargs", '{"clip": 0.5, "relative_scale": 2}')
    assert config.defense_kwargs == {"clip": 0.5, "relative_scale": 2}


def test_defense_settings_that_are_no_json_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"defense_kwargs must be a dict, or JSON that starts with '\{'"
    ):
        parse("--defense", "dp_sgd", "--defense_kwargs", "clip=0.5")


def test_all_fields_have_flags() -> None:
    config = parse(
        *[
            "--defense",
            "pruning",
            "--share_input_embeddings",
            "--clients_per_process",
            "3",
            "--noise_seed",
            "5",
        ],
        *["--model_name_or_path", "some/model"],
    )
    assert config.share_input_embeddings
    assert (config.clients_per_process, config.noise_seed, config.model_name_or_path) == (
        3,
        5,
        "some/model",
    )


def test_round_trip_through_a_dict() -> None:
    config = make(
        defense="quantization", defense_kwargs={"bits": 2}, clients_per_process=2, noise_seed=0
    )
    values = json.loads(config.to_json_string())
    again = GradGuardConfig(
        **{
            k: v
            for k, v in values.items()
            if k in {f.name for f in dataclasses.fields(config) if f.init}
        }
    )
    assert again.to_dict() == config.to_dict()
    assert again.defense_kwargs == {"bits": 2}


def test_replace_keeps_the_rest_and_validates() -> None:
    config = make(defense="quantization", defense_kwargs={"bits": 2})
    replaced = dataclasses.replace(config, defense_kwargs={"bits": 3})
    assert (replaced.defense, replaced.defense_kwargs, config.defense_kwargs) == (
        "quantization",
        {"bits": 3},
        {"bits": 2},
    )
    with pytest.raises(ValueError, match="bits must be a whole number from 1 to 32"):
        dataclasses.replace(config, defense_kwargs={"bits": 99})


# A file's values under the command line's flags.


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "output_dir: out\nuse_cpu: true\ndefense: dp_sgd\ndefense_kwargs: {clip: "
        "0.5}\nlearning_rate: 1e-3\n"
    )
    (config,) = parse_arguments(
        GradGuardConfig, argv=["--config", str(file), "--clients_per_process", "2"]
    )
    assert (config.defense, config.defense_kwargs, config.learning_rate) == (
        "dp_sgd",
        {"clip": 0.5},
        1e-3,
    )
    assert config.clients_per_process == 2
    (config,) = parse_arguments(
        GradGuardConfig,
        argv=["--learning_rate", "0.1", "--config", str(file), "--defense_kwargs", '{"clip": 2.0}'],
    )
    assert (config.defense_kwargs, config.learning_rate) == ({"clip": 2.0}, 0.1)


def test_file_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("output_dir: out\ndefenze: none\n")
    with pytest.raises(ValueError, match=r"run.yaml holds defenze, which no flag is called"):
        parse_arguments(GradGuardConfig, argv=["--config", str(file)])
