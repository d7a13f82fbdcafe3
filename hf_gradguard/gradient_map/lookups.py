"""Detection of tables that the input itself indexes, by running the model.

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

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.utils import logging

from .domain import TEXT, text_keys
from .exchanges import no_exchange
from .forward_hooks import has_forward_hooks
from .replay import Replay
from .types import Batch, LossFunction, Shards

logger = logging.get_logger(__name__)


def scan(
    model: nn.Module, batch: Batch, loss_fn: LossFunction, shards: Shards | None = None
) -> frozenset[str]:
    """Return the tables that one batch's entries index."""
    varied_batch, varied = vary(model, batch)
    watch = _Watch(model, shards)
    # In the mode that the model is in: the first pass of quantized weights may pack them for it.
    replay = Replay(model, False, loss_fn)  # both runs drop the same layers
    with replay.draws():
        watch.run(loss_fn, batch)
        try:
            with replay.draws():
                watch.run(loss_fn, varied_batch)
        except Exception as error:
            # Nothing tells positions that are counted off the input from tables that it indexes.
            varied = set()
            logger.warning_once(
                f"{type(model).__name__} does not run on another input than its batch's "
                f"({type(error).__name__}: {error}), so every table is withheld whose indices were "
                "made of anything in the batch."
            )
    if shards is not None:
        shards.reshard()
    return watch.followed(
        {key for key in contents(batch) if key not in varied or key not in TOKENS}
    )


class _TableLookups:
    """What was seen of one table in one run: the indices of every lookup, and their origin."""

    def __init__(self) -> None:
        self.indices: list[Tensor] = []
        self.origin = 0


class _Run:
    """One run: the tables that were looked up in, and what was looked up in activations."""

    def __init__(self) -> None:
        self.tables: defaultdict[tuple[int, str], _TableLookups] = defaultdict(_TableLookups)
        self.activations = set[tuple[int, str]]()


class _Watch(TorchDispatchMode):
    """Watches a model's runs.

    An origin is a set as the bits of a number: first the parameters, then the batch's entries.
    It belongs to a storage, so views have it, and what is written in place gets it.

    Args:
        model: The model.
        shards: As for `GradientMap`.
    """

    def __init__(self, model: nn.Module, shards: Shards | None = None) -> None:
        super().__init__()
        self._model = model
        parameters = dict(model.named_parameters()) if shards is None else shards.whole_parameters()
        self._parameters = parameters
        self._weights = (1 << len(self._parameters)) - 1
        self._entries: dict[str, int] = {}
        self._floats = 0
        self._origins: dict[int, int] = {}
        self._alive: list[StorageWeakRef] = []
        self._parameter_storages = set[int]()
        self._computed = set[int]()
        self._runs: list[_Run] = []

    def run(self, loss_fn: LossFunction, batch: Batch) -> None:
        """One run."""
        self._origins, self._alive, self._parameter_storages, self._computed = {}, [], set(), set()
        self._runs.append(_Run())
        for place, parameter in enumerate(self._parameters.values()):
            self._mark(parameter, 1 << place)
        self._parameter_storages = set(self._origins)
        for key, value in batch.items():
            entry_bit = 1 << (len(self._parameters) + len(self._entries))
            bit = self._entries.setdefault(key, entry_bit)
            for tensor in _tensors(value):
                self._floats |= bit if tensor.is_floating_point() else 0
                self._mark(tensor, bit)
        try:
            hooked = has_forward_hooks(self._model)
            with no_exchange(self._model), self, torch.set_grad_enabled(hooked):
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
        first_run, last_run = self._runs[0], self._runs[-1]
        parameter_bits = 0
        for table in first_run.tables.keys() | last_run.tables.keys():
            if table in first_run.activations | last_run.activations:
                continue
            first_lookups, last_lookups = first_run.tables[table], last_run.tables[table]
            if (
                not _same(first_lookups.indices, last_lookups.indices)
                or first_lookups.origin & sure
            ):
                parameter_bits |= table[0]
        names = enumerate(self._parameters)
        return frozenset(name for place, name in names if parameter_bits >> place & 1)

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
        origin = 0 if isinstance(lookup.indices, int) else self._origin(lookup.indices)
        if origin & self._weights or lookup.indices in self._computed:
            return 0  # the model computed it
        if lookup.is_product and origin & self._floats:
            return 0
        table_lookups, index = run.tables[table], lookup.places()
        place = len(table_lookups.indices)
        table_lookups.indices.append(index)
        table_lookups.origin |= origin
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
        if key in self._parameter_storages:
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


def _same(tensors: list[Tensor], references: list[Tensor]) -> bool:
    return len(tensors) == len(references) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(tensors, references, strict=True)
    )


_INDEX_AT = {
    "embedding": 1,
    "_embedding_bag": 1,
    "_embedding_bag_forward_only": 1,
    "index_select": 2,
    "gather": 2,
    "take": 1,
    "masked_select": 1,
    "select": 2,
}
"""Operations that take a table first, and where their index stands."""

_PRODUCTS = {"mm": 0, "bmm": 0, "mv": 0, "addmm": 1, "baddbmm": 1, "addmv": 1, "linear": 0}
"""Matrix products, and where their first factor stands."""


class Lookup(NamedTuple):
    """One lookup in a table.

    Args:
        table: The tensor that is looked up in.
        indices: The places: whole numbers, a mask, or the other factor of a product.
        dim: For a factor, the dimension that is summed over; `None` if `indices` is none.
    """

    table: Tensor
    indices: Tensor | int
    dim: int | None = None

    @property
    def is_product(self) -> bool:
        """Whether this is a product with a factor that may be zero except at a few places."""
        return self.dim is not None

    def places(self) -> Tensor:
        """Return which places are asked for: the index, or where the factor is not zero."""
        if isinstance(self.indices, int):
            return torch.tensor(self.indices)
        if self.dim is None:
            return self.indices.detach().clone()
        used = self.indices.detach() != 0
        return used.movedim(self.dim, 0).flatten(1).any(1) if used.dim() > 1 else used


def lookups(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Lookup]:
    """Yield what an operation of torch's looks up.

    A matrix product may look up too: a vector of counts times a table asks for the rows of the
    words that are there.

    Args:
        name: The operation's name in ATen.
        args: The arguments of the operation.
        kwargs: The keyword arguments of the operation.

    Example:
        >>> table, ids = torch.ones(5, 2), torch.tensor([3])
        >>> [lookup.places() for lookup in lookups("embedding", (table, ids), {})]
        [tensor([3])]
    """
    if name in _INDEX_AT:
        index = args[_INDEX_AT[name]] if len(args) > _INDEX_AT[name] else kwargs.get("index")
        if isinstance(index, Tensor | int):
            yield Lookup(args[0], index)
    elif name in ("index", "_unsafe_index"):
        yield from (Lookup(args[0], index) for index in args[1] if index is not None)
    elif name in _PRODUCTS:
        left_factor, right_factor = args[_PRODUCTS[name] : _PRODUCTS[name] + 2]
        yield Lookup(right_factor, left_factor, -1)
        yield Lookup(
            left_factor, right_factor, -1 if name == "linear" or right_factor.dim() == 1 else -2
        )
    elif name == "convolution":
        yield Lookup(args[1], args[0], 1)


STRUCTURE = re.compile(
    r"(.*_)?(masks?|position_ids|positions?|token_type_ids|segment_ids|lengths?)"
)
"""Entries of a batch that say where things are, and not what they are: they stay."""
TOKENS = {TEXT.key, "decoder_input_ids", "labels"}
"""Entries of token ids, from which positions may be counted too."""


def contents(batch: Mapping[str, Any]) -> set[str]:
    """Return the entries of a batch that say what is there.

    Example:
        >>> sorted(contents(batch))
        ['input_ids', 'labels']
    """
    return {key for key in batch if not STRUCTURE.fullmatch(key)}


def vary(model: nn.Module, batch: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return a batch of the same shapes with another content.

    Token ids become other ids of the vocabulary; special tokens stay, since positions are counted
    from padding. Other whole numbers are taken from the batch itself (a row's from the next one),
    all but the largest, or halved, so that none is outside a table's range.

    Args:
        model: The model, whose configuration names special tokens.
        batch: A batch, as a collator returns it.

    Returns:
        The other batch, and which entries differ.

    Example:
        >>> other, varied = vary(model, batch)
        >>> bool((other["input_ids"] == batch["input_ids"]).all())
        False
    """
    special = special_ids(getattr(model, "config", None))
    varied, texts = dict(batch), text_keys(batch)
    for key, value in batch.items():
        if not isinstance(value, Tensor) or key not in contents(batch) or not value.numel():
            continue
        if value.is_floating_point():
            varied[key] = 0.5 * value.flip(0).roll(1, -1) + 0.1
        elif value.dtype != torch.bool:
            changed = _other_ids(model, value, special) if key in texts else value
            for change in (_next_row, _rolled, _halved):
                if not torch.equal(changed, value):
                    break
                changed = change(value, special)
            varied[key] = changed
    return varied, {
        key
        for key, value in batch.items()
        if isinstance(value, Tensor) and not torch.equal(varied[key], value)
    }


def special_ids(config: Any) -> set[int]:
    """Return the ids that a configuration, or one inside it, names: padding, end of text.

    Example:
        >>> 0 in special_ids(model.config)  # padding
        True
    """
    ids = set[int]()
    values = dict(getattr(config, "__dict__", {}))
    for name, value in values.items():
        if name.endswith(("token_id", "token_ids", "token_index")):
            named_ids = value if isinstance(value, list | tuple) else [value]
            ids |= {token_id for token_id in named_ids if isinstance(token_id, int)}
        elif hasattr(value, "to_dict") and hasattr(value, "model_type"):
            ids |= special_ids(value)
    return ids


def _other_ids(model: nn.Module, ids: Tensor, special: set[int]) -> Tensor:
    """Other ordinary ids, none the same as before, and not all as far from it."""
    size = _vocabulary(model)
    ordinary = torch.tensor([i for i in range(size) if i not in special], device=ids.device)
    if len(ordinary) < 3:
        return ids
    free = torch.isin(ids, ordinary)
    steps = torch.arange(ids.numel(), device=ids.device).view_as(ids) * 31 % (len(ordinary) - 1)
    places = (torch.searchsorted(ordinary, ids.contiguous()) + 1 + steps) % len(ordinary)
    return torch.where(free, ordinary[places].to(ids.dtype), ids)


def _vocabulary(model: nn.Module) -> int:
    """How many ids there are for certain; 0 if nothing says so."""
    try:
        weight: Any = TEXT.embedding(model).weight
        rows = weight.shape[0]
    except (ValueError, AttributeError, NotImplementedError):
        rows = 0
    config: Any = getattr(model, "config", None)
    declared_size = getattr(config, "vocab_size", None)
    sizes = [size for size in (rows, declared_size) if isinstance(size, int) and size > 0]
    return min(sizes, default=0)


def _next_row(value: Tensor, special: set[int]) -> Tensor:
    """Boxes and the like, `(B, T, ...)`: those of the next position."""
    return value.roll(1, 1) if value.dim() > 2 else value


def _rolled(value: Tensor, special: set[int]) -> Tensor:
    """Ordinary values in another order, and one of them no more: counts of words tell no order."""
    free = value >= 0
    for special_id in special if value.dim() > 1 else ():
        free &= value != special_id
    changed = value.clone()
    changed[free] = value[free].roll(1)
    if free.any():
        least, most = value[free].aminmax()
        changed[free & (changed == most)] = least
    return changed


def _halved(value: Tensor, special: set[int]) -> Tensor:
    """Half of each value, which keeps corners of boxes in order."""
    return torch.where(value >= 0, value // 2, value)
