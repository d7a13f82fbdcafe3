"""J δ as a difference of two slopes, at parameters a little apart: no second derivatives.

J δ = ∇_x ⟨g(x), δ⟩ = d/dε ∇_x L(x; θ + εδ)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .candidates import Held

if TYPE_CHECKING:
    from .map import GradientMap, Tensors


def vjp_by_difference(gmap: GradientMap, x: Tensor, delta: Tensors) -> Tensor:
    """J δ at an input, from two passes that need no gradients of weights (4/3 plain gradients).

    Off by about the precision to the power of 2/3 (float32: 0.01 %) where the loss is smooth.

    Args:
        gmap: The map; its model is not written to.
        x: The input, in the shape of the map's.
        delta: One tensor for every shared parameter, or for some.

    Returns:
        A tensor in the shape of `x`.

    Example:
        >>> delta = gmap.gradient()
        >>> product, exact = vjp_by_difference(gmap, gmap.input, delta), gmap.vjp(delta)
        >>> bool((product - exact).norm() < 0.01 * exact.norm())
        True
    """
    parameters = {name: gmap.parameters[name].detach() for name in delta}
    sizes = [_norm(parameters), _norm(delta)]
    if not sizes[1]:
        return torch.zeros_like(x)
    # Where rounding and the third derivative weigh alike, for a loss and parameters of one scale;
    # networks bend sooner than that in single precision.
    relative = min(torch.finfo(x.dtype).eps ** (1 / 3), 1.5e-4)
    step = relative * (sizes[0] or 1.0) / sizes[1]
    ends = [
        _slope(gmap, x, {n: p + sign * step * delta[n] for n, p in parameters.items()})
        for sign in (1, -1)
    ]
    return (ends[0] - ends[1]) / (2 * step)


def _slope(gmap: GradientMap, x: Tensor, parameters: Tensors) -> Tensor:
    """∇_x L at other parameters."""
    x = x.detach().requires_grad_()
    with gmap.replay.run(), gmap.replay.full_precision():
        values = {f"model.{name}": p.to(x.device) for name, p in parameters.items()}
        loss = torch.func.functional_call(Held(gmap.model), values, (lambda: gmap.evaluate(x),))
        (slope,) = torch.autograd.grad(loss, x)
    found: Tensor = slope
    return found


def _norm(tensors: Tensors) -> float:
    return float(torch.stack([t.double().square().sum() for t in tensors.values()]).sum().sqrt())
