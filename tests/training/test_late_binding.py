"""What a Trainer was asked for is read when training begins: changes between trainings count, and
changes within one are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from helpers import SmallNetwork, make_task, refuses
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import HPSearchBackend

from hf_gradguard import DEFENSES, GradGuardConfig, GradGuardTrainer, GradientMap, chain
from hf_gradguard import make_defense as make
from hf_gradguard.defenses import Defense
from hf_gradguard.leakage import FisherAccountant
from hf_gradguard.randomness import Stream

STEPS = 2


@dataclass
class Scaled(Defense):
    """Multiplies by a factor, and keeps what it did, with the names of what it shared."""

    name: ClassVar[str] = "scaled"
    log: ClassVar[list[tuple[float, tuple[str, ...]]]] = []
    prepared: ClassVar[list[nn.Module]] = []
    factor: float = 1.0

    def protect(self, gmap: GradientMap, generator: Stream) -> Mapping[str, Tensor]:
        self.log.append((self.factor, tuple(gmap.parameters)))
        return {name: g * self.factor for name, g in gmap.gradient().items()}

    def prepare(self, model: nn.Module, processing_class: Any = None) -> None:
        self.prepared.append(model)


@pytest.fixture(autouse=True)
def _scaled() -> Iterator[None]:
    Scaled.log.clear()
    Scaled.prepared.clear()
    DEFENSES["scaled"] = Scaled
    yield
    del DEFENSES["scaled"]


def factors() -> list[float]:
    return [factor for factor, _ in Scaled.log]


def rows(count: int = 8) -> list[dict[str, Tensor]]:
    batch = make_task("bert", dtype=torch.float32, batch_size=count)[1]
    return [{key: value[k] for key, value in batch.items()} for k in range(count)]


def model_of() -> nn.Module:
    return make_task("bert", dtype=torch.float32)[0]


def trainer_of(
    folder: Path,
    defense: Any = None,
    options: dict[str, Any] | None = None,
    in_args: str | None = None,
    **settings: Any,
) -> GradGuardTrainer:
    usual = {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 4,
        "use_cpu": True, "learning_rate": 1e-2, "report_to": "none", "disable_tqdm": True,
        "save_strategy": "no", "logging_steps": 1,
    }  # fmt: skip
    args = GradGuardConfig(**{**usual, **settings}, defense=in_args)
    options = {"model": model_of(), "train_dataset": rows(), **(options or {})}
    return GradGuardTrainer(args=args, defense=defense, **options)


# Between trainings


def test_settings_in_the_arguments_count_when_training_begins(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, in_args="scaled", defense_kwargs={"factor": 2.0})
    trainer.train()
    trainer.args.defense_kwargs["factor"] = 3.0  # also written into the same dictionary
    trainer.train()
    trainer.args.defense_kwargs = {"factor": 4.0}
    trainer.train()
    assert factors() == [2.0, 2.0, 3.0, 3.0, 4.0, 4.0]


def test_another_defense_counts(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, in_args="none")
    trainer.train()
    assert factors() == []
    trainer.args.defense, trainer.args.defense_kwargs = "scaled", {"factor": 2.0}
    trainer.train()
    assert factors() == [2.0, 2.0]
    assert trainer.defense == Scaled(2.0)

    trainer = trainer_of(tmp_path, "none")
    trainer.defense = Scaled(3.0)
    trainer.train()
    trainer.defense = "scaled"
    trainer.train()
    trainer.defense.factor = 4.0  # clients have copies
    trainer.train()
    trainer.defense = chain(Scaled(5.0), Scaled(6.0))
    trainer.train()
    trainer.defense.second.factor = 7.0
    trainer.train()
    assert factors()[2:] == [3.0, 3.0, 1.0, 1.0, 4.0, 4.0, 5.0, 6.0, 5.0, 6.0, 5.0, 7.0, 5.0, 7.0]


def test_two_defenses_are_refused_when_the_second_is_set(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, in_args="scaled")
    with pytest.raises(ValueError, match=r"Two defenses are named.*Give one"):
        trainer.defense = "pruning"
    assert trainer.defense == Scaled()
    trainer = trainer_of(tmp_path, "scaled")
    trainer.args.defense = "pruning"
    with pytest.raises(ValueError, match=r"Two defenses are named.*Give one"):
        trainer.train()


def test_other_arguments_count_and_are_checked_again(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, Scaled())
    withheld = "bert.embeddings.word_embeddings.weight"
    assert withheld not in trainer.shared_names
    trainer.args.share_input_embeddings = "true"
    trainer.args.clients_per_process = 2
    trainer.train()
    assert len(Scaled.log) == 2 * STEPS
    assert all(withheld in names for _, names in Scaled.log)
    assert withheld in trainer.shared_names
    for name, value in {"clients_per_process": 0, "batch_statistics": "none"}.items():
        usual = getattr(trainer.args, name)
        setattr(trainer.args, name, value)
        with pytest.raises(ValueError, match=f"{name} must be"):
            trainer.train()
        setattr(trainer.args, name, usual)
    trainer.args.leakage_limit = 0.1
    with refuses("leakage-of-unknown-noise"):
        trainer.train()
    trainer.args.leakage_limit = None
    trainer.args.ddp_static_graph = True
    with refuses("static-graph"):
        trainer.train()


def test_measuring_follows_the_defense(tmp_path: Path) -> None:
    account = FisherAccountant()
    options = {"accountant": account}
    trainer = trainer_of(tmp_path, make("gaussian_noise", scale=0.5), options)
    trainer.train()
    before = account.steps
    trainer.defense = make("gaussian_noise", scale=5.0)
    trainer.args.leakage_logging_steps = 1
    trainer.train()
    assert account.steps == 2 * before  # one account of the run's examples
    assert "leakage/dfil_max" in trainer.state.log_history[0]
    trainer.defense = make("pruning")
    with refuses("leakage-of-unknown-noise"):
        trainer.train()


def test_clients_remember_unless_something_changed(tmp_path: Path) -> None:
    defense = make("optimal_noise", num_probes=1, refresh_every=100)
    trainer = trainer_of(tmp_path, defense)
    trainer.train()
    first = trainer._clients[0]
    trainer.train()
    assert trainer._clients[0] is first
    trainer.train_dataset = rows(12)  # other data are other clients
    trainer.train()
    assert trainer._clients[0] is not first


def test_data_set_by_clients_follows(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, Scaled(), num_clients=2)
    trainer.train_dataset = rows(40)
    trainer.train()
    assert sum(len(part) for part in trainer._rows_of_clients) == 40


@pytest.mark.parametrize("change", ["args.defense_kwargs", "the defense", "args.noise_seed"])
def test_a_change_while_training_is_refused(tmp_path: Path, change: str) -> None:
    class Change(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if change == "the defense":
                trainer.defense.factor = 9.0
            elif change == "args.noise_seed":
                args.noise_seed = 5
            else:
                args.defense_kwargs["factor"] = 9.0

    settings = {"factor": 2.0}
    trainer = trainer_of(
        tmp_path, options={"callbacks": [Change()]}, in_args="scaled", defense_kwargs=settings
    )
    with pytest.raises(RuntimeError, match=f"{change} changed while training.*between trainings"):
        trainer.train()
    assert factors() == [2.0]


# Models and searches


def test_every_model_is_prepared_and_described(tmp_path: Path) -> None:
    """The second model has other parameters, and is refused where it should be."""
    made: list[nn.Module] = []

    def model_init() -> nn.Module:
        model = model_of()
        if len(made) == 2:
            model.classifier.requires_grad_(False)
        if len(made) == 3:
            model.classifier = torch.compile(model.classifier)
        made.append(model)
        return model

    trainer = trainer_of(tmp_path, Scaled(), {"model": None, "model_init": model_init})
    trainer.train()
    assert Scaled.prepared == made[:2]  # one at construction, one for the training
    assert trainer.model is made[1]
    trainer.train()
    assert Scaled.prepared == made[:3]
    assert "classifier.weight" in Scaled.log[0][1]
    assert "classifier.weight" not in Scaled.log[-1][1]
    assert trainer.shared_names == list(Scaled.log[-1][1])
    with refuses("compiled-model"):
        trainer.train()


def test_refiner_finds_a_network_for_every_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[nn.Module] = []

    def network_for(model: nn.Module, *_: Any) -> nn.Module:
        found.append(model)
        return SmallNetwork("text", 8)

    monkeypatch.setattr("hf_gradguard.networks.network_for", network_for)
    options = {"model": None, "model_init": model_of}
    trainer = trainer_of(tmp_path, make("refiner", objective="weighted", iterations=1), options)
    trainer.train()
    assert found[-1] is trainer.model
    assert len(found) == 2


class Trial(dict):
    """What stands in for Optuna's, which is not installed."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.params = number, {}


class Backend:
    """Runs trials as Transformers' backends do."""

    def ensure_available(self) -> None:
        pass

    def run(self, trainer: Trainer, n_trials: int, direction: str, **kwargs: Any) -> Any:
        for number in range(n_trials):
            trainer.train(trial=Trial(number))
        return SimpleNamespace()


def test_a_search_over_the_defense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backends = "transformers.trainer.ALL_HYPERPARAMETER_SEARCH_BACKENDS"
    monkeypatch.setattr(backends, {HPSearchBackend.OPTUNA: Backend})
    monkeypatch.setattr("transformers.integrations.hp_params", lambda trial: trial.params)
    options = {"model": None, "model_init": model_of}
    trainer = trainer_of(
        tmp_path, options=options, in_args="scaled", defense_kwargs={"factor": 1.0}
    )
    tried = [
        {"defense_kwargs": {"factor": 2.0}},
        {"defense_kwargs": {"factor": 3.0}, "clients_per_process": 2},
        {"defense": "none", "defense_kwargs": {}},
    ]
    trainer.hyperparameter_search(
        lambda trial: tried[trial.number], n_trials=3, backend="optuna", direction="minimize"
    )
    assert factors() == [2.0] * STEPS + [3.0] * 2 * STEPS
    assert trainer.defense == make("none")
    # the accelerator of a trial is guarded as the first one was
    with pytest.raises(RuntimeError, match="would add the true gradient"):
        trainer.accelerator.backward(torch.zeros(()))


# Parameters that are frozen and unfrozen


class Unfreeze(TrainerCallback):
    """Trains the classifier alone at first."""

    def on_train_begin(self, *_: Any, model: nn.Module, **kwargs: Any) -> None:
        model.bert.requires_grad_(False)

    def on_step_begin(self, _: Any, state: Any, *__: Any, model: nn.Module, **kwargs: Any) -> None:
        if state.global_step == 1:
            model.bert.requires_grad_(True)


@pytest.mark.parametrize("name", ["none", "gaussian_noise", "pruning", "optimal_noise"])
def test_gradual_unfreezing(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    kwargs = {"optimal_noise": {"num_probes": 1, "refresh_every": 100}, "pruning": {"ratio": 0.01}}
    defense = chain(make(name, **kwargs.get(name, {})), Scaled())
    trainer = trainer_of(tmp_path, defense, {"callbacks": [Unfreeze()]}, max_steps=3)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    first, second, third = (names for _, names in Scaled.log)
    assert first == ("classifier.weight", "classifier.bias")
    assert second == third == tuple(trainer.shared_names)
    assert len(second) > 20
    moved = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == set(second)
    forgot = "chain forgot what it remembered of the former ones" in caplog.text
    assert forgot == (name in ("gaussian_noise", "optimal_noise"))
    assert "Shared, but not trained" not in caplog.text


def test_unfreezing_equals_the_stock_trainers(tmp_path: Path) -> None:
    trained = []
    for kind in (Trainer, GradGuardTrainer):
        options = {"callbacks": [Unfreeze()]}
        trainer = trainer_of(
            tmp_path, "none", options, max_steps=4, share_input_embeddings=True,
            gradient_accumulation_steps=2,
        )  # fmt: skip
        if kind is Trainer:
            model = model_of()
            trainer = Trainer(model, trainer.args, train_dataset=rows(), **options)
        trainer.train()
        trained.append({n: p.detach() for n, p in trainer.model.named_parameters()})
    assert all(torch.equal(trained[0][n], trained[1][n]) for n in trained[0])


def test_resuming_into_other_parameters_starts_their_memory_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    defense = make("optimal_noise", num_probes=1, refresh_every=100)
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3}
    trainer_of(tmp_path, defense, **saving).train()
    trainer = trainer_of(tmp_path, defense, {"callbacks": [Unfreeze()]}, **saving)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert trainer.state.global_step == 3
    assert "optimal_noise forgot what it remembered" in caplog.text


def test_what_the_optimizer_does_not_hold_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Unfrozen after the optimizer was made: shared for nothing, and never trained."""
    model = model_of()
    model.bert.requires_grad_(False)
    trainer = trainer_of(tmp_path, "none", {"model": model, "callbacks": [Unfreeze()]})
    trainer.train()
    assert "Shared, but not trained: bert." in caplog.text
