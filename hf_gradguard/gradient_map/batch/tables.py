"""Which parameters are tables that the input itself indexes, found by running the model.

The gradient of such a table is non-zero on exactly the rows that a batch looks up, so sharing it
names them: token embeddings, but also a second table beside them, boxes, entities, own features.
Names do not tell. So the model runs on the batch and on another input of the same shape, and every
lookup is watched: a table is withheld if the rows that are asked for follow the input.

What is watched is where values come from. Each tensor of a forward pass carries the set of the
batch's entries and of the parameters that it was made of. A lookup is one in a tensor made of
parameters alone. Its indices follow the input if they differ between the two runs (positions that
are counted from padding are made of token ids, and do not), or if they were made of boxes, entities
and the like. If they were made of parameters too, the model computed them (routing to experts):
that is no table of the input, and what it shows is left to the Trainer's `RowGuard`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.utils import logging

from ..devices import devices
from ..exchanges import no_exchange
from ..kept import draws_kept, modes_kept
from ..sharding import reshard, whole_parameters
from .lookups import Lookup, lookups
from .variation import TOKENS, contents, vary

if TYPE_CHECKING:
    from ..inputs import Batch, LossFunction

logger = logging.get_logger(__name__)


class _Known:
    """What is known of a model: the inputs that it was watched on, and its tables."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names, self.keys = names, set[frozenset[str]]()
        self.tables: frozenset[str] = frozenset()


_known: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()


def find_tables(model: nn.Module, batch: Batch, loss_fn: LossFunction) -> frozenset[str]:
    """The parameters that are looked up by what is in the input, frozen ones included.

    Runs the model twice without gradients, in eval mode, the first time that it sees a batch of
    these entries; the answer is kept with the model. Buffers, weights, modes, random draws and
    hooks stay as they were.

    Args:
        model: The model, on the batch's device.
        batch: What a collator returns.
        loss_fn: `(model, batch) -> loss`: what runs the model.

    Returns:
        Names as in `named_parameters()`; of a tensor with several names, the first. All that were
        found for this model so far, also on other batches.

    Example:
        >>> sorted(find_tables(model, batch, lambda model, batch: model(**batch).loss))
        ['bert.embeddings.word_embeddings.weight']
    """
    names = tuple(name for name, _ in model.named_parameters())
    known = _known.get(model)
    if known is None or known.names != names:
        known = _known[model] = _Known(names)
    keys = frozenset(batch)
    if devices().any(keys not in known.keys):
        found = _scan(model, batch, loss_fn)
        flags = {name: torch.tensor(float(name in found)) for name in names}
        known.tables |= {name for name, flag in devices().each(flags, "max").items() if flag}
        known.keys.add(keys)
    return known.tables


def known_tables(model: nn.Module) -> frozenset[str]:
    """What `find_tables` found for this model so far, without looking.

    Example:
        >>> known_tables(nn.Linear(2, 2))
        frozenset()
    """
    known = _known.get(model)
    return frozenset() if known is None else known.tables


def remember_tables(model: nn.Module, tables: frozenset[str]) -> None:
    """Count parameters among a model's tables that others found: ranks have to share the same.

    Example:
        >>> remember_tables(model, frozenset({"classifier.bias"}))
        >>> "classifier.bias" in known_tables(model)
        True
    """
    names = tuple(name for name, _ in model.named_parameters())
    known = _known.setdefault(model, _Known(names))
    known.tables |= tables


def forget(model: nn.Module) -> None:
    """Look again at every kind of batch. What was found stays found: others may know it."""
    if model in _known:
        _known[model].keys.clear()


def _scan(model: nn.Module, batch: Batch, loss_fn: LossFunction) -> frozenset[str]:
    """The tables of one batch's entries."""
    other, varied = vary(model, batch)
    watch = _Watch(model)
    with _undisturbed(model):
        watch.run(loss_fn, batch)
        try:
            watch.run(loss_fn, other)
        except Exception as error:
            # Nothing tells positions that are counted off the input from tables that it indexes.
            varied = set()
            logger.warning_once(
                f"{type(model).__name__} does not run on another input than its batch's "
                f"({type(error).__name__}: {error}), so every table is withheld whose indices were "
                "made of anything in the batch."
            )
    reshard(model)
    return watch.followed(
        {key for key in contents(batch) if key not in varied or key not in TOKENS}
    )


class _Seen:
    """What was seen of one table in one run: the indices of every lookup, and their origin."""

    def __init__(self) -> None:
        self.indices: list[Tensor] = []
        self.origin = 0


class _Run:
    """One run: the tables that were looked up in, and what was looked up in activations."""

    def __init__(self) -> None:
        self.tables: defaultdict[tuple[int, str], _Seen] = defaultdict(_Seen)
        self.activations = set[tuple[int, str]]()


class _Watch(TorchDispatchMode):
    """Watches a model's runs.

    An origin is a set as the bits of a number: first the parameters, then the batch's entries.
    It belongs to a storage, so views have it, and what is written in place gets it.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._parameters = whole_parameters(model)
        self._weights = (1 << len(self._parameters)) - 1
        self._entries: dict[str, int] = {}
        self._floats = 0
        self._origins: dict[int, int] = {}
        self._alive: list[StorageWeakRef] = []
        self._own = set[int]()
        self._computed = set[int]()
        self._runs: list[_Run] = []

    def run(self, loss_fn: LossFunction, batch: Batch) -> None:
        """One run."""
        self._origins, self._alive, self._own, self._computed = {}, [], set(), set()
        self._runs.append(_Run())
        for place, parameter in enumerate(self._parameters.values()):
            self._mark(parameter, 1 << place)
        self._own = set(self._origins)
        for key, value in batch.items():
            fresh = 1 << (len(self._parameters) + len(self._entries))
            bit = self._entries.setdefault(key, fresh)
            for tensor in _tensors(value):
                self._floats |= bit if tensor.is_floating_point() else 0
                self._mark(tensor, bit)
        try:
            with no_exchange(self._model), self, torch.no_grad():
                loss_fn(self._model, dict(batch))
        except BaseException:
            self._runs.pop()
            raise

    def followed(self, entries: set[str]) -> frozenset[str]:
        """Parameters whose lookups follow the input.

        Args:
            entries: What is made of one of these follows the input, also if it is the same in both
                runs.
        """
        sure = sum(self._entries[key] for key in entries)
        first, last = self._runs[0], self._runs[-1]
        found = 0
        for table in first.tables.keys() | last.tables.keys():
            if table in first.activations | last.activations:
                continue
            one, other = first.tables[table], last.tables[table]
            if not _same(one.indices, other.indices) or one.origin & sure:
                found |= table[0]
        names = enumerate(self._parameters)
        return frozenset(name for place, name in names if found >> place & 1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "embedding_renorm_":  # `max_norm` writes to the rows that are looked up
            return args[0]
        inputs = _tensors((args, kwargs))
        origin = 0
        for tensor in inputs:
            origin |= self._origin(tensor)
        result = func(*args, **kwargs)
        if name == "_local_scalar_dense":
            if origin & self._weights and isinstance(result, int):
                self._computed.add(result)
            return result
        for lookup in lookups(name, args, kwargs):
            origin |= self._note(name, lookup)
        for tensor in _tensors(result):
            self._mark(tensor, origin)
        if func._schema.is_mutable:
            for value, argument in zip(args, func._schema.arguments, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for tensor in _tensors(value):
                        self._mark(tensor, origin)
        return result

    def _note(self, name: str, lookup: Lookup) -> int:
        """Note a lookup; returns what its result is made of beside table and index."""
        source, run = self._origin(lookup.table), self._runs[-1]
        if not source & self._weights:
            return 0
        table = source & self._weights, name
        if source > self._weights:
            run.activations.add(table)
            return 0
        origin = 0 if isinstance(lookup.at, int) else self._origin(lookup.at)
        if origin & self._weights or lookup.at in self._computed:
            return 0  # the model computed it
        if lookup.is_product and origin & self._floats:
            return 0
        seen, index = run.tables[table], lookup.places()
        place = len(seen.indices)
        seen.indices.append(index)
        seen.origin |= origin
        if run is self._runs[0]:
            return 0
        # Ids that went through Python have no origin; what they look up is an activation.
        follows = not _same(self._runs[0].tables[table].indices[place : place + 1], [index])
        return self._weights + 1 if follows else 0

    def _origin(self, tensor: Tensor) -> int:
        key = _storage(tensor)
        return 0 if key is None else self._origins.get(key, 0)

    def _mark(self, tensor: Tensor, origin: int) -> None:
        key = _storage(tensor)
        if key is None or not origin:
            return
        if key in self._own:
            return  # a view of a parameter is made of nothing else
        if key not in self._origins:
            # Keeps the address from being used again, and nothing else.
            self._alive.append(StorageWeakRef(tensor.untyped_storage()))
        self._origins[key] = self._origins.get(key, 0) | origin


def _storage(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse and other layouts have none
        return None


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode; modes, buffers and random draws are put back."""
    buffers = {
        (module, name): (buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    }
    with modes_kept(model) as modules, draws_kept(model):
        try:
            for module in modules:
                module.training = False
            yield
        finally:
            for (module, name), (buffer, copy) in buffers.items():
                module._buffers[name] = buffer
                if not torch.equal(buffer, copy):
                    buffer.data.copy_(copy)
