"""The state of a model's modules beside weights, noted before a pass and restored after it.

A running mean in a buffer, a count in an attribute, a list around a method, what `get_extra_state`
adds to a checkpoint: any pass may write there what it made of its batch. `replay.HeldState` lets
one pass run again as it did; here a pass is to leave nothing behind, whatever the size of a tensor.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Container, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from operator import is_not
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from .replay import Outer


class ModuleState:
    """A record of modules' state, by which later changes are found.

    It holds buffers of any size. If asked for, it also holds attributes, variables that methods use
    from around them, and what hooks and `get_extra_state` add to a `state_dict`.

    Args:
        model: The model with these modules.
        only_buffers: Whether nothing but buffers is noted.

    Example:
        >>> layer = nn.BatchNorm1d(2)
        >>> state = ModuleState(layer)
        >>> _ = layer(torch.rand(4, 2))
        >>> state.restore()
        ['running_mean', 'running_var', 'num_batches_tracked']
        >>> layer.running_mean
        tensor([0., 0.])
    """

    def __init__(self, model: nn.Module, only_buffers: bool = False) -> None:
        self._model, owners = model, dict[int, _Owner]()
        for prefix, mapping in _owners(model, only_buffers):
            owners.setdefault(id(mapping), _Owner(prefix, mapping))
        self._owners = list(owners.values())
        self._extras = None if only_buffers else _extras(model)

    def restore(self, spared: Container[str] = ()) -> list[str]:
        """Restore the noted state.

        Args:
            spared: Names that stay as they are now.

        Returns:
            The names of what differed, such as `encoder.running_mean`.
        """
        return [name for owner in self._owners for name in owner.restore(spared)]

    def changed_extras(self) -> list[str]:
        """Return names in the model's `state_dict` that no module holds, and that changed."""
        noted, present = self._extras, _extras(self._model)
        if noted is None:
            return []
        names = noted.keys() | present.keys()
        return sorted(name for name in names if noted.get(name) != present.get(name))


class WeightState:
    """The noted weights of a model, without a copy: no pass may write to them.

    Args:
        model: The model with these parameters.
        sums: Whether to add up their bits as well: a write through `.data` is counted nowhere.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> state = WeightState(layer, sums=True)
        >>> layer.bias.data.add_(1.0)
        tensor(...)
        >>> state.changed()
        ['bias']
    """

    def __init__(self, model: nn.Module, sums: bool) -> None:
        self._model, self._sums = model, sums
        self._noted = self._all()

    def changed(self) -> list[str]:
        """Return names of the weights that changed."""
        present = self._all()
        return [name for name, noted in self._noted.items() if present.get(name) != noted]

    def _all(self) -> dict[str, tuple[int, int, int]]:
        return {
            name: (id(p), p._version, _sum_of_bits(p) if self._sums else 0)
            for name, p in self._model.named_parameters()
            if not hasattr(p, "quant_state")  # bitsandbytes packs them in the first pass
        }


def _sum_of_bits(tensor: Tensor) -> int:
    plain = tensor.detach().contiguous().reshape(-1)
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(plain.element_size(), torch.uint8)
    return int(plain.view(kind).sum(dtype=torch.int64))


def _owners(model: nn.Module, only_buffers: bool) -> Iterator[tuple[str, MutableMapping[str, Any]]]:
    kinds = set[type]()
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        yield prefix, module._buffers
        if only_buffers:
            continue
        yield prefix, vars(module)
        for attribute, value in vars(module).items():
            if attribute not in _MODULES_OWN and _is_plain(value):
                yield f"{prefix}{attribute}.", vars(value)
                kinds.add(type(value))
        kinds.update(type(module).__mro__)
    for kind in kinds:
        if _library(kind) not in _LIBRARIES:
            for method in vars(kind).values():
                for outer in Outer.of(method):
                    yield "", outer


def _is_plain(value: Any) -> bool:
    """Whether an object's attributes are a user's, or a configuration's, which is saved."""
    if isinstance(value, type | nn.Module | Tensor) or not hasattr(value, "__dict__"):
        return False
    return isinstance(value, PreTrainedConfig) or _library(type(value)) not in _LIBRARIES


def _library(kind: type) -> str:
    return kind.__module__.split(".")[0]


class _Owner:
    """What one mapping of names holds."""

    def __init__(self, prefix: str, mapping: MutableMapping[str, Any]) -> None:
        self.prefix, self._mapping = prefix, mapping
        self.notes = {n: _noted(v) for n, v in mapping.items() if n not in _MODULES_OWN}

    def restore(self, spared: Container[str]) -> Iterator[str]:
        present = [name for name in self._mapping if name not in _MODULES_OWN]
        for name in [n for n in present if n not in self.notes]:
            if self.prefix + name not in spared:
                del self._mapping[name]
                yield self.prefix + name
        for name, note in self.notes.items():
            if self.prefix + name in spared:
                continue
            current = self._mapping.get(name, _MISSING)
            differs = not note.equals(current)
            note.put_back()
            if current is not note.value:
                self._mapping[name] = note.value
            if differs:
                yield self.prefix + name


_MISSING = object()


@dataclass
class _Note:
    """A value, which is put back as the object that it is."""

    value: Any

    def equals(self, current: Any) -> bool:
        if self.value is current:
            return True
        try:
            return bool(type(self.value) is type(current) and self.value == current)
        except Exception:  # a comparison of anybody's
            return False

    def put_back(self) -> None:
        """Give it the content that it had."""


class _TensorNote(_Note):
    def __init__(self, value: Tensor) -> None:
        super().__init__(value)
        self._content = value.detach().clone()

    def equals(self, current: Any) -> bool:
        return isinstance(current, Tensor) and _same(self._content, current)

    @torch.no_grad()
    def put_back(self) -> None:
        if not _same(self._content, self.value):
            if self.value.shape != self._content.shape:
                self.value.resize_(self._content.shape)
            self.value.copy_(self._content)


class _ListNote(_Note):
    def __init__(self, value: Any) -> None:
        super().__init__(value)
        note = _noted if len(value) <= _LONGEST else _Note
        self._entries = [note(entry) for entry in value]

    def equals(self, current: Any) -> bool:
        if type(current) is not type(self.value) or len(current) != len(self._entries):
            return False
        return all(n.equals(entry) for n, entry in zip(self._entries, current, strict=True))

    def put_back(self) -> None:
        for note in self._entries:
            note.put_back()
        entries = [note.value for note in self._entries]
        if len(self.value) != len(entries) or any(map(is_not, self.value, entries)):
            self.value.clear()
            self.value.extend(entries)


class _DictNote(_Note):
    def __init__(self, value: Any) -> None:
        super().__init__(value)
        note = _noted if len(value) <= _LONGEST else _Note
        self._entries = {key: note(entry) for key, entry in value.items()}

    def equals(self, current: Any) -> bool:
        if type(current) is not type(self.value) or current.keys() != self._entries.keys():
            return False
        return all(note.equals(current[key]) for key, note in self._entries.items())

    def put_back(self) -> None:
        for note in self._entries.values():
            note.put_back()
        entries = {key: note.value for key, note in self._entries.items()}
        if list(self.value) != list(entries) or any(
            self.value[key] is not entry for key, entry in entries.items()
        ):
            self.value.clear()
            self.value.update(entries)


class _ArrayNote(_Note):
    def __init__(self, value: np.ndarray) -> None:
        super().__init__(value)
        self._content = value.copy()

    def equals(self, current: Any) -> bool:
        if not isinstance(current, np.ndarray) or current.dtype != self._content.dtype:
            return False
        return self._content.shape == current.shape and self._content.tobytes() == current.tobytes()

    def put_back(self) -> None:
        if not self.equals(self.value):
            np.copyto(self.value, self._content)


class _SetNote(_Note):
    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._entries = frozenset(value)

    def equals(self, current: Any) -> bool:
        return isinstance(current, set) and self._entries == current

    def put_back(self) -> None:
        if self.value != self._entries:
            self.value.clear()
            self.value.update(self._entries)


def _noted(value: Any) -> _Note:
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return _TensorNote(value)
    kind = next((note for types, note in _NOTES.items() if isinstance(value, types)), _Note)
    return kind(value)


_NOTES: dict[tuple[type, ...], type[_Note]] = {
    (list, deque): _ListNote, (dict,): _DictNote, (set,): _SetNote, (np.ndarray,): _ArrayNote
}  # fmt: skip


def _same(tensor: Tensor, current: Tensor) -> bool:
    """Whether two tensors hold the same; not-a-number equals itself."""
    if tensor.dtype != current.dtype or tensor.shape != current.shape:
        return False
    current = current.detach()
    if tensor.device != current.device or torch.equal(tensor, current):
        return tensor.device == current.device
    return bool(((tensor == current) | ((tensor != tensor) & (current != current))).all())


def _may_have_extras(model: nn.Module) -> bool:
    """Whether a `state_dict` may hold more than parameters and buffers."""
    return any(
        module._state_dict_hooks or module._state_dict_pre_hooks
        or any(getattr(type(module), n) is not getattr(nn.Module, n) for n in _WRITES_STATE)
        for module in model.modules()
    )  # fmt: skip


def _extras(model: nn.Module) -> dict[str, bytes]:
    """The entries of a `state_dict` that are neither parameters nor buffers, as bytes."""
    if not _may_have_extras(model):
        return {}
    held_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    held_names |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    state: Mapping[str, Any] = model.state_dict()
    return {name: _as_bytes(entry) for name, entry in state.items() if name not in held_names}


def _as_bytes(entry: Any) -> bytes:
    if isinstance(entry, Tensor):
        entry = entry.dtype, tuple(entry.shape), entry.detach().cpu().tolist()
    try:
        return pickle.dumps(entry)
    except Exception:  # of anybody's objects, some cannot be pickled
        return repr(entry).encode()


_MODULES_OWN = frozenset(vars(nn.Module()))
_LONGEST = 4096
"""Entries of a list whose own content is noted: of a longer one, which entries there are."""
_WRITES_STATE = ("get_extra_state", "_save_to_state_dict", "state_dict")
_LIBRARIES = frozenset(
    {"torch", "transformers", "peft", "accelerate", "bitsandbytes", "builtins", "collections"}
    | {"numpy", "random", "logging", "functools", "re", "threading", "weakref", "types"}
)
"""Whose objects hold nothing of a batch, or are noted by themselves."""
