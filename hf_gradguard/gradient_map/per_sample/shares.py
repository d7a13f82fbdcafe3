"""What each sample adds to the gradient of a layer's parameters, kept in factors: its norm, and
sums over samples with a factor for each, without a gradient of every sample in memory.

References: Goodfellow, "Efficient Per-Example Gradient Computations" (2015); Li et al., "Large
Language Models Can Be Strong Differentially Private Learners" (2022), Section 4; Bu et al.,
"Differentially Private Optimization on Large Model at Small Cost" (2023), for sums from what the
norms were computed of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, grad, vmap
from torch.nn import grad as layer_gradients

from ..layers import LINEAR, Layer, layers_of
from ..map import GradientMap
from ..replay import hooked
from ..types import Tensors

ENTRIES = 2**24  # of several samples' gradients, written out at once


class Share(ABC):
    """What samples add to the gradient of some parameters."""

    @abstractmethod
    def squares(self) -> Tensor:
        """Squared norms of what each adds, `(B,)` in float64, and never too small by rounding."""

    @abstractmethod
    def total(self, factors: Tensor) -> Tensors:
        """Σ_b factor_b · (what b adds), by parameter."""


class Written(Share):
    """Gradients of every sample, written out some at a time.

    Args:
        parts: Gives them from the first sample to the last: by parameter `(b, *shape)`.
    """

    def __init__(self, parts: Callable[[], Iterator[Tensors]]) -> None:
        self._parts = parts

    def squares(self) -> Tensor:
        found = [
            torch.stack([each.flatten(1).double().square().sum(1) for each in part.values()]).sum(0)
            for part in self._parts()
        ]
        return torch.cat(found)

    def total(self, factors: Tensor) -> Tensors:
        sums: Tensors = {}
        first = 0
        for part in self._parts():
            count = len(next(iter(part.values())))
            some = factors[first : first + count]
            for name, each in part.items():
                added = torch.tensordot(some.to(each.dtype), each, 1)
                sums[name] = sums[name] + added if name in sums else added
            first += count
        return sums


@dataclass
class OfLayer(Share):
    """A linear layer, a convolution or a layer normalization.

    Args:
        layer: Which.
        rows: Slopes and features of each of its calls, rows of samples as `Layer.rows` gives them,
            at least in float32.
    """

    layer: Layer
    rows: Sequence[tuple[Tensor, Tensor]]

    def squares(self) -> Tensor:
        squares: Tensor | float = 0.0
        if self.layer.bias is not None:
            bias = torch.stack([self.layer.bias_gradients(slopes) for slopes, _ in self.rows])
            squares = bias.sum(0).double().square().sum(1)
        if self.layer.weight is None:
            assert isinstance(squares, Tensor)
            return squares
        if isinstance(self.layer.module, LINEAR):
            slopes, features = self._joined()
            tokens, out, into = slopes.shape[1], slopes.shape[2], features.shape[2]
            if 2 * tokens**2 <= out * into:
                return squares + _ghost_squares(slopes, features)
        return squares + Written(self.written).squares()

    def total(self, factors: Tensor) -> Tensors:
        found: Tensors = {}
        for slopes, features in self.rows:
            scaled = slopes * factors.to(slopes.dtype).view(-1, *[1] * (slopes.dim() - 1))
            if self.layer.weight is not None:
                _add(found, self.layer.weight, self._weight(scaled, features))
            if self.layer.bias is not None:
                _add(found, self.layer.bias, self.layer.bias_gradients(scaled).sum(0))
        return found

    def _weight(self, slopes: Tensor, features: Tensor) -> Tensor:
        """Of all samples together."""
        m: Any = self.layer.module
        if isinstance(m, LINEAR):
            slopes, features = slopes.flatten(0, 1)[None], features.flatten(0, 1)[None]
        if isinstance(m, (*LINEAR, nn.LayerNorm)):
            return self.layer.weight_gradients(slopes, features).sum(0)
        function = getattr(layer_gradients, f"conv{m.weight.dim() - 2}d_weight")
        found: Tensor = function(
            features, m.weight.shape, slopes, m.stride, m.padding, m.dilation, m.groups
        )
        return found

    def _joined(self) -> tuple[Tensor, Tensor]:
        """Calls one after the other, as if the layer had had their tokens at once."""
        if len(self.rows) == 1:
            return self.rows[0]
        slopes, features = zip(*self.rows, strict=True)
        return torch.cat(slopes, 1), torch.cat(features, 1)

    def written(self) -> Iterator[Tensors]:
        """Samples' gradients of the weight, `(b, *shape)`, some samples at a time."""
        assert self.layer.weight is not None
        size = self.layer.module.weight.numel()  # type: ignore[operator]
        for some in _slices(len(self.rows[0][0]), size):
            parts = [self.layer.weight_gradients(s[some], f[some]) for s, f in self.rows]
            yield {self.layer.weight: torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]}


@dataclass
class OfTable(Share):
    """An embedding, whose rows each sample looks up by ids.

    Args:
        name: Of its weight.
        table: The weight.
        ids: `(B, T)`.
        slopes: `(B, T, H)`, zero where nothing is learned (the padding).
    """

    name: str
    table: Tensor
    ids: Tensor
    slopes: Tensor

    def squares(self) -> Tensor:
        found = []
        for ids, slopes in zip(self.ids, self.slopes, strict=True):
            used, places = ids.unique(return_inverse=True)
            rows = slopes.new_zeros(len(used), slopes.shape[-1]).index_add_(0, places, slopes)
            found.append(rows.double().square().sum())
        return torch.stack(found)

    def total(self, factors: Tensor) -> Tensors:
        scaled = (self.slopes * factors.to(self.slopes.dtype)[:, None, None]).flatten(0, 1)
        rows = self.slopes.new_zeros(self.table.shape).index_add_(0, self.ids.flatten(), scaled)
        return {self.name: rows}


def of_module(
    module: nn.Module, names: Mapping[str, str], calls: Sequence[tuple[Sequence[Any], Tensor]]
) -> Share:
    """A module of any kind that treats rows alike: each row's call is differentiated by itself,
    vectorized over rows.

    Args:
        module: Without random draws, and without side effects.
        names: Of its own parameters to what they are called in the model.
        calls: Arguments, tensors with a first dimension of samples, and slopes of the output.
    """
    held = {n: p.detach().to(torch.promote_types(p.dtype, torch.float32))
            for n, p in module.named_parameters(recurse=False)}  # fmt: skip
    wanted = {own: held.pop(own) for own in names}

    def parts() -> Iterator[Tensors]:
        size = sum(p.numel() for p in wanted.values())
        for some in _slices(len(calls[0][1]), size):
            found: Tensors = {}
            for args, slopes in calls:
                each = _each_row(module, wanted, held, args, slopes, some)
                for own, value in each.items():
                    _add(found, names[own], value.to(slopes.dtype))
            yield found

    return Written(parts)


def _each_row(
    module: nn.Module, wanted: Tensors, held: Tensors, args: Sequence[Any], slopes: Tensor,
    some: slice,
) -> Tensors:  # fmt: skip
    tensors = [arg[some] for arg in args if isinstance(arg, Tensor)]

    def inner(parameters: Tensors, slope: Tensor, *rows: Tensor) -> Tensor:
        given = iter(rows)
        call = tuple(next(given)[None] if isinstance(arg, Tensor) else arg for arg in args)
        output = functional_call(module, {**held, **parameters}, call)
        return (output[0] * slope).sum()

    dims = (None, 0, *[0] * len(tensors))
    found: Tensors = vmap(grad(inner), in_dims=dims)(wanted, slopes[some], *tensors)
    return found


def _ghost_squares(slopes: Tensor, features: Tensor) -> Tensor:
    """‖Σ_t δ_t a_tᵀ‖² of every sample, from products of its tokens.

    Where tokens' products nearly cancel, rounding could make the sum too small: what it can be off
    by is added.
    """
    samples, tokens = slopes.shape[:2]
    found = []
    for some in _slices(samples, tokens**2):
        left, right = slopes[some], features[some]
        found.append(((left @ left.mT) * (right @ right.mT)).double().sum((1, 2)))
    sizes = (slopes.norm(dim=2) * features.norm(dim=2)).double().sum(1)
    return torch.cat(found).clamp(min=0) + torch.finfo(slopes.dtype).eps * sizes.square()


def _slices(samples: int, size: int) -> Iterator[slice]:
    several = max(1, ENTRIES // max(size, 1))
    return (slice(first, first + several) for first in range(0, samples, several))


def _add(found: Tensors, name: str, value: Tensor) -> None:
    found[name] = found[name] + value if name in found else value


class NotApartError(RuntimeError):
    """Samples' shares of a parameter's gradient cannot be told apart."""


@dataclass
class _Call:
    """One call of a module: what entered, where its output's slope is found, and how often its
    first argument had been written to.
    """

    args: tuple[Any, ...]
    output: GradientEdge
    versions: list[int]


@dataclass
class Listener:
    """Listens to the modules of a model that hold shared parameters.

    Layers with products for gradients, and embeddings, keep what entered and what slope came out.
    Other modules without parts are differentiated row by row from that. A module with parts that
    holds parameters of its own (a class token) is given one copy of them for each sample.

    Args:
        model: The model.
        parameters: Those that are shared, by name.
        batch: What it is evaluated on.
        samples: How many there are in it.
    """

    model: nn.Module
    parameters: Mapping[str, Tensor]
    batch: Mapping[str, Any]
    samples: int
    _calls: dict[str, list[_Call]] = field(default_factory=dict)
    _copies: dict[str, list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        modules = dict(self.model.named_modules())
        holders = Counter(id(p) for m in modules.values() for p in m.parameters(recurse=False))
        if tied := [name for key, name in names.items() if holders[key] > 1]:
            raise NotApartError(f"{tied[0]} is used by several modules")
        self._layers: dict[str, Layer] = layers_of(self.model, self.parameters)
        self._own: dict[str, dict[str, str]] = {}
        for name, module in modules.items():
            own = {n: names[id(p)] for n, p in module.named_parameters(recurse=False)
                   if id(p) in names}  # fmt: skip
            if own:
                self._own[name] = own
        self._modules = modules
        self._lengths = {
            value.shape[1]
            for value in self.batch.values()
            if isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point()
        }

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While the loss is evaluated inside."""
        handles, kept = [], {}
        for name, own in self._own.items():
            module = self._modules[name]
            if name not in self._layers and any(module.children()):
                kept[name] = {n: module._parameters[n] for n in own}
                handles.append(module.register_forward_pre_hook(self._give_copies(name)))
                handles.append(module.register_forward_hook(self._take_back(name, kept[name])))
            else:
                hook = self._listen(name, type(module) is nn.Embedding)
                handles.append(module.register_forward_hook(hook, prepend=True, with_kwargs=True))
        try:
            with hooked(handles):
                yield
        finally:
            for name, parameters in kept.items():
                self._modules[name]._parameters.update(parameters)

    def shares(self, loss: Tensor) -> dict[str, Share]:
        """What samples add, after one backward pass, by modules and copied parameters.

        Raises:
            NotApartError: With the module in which samples are not rows.
        """
        edges = [call.output for calls in self._calls.values() for call in calls]
        copies = [copy for copies in self._copies.values() for copy in copies]
        heard: list[Any] = [*edges, *copies]
        slopes = list(torch.autograd.grad(loss, heard, allow_unused=True))
        found: dict[str, Share] = {}
        for name, calls in self._calls.items():
            given = [(call, slopes.pop(0)) for call in calls]
            reached = [(call, slope) for call, slope in given if slope is not None]
            if reached:
                found[name] = self._share(name, reached)
        for name, several in self._copies.items():
            parts = [slope for slope in (slopes.pop(0) for _ in several) if slope is not None]
            if parts:
                found[name] = self._of_copies(name, torch.stack(parts).sum(0))
        return found

    def _share(self, name: str, calls: list[tuple[_Call, Tensor]]) -> Share:
        for call, _ in calls:
            now = [arg._version for arg in call.args if isinstance(arg, Tensor)]
            if now != call.versions:
                raise NotApartError(f"what entered {name} was written to later")
        if name in self._layers:
            layer, rows = self._layers[name], []
            for call, slope in calls:
                features = layer.features(_wide(call.args[0]))
                pair = layer.rows(_wide(slope), self.samples), layer.rows(features, self.samples)
                if pair[0] is None or pair[1] is None or not self._is_by_samples(features):
                    raise NotApartError(f"samples are no rows of what enters {name}")
                rows.append((pair[0], pair[1]))
            return OfLayer(layer, rows)
        own, module = self._own[name], self._modules[name]
        if type(module) is nn.Embedding:
            return self._of_table(name, module, calls)
        for call, slope in calls:
            tensors = [arg for arg in (*call.args, slope) if isinstance(arg, Tensor)]
            if any(not arg.dim() or len(arg) != self.samples for arg in tensors):
                raise NotApartError(f"samples are no rows of what enters {name}")
        wide = [(tuple(map(_wide, call.args)), _wide(slope)) for call, slope in calls]
        return of_module(module, own, wide)

    def _is_by_samples(self, entered: Tensor) -> bool:
        """Whether rows are samples, or all samples' tokens with what is padded. Of tokens that were
        picked (without what is padded, by an expert) there may be as many by chance.
        """
        per_sample = len(entered) // self.samples
        return entered.dim() > 2 or not self._lengths or per_sample in (1, *self._lengths)

    def _of_table(
        self, name: str, module: nn.Embedding, calls: list[tuple[_Call, Tensor]]
    ) -> Share:
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise NotApartError(f"{name} has a gradient of its own kind (max_norm, sparse)")
        every_ids, every_slopes = [], []
        for call, slope in calls:
            ids = call.args[0]
            if ids.dim() < 2 or len(ids) not in (1, self.samples) or len(slope) != self.samples:
                raise NotApartError(f"samples are no rows of what {name} looks up")
            ids = ids.expand(self.samples, *ids.shape[1:]).flatten(1)
            slopes = _wide(slope).flatten(1, -2)
            if module.padding_idx is not None:
                slopes = slopes.masked_fill((ids == module.padding_idx)[..., None], 0)
            every_ids.append(ids)
            every_slopes.append(slopes)
        weight = self._own[name]["weight"]
        ids, slopes = torch.cat(every_ids, 1), torch.cat(every_slopes, 1)
        return OfTable(weight, module.weight.detach(), ids, slopes)

    def _of_copies(self, name: str, slopes: Tensor) -> Share:
        shape = self.parameters[name].shape
        each = _wide(slopes).reshape(self.samples, *shape)
        return Written(lambda: iter([{name: each}]))

    def _listen(self, name: str, is_table: bool) -> Any:
        def called(
            _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> Tensor | None:
            if isinstance(output, Tensor) and not output.requires_grad:
                return None
            if not args or kwargs or not isinstance(output, Tensor):
                raise NotApartError(f"{name} is called with names, or returns no tensor")
            whole = output
            if is_table and len(output) == 1 < self.samples:  # positions: one row for all samples
                whole = output.expand(self.samples, *output.shape[1:])
            kept = tuple(arg.detach() if isinstance(arg, Tensor) else arg for arg in args)
            versions = [arg._version for arg in kept if isinstance(arg, Tensor)]
            call = _Call(kept, get_gradient_edge(whole), versions)
            self._calls.setdefault(name, []).append(call)
            return whole

        return called

    def _give_copies(self, name: str) -> Any:
        def called(module: nn.Module, args: tuple[Any, ...]) -> None:
            for own, full in self._own[name].items():
                parameter = self.parameters[full]
                shape = self._shape_of_copies(full, parameter, args)
                copy = parameter.detach().expand(shape).requires_grad_()
                self._copies.setdefault(full, []).append(copy)
                module._parameters[own] = copy  # type: ignore[assignment]

        return called

    def _take_back(self, name: str, kept: dict[str, Any]) -> Any:
        def called(module: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
            module._parameters.update(kept)

        return called

    def _shape_of_copies(
        self, name: str, parameter: Tensor, args: tuple[Any, ...]
    ) -> tuple[int, ...]:
        """One for each sample, so that it meets what it is combined with as before."""
        if parameter.dim() > 1 and len(parameter) == 1:
            return (self.samples, *parameter.shape[1:])
        entered = args[0] if args else None
        if parameter.dim() == 1 and isinstance(entered, Tensor) and entered.dim() > 1:
            return (self.samples, *[1] * (entered.dim() - 2), *parameter.shape)
        raise NotApartError(f"{name} is held by a module with parts")


def _wide(value: Any) -> Any:
    """Numbers of half precision in float32; all else as it is."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().to(torch.promote_types(value.dtype, torch.float32))
    return value


def listen(gmap: GradientMap, batch: Mapping[str, Any], samples: int) -> dict[str, Share]:
    """What each sample of a batch adds to the gradient of its loss. To be called inside
    `gmap.replay.run()`.

    Raises:
        NotApartError: With the module that does not tell samples apart.
    """
    listener = Listener(gmap.model, gmap.parameters, batch, samples)
    with listener.listening():
        loss = gmap.loss_fn(gmap.model, dict(batch))
    return listener.shares(loss)
