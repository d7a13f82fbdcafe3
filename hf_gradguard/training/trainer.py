"""The Trainer that shares only protected gradients."""

from __future__ import annotations

import inspect
from typing import Any

import transformers
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from ..defenses import Defense
from ..models import explain_missing_model
from .config import GradGuardConfig, resolve_defense, setting
from .mixin import GradGuardMixin
from .refusals import check_arguments


class GradGuardTrainer(GradGuardMixin):
    """A drop-in `Trainer` that protects each rank's gradient before anything is exchanged.

    Args:
        model: The model, as for `Trainer`. It may be left out, also by passing `args` first: then
            `args.model_name_or_path` is loaded.
        args: A `GradGuardConfig` or plain `TrainingArguments`.
        defense: The name of a defense, or a defense. It must be given here or in `args`.
        *positional: All other arguments of `Trainer`.
        **kwargs: All other keyword arguments of `Trainer`.

    Raises:
        ValueError: If no defense is named, or one is named twice.
        NotImplementedError: If the set-up cannot be protected (see `refusals.py`).

    Example:
        >>> settings = {"max_steps": 1, "logging_steps": 1, "use_cpu": True, "save_strategy": "no"}
        >>> settings |= {"defense": "pruning", "defense_kwargs": {"ratio": 0.9}}
        >>> args = GradGuardConfig("out", disable_tqdm=True, **settings)
        >>> rows = [{name: entry[i] for name, entry in batch.items()} for i in range(2)]
        >>> result = GradGuardTrainer(model, args, train_dataset=rows).train()
        {'defense/relative_error': ..., 'defense/cosine': ...}
        {'loss': ...}
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
        arguments = named | kwargs
        _prepare_rows(arguments)
        super().__init__(**arguments, defense=defense)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Return batches as in `Trainer`, of rows that the model prepares if it does so."""
        if not isinstance(eval_dataset, str):
            eval_dataset = _prepared(self.model, eval_dataset, self.processing_class)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """Return batches as in `Trainer`, of rows that the model prepares if it does so."""
        test_dataset = _prepared(self.model, test_dataset, self.processing_class)
        return super().get_test_dataloader(test_dataset)


def _prepare_rows(arguments: dict[str, Any]) -> None:
    """Let a model that has `prepare_dataset` make what it is trained on of the rows, once."""
    model: Any = arguments.get("model")
    if not hasattr(model, "prepare_dataset"):
        return
    args, processing_class = arguments["args"], arguments.get("processing_class")
    model.to(args.device)
    for name in ("train_dataset", "eval_dataset"):
        # the other ranks of a machine find in a cache what the first one has made
        with args.main_process_first(desc=f"features of {name}"):
            arguments[name] = _prepared(model, arguments.get(name), processing_class)
    if arguments.get("data_collator") is None:
        arguments["data_collator"] = getattr(model, "data_collator", None)


def _prepared(model: Any, dataset: Any, processing_class: Any) -> Any:
    if dataset is None or not hasattr(model, "prepare_dataset"):
        return dataset
    if isinstance(dataset, dict):
        return {name: _prepared(model, rows, processing_class) for name, rows in dataset.items()}
    return model.prepare_dataset(dataset, processing_class)


def load_model(args: TrainingArguments) -> PreTrainedModel:
    """Load the model at `args.model_name_or_path`, of the class that its configuration names.

    Raises:
        ValueError: If there is no such argument, or the class is unknown or has no loss.
        FileNotFoundError: If neither a folder nor the Hub has the model.

    Example:
        >>> from hf_gradguard import GradGuardConfig
        >>> model.save_pretrained("folder")
        >>> type(load_model(GradGuardConfig("out", model_name_or_path="folder"))).__name__
        'BertForSequenceClassification'
    """
    path = setting(args, "model_name_or_path")
    if path is None:
        raise ValueError(
            "There is no model: pass model=, model_init=, or model_name_or_path in GradGuardConfig."
        )
    with explain_missing_model(path):
        named = AutoConfig.from_pretrained(path, trust_remote_code=False).architectures or []
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
    return model_class.from_pretrained(path, trust_remote_code=False)


def load_tokenizer(args: TrainingArguments) -> Any:
    """Load the tokenizer at `args.model_name_or_path`, or return `None`.

    Example:
        >>> from hf_gradguard import GradGuardConfig
        >>> folder = tokenizer.save_pretrained("folder")
        >>> len(load_tokenizer(GradGuardConfig("out", model_name_or_path="folder"))) > 0
        True
    """
    try:
        return AutoTokenizer.from_pretrained(args.model_name_or_path, trust_remote_code=False)
    except (OSError, ValueError, KeyError):
        # vision models, and folders that hold a model alone: as if none had been passed
        return None
