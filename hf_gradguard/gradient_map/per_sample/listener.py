"""Listens to a model's modules while it evaluates several samples, for what each adds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..layers import Layer, layers_of
from ..map import GradientMap
from ..replay import hooked
from .precision import is_coarse
from .shares import OfLayer, OfTable, Share, Written, of_module


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
        is_exact: Whether numbers of half precision are refused, by `NotApartError`.
    """

    model: nn.Module
    parameters: Mapping[str, Tensor]
    batch: Mapping[str, Any]
    samples: int
    is_exact: bool = False
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

    def shares(self, loss: Tensor, scale: float = 1.0) -> dict[str, Share]:
        """What samples add, after one backward pass, by modules and copied parameters.

        Args:
            loss: What the pass gave back.
            scale: What the loss is multiplied by. With as many as its mean is over, slopes of a
                sample are those of the sum, which no other sample decides.

        Raises:
            NotApartError: With the module in which samples are not rows.
        """
        # One backward pass for all slopes. They come in the order in which they are asked for.
        edges = [call.output for calls in self._calls.values() for call in calls]
        copies = [copy for copies in self._copies.values() for copy in copies]
        heard: list[Any] = [*edges, *copies]
        factor = torch.full_like(loss, scale)
        slopes = list(torch.autograd.grad(loss, heard, factor, allow_unused=True)) if heard else []
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
            if self.is_exact and any(map(is_coarse, (*args, output))):
                raise NotApartError(f"{name} computes in half precision")
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


def listen(
    gmap: GradientMap, batch: Mapping[str, Any], samples: int, scale: float = 1.0
) -> dict[str, Share]:
    """What each sample of a batch adds to the gradient of its loss times `scale`. To be called
    inside `gmap.replay.run()`.

    Raises:
        NotApartError: With the module that does not tell samples apart.
    """
    listener = Listener(gmap.model, gmap.parameters, batch, samples, is_exact=True)
    with listener.listening():
        loss = gmap.loss_fn(gmap.model, dict(batch))
    return listener.shares(loss, scale)
