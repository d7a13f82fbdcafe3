"""`GradGuardTrainer`: the Trainer, sharing only protected gradients."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from transformers import PreTrainedModel, Trainer, TrainingArguments

from ..defenses import Defense
from .asked import resolve_defense
from .checks import check_arguments
from .config import GradGuardConfig
from .loading import load_model, load_tokenizer
from .mixin import GradGuardMixin


class GradGuardTrainer(GradGuardMixin):
    """Drop-in `Trainer` in which each rank's local gradient is replaced by a protected one before
    anything is exchanged.

    Args:
        model: As for `Trainer`. May be left out, also by passing `args` first: then
            `args.model_name_or_path` is loaded.
        args: `GradGuardConfig` or plain `TrainingArguments`.
        defense: As for `GradGuardMixin`, like `accountant`.
        *positional: All other arguments of `Trainer`.
        **kwargs: Likewise.

    Raises:
        ValueError: If no defense is named, or one is named twice.
        NotImplementedError: For set-ups that cannot be protected; see `checks.py`.
        ImportError: For a version of Transformers or torch that lacks a name this relies on; see
            `seams.py`.

    Example:
        >>> settings = {"max_steps": 1, "logging_steps": 1, "use_cpu": True, "save_strategy": "no"}
        >>> args = GradGuardConfig("out", disable_tqdm=True, defense="pruning", **settings)
        >>> rows = [{name: entry[i] for name, entry in batch.items()} for i in range(2)]
        >>> result = GradGuardTrainer(model, args, train_dataset=rows).train()
        {'loss': ..., 'defense/relative_error': ...}
        ...
    """

    def __init__(
        self,
        model: PreTrainedModel | nn.Module | TrainingArguments | None = None,
        args: TrainingArguments | None = None,
        *positional: Any,
        defense: str | Defense | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(model, TrainingArguments):
            model, args = args, model
        args = args or GradGuardConfig(output_dir="tmp_trainer")
        named = inspect.signature(Trainer).bind_partial(model, args, *positional).arguments
        if model is None and kwargs.get("model_init") is None:
            check_arguments(args)  # what is refused anyway is noticed before a model is loaded
            resolve_defense(defense, args)
            named["model"] = load_model(args)
            if (kwargs | named).get("processing_class") is None:
                kwargs["processing_class"] = load_tokenizer(args)
        super().__init__(**named, defense=defense, **kwargs)
