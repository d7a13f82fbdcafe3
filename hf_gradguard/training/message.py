"""Messages: one client's batch becomes one protected gradient, which is added to `.grad`.

In reading order: the streams that noise is drawn from, clients and their batches, how a message is
made, guards of what it and the model show of a batch, what a card counts of messages, the weights
of clients' losses, and what clients share whose batch holds nothing.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.utils import logging

from ..defenses import Defense, Message
from ..defenses.base import NO_STATE, NoDefense, State
from ..defenses.noise import NoiseDefense
from ..gradient_map.domain import count_rows
from ..gradient_map.exchanges import no_exchange
from ..gradient_map.forward_hooks import has_forward_hooks
from ..gradient_map.lookups import vary
from ..gradient_map.parameters import find_tables
from ..gradient_map.replay import ModuleState, Replay, WeightState, draws_kept
from ..gradient_map.types import LossFunction, Tensors
from ..gradient_map.views import ZeroGradient
from ..randomness import Stream, private_draws
from .clients.batches import CLIENT, ROW, SHARE
from .config import setting
from .exchange.gradients import (
    Ledger,
    SecureSum,
    average,
    average_gradients,
    tracking_layers,
)
from .meter import LeakageMeter
from .refusals import refusal

logger = logging.get_logger(__name__)


class RandomStreams:
    """The random streams of every message: of its noise, its probes and its dropout.

    The leakage meter's probes have their own stream, since measuring a message must not change its
    noise.

    Args:
        seed: A seed that makes all draws reproducible, which is unsafe. `None`: every message has a
            new key from the operating system, so that a key that becomes known says nothing of
            other messages.
        rank: The rank, so that ranks draw differently under one seed.
        private_dropout: Whether dropout has a stream; if not, it follows torch's generators.

    Example:
        >>> noise, probes, dropout = RandomStreams().next_message(step=0)
    """

    def __init__(
        self, seed: int | None = None, rank: int = 0, private_dropout: bool = True
    ) -> None:
        self._seed, self._rank, self._private_dropout = seed, rank, private_dropout
        # the optimizer step, and how many messages of it were drawn for
        self._messages_of_step = (-1, 0)
        if seed is not None:
            logger.warning(
                f"UNSAFE: noise_seed={seed} makes all noise reproducible by anybody who knows it. "
                "Leave it out wherever the data matters."
            )

    def next_message(self, step: int) -> tuple[Stream, Stream, Stream | None]:
        """Return the streams of the next message of an optimizer step.

        A seed gives the same ones at the same step, also to a run that is resumed.
        """
        if self._seed is None:
            return Stream(), Stream(), Stream() if self._private_dropout else None
        last_step, count = self._messages_of_step
        self._messages_of_step = (step, count + 1 if step == last_step else 0)
        seeds = (self._seed, self._rank, *self._messages_of_step)
        probes, dropout = (Stream.from_seeds(*seeds, use) for use in (1, 2))
        return Stream.from_seeds(*seeds), probes, dropout if self._private_dropout else None


@dataclass(eq=False)
class Client:
    """A client that lives on this rank.

    Args:
        defense: The defense of its messages. Clients share it.
        state: The defense's state of this client.
        parameters: A short name of the parameters that its last message was of; `"-"` before the
            first.

    Example:
        >>> defense = make_defense("gaussian_noise")
        >>> clients = [Client(defense), Client(defense)]
    """

    defense: Defense
    state: State = field(default_factory=dict)
    parameters: str = "-"


class ClientBatch(NamedTuple):
    """The batch that one client computes a message of.

    Args:
        client: The client.
        batch: The client's rows, as a batch.
        weight: The weight of its mean loss in the loss of the step; 0 if nothing in the batch
            counts.
        rows: The numbers of its rows in the data set, `(B,)`, if the batch has them.
        noise_key: The key of the message's noise, where it was written down before; `None`: noise
            is from the rank's streams.
    """

    client: Client
    batch: dict[str, Any]
    weight: float
    rows: Tensor | None = None
    noise_key: bytes | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing of its batch counts: rows stand there for their shapes alone."""
        return self.rows is not None and not len(self.rows)


def split(batch: dict[str, Any], num_clients: int) -> list[dict[str, Any]]:
    """Cut a batch by rows into `num_clients` clients.

    The first ones are larger by one row where the batch does not divide.

    Example:
        >>> [len(part["labels"]) for part in split(batch, 2)]
        [1, 1]
    """
    if num_clients == 1:
        return [dict(batch)]
    # All texts in one row: cut by rows, one client would have them all.
    rows = count_rows(batch)
    if rows == 1 and _is_padding_free(batch):
        raise refusal("padding-free")
    device = next(value.device for value in batch.values() if isinstance(value, Tensor))
    parts_of = torch.arange(rows, device=device).tensor_split(num_clients)
    return [_take(batch, index, rows) for index in parts_of]


def clients_in(
    batch: dict[str, Any],
) -> Iterator[tuple[int, float, Tensor | None, dict[str, Any]]]:
    """Return the clients of a batch of `ClientCollator`.

    Each has its number, its weight in the round, the numbers of its rows in the data set, and its
    rows.

    Example:
        >>> whose = {CLIENT: torch.tensor([5, 0]), SHARE: torch.tensor([0.25, 0.75])}
        >>> rows = {ROW: torch.tensor([3, 8])}
        >>> [found[:3] for found in clients_in({**batch, **whose, **rows})]
        [(0, 0.75, tensor([8])), (5, 0.25, tensor([3]))]
    """
    columns = {key: value for key, value in batch.items() if key not in (CLIENT, SHARE)}
    numbers, shares = batch[CLIENT], batch[SHARE]
    if count_rows(columns) != len(numbers):
        raise refusal("padding-free")
    # In the order of their numbers: messages of one noise_seed come in the same order again.
    for number in numbers.unique():
        index = (numbers == number).nonzero().flatten()
        client_batch = _take(columns, index, len(numbers))
        yield int(number), float(shares[index[0]]), client_batch.pop(ROW, None), client_batch


def _take(batch: dict[str, Any], index: Tensor, rows: int) -> dict[str, Any]:
    """Some rows of a batch; what holds for all of them stays whole."""
    taken = {}
    for key, value in batch.items():
        holds_several = isinstance(value, list | tuple) or _dim(value) > 0
        length = len(value) if holds_several else 1
        if holds_several and length == rows:
            chosen = (
                value[index] if isinstance(value, Tensor) else [value[k] for k in index.tolist()]
            )
            taken[key] = chosen
        elif length == 1:
            taken[key] = value
        else:
            raise refusal("entries-of-no-row", name=key, entries=length, rows=rows)
    return taken


def _dim(value: Any) -> int:
    return value.dim() if isinstance(value, Tensor) else 0


def _is_padding_free(batch: dict[str, Any]) -> bool:
    """Return whether the row of a batch is several texts.

    Their bounds are given then, or positions begin again.
    """
    positions = batch.get("position_ids")
    restarts = isinstance(positions, Tensor) and bool((positions.diff(dim=-1) < 0).any())
    return restarts or any(key.startswith(("cu_seq_lens", "seq_idx")) for key in batch)


class MessageMaker:
    """A maker of messages: it differentiates, protects, measures and accumulates, client by client.

    Args:
        streams: The streams of the noise.
        meter: The meter that decides which messages may be shared; `None` if none is measured.
        ledger: The ledger of what was written to `.grad`.
        share_input_embeddings: Whether to share tables, as for `GradientMap`.
        withhold: Patterns of withheld names, as for `GradientMap`.

    Attributes:
        state_guard: The guard of what the model's modules hold.

    Example:
        >>> from transformers import TrainingArguments
        >>> defense, streams = make_defense("pruning", ratio=0.9), RandomStreams()
        >>> meter = LeakageMeter(TrainingArguments("out"), defense, None)
        >>> maker = MessageMaker(streams, meter, Ledger(), share_input_embeddings=False)
        >>> client = Client(defense)
        >>> turn = ClientBatch(client, batch, weight=1.0)
        >>> loss = maker.share(model, turn, lambda model, batch: model(**batch).loss, step=0)
        >>> 0 < maker.pop_metrics()["defense/cosine"] < 1
        True
    """

    average = staticmethod(average_gradients)

    def __init__(
        self,
        streams: RandomStreams,
        meter: LeakageMeter | None,
        ledger: Ledger,
        share_input_embeddings: bool,
        withhold: Sequence[str] = (),
    ) -> None:
        self._streams, self._meter, self._ledger = streams, meter, ledger
        # Undefended training is the stock Trainer's, mask by mask: nothing is drawn for it.
        self._undefended: tuple[Stream, Stream, Stream | None] = Stream(), Stream(), None
        self._parameters: tuple[tuple[str, ...], str] = (), ""  # that are trained, and their name
        self._rows, self.state_guard = RowGuard(), BufferGuard()
        self._share_input_embeddings, self._withhold = share_input_embeddings, withhold
        self._metrics: dict[str, list[float]] = defaultdict(list)

    def share(
        self,
        module: nn.Module,
        turn: ClientBatch,
        loss_fn: LossFunction,
        step: int,
        runner: Any = None,
    ) -> Tensor:
        """Add a client's protected gradient, times its weight, to `.grad`.

        Args:
            module: The bare model.
            turn: The client and its batch.
            loss_fn: The client's mean loss, `(model, batch) -> loss`.
            step: The number of optimizer steps before this one.
            runner: The compiled model, if there is one. It runs in place of `module` where a
                message asks for nothing but the gradient. Compiled code runs no hooks, and has no
                second derivatives.

        Returns:
            The client's mean loss, 0 for an empty batch.

        Raises:
            FloatingPointError: If the true or the protected gradient is not finite.
            RuntimeError, TypeError, ValueError: If the defense breaks its contract; see
                `Defense.__call__`; or if something else wrote to `.grad`. Nothing was added then.
        """
        client, meter = turn.client, self._meter
        self._forget_other_parameters(client, module)
        defense = client.defense.with_state(client.state)  # as it stands before this message
        is_measured = meter is not None and meter.measures(step)
        if runner not in (None, module) and not (is_measured or defense.facts.reruns_model):
            if not self._share_input_embeddings:
                find_tables(module, turn.batch, loss_fn)  # by hooks
            loss_fn = functools.partial(_run_by, runner, loss_fn)
        is_none = isinstance(defense, NoDefense)
        noise, probes, dropout = self._undefended if is_none else self._streams.next_message(step)
        if turn.noise_key is not None:
            noise = Stream(turn.noise_key)
        device = next(module.parameters()).device
        draws = nullcontext() if dropout is None else private_draws(dropout, device)
        with self.state_guard.watch(module, turn.batch, loss_fn), draws:
            sharing = self._sharing(module)
            gmap = defense.gradient_map(module, turn.batch, is_measured, loss_fn=loss_fn, **sharing)
            # Samples are clipped without their sum, and nothing is measured of that.
            gradient = {} if defense.facts.needs_samples else gmap.gradient()
            # The norm waits for the device: what follows times the defense alone.
            norm, start = _norm(gradient), time.perf_counter()
            source = ZeroGradient(gmap.parameters) if turn.is_empty else gmap
            message, state = defense._send(source, noise, step)
            self._rows.compare(gmap.gradient() if self._rows.remaining else {}, message)
            if not turn.is_empty:
                self._record(gradient, message, norm, start)
            if is_measured and not meter.admits(gmap, message, step, probes, turn.rows):  # type: ignore[union-attr]
                # Nothing is added: to the other ranks it is a gradient of zeros. Nor does a later
                # message hold anything of it: the client's state stays as it was.
                return gmap.loss
        client.state = state
        self._add(gmap.parameters, message, turn.weight)
        return torch.zeros_like(gmap.loss) if turn.is_empty else gmap.loss

    def _sharing(self, module: nn.Module) -> dict[str, Any]:
        """Return what a gradient map is told of how its gradient is shared."""
        return {
            "share_input_embeddings": self._share_input_embeddings,
            "withhold": self._withhold,
        }

    def share_noise(
        self, parameters: Mapping[str, nn.Parameter], client: Client, weight: float, step: int
    ) -> None:
        """Add a message of noise alone, times a weight, to `.grad`.

        It stands for a client in whose batch nothing counts. It is not measured, since it says
        nothing of any data.

        Raises:
            RuntimeError: If the defense asks for the batch.
        """
        noise, _, _ = self._streams.next_message(step)
        nothing = self._nothing(parameters)
        message, client.state = client.defense.apply(nothing, client.state, noise, step)
        self._add(parameters, message, weight)

    def _nothing(self, parameters: Mapping[str, nn.Parameter]) -> ZeroGradient:
        return ZeroGradient(parameters)

    @torch.no_grad()
    def _add(self, parameters: Mapping[str, nn.Parameter], shared: Message, weight: float) -> None:
        self._ledger.check(parameters.values(), "share a message")
        for name, parameter in parameters.items():
            # A copy: clipping and averaging write to it, and a defense may keep its message.
            weighted = shared[name].to(parameter.dtype).mul(weight)
            parameter.grad = weighted if parameter.grad is None else parameter.grad.add_(weighted)
        self._ledger.write(parameters.values())

    @property
    def metric_counts(self) -> dict[str, int]:
        """The number of messages that each metric of `pop_metrics` is of, by its name."""
        return {name: len(values) for name, values in self._metrics.items()}

    def pop_metrics(self) -> dict[str, float]:
        """Return the defense's metrics, as means over the messages since the last call."""
        means = {name: sum(values) / len(values) for name, values in self._metrics.items()}
        self._metrics.clear()
        return means

    def _forget_other_parameters(self, client: Client, module: nn.Module) -> None:
        """Empty a client's state if other parameters are trained than at its last message.

        Some may have been frozen or unfrozen, and the state is of the parameters that were trained.
        """
        trainable = tuple(name for name, p in module.named_parameters() if p.requires_grad)
        if trainable != self._parameters[0]:
            self._parameters = trainable, name_of(trainable)
        former, client.parameters = client.parameters, self._parameters[1]
        if former in ("-", client.parameters) or not client.defense.flatten(client.state):
            return
        client.state = NO_STATE
        logger.warning(
            "Other parameters are trained than at the last message: some were frozen or unfrozen. "
            f"{client.defense.name} forgot what it remembered of the former ones."
        )

    def _record(self, gradient: Tensors, message: Message, norm: float, start: float) -> None:
        """Note what the defense did to the gradient, and how long it took."""
        metrics = ({"seconds": time.perf_counter() - start} if gradient else {}) | message.metrics
        pairs = [(g, message[name]) for name, g in gradient.items()]
        if norm:
            error = math.hypot(*(float((m - g).norm()) for g, m in pairs))
            metrics["relative_error"] = error / norm
        if norm and (shared_norm := _norm(message)):
            inner = sum(float(torch.dot(g.flatten(), m.flatten())) for g, m in pairs)
            # Sums in float32 can end just outside.
            metrics["cosine"] = max(-1, min(1, inner / (norm * shared_norm)))
        for name, figure in metrics.items():
            self._metrics[f"defense/{name}"].append(figure)


def _run_by(
    runner: nn.Module, loss_fn: LossFunction, _: nn.Module, batch: dict[str, Any]
) -> Tensor:
    return loss_fn(runner, batch)


def name_of(parameters: Iterable[str]) -> str:
    """Return a short name of a list of names.

    Example:
        >>> name_of(["a", "b"]) == name_of(["a", "b"]) != name_of(["ab"])
        True
    """
    return hashlib.sha256("\n".join(parameters).encode()).hexdigest()


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm(list(tensors.values())))


# What a model holds beside weights, and zeros in a message, tell of batches. Guards warn of both,
# or put the model back as it was.


class RowGuard:
    """A guard that compares which rows of each matrix are zero in the first messages of a run.

    Where that differs from message to message it is a function of the batch, whatever is in the
    rows: experts of a mixture show routing, rectified units that nothing activated show which.

    Args:
        messages: The number of messages that are compared.

    Attributes:
        remaining: How many of them are still to come.

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
        """Return names that are new among those whose pattern of zeros differs, with a warning.

        What is shared without any zero, as behind noise everywhere, shows no pattern.
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


# What a model holds beside weights leaves with it, and no defense protects it. A proof covers
# messages, and the weights that are made of them. A running mean of a batch in a buffer is neither.
# Nor may it reach a later message: each row would move all messages after its own. So behind a
# proof, and with batch_statistics="frozen", every message ends with what modules held before it.


def state_guard(proves: bool, batch_statistics: str, instead: str = "") -> BufferGuard:
    """Return the guard of the state of a model's modules while messages are made.

    Args:
        proves: Whether the messages prove something.
        batch_statistics: The setting of `GradGuardConfig`.
        instead: The way out where it refuses. Default: a Trainer's.

    Example:
        >>> type(state_guard(proves=False, batch_statistics="local")).__name__
        'BufferGuard'
    """
    is_frozen = batch_statistics == "frozen"
    if not (is_frozen or proves):
        return BufferGuard()
    return KeptState(proves, is_frozen, instead or _FROZEN)


class BufferGuard:
    """A guard that warns of what a model's passes write to that is saved with it.

    It looks at the first batch: for other buffers than batch statistics, and for what modules add
    to a `state_dict` by themselves.

    Attributes:
        written: The names of what passes write to.

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
        """Return the context in which a message is made of a batch."""
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


class KeptState(BufferGuard):
    """A guard that puts back, after each message, what modules held before it.

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


def _saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that are saved, but for batch statistics."""
    layers = tuple(f"{name}." for name in tracking_layers(model))
    saved = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in saved and not name.startswith(layers):
            yield name, buffer


def _follow_the_batch(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss_fn: LossFunction,
    state_after: ModuleState,
    changed: list[str],
) -> set[str]:
    """Return the names of state that a pass over another batch leaves otherwise than `state_after`.

    If the model does not run on another batch, all names are returned.
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


class SharedMessages:
    """The counts of a rank's messages, by what the card says of them.

    There is one message for each client and micro-batch, also where nothing counted in a batch or a
    limit kept a message back, which others see as zeros. So counts follow from steps and settings
    alone, and say nothing of the data.

    Args:
        how: The function that says how a message would be shared now: `defense`, its `settings`,
            and more.

    Attributes:
        complete: Whether all are counted: not after a checkpoint that holds no count.

    Example:
        >>> shared = SharedMessages(lambda: {"defense": "pruning"})
        >>> shared.add(2)
        >>> shared.total, dict(shared.by("defense"))
        (2, {'pruning': 2})
    """

    def __init__(self, how: Callable[[], Mapping[str, str]]) -> None:
        self._describe = how
        self._how: str | None = None
        self._counts = Counter[str]()
        self.complete = True

    def add(self, messages: int) -> None:
        """Count messages of this training as shared."""
        if self._how is None:  # with its first message, when its withheld tables are known
            self._how = json.dumps(self._describe())
        self._counts[self._how] += messages

    def begin_training(self) -> None:
        """Forget how messages are shared, since the next training may share them in another way."""
        self._how = None

    @property
    def total(self) -> int:
        """The number of all messages."""
        return self._counts.total()

    def by(self, name: str) -> Counter[str]:
        """Return how many messages there are for each of a name's values.

        Before the first message there are none for today's value.
        """
        counts = Counter[str]()
        for how, count in (self._counts or {json.dumps(self._describe()): 0}).items():
            counts[json.loads(how).get(name, "")] += count
        return counts

    def state_dict(self) -> dict[str, Any]:
        """Return all counts for a checkpoint, in a form that JSON can hold."""
        return {"complete": self.complete, "messages": dict(self._counts)}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Load the counts of a checkpoint, if it has any.

        Messages that were counted beyond them stay counted, because they were shared, too.
        """
        if state is None:
            self.complete = False
            return
        self.complete = self.complete and state["complete"]
        self._counts = Counter[str](state["messages"]) | self._counts


@contextmanager
def annotate_errors(batch: Mapping[str, Any], hides_content: bool = False) -> Iterator[None]:
    """Add to errors, which often are a model's own, what batch they are about.

    Args:
        batch: The batch of a rank.
        hides_content: Whether its names alone are said: how many rows were drawn is a secret that
            an ε counts on, and logs of errors may be uploaded.

    Example:
        >>> with annotate_errors({"labels": torch.tensor([7, 9])}):
        ...     raise IndexError("Target 9 is out of bounds.")
        Traceback (most recent call last):
        IndexError: Target 9 is out of bounds.
        The batch holds labels (2,) of int64 from 7 to 9.
    """
    try:
        yield
    except Exception as error:
        contents = [n if hides_content else f"{n} {_described(v)}" for n, v in batch.items()]
        error.add_note(f"The batch holds {', '.join(contents)}.")
        if "more than 1 value per channel" in str(error):
            error.add_note(_SINGLE)
        raise


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"(a {type(value).__name__})"
    about = f"{tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    # an accelerator may be unable to answer after an error
    if value.numel() and not value.is_floating_point() and value.device.type == "cpu":
        low, high = value.aminmax()
        about += f" from {int(low)} to {int(high)}"
    return about


_SINGLE = (
    "A client of one row has no batch statistics. Take larger batches, fewer clients_per_process, "
    "dataloader_drop_last=True, or batch_statistics='frozen'."
)


# The weights that the stock Trainer would have given clients' losses. Noise scales and bounds are
# stated for the gradient of a client's mean loss, so the weight is taken out before protection and
# applied after.
#
# A loss may change while it is trained: a penalty that is warmed up, a distillation that fades in.
# So weights are right for any A/n + B, whatever of it there is at a step, and no step looks for it.
# Only what noise is measured against, a mean with B counted once or as often as the stock Trainer
# counts it, follows the first loss that is not 0: three passes without gradients, once a training.

Loss = Callable[[nn.Module, dict[str, Any], float | None], Tensor]
"""`(module, batch, items)`: the Trainer's loss, with `items` as its `num_items_in_batch`."""


class Spread(NamedTuple):
    """The factors that turn the Trainer's loss into a client's mean loss.

    Args:
        items: How many items count as one in `num_items_in_batch`.
        loss: The factor of the loss. A loss A/n + B of n items has the mean `loss`/`items` · A/n +
            `loss` · B.
    """

    items: float = 1.0
    loss: float = 1.0


@dataclass(frozen=True)
class Normalization:
    """The stock Trainer's normalization of a micro-batch's losses.

    Args:
        num_items: The number of labels that count in the whole optimizer step, on all ranks; `None`
            if losses are means over rows.
        rank_factor: The factor of `compute_loss` for a loss that is normalized over all ranks,
            since ranks are averaged later.
        accumulation: The number of micro-batches of the optimizer step.
        accumulated: Whether the loss is normalized over those already.
        shifts_labels: Whether the first label of a row does not count.

    Example:
        >>> means = Normalization(None, 1.0, accumulation=2, accumulated=False, shifts_labels=False)
        >>> LossWeights(loss=lambda model, batch, items: model(**batch).loss)(model, [batch], means)
        Weights(factors=[0.5], spread=Spread(items=1.0, loss=1.0))
    """

    num_items: Tensor | int | None
    rank_factor: float
    accumulation: int
    accumulated: bool
    shifts_labels: bool

    @classmethod
    def of_trainer(cls, trainer: Trainer, is_counted: bool) -> Normalization:
        """Return the normalization of a whole training.

        It is that of steps whose labels are counted, or of steps whose labels are not.
        """
        has_own_loss = trainer.compute_loss_func is not None
        accepts = trainer.model_accepts_loss_kwargs and is_counted
        over_ranks = is_counted and (accepts or has_own_loss)
        averages = over_ranks and trainer.args.average_tokens_across_devices
        scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        return cls(
            num_items=None,
            rank_factor=float(trainer.accelerator.num_processes) if averages else 1.0,
            accumulation=1,
            accumulated=(accepts or has_own_loss) if scaled is None else scaled,
            shifts_labels=getattr(trainer, "_loss_shifts_labels", False),
        )

    def items(self, batch: dict[str, Any]) -> int | None:
        """Return the number of a batch's labels that count toward the loss.

        They are counted as the Trainer counts them. It is `None` if the loss is a mean over rows.
        """
        if self.num_items is None:
            return None
        labels = batch.get("shift_labels")
        if labels is None:
            labels = batch["labels"][..., 1:] if self.shifts_labels else batch["labels"]
        return int(labels.ne(-100).sum())

    def mean_loss(
        self, loss: Loss, spread: Spread, module: nn.Module, batch: dict[str, Any]
    ) -> Tensor:
        """Return a client's mean loss: the Trainer's own, normalized by the client's items.

        See `LossWeights`.
        """
        items: float | None = self.items(batch)
        if items is not None and spread.items != 1:
            items = items * spread.items
        return loss(module, batch, items) / (self.rank_factor / spread.loss)


class Weights(NamedTuple):
    """The weights of clients' mean losses in the loss of a step.

    Args:
        factors: The factor of each client's mean loss; 0 for one in which nothing counts.
        spread: How mean losses are taken.
    """

    factors: list[float]
    spread: Spread = Spread()


class LossWeights:
    """The factors that the stock Trainer would have given clients' mean losses.

    A loss that is given the number of items n of the whole step is A/n + B: A alone for a sum over
    tokens, B alone where a model takes its own mean, both in a mixture of experts with a router
    loss. The stock Trainer adds up A_i/N + B_i over micro-batches i, so a micro-batch of C items
    counts as C/N times its mean loss A_i/C + (N/C) B_i, or, where there is B alone, once as its
    mean loss B_i. Clients share A_i and B_i in proportion to their items.

    Either is right for both parts, since it asks for the loss of N items: one client's is the stock
    Trainer's, whichever part comes or goes.

    Args:
        loss: The Trainer's.
    """

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self._is_mean: bool | None = None

    def __call__(
        self, module: nn.Module, batches: Sequence[dict[str, Any]], normalization: Normalization
    ) -> Weights:
        """Return the factor of each batch, and the spread of all.

        Raises:
            NotImplementedError: If the loss depends on `num_items_in_batch` in another way.
        """
        if normalization.num_items is None:
            sizes, spread = [count_rows(batch) for batch in batches], Spread()
            total = float(sum(sizes))
        else:
            sizes = [normalization.items(batch) or 0 for batch in batches]
            fullest = batches[sizes.index(max(sizes))]
            total, spread = self._spread(module, fullest, sum(sizes), normalization.num_items)
        factor = normalization.rank_factor
        if not normalization.accumulated:
            factor /= normalization.accumulation
        return Weights([size * factor / total if size else 0.0 for size in sizes], spread)

    def _spread(
        self, module: nn.Module, fullest: dict[str, Any], size: int, num_items: Tensor | int
    ) -> tuple[float, Spread]:
        """What sizes are divided by, and the spread."""
        if not size:
            return 1.0, Spread()
        items = float(num_items)
        if self._is_mean is None:  # a batch that cannot tell is asked again
            self._is_mean = self._takes_a_mean(module, fullest)
        ratio = items / size
        return (size, Spread(ratio)) if self._is_mean else (items, Spread(ratio, ratio))

    def _takes_a_mean(self, module: nn.Module, batch: dict[str, Any]) -> bool | None:
        """Whether of A/n + B there is B alone; `None` if this batch cannot tell."""
        of_one, of_two, of_many = self._losses(module, batch)
        largest = max(abs(of_one), abs(of_two), abs(of_many))
        if not 0 < largest < math.inf:
            return None  # a loss that is not finite is refused later
        if abs(of_two - (of_one + of_many) / 2) > 1e-2 * largest:
            raise refusal("loss-normalization", factor=of_two / of_one)
        # so small an A makes no difference that arithmetic could tell
        return abs(of_one - of_many) <= 1e-6 * largest

    def _losses(self, module: nn.Module, batch: dict[str, Any]) -> tuple[float, float, float]:
        """The loss per item, per two items, and per so many that only B is left."""
        # In the mode that stock runs in, with one set of draws: the loss may draw as well.
        replay, losses = Replay(module, second_order=False), []
        hooked = has_forward_hooks(module)
        for items in (1, 2, _MANY_ITEMS):
            with replay.draws(), torch.set_grad_enabled(hooked):
                losses.append(float(self._loss(module, batch, items).detach()))
        of_one, of_two, of_many = losses
        return of_one, of_two, of_many


_MANY_ITEMS = 2**30


# Clients with nothing that counts in their batch: no rows, or no labels. They share noise alone
# where its strength is stated. Zeros would say that nothing counted, and would leave a sum with
# less noise than was stated for it.


def is_summed(defense: Defense, args: TrainingArguments) -> bool:
    """Return whether a `scale` is stated for the sum of messages.

    A noise multiplier is stated for the sum too, but `PrivateRows` gives each message its part of
    it.

    Example:
        >>> is_summed(make_defense("gaussian_noise"), TrainingArguments("out"))
        False
    """
    summed = setting(args, "noise_for") == "sum"
    return summed and not getattr(defense, "per_sample", False)


class EmptyClients:
    """The messages of a rank's empty clients.

    A message of noise alone counts as much as one of equal weights would. With `summed` it counts
    as much as those that do count on average, on all ranks: a sum of n messages then has all of its
    noise, however few of them count. Their average is known when a step is due.

    Args:
        shared: The function that returns a module's shared parameters, by name.
        summed: Whether noise is stated for the sum of messages.

    Example:
        >>> from hf_gradguard import GradGuardConfig
        >>> from hf_gradguard.training.exchange.gradients import Ledger
        >>> from hf_gradguard.training.message import Client, ClientBatch, RandomStreams
        >>> from hf_gradguard.training.meter import LeakageMeter
        >>> defense = make_defense("gaussian_noise", scale=0.5)
        >>> meter = LeakageMeter(GradGuardConfig("out"), defense, None)
        >>> messages = MessageMaker(RandomStreams(), meter, Ledger(), share_input_embeddings=False)
        >>> empty = EmptyClients(lambda module: dict(module.named_parameters()), summed=False)
        >>> nobody = ClientBatch(Client(defense), {}, weight=0.0)
        >>> empty.share(messages, model, [nobody], accumulation=1, step=0)
        >>> 0.4 < float(model.bert.pooler.dense.weight.grad.std()) < 0.6
        True
    """

    def __init__(
        self, shared: Callable[[nn.Module], Mapping[str, nn.Parameter]], summed: bool
    ) -> None:
        self._shared, self.summed = shared, summed
        self._waiting: list[Client] = []
        self._weight, self._count = 0.0, 0

    def share(
        self, messages: MessageMaker, module: nn.Module, turns: Sequence[ClientBatch],
        accumulation: int, step: int,
    ) -> None:  # fmt: skip
        """Add the noise of a micro-batch's empty clients, or keep it for `share_sum`.

        Args:
            messages: The maker of messages.
            module: The module whose parameters are shared.
            turns: The batches of all clients in the micro-batch.
            accumulation: The number of micro-batches in the optimizer step.
            step: The number of finished optimizer steps.
        """
        self._weight += sum(turn.weight for turn in turns)
        self._count += sum(bool(turn.weight) for turn in turns)
        # Zeros would say that nothing counted, where others' messages have noise everywhere.
        noisy = [t.client for t in turns if not t.weight and _shares_noise(t.client)]
        if self.summed:
            self._waiting += noisy
            return
        for client in noisy:
            weight = 1 / (len(turns) * accumulation)
            messages.share_noise(self._shared(module), client, weight, step)

    def share_sum(
        self, messages: MessageMaker, module: nn.Module, step: int, accelerator: Accelerator,
        secure: SecureSum | None = None,
    ) -> None:  # fmt: skip
        """Add the noise that was kept, before a step's gradients are exchanged.

        All ranks must call it.

        Args:
            messages: The maker of messages, as for `share`.
            module: The module, as for `share`.
            step: The number of finished steps, as for `share`.
            accelerator: The accelerator that carries the weights and the number of messages that
                count.
            secure: The secure aggregation that hides each rank's.
        """
        weight_and_count = [self._weight, self._count]
        means = torch.tensor(weight_and_count, dtype=torch.float64, device=accelerator.device)
        average([means], accelerator, secure)
        weight, count = means.tolist()
        for client in self._waiting if count else []:
            messages.share_noise(self._shared(module), client, weight / count, step)
        self._waiting, self._weight, self._count = [], 0.0, 0


def _shares_noise(client: Client) -> bool:
    """Whether a client shares noise where it has nothing else to share."""
    defense = client.defense.with_state(client.state)
    return isinstance(defense, NoiseDefense) and defense.stands_alone
