"""Repeated evaluation of one function: the same random draws and statistics, plain attention."""

from __future__ import annotations

import copy
import pickle
import random
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, is_dataclass
from functools import lru_cache
from operator import is_not
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

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


class PassState:
    """A note of what a pass may change beside parameters and global generators.

    These are numbers, lists, tensors and generators that somebody holds, such as a module that
    counts its passes.

    Variables that functions use from around them, in closures and globals, are read and never set:
    lists, dictionaries and sets among them get back what they held. A function that sets such a
    variable is refused, since its next pass would be another one.

    Args:
        owners: Who holds them, by name: `vars` of an object, a module's buffers.
        functions: What runs in a pass, such as a loss or hooks.
        skipped: Names that nobody changes.

    Example:
        >>> counter = SimpleNamespace(passes=[1], draw=random.Random(0))
        >>> state = PassState([vars(counter)])
        >>> with state.replayed():
        ...     counter.passes.append(counter.draw.random())
        >>> counter.passes, counter.draw.random() == random.Random(0).random()
        ([1], True)
    """

    def __init__(
        self,
        owners: Iterable[MutableMapping[str, Any]],
        functions: Iterable[Any] = (),
        skipped: frozenset[str] = frozenset(),
    ) -> None:
        self._owners, self._generators = list(owners), dict[Any, Any]()
        self._skipped = skipped | _NO_STATE
        self._values = [self._copied(owner) for owner in self._owners]
        self._variables = [v for function in functions for v in variables_of(function)]
        self._noted = [self._note(variable.value()) for variable in self._variables]

    @classmethod
    def of_modules(cls, modules: Iterable[nn.Module], *losses: Any) -> PassState:
        """Note what modules hold, and what they and losses use from around them."""
        owners, functions = holders_in(modules)
        return cls(owners, [*functions, *losses])

    def _copied(self, owner: Mapping[str, Any]) -> dict[str, Any]:
        return {n: self._copy(v) for n, v in owner.items() if n not in self._skipped}

    def _copy(self, value: Any) -> Any:
        kind = type(value)
        if kind in (int, float, bool, str) or isinstance(value, nn.Parameter):
            return value
        if isinstance(value, Tensor):
            return value.detach().clone() if value.numel() <= _LARGEST else value
        if isinstance(value, _GENERATOR_TYPES):
            self._generators.setdefault(value, _state_of(value))
        elif isinstance(value, _CONTAINERS) and len(value) <= _LONGEST:
            copied: Any = copy.copy(value)
            if isinstance(value, dict):
                copied.update({key: self._copy(entry) for key, entry in value.items()})
            elif not isinstance(value, set):
                copied.clear()
                copied.extend(map(self._copy, value))
            return copied
        return value

    def _note(self, value: Any) -> _Note:
        if isinstance(value, _GENERATOR_TYPES):
            self._generators.setdefault(value, _state_of(value))
        elif isinstance(value, _CONTAINERS) and len(value) <= _LONGEST:
            self._copy(value)  # for the generators in it
        return _variable_note(value)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Let all of it be as it was when this was made; afterwards it is as it is now.

        Raises:
            NotImplementedError: If a function sets a variable from around it.
        """
        self._refuse_variables_set(self._noted)
        held = [{n: v for n, v in o.items() if n not in self._skipped} for o in self._owners]
        held_notes = [_variable_note(note.value) for note in self._noted]
        generators = {generator: _state_of(generator) for generator in self._generators}
        try:
            _set_states(self._generators)
            for note in self._noted:
                note.put_back()
            for owner, values in zip(self._owners, self._values, strict=True):
                self._put(owner, {name: self._copy(value) for name, value in values.items()})
            yield
        finally:
            for owner, values in zip(self._owners, held, strict=True):
                self._put(owner, values)
            for note in held_notes:
                note.put_back()
            _set_states(generators)
        self._refuse_variables_set(held_notes)

    def _refuse_variables_set(self, notes: Iterable[_Note]) -> None:
        for variable, note in zip(self._variables, notes, strict=True):
            if not note.is_of(variable.value()):
                raise NotImplementedError(VARIABLE_SET.format(variable.name))

    def _put(self, owner: MutableMapping[str, Any], values: Mapping[str, Any]) -> None:
        for name in [name for name in owner if name not in values and name not in self._skipped]:
            del owner[name]
        for name, value in values.items():
            if owner.get(name) is not value:
                owner[name] = value


def holders_in(modules: Iterable[nn.Module]) -> tuple[list[MutableMapping[str, Any]], list[Any]]:
    """Find what a pass through modules may change, and the functions that run in it.

    The first are attributes and buffers, also of what the modules' hooks are methods of. Functions
    may use variables from around them.

    Example:
        >>> owners, functions = holders_in([nn.BatchNorm1d(2)])
        >>> [sorted(owner) for owner in owners if "running_mean" in owner], functions
        ([['num_batches_tracked', 'running_mean', 'running_var']], [])
    """
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
    functions = [
        getattr(kind, "forward", None)
        for kind in kinds
        if kind.__module__.split(".")[0] not in ("torch", "transformers", "peft")
    ]
    for hook in [*hooks, *(global_forward_hooks() if _has_any_global_hook() else ())]:
        functions.append(function_of(hook))
        owners += attributes_of(hook)
    return owners, functions


class Variable(NamedTuple):
    """A variable that a function uses from around it.

    Args:
        name: The variable's name there.
        source: The function's cell, or its module's globals.
    """

    name: str
    source: Any

    def value(self) -> Any:
        """Return what it holds now."""
        if isinstance(self.source, dict):
            return self.source.get(self.name, _MISSING)
        try:
            return self.source.cell_contents
        except ValueError:  # a cell without content
            return _MISSING


def variables_of(function: Any) -> list[Variable]:
    """Find the variables from around a function that a pass may change.

    They are of its closure, and globals other than modules, classes and functions.

    Example:
        >>> passes = [0]
        >>> [(variable.name, variable.value()) for variable in variables_of(lambda: passes)]
        [('passes', [0])]
    """
    plain = getattr(function, "func", function)  # of functools.partial
    plain = getattr(plain, "__func__", plain)
    if not isinstance(plain, FunctionType):
        return []
    code, around = plain.__code__, plain.__globals__
    variables = [
        Variable(name, cell)
        for name, cell in zip(code.co_freevars, plain.__closure__ or (), strict=True)
    ]
    chosen = [n for n in _names_used(code) if n in around and not isinstance(around[n], _FIXED)]
    return variables + [Variable(name, around) for name in chosen]


@lru_cache(maxsize=1024)
def _names_used(code: CodeType) -> tuple[str, ...]:
    """Return the names of globals and attributes that a function uses, or one inside it."""
    inner = [_names_used(c) for c in code.co_consts if isinstance(c, CodeType)]
    return tuple(dict.fromkeys((*code.co_names, *(name for names in inner for name in names))))


def _state_of(generator: Any) -> Any:
    return _access(generator)[0](generator)


def _set_states(states: Mapping[Any, Any]) -> None:
    for generator, state in states.items():
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
_GENERATOR_TYPES = tuple(_GENERATORS)
_CONTAINERS = (dict, list, set, deque)
_FIXED = (ModuleType, type, FunctionType, BuiltinFunctionType)
VARIABLE_SET = (
    "A loss, a hook or a forward sets {!r}, a variable from around it, as it runs. The model runs "
    "more than once here, and another pass would be another function: variables around a function "
    "are not written to, to put them back. Hold it in a list, in an attribute of a module, or in "
    "one of the object that is called."
)
_MODULES_OWN = frozenset(vars(nn.Module()))
_NO_STATE = _MODULES_OWN | {"_output_capturing_hooks_installed"}
"""Attributes that are not put back. By the last one Transformers notes that it has registered the
hooks which collect hidden states. The hooks stay, so the note has to stay: else the next pass
registers them again, and each state is collected twice.
"""
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
    held_state: PassState | None = None
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
            self.held_state = PassState.of_modules(self.modules, loss)

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

    def device_states(self) -> list[bytes]:
        """Return the states of the generators of the accelerators that the model draws on."""
        states = map(torch.cuda.get_rng_state, self._devices)
        return [state.numpy().tobytes() for state in states]

    def kernels(self) -> AbstractContextManager[None]:
        """Return a context of attention in plain mathematics, if second derivatives are wanted."""
        return self._plain_attention() if self.second_order else nullcontext()

    @contextmanager
    def _plain_attention(self) -> Iterator[None]:
        plain, fused = (None, "eager", "sdpa"), list[Any]()
        for module in self.modules:
            config = module.config if isinstance(module, PreTrainedModel) else None
            if getattr(config, "_attn_implementation", None) in plain:
                continue
            if not any(config is known_config for known_config in fused):
                fused.append(config)
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
    held = PassState.of_modules(model.modules())
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
        RuntimeError: If `create_graph` is set and they come through a kernel that is not to be
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


class ModuleState:
    """A note of what modules hold, to put it back after a pass.

    It has buffers of any size, and, if asked for, attributes, variables that methods use from
    around them, and what hooks and `get_extra_state` add to a `state_dict`.

    A running mean in a buffer, a count in an attribute, a list around a method: any pass may write
    there what it made of its batch. `PassState` lets one pass run again as it did; here a pass is
    to leave nothing behind.

    Args:
        model: The model whose modules these are.
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
        self._model = model
        self._owners = [_Owner(*owner) for owner in _owners(model, only_buffers)]
        methods = [] if only_buffers else _methods_of_users(model)
        self._variables = [v for method in methods for v in variables_of(method)]
        self._notes = [_noted(variable.value()) for variable in self._variables]
        self._extras = None if only_buffers else _extras(model)

    def restore(self, spared: Container[str] = ()) -> list[str]:
        """Restore the noted state.

        Args:
            spared: Names that stay as they are now.

        Returns:
            The names of what differed, such as `encoder.running_mean`.
        """
        restored = [name for owner in self._owners for name in owner.restore(spared)]
        for variable, note in zip(self._variables, self._notes, strict=True):
            value = variable.value()
            if variable.name not in spared and note.is_of(value) and not note.equals(value):
                note.put_back()
                restored.append(variable.name)
        return restored

    def variables_set(self) -> list[str]:
        """Return names of variables around methods that were set: those are not put back."""
        pairs = zip(self._variables, self._notes, strict=True)
        return sorted({v.name for v, note in pairs if not note.is_of(v.value())})

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
        return [
            name
            for name, (parameter, *noted) in self._noted.items()
            if name not in present
            or present[name][0] is not parameter
            or [*present[name][1:]] != noted
        ]

    def _all(self) -> dict[str, tuple[nn.Parameter, int, int]]:
        return {
            name: (p, p._version, _sum_of_bits(p) if self._sums else 0)
            for name, p in self._model.named_parameters()
            if not hasattr(p, "quant_state")  # bitsandbytes packs them in the first pass
        }


def _sum_of_bits(tensor: Tensor) -> int:
    plain = tensor.detach().contiguous().reshape(-1)
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(plain.element_size(), torch.uint8)
    return int(plain.view(kind).sum(dtype=torch.int64))


def _owners(model: nn.Module, only_buffers: bool) -> Iterator[tuple[str, MutableMapping[str, Any]]]:
    objects = list[Any]()
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        yield prefix, module._buffers
        if only_buffers:
            continue
        yield prefix, vars(module)
        for attribute, value in vars(module).items():
            if attribute in _NO_STATE or not _is_plain(value):
                continue
            if not any(value is known_object for known_object in objects):
                objects.append(value)
                yield f"{prefix}{attribute}.", vars(value)


def _methods_of_users(model: nn.Module) -> Iterator[Any]:
    """The methods of modules' classes, and of their attributes', that are not a library's."""
    kinds = set[type]()
    for module in model.modules():
        kinds.update(type(module).__mro__)
        kinds.update(
            type(value)
            for attribute, value in vars(module).items()
            if attribute not in _NO_STATE and _is_plain(value)
        )
    for kind in kinds:
        if _library(kind) not in _LIBRARIES:
            yield from vars(kind).values()


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
        self.notes = {n: _noted(v) for n, v in mapping.items() if n not in _NO_STATE}

    def restore(self, spared: Container[str]) -> Iterator[str]:
        present = [name for name in self._mapping if name not in _NO_STATE]
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

    def is_of(self, current: Any) -> bool:
        """Whether a variable that had this value still has it, whatever the value holds now."""
        return self.value is current or (type(self) is _Note and self.equals(current))

    def put_back(self) -> None:
        """Give it the content that it had."""


@dataclass
class _VersionNote(_Note):
    """A tensor that a replay does not write to, and how often it had been written to."""

    version: int

    def is_of(self, current: Any) -> bool:
        return self.value is current and current._version == self.version


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
    def __init__(self, value: Any, noted: Callable[[Any], _Note]) -> None:
        super().__init__(value)
        self._entries = [noted(entry) for entry in value]

    def equals(self, current: Any) -> bool:
        if type(current) is not type(self.value) or len(current) != len(self._entries):
            return False
        return all(n.equals(entry) for n, entry in zip(self._entries, current, strict=True))

    def is_of(self, current: Any) -> bool:
        return self.value is current and all(note.is_of(note.value) for note in self._entries)

    def put_back(self) -> None:
        for note in self._entries:
            note.put_back()
        entries = [note.value for note in self._entries]
        if len(self.value) != len(entries) or any(map(is_not, self.value, entries)):
            self.value.clear()
            self.value.extend(entries)


class _DictNote(_Note):
    def __init__(self, value: Any, noted: Callable[[Any], _Note]) -> None:
        super().__init__(value)
        self._entries = {key: noted(entry) for key, entry in value.items()}

    def equals(self, current: Any) -> bool:
        if type(current) is not type(self.value) or current.keys() != self._entries.keys():
            return False
        return all(note.equals(current[key]) for key, note in self._entries.items())

    def is_of(self, current: Any) -> bool:
        entries = self._entries.values()
        return self.value is current and all(note.is_of(note.value) for note in entries)

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


def _variable_note(value: Any) -> _Note:
    """Note the value of a variable around a function for a replay, which writes to no tensor."""
    if isinstance(value, Tensor) and not (isinstance(value, nn.Parameter) or value.is_inference()):
        return _VersionNote(value, value._version)
    if isinstance(value, _CONTAINERS) and len(value) <= _LONGEST:
        return _container_note(value, _variable_note)
    return _Note(value)


def _noted(value: Any) -> _Note:
    """Note any value with its content."""
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return _TensorNote(value)
    if isinstance(value, np.ndarray):
        return _ArrayNote(value)
    if isinstance(value, _CONTAINERS):
        return _container_note(value, _noted if len(value) <= _NOTED_ENTRIES else _Note)
    return _Note(value)


def _container_note(value: Any, noted: Callable[[Any], _Note]) -> _Note:
    if isinstance(value, set):
        return _SetNote(value)
    return _DictNote(value, noted) if isinstance(value, dict) else _ListNote(value, noted)


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


_NOTED_ENTRIES = 4096
"""Entries of a list whose own content is noted: of a longer one, which entries there are."""
_WRITES_STATE = ("get_extra_state", "_save_to_state_dict", "state_dict")
_LIBRARIES = frozenset(
    {"torch", "transformers", "peft", "accelerate", "bitsandbytes", "builtins", "collections"}
    | {"numpy", "random", "logging", "functools", "re", "threading", "weakref", "types"}
)
"""Whose objects hold nothing of a batch, or are noted by themselves."""
