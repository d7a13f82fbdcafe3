"""Estimates of how strongly each parameter's gradient depends on the input.

s_i² = Σ_b ‖∂g_i/∂x_b‖², over samples b. For v_b ~ N(0, I), Σ_b (J_bᵀv_b)_i² has that expectation
where layers know their samples apart, with a relative variance of 2 over the number of samples that
matter; and (Jᵀv)_i², with a relative variance of 2, where they do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..randomness import Stream, normal
from .per_sample import Change, Layer, Pass, layers_of

if TYPE_CHECKING:
    from .map import GradientMap, Tensors

Method = Literal["difference", "exact"]

STEP = 5.0
"""Of a difference, in square roots of the type's precision, relative to the input's root mean
square: truncation and rounding are then about as large as each other.
"""
TOLERANCE = 0.1
"""The relative error above which a difference is not used. Probes themselves err by more."""


class Plan(NamedTuple):
    """How a model's sensitivities are estimated, found out by trial once.

    Args:
        split: The layers whose samples are known apart.
        error: How much differences over two steps differ, relative to them.
    """

    split: frozenset[str]
    error: float


_PLANS: WeakKeyDictionary[nn.Module, dict[object, Plan]] = WeakKeyDictionary()


def estimate_squares(
    gmap: GradientMap,
    num_probes: int,
    generator: Stream | torch.Generator | None,
    split: bool,
    method: Method | None,
) -> Tensors:
    """s_i² from random probes; see `GradientMap.squared_sensitivity`."""
    total = {
        name: torch.zeros(
            p.shape, device=p.device, dtype=torch.promote_types(p.dtype, torch.float32)
        )
        for name, p in gmap.parameters.items()
    }
    for name, squares in probe_squares(gmap, num_probes, generator, split, method):
        total[name].add_(squares, alpha=1 / num_probes)
    return total


def probe_squares(
    gmap: GradientMap,
    num_probes: int,
    generator: Stream | torch.Generator | None = None,
    split: bool = True,
    method: Method | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """An estimate of s_i² from each probe, one parameter at a time: all names, `num_probes` times.

    Args:
        gmap: The map.
        num_probes: At least 1.
        generator: Of the probes.
        split: As for `GradientMap.squared_sensitivity`.
        method: Likewise.

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
        return _differences(gmap, plan.split if split else frozenset(), num_probes, generator)
    reason = (
        f"Differences of {type(gmap.model).__name__}'s gradients are off by {plan.error:.0%}: "
        "its activations have kinks, or its arithmetic is too coarse."
    )
    if method == "difference":
        raise RuntimeError(f"{reason} Take method='exact'.")
    return _exact(gmap, num_probes, generator, reason)


def plan_of(gmap: GradientMap) -> Plan:
    """How differences work for the map's model, tried out when first asked for a kind of batch."""
    plans = _PLANS.setdefault(gmap.model, {})
    key = (
        tuple(gmap.parameters),
        len(gmap.input) > 1,
        gmap.input.dtype,
        tuple(module.training for module in gmap.replay.modules),
        gmap.replay.recomputes(),
        getattr(gmap.loss_fn, "__code__", gmap.loss_fn),  # a lambda is made anew every time
    )
    if key not in plans:
        plans[key] = _try_out(gmap)
    return plans[key]


def _try_out(gmap: GradientMap) -> Plan:
    """Two steps along one direction, and one of the first sample alone."""
    x = gmap.input
    if torch.finfo(x.dtype).bits < 32:
        return Plan(frozenset(), 1.0)
    layers = {} if gmap.replay.recomputes() else layers_of(gmap.model, gmap.parameters)
    step, samples = step_size(x), len(x)
    direction = normal(Stream(), x.shape, x.device, x.dtype)
    start = Pass.of(gmap, x, layers)
    longer = Pass.of(gmap, x + step * direction, layers)
    shorter = Pass.of(gmap, x + step / 4 * direction, layers)
    one = torch.zeros_like(direction)
    one[0] = direction[0]
    alone = Pass.of(gmap, x + step * one, layers) if samples > 1 else None
    whole = Pass.of(gmap, x, {}).rest
    apart: dict[str, bool | None] = {}
    errors = []
    for name, layer in layers.items():
        long = Change.between(start, longer, name, step, samples)
        short = Change.between(start, shorter, name, step / 4, samples)
        apart[name] = _adds_up(start, name, layer, samples, whole) and (
            alone is None or _first_alone(Change.between(start, alone, name, step, samples))
        )
        if long is not None and short is not None:
            pairs = [*zip(long.slopes, short.slopes, strict=True)]
            errors += [_relative(one, other) for one, other in pairs]
    for name, rest in start.rest.items():
        pair = (longer.rest[name] - rest) / step, (shorter.rest[name] - rest) / (step / 4)
        errors.append(_relative(*pair))
    found = [error for error in errors if error is not None]
    # What stands still (LoRA at its start) shows nothing: it is taken to be as the others are.
    others = all(known for known in apart.values() if known is not None)
    split = {name for name, known in apart.items() if (others if known is None else known)}
    return Plan(frozenset(split), float(torch.tensor(found).mean()) if found else 0.0)


def _first_alone(change: Change | None) -> bool | None:
    """Whether a change of the first sample left all others as they were; `None` if it changed no
    slopes at all.
    """
    if change is None:
        return False
    for parts in (change.slopes, change.features):
        for part in parts:
            sizes = part.flatten(1).square().sum(1)
            if sizes[1:].sum() > 1e-6 * sizes[0]:
                return False
    return True if any(slopes.any() for slopes in change.slopes) else None


def _adds_up(start: Pass, name: str, layer: Layer, samples: int, gradient: Tensors) -> bool:
    """Whether the samples' products are all of the gradient: a weight may be used without its
    layer, as fused losses use a head's.
    """
    rows = start.rows(name, samples)
    if rows is None:
        return False
    scale = float(sum(slopes.norm() * (1 + features.norm()) for slopes, features in rows))
    for kind in ("weight", "bias"):
        parameter = getattr(layer, kind)
        if parameter is None:
            continue
        missing = gradient[parameter].clone()
        for slopes, features in rows:
            for one in range(samples):
                some = slopes[one : one + 1], features[one : one + 1]
                missing -= (
                    layer.weight_gradients(*some)
                    if kind == "weight"
                    else layer.bias_gradients(some[0])
                )[0]
        if missing.norm() > max(1e-3 * float(gradient[parameter].norm()), 1e-5 * scale):
            return False
    return True


def _relative(one: Tensor, other: Tensor) -> float | None:
    size = float(one.norm() + other.norm()) / 2
    return float((one - other).norm()) / size if size else None


def step_size(x: Tensor) -> float:
    """How far a difference goes along a standard normal direction, in the input's unit."""
    precision: float = torch.finfo(x.dtype).eps ** 0.5
    return STEP * precision * (float(x.square().mean().sqrt()) or 1.0)


def _differences(
    gmap: GradientMap,
    split: frozenset[str],
    num_probes: int,
    generator: Stream | torch.Generator,
) -> Iterator[tuple[str, Tensor]]:
    x, step = gmap.input, step_size(gmap.input)
    found = layers_of(gmap.model, gmap.parameters)
    layers = {name: layer for name, layer in found.items() if name in split}
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
            yield from _squares(layer, change)


def _squares(layer: Layer, change: Change) -> Iterator[tuple[str, Tensor]]:
    module: Any = layer.module
    if layer.bias is not None:
        found = change.bias(layer) if change.slopes else torch.zeros_like(module.bias)[None]
        yield layer.bias, found.square().sum(0)
    if layer.weight is not None:
        squares = torch.zeros_like(module.weight, requires_grad=False)
        for some in change.weight(layer):
            for one in some:  # stays in a processor's cache
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
