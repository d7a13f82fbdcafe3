"""What `GradGuardTrainer` refuses, each with its reason and the way out.

A backend that exchanges gradients itself, or never holds a rank's whole local gradient, cannot be
protected from the outside. Better no training than training that only looks protected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import DistributedType
from torch import nn
from torch._dynamo import OptimizedModule
from torch.utils.data import IterableDataset
from transformers import DataCollatorWithFlattening, TrainingArguments

from ...defenses import Defense
from ..clients.partition import is_of_datasets
from .devices import SIZES, reason_of_arguments, reason_of_defense


def is_iterable(dataset: Any) -> bool:
    """Whether a data set has no rows that could be drawn."""
    return isinstance(dataset, IterableDataset) or is_of_datasets(dataset, "IterableDataset")


def check_arguments(args: TrainingArguments) -> None:
    """Refuse training arguments that cannot be protected.

    Raises:
        NotImplementedError: With the reason and what to use instead.

    Example:
        >>> check_arguments(TrainingArguments("out", ddp_static_graph=True))
        Traceback (most recent call last):
        NotImplementedError: GradGuardTrainer does not support a static DDP graph: ...
    """
    refuse(_ARGUMENTS, args)


def check_model(model: nn.Module, sharded: bool = False) -> None:
    """Refuse models whose local gradient or second derivatives are out of reach.

    Args:
        model: The model.
        sharded: Whether each of a client's devices is to protect its own part of it.

    Raises:
        NotImplementedError: With the reason and what to use instead.

    Example:
        >>> check_model(nn.DataParallel(model))
        Traceback (most recent call last):
        NotImplementedError: GradGuardTrainer does not support a model wrapped in DataParallel. ...
    """
    refuse(_MODELS, Model(model, sharded))


def check_accelerator(
    accelerator: Accelerator, train_dataset: Any = None, defense: Defense | None = None
) -> None:
    """Refuse distributed set-ups that exchange more than protected gradients.

    Args:
        accelerator: The ranks'.
        train_dataset: What they train on.
        defense: A Trainer's, which compiles the model itself; `None` in a loop of the user's own.

    Raises:
        NotImplementedError: With the reason and what to use instead.

    Example:
        >>> check_accelerator(Accelerator(cpu=True))
    """
    refuse(_RANKS, Ranks(accelerator, train_dataset, defense))


def check_training(
    args: TrainingArguments,
    model: nn.Module,
    accelerator: Accelerator,
    train_dataset: Any,
    defense: Defense,
) -> None:
    """All of these.

    Raises:
        NotImplementedError: With the reason and what to use instead.

    Example:
        >>> args, noise = TrainingArguments("out"), make_defense("gaussian_noise")
        >>> check_training(args, model, Accelerator(cpu=True), None, noise)
    """
    check_arguments(args)
    check_model(model, sharded=bool(args.fsdp))
    check_accelerator(accelerator, train_dataset, defense)


def check_collator(collator: Any) -> None:
    """Refuse collators of which a batch cannot be cut into clients.

    Raises:
        NotImplementedError: With the reason and what to use instead.

    Example:
        >>> from transformers import DefaultDataCollator
        >>> check_collator(DefaultDataCollator())
    """
    if isinstance(collator, DataCollatorWithFlattening):
        raise unsupported(PADDING_FREE)


def check_loader(loader: Any) -> None:
    """Refuse one that dispatches, also where a class of the user's own made it.

    Raises:
        NotImplementedError: With the reason and what to use instead.

    Example:
        >>> check_loader(torch.utils.data.DataLoader([1, 2]))
    """
    if isinstance(loader, DataLoaderDispatcher):
        raise unsupported(DISPATCHED)


def check_loss(loss: Any) -> None:
    """Refuse a loss that sends what it is computed from to other ranks.

    Args:
        loss: A Trainer's `loss`, as sentence-transformers has it: a module, or several by name.

    Raises:
        NotImplementedError: With the reason and the way out.

    Example:
        >>> check_loss(nn.MSELoss())
    """
    losses = loss.values() if isinstance(loss, dict) else [loss]
    for module_loss in losses:
        modules = module_loss.modules() if isinstance(module_loss, nn.Module) else []
        if any(getattr(module, "gather_across_devices", False) for module in modules):
            raise unsupported(
                f"{type(module_loss).__name__} with gather_across_devices=True: every rank would "
                "be sent all ranks' embeddings, unprotected. Leave it at False."
            )


def unsupported(reason: str) -> NotImplementedError:
    """The error for what is refused."""
    return NotImplementedError(f"GradGuardTrainer does not support {reason}")


def refuse(checks: tuple[Callable[[Any], str], ...], setup: Any) -> None:
    """Raise for the first check that gives a reason.

    Raises:
        NotImplementedError: With that reason.
    """
    for check in checks:
        if reason := check(setup):
            raise unsupported(reason)


# Checks of training arguments. Each gives its reason, or nothing.


def _of_deepspeed(args: TrainingArguments) -> str:
    return _DEEPSPEED if args.deepspeed else ""


def _of_fsdp(args: TrainingArguments) -> str:
    return reason_of_arguments(args)


def _of_activation_offloading(args: TrainingArguments) -> str:
    """Of TRL's arguments."""
    if not getattr(args, "activation_offloading", False):
        return ""
    return (
        "activation_offloading: it is entered in a training step that does not run. Use "
        "activation checkpointing."
    )


def _of_reference(args: TrainingArguments) -> str:
    """Of TRL's arguments."""
    if not getattr(args, "precompute_ref_log_probs", False) or args.world_size == 1:
        return ""
    return (
        "precompute_ref_log_probs on several ranks: every rank would be sent the reference's "
        "log-probabilities of all ranks' texts. Leave it out."
    )


def _of_optimizer(args: TrainingArguments) -> str:
    name = str(getattr(args.optim, "value", args.optim))
    if "layerwise" in name:
        return (
            "layerwise optimizers: they step inside the backward pass, of which there is none, so "
            "nothing would be trained. Use the optimizer of the same name without _layerwise."
        )
    if "lomo" in name:
        return (
            "LOMO optimizers: they update weights inside the backward pass, before the gradient is "
            "whole. Use optim='adamw_torch'."
        )
    return ""


def _of_static_graph(args: TrainingArguments) -> str:
    return _STATIC_GRAPH if getattr(args, "ddp_static_graph", None) else ""


def _of_checkpointing(args: TrainingArguments) -> str:
    # Older versions say gradient_checkpointing; one that says neither must not pass unnoticed.
    word = "activation" if hasattr(args, "activation_checkpointing") else "gradient"
    settings = getattr(args, f"{word}_checkpointing_kwargs") or {}
    if not getattr(args, f"{word}_checkpointing") or not settings.get("use_reentrant"):
        return ""
    return _REENTRANT


def _of_pushing(args: TrainingArguments) -> str:
    strategy = str(getattr(args.hub_strategy, "value", args.hub_strategy))
    if not args.push_to_hub or strategy in ("end", "every_save"):
        return ""
    return (
        f"hub_strategy='{strategy}': a checkpoint holds the defense's private state, and "
        "pushing it publishes that. Use 'end' or 'every_save'."
    )


def _of_several_gpus(args: TrainingArguments) -> str:
    if args.n_gpu <= 1:
        return ""
    return (
        f"DataParallel ({args.n_gpu} GPUs in one process): its replicas' gradients are summed "
        "before they can be seen. Launch one process a GPU (accelerate launch --multi_gpu), or "
        "show one GPU with CUDA_VISIBLE_DEVICES=0."
    )


_ARGUMENTS = (
    _of_deepspeed, _of_fsdp, _of_activation_offloading, _of_reference,
    _of_optimizer, _of_static_graph, _of_checkpointing, _of_pushing, _of_several_gpus,
)  # fmt: skip


class Model(NamedTuple):
    """A model, and whether each of a client's devices is to protect its own part of it."""

    module: nn.Module
    sharded: bool


def _of_wrapper(model: Model) -> str:
    for wrapper in (nn.DataParallel, nn.parallel.DistributedDataParallel):
        if isinstance(model.module, wrapper):
            return f"a model wrapped in {wrapper.__name__}. Pass the module inside it."
    return ""


def _of_compiled_modules(model: Model) -> str:
    modules = model.module.modules()
    compiled = any(isinstance(m, OptimizedModule) or m._compiled_call_impl for m in modules)
    return _COMPILE if compiled else ""


def _of_recomputing(model: Model) -> str:
    return _REENTRANT if any(map(_recomputes_reentrantly, model.module.modules())) else ""


def _recomputes_reentrantly(module: nn.Module) -> bool:
    """Whether Transformers checkpoints a module's activations in a backward pass inside another."""
    if not getattr(module, "gradient_checkpointing", False):
        return False
    settings = getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", {})
    return bool(settings.get("use_reentrant", False))


def _of_exchanged_statistics(model: Model) -> str:
    if not any(isinstance(m, nn.SyncBatchNorm) for m in model.module.modules()):
        return ""
    return (
        "SyncBatchNorm: it exchanges the statistics of every batch, and gradients of them, "
        "unprotected within each pass. Use plain batch normalization (see batch_statistics) or "
        "group normalization."
    )


def _of_cut_weights(model: Model) -> str:
    from torch.distributed.tensor import DTensor  # which takes a while to load

    is_loaded_so = getattr(model.module, "is_distributed_loading_by_transformers", False)
    is_cut = any(isinstance(p, DTensor) for p in model.module.parameters())
    if not is_loaded_so and (not is_cut or model.sharded):
        return ""
    return (
        "models sharded at load time (tp_plan, distributed_config): no rank holds a whole "
        "local gradient. Load the whole model on every rank; or cut it by fully_shard in a "
        "loop of your own, with hf_gradguard.protect."
    )


def _of_several_devices(model: Model) -> str:
    devices = {p.device for p in model.module.parameters()}
    planned = set((getattr(model.module, "hf_device_map", None) or {}).values())
    if len(devices) <= 1 and len(planned) <= 1:
        return ""
    return (
        "a model spread over several devices. Load it whole on one: from_pretrained without "
        "device_map='auto'."
    )


_MODELS = (
    _of_wrapper, _of_compiled_modules, _of_recomputing, _of_exchanged_statistics, _of_cut_weights,
    _of_several_devices,
)  # fmt: skip


class Ranks(NamedTuple):
    """Who trains together, and on what."""

    accelerator: Accelerator
    train_dataset: Any
    defense: Defense | None


def _of_engine(ranks: Ranks) -> str:
    kind = ranks.accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        return _DEEPSPEED
    if kind == DistributedType.FSDP:
        if ranks.defense is None or not hasattr(ranks.accelerator, "shards_of"):
            return SIZES
        return reason_of_defense(ranks.defense)
    if kind not in _REPLICATED:
        return (
            f"distributed type {kind}: only whole replicas, one process a device, can be "
            "protected. Use DDP."
        )
    return ""


def _of_half_precision(ranks: Ranks) -> str:
    precision, defense = ranks.accelerator.mixed_precision, ranks.defense
    if precision == "fp8":
        return "fp8: its kernels scale gradients by factors of their own. Use bf16=True."
    if precision != "fp16":
        return ""
    if defense is None:
        return _FP16
    needs = beyond_gradient(defense)
    return f"fp16 with {defense.name}: {needs} {_SCALED}" if needs else ""


def _of_dynamo(ranks: Ranks) -> str:
    plugin = ranks.accelerator.state.dynamo_plugin
    if str(getattr(plugin.backend, "value", "NO")).upper() == "NO":
        return ""
    if ranks.defense is None:
        return _COMPILE
    if getattr(plugin, "use_regional_compilation", False):
        return "regional compilation: leave use_regional_compilation off; torch_compile works."
    needs = beyond_gradient(ranks.defense)
    return f"torch.compile with {ranks.defense.name}: {needs} {_COMPILED}" if needs else ""


def beyond_gradient(defense: Defense) -> str:
    """What a defense asks for beyond the gradient of the batch; nothing if it does not.

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


def _of_parallelism(ranks: Ranks) -> str:
    sizes = getattr(ranks.accelerator, "parallelism_config", None)
    if sizes is None or max(sizes.tp_size, sizes.cp_size, sizes.sp_size) <= 1:
        return ""
    return (
        "tensor, context or sequence parallelism: no rank holds a whole local gradient. Use "
        "DDP alone."
    )


def _of_ddp(ranks: Ranks) -> str:
    ddp = ranks.accelerator.ddp_handler
    if ddp is None:
        return ""
    if ddp.static_graph:
        return _STATIC_GRAPH
    if str(getattr(ddp.comm_hook, "value", "no")) != "no":
        return (
            "DDP communication hooks: protected gradients are averaged by the Trainer, not by DDP, "
            "so the hook would never run. Leave comm_hook unset."
        )
    return ""


def _of_dispatching(ranks: Ranks) -> str:
    if ranks.accelerator.num_processes == 1:
        return ""
    dispatches = ranks.accelerator.dataloader_config.dispatch_batches
    if dispatches is None:  # Accelerate's default
        dispatches = is_iterable(ranks.train_dataset)
    return DISPATCHED if dispatches else ""


_RANKS = (
    _of_engine, _of_half_precision, _of_dynamo, _of_parallelism, _of_ddp, _of_dispatching,
)  # fmt: skip


# Reasons that are given in several places.

DISPATCHED = (
    "dispatched batches: rank 0 would read everybody's data and send it, unprotected, to the other "
    "ranks, as Accelerate does by default with iterable data sets. Set "
    "accelerator_config={'dispatch_batches': False}; in a loop of your own "
    "Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))."
)
PADDING_FREE = (
    "padding-free batches of several clients: all texts are one row, so that nothing says whose a "
    "token is. Pad (DataCollatorWithPadding, DataCollatorForSeq2Seq, padding_free=False), or give "
    "each rank one client: clients_per_process=1, num_clients left out."
)
_DEEPSPEED = "DeepSpeed: its engine owns the backward pass, and reduces inside it. Use DDP alone."
_FP16 = (
    "fp16 in a loop of your own: the loss scaler multiplies gradients by a factor that noise and "
    "clipping would not know. Use bf16=True, or a Trainer, which unscales before it protects."
)
_SCALED = (
    "A scaled loss gives the gradient alone. Use bf16=True; or gaussian_noise, laplace_noise, "
    "pruning, quantization, or dp_sgd without per_sample."
)
_COMPILE = (
    "torch.compile: compiled code does not run the hooks by which inputs and the tables that they "
    "index are found, and its second derivatives silently come back as None. Of a Trainer "
    "set torch_compile=True, and pass the model as it was before compiling."
)
_COMPILED = (
    "Compiled code does not run the hooks for that, and its second derivatives silently come back "
    "as None. Leave torch_compile off, or take gaussian_noise, laplace_noise, pruning, "
    "quantization, or dp_sgd without per_sample."
)
_REENTRANT = (
    "reentrant activation checkpointing: it cannot run under torch.autograd.grad. Set "
    "activation_checkpointing_kwargs={'use_reentrant': False}, or pass that to the model's "
    "gradient_checkpointing_enable."
)
_STATIC_GRAPH = (
    "a static DDP graph: it expects a backward pass through DDP at every step, and there is none. "
    "Leave ddp_static_graph unset."
)

_REPLICATED = {
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_NPU,
    DistributedType.MULTI_XPU,
}
