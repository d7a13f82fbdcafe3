"""The exchange of gradients: a ledger of what may reach the optimizer, and averages over ranks.

What may be exchanged and trained on are gradients that were protected, and nothing else. Whoever
calls `loss.backward()` (a `training_step` of one's own, a callback, a loss that differentiates)
adds a true gradient to `.grad`, from where it would be sent to other ranks or trained on. So the
package writes down which tensors it put there, and every later hand-over looks whether they are
those, unchanged. That is a comparison of two integers a parameter.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol
from weakref import ReferenceType, ref

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from transformers import TrainerCallback, TrainingArguments
from transformers.utils import logging

from ...gradient_map.parameters import find_tables, remember_tables
from ...gradient_map.replay import draws_kept, modes_kept, nodes_of
from ...gradient_map.types import LossFunction, Shards
from ..refusals import refusal

logger = logging.get_logger(__name__)

Bits = Literal[32, 64]
INSTEAD = (
    "Do not override training_step, or end it with super().training_step(...); change the loss in "
    "compute_loss or compute_loss_func, and what is shared in a Defense. In a callback or a loss "
    "use torch.autograd.grad, which leaves .grad alone."
)


class Ledger(TrainerCallback):
    """The gradients that the package wrote, from the first message of a step to the optimizer.

    As a callback it watches the optimizer of every training.

    Attributes:
        strangers: Parameters that the optimizer holds and the model has not, until they are looked
            at.
        writes: The function that says how often a gradient was written to.

    Example:
        >>> ledger = Ledger()
        >>> ledger.check(model.parameters(), "share a message")
        >>> model(**batch).loss.backward()
        >>> ledger.check(model.parameters(), "share a message")
        Traceback (most recent call last):
        RuntimeError: GradGuardTrainer will not share a message: the .grad of ... is not its own ...
    """

    def __init__(self) -> None:
        # Tensors are held, so that their identity means something.
        self._written: dict[nn.Parameter, tuple[Tensor, int]] = {}
        self._names: dict[nn.Parameter, str] = {}
        self._exchanged = False
        self._watched: Any = None
        self.strangers: list[nn.Parameter] = []
        self.writes: Callable[[Tensor], int] = operator.attrgetter("_version")

    def check(self, parameters: Iterable[nn.Parameter], action: str) -> None:
        """Refuse to go on unless every `.grad` is none, or as it was written.

        Raises:
            RuntimeError: If a parameter's `.grad` is not. The message names the parameter.
        """
        for parameter in parameters:
            gradient, (written, count) = parameter.grad, self._written.get(parameter, (None, -1))
            if gradient is not None and (gradient is not written or self.writes(gradient) != count):
                name = self._names.get(parameter, f"a parameter of shape {tuple(parameter.shape)}")
                raise RuntimeError(
                    f"GradGuardTrainer will not {action}: the .grad of {name} is not its own work, "
                    "or was changed since. Something called backward(), or wrote to .grad, so it "
                    f"may hold a gradient that is not protected. {INSTEAD}"
                )

    def write(self, parameters: Iterable[nn.Parameter], exchanged: bool = False) -> None:
        """Record that the `.grad` of some parameters is as it should be.

        Args:
            parameters: The parameters that were written to.
            exchanged: Whether they were averaged over ranks, and no others were.
        """
        self._exchanged = exchanged
        self._written = ({} if exchanged else self._written) | self._stamps(parameters)

    @contextmanager
    def clipping(self, parameters: Any) -> Iterator[list[nn.Parameter]]:
        """Let the `.grad` of parameters, one or several, be clipped in here.

        Raises:
            RuntimeError: If something else wrote to a parameter's `.grad`.
        """
        is_one = isinstance(parameters, Tensor)
        clipped: list[nn.Parameter] = [parameters] if is_one else list(parameters)
        self.check(clipped, "clip")
        yield clipped
        self._written |= self._stamps(clipped)

    def on_train_begin(
        self,
        args: TrainingArguments,
        *_: Any,
        model: nn.Module,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Begin to check what the optimizer is given before each of its steps."""
        self._written.clear()
        self._exchanged = False
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        wrapped = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
        optimized = [p for group in getattr(wrapped, "param_groups", []) for p in group["params"]]
        self.strangers = [p for p in optimized if p not in self._names]
        if wrapped is not self._watched:
            handle = wrapped.register_step_pre_hook(self._before_step)
            # First in line: what other hooks make of an exchanged gradient is theirs to do.
            wrapped._optimizer_step_pre_hooks.move_to_end(handle.id, last=False)
            self._watched = wrapped

    def check_strangers(
        self, model: nn.Module, batch: Mapping[str, Any], loss_fn: Callable[..., Tensor]
    ) -> None:
        """Refuse a loss that is computed from `strangers`, as far as it would train them.

        A model that only guides one (as in sentence-transformers' GISTEmbedLoss) is not trained
        anyway.

        Args:
            model: The bare model.
            batch: The batch of a rank.
            loss_fn: The Trainer's loss, `(model, batch, items) -> loss`. It runs once, under draws
                that are put back.

        Raises:
            UnsupportedError: If there are any. The message has their shapes.
        """
        batch = {name: value for name, value in batch.items() if not name.startswith("gradguard_")}
        with draws_kept(model), modes_kept(model):
            loss = loss_fn(model, batch, None)
        reached = {id(getattr(node, "variable", None)) for node in nodes_of([loss])}
        trained = [parameter for parameter in self.strangers if id(parameter) in reached]
        self.strangers = []
        if trained:
            shapes = ", ".join(str(tuple(p.shape)) for p in trained[:3])
            raise refusal("loss-with-parameters", count=len(trained), shapes=shapes)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        optimized = {p for group in optimizer.param_groups for p in group["params"]}
        try:
            self.check(optimized, "step")
        except RuntimeError:
            if not _global_optimizer_pre_hooks:
                raise
            raise refusal("hook-of-every-optimizer") from None
        if not self._exchanged:
            raise RuntimeError(
                "GradGuardTrainer will not step: nothing was exchanged since the last step. "
                f"{INSTEAD}"
            )
        if untrained := [self._names.get(p, "?") for p in self._written if p not in optimized]:
            logger.warning_once(
                f"Shared, but not trained: {', '.join(untrained[:5])} ({len(untrained)} in all). "
                "The optimizer does not hold them: it was made of others, or before they were "
                "unfrozen. Freeze them (requires_grad=False); what is to be unfrozen later must "
                "be trainable when the optimizer is made: freeze it in on_train_begin."
            )
        self._written.clear()
        self._exchanged = False

    def _stamps(self, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, tuple[Tensor, int]]:
        """What tells a `.grad` from any other, and from itself once it was written to."""
        return {p: (p.grad, self.writes(p.grad)) for p in parameters if p.grad is not None}


def average_gradients(
    parameters: Sequence[nn.Parameter],
    accelerator: Accelerator,
    secure: SecureSum | None = None,
) -> None:
    """Replace parameters' `.grad` by its mean over ranks.

    This is the only exchange of gradients that there is.

    Raises:
        OverflowError, RuntimeError: If `average` raises it.

    Example:
        >>> average_gradients(list(model.parameters()), Accelerator(cpu=True))
    """
    # Every rank reduces the same tensors in the same order, also those it never used.
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    average([p.grad for p in parameters if p.grad is not None], accelerator, secure, bits=32)


def average(
    tensors: Sequence[Tensor],
    accelerator: Accelerator,
    secure: SecureSum | None = None,
    bits: Bits = 64,
) -> None:
    """Replace tensors by their means over ranks, in place.

    All ranks must give the same tensors in the same order.

    Args:
        tensors: The floating-point tensors.
        accelerator: The accelerator that carries them.
        secure: The secure aggregation, which shows nobody more than the mean; `None` for none.
        bits: The number of bits of a word that an entry becomes there: 32 for gradients, 64 for
            figures.

    Raises:
        OverflowError: If `secure` has no room for an entry of any rank. All ranks raise it before
            anything is exchanged.
        RuntimeError: If a rank died or does not answer, or ranks gave different tensors.

    Example:
        >>> average([torch.ones(3)], Accelerator(cpu=True))
    """
    if accelerator.num_processes == 1:
        return
    mean_of: Callable[[Tensor], Tensor]
    mean_of = functools.partial(_reduced, accelerator=accelerator, reduction="mean")
    if secure is not None:
        add_up = functools.partial(_reduced, accelerator=accelerator, reduction="sum")
        mean_of = secure.agreed(tensors, bits, add_up)
    for bucket in buckets(tensors):
        sizes = [tensor.numel() for tensor in bucket]
        mean = mean_of(torch.cat([tensor.flatten() for tensor in bucket]))
        for tensor, mean_part in zip(bucket, mean.split(sizes), strict=True):
            tensor.copy_(mean_part.view_as(tensor))


def _reduced(tensor: Tensor, accelerator: Accelerator, reduction: str) -> Tensor:
    try:
        return accelerator.reduce(tensor, reduction=reduction)
    except RuntimeError as error:
        raise RuntimeError(
            f"Rank {accelerator.process_index} could not exchange with the others, so the weights "
            "stay as they were before this step: a rank died, or did not answer within the "
            "process group's timeout. Look at the other ranks' errors, and resume from the last "
            "checkpoint."
        ) from error


def buckets(tensors: Sequence[Tensor], entries: int = 2**23) -> Iterator[list[Tensor]]:
    """Yield runs of tensors of one type with about `entries` entries.

    They make few, large collectives in bounded memory.

    Example:
        >>> [len(bucket) for bucket in buckets([torch.ones(3)] * 4, entries=6)]
        [2, 2]
    """
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and (
            tensor.dtype != bucket[0].dtype
            or sum(t.numel() for t in bucket) + tensor.numel() > entries
        ):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


class SecureSum(Protocol):
    """The interface of an aggregation that hides each rank's part of an average.

    `hf_gradguard.secure.SecureAggregation` has it, and is imported where it is asked for.
    """

    def agreed(
        self, tensors: Sequence[Tensor], bits: Bits, add_up: Callable[[Tensor], Tensor]
    ) -> Callable[[Tensor], Tensor]:
        """Return a function that averages tensors, once all ranks are ready for this exchange."""

    def check_carrier(self, accelerator: object) -> None:
        """Raise an error for another accelerator than its own."""


def any_rank(due: bool, accelerator: Accelerator, secure: SecureSum | None = None) -> bool:
    """Return whether something is due on any rank.

    All ranks must call it.

    Example:
        >>> any_rank(True, Accelerator(cpu=True))
        True
    """
    flag = torch.tensor(float(due), device=accelerator.device)
    average([flag], accelerator, secure)
    return bool(flag)


class AgreedTables:
    """The input-indexed tables of a model, found on every rank's first batch and joined over ranks.

    Two ranks may see different ones: each looks at its own data. They must average the same
    tensors, so what one rank found is withheld on all.

    Args:
        accelerator: The accelerator of the ranks.

    Example:
        >>> agreed = AgreedTables(Accelerator(cpu=True))
        >>> agreed.agree(model, batch, lambda model, batch: model(**batch).loss)
        True
        >>> agreed.agree(model, batch, lambda model, batch: model(**batch).loss)
        False
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._model: ReferenceType[nn.Module] | None = None
        self._tables = frozenset[str]()

    def agree(
        self,
        model: nn.Module,
        batch: Mapping[str, Any],
        loss_fn: LossFunction,
        secure: SecureSum | None = None,
        shards: Shards | None = None,
    ) -> bool:
        """Find tables, once per model and kind of batch. All ranks must call it at every step.

        Args:
            model: The bare model.
            batch: The batch of a client of this rank.
            loss_fn: The function that runs the model.
            secure: The secure aggregation that hides what this rank alone found.
            shards: The shards of a sharded model.

        Returns:
            Whether this was the model's first batch.

        Raises:
            ValueError: If a later batch has entries that index tables that were shared so far.
        """
        tables = find_tables(model, batch, loss_fn, shards)
        if self._model is None or self._model() is not model:
            self._tables = self._joined(model, tables, secure)
            remember_tables(model, self._tables)
            self._model = ref(model)
            return True
        if late := sorted(tables - self._tables):
            raise ValueError(
                f"A batch with entries {sorted(batch)} indexes {', '.join(late)}, which earlier "
                "batches without them shared, and other ranks may still share. Collate every batch "
                f"with the same entries, or name them from the start: withhold={late}."
            )
        return False

    def _joined(
        self, model: nn.Module, tables: frozenset[str], secure: SecureSum | None
    ) -> frozenset[str]:
        names = [name for name, _ in model.named_parameters()]
        device = self._accelerator.device
        flags = torch.tensor([float(name in tables) for name in names], device=device)
        average([flags], self._accelerator, secure)
        return frozenset(name for name, flag in zip(names, flags.tolist(), strict=True) if flag)


# Running statistics of normalization layers. Batch normalization keeps means and variances of the
# last batches' activations. They are computed on private data, no defense protects them, and an
# attacker uses them (GradInversion matches them).


def tracking_layers(model: nn.Module) -> dict[str, nn.modules.batchnorm._NormBase]:
    """Return the layers that keep running statistics, by name.

    Example:
        >>> list(tracking_layers(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))))
        ['1']
    """
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None
    }


def warn_of_statistics(model: nn.Module, choice: str) -> None:
    """Log once what becomes of a model's running statistics.

    Args:
        model: The model that is trained.
        choice: The setting `batch_statistics` of `GradGuardConfig`.

    Example:
        >>> warn_of_statistics(model, "local")  # BERT has none, so nothing is said
    """
    layers = tracking_layers(model)
    if layers and choice == "local":
        logger.warning(
            f"{type(model).__name__} keeps batch statistics ({len(layers)} layers, the first is "
            f"{next(iter(layers))!r}). Each rank's stay its own; rank 0's are saved with the "
            "model, so publishing it publishes them. Group normalization has none; "
            "batch_statistics='frozen' takes those that the model came with; 'shared' averages "
            "them over ranks. In a loop of your own put these layers in eval mode."
        )


def freeze_statistics(model: nn.Module) -> None:
    """Freeze running statistics as the model came with them. `model.train()` undoes it.

    Example:
        >>> layer = nn.BatchNorm1d(4)
        >>> freeze_statistics(layer)
        >>> layer.training
        False
    """
    for layer in tracking_layers(model).values():
        layer.eval()


def average_statistics(
    model: nn.Module, accelerator: Accelerator, secure: SecureSum | None = None
) -> None:
    """Replace running means and variances by their means over ranks, as federated averaging does.

    They are unprotected but for `secure`, which hides each rank's behind the mean.

    Example:
        >>> average_statistics(nn.BatchNorm1d(4), Accelerator(cpu=True))
    """
    layers = tracking_layers(model).values()
    buffers = [
        buffer
        for layer in layers
        for buffer in (layer.running_mean, layer.running_var)
        if buffer is not None
    ]
    average(buffers, accelerator, secure)
