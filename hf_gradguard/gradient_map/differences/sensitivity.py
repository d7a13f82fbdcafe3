"""Estimates of how strongly each parameter's gradient depends on the input.

s_i² = Σ_b ‖∂g_i/∂x_b‖², over samples b. For v_b ~ N(0, I), Σ_b (J_bᵀv_b)_i² has that expectation
where layers know their samples apart, with a relative variance of 2 over the number of samples that
matter; and (Jᵀv)_i², with a relative variance of 2, where they do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ...randomness import Stream, normal
from .changes import Change, Layer, Pass
from .plan import TOLERANCE, Plan, plan_of, step_size

if TYPE_CHECKING:
    from ..map import GradientMap, Tensors

Method = Literal["difference", "exact"]


def estimate_squares(
    gmap: GradientMap,
    num_probes: int,
    generator: Stream | torch.Generator | None,
    split: bool,
    method: Method | None,
) -> Tensors:
    """s_i² from random probes; see `GradientMap.squared_sensitivity`."""
    total: Tensors = {}
    for name, squares in probe_squares(gmap, num_probes, generator, split, method):
        if name in total:
            total[name].add_(squares)
        else:
            total[name] = squares.to(torch.promote_types(squares.dtype, torch.float32))
    if num_probes > 1:
        for squares in total.values():
            squares.div_(num_probes)
    return {name: total[name] for name in gmap.parameters}


def probe_squares(
    gmap: GradientMap,
    num_probes: int,
    generator: Stream | torch.Generator | None = None,
    split: bool = True,
    method: Method | None = None,
    start: Pass | None = None,
    of: Callable[[Layer, Change], Iterator[tuple[str, Any]]] | None = None,
) -> Iterator[tuple[str, Any]]:
    """An estimate of s_i² from each probe, one parameter at a time: all names, `num_probes` times.

    Args:
        gmap: The map.
        num_probes: At least 1.
        generator: Of the probes.
        split: As for `GradientMap.squared_sensitivity`.
        method: Likewise.
        start: A pass at the map's own input, if there was one.
        of: What is wanted of a layer whose samples are known apart. Default: `layer_squares`.

    Raises:
        ValueError: If there are no probes, or the method is unknown.
        RuntimeError: If the method, or without one no method, works for this model.
    """
    if num_probes < 1:
        raise ValueError(f"num_probes must be at least 1, but is {num_probes}.")
    if method not in (None, "difference", "exact"):
        raise ValueError(f"method must be 'difference' or 'exact', but is {method!r}.")
    generator = generator or Stream()
    # Layers' gradients are those before clipping: a clipped map takes the exact way.
    if method == "exact" or gmap.undefended is not gmap:
        return _exact(gmap, num_probes, generator)
    plan = plan_of(gmap)
    if plan.error <= TOLERANCE:
        plan = plan if split else plan._replace(split=frozenset())
        return _differences(gmap, plan, num_probes, generator, start, of or layer_squares)
    reason = (
        f"Differences of {type(gmap.model).__name__}'s gradients are off by {plan.error:.0%}: "
        "its activations have kinks, or its arithmetic is too coarse."
    )
    if method == "difference":
        raise RuntimeError(f"{reason} Take method='exact'.")
    return _exact(gmap, num_probes, generator, reason)


def _differences(
    gmap: GradientMap,
    plan: Plan,
    num_probes: int,
    generator: Stream | torch.Generator,
    start: Pass | None,
    of: Callable[[Layer, Change], Iterator[tuple[str, Any]]],
) -> Iterator[tuple[str, Any]]:
    x, step = gmap.input, plan.shrink * step_size(gmap.input)
    layers = plan.layers_of(gmap)
    if start is None or start.layers.keys() != layers.keys():
        start = Pass.of(gmap, x, layers)
    for _ in range(num_probes):
        end = Pass.of(gmap, x + step * normal(generator, x.shape, x.device, x.dtype), layers)
        for name, rest in end.rest.items():
            yield name, ((rest - start.rest[name]) / step).square_()
        del end.rest
        for name, layer in layers.items():
            change = Change.between(start, end, name, step, len(x))
            if change is None:
                raise RuntimeError(
                    f"{name} was given other shapes than it was when its samples were told apart. "
                    "Take method='exact'."
                )
            yield from of(layer, change)


def layer_squares(layer: Layer, change: Change) -> Iterator[tuple[str, Tensor]]:
    """Σ_b (J_bᵀv)_i² of a layer's parameters, by name, over samples b."""
    module: Any = layer.module
    if layer.bias is not None:
        found = change.bias(layer) if change.slopes else torch.zeros_like(module.bias)[None]
        yield layer.bias, found.square().sum(0)
    if layer.weight is not None:
        squares = torch.zeros_like(module.weight, requires_grad=False)
        for one in change.weight(layer):  # stays in a processor's cache
            squares.addcmul_(one, one)
        yield layer.weight, squares


def _exact(
    gmap: GradientMap, num_probes: int, generator: Stream | torch.Generator, reason: str = ""
) -> Iterator[tuple[str, Tensor]]:
    try:
        gmap = gmap.twice()
        for _ in range(num_probes):
            x = gmap.input
            dtype = torch.promote_types(x.dtype, torch.float32)
            probe = normal(generator, (1, *x.shape), x.device, dtype).to(x.dtype)
            products = gmap.jvps(probe)
            for name, product in zip(gmap.parameters, products, strict=True):
                product = product[0].to(torch.promote_types(product.dtype, torch.float32))
                yield name, product.square()
    except RuntimeError as error:
        if not reason:
            raise
        raise RuntimeError(
            f"{reason} And second derivatives failed ({error}), so there are no sensitivities. Use "
            "gaussian_noise, which needs none, or a model in float32 with smooth activations."
        ) from error
