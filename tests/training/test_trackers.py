"""What callbacks of experiment trackers would upload is refused, and what they may is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_task, refuses
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from hf_gradguard import GradGuardConfig, GradGuardTrainer
from hf_gradguard.training.refusals import TRACKERS, check_trackers

SOURCE = Path(integration_utils.__file__).read_text()  # reads them all, still
# class, variables, attributes, and what is said
REFUSED: dict[str, tuple[str, dict[str, str], dict[str, Any], tuple[str, ...]]] = {
    "wandb, gradients": (
        "WandbCallback", {"WANDB_WATCH": "gradients"}, {},
        ("WANDB_WATCH=gradients", "true gradient", "Set WANDB_WATCH=false"),
    ),
    "wandb, all": ("WandbCallback", {"WANDB_WATCH": "all"}, {}, ("WANDB_WATCH=all",)),
    "wandb, checkpoint": (
        "WandbCallback", {"WANDB_LOG_MODEL": "checkpoint"}, {}, ("private state", "false"),
    ),
    "comet": ("CometCallback", {"COMET_LOG_ASSETS": "1"}, {}, ("COMET_LOG_ASSETS=false",)),
    "mlflow": (
        "MLflowCallback", {"HF_MLFLOW_LOG_ARTIFACTS": "True"}, {},
        ("HF_MLFLOW_LOG_ARTIFACTS=True", "private state", "HF_MLFLOW_LOG_ARTIFACTS=false"),
    ),
    "dagshub": (
        "DagsHubCallback", {"HF_DAGSHUB_LOG_ARTIFACTS": "yes"}, {},
        ("and the data", "HF_DAGSHUB_LOG_ARTIFACTS=false"),
    ),
    "dagshub, as mlflow": (
        "DagsHubCallback", {"HF_MLFLOW_LOG_ARTIFACTS": "1"}, {}, ("MLflowCallback",),
    ),
    "clearml": (
        "ClearMLCallback", {}, {}, ("CLEARML_LOG_MODEL=TRUE", "Set CLEARML_LOG_MODEL=false"),
    ),
    **{
        f"neptune, {which}": (
            "NeptuneCallback", {}, {"_log_checkpoints": which},
            (f"log_checkpoints={which!r}", "Leave log_checkpoints out"),
        )
        for which in ("same", "last", "best", True)  # it looks for None alone
    },
    "dvclive": ("DVCLiveCallback", {}, {"_log_model": "all"}, ("log_model=True",)),
    "flyte": ("FlyteCallback", {}, {"sync_checkpoints": True}, ("sync_checkpoints=False",)),
    "flyte, by a number": ("FlyteCallback", {}, {"sync_checkpoints": 2}, ("sync_checkpoints=2",)),
    "flyte, log": ("FlyteCallback", {}, {"save_log_history": True}, ("save_log_history=False",)),
}  # fmt: skip
TAKEN: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "wandb": ("WandbCallback", {}, {}),
    "wandb, off": ("WandbCallback", {"WANDB_WATCH": "false", "WANDB_LOG_MODEL": "false"}, {}),
    "wandb, parameters": ("WandbCallback", {"WANDB_WATCH": "parameters"}, {}),
    "wandb, model alone": ("WandbCallback", {"WANDB_LOG_MODEL": "end"}, {}),
    "another's variable": ("TensorBoardCallback", {"WANDB_WATCH": "all"}, {}),
    "comet": ("CometCallback", {}, {}),
    "mlflow": ("MLflowCallback", {"HF_MLFLOW_LOG_ARTIFACTS": "false"}, {}),
    "dagshub": ("DagsHubCallback", {}, {}),
    "clearml, off": ("ClearMLCallback", {"CLEARML_LOG_MODEL": "false"}, {}),
    "neptune": ("NeptuneCallback", {}, {"_log_checkpoints": None}),
    "dvclive, model alone": ("DVCLiveCallback", {}, {"_log_model": True}),
    "flyte": ("FlyteCallback", {}, {"sync_checkpoints": False, "save_log_history": False}),
}


SPELLINGS = ("1", "ON", "on", "YES", "yes", "Yes", "TRUE", "true", "True")
SWITCHES = {
    "COMET_LOG_ASSETS": "CometCallback",
    "HF_MLFLOW_LOG_ARTIFACTS": "MLflowCallback",
    "HF_DAGSHUB_LOG_ARTIFACTS": "DagsHubCallback",
    "CLEARML_LOG_MODEL": "ClearMLCallback",
}
LOOKED_AT = {
    **{"wandb": True, "comet_ml": True, "mlflow": True, "dagshub": True, "clearml": True},
    **{"neptune": True, "dvclive": True, "flyte": True},
    # These send what is logged, and nothing else.
    **{"azure_ml": False, "tensorboard": False, "trackio": False, "codecarbon": False},
    **{"swanlab": False, "kubeflow": False},
}
"""Transformers' integrations, and whether they can upload more than what is logged."""


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("variable", SWITCHES)
def test_every_spelling_of_yes_is_refused(
    variable: str, spelling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = made(SWITCHES[variable], {variable: spelling}, {}, monkeypatch)
    with pytest.raises(NotImplementedError, match=f"{variable}={spelling}"):
        check_trackers([callback])


@pytest.mark.parametrize(("name", "callback"), integration_utils.INTEGRATION_TO_CALLBACK.items())
def test_every_integration_was_looked_at(name: str, callback: type) -> None:
    """One that a newer version of Transformers brings is read before it is added here."""
    uploads = {rule.applies.callback for rule in TRACKERS}
    assert LOOKED_AT[name] == (callback.__name__ in uploads)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for _, variables, _, _ in REFUSED.values():
        for name in variables:
            monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("CLEARML_LOG_MODEL", raising=False)


def made(
    name: str, variables: dict[str, str], attributes: dict[str, Any], patch: pytest.MonkeyPatch
) -> TrainerCallback:
    """One of Transformers' own, without the library that its `__init__` asks for."""
    for variable, value in variables.items():
        patch.setenv(variable, value)
    kind = getattr(integration_utils, name)
    callback = kind.__new__(kind)
    vars(callback).update(attributes)
    return callback


@pytest.mark.parametrize(("name", "variables", "attributes", "says"), REFUSED.values(), ids=REFUSED)
def test_refused(
    name: str,
    variables: dict[str, str],
    attributes: dict[str, Any],
    says: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    callback = made(name, variables, attributes, monkeypatch)
    with pytest.raises(NotImplementedError) as refused:
        check_trackers([TrainerCallback(), callback])
    assert all(part in str(refused.value) for part in says), str(refused.value)
    assert all(read in SOURCE for read in (*variables, *attributes))


@pytest.mark.parametrize(("name", "variables", "attributes"), TAKEN.values(), ids=TAKEN)
def test_taken(
    name: str,
    variables: dict[str, str],
    attributes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_trackers([made(name, variables, attributes, monkeypatch)])


class NeptuneCallback(TrainerCallback):
    """What stands for Transformers' is known by its name."""

    _log_checkpoints = "same"


def test_the_trainer_refuses_one_that_it_is_given(tmp_path: Any) -> None:
    model, _ = make_task("bert")
    args = GradGuardConfig(str(tmp_path), use_cpu=True, report_to="none", defense="none")
    with refuses("neptune-checkpoints"):
        GradGuardTrainer(model, args, callbacks=[NeptuneCallback()])
    trainer = GradGuardTrainer(model, args, train_dataset=[{}])
    trainer.add_callback(NeptuneCallback())
    with refuses("neptune-checkpoints"):
        trainer.train()


class Tracker(TrainerCallback):
    """Notes the history and the logs that it is handed, at every event."""

    def __init__(self) -> None:
        self.histories: dict[str, list[Any]] = {}
        self.logs: list[dict[str, Any]] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def handed(args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            self.histories[name] = [dict(entry) for entry in state.log_history]
            self.logs += [logs] if logs else []

        return handed


class WandbCallback(TrainerCallback):
    """What stands for Transformers', which uploads the console's output."""


def trained_with(folder: Path, *callbacks: Any, resume: Any = None, **settings: Any) -> Any:
    model, batch = make_task("bert", dtype=torch.float32, batch_size=8)
    rows = [{name: value[k] for name, value in batch.items()} for k in range(8)]
    given = {"defense": "gaussian_noise", "max_steps": 51, "save_strategy": "no"} | settings
    args = GradGuardConfig(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1,
        per_device_train_batch_size=1, **given,
    )  # fmt: skip
    trainer = GradGuardTrainer(model, args, train_dataset=rows, callbacks=list(callbacks))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_no_event_hands_a_tracker_the_losses_of_single_messages(tmp_path: Path) -> None:
    """The history in memory, which `state` carries, has them all."""
    tracker = Tracker()
    settings = {"save_strategy": "steps", "save_steps": 30}
    trainer = trained_with(tmp_path, tracker, **settings)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 51
    assert {"on_log", "on_step_end", "on_save", "on_train_end"} <= set(tracker.histories)
    for history in tracker.histories.values():
        shown = [entry["loss"] for entry in history if "loss" in entry]
        assert shown in ([], [float(f"{sum(losses[:50]) / 50:.4g}")])
        assert not [name for entry in history for name in entry if name == "defense/cosine"]
    again = Tracker()
    trained_with(tmp_path, again, resume=str(tmp_path / "checkpoint-30"), **settings)
    began = again.histories["on_train_begin"]
    assert len(began) == 30
    assert not {"loss", "defense/cosine", "defense/relative_error"} & {n for e in began for n in e}


def test_what_a_callback_logs_is_in_the_whole_history(tmp_path: Path) -> None:
    class Logs(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            state.log_history.append({"mine": state.global_step})

    trainer = trained_with(tmp_path, Logs(), max_steps=2)
    assert [e["mine"] for e in trainer.state.log_history if "mine" in e] == [1, 2]


@pytest.mark.parametrize("setting", [None, "off"])
def test_a_console_that_is_uploaded_shows_what_trackers_may_see(
    setting: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("WANDB_CONSOLE", raising=False)
    if setting is not None:
        monkeypatch.setenv("WANDB_CONSOLE", setting)
    trainer = trained_with(tmp_path, WandbCallback(), max_steps=3)
    printed = capsys.readouterr().out
    assert "learning_rate" in printed
    for name in ("'loss'", "defense/cosine"):
        assert (name in printed) == (setting == "off")
    assert ("uploads what is printed" in caplog.text) == (setting is None)
    assert len([e for e in trainer.state.log_history if "loss" in e]) == 3
