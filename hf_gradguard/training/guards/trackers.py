"""What callbacks of experiment trackers would upload beside figures: true gradients, checkpoints
with the defense's private state, training data.

They belong to Transformers and come by `report_to`, which takes all that are installed where it
says so, or by `callbacks`. The variables that decide are theirs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from transformers import TrainerCallback
from transformers.utils import ENV_VARS_TRUE_VALUES, logging

logger = logging.get_logger(__name__)

_CHECKPOINTS = "checkpoints, which hold the defense's private state"
_DATA = "the output folder, whose checkpoints hold the defense's private state, and the data"
_UPLOAD_CONSOLES = frozenset(
    {"WandbCallback", "CometCallback", "ClearMLCallback", "NeptuneCallback", "SwanLabCallback"}
)
_CONSOLE = (
    "{} uploads what is printed, so the console shows what trackers may see: means over 50 "
    "messages. Errors, which may quote a batch, are uploaded too. For wandb set WANDB_CONSOLE=off."
)
_YES = frozenset(ENV_VARS_TRUE_VALUES)  # of any case, as Transformers reads them


class Upload(NamedTuple):
    """What a callback uploads under which setting, and how not to."""

    callback: str
    setting: Callable[[Any], str]  # of the callback; empty where it does not upload
    entries: str
    instead: str


def check_trackers(callbacks: Iterable[TrainerCallback]) -> None:
    """Refuse callbacks that would upload more than a rank may give away.

    Args:
        callbacks: Of the Trainer.

    Raises:
        NotImplementedError: With what would be uploaded, and the setting that leaves it.

    Example:
        >>> from transformers import PrinterCallback
        >>> check_trackers([PrinterCallback()])
    """
    callbacks = list(callbacks)
    if tracker := uploads_console(callbacks):
        logger.warning_once(_CONSOLE.format(tracker))
    for callback in callbacks:
        kinds = {kind.__name__ for kind in type(callback).__mro__}
        for upload in _UPLOADS:
            if upload.callback in kinds and (setting := upload.setting(callback)):
                raise NotImplementedError(
                    f"GradGuardTrainer does not support {setting}: {upload.callback} would upload "
                    f"{upload.entries}. {upload.instead}."
                )


def uploads_console(callbacks: Iterable[TrainerCallback]) -> str:
    """Name the tracker that uploads what a rank prints, if there is one: then the console is no
    place for figures of single messages.

    Example:
        >>> from transformers import PrinterCallback
        >>> uploads_console([PrinterCallback()])
        ''
    """
    kinds = {kind.__name__ for callback in callbacks for kind in type(callback).__mro__}
    for name in _UPLOAD_CONSOLES & kinds:
        if name != "WandbCallback" or os.getenv("WANDB_CONSOLE", "").lower() != "off":
            return name
    return ""


def _variable(name: str, values: frozenset[str], unset: str = "") -> Callable[[Any], str]:
    """Whether an environment variable has one of these values."""

    def setting(callback: Any) -> str:
        value = os.getenv(name, unset)
        return f"{name}={value}" if value.upper() in values else ""

    return setting


def _argument(name: str, uploads: Callable[[Any], bool]) -> Callable[[Any], str]:
    """Whether a callback was made with a value with which it uploads."""

    def setting(callback: Any) -> str:
        value = getattr(callback, f"_{name}", getattr(callback, name, None))
        return f"{name}={value!r}" if uploads(value) else ""

    return setting


_UPLOADS = [
    Upload(
        "WandbCallback",
        _variable("WANDB_WATCH", frozenset({"GRADIENTS", "ALL"})),
        "histograms of the true gradient, which hooks on parameters get",
        "Set WANDB_WATCH=false",
    ),
    Upload(
        "WandbCallback",
        _variable("WANDB_LOG_MODEL", frozenset({"CHECKPOINT"})),
        _CHECKPOINTS,
        "Set WANDB_LOG_MODEL=end, for the model alone, or false",
    ),
    Upload(
        "CometCallback", _variable("COMET_LOG_ASSETS", _YES), _CHECKPOINTS,
        "Set COMET_LOG_ASSETS=false",
    ),
    Upload(
        "MLflowCallback", _variable("HF_MLFLOW_LOG_ARTIFACTS", _YES), _CHECKPOINTS,
        "Set HF_MLFLOW_LOG_ARTIFACTS=false",
    ),
    Upload(
        "DagsHubCallback", _variable("HF_DAGSHUB_LOG_ARTIFACTS", _YES), _DATA,
        "Set HF_DAGSHUB_LOG_ARTIFACTS=false",
    ),
    Upload(
        "ClearMLCallback", _variable("CLEARML_LOG_MODEL", _YES, "TRUE"), _CHECKPOINTS,
        "Set CLEARML_LOG_MODEL=false",
    ),
    Upload(
        "NeptuneCallback", _argument("log_checkpoints", lambda which: which is not None),
        _CHECKPOINTS,
        "Leave log_checkpoints out",
    ),
    Upload(
        "DVCLiveCallback", _argument("log_model", lambda which: which == "all"), _CHECKPOINTS,
        "Use log_model=True (HF_DVCLIVE_LOG_MODEL=true), for the model alone",
    ),
    Upload(
        "FlyteCallback", _argument("sync_checkpoints", bool), _CHECKPOINTS,
        "Use sync_checkpoints=False",
    ),
    Upload(
        "FlyteCallback", _argument("save_log_history", bool),
        "the history in memory, with figures of single messages and true gradients",
        "Use save_log_history=False",
    ),
]  # fmt: skip
