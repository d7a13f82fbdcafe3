"""What `GradGuardTrainer` refuses, each with its reason and the way out.

A backend that exchanges gradients itself, or never holds a rank's whole local gradient, cannot be
protected from the outside. Better no training than training that only looks protected.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import DistributedType
from torch import nn
from torch._dynamo import OptimizedModule
from torch.utils.data import IterableDataset
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from ...defenses import Defense
from ...defenses.dp import DPSGD
from ..clients.partition import is_of_datasets
from ..config import setting

if TYPE_CHECKING:
    from ...leakage import FisherAccountant

DISPATCHED = (
    "dispatched batches: rank 0 would read everybody's data and send it, unprotected, to the other "
    "ranks, as Accelerate does by default with iterable data sets. Set "
    "accelerator_config={'dispatch_batches': False}; in a loop of your own "
    "Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))."
)


def check_loader(loader: Any) -> None:
    """Refuse one that dispatches, also where a class of the user's own made it.

    Raises:
        NotImplementedError: With the reason and what to use instead.

    Example:
        >>> check_loader(torch.utils.data.DataLoader([1, 2]))
    """
    if isinstance(loader, DataLoaderDispatcher):
        raise NotImplementedError(f"GradGuardTrainer does not support {DISPATCHED}")


def is_iterable(dataset: Any) -> bool:
    """Whether a data set has no rows that could be drawn."""
    return isinstance(dataset, IterableDataset) or is_of_datasets(dataset, "IterableDataset")


_REPLICATED = {
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_NPU,
    DistributedType.MULTI_XPU,
}


def check_arguments(args: TrainingArguments) -> None:
    """Refuse training arguments that cannot be protected.

    Raises:
        NotImplementedError: With the reason and what to use instead.

    Example:
        >>> check_arguments(TrainingArguments("out", torch_compile=True))
        Traceback (most recent call last):
        NotImplementedError: GradGuardTrainer does not support torch.compile: ...
    """
    _raise_first(_argument_refusals(args))


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
    _raise_first(_model_refusals(model, sharded))


def check_accelerator(accelerator: Accelerator, train_dataset: Any = None) -> None:
    """Refuse distributed set-ups that exchange more than protected gradients.

    Raises:
        NotImplementedError: With the reason and what to use instead.

    Example:
        >>> check_accelerator(Accelerator(cpu=True))
    """
    _raise_first(_accelerator_refusals(accelerator, train_dataset))


def check_training(
    args: TrainingArguments, model: nn.Module, accelerator: Accelerator, train_dataset: Any
) -> None:
    """All of these.

    Raises:
        NotImplementedError: With the reason and what to use instead.

    Example:
        >>> check_training(TrainingArguments("out"), model, Accelerator(cpu=True), None)
    """
    check_arguments(args)
    check_model(model)
    check_accelerator(accelerator, train_dataset)


def check_leakage(
    args: TrainingArguments,
    defense: Defense,
    accountant: FisherAccountant | None,
    own_batches: bool,
    train_dataset: Any = None,
) -> None:
    """Refuse limits and accounts that nothing could keep, and second derivatives through kernels
    that have none.

    Args:
        args: Training arguments, whose `leakage_*` and `use_liger_kernel` count.
        defense: What protects the messages.
        accountant: Of the Trainer's messages, if there is one.
        own_batches: Whether the Trainer's class draws its batches in a way of its own.
        train_dataset: By whose rows an accountant knows the examples.

    Raises:
        NotImplementedError: With the reason and what to use instead.

    Example:
        >>> from hf_gradguard import GradGuardConfig
        >>> limited = GradGuardConfig("out", leakage_limit=0.1)
        >>> check_leakage(limited, make_defense("pruning"), None, own_batches=False)
        Traceback (most recent call last):
        NotImplementedError: GradGuardTrainer does not support leakage_limit with pruning: ...
    """
    limit = setting(args, "leakage_limit")
    measured = bool(setting(args, "leakage_logging_steps")) or limit is not None
    if args.use_liger_kernel and (
        measured or accountant is not None or defense.facts.needs_second_order
    ):
        raise NotImplementedError(_LIGER.format(defense.name))
    _raise_first(_leakage_refusals(limit is not None, defense, accountant, own_batches))
    if accountant is not None and is_iterable(train_dataset):
        raise NotImplementedError(_UNNUMBERED)


def check_collator(collator: Any) -> None:
    """Refuse collators of which a batch cannot be cut into clients.

    Raises:
        NotImplementedError: With the reason and what to use instead.

    Example:
        >>> from transformers import DefaultDataCollator
        >>> check_collator(DefaultDataCollator())
    """
    if isinstance(collator, DataCollatorWithFlattening):
        raise NotImplementedError(f"GradGuardTrainer does not support {PADDING_FREE}")


def _raise_first(refusals: Iterator[str]) -> None:
    for reason in refusals:
        raise NotImplementedError(f"GradGuardTrainer does not support {reason}")


def _argument_refusals(args: TrainingArguments) -> Iterator[str]:
    if args.deepspeed:
        yield _DEEPSPEED
    if args.fsdp:
        yield _FSDP
    yield from base_refusals(args)
    if args.fp16:
        yield _FP16
    if args.torch_compile:
        yield _COMPILE
    if "layerwise" in str(getattr(args.optim, "value", args.optim)):
        yield (
            "layerwise optimizers: they step inside the backward pass, of which there is none, so "
            "nothing would be trained. Use the optimizer of the same name without _layerwise."
        )
    if "lomo" in str(getattr(args.optim, "value", args.optim)):
        yield (
            "LOMO optimizers: they update weights inside the backward pass, before the gradient is "
            "whole. Use optim='adamw_torch'."
        )
    if getattr(args, "ddp_static_graph", None):
        yield _STATIC_GRAPH
    # Older versions say gradient_checkpointing; one that says neither must not pass unnoticed.
    word = "activation" if hasattr(args, "activation_checkpointing") else "gradient"
    checkpointing = getattr(args, f"{word}_checkpointing_kwargs") or {}
    if getattr(args, f"{word}_checkpointing") and checkpointing.get("use_reentrant"):
        yield _REENTRANT
    strategy = str(getattr(args.hub_strategy, "value", args.hub_strategy))
    if args.push_to_hub and strategy in ("checkpoint", "all_checkpoints"):
        yield (
            f"hub_strategy='{strategy}': a checkpoint holds the defense's private state, and "
            "pushing it publishes that. Use 'end' or 'every_save'."
        )
    if args.n_gpu > 1:
        yield (
            f"DataParallel ({args.n_gpu} GPUs in one process): its replicas' gradients are summed "
            "before they can be seen. Launch one process a GPU (accelerate launch --multi_gpu), or "
            "show one GPU with CUDA_VISIBLE_DEVICES=0."
        )


def _model_refusals(model: nn.Module, sharded: bool) -> Iterator[str]:
    from torch.distributed.tensor import DTensor

    if isinstance(model, nn.DataParallel):
        yield "a model wrapped in DataParallel. Pass the module inside it."
    if isinstance(model, nn.parallel.DistributedDataParallel):
        yield "a model wrapped in DistributedDataParallel. Pass the module inside it."
    if any(isinstance(m, OptimizedModule) or m._compiled_call_impl for m in model.modules()):
        yield _COMPILE
    if any(_recomputes_reentrantly(m) for m in model.modules()):
        yield _REENTRANT
    if any(isinstance(m, nn.SyncBatchNorm) for m in model.modules()):
        yield (
            "SyncBatchNorm: it exchanges the statistics of every batch, and gradients of them, "
            "unprotected within each pass. Use plain batch normalization (see batch_statistics) or "
            "group normalization."
        )
    cut = any(isinstance(p, DTensor) for p in model.parameters())
    if getattr(model, "is_distributed_loading_by_transformers", False) or (cut and not sharded):
        yield (
            "models sharded at load time (tp_plan, distributed_config): no rank holds a whole "
            "local gradient. Load the whole model on every rank; or cut it by fully_shard in a "
            "loop of your own, with hf_gradguard.protect."
        )
    if (
        len({p.device for p in model.parameters()}) > 1
        or len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1
    ):
        yield (
            "a model spread over several devices. Load it whole on one: from_pretrained without "
            "device_map='auto'."
        )


def _recomputes_reentrantly(module: nn.Module) -> bool:
    """Whether Transformers checkpoints a module's activations in a backward pass inside another."""
    if not getattr(module, "gradient_checkpointing", False):
        return False
    settings = getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", {})
    return bool(settings.get("use_reentrant", False))


def _accelerator_refusals(accelerator: Accelerator, train_dataset: Any) -> Iterator[str]:
    kind = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        yield _DEEPSPEED
    if kind == DistributedType.FSDP:
        yield _FSDP
    if kind not in _REPLICATED:
        yield (
            f"distributed type {kind}: only whole replicas, one process a device, can be "
            "protected. Use DDP."
        )
    if accelerator.mixed_precision in ("fp16", "fp8"):
        yield _FP16
    if str(getattr(accelerator.state.dynamo_plugin.backend, "value", "NO")).upper() != "NO":
        yield _COMPILE
    parallelism = getattr(accelerator, "parallelism_config", None)
    if (
        parallelism is not None
        and max(parallelism.tp_size, parallelism.cp_size, parallelism.sp_size) > 1
    ):
        yield (
            "tensor, context or sequence parallelism: no rank holds a whole local gradient. Use "
            "DDP alone."
        )
    ddp = accelerator.ddp_handler
    if ddp is not None and ddp.static_graph:
        yield _STATIC_GRAPH
    if ddp is not None and str(getattr(ddp.comm_hook, "value", "no")) != "no":
        yield (
            "DDP communication hooks: protected gradients are averaged by the Trainer, not by DDP, "
            "so the hook would never run. Leave comm_hook unset."
        )
    if accelerator.num_processes > 1:
        dispatch = accelerator.dataloader_config.dispatch_batches
        if dispatch or (dispatch is None and is_iterable(train_dataset)):
            yield DISPATCHED


def _leakage_refusals(
    limited: bool, defense: Defense, accountant: FisherAccountant | None, own_batches: bool
) -> Iterator[str]:
    if (limited or accountant is not None) and not defense.facts.adds_gaussian_noise:
        yield (
            f"{'leakage_limit' if limited else 'an accountant'} with {defense.name}: it adds no "
            "Gaussian noise of known covariance to the true gradient, so there is no Fisher "
            "information to bound or to add up. Use gaussian_noise, optimal_noise, dp_sgd or "
            "optimal_dp_sgd, alone, first in a chain, or after pruning. leakage_logging_steps logs "
            "leakage/i2f_lower_bound for every defense."
        )
    if accountant is None or accountant.noise_multiplier is None:
        return
    if not own_batches:
        yield (
            "an accountant with a sampling rate: its factor κ is for batches that are drawn afresh "
            "at every step, and the Trainer shuffles epochs. Leave sampling_rate, noise_multiplier "
            "and delta out, or override get_train_dataloader with one that draws afresh."
        )
    multiplier = defense.scale / defense.clip if _clips_by_norm(defense) else 0.0  # type: ignore[attr-defined]
    if accountant.noise_multiplier > multiplier * (1 + 1e-9):
        yield (
            f"an accountant with noise_multiplier={accountant.noise_multiplier:g}: its factor κ "
            "needs a message that one example cannot move by more than a multiple of the noise, "
            f"and here that gives at most {multiplier:g}. Use dp_sgd with clip_by='norm' and "
            "scale=noise_multiplier*clip, or leave the three arguments out."
        )


def _clips_by_norm(defense: Defense) -> bool:
    return isinstance(defense, DPSGD) and defense.clip_by == "norm" and defense.scale is not None


PADDING_FREE = (
    "padding-free batches of several clients: all texts are one row, so that nothing says whose a "
    "token is. Pad (DataCollatorWithPadding, DataCollatorForSeq2Seq, padding_free=False), or give "
    "each rank one client: clients_per_process=1, num_clients left out."
)
_UNNUMBERED = (
    "GradGuardTrainer does not support an accountant with an iterable data set: its rows have no "
    "numbers, and by its content an example that is augmented or masked anew would be another one "
    "at every visit. Use a data set with rows (datasets: load it without streaming)."
)
_DEEPSPEED = "DeepSpeed: its engine owns the backward pass, and reduces inside it. Use DDP alone."
_FSDP = (
    "FSDP: local gradients are reduced and sharded before they can be seen. Use DDP, with LoRA or "
    "activation checkpointing if the model does not fit; or hf_gradguard.protect in a loop of your "
    "own, with clients of several devices (clients=mesh['clients'])."
)
_FP16 = (
    "fp16 or fp8: the loss scaler multiplies gradients by a factor that noise and clipping would "
    "not know. Use bf16=True."
)
_COMPILE = (
    "torch.compile: compiled code does not run the hooks by which inputs and the tables that they "
    "index are found, and its second derivatives silently come back as None. Leave torch_compile "
    "off and pass the model as it was before compiling."
)
_LIGER = (
    "GradGuardTrainer does not support Liger kernels where anything differentiates twice: their "
    "fused losses compute gradients in the forward pass, so second derivatives are silently wrong. "
    "Set use_liger_kernel=False; or use a defense that differentiates once (noise, pruning, "
    "quantization; {} may not), with no leakage_logging_steps, leakage_limit or accountant."
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

_STEPS = {("trl", name) for name in ("SFTTrainer", "DPOTrainer", "RewardTrainer", "KTOTrainer")}
"""Trainers whose own training step only enters a context, of offloading, that is refused."""


def check_order(trainer_class: type, mixin: type) -> None:
    """Refuse a class in which another Trainer would come before the mixin, or whose training step
    would not run.

    Args:
        trainer_class: A subclass of the mixin.
        mixin: `GradGuardMixin`.

    Raises:
        TypeError: For an order of bases that leaves the mixin out of the way.
        NotImplementedError: For a Trainer with a training step of its own.

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
        keeps_step = (base.__module__.split(".")[0], base.__name__) in _STEPS
        if "training_step" in vars(base) and not keeps_step:
            raise NotImplementedError(
                f"GradGuardMixin does not support {base.__name__}: its own training_step would "
                "not run. Change the loss in compute_loss, or call hf_gradguard.protect in a loop "
                "of your own."
            )


def draws_batches(trainer_class: type, mixin: type) -> bool:
    """Whether a class draws training batches in a way of its own, or a base does."""
    return _overrides(trainer_class, mixin, "get_train_dataloader")


def check_drawing(trainer_class: type, mixin: type, args: TrainingArguments, reason: str) -> None:
    """Refuse a sampler of one's own where rows are drawn in another way: what it excludes would be
    trained on all the same. Likewise what would change how many are drawn.

    Args:
        trainer_class: Of the Trainer.
        mixin: `GradGuardMixin`.
        args: Training arguments, of which those count that decide which rows are drawn.
        reason: What draws rows.

    Raises:
        NotImplementedError: With the way out.

    Example:
        >>> from hf_gradguard import GradGuardMixin, GradGuardTrainer
        >>> check_drawing(GradGuardTrainer, GradGuardMixin, TrainingArguments("out"), "num_clients")
    """
    if _overrides(trainer_class, mixin, "_get_train_sampler"):
        raise NotImplementedError(
            f"GradGuardTrainer does not support _get_train_sampler with {reason}, which draws rows "
            "in its own way: rows that the sampler leaves out would be trained on. Leave them out "
            "of train_dataset (select, filter), and leave _get_train_sampler as it is."
        )
    if args.auto_find_batch_size:
        raise NotImplementedError(
            f"GradGuardTrainer does not support auto_find_batch_size with {reason}: another batch "
            "size would be another sampling rate, and other shares of clients, within a training. "
            "Find the size first, and set per_device_train_batch_size."
        )


def _overrides(trainer_class: type, mixin: type, name: str) -> bool:
    return any(name in vars(base) for base in trainer_class.__mro__ if base not in (mixin, Trainer))


def base_refusals(args: TrainingArguments) -> Iterator[str]:
    """Arguments of TRL's configurations that cannot be protected, each with the way out."""
    if getattr(args, "activation_offloading", False):
        yield (
            "activation_offloading: it is entered in a training step that does not run. Use "
            "activation checkpointing."
        )
    if getattr(args, "precompute_ref_log_probs", False) and args.world_size > 1:
        yield (
            "precompute_ref_log_probs on several ranks: every rank would be sent the reference's "
            "log-probabilities of all ranks' texts. Leave it out."
        )


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
            raise NotImplementedError(
                f"GradGuardTrainer does not support {type(module_loss).__name__} with "
                "gather_across_devices=True: every rank would be sent all ranks' embeddings, "
                "unprotected. Leave it at False."
            )
