"""The rules by which `GradGuardTrainer` refuses a set-up, in one table.

Each rule has its condition, its reason and the way out.

A backend that exchanges gradients itself, or never holds a rank's whole local gradient, cannot be
protected from the outside. No training is better than training that only looks protected.

`RULES` lists all rules, and the second half of the file has their conditions. A rule without a
condition is raised by the code that finds out that it applies, by `refusal`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import DistributedType
from torch import nn
from torch._dynamo import OptimizedModule
from torch.utils.data import IterableDataset
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import ENV_VARS_TRUE_VALUES

from ..defenses import Defense
from ..defenses.dp import DPSGD
from ..leakage import FisherAccountant
from .config import setting
from .logs import warn_of_uploaded_console

Values = Mapping[str, object] | bool | str
"""Whether a rule applies. A mapping also has the values of the braces in the rule's texts."""


class UnsupportedError(NotImplementedError):
    """An error for a set-up that cannot be protected.

    Args:
        message: The text, which ends with the name of a rule in brackets. A worker of a data loader
            raises the error again by its text alone.

    Attributes:
        rule: The name of the rule, as `RULES` has it.

    Example:
        >>> check_arguments(TrainingArguments("out", ddp_static_graph=True))
        Traceback (most recent call last):
        hf_gradguard.training.refusals.UnsupportedError: ... Leave ddp_static_graph unset. [...]
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.rule = message.rstrip().removesuffix("]").rpartition("[")[2]


@dataclass(frozen=True)
class Rule:
    """One kind of set-up that is refused.

    Args:
        name: The name of the rule. An error's message ends with it.
        applies: The condition, a function of the set-up. Without one, the code that finds out that
            the rule applies raises its error.
        reason: The reason, which follows `opening` in the message and may have values in braces.
        way_out: The advice what to do instead, which may have values in braces, too.
        opening: The beginning of the message.

    Example:
        >>> rule = Rule("no-gpu", lambda count: count == 0, "a machine without a GPU:", "Buy one.")
        >>> str(rule.error())
        'GradGuardTrainer does not support a machine without a GPU: Buy one. [no-gpu]'
    """

    name: str
    applies: Callable[[Any], Values] | None
    reason: str
    way_out: str
    opening: str = "GradGuardTrainer does not support"

    def error(self, values: Values = True) -> UnsupportedError:
        """Return the error of this rule, whose message has the reason and the way out.

        Args:
            values: The values of the braces in the rule's texts.
        """
        text = " ".join(text for text in (self.opening, self.reason, self.way_out) if text)
        named = values if isinstance(values, Mapping) else {}
        return UnsupportedError(f"{text.format(**named)} [{self.name}]")


def refuse(rules: Iterable[Rule], subject: Any) -> None:
    """Raise the error of the first rule that applies.

    Args:
        rules: The rules, in the order in which they are asked.
        subject: The set-up that the rules' conditions look at.

    Raises:
        UnsupportedError: If a rule applies. The message has the reason and the way out.

    Example:
        >>> refuse(ARGUMENTS, TrainingArguments("out"))
    """
    for rule in rules:
        if rule.applies is not None and (values := rule.applies(subject)):
            raise rule.error(values)


def refusal(name: str, /, **values: object) -> UnsupportedError:
    """Return the error of a rule by the rule's name.

    Args:
        name: The name of the rule.
        **values: The values of the braces in the rule's texts.

    Example:
        >>> print(refusal("loss-that-exchanges", operation="gather"))
        GradGuardTrainer does not support a loss that calls accelerator.gather: ... [loss-th...]
    """
    return _BY_NAME[name].error(values)


# Texts that several rules share

_ENGINE = "DeepSpeed: its engine owns the backward pass, and reduces inside it."
_REPLICAS = "Use DDP alone."
_SIZES = (
    "FSDP without the size of a client: Accelerate would shard over all ranks, or average true "
    "gradients over clients.",
    "Pass parallelism_config=ParallelismConfig(dp_replicate_size=clients, dp_shard_size=devices of "
    "each), of accelerate, with at least two of both; use DDP if each device is a client, with "
    "LoRA or activation checkpointing if the model does not fit.",
)
_REENTRANT = (
    "reentrant activation checkpointing: it cannot run under torch.autograd.grad.",
    "Set activation_checkpointing_kwargs={{'use_reentrant': False}}, or pass that to the model's "
    "gradient_checkpointing_enable.",
)
_STATIC_GRAPH = (
    "a static DDP graph: it expects a backward pass through DDP at every step, and there is none.",
    "Leave ddp_static_graph unset.",
)
_COMPILE = (
    "torch.compile: compiled code does not run the hooks by which inputs and the tables that they "
    "index are found, and its second derivatives silently come back as None.",
    "Of a Trainer set torch_compile=True, and pass the model as it was before compiling.",
)
_PADDING_FREE = (
    "padding-free batches of several clients: all texts are one row, so that nothing says whose a "
    "token is.",
    "Pad (DataCollatorWithPadding, DataCollatorForSeq2Seq, padding_free=False), or give each rank "
    "one client: clients_per_process=1, num_clients left out.",
)
_SEES_BOTH = (
    "Remove it (the handle's remove()). Work on the protected gradient in "
    "Tensor.register_post_accumulate_grad_hook or the optimizer's register_step_pre_hook, and on "
    "the true one in the loss (compute_loss) or in a Defense."
)

# Training arguments


def _sharded(condition: Callable[[Any, Mapping[str, Any]], object]) -> Callable[[Any], bool]:
    """Ask arguments of clients that have several devices, and the settings of their engine."""
    return lambda args: bool(args.fsdp and condition(args, args.fsdp_plugin_args))


def _engine_has(name: str) -> Callable[[Any], bool]:
    return _sharded(lambda args, engine: engine.get(name))


ARGUMENTS = (
    Rule("deepspeed", lambda args: bool(args.deepspeed), _ENGINE, _REPLICAS),
    Rule(
        "shard-size-without-fsdp",
        lambda args: not args.fsdp and sizes_of(args)[1] > 1,
        "dp_shard_size without FSDP: nothing would be sharded, and each device would be a client.",
        "Set fsdp=True as well, or leave parallelism_config out.",
    ),
    Rule("fsdp-sizes", lambda args: bool(args.fsdp) and min(sizes_of(args)) < 2, *_SIZES),
    Rule(
        "fsdp-transformers",
        lambda args: bool(args.fsdp) and getattr(args, "fsdp_plugin_args", None) is None,
        "FSDP with this version of Transformers.",
        "Take 5.23 or later, or DDP.",
    ),
    Rule(
        "fsdp-version",
        _sharded(lambda args, engine: engine.get("fsdp_version") != 2),
        "the first FSDP, which keeps no parameter by itself: nothing can be protected by name.",
        "Leave 'version' out of fsdp_config.",
    ),
    Rule(
        "fsdp-state-dict",
        _sharded(
            lambda args, engine: (
                engine.get("state_dict_type", "FULL_STATE_DICT") != "FULL_STATE_DICT"
            )
        ),
        "checkpoints in shards (state_dict_type): whether they are complete cannot be told.",
        "Take 'FULL_STATE_DICT', the Trainer's default.",
    ),
    Rule(
        "fsdp-cpu-ram-efficient-loading",
        _engine_has("cpu_ram_efficient_loading"),
        "cpu_ram_efficient_loading: rank 0 would load the model for all, so that no client could "
        "compare what it received with what it loaded.",
        "Leave it out of fsdp_config.",
    ),
    Rule(
        "fsdp-cpu-offload",
        _engine_has("cpu_offload"),
        "FSDP with cpu_offload: gradients would be exchanged from where they are not.",
        "Leave it out of fsdp_config; take more devices a client.",
    ),
    Rule(
        "fsdp-activation-checkpointing",
        _engine_has("activation_checkpointing"),
        "activation_checkpointing in fsdp_config: it renames parameters.",
        "Set activation_checkpointing=True in the arguments.",
    ),
    Rule(
        "fsdp-best-model",
        _sharded(lambda args, _: args.save_only_model and args.load_best_model_at_end),
        "FSDP with save_only_model and load_best_model_at_end:",
        "leave one of them out.",
    ),
    Rule(
        "fsdp-auto-batch-size",
        _sharded(lambda args, _: args.auto_find_batch_size),
        "FSDP with auto_find_batch_size: devices would not find the same.",
        "Set a batch size.",
    ),
    Rule(
        "fsdp-compile",
        _sharded(lambda args, _: args.torch_compile),
        "torch.compile with FSDP: compiled code does not run the hooks by which a client's devices "
        "gather and scatter.",
        "Leave torch_compile off.",
    ),
    Rule(
        "fsdp-fp16",
        _sharded(lambda args, _: args.fp16),
        "fp16 with FSDP: devices would scale their parts apart.",
        "Use bf16=True.",
    ),
    Rule(
        "fsdp-clients",
        _sharded(
            lambda args, _: (
                setting(args, "num_clients") is not None or setting(args, "clients_per_process") > 1
            )
        ),
        "num_clients or clients_per_process with clients of several devices: a process holds a "
        "part of one client.",
        "Leave it out.",
    ),
    Rule(
        "fsdp-secure-aggregation",
        _sharded(lambda args, _: setting(args, "secure_aggregation")),
        "secure_aggregation with clients of several devices: it masks what processes hold, not "
        "what clients do.",
        "Give each client one device.",
    ),
    Rule(
        "fsdp-protect-labels",
        _sharded(lambda args, _: setting(args, "protect_labels") is not None),
        "protect_labels with clients of several devices: each would draw a row's label anew, so "
        "that ε would be larger than stated.",
        "Randomize labels before, or give each client one device.",
    ),
    Rule(
        "fsdp-batch-statistics",
        _sharded(lambda args, _: setting(args, "batch_statistics") == "shared"),
        "batch_statistics='shared' with clients of several devices: they are of one device's rows.",
        "Take 'frozen'.",
    ),
    Rule(
        "fsdp-leakage",
        _sharded(
            lambda args, _: (
                setting(args, "leakage_logging_steps") or setting(args, "leakage_limit") is not None
            )
        ),
        "leakage_logging_steps or leakage_limit with clients of several devices: no device holds "
        "the whole map that they are computed from.",
        "Audit a smaller model of the kind.",
    ),
    Rule(
        "activation-offloading",  # of TRL's arguments, as the next one
        lambda args: bool(getattr(args, "activation_offloading", False)),
        "activation_offloading: it is entered in a training step that does not run.",
        "Use activation checkpointing.",
    ),
    Rule(
        "reference-log-probs",
        lambda args: getattr(args, "precompute_ref_log_probs", False) and args.world_size > 1,
        "precompute_ref_log_probs on several ranks: every rank would be sent the reference's "
        "log-probabilities of all ranks' texts.",
        "Leave it out.",
    ),
    Rule(
        "layerwise-optimizer",
        lambda args: "layerwise" in _value(args.optim),
        "layerwise optimizers: they step inside the backward pass, of which there is none, so "
        "nothing would be trained.",
        "Use the optimizer of the same name without _layerwise.",
    ),
    Rule(
        "lomo",
        lambda args: "lomo" in _value(args.optim),
        "LOMO optimizers: they update weights inside the backward pass, before the gradient is "
        "whole.",
        "Use optim='adamw_torch'.",
    ),
    Rule(
        "static-graph",
        lambda args: bool(getattr(args, "ddp_static_graph", None)),
        *_STATIC_GRAPH,
    ),
    Rule("reentrant-checkpointing", lambda args: _checkpoints_reentrantly(args), *_REENTRANT),
    Rule(
        "pushed-checkpoints",
        lambda args: (
            args.push_to_hub
            and _value(args.hub_strategy) not in ("end", "every_save")
            and {"strategy": _value(args.hub_strategy)}
        ),
        "hub_strategy='{strategy}': a checkpoint holds the defense's private state, and pushing it "
        "publishes that.",
        "Use 'end' or 'every_save'.",
    ),
    Rule(
        "data-parallel",
        lambda args: args.n_gpu > 1 and {"devices": args.n_gpu},
        "DataParallel ({devices} GPUs in one process): its replicas' gradients are summed before "
        "they can be seen.",
        "Launch one process a GPU (accelerate launch --multi_gpu), or show one GPU with "
        "CUDA_VISIBLE_DEVICES=0.",
    ),
)


def check_arguments(args: TrainingArguments) -> None:
    """Refuse training arguments that cannot be protected.

    Raises:
        UnsupportedError: If a rule applies. The message has the reason and the way out.

    Example:
        >>> check_arguments(TrainingArguments("out", ddp_static_graph=True))
        Traceback (most recent call last):
        hf_gradguard.training.refusals.UnsupportedError: GradGuardTrainer does not support a ...
    """
    refuse(ARGUMENTS, args)


def sizes_of(args: TrainingArguments) -> tuple[int, int]:
    """Return how many clients there are, and how many devices each of them has.

    The arguments say it, or else Accelerate's launcher does.

    Example:
        >>> sizes_of(TrainingArguments("out"))
        (1, 1)
    """
    sizes = getattr(args, "parallelism_config", None)
    if sizes is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "") == "true":
        from accelerate import ParallelismConfig

        sizes = ParallelismConfig()
    return (1, 1) if sizes is None else (sizes.dp_replicate_size, sizes.dp_shard_size)


def _value(choice: Any) -> str:
    """What an argument names, which may be one of an enumeration."""
    return str(getattr(choice, "value", choice))


def _checkpoints_reentrantly(args: TrainingArguments) -> bool:
    # Older versions say gradient_checkpointing; one that says neither must not pass unnoticed.
    word = "activation" if hasattr(args, "activation_checkpointing") else "gradient"
    settings = getattr(args, f"{word}_checkpointing_kwargs") or {}
    return bool(getattr(args, f"{word}_checkpointing") and settings.get("use_reentrant"))


# Models


class Model(NamedTuple):
    """A model, and whether each of a client's devices is to protect its own part of it."""

    module: nn.Module
    sharded: bool


MODELS = (
    Rule(
        "wrapped-model",
        lambda model: (
            isinstance(model.module, nn.DataParallel | nn.parallel.DistributedDataParallel)
            and {"wrapper": type(model.module).__name__}
        ),
        "a model wrapped in {wrapper}.",
        "Pass the module inside it.",
    ),
    Rule(
        "compiled-model",
        lambda model: any(
            isinstance(module, OptimizedModule) or module._compiled_call_impl
            for module in model.module.modules()
        ),
        *_COMPILE,
    ),
    Rule(
        "reentrant-model",
        lambda model: any(map(_recomputes_reentrantly, model.module.modules())),
        *_REENTRANT,
    ),
    Rule(
        "synchronized-batch-norm",
        lambda model: any(isinstance(m, nn.SyncBatchNorm) for m in model.module.modules()),
        "SyncBatchNorm: it exchanges the statistics of every batch, and gradients of them, "
        "unprotected within each pass.",
        "Use plain batch normalization (see batch_statistics) or group normalization.",
    ),
    Rule(
        "sharded-model",
        lambda model: _is_cut(model),
        "models sharded at load time (tp_plan, distributed_config): no rank holds a whole local "
        "gradient.",
        "Load the whole model on every rank; or cut it by fully_shard in a loop of your own, with "
        "hf_gradguard.protect.",
    ),
    Rule(
        "model-on-several-devices",
        lambda model: (
            len({p.device for p in model.module.parameters()}) > 1
            or len(set((getattr(model.module, "hf_device_map", None) or {}).values())) > 1
        ),
        "a model spread over several devices.",
        "Load it whole on one: from_pretrained without device_map='auto'.",
    ),
)


def check_model(model: nn.Module, sharded: bool = False) -> None:
    """Refuse models whose local gradient or second derivatives are out of reach.

    Args:
        model: The model.
        sharded: Whether each of a client's devices is to protect its own part of it.

    Raises:
        UnsupportedError: If a rule applies. The message has the reason and the way out.

    Example:
        >>> check_model(nn.DataParallel(model))
        Traceback (most recent call last):
        hf_gradguard.training.refusals.UnsupportedError: ... a model wrapped in DataParallel. ...
    """
    refuse(MODELS, Model(model, sharded))


def _recomputes_reentrantly(module: nn.Module) -> bool:
    """Whether Transformers checkpoints a module's activations in a backward pass inside another."""
    if not getattr(module, "gradient_checkpointing", False):
        return False
    settings = getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", {})
    return bool(settings.get("use_reentrant", False))


def _is_cut(model: Model) -> bool:
    """Whether no rank holds the whole model, though a Trainer is not told to protect parts."""
    from torch.distributed.tensor import DTensor  # which takes a while to load

    if getattr(model.module, "is_distributed_loading_by_transformers", False):
        return True
    return not model.sharded and any(isinstance(p, DTensor) for p in model.module.parameters())


# Who trains together


class Ranks(NamedTuple):
    """The ranks that train together, and on what.

    The defense is a Trainer's, which compiles the model and unscales losses itself; a loop of the
    user's own has none here.
    """

    accelerator: Accelerator
    train_dataset: Any
    defense: Defense | None


_REPLICATED = {
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_NPU,
    DistributedType.MULTI_XPU,
}
DISPATCHED = Rule(
    "dispatched-batches",
    lambda ranks: _dispatches(ranks),
    "dispatched batches: rank 0 would read everybody's data and send it, unprotected, to the other "
    "ranks, as Accelerate does by default with iterable data sets.",
    "Set accelerator_config={{'dispatch_batches': False}}; in a loop of your own "
    "Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False)).",
)
SHARDED_DEFENSE = Rule(
    "sharded-defense",
    lambda ranks: (
        ranks.accelerator.distributed_type == DistributedType.FSDP
        and reason_of_sharding(ranks.defense)
    ),
    "{kind} ({name}) does not protect a sharded model:",
    "{reason}",
    opening="",
)
RANKS = (
    Rule(
        "deepspeed-engine",
        lambda ranks: ranks.accelerator.distributed_type == DistributedType.DEEPSPEED,
        _ENGINE,
        _REPLICAS,
    ),
    Rule(
        "fsdp-engine",
        lambda ranks: (
            ranks.accelerator.distributed_type == DistributedType.FSDP
            and (ranks.defense is None or not hasattr(ranks.accelerator, "shards_of"))
        ),
        *_SIZES,
    ),
    SHARDED_DEFENSE,
    Rule(
        "distributed-type",
        lambda ranks: (
            ranks.accelerator.distributed_type not in _REPLICATED | {DistributedType.FSDP}
            and {"kind": ranks.accelerator.distributed_type}
        ),
        "distributed type {kind}: only whole replicas, one process a device, can be protected.",
        "Use DDP.",
    ),
    Rule(
        "fp8",
        lambda ranks: ranks.accelerator.mixed_precision == "fp8",
        "fp8: its kernels scale gradients by factors of their own.",
        "Use bf16=True.",
    ),
    Rule(
        "fp16-loop",
        lambda ranks: ranks.accelerator.mixed_precision == "fp16" and ranks.defense is None,
        "fp16 in a loop of your own: the loss scaler multiplies gradients by a factor that noise "
        "and clipping would not know.",
        "Use bf16=True, or a Trainer, which unscales before it protects.",
    ),
    Rule(
        "fp16-defense",
        lambda ranks: ranks.accelerator.mixed_precision == "fp16" and _asks_more(ranks.defense),
        "fp16 with {name}: {needs} A scaled loss gives the gradient alone.",
        "Use bf16=True; or gaussian_noise, laplace_noise, pruning, quantization, or dp_sgd without "
        "per_sample.",
    ),
    Rule("compiled-loop", lambda ranks: _compiles(ranks) and ranks.defense is None, *_COMPILE),
    Rule(
        "regional-compilation",
        lambda ranks: (
            _compiles(ranks)
            and getattr(ranks.accelerator.state.dynamo_plugin, "use_regional_compilation", False)
        ),
        "regional compilation:",
        "leave use_regional_compilation off; torch_compile works.",
    ),
    Rule(
        "compiled-defense",
        lambda ranks: _compiles(ranks) and _asks_more(ranks.defense),
        "torch.compile with {name}: {needs} Compiled code does not run the hooks for that, and its "
        "second derivatives silently come back as None.",
        "Leave torch_compile off, or take gaussian_noise, laplace_noise, pruning, quantization, or "
        "dp_sgd without per_sample.",
    ),
    Rule(
        "parallelism",
        lambda ranks: (
            (sizes := getattr(ranks.accelerator, "parallelism_config", None)) is not None
            and max(sizes.tp_size, sizes.cp_size, sizes.sp_size) > 1
        ),
        "tensor, context or sequence parallelism: no rank holds a whole local gradient.",
        _REPLICAS,
    ),
    Rule(
        "static-graph-handler",
        lambda ranks: (
            ranks.accelerator.ddp_handler is not None and ranks.accelerator.ddp_handler.static_graph
        ),
        *_STATIC_GRAPH,
    ),
    Rule(
        "communication-hook",
        lambda ranks: (
            _value(getattr(ranks.accelerator.ddp_handler, "comm_hook", None) or "no") != "no"
        ),
        "DDP communication hooks: protected gradients are averaged by the Trainer, not by DDP, so "
        "the hook would never run.",
        "Leave comm_hook unset.",
    ),
    DISPATCHED,
)


def check_accelerator(
    accelerator: Accelerator, train_dataset: Any = None, defense: Defense | None = None
) -> None:
    """Refuse distributed set-ups that exchange more than protected gradients.

    Args:
        accelerator: The accelerator of the ranks.
        train_dataset: The data set that the ranks train on.
        defense: The defense of a Trainer, which compiles the model itself. It is `None` in a user's
            own loop.

    Raises:
        UnsupportedError: If a rule applies. The message has the reason and the way out.

    Example:
        >>> check_accelerator(Accelerator(cpu=True))
    """
    refuse(RANKS, Ranks(accelerator, train_dataset, defense))


def check_training(
    args: TrainingArguments,
    model: nn.Module,
    accelerator: Accelerator,
    train_dataset: Any,
    defense: Defense,
) -> None:
    """Refuse arguments, a model or ranks that cannot be protected.

    Raises:
        UnsupportedError: If a rule applies. The message has the reason and the way out.

    Example:
        >>> args, noise = TrainingArguments("out"), make_defense("gaussian_noise")
        >>> check_training(args, model, Accelerator(cpu=True), None, noise)
    """
    check_arguments(args)
    check_model(model, sharded=bool(args.fsdp))
    check_accelerator(accelerator, train_dataset, defense)


def check_loader(loader: Any) -> None:
    """Refuse a data loader that dispatches, also where a class of the user's own made it.

    Raises:
        UnsupportedError: If a rule applies. The message has the reason and the way out.

    Example:
        >>> check_loader(torch.utils.data.DataLoader([1, 2]))
    """
    if isinstance(loader, DataLoaderDispatcher):
        raise DISPATCHED.error()


def beyond_gradient(defense: Defense) -> str:
    """Return what a defense asks for beyond the batch's gradient; an empty text if nothing.

    Example:
        >>> beyond_gradient(make_defense("soteria")), beyond_gradient(make_defense("pruning"))
        ('it asks how the gradient depends on the input.', '')
    """
    facts = defense.facts
    if facts.needs_samples:
        return "it asks for what each sample adds to the gradient."
    if facts.needs_second_order or facts.needs_input:
        return "it asks how the gradient depends on the input."
    return ""


def reason_of_sharding(defense: Defense) -> Values:
    """Return why a defense does not protect a sharded model; `False` if it does.

    The reason is one of the values of the rule `sharded-defense`.

    Example:
        >>> reason_of_sharding(make_defense("gaussian_noise"))
        False
        >>> reason_of_sharding(make_defense("refiner"))["kind"]
        'Refiner'
    """
    if not (reason := defense.facts.sharded_refusal):
        return False
    return {"kind": type(defense).__name__, "name": defense.name, "reason": reason}


def _asks_more(defense: Defense) -> Values:
    needs = beyond_gradient(defense)
    return bool(needs) and {"name": defense.name, "needs": needs}


def _compiles(ranks: Ranks) -> bool:
    plugin = ranks.accelerator.state.dynamo_plugin
    return str(getattr(plugin.backend, "value", "NO")).upper() != "NO"


def _dispatches(ranks: Ranks) -> bool:
    if ranks.accelerator.num_processes == 1:
        return False
    dispatches = ranks.accelerator.dataloader_config.dispatch_batches
    return is_iterable(ranks.train_dataset) if dispatches is None else bool(dispatches)


def is_iterable(dataset: Any) -> bool:
    """Return whether a data set is a stream, which has no rows that could be drawn.

    Example:
        >>> is_iterable([1, 2])
        False
    """
    return isinstance(dataset, IterableDataset) or is_of_datasets(dataset, "IterableDataset")


def is_of_datasets(data: Any, *kinds: str) -> bool:
    """Return whether data is of these classes of the library `datasets`.

    The library need not be installed.

    Example:
        >>> is_of_datasets([1, 2], "Dataset")
        False
    """
    library = sys.modules.get("datasets")  # who holds an object of it has imported it
    return library is not None and isinstance(data, tuple(getattr(library, k) for k in kinds))


# Leakage that is limited, logged or accounted for


class Measured(NamedTuple):
    """A request to measure messages, and of which.

    Args:
        args: The training arguments, whose `leakage_*` and `use_liger_kernel` count.
        defense: The defense of the messages.
        accountant: The accountant of the Trainer's messages, if there is one.
        own_batches: Whether the Trainer's class draws its batches in its own way.
        train_dataset: The data set by whose rows an accountant knows the examples.
    """

    args: TrainingArguments
    defense: Defense
    accountant: FisherAccountant | None = None
    own_batches: bool = False
    train_dataset: Any = None

    @property
    def has_limit(self) -> bool:
        """Whether messages that leak too much are kept back."""
        return setting(self.args, "leakage_limit") is not None

    @property
    def measures(self) -> bool:
        """Whether any message's leakage is estimated."""
        logs = bool(setting(self.args, "leakage_logging_steps"))
        return logs or self.has_limit or self.accountant is not None

    @property
    def accounts_by_rate(self) -> bool:
        """Whether an account is of batches that are drawn at a rate."""
        return self.accountant is not None and self.accountant.noise_multiplier is not None


LEAKAGE = (
    Rule(
        "liger-twice",
        lambda measured: (
            measured.args.use_liger_kernel
            and (measured.measures or measured.defense.facts.needs_second_order)
            and {"name": measured.defense.name}
        ),
        "Liger kernels where anything differentiates twice: their fused losses compute gradients "
        "in the forward pass, so second derivatives are silently wrong.",
        "Set use_liger_kernel=False; or use a defense that differentiates once (noise, pruning, "
        "quantization; {name} may not), with no leakage_logging_steps, leakage_limit or "
        "accountant.",
    ),
    Rule(
        "fp16-summed-noise",
        lambda measured: measured.args.fp16 and setting(measured.args, "noise_for") == "sum",
        "fp16 with noise_for='sum': one rank's overflow would leave its part of the noise out.",
        "Use bf16=True, or noise_for='message'.",
    ),
    Rule(
        "fp16-leakage",
        lambda measured: measured.args.fp16 and measured.measures,
        "fp16 with leakage_logging_steps, leakage_limit or an accountant: they differentiate "
        "twice, where a scaled loss gives the gradient alone.",
        "Use bf16=True.",
    ),
    Rule(
        "leakage-of-unknown-noise",
        lambda measured: (
            (measured.has_limit or measured.accountant is not None)
            and not measured.defense.facts.adds_gaussian_noise
            and {
                "setting": "leakage_limit" if measured.has_limit else "an accountant",
                "name": measured.defense.name,
            }
        ),
        "{setting} with {name}: it adds no Gaussian noise of known covariance to the true "
        "gradient, so there is no Fisher information to bound or to add up.",
        "Use gaussian_noise, optimal_noise, dp_sgd or optimal_dp_sgd, alone, first in a chain, or "
        "after pruning. leakage_logging_steps logs leakage/i2f_lower_bound for every defense.",
    ),
    Rule(
        "account-of-shuffled-epochs",
        lambda measured: measured.accounts_by_rate and not measured.own_batches,
        "an accountant with a sampling rate: its factor κ is for batches that are drawn afresh at "
        "every step, and the Trainer shuffles epochs.",
        "Leave sampling_rate, noise_multiplier and delta out, or override get_train_dataloader "
        "with one that draws afresh.",
    ),
    Rule(
        "account-of-little-noise",
        lambda measured: measured.accounts_by_rate and _falls_short(measured),
        "an accountant with noise_multiplier={multiplier:g}: its factor κ needs a message that one "
        "example cannot move by more than a multiple of the noise, and here that gives at most "
        "{most:g}.",
        "Use dp_sgd with clip_by='norm' and scale=noise_multiplier*clip, or leave the three "
        "arguments out.",
    ),
    Rule(
        "account-of-unnumbered-rows",
        lambda measured: measured.accountant is not None and is_iterable(measured.train_dataset),
        "an accountant with an iterable data set: its rows have no numbers, and by its content an "
        "example that is augmented or masked anew would be another one at every visit.",
        "Use a data set with rows (datasets: load it without streaming).",
    ),
    Rule(
        "fsdp-accountant",
        lambda measured: measured.accountant is not None and bool(measured.args.fsdp),
        "an accountant with clients of several devices: no device holds the whole map that Fisher "
        "information is computed from.",
        "Leave it out, or give each client one device.",
    ),
)


def check_leakage(measured: Measured) -> None:
    """Refuse limits and accounts that nothing could keep.

    Second derivatives through kernels that have none are refused, too.

    Args:
        measured: The request of what is to be measured.

    Raises:
        UnsupportedError: If a rule applies. The message has the reason and the way out.

    Example:
        >>> from hf_gradguard import GradGuardConfig
        >>> limited = GradGuardConfig("out", leakage_limit=0.1)
        >>> check_leakage(Measured(limited, make_defense("pruning")))
        Traceback (most recent call last):
        hf_gradguard.training.refusals.UnsupportedError: ... leakage_limit with pruning: ...
    """
    refuse(LEAKAGE, measured)


def _falls_short(measured: Measured) -> Values:
    """Say by what a defense's noise is less than an account takes it to be."""
    accountant, defense, most = measured.accountant, measured.defense, 0.0
    multiplier = 0.0 if accountant is None else accountant.noise_multiplier or 0.0
    if isinstance(defense, DPSGD) and defense.clip_by == "norm" and defense.scale is not None:
        most = defense.scale / defense.clip
    return multiplier > most * (1 + 1e-9) and {"multiplier": multiplier, "most": most}


# Trackers. They belong to Transformers and come by `report_to`, which takes all that are installed
# where it says so, or by `callbacks`. The variables that decide are theirs.

_YES = frozenset(ENV_VARS_TRUE_VALUES)  # of any case, as Transformers reads them
_CHECKPOINTS = "checkpoints, which hold the defense's private state"


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


@dataclass(frozen=True)
class Upload:
    """An upload that a callback makes, and under which setting.

    Args:
        callback: The name of the callback's class, or of one of its bases.
        setting: A function that returns the setting by which a callback uploads; an empty text if
            it does not upload.
    """

    callback: str
    setting: Callable[[Any], str]

    def __call__(self, callback: TrainerCallback) -> Values:
        """Say which setting uploads, as values of a rule, if one does."""
        kinds = {kind.__name__ for kind in type(callback).__mro__}
        setting = self.setting(callback) if self.callback in kinds else ""
        return bool(setting) and {"setting": setting}


def _upload(
    name: str, callback: str, setting: Callable[[Any], str], entries: str, way_out: str
) -> Rule:
    reason = f"{{setting}}: {callback} would upload {entries}."
    return Rule(name, Upload(callback, setting), reason, way_out)


TRACKERS = (
    _upload(
        "wandb-watch",
        "WandbCallback",
        _variable("WANDB_WATCH", frozenset({"GRADIENTS", "ALL"})),
        "histograms of the true gradient, which hooks on parameters get",
        "Set WANDB_WATCH=false.",
    ),
    _upload(
        "wandb-checkpoints",
        "WandbCallback",
        _variable("WANDB_LOG_MODEL", frozenset({"CHECKPOINT"})),
        _CHECKPOINTS,
        "Set WANDB_LOG_MODEL=end, for the model alone, or false.",
    ),
    _upload(
        "comet-checkpoints", "CometCallback", _variable("COMET_LOG_ASSETS", _YES), _CHECKPOINTS,
        "Set COMET_LOG_ASSETS=false.",
    ),
    _upload(
        "mlflow-checkpoints", "MLflowCallback", _variable("HF_MLFLOW_LOG_ARTIFACTS", _YES),
        _CHECKPOINTS,
        "Set HF_MLFLOW_LOG_ARTIFACTS=false.",
    ),
    _upload(
        "dagshub-folder", "DagsHubCallback", _variable("HF_DAGSHUB_LOG_ARTIFACTS", _YES),
        "the output folder, whose checkpoints hold the defense's private state, and the data",
        "Set HF_DAGSHUB_LOG_ARTIFACTS=false.",
    ),
    _upload(
        "clearml-checkpoints", "ClearMLCallback", _variable("CLEARML_LOG_MODEL", _YES, "TRUE"),
        _CHECKPOINTS,
        "Set CLEARML_LOG_MODEL=false.",
    ),
    _upload(
        "neptune-checkpoints", "NeptuneCallback",
        _argument("log_checkpoints", lambda which: which is not None),
        _CHECKPOINTS,
        "Leave log_checkpoints out.",
    ),
    _upload(
        "dvclive-checkpoints", "DVCLiveCallback",
        _argument("log_model", lambda which: which == "all"),
        _CHECKPOINTS,
        "Use log_model=True (HF_DVCLIVE_LOG_MODEL=true), for the model alone.",
    ),
    _upload(
        "flyte-checkpoints", "FlyteCallback", _argument("sync_checkpoints", bool), _CHECKPOINTS,
        "Use sync_checkpoints=False.",
    ),
    _upload(
        "flyte-history", "FlyteCallback", _argument("save_log_history", bool),
        "the history in memory, with figures of single messages and true gradients",
        "Use save_log_history=False.",
    ),
)  # fmt: skip


def check_trackers(callbacks: Iterable[TrainerCallback]) -> None:
    """Refuse callbacks that would upload more than may leave the rank.

    A warning says so if one uploads what the rank prints.

    Args:
        callbacks: The callbacks of the Trainer.

    Raises:
        UnsupportedError: If a callback would. The message has what it would upload, and the setting
            that prevents it.

    Example:
        >>> from transformers import PrinterCallback
        >>> check_trackers([PrinterCallback()])
    """
    callbacks = list(callbacks)
    warn_of_uploaded_console(callbacks)
    for callback in callbacks:
        refuse(TRACKERS, callback)


# Classes of Trainers, their losses and their batches


class Drawing(NamedTuple):
    """A Trainer whose rows are drawn by the package."""

    trainer: Trainer
    mixin: type
    drawn_by: str


DRAWING = (
    Rule(
        "own-sampler",
        lambda drawing: (
            (
                "_get_train_sampler" in vars(drawing.trainer)
                or _overrides(type(drawing.trainer), drawing.mixin, "_get_train_sampler")
            )
            and {"drawn_by": drawing.drawn_by}
        ),
        "_get_train_sampler with {drawn_by}, which draws rows in its own way: rows that the "
        "sampler leaves out would be trained on.",
        "Leave them out of train_dataset (select, filter), and leave _get_train_sampler as it is.",
    ),
    Rule(
        "auto-batch-size",
        lambda drawing: (
            drawing.trainer.args.auto_find_batch_size and {"drawn_by": drawing.drawn_by}
        ),
        "auto_find_batch_size with {drawn_by}: another batch size would be another sampling rate, "
        "and other shares of clients, within a training.",
        "Find the size first, and set per_device_train_batch_size.",
    ),
)
_STEPS = {("trl", name) for name in ("SFTTrainer", "DPOTrainer", "RewardTrainer", "KTOTrainer")}
"""Trainers whose own training step only enters a context, of offloading, that is refused."""
PADDING_FREE = Rule(
    "padding-free",
    lambda collator: isinstance(collator, DataCollatorWithFlattening),
    *_PADDING_FREE,
)
LOSSES = (
    Rule(
        "gathering-loss",
        lambda loss: (
            isinstance(loss, nn.Module)
            and any(getattr(m, "gather_across_devices", False) for m in loss.modules())
            and {"kind": type(loss).__name__}
        ),
        "{kind} with gather_across_devices=True: every rank would be sent all ranks' embeddings, "
        "unprotected.",
        "Leave it at False.",
    ),
)
CLASSES = (
    Rule(
        "own-training-step",
        lambda base: (
            "training_step" in vars(base)
            and (base.__module__.split(".")[0], base.__name__) not in _STEPS
            and {"base": base.__name__}
        ),
        "{base}: its own training_step would not run.",
        "Change the loss in compute_loss, or call hf_gradguard.protect in a loop of your own.",
        opening="GradGuardMixin does not support",
    ),
)


def check_order(trainer_class: type, mixin: type) -> None:
    """Refuse a class in which the mixin would not protect.

    Another Trainer may come before the mixin in its bases, or have a training step of its own.

    Args:
        trainer_class: A subclass of the mixin.
        mixin: The class `GradGuardMixin`.

    Raises:
        TypeError: If another Trainer comes before the mixin.
        UnsupportedError: If a Trainer has a training step of its own.

    Example:
        >>> from transformers import Seq2SeqTrainer
        >>> from hf_gradguard import GradGuardMixin
        >>> class Wrong(Seq2SeqTrainer, GradGuardMixin):
        ...     pass
        Traceback (most recent call last):
        TypeError: Wrong: GradGuardMixin has to stand before Seq2SeqTrainer, ...
    """
    order = trainer_class.__mro__
    place = order.index(mixin)
    for base in order[:place]:
        if issubclass(base, Trainer) and not issubclass(base, mixin):
            raise TypeError(
                f"{trainer_class.__name__}: GradGuardMixin has to stand before {base.__name__}, "
                "whose methods would run in the place of those that protect. Write "
                f"class {trainer_class.__name__}(GradGuardMixin, {base.__name__})."
            )
    for base in order[place + 1 : order.index(Trainer)]:
        refuse(CLASSES, base)


def draws_batches(trainer_class: type, mixin: type) -> bool:
    """Return whether a Trainer's class, or a base of it, draws training batches in its own way.

    Example:
        >>> from hf_gradguard import GradGuardMixin, GradGuardTrainer
        >>> draws_batches(GradGuardTrainer, GradGuardMixin)
        False
    """
    return _overrides(trainer_class, mixin, "get_train_dataloader")


def check_drawing(trainer: Trainer, mixin: type, drawn_by: str) -> None:
    """Refuse a user's own sampler, or changes of the batch size, if the package draws rows.

    Rows that the sampler excludes would be trained on all the same.

    Args:
        trainer: The Trainer, whose class, attributes and arguments are looked at.
        mixin: The class `GradGuardMixin`.
        drawn_by: The name of the setting by which the package draws rows.

    Raises:
        UnsupportedError: If there is such a sampler or change. The message has the way out.

    Example:
        >>> from hf_gradguard import GradGuardMixin, GradGuardTrainer
        >>> check_drawing(GradGuardTrainer(model, defense="none"), GradGuardMixin, "num_clients")
    """
    refuse(DRAWING, Drawing(trainer, mixin, drawn_by))


def check_collator(collator: Any) -> None:
    """Refuse collators whose batches cannot be cut into clients.

    Raises:
        UnsupportedError: If a rule applies. The message has the reason and the way out.

    Example:
        >>> from transformers import DefaultDataCollator
        >>> check_collator(DefaultDataCollator())
    """
    refuse([PADDING_FREE], collator)


def check_loss(loss: Any) -> None:
    """Refuse a loss that sends its inputs to other ranks.

    Args:
        loss: The `loss` of a Trainer of sentence-transformers: a module, or several by name.

    Raises:
        UnsupportedError: If a rule applies. The message has the reason and the way out.

    Example:
        >>> check_loss(nn.MSELoss())
    """
    for module in loss.values() if isinstance(loss, dict) else [loss]:
        refuse(LOSSES, module)


def _overrides(trainer_class: type, mixin: type, name: str) -> bool:
    return any(name in vars(base) for base in trainer_class.__mro__ if base not in (mixin, Trainer))


# Hooks that users register with torch, each a `HookedTraining` of guards/hooks.py

HOOKS = (
    Rule(
        "hook-on-accumulation",
        lambda hooked: hooked.hook.sees == "step" and hooked.values,
        "{hook}: it waits for a backward pass that adds to .grad, and there is none.",
        _SEES_BOTH,
    ),
    Rule(
        "hook-on-sharded-model",
        lambda hooked: hooked.is_sharded and hooked.values,
        "{hook} on a sharded model: it would see a device's own part of the true gradient.",
        "Remove it (the handle's remove()), or give each client one device.",
    ),
    Rule(
        "hook-on-withheld",
        lambda hooked: hooked.is_withheld and hooked.values,
        "{hook}: this parameter is withheld, so there is no gradient that the hook could see.",
        "Remove it (the handle's remove()), or share the parameter (share_input_embeddings=True; "
        "withhold).",
    ),
    Rule(
        "hook-on-part-of-noise",
        lambda hooked: (
            hooked.hook.sees == "sum" and hooked.differentiation.is_summed and hooked.values
        ),
        "{hook} with noise_for='sum': it would work on a message that has a share of the noise "
        "alone.",
        "Remove it (the handle's remove()), or set noise_for='message'; the optimizer's "
        "register_step_pre_hook works on the sum.",
    ),
    Rule(
        "hook-on-scaled",
        lambda hooked: (
            hooked.hook.sees == "sum" and hooked.differentiation.is_scaled and hooked.values
        ),
        "{hook} with fp16: gradients are unscaled before they are added to .grad.",
        "Use bf16=True, or the optimizer's register_step_pre_hook.",
    ),
    Rule(
        "hook-on-samples",
        lambda hooked: (
            hooked.hook.sees == "slopes"
            and hooked.differentiation.defense.facts.needs_samples
            and hooked.values
        ),
        "{hook} with per_sample=True: samples' gradients are made of what layers took in and gave "
        "back. This hook would join samples, which ε counts apart, or would not be seen.",
        _SEES_BOTH,
    ),
    Rule(
        "hook-beside-defense",
        lambda hooked: (
            hooked.hook.sees == "slopes"
            and (needs := beyond_gradient(hooked.differentiation.defense))
            and {**hooked.values, "name": hooked.differentiation.defense.name, "needs": needs}
        ),
        "{hook} with {name}: {needs} The hook would have no part in that.",
        _SEES_BOTH,
    ),
    Rule(
        "hook-beside-leakage",
        lambda hooked: (
            hooked.hook.sees == "slopes" and hooked.differentiation.is_measured and hooked.values
        ),
        "{hook} with leakage_logging_steps, leakage_limit or an accountant: they ask how the "
        "gradient depends on the input, and the hook would have no part in that.",
        _SEES_BOTH,
    ),
    Rule(
        "hook-on-one-of-several",
        lambda hooked: (
            hooked.hook.sees == "slopes"
            and hooked.differentiation.messages > 1
            and hooked.hook.package != "peft"  # its own are projections
            and {**hooked.values, "messages": hooked.differentiation.messages}
        ),
        "{hook} with {messages} messages a step (accumulation, clients, ranks): it would see the "
        "gradient of each message's own mean loss, where a plain training weighs the loss before.",
        _SEES_BOTH,
    ),
)

# Proofs for single rows, and for their labels

PRIVACY = (
    Rule(
        "samples-in-chain",
        None,
        "dp_sgd with per_sample=True in a chain: what stands beside it may look at the data again, "
        "and nothing says that it does not.",
        "Use it alone.",
    ),
    Rule(
        "samples-with-clients",
        None,
        "dp_sgd with per_sample=True with num_clients, which draws clients and a fixed number of "
        "their rows.",
        "Leave it out: ranks and clients_per_process have fixed rows of their own here.",
    ),
    Rule(
        "samples-with-token-counts",
        None,
        "dp_sgd with per_sample=True and include_num_input_tokens_seen: how many tokens a batch "
        "has tells of its rows, and ε does not cover it.",
        "Leave it out.",
    ),
    Rule(
        "samples-of-own-batches",
        None,
        "dp_sgd with per_sample=True and delta where batches are not drawn by the Trainer itself, "
        "row by row from a data set with a length: ε is of Poisson sampling.",
        "Leave get_train_dataloader as it is, or give noise_multiplier without delta, and account "
        "for your own way of drawing batches.",
    ),
    Rule(
        "samples-by-length",
        None,
        "dp_sgd with per_sample=True where batches are made by length or split: ε is of rows that "
        "are drawn independently.",
        "Leave train_sampling_strategy and split_batches at their defaults.",
    ),
    Rule(
        "coupled-rows",
        None,
        "dp_sgd with per_sample=True where rows are coupled before the model: {fault}. So one row "
        "changes what all others add, and no clipping bounds that.",
        "Take a collator that treats each row by itself (no mixup, no statistics of the batch), or "
        "a defense without per_sample.",
    ),
    Rule(
        "rows-of-several-forms",
        None,
        "dp_sgd with per_sample=True where rows become batches of several forms: {name!r} is "
        "missing for some, of another type or shape, or of another length ({form} and {usual}) "
        "without an attention_mask. So one row decides what a batch of others becomes.",
        "Give all rows the same columns and types, and pad them to one length "
        "(padding='max_length'), or pass an attention_mask, `(rows, length)`.",
    ),
    Rule(
        "correlated-from-first-rows",
        None,
        "dp_sgd with correlated=True and ignore_data_skip, under which a resumed run begins with "
        "the first rows again: they would be in more messages than promised.",
        "Leave it out.",
    ),
    Rule(
        "correlated-optimizer",
        None,
        "dp_sgd with correlated=True and {kind}: correlated noise cancels in sums of messages, and "
        "this optimizer does not add them up (Adam divides by a root of their squares, so that "
        "noise stays).",
        "Set optim='sgd' (with optim_args='momentum=0.9' if you like) and a learning rate for it, "
        "or correlated=False.",
    ),
    Rule(
        "correlated-schedule",
        None,
        "dp_sgd with correlated=True and {kind}: rates that follow evaluation are no public "
        "schedule.",
        "Use a lr_scheduler_type that counts steps, such as 'linear'.",
    ),
    Rule(
        "labels-of-unnumbered-rows",
        None,
        "protect_labels with {kind}: its rows have no number, so a row that comes again would "
        "release its label again.",
        "Use a data set with __getitem__ and __len__.",
    ),
    Rule(
        "labels-in-two-columns",
        None,
        "protect_labels for rows with {names}: a collator may take either one, and with it true "
        "labels.",
        "Remove all but one column.",
    ),
    Rule(
        "labels-of-no-class",
        None,
        "protect_labels for rows whose label is {value}: randomized response is for one class id a "
        "row. Labels of tokens, numbers of a regression and several labels a row would each need a "
        "mechanism of its own:",
        "leave protect_labels out.",
    ),
    Rule(
        "labels-of-own-batches",
        None,
        "protect_labels with a get_train_dataloader of your own: labels are randomized in "
        "train_dataset, which it need not read.",
        "Give the data as train_dataset.",
    ),
    Rule(
        "labels-of-other-names",
        None,
        "protect_labels with label_names={names}: the loss would take those as they are.",
        "Call labels `labels`, without label_names.",
    ),
    Rule(
        "labels-with-dirichlet",
        None,
        "partition='dirichlet' with protect_labels: clients by class would tell labels, and each "
        "rank would divide by its own randomized ones.",
        "Take partition='iid'.",
    ),
    Rule(
        "labels-of-one-class",
        None,
        "protect_labels with {kind}, num_labels={classes} and problem_type={problem!r}: randomized "
        "response needs two classes or more, and one label a row.",
        "Leave protect_labels out.",
    ),
)

# What a training finds out

AT_RUN_TIME = (
    Rule(
        "saved-tensors-hooks",
        None,
        "torch.autograd.graph.saved_tensors_hooks with per_sample=True: samples' gradients are "
        "made of what layers took in, and not of what such hooks make of it.",
        "Leave their context, also that of save_on_cpu; activation checkpointing saves memory, "
        "too.",
    ),
    Rule(
        "hook-that-steps",
        None,
        "a hook of Tensor.register_post_accumulate_grad_hook that takes .grad away or writes to "
        "the parameter: an optimizer's step there would come before messages are averaged.",
        "Change .grad in place, and leave the step to the Trainer's optimizer.",
    ),
    Rule(
        "hook-in-audit",
        None,
        "{hook}: attackers compute gradients anew, and the hook would have no part in that.",
        "Remove it (the handle's remove()), and audit the defense without it, or write what it "
        "does as a Defense.",
        opening="An audit does not support",
    ),
    Rule(
        "hook-on-wrapper",
        None,
        "hooks on DistributedDataParallel itself, which does not run.",
        "Register them on the module inside it.",
    ),
    Rule(
        "hook-of-every-optimizer",
        None,
        "a hook of torch.optim.optimizer.register_optimizer_step_pre_hook that changes .grad: it "
        "runs before anything could see that .grad was exchanged.",
        "Register it on the optimizer (register_step_pre_hook), which may change what was.",
    ),
    Rule(
        "loss-with-parameters",
        None,
        "{count} of the optimizer's parameters (shapes {shapes}), which are none of the model's: a "
        "loss has its own. They would not be trained.",
        "Make them part of the model, or take a loss without any.",
    ),
    Rule(
        "loss-that-exchanges",
        None,
        "a loss that calls accelerator.{operation}: the other ranks would be sent figures of this "
        "rank's own batch, unprotected.",
        "Compute the loss without it, or train on one rank.",
    ),
    Rule(
        "loss-normalization",
        None,
        "The loss changes by a factor of {factor:g} when num_items_in_batch doubles. It has to be "
        "a sum divided by it, a mean that ignores it, or one of each added up:",
        "change compute_loss_func or compute_loss.",
        opening="",
    ),
    Rule(
        "sum-of-unknown-noise",
        None,
        "noise_for='sum' with {defense}: its messages carry no Gaussian noise of a stated scale, "
        "which alone adds up as is known.",
        "Use gaussian_noise, optimal_noise, dp_sgd or optimal_dp_sgd with scale=, not in a chain, "
        "or noise_for='message'; of correlated noise dp_sgd with per_sample=True.",
    ),
    Rule(
        "sum-with-limit",
        None,
        "noise_for='sum' with leakage_limit: a message that is kept back takes its noise out of "
        "the sum.",
        "Leave one of them out.",
    ),
    Rule(
        "rows-of-no-client",
        None,
        "num_clients with a get_train_dataloader whose batches do not say whose rows they are.",
        "End it with super().get_train_dataloader(), or leave num_clients out.",
    ),
    Rule(
        "rows-of-one-example",
        None,
        "A batch has {rows} rows of {examples} examples, such as preference pairs, so it cannot be "
        "cut into clients.",
        "Give each rank one client: clients_per_process=1, num_clients left out.",
        opening="",
    ),
    Rule(
        "entries-of-no-row",
        None,
        "{name!r} of a batch has {entries} entries where the batch has {rows} rows, so it cannot "
        "be cut into clients.",
        "Return one entry per row from the collator, or give each rank one client: "
        "clients_per_process=1, num_clients left out.",
        opening="",
    ),
    Rule(
        "saved-state-of-rows",
        None,
        "dp_sgd that clips samples, or correlates noise, with {kind}, which writes to {names} as "
        "it runs. They are saved with the model and hold what it made of private rows, which no ε "
        "covers.",
        "{way_out}",
    ),
    Rule(
        "lasting-state-of-rows",
        None,
        "{kind}, whose passes write to {names}. That is saved with the model, cannot be put back, "
        "and holds what was made of private rows.",
        "Write it elsewhere than in forward, or keep it in buffers and set "
        "batch_statistics='frozen'.",
    ),
)

GROUPS: dict[str, tuple[Rule, ...]] = {
    "Training arguments": ARGUMENTS,
    "Models": MODELS,
    "Ranks": RANKS,
    "Leakage that is limited, logged or accounted for": LEAKAGE,
    "Trackers": TRACKERS,
    "Classes, losses and batches": (*CLASSES, *DRAWING, *LOSSES, PADDING_FREE),
    "Proofs for rows and for labels": PRIVACY,
    "Hooks": HOOKS,
    "While training": AT_RUN_TIME,
}
RULES = tuple(rule for rules in GROUPS.values() for rule in rules)
"""All that is refused by name."""
_BY_NAME = {rule.name: rule for rule in RULES}
