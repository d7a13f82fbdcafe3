"""What the Trainer loads: a model and tokenizer by name, and weights of checkpoints that
Transformers saved under other names.
"""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES


def load_model(args: TrainingArguments) -> PreTrainedModel:
    """The model at `args.model_name_or_path`, of the class that its configuration names.

    Raises:
        ValueError: If there is no such argument, or the class is unknown or has no loss.
    """
    path = getattr(args, "model_name_or_path", None)
    if path is None:
        raise ValueError(
            "There is no model: pass model=, model_init=, or model_name_or_path in GradGuardConfig."
        )
    named = AutoConfig.from_pretrained(path).architectures or []
    model_class = getattr(transformers, named[0], None) if named else None
    if model_class is None:
        raise ValueError(
            f"The `architectures` in {path}/config.json are {named}, which name no model class of "
            "Transformers. Load the model yourself and pass it as model=."
        )
    if model_class.__name__ in MODEL_MAPPING_NAMES.values():
        raise ValueError(
            f"{path} holds a {model_class.__name__}, which has no loss: choose a model with a "
            "head. To put a new head on it, load it with an AutoModelFor... class and pass it as "
            "model=."
        )
    return model_class.from_pretrained(path)


def load_tokenizer(args: TrainingArguments) -> Any:
    """The tokenizer at `args.model_name_or_path`, or `None`."""
    try:
        return AutoTokenizer.from_pretrained(args.model_name_or_path)
    except (OSError, ValueError, KeyError):
        return (
            None  # vision models, and folders that hold a model alone: as if none had been passed
        )


class RenamedWeightsTrainer(Trainer):
    """`Trainer` that also resumes from weights which `save_pretrained` renamed.

    Transformers 5.23 saves some models (ViT) under older names, which its own Trainer then does not
    find when it resumes: it warns and leaves the weights as they start (its issue 43701).
    `from_pretrained` knows both names.
    """

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        self._renamed = bool(load_result.missing_keys and load_result.unexpected_keys)
        if not self._renamed:
            super()._issue_warnings_after_load(load_result)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        self._renamed = False
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._load_renamed(resume_from_checkpoint, self.model if model is None else model)

    def _load_best_model(self) -> None:
        self._renamed = False
        super()._load_best_model()
        self._load_renamed(str(self.state.best_model_checkpoint), self.model)

    def _load_renamed(self, folder: str, model: nn.Module) -> None:
        if not self._renamed:
            return
        if not isinstance(model, PreTrainedModel):
            raise RuntimeError(
                f"{folder} holds other weights than {type(model).__name__} has: it is of another "
                "model."
            )
        loaded, found = type(model).from_pretrained(folder, output_loading_info=True)
        if found["missing_keys"] or found["unexpected_keys"]:
            raise RuntimeError(
                f"{folder} holds other weights than {type(model).__name__} has. Missing: "
                f"{sorted(found['missing_keys'])[:5]}, unexpected: "
                f"{sorted(found['unexpected_keys'])[:5]}. It is of another model, or another "
                "version of it."
            )
        model.load_state_dict(loaded.state_dict())
