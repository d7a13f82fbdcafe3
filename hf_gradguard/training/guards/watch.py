"""What is watched while a training runs.

`Ledger`: what may reach the optimizer are gradients that were protected and exchanged, and nothing
else.

Whoever calls `loss.backward()` (a `training_step` of one's own, a callback, a loss that
differentiates) adds a true gradient to `.grad`, from where it would be sent to other ranks or
trained on. So the package writes down which tensors it put there, and every later hand-over looks
whether they are those, unchanged. That is a comparison of two integers a parameter.

`HookGuard`: users' hooks run as in a plain training, or are refused. `AgreedTables`: ranks withhold
the same tables. `RowGuard` and `BufferGuard` warn of zero rows, and of buffers, that tell of a
batch. `KeptState` puts back what modules hold beside weights.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import ReferenceType, ref

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from transformers import TrainerCallback, TrainingArguments
from transformers.utils import logging

from ...gradient_map.exchanges import no_exchange
from ...gradient_map.lookups import vary
from ...gradient_map.parameters import find_tables, remember_tables
from ...gradient_map.replay import ModuleState, WeightState, draws_kept, modes_kept, nodes_of
from ...gradient_map.types import LossFunction, Shards
from ..exchange.average import SecureSum, average
from ..refusals import refusal
from .hooks import (
    Differentiation,
    Hook,
    check_hooks,
    hooks_of,
    hooks_of_accumulation,
    packs_tensors,
    run_hooks_on_sums,
)

logger = logging.get_logger(__name__)

INSTEAD = (
    "Do not override training_step, or end it with super().training_step(...); change the loss in "
    "compute_loss or compute_loss_func, and what is shared in a Defense. In a callback or a loss "
    "use torch.autograd.grad, which leaves .grad alone."
)


class Ledger(TrainerCallback):
    """The gradients that the package wrote, from the first message of a step to the optimizer.

    As a callback it watches the optimizer of every training.

    Attributes:
        strangers: Parameters that it holds and the model has not, until they are looked at.
        writes: Says how often a gradient was written to.

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
            RuntimeError: With the name of a parameter whose `.grad` is not.
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
        """The `.grad` of these is as it should be.

        Args:
            parameters: Those that were written to.
            exchanged: Whether they were averaged over ranks, and no others were.
        """
        self._exchanged = exchanged
        self._written = ({} if exchanged else self._written) | self._stamps(parameters)

    @contextmanager
    def clipping(self, parameters: Any) -> Iterator[list[nn.Parameter]]:
        """Parameters whose `.grad` may be clipped in here, one or several.

        Raises:
            RuntimeError: As for `check`.
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
        """Look at what the optimizer is given before each of its steps."""
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
        """Refuse a loss that is computed from `strangers`, as far as it would train them. A model
        that only guides one (as in sentence-transformers' GISTEmbedLoss) is not trained anyway.

        Args:
            model: The bare model.
            batch: Of a rank.
            loss_fn: `(model, batch, items)`, the Trainer's. It runs once, under draws that are put
                back.

        Raises:
            UnsupportedError: With their shapes.
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


class HookGuard(TrainerCallback):
    """Looks before each optimizer step for hooks that would not run as in a plain training, and
    runs those that wait for `.grad`.

    Args:
        trainer: A protected one.

    Attributes:
        has_sums: Whether any hook waits for `.grad`.

    Example:
        >>> guard = HookGuard(trainer=None)
        >>> guard.has_sums  # nothing was looked at yet
        False
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.has_sums = False

    def on_train_begin(self, args: TrainingArguments, *_: Any, **kwargs: Any) -> None:
        """Look also at the steps of autograd's that add to `.grad`, which takes a while."""
        self._check(hooks_of_accumulation(self._trainer.model))

    def on_step_begin(self, args: TrainingArguments, *_: Any, **kwargs: Any) -> None:
        """Look again, for a callback may have registered one since."""
        self._check(())

    def on_substep_end(self, args: TrainingArguments, *_: Any, **kwargs: Any) -> None:
        """Look again before the next micro-batch."""
        self._check(())

    def _check(self, hooks: Iterable[Hook]) -> None:
        trainer, hooks = self._trainer, [*hooks, *hooks_of(self._trainer.model)]
        if hooks or packs_tensors():
            shared_names = trainer.shared_names
            check_hooks(trainer.model, hooks, Differentiation.of_trainer(trainer), shared_names)
        self.has_sums = any(hook.sees == "sum" for hook in hooks)

    def run(self, parameters: Iterable[nn.Parameter]) -> None:
        """Run the hooks that wait for `.grad`, when all messages of a micro-batch are in it.

        Raises:
            UnsupportedError: For a hook that does more than change `.grad`.
        """
        summed = [parameter for parameter in parameters if parameter.grad is not None]
        self._trainer.ledger.check(summed, "run hooks")
        run_hooks_on_sums(summed)
        self._trainer.ledger.write(summed)


class AgreedTables:
    """The input-indexed tables of a model, found on every rank's first batch and joined over ranks.

    Two ranks may see different ones: each looks at its own data. They must average the same
    tensors, so what one rank found is withheld on all.

    Args:
        accelerator: Of the ranks.

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
        """Look for tables, once per model and kind of batch. All ranks must call it at every step.

        Args:
            model: The bare model.
            batch: Of a client of this rank.
            loss_fn: What runs the model.
            secure: Hides what this rank alone found.
            shards: Of a sharded model.

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


class RowGuard:
    """Compares which rows of each matrix are zero in the first messages of a run.

    Where that differs from message to message it is a function of the batch, whatever is in the
    rows: experts of a mixture show routing, rectified units that nothing activated show which.

    Args:
        messages: How many are compared.

    Attributes:
        remaining: How many still are.

    Example:
        >>> guard = RowGuard()
        >>> guard.compare({"experts": torch.tensor([[1.0], [0.0]])})
        []
        >>> guard.compare({"experts": torch.tensor([[0.0], [1.0]])})
        ['experts']
    """

    def __init__(self, messages: int = 8) -> None:
        self.remaining = messages
        self._rows: dict[str, list[Tensor]] = {}
        self._named = set[str]()

    def compare(
        self, gradient: Mapping[str, Tensor], shared: Mapping[str, Tensor] | None = None
    ) -> list[str]:
        """Names that are new among those whose pattern of zeros differs, with a warning. What is
        shared without any zero, as behind noise everywhere, shows no pattern.
        """
        if not self.remaining:
            return []
        self.remaining -= 1
        new_names = [
            name for name, tensor in gradient.items()
            if name not in self._named and self._differs(name, tensor, shared)
        ]  # fmt: skip
        self._named.update(new_names)
        if new_names:
            unlisted = f" and {len(new_names) - 5} more" if len(new_names) > 5 else ""
            # Once, where several trainings run: gradguard recommend's.
            logger.warning_once(
                f"Zero rows of {', '.join(new_names[:5])}{unlisted} differ from message to "
                "message. They say which rows a batch used: of position embeddings how long its "
                "texts are, else which units were active, or which experts its tokens went to. "
                "Noise on all entries (gaussian_noise) fills them; withhold=[...] with patterns of "
                "these names leaves them out."
            )
        return new_names

    def _differs(self, name: str, gradient: Tensor, shared: Mapping[str, Tensor] | None) -> bool:
        """Whether other rows are zero than in the first message that had any that are not."""
        hides_rows = shared is not None and bool(shared[name].all())
        if gradient.dim() < 2 or hides_rows or not bool(gradient.any()):
            return False
        dims = range(gradient.dim())
        rows = [(gradient != 0).movedim(dim, 0).flatten(1).any(1) for dim in dims]
        return not all(map(torch.equal, self._rows.setdefault(name, rows), rows))


class BufferGuard:
    """Warns, at a model's first batch, of what its passes write to that is saved with it: other
    buffers than batch statistics, and what modules add to a `state_dict` by themselves.

    Attributes:
        written: The names of that.

    Example:
        >>> guard = BufferGuard()
        >>> with guard.watch(model, batch, loss_fn=None):  # BERT writes to none, so nothing is said
        ...     loss = model(**batch).loss
        >>> guard.written
        []
    """

    def __init__(self) -> None:
        self._watched: ReferenceType[nn.Module] | None = None
        self.written: list[str] = []

    def watch(
        self, model: nn.Module, batch: Mapping[str, Any], loss_fn: LossFunction
    ) -> AbstractContextManager[None]:
        """While a message is made of a batch."""
        is_known = self._watched is not None and self._watched() is model
        return nullcontext() if is_known else self._compare(model)

    @contextmanager
    def _compare(self, model: nn.Module) -> Iterator[None]:
        copies = {name: buffer.clone() for name, buffer in _saved_buffers(model)}
        state = ModuleState(model)
        yield
        self._watched = ref(model)
        present = dict(_saved_buffers(model))
        self.written = sorted(
            name for name, buffer in copies.items()
            if name not in present or not torch.equal(buffer, present[name])
        ) + state.changed_extras()  # fmt: skip
        if self.written:
            logger.warning(
                f"{type(model).__name__} writes to buffers as it runs: {', '.join(self.written)}. "
                "They hold what it made of this rank's data, unprotected, and rank 0's are saved "
                "with the model. Keep them as they are in training (batch_statistics='frozen' does "
                "of a Trainer), or out of what is saved (register_buffer(..., persistent=False))."
            )


def _saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that are saved, but for batch statistics."""
    layers = tuple(f"{name}." for name in tracking_layers(model))
    saved = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in saved and not name.startswith(layers):
            yield name, buffer


# Running statistics of normalization layers. Batch normalization keeps means and variances of the
# last batches' activations. They are computed on private data, no defense protects them, and an
# attacker uses them (GradInversion matches them).


def tracking_layers(model: nn.Module) -> dict[str, nn.modules.batchnorm._NormBase]:
    """The layers that keep running statistics, by name.

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
    """Say once what becomes of a model's running statistics.

    Args:
        model: What is trained.
        choice: One of `BATCH_STATISTICS` of `config.py`.

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
    """Normalize by the statistics that the model came with. `model.train()` undoes it.

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
    Unprotected but for `secure`, which hides each rank's behind the mean.

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


# What a model holds beside weights leaves with it, and no defense protects it. A proof covers
# messages, and the weights that are made of them. A running mean of a batch in a buffer is neither.
# Nor may it reach a later message: each row would move all messages after its own. So behind a
# proof, and with batch_statistics="frozen", every message ends with what modules held before it.


def state_guard(proves: bool, batch_statistics: str, instead: str = "") -> BufferGuard:
    """Return what looks after the state of a model's modules while messages are made.

    Args:
        proves: Whether the messages prove something.
        batch_statistics: As for `GradGuardConfig`.
        instead: The way out where it refuses. Default: a Trainer's.

    Example:
        >>> type(state_guard(proves=False, batch_statistics="local")).__name__
        'BufferGuard'
    """
    is_frozen = batch_statistics == "frozen"
    if not (is_frozen or proves):
        return BufferGuard()
    return KeptState(proves, is_frozen, instead or _FROZEN)


class KeptState(BufferGuard):
    """Puts back, after each message, what modules held before it.

    At a model's first message it looks at what passes write. What another batch writes alike (a
    count of steps, a norm of weights) is no secret and goes on. Of the rest, what is saved with the
    model is refused, unless all is to be put back.

    Args:
        proves: Whether messages prove something: then no pass may write to weights either.
        is_frozen: Whether what is saved is put back, too, and not refused.
        instead: The way out of a refusal.

    Example:
        >>> layer, guard = nn.BatchNorm1d(2), KeptState(True, is_frozen=True, instead="")
        >>> with guard.watch(layer, {}, lambda layer, batch: layer(torch.rand(4, 2)).sum()):
        ...     _ = layer(torch.rand(4, 2))
        >>> layer.running_mean
        tensor([0., 0.])
    """

    def __init__(self, proves: bool, is_frozen: bool, instead: str) -> None:
        super().__init__()
        self._proves, self._is_frozen, self._instead = proves, is_frozen, instead
        self._public = frozenset[str]()  # written alike whatever the batch is

    @contextmanager
    def watch(
        self, model: nn.Module, batch: Mapping[str, Any], loss_fn: LossFunction
    ) -> Iterator[None]:
        is_first = self._watched is None or self._watched() is not model
        state = ModuleState(model)
        weights = WeightState(model, sums=is_first) if self._proves else None
        try:
            yield
            if is_first:
                self._look(model, batch, loss_fn, state)
        finally:
            changed = state.restore(self._public)
        self._watched: ReferenceType[nn.Module] | None = ref(model)
        if changed:
            logger.warning_once(_PUT_BACK.format(type(model).__name__, _listed(changed)))
        lasting = state.changed_extras() + ([] if weights is None else weights.changed())
        lasting += state.variables_set()
        if lasting := [name for name in lasting if name not in self._public]:
            raise refusal(
                "lasting-state-of-rows", kind=type(model).__name__, names=_listed(lasting)
            )

    def _look(
        self, model: nn.Module, batch: Mapping[str, Any], loss_fn: LossFunction, state: ModuleState
    ) -> None:
        """Find out at the first message what passes write, and refuse what is saved of it."""
        state_after, extras = ModuleState(model), state.changed_extras()
        changed = state.restore() + extras
        if not changed:
            return
        follows = _follow_the_batch(model, batch, loss_fn, state_after, changed)
        self._public = frozenset(set(changed) - follows)
        state_after.restore()
        saved = {*model.state_dict(keep_vars=True), *extras} & follows
        if (written := [name for name in changed if name in saved]) and not self._is_frozen:
            state.restore()
            raise refusal(
                "saved-state-of-rows",
                kind=type(model).__name__, names=_listed(written), way_out=self._instead,
            )  # fmt: skip


def _follow_the_batch(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss_fn: LossFunction,
    state_after: ModuleState,
    changed: list[str],
) -> set[str]:
    """Names of what a pass over another batch leaves otherwise than `state_after`: all, if the
    model does not run on another one.
    """
    try:
        with draws_kept(model), no_exchange(model), torch.no_grad():
            loss_fn(model, vary(model, batch)[0])
            return {*state_after.changed_extras(), *state_after.restore()}
    except Exception:  # of anybody's model
        return set(changed)


def _listed(names: list[str]) -> str:
    unlisted = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{unlisted}"


_FROZEN = (
    "Set batch_statistics='frozen', under which every message leaves modules as it found them; or "
    "compute this elsewhere than in forward, from public data."
)
_PUT_BACK = (
    "{} writes to {} as it runs. Each message puts that back as it found it: what is made of a "
    "batch stays in no model and reaches no later message."
)
