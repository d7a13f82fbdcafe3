"""Helpers that keep notices of other libraries out of the logs where they are of no use."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from transformers.utils import logging as transformers_logging

logger = transformers_logging.get_logger(__name__)

_NAMED = 3  # weights


@contextlib.contextmanager
def errors_alone(*names: str) -> Iterator[None]:
    """Let loggers of these names, and those below them, log only errors inside the context.

    Args:
        *names: Names of loggers.

    Example:
        >>> with errors_alone("transformers"):
        ...     logging.getLogger("transformers").isEnabledFor(logging.WARNING)
        False
    """
    loggers = [logging.getLogger(name) for name in names]
    levels = [changed.level for changed in loggers]
    for changed in loggers:
        changed.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for changed, level in zip(loggers, levels, strict=True):
            changed.setLevel(level)


def load_weights(auto_class: Any, name: str, head: Mapping[str, Any]) -> Any:
    """Load a model by `auto_class.from_pretrained`, and warn of weights that the folder lacks.

    Weights of a new head that was asked for are not named.

    Args:
        auto_class: An Auto class, such as `AutoModelForSequenceClassification`.
        name: A folder, or a name on the Hub.
        head: Settings of a new head, or of one that adapters bring; empty where the folder's own
            head is meant.

    Example:
        >>> from transformers import AutoModel
        >>> model.save_pretrained("encoder")
        >>> type(load_weights(AutoModel, "encoder", {})).__name__
        'BertModel'
    """
    with errors_alone("transformers"):
        model, report = auto_class.from_pretrained(
            name, trust_remote_code=False, output_loading_info=True,
            ignore_mismatched_sizes=bool(head), **head,
        )  # fmt: skip
    mismatched = [entry[0] for entry in report["mismatched_keys"]]
    body = f"{model.base_model_prefix}."
    lacking = sorted(
        key for key in {*report["missing_keys"], *mismatched}
        if not head or key.startswith(body)
    )  # fmt: skip
    if lacking:
        unlisted = f" and {len(lacking) - _NAMED} more" if len(lacking) > _NAMED else ""
        logger.warning(
            f"{name} lacks weights, which are random now: {', '.join(lacking[:_NAMED])}{unlisted}."
        )
    return model
