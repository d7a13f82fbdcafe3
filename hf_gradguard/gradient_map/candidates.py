"""A function of the gradient at many candidate inputs, with its derivatives: one vectorized pass.

What gradient matching evaluates thousands of times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .factors import Factors, LinearCalls, linear_layers
from .graphs import differentiate

if TYPE_CHECKING:
    from .map import GradientMap, Tensors

GradientFunction = Callable[[Mapping[str, "Tensor | Factors"], "Tensors"], Tensor]
"""`(g(x), extras) -> scalar`, of one candidate's tensors."""


class Candidates:
    """Evaluates a map at candidates of somebody who does not know its input.

    Args:
        gmap: The map.
        factored: Give functions the gradients of linear layers' weights as `Factors`.
    """

    def __init__(self, gmap: GradientMap, factored: bool) -> None:
        self._gmap = gmap
        self._offsets, self._layers = _linear_calls(gmap) if factored else ({}, {})
        self._dense = {n: p for n, p in gmap.parameters.items() if n not in self._layers}
        self._whole = False

    def slopes(
        self, function: GradientFunction, xs: Tensor, extras: Tensors, entries: Tensors
    ) -> tuple[Tensor, Tensor, Tensors]:
        """Values `(K,)`, their derivatives by `xs`, and by the floating-point entries."""
        free = {key: value.detach() for key, value in entries.items() if value.is_floating_point()}
        fixed = {key: value for key, value in entries.items() if key not in free}
        if len(xs) == 1:
            return self._one(function, xs, extras, free, fixed)
        if not self._whole:  # kernels without second derivatives, which vectorization hides
            self._gmap.gradient_at(self._gmap.input, create_graph=True)
            self._whole = True
        return self._many(function, xs, extras, free, fixed)

    def _one(
        self, function: GradientFunction, xs: Tensor, extras: Tensors, free: Tensors, fixed: Tensors
    ) -> tuple[Tensor, Tensor, Tensors]:
        """By the ordinary engine, which runs models that cannot be vectorized."""
        gmap, x = self._gmap, xs[0].detach().requires_grad_()
        leaves = {key: value[0].clone().requires_grad_() for key, value in free.items()}
        own = {**leaves, **{key: value[0] for key, value in fixed.items()}}
        zeros = {call: zero.clone().requires_grad_() for call, zero in self._offsets.items()}
        calls = LinearCalls(self._layers, zeros)
        with gmap.replay.run():
            with calls.watching():
                loss = gmap.evaluate(x, own)
            derivatives = differentiate(loss, self._dense | calls.offsets, create_graph=True)
            gradient: dict[str, Tensor | Factors]
            gradient = {name: derivatives[name] for name in self._dense}
            gradient |= calls.factors(derivatives)
            value = function(gradient, {name: tensor[0] for name, tensor in extras.items()})
        slope, *others = gmap.input_gradient(value, x, *leaves.values())
        by_leaf = {key: other[None] for key, other in zip(free, others, strict=True)}
        return value.detach()[None], slope[None], by_leaf

    def _many(
        self, function: GradientFunction, xs: Tensor, extras: Tensors, free: Tensors, fixed: Tensors
    ) -> tuple[Tensor, Tensor, Tensors]:
        gmap, held = self._gmap, Held(self._gmap.model)
        parameters = {f"model.{name}": p.detach() for name, p in self._dense.items()}
        shared = gmap.parameters
        constants = {f"model.{name}": shared[name].detach() for name in self._layers}

        def loss_and_inputs(
            parameters: Tensors, offsets: Tensors, x: Tensor, own: Tensors
        ) -> tuple[Tensor, dict[str, list[Tensor]]]:
            calls = LinearCalls(self._layers, offsets)

            def run() -> Tensor:
                with calls.watching():
                    return gmap.evaluate(x, own)

            value: Tensor = torch.func.functional_call(held, {**constants, **parameters}, (run,))
            return value, calls.inputs

        # Both derivatives are taken inside the vectorization: differentiating vmap(grad(loss)) from
        # outside gives wrong second derivatives of layer normalization (torch 2.13).
        def value(
            x: Tensor, free: Tensors, fixed: Tensors, extra: Tensors
        ) -> tuple[Tensor, Tensor]:
            both = torch.func.grad(loss_and_inputs, argnums=(0, 1), has_aux=True)
            (written, deltas), inputs = both(parameters, self._offsets, x, {**free, **fixed})
            gradient = {name.removeprefix("model."): tensor for name, tensor in written.items()}
            gradient |= LinearCalls(self._layers, inputs=inputs).factors(deltas)
            result = function(gradient, extra)
            return result, result

        slopes_of = torch.func.grad(value, argnums=(0, 1), has_aux=True)
        each = torch.func.vmap(slopes_of, randomness="same")
        with torch.no_grad(), gmap.replay.draws(), gmap.replay.kernels():
            (slopes, others), values = each(xs.detach(), free, fixed, extras)
        return values, slopes, others


class Held(nn.Module):
    """A module whose forward pass is a function that runs `model`: what `functional_call` needs to
    swap its parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Tensor]) -> Tensor:
        return run()


def _linear_calls(gmap: GradientMap) -> tuple[Tensors, dict[str, nn.Module]]:
    """Zeros in the shape of each output of a linear layer, and the layers that run."""
    calls = LinearCalls(linear_layers(gmap.model, gmap.parameters))
    # Layers that run again in the backward pass would be heard twice.
    if not gmap.replay.recomputes():
        with torch.no_grad(), gmap.replay.draws(), gmap.replay.kernels(), calls.watching():
            gmap.evaluate(gmap.input)
    zeros = {call: gmap.input.new_zeros(shape) for call, shape in calls.outputs.items()}
    return zeros, {name: layer for name, layer in calls.layers.items() if name in calls.inputs}
