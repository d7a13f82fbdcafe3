"""Repeated evaluation of one function: the same random draws and statistics, plain attention."""

from __future__ import annotations

import copy
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import is_dataclass
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from .forward_hooks import attributes_of, forward_hooks_of, function_of, global_forward_hooks


class DrawState(NamedTuple):
    """The state of the generators of torch (on the processor), numpy and `random`.

    Example:
        >>> before = DrawState.now()
        >>> number = torch.rand(1)
        >>> before.restore()
        >>> number == torch.rand(1)
        tensor([True])
    """

    of_torch: torch.Tensor
    of_numpy: Any
    of_python: Any

    @classmethod
    def now(cls) -> DrawState:
        """Return the present state."""
        return cls(torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate())

    def restore(self) -> None:
        """Restore the state of all three generators."""
        torch.set_rng_state(self.of_torch)
        np.random.set_state(self.of_numpy)
        random.setstate(self.of_python)

    def plain(self) -> tuple[Any, ...]:
        """Return a value that is equal if the state is."""
        return self.of_torch.numpy().tobytes(), pickle.dumps(self.of_numpy), self.of_python


@contextmanager
def draws_restored() -> Iterator[DrawState]:
    """Restore the three generators at the end of the context, whatever was drawn.

    Example:
        >>> with draws_restored():
        ...     number = random.random()
        >>> number == random.random()
        True
    """
    state = DrawState.now()
    try:
        yield state
    finally:
        state.restore()


class HeldState:
    """The state that a pass may change beside parameters and global generators.

    It is numbers, lists, tensors and generators that somebody holds, such as a module that counts
    its passes.

    Args:
        owners: The owners: `vars` of an object, a module's buffers, or `Outer`, which map names to
            values.
        skipped: Names that nobody changes.

    Example:
        >>> counter = SimpleNamespace(passes=[1], draw=random.Random(0))
        >>> state = HeldState([vars(counter)])
        >>> with state.replayed():
        ...     counter.passes.append(counter.draw.random())
        >>> counter.passes, counter.draw.random() == random.Random(0).random()
        ([1], True)
    """

    def __init__(
        self, owners: Iterable[MutableMapping[str, Any]], skipped: frozenset[str] = frozenset()
    ) -> None:
        self._owners, self._generators = list(owners), dict[int, tuple[Any, Any]]()
        self._skipped = skipped | _MODULES_OWN
        self._values = [self._copied(owner) for owner in self._owners]

    @staticmethod
    def owners_of(modules: Iterable[nn.Module]) -> list[MutableMapping[str, Any]]:
        """Return modules' attributes and buffers, and variables around `forward` and hooks."""
        owners, kinds, hooks = list[MutableMapping[str, Any]](), set[type](), list[Any]()
        for module in modules:
            attributes = vars(module)
            if module._buffers:
                owners.append(module._buffers)
            if len(attributes) > len(_MODULES_OWN):
                owners.append(attributes)
                owners += [vars(v) for v in attributes.values() if _is_record(v)]
            if module._forward_hooks or module._forward_pre_hooks:
                hooks += forward_hooks_of(module)
            kinds.add(type(module))
        for kind in kinds:
            if kind.__module__.split(".")[0] not in ("torch", "transformers", "peft"):
                owners += Outer.of(getattr(kind, "forward", None))
        for hook in [*hooks, *(global_forward_hooks() if _has_any_global_hook() else ())]:
            owners += [*Outer.of(function_of(hook)), *attributes_of(hook)]
        return owners

    def _copied(self, owner: Mapping[str, Any]) -> dict[str, Any]:
        return {n: self._copy(v) for n, v in owner.items() if n not in self._skipped}

    def _copy(self, value: Any) -> Any:
        kind = type(value)
        if kind in (int, float, bool, str) or isinstance(value, nn.Parameter):
            return value
        if isinstance(value, Tensor):
            return value.detach().clone() if value.numel() <= _LARGEST else value
        if isinstance(value, tuple(_GENERATORS)):
            self._generators.setdefault(id(value), (value, _state_of(value)))
        elif isinstance(value, dict | list | set | deque) and len(value) <= _LONGEST:
            copied: Any = copy.copy(value)
            if isinstance(value, dict):
                copied.update({key: self._copy(entry) for key, entry in value.items()})
            elif not isinstance(value, set):
                copied.clear()
                copied.extend(map(self._copy, value))
            return copied
        return value

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Restore the first state inside the context, and the present one afterwards."""
        held = [{n: v for n, v in o.items() if n not in self._skipped} for o in self._owners]
        generators = [(g, _state_of(g)) for g, _ in self._generators.values()]
        try:
            _set_states(self._generators.values())
            for owner, values in zip(self._owners, self._values, strict=True):
                self._put(owner, {name: self._copy(value) for name, value in values.items()})
            yield
        finally:
            for owner, values in zip(self._owners, held, strict=True):
                self._put(owner, values)
            _set_states(generators)

    def _put(self, owner: MutableMapping[str, Any], values: Mapping[str, Any]) -> None:
        for name in [name for name in owner if name not in values and name not in self._skipped]:
            del owner[name]
        for name, value in values.items():
            if owner.get(name) is not value:
                owner[name] = value


class Outer(MutableMapping[str, Any]):
    """The variables that a function uses from around it: its closure and globals.

    Args:
        function: A function written in Python.

    Example:
        >>> passes = [0]
        >>> [dict(outer) for outer in Outer.of(lambda: passes)]
        [{'passes': [0]}]
    """

    def __init__(self, function: FunctionType) -> None:
        code, self._globals = function.__code__, function.__globals__
        self._cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        self._names = list[str]()
        for name in dict.fromkeys((*code.co_freevars, *code.co_names)):
            with suppress(KeyError, ValueError):  # an attribute's name, a cell without content
                self[name]
                self._names.append(name)

    @classmethod
    def of(cls, function: Any) -> list[MutableMapping[str, Any]]:
        """Return the variables around a function, or around what is called like one."""
        plain = getattr(function, "func", function)  # of functools.partial
        plain = getattr(plain, "__func__", plain)
        return [cls(plain)] if isinstance(plain, FunctionType) else []

    def __getitem__(self, name: str) -> Any:
        return self._cells[name].cell_contents if name in self._cells else self._globals[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._cells:
            self._cells[name].cell_contents = value
        else:
            self._globals[name] = value

    def __delitem__(self, name: str) -> None:
        """Ignore the deletion: variables stay."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _state_of(generator: Any) -> Any:
    return _access(generator)[0](generator)


def _set_states(states: Iterable[tuple[Any, Any]]) -> None:
    for generator, state in states:
        _access(generator)[1](generator, state)


def _access(generator: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], object]]:
    return next(pair for kind, pair in _GENERATORS.items() if isinstance(generator, kind))


def _is_record(held: Any) -> bool:
    return isinstance(held, SimpleNamespace) or (is_dataclass(held) and not isinstance(held, type))


_GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.RandomState: (
        np.random.RandomState.get_state, np.random.RandomState.set_state
    ),
    np.random.Generator: (
        lambda generator: generator.bit_generator.state,
        lambda generator, state: setattr(generator.bit_generator, "state", state),
    ),
}  # fmt: skip
"""How the state of a generator that somebody holds is read and written, by its type."""
_MODULES_OWN = frozenset(vars(nn.Module()))
_LARGEST = 1 << 20
_LONGEST = 1 << 16
"""Entries of a tensor, and of a list, that is copied for a pass: what is larger counts nothing."""


class Replay:
    """The state that has to hold while a model runs so that it is the same function every time.

    Dropout draws from torch's global generators, losses (mixup) and masks (SpecAugment) also from
    those of numpy and `random`: their state is noted here. Batch normalization in training mode
    writes its statistics. Fused attention kernels have no second derivative.

    Args:
        model: The model, in the mode in which it will run.
        second_order: Whether derivatives of derivatives are wanted.
        loss: The loss, which runs the model, and may hold a state as well.
        reruns: Whether it will run more than once. If not, nothing is noted.

    Raises:
        NotImplementedError: If second derivatives are wanted, and the model has kernels whose own
            are silently wrong.
    """

    kind: str = ""
    """Of maps that are tried out together: how well differences do on one says it of the others."""
    held_state: HeldState | None = None
    """Of model and loss, for another run; `None` where there is none."""

    def __init__(
        self, model: nn.Module, second_order: bool, loss: Any = None, reruns: bool = True
    ) -> None:
        self.modules, self.second_order = list(model.modules()), second_order
        if second_order and any(_is_ligers(module) for module in self.modules):
            raise NotImplementedError(
                "Liger kernels compute gradients in the forward pass, so second derivatives are "
                "silently wrong. Make the model without them (use_liger_kernel=False), or the map "
                "with second_order=False, and ask it for nothing that differentiates twice."
            )
        if reruns:
            self._state, self._devices = DrawState.now(), devices_that_draw(model)
            self._cuda = [torch.cuda.get_rng_state(device) for device in self._devices]
            self.held_state = HeldState([*HeldState.owners_of(self.modules), *Outer.of(loss)])

    @contextmanager
    def draws(self) -> Iterator[None]:
        """Restore random draws and held state inside the context, and undo that afterwards.

        Raises:
            RuntimeError: If nothing was noted, since `reruns` was false.
        """
        if self.held_state is None:
            raise RuntimeError(
                "Its map was made with reruns=False, so the model runs once. A defense that asks "
                "for more than the gradient has to say so in its facts: reruns_model=True."
            )
        with draws_restored(), torch.random.fork_rng(devices=self._devices):
            self._state.restore()
            for device, state in zip(self._devices, self._cuda, strict=True):
                torch.cuda.set_rng_state(state, device)
            # Copies take the updates: writing a value back would count as an in-place change to
            # what autograd saved.
            with self.held_state.replayed():
                yield

    def kernels(self) -> AbstractContextManager[None]:
        """Return a context of attention in plain mathematics, if second derivatives are wanted."""
        return self._plain_attention() if self.second_order else nullcontext()

    @contextmanager
    def _plain_attention(self) -> Iterator[None]:
        configs = {id(m.config): m.config for m in self.modules if isinstance(m, PreTrainedModel)}
        plain = (None, "eager", "sdpa")
        fused = [
            c for c in configs.values() if getattr(c, "_attn_implementation", None) not in plain
        ]
        settings = [config._attn_implementation for config in fused]
        try:
            for config in fused:
                config._attn_implementation_internal = "eager"
            with sdpa_kernel(SDPBackend.MATH):
                yield
        finally:
            for config, setting in zip(fused, settings, strict=True):
                config._attn_implementation_internal = setting

    @contextmanager
    def run(self) -> Iterator[None]:
        """Restore draws and use plain attention, with gradients on, for a forward pass."""
        with torch.enable_grad(), self.draws(), self.kernels():
            yield

    @contextmanager
    def full_precision(self) -> Iterator[None]:
        """Turn autocast off in the model: its rounding would drown differences of passes."""
        kind = "cuda" if self._devices else "cpu"
        was_enabled = torch.is_autocast_enabled(kind)

        def leave_autocast(_module: nn.Module, _args: object) -> None:
            if torch.is_autocast_enabled(kind):  # a model that entered it restores what was before
                torch.set_autocast_enabled(kind, False)

        try:
            with hooked(m.register_forward_pre_hook(leave_autocast) for m in self.modules):
                yield
        finally:
            torch.set_autocast_enabled(kind, was_enabled)

    def recomputes(self) -> bool:
        """Return whether layers run again in the backward pass, under activation checkpointing."""
        return any(getattr(m, "gradient_checkpointing", False) and m.training for m in self.modules)


def _is_ligers(module: nn.Module) -> bool:
    """Whether a module is one of Liger's, or runs a function of Liger's in its own's place."""
    sources = (type(module), getattr(module.forward, "__func__", module.forward))
    return any(str(getattr(s, "__module__", "")).startswith("liger_kernel") for s in sources)


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Restore the modes of all modules of a model, whatever happens to them inside the context.

    Example:
        >>> model = model.train()
        >>> with modes_kept(model):
        ...     _ = model.eval()
        >>> model.training
        True
    """
    modes = {module: module.training for module in model.modules()}
    try:
        yield list(modes)
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def draws_kept(model: nn.Module) -> Iterator[None]:
    """Restore all generators, and what the model's modules hold, at the end of the context.

    The generators are those of torch, on the processor and on the model's GPUs, of numpy and of
    `random`.

    Example:
        >>> before = torch.get_rng_state()
        >>> with draws_kept(model):
        ...     _ = torch.rand(1)
        >>> torch.equal(before, torch.get_rng_state())
        True
    """
    held = HeldState(HeldState.owners_of(model.modules()))
    devices = devices_that_draw(model)
    with draws_restored(), torch.random.fork_rng(devices=devices), held.replayed():
        yield


def seed_draws(model: nn.Module, seed: int) -> None:
    """Seed what `draws_kept` puts back, without `torch.manual_seed`, which is slow deep in calls.

    Example:
        >>> seed_draws(model, 7)
        >>> torch.initial_seed()
        7
    """
    torch.default_generator.manual_seed(seed)
    for index in devices_that_draw(model):
        torch.cuda.default_generators[index].manual_seed(seed)


def devices_that_draw(model: nn.Module) -> list[int]:
    """Return the GPUs that a model is on.

    Example:
        >>> devices_that_draw(torch.nn.Linear(2, 1))
        []
    """
    return sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})


class RunWithin(nn.Module):
    """A module whose forward pass calls a function that runs `model`.

    `functional_call` needs such a module to swap the model's parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Tensor]) -> Tensor:
        return run()


def differentiate(
    loss: Tensor, leaves: Mapping[str, Tensor], inner: Any = (), *,
    retain_graph: bool = False, create_graph: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the derivatives of a loss by leaves, with zeros by those that it does not use.

    By `inner` edges of the graph it is differentiated too, for the hooks that are there.

    Raises:
        ValueError: If it uses none of them, and was differentiated before.
        RuntimeError: With `create_graph`, if they come through a kernel that is not to be
            differentiated twice.
    """
    graph: Any = {"retain_graph": retain_graph or create_graph, "create_graph": create_graph}
    gradients = torch.autograd.grad(loss, [*leaves.values(), *inner], **graph, allow_unused=True)
    if all(gradient is None for gradient in gradients) and _was_differentiated(loss):
        raise ValueError(
            "The loss is not computed from any shared parameter, so there is no gradient of it. "
            "Losses that differentiate by themselves and keep what they found (sentence-"
            "transformers' Cached...Loss) are such: take the plain one, with smaller batches."
        )
    if create_graph:
        check_whole(gradient for gradient in gradients if gradient is not None)
    pairs = zip(leaves.items(), gradients[: len(leaves)], strict=True)
    return {n: torch.zeros_like(p.detach()) if g is None else g for (n, p), g in pairs}


def _was_differentiated(loss: Tensor) -> bool:
    """Whether a loss ends in a number that is no parameter: what led there was cut off."""
    ends = [getattr(node, "variable", loss) for node in nodes_of([loss])] or [loss]
    return any(end.is_leaf and not end.dim() and not isinstance(end, nn.Parameter) for end in ends)


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks at the end of the context.

    Example:
        >>> with hooked([model.register_forward_hook(print)]):
        ...     len(model._forward_hooks)
        1
        >>> len(model._forward_hooks)
        0
    """
    registered = list(handles)
    try:
        yield
    finally:
        for handle in registered:
            handle.remove()


def nodes_of(tensors: Iterable[Tensor]) -> Iterator[Any]:
    """Yield every step of autograd's that tensors were computed by."""
    nodes, visited = [tensor.grad_fn for tensor in tensors], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        yield node
        nodes += [next_node for next_node, _ in node.next_functions]


def check_whole(derivatives: Iterable[Tensor]) -> None:
    """Raise an error if derivatives come through a kernel that is not to be differentiated twice.

    Autograd does so itself only where its path leads on, and leaves it out where it ends.

    Raises:
        RuntimeError: If so.
    """
    if any(node.name() == "torch::autograd::Error" for node in nodes_of(derivatives)):
        raise RuntimeError(
            "The model has a function that is marked once_differentiable, as fused kernels are: "
            "without it second derivatives would be wrong. Run the model without that kernel, or "
            "ask for nothing that differentiates twice (method='difference', second_order=False)."
        )
