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
        write_gradients: Gives them from the first sample to the last: by parameter `(b, *shape)`.
    """

    def __init__(self, write_gradients: Callable[[], Iterator[Tensors]]) -> None:
        self._write_gradients = write_gradients

    def squares(self) -> Tensor:
        squares = [
            torch.stack(
                [gradients.flatten(1).double().square().sum(1) for gradients in chunk.values()]
            ).sum(0)
            for chunk in self._write_gradients()
        ]
        return torch.cat(squares)

    def total(self, factors: Tensor) -> Tensors:
        sums: Tensors = {}
        start = 0
        for chunk in self._write_gradients():
            count = len(next(iter(chunk.values())))
            chunk_factors = factors[start : start + count]
            for name, gradients in chunk.items():
                added = torch.tensordot(chunk_factors.to(gradients.dtype), gradients, 1)
                sums[name] = sums[name] + added if name in sums else added
            start += count
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
            # Two T × T products, or one weight written out: whatever is smaller.
            if 2 * tokens**2 <= out * into:
                return squares + _ghost_squares(slopes, features)
        return squares + Written(self.written).squares()

    def total(self, factors: Tensor) -> Tensors:
        totals: Tensors = {}
        for slopes, features in self.rows:
            scaled = slopes * factors.to(slopes.dtype).view(-1, *[1] * (slopes.dim() - 1))
            if self.layer.weight is not None:
                _add(totals, self.layer.weight, self._weight(scaled, features))
            if self.layer.bias is not None:
                _add(totals, self.layer.bias, self.layer.bias_gradients(scaled).sum(0))
        return totals

    def _weight(self, slopes: Tensor, features: Tensor) -> Tensor:
        """Of all samples together."""
        m: Any = self.layer.module
        if isinstance(m, LINEAR):
            slopes, features = slopes.flatten(0, 1)[None], features.flatten(0, 1)[None]
        if isinstance(m, (*LINEAR, nn.LayerNorm)):
            return self.layer.weight_gradients(slopes, features).sum(0)
        function = getattr(layer_gradients, f"conv{m.weight.dim() - 2}d_weight")
        gradient: Tensor = function(
            features, m.weight.shape, slopes, m.stride, m.padding, m.dilation, m.groups
        )
        return gradient

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
        for chosen in _slices(len(self.rows[0][0]), size):
            gradients = [self.layer.weight_gradients(s[chosen], f[chosen]) for s, f in self.rows]
            yield {
                self.layer.weight: torch.stack(gradients).sum(0)
                if len(gradients) > 1
                else gradients[0]
            }


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
        squares = []
        for ids, slopes in zip(self.ids, self.slopes, strict=True):
            # Of a word that comes twice the slopes add up before they are squared.
            used, places = ids.unique(return_inverse=True)
            rows = slopes.new_zeros(len(used), slopes.shape[-1]).index_add_(0, places, slopes)
            squares.append(rows.double().square().sum())
        return torch.stack(squares)

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
    fixed = {n: p.detach().to(torch.promote_types(p.dtype, torch.float32))
            for n, p in module.named_parameters(recurse=False)}  # fmt: skip
    shared = {local_name: fixed.pop(local_name) for local_name in names}

    def write_gradients() -> Iterator[Tensors]:
        size = sum(p.numel() for p in shared.values())
        for chosen in _slices(len(calls[0][1]), size):
            gradients: Tensors = {}
            for args, slopes in calls:
                row_gradients = _each_row(module, shared, fixed, args, slopes, chosen)
                for local_name, value in row_gradients.items():
                    _add(gradients, names[local_name], value.to(slopes.dtype))
            yield gradients

    return Written(write_gradients)


def _each_row(
    module: nn.Module, shared: Tensors, fixed: Tensors, args: Sequence[Any], slopes: Tensor,
    chosen: slice,
) -> Tensors:  # fmt: skip
    tensors = [arg[chosen] for arg in args if isinstance(arg, Tensor)]

    def inner(parameters: Tensors, slope: Tensor, *rows: Tensor) -> Tensor:
        row_tensors = iter(rows)
        call = tuple(next(row_tensors)[None] if isinstance(arg, Tensor) else arg for arg in args)
        output = functional_call(module, {**fixed, **parameters}, call)
        return (output[0] * slope).sum()

    dims = (None, 0, *[0] * len(tensors))
    gradients: Tensors = vmap(grad(inner), in_dims=dims)(shared, slopes[chosen], *tensors)
    return gradients


def _ghost_squares(slopes: Tensor, features: Tensor) -> Tensor:
    """‖Σ_t δ_t a_tᵀ‖² of every sample, from products of its tokens.

    Where tokens' products nearly cancel, rounding could make the sum too small: what it can be off
    by is added.
    """
    samples, tokens = slopes.shape[:2]
    squares = []
    for chosen in _slices(samples, tokens**2):
        left_rows, right_rows = slopes[chosen], features[chosen]
        squares.append(
            ((left_rows @ left_rows.mT) * (right_rows @ right_rows.mT)).double().sum((1, 2))
        )
    sizes = (slopes.norm(dim=2) * features.norm(dim=2)).double().sum(1)
    return torch.cat(squares).clamp(min=0) + torch.finfo(slopes.dtype).eps * sizes.square()


def _slices(samples: int, size: int) -> Iterator[slice]:
    samples_at_once = max(1, ENTRIES // max(size, 1))
    return (slice(start, start + samples_at_once) for start in range(0, samples, samples_at_once))


def _add(totals: Tensors, name: str, value: Tensor) -> None:
    totals[name] = totals[name] + value if name in totals else value


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
        # A tied tensor's gradient is a sum over modules, of which each sees its own part alone.
        if tied := [name for key, name in names.items() if holders[key] > 1]:
            raise NotApartError(f"{tied[0]} is used by several modules")
        self._layers: dict[str, Layer] = layers_of(self.model, self.parameters)
        self._shared_names: dict[str, dict[str, str]] = {}
        for name, module in modules.items():
            shared_names = {n: names[id(p)] for n, p in module.named_parameters(recurse=False)
                   if id(p) in names}  # fmt: skip
            if shared_names:
                self._shared_names[name] = shared_names
        self._modules = modules
        self._lengths = {
            value.shape[1]
            for value in self.batch.values()
            if isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point()
        }

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While the loss is evaluated inside."""
        handles, replaced = [], {}
        for name, shared_names in self._shared_names.items():
            module = self._modules[name]
            # What happens between its parts is not seen, so the parameter itself is given apart.
            if name not in self._layers and any(module.children()):
                replaced[name] = {n: module._parameters[n] for n in shared_names}
                handles.append(module.register_forward_pre_hook(self._give_copies(name)))
                handles.append(module.register_forward_hook(self._take_back(name, replaced[name])))
            else:
                hook = self._listen(name, type(module) is nn.Embedding)
                handles.append(module.register_forward_hook(hook, prepend=True, with_kwargs=True))
        try:
            with hooked(handles):
                yield
        finally:
            for name, parameters in replaced.items():
                self._modules[name]._parameters.update(parameters)

    def shares(self, loss: Tensor) -> dict[str, Share]:
        """What samples add, after one backward pass, by modules and copied parameters.

        Raises:
            NotApartError: With the module in which samples are not rows.
        """
        # One backward pass for all slopes. They come in the order in which they are asked for.
        edges = [call.output for calls in self._calls.values() for call in calls]
        copies = [copy for copies in self._copies.values() for copy in copies]
        heard: list[Any] = [*edges, *copies]
        slopes = list(torch.autograd.grad(loss, heard, allow_unused=True))
        shares: dict[str, Share] = {}
        for name, calls in self._calls.items():
            calls_with_slopes = [(call, slopes.pop(0)) for call in calls]
            reached = [(call, slope) for call, slope in calls_with_slopes if slope is not None]
            if reached:
                shares[name] = self._share(name, reached)
        for name, copies_of_parameter in self._copies.items():
            reached_slopes = [
                slope for slope in (slopes.pop(0) for _ in copies_of_parameter) if slope is not None
            ]
            if reached_slopes:
                shares[name] = self._of_copies(name, torch.stack(reached_slopes).sum(0))
        return shares

    def _share(self, name: str, calls: list[tuple[_Call, Tensor]]) -> Share:
        # Features are kept by reference. One that was written to since is not what entered.
        for call, _ in calls:
            present_versions = [arg._version for arg in call.args if isinstance(arg, Tensor)]
            if present_versions != call.versions:
                raise NotApartError(f"what entered {name} was written to later")
        if name in self._layers:
            layer, rows = self._layers[name], []
            for call, slope in calls:
                features = layer.features(_wide(call.args[0]))
                pair = layer.rows(_wide(slope), self.samples), layer.rows(features, self.samples)
                # Better no shares than wrong ones: clipping and ε rest on them.
                if pair[0] is None or pair[1] is None or not self._is_by_samples(features):
                    raise NotApartError(f"samples are no rows of what enters {name}")
                rows.append((pair[0], pair[1]))
            return OfLayer(layer, rows)
        shared_names, module = self._shared_names[name], self._modules[name]
        if type(module) is nn.Embedding:
            return self._of_table(name, module, calls)
        for call, slope in calls:
            tensors = [arg for arg in (*call.args, slope) if isinstance(arg, Tensor)]
            if any(not arg.dim() or len(arg) != self.samples for arg in tensors):
                raise NotApartError(f"samples are no rows of what enters {name}")
        wide = [(tuple(map(_wide, call.args)), _wide(slope)) for call, slope in calls]
        return of_module(module, shared_names, wide)

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
        weight = self._shared_names[name]["weight"]
        ids, slopes = torch.cat(every_ids, 1), torch.cat(every_slopes, 1)
        return OfTable(weight, module.weight.detach(), ids, slopes)

    def _of_copies(self, name: str, slopes: Tensor) -> Share:
        shape = self.parameters[name].shape
        gradients = _wide(slopes).reshape(self.samples, *shape)
        return Written(lambda: iter([{name: gradients}]))

    def _listen(self, name: str, is_table: bool) -> Any:
        def called(
            _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> Tensor | None:
            if isinstance(output, Tensor) and not output.requires_grad:
                return None
            if not args or kwargs or not isinstance(output, Tensor):
                raise NotApartError(f"{name} is called with names, or returns no tensor")
            expanded = output
            if is_table and len(output) == 1 < self.samples:  # positions: one row for all samples
                expanded = output.expand(self.samples, *output.shape[1:])
            detached_args = tuple(arg.detach() if isinstance(arg, Tensor) else arg for arg in args)
            versions = [arg._version for arg in detached_args if isinstance(arg, Tensor)]
            call = _Call(detached_args, get_gradient_edge(expanded), versions)
            self._calls.setdefault(name, []).append(call)
            return expanded

        return called

    def _give_copies(self, name: str) -> Any:
        def called(module: nn.Module, args: tuple[Any, ...]) -> None:
            for local_name, full in self._shared_names[name].items():
                parameter = self.parameters[full]
                shape = self._shape_of_copies(full, parameter, args)
                copy = parameter.detach().expand(shape).requires_grad_()
                self._copies.setdefault(full, []).append(copy)
                module._parameters[local_name] = copy  # type: ignore[assignment]

        return called

    def _take_back(self, name: str, parameters: dict[str, Any]) -> Any:
        def called(module: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
            module._parameters.update(parameters)

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
