"""The settings that a rank may choose for itself.

Ranks compare all others before they train.

A setting that a newer version of Transformers adds is compared until it is listed here. A rank that
waits for a message which no other rank sends waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from typing import Any

from transformers import TrainingArguments

from ..config import GradGuardConfig

_REASONS = {
    "Folders, names and accounts differ from one machine to the next": (
        "output_dir", "logging_dir", "run_name", "project", "trackio_space_id", "trackio_bucket_id",
        "trackio_static_space_id", "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id",
        "hub_strategy", "hub_always_push", "hub_revision", "save_total_limit", "save_on_each_node",
        "model_name_or_path", "secure_aggregation_keys", "resume_from_checkpoint",
    ),
    "Machines differ, and a message has the same form on all of them": (
        "local_rank", "use_cpu", "tf32", "torch_compile", "torch_compile_backend",
        "torch_compile_mode", "torch_empty_cache_steps", "use_liger_kernel", "liger_kernel_config",
        "activation_checkpointing", "activation_checkpointing_kwargs", "gradient_checkpointing",
        "gradient_checkpointing_kwargs", "use_cache", "eval_accumulation_steps", "ddp_timeout",
        "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
        "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order",
        "skip_memory_metrics",
    ),
    "A rank's own log reaches nobody else": (
        "report_to", "log_level", "log_level_replica", "log_on_each_node", "disable_tqdm",
        "logging_nan_inf_filter", "leakage_logging_steps", "leakage_num_probes", "private_metrics",
    ),
    "Each rank has data of its own, and draws from it in its own way": (
        "seed", "data_seed", "remove_unused_columns", "dataloader_drop_last", "length_column_name",
        "train_sampling_strategy",
    ),
    "Each rank protects its own data": (
        "defense", "defense_kwargs", "protect_labels", "label_epsilon", "private_dropout",
        "noise_seed", "check_received",
    ),
    "Scripts alone read them": ("do_train", "do_eval", "do_predict"),
    "They count where something follows them, which `agreed_upon` looks at": (
        "logging_steps", "save_steps", "eval_steps", "eval_delay", "per_device_eval_batch_size",
        "leakage_limit", "leakage_action", "clients_per_process", "partition", "dirichlet_alpha",
        "per_device_train_batch_size",
    ),
}  # fmt: skip
"""The reason, and the settings that it is a reason for."""
_NOT_COMPARED = {name for names in _REASONS.values() for name in names}


def compared_settings(args: TrainingArguments) -> dict[str, Any]:
    """Return the settings that must be the same on all ranks, with comparable values.

    Fields of a class of the user's own are not among them: a script's path or prompt is its own.

    Args:
        args: Training arguments of any kind. What they lack has `GradGuardConfig`'s default.

    Example:
        >>> settings = compared_settings(TrainingArguments("out", max_steps=3))
        >>> settings["max_steps"], "output_dir" in settings
        (3, False)
    """
    return {
        setting.name: _comparable(getattr(args, setting.name, _default(setting)))
        for setting in fields(GradGuardConfig)
        if setting.name not in _NOT_COMPARED
    }


def _default(setting: Field[Any]) -> Any:
    return None if setting.default is MISSING else setting.default


def _comparable(setting: Any) -> Any:
    """Return a value whose `repr` is the same in every process.

    An object counts by its class, since its own `repr` may name an address.
    """
    if isinstance(setting, Enum):
        return _comparable(setting.value)
    if setting is None or isinstance(setting, bool | int | float | str):
        return setting
    if isinstance(setting, Mapping):
        return sorted((str(name), _comparable(entry)) for name, entry in setting.items())
    if isinstance(setting, set | frozenset):
        return sorted(map(repr, map(_comparable, setting)))
    if isinstance(setting, Iterable):
        return [_comparable(entry) for entry in setting]
    if is_dataclass(setting) and not isinstance(setting, type):
        held = {field.name: getattr(setting, field.name) for field in fields(setting)}
        return type(setting).__qualname__, _comparable(held)
    return type(setting).__qualname__
