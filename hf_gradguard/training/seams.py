"""Every private name of another library that the package relies on.

No release promises to keep a private name. `check_seams` runs when a Trainer is made, so that a
version that lacks one is refused by name, and not by a step that goes on without it.
"""

from __future__ import annotations

import dis
import inspect
import pkgutil
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any, NamedTuple


class Seam(NamedTuple):
    """A private name of another library.

    Args:
        owner: Of the name, as `"module:Class"`.
        name: What it is called there.
        used: The file that relies on it, and for what.
    """

    owner: str
    name: str
    used: str

    def holds(self) -> bool:
        """Whether the installed version has the name: as an attribute of the owner, or as one that
        its methods set.
        """
        try:
            owner = pkgutil.resolve_name(self.owner)
        except (ImportError, AttributeError):
            return False
        declared = getattr(owner, "__annotations__", {})
        return hasattr(owner, self.name) or self.name in declared or self._is_set_by(owner)

    def _is_set_by(self, owner: Any) -> bool:
        members = vars(owner).values()
        setters = [member.fset for member in members if isinstance(member, property)]
        return any(
            instruction.opname == "STORE_ATTR"
            for method in filter(inspect.isfunction, [*members, *setters])
            if self.name in method.__code__.co_names
            for instruction in dis.get_instructions(method)
            if instruction.argval == self.name
        )


_TRAINER, _MODULE, _CONFIG = (
    "transformers:Trainer",
    "torch.nn:Module",
    "transformers:PreTrainedConfig",
)
SEAMS = (
    Seam(_TRAINER, "_prepare_inputs", "training/mixin.py moves a batch to the device"),
    Seam(_TRAINER, "_get_dataloader", "training/adapter.py loads what a sampler of ours draws"),
    Seam(
        _TRAINER,
        "_remove_unused_columns",
        "training/adapter.py numbers the rows that are left",
    ),
    Seam(
        _TRAINER,
        "_get_collator_with_removed_columns",
        "training/adapter.py adds to a batch whose rows they are",
    ),
    Seam(_TRAINER, "_maybe_log_save_evaluate", "training/adapter.py logs leakage before a save"),
    Seam(
        _TRAINER,
        "_globalstep_last_logged",
        "training/adapter.py averages a loss that is logged",
    ),
    Seam(
        _TRAINER,
        "_get_num_items_in_batch",
        "training/adapter.py reduces the counts of labels that it gathers",
    ),
    Seam(
        _TRAINER,
        "_track_num_input_tokens",
        "training/adapter.py reduces the counts of tokens that it gathers",
    ),
    Seam(
        _TRAINER,
        "_save_rng_state",
        "training/adapter.py writes defenses' state to a checkpoint",
    ),
    Seam(_TRAINER, "_load_optimizer_and_scheduler", "training/adapter.py reads that state again"),
    Seam(
        _TRAINER,
        "_hp_search_setup",
        "training/adapter.py reads the settings when training begins",
    ),
    Seam(_TRAINER, "_save_checkpoint", "training/adapter.py marks complete checkpoints"),
    Seam(_TRAINER, "_push_from_checkpoint", "training/adapter.py pushes no private files"),
    Seam(
        "transformers.trainer",
        "hf_api",
        "training/checkpoints/complete.py leaves out private files",
    ),
    Seam(_TRAINER, "_get_output_dir", "training/adapter.py finds the folder of a checkpoint"),
    Seam(_TRAINER, "_load_from_checkpoint", "training/adapter.py finds renamed weights"),
    Seam(_TRAINER, "_load_best_model", "training/adapter.py finds renamed weights"),
    Seam(_TRAINER, "_issue_warnings_after_load", "training/adapter.py notices renamed weights"),
    Seam(
        "transformers:TrainingArguments",
        "_VALID_DICT_FIELDS",
        "training/config.py lets the command line give defense_kwargs as JSON",
    ),
    Seam(_CONFIG, "_attn_implementation", "gradient_map/replay.py finds fused attention"),
    Seam(_CONFIG, "_attn_implementation_internal", "gradient_map/replay.py sets plain attention"),
    *(
        Seam(
            f"torch.optim.lr_scheduler:{kind}",
            name,
            "training/learning_rate.py changes the rates of a schedule that was loaded",
        )
        for kind, name in (("LRScheduler", "_last_lr"), ("SequentialLR", "_schedulers"))
    ),
    Seam(_MODULE, "_compiled_call_impl", "training/guards/checks.py refuses compiled modules"),
    Seam("torch._dynamo", "OptimizedModule", "training/guards/checks.py refuses compiled models"),
    Seam(_MODULE, "_buffers", "gradient_map/replay.py keeps batch statistics as they were"),
    Seam(
        "torch.nn.modules.batchnorm",
        "_NormBase",
        "training/guards/batch_statistics.py and gradient_map/replay.py find batch statistics",
    ),
    Seam(
        "torch.nn.modules.instancenorm",
        "_InstanceNorm",
        "gradient_map/per_sample/clipping.py tells what mixes samples",
    ),
    Seam(
        "accelerate:Accelerator",
        "_dataloaders",
        "training/loop.py refuses loaders that dispatch",
    ),
    Seam("torch:UntypedStorage", "_cdata", "gradient_map/batch/tables.py tells storages apart"),
    Seam(
        "torch._ops:OpOverload",
        "_schema",
        "gradient_map/batch/tables.py sees what is written in place",
    ),
    Seam(
        "torch:Tensor",
        "_version",
        "gradient_map/map.py and training/guards/watch.py see that a tensor was written to",
    ),
    *(
        Seam(owner, name, "testing/facts.py sees that an attack or a defense left a hook")
        for owner, name in (
            (_MODULE, "_forward_hooks"),
            (_MODULE, "_forward_pre_hooks"),
            (_MODULE, "_backward_hooks"),
            (_MODULE, "_backward_pre_hooks"),
            ("torch:Tensor", "_backward_hooks"),
        )
    ),
)


class Reading(NamedTuple):
    """An attribute of another library that not every supported version has.

    Args:
        older: What it was called before.
        default: Its value where no version's name is there. `...`: it is refused.
        used: The file that reads it, and for what.
    """

    older: tuple[str, ...]
    default: Any
    used: str


READINGS = {
    "activation_checkpointing": Reading(
        ("gradient_checkpointing",), ..., "training/guards/checks.py refuses the reentrant kind"
    ),
    "activation_checkpointing_kwargs": Reading(
        ("gradient_checkpointing_kwargs",),
        ...,
        "training/guards/checks.py refuses the reentrant kind",
    ),
    "ddp_static_graph": Reading((), None, "training/guards/checks.py refuses a static graph"),
    "loss_is_scaled_for_ga": Reading((), None, "training/weights.py: what a Trainer's class says"),
    "_loss_shifts_labels": Reading((), False, "training/weights.py counts labels as the loss does"),
}


def read(owner: Any, name: str) -> Any:
    """An attribute of `READINGS`, by the name that the installed version has for it.

    Raises:
        ImportError: If it has none, and nothing may be taken for granted.

    Example:
        >>> from transformers import TrainingArguments
        >>> read(TrainingArguments("out"), "activation_checkpointing")
        False
    """
    reading = READINGS[name]
    for known in (name, *reading.older):
        if hasattr(owner, known):
            return getattr(owner, known)
    if reading.default is ...:
        raise ImportError(
            f"{type(owner).__name__} of transformers {version('transformers')} has no {name}, "
            f"which hf-gradguard relies on ({reading.used}). Install a version that hf-gradguard "
            "was made for: `pip install hf-gradguard` picks one."
        )
    return reading.default


def check_seams(seams: Iterable[Seam] = SEAMS) -> None:
    """Refuse installed versions that lack a private name.

    Raises:
        ImportError: With the name, what relies on it, and the way out.

    Example:
        >>> check_seams()
    """
    for seam in seams:
        if not seam.holds():
            library = seam.owner.split(":")[0].split(".")[0]
            raise ImportError(
                f"{library} {version(library)} has no {seam.name} in {seam.owner}, which "
                f"hf-gradguard relies on ({seam.used}). Install a version of {library} that "
                "hf-gradguard was made for: `pip install hf-gradguard` picks one."
            )
