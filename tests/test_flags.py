"""Flags of dataclasses, on the command line and in files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser

from hf_gradguard import GradGuardConfig
from hf_gradguard.cli import COMMANDS, main
from hf_gradguard.flags import FlagError, FlagParser, fill, option

TRAINING = [
    *("--output_dir", "out", "--use_cpu", "--learning_rate", "1e-3", "--max_steps", "7"),
    *("--save_strategy", "steps", "--logging_steps", "0.5", "--warmup_steps", "0.1"),
    *("--bf16", "false", "--optim", "sgd", "--defense", "gaussian_noise", "--seed", "3"),
    *("--defense_kwargs", '{"relative_scale": 5}', "--withhold", "a.*", "b.*"),
    *("--lr_scheduler_kwargs", '{"num_cycles": 2}', "--label_names", "labels"),
    *("--private_dropout", "false", "--report_to", "none", "--dataloader_drop_last", "True"),
]


@dataclass(kw_only=True)
class Settings:
    model: str = option("", "which one", required=True, aliases=["--model_name_or_path"])
    steps: int = option(3, "how many")
    rate: float | None = option(None, "how fast")
    defense: Any = option(None, "which")  # noqa: RUF009
    shared: bool = option(True, "whether")
    texts: list[str] | None = option(None, "some")  # noqa: RUF009


def values(*argv: str) -> dict[str, Any]:
    return FlagParser("gradguard try", "", "", Settings).values(argv)


def test_they_are_read_as_transformers_reads_them() -> None:
    (expected,) = HfArgumentParser(GradGuardConfig).parse_args_into_dataclasses(TRAINING)
    (config,) = FlagParser("", "", "", GradGuardConfig).instances(TRAINING, GradGuardConfig)
    assert config.to_dict() == expected.to_dict()
    assert (config.withhold, config.warmup_steps) == (["a.*", "b.*"], 0.1)


def test_flags_over_a_later_file_over_an_earlier_one(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.json"
    first.write_text("model_name_or_path: m\nsteps: 5\nrate: 1e-3\nshared: false\ntexts: [a, b]\n")
    second.write_text(json.dumps({"steps": 6, "defense": [{"pruning": {"ratio": 0.5}}, "none"]}))
    files = ["--config", str(first), "--config", str(second)]
    read = {"model": "m", "rate": 1e-3, "shared": False, "texts": ["a", "b"]}
    assert values(*files[:2]) == read | {"steps": 5}
    defenses = {"defense": [{"pruning": {"ratio": 0.5}}, "none"]}
    assert values(*files) == read | {"steps": 6} | defenses
    settings = fill(Settings, values("--steps=7", *files, "--shared", "--defense", "refiner"))
    assert (settings.steps, settings.shared, settings.defense) == (7, True, ["refiner"])


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("model: m\nstep: 3\n", r"run\.yaml holds step, .*Did you mean steps\?"),
        ("model: m\nsteps: three\n", r"run\.yaml: Argument --steps: invalid int value: 'three'"),
        ("model: m\nsteps: [1, 2]\n", r"run\.yaml holds a list where one value belongs: '2'"),
        ("model: m\nshared: perhaps\n", r"run\.yaml: .*--shared.*true or false"),
        ("model: m\nsteps: 3: 4\n", r"run\.yaml is no YAML or JSON: mend line 2"),
        ("- model\n", "must hold a mapping"),
        ("", "must hold a mapping"),
        ("steps: 3\n", "--model must be given"),
        ("model: m\nconfig: other.yaml\n", "holds config, which no flag is called"),
    ],
)
def test_a_file_that_cannot_be_meant(content: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(content)
    with pytest.raises(FlagError, match=line):
        values("--config", str(tmp_path / "run.yaml"))


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--modle", "m"], r"no flag --modle\. Did you mean --model\?"),
        (["--model", "m", "--step", "3"], r"no flag --step\. Did you mean --steps\?"),
        (["--model", "m", "--steps"], "--steps: expected one argument"),
        (["--model", "m", "stray"], "no flag stray"),
        (["--model", "m", "--config", "nowhere.yaml"], "cannot be read"),
        (["--model", "m", "--defense", "{a"], "no JSON"),
    ],
)
def test_flags_that_cannot_be_meant(argv: list[str], line: str) -> None:
    with pytest.raises((FlagError, OSError), match=line):
        values(*argv)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_groups_what_is_required_and_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    said = capsys.readouterr().out
    assert not ended.value.code
    assert f"example:\n  gradguard {command}" in said
    if command in ("train", "recommend", "audit", "evalnet train"):
        usage = said.split("\n\n")[0]
        assert all(f"--{name} ..." in usage for name in ("dataset", "output"))
        assert said.count("required: ") == usage.count(" ...") - 1


def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("audit", "recommend", "train", "demo", "evalnet train"):
        with pytest.raises(SystemExit) as ended:
            main([*command.split(), "--outptu", "out"])
        (line,) = capsys.readouterr().err.splitlines()
        assert ended.value.code == 1
        assert line.startswith(
            f"gradguard {command}: There is no flag --outptu. Did you mean --out"
        )
