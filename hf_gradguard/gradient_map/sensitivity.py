"""The estimation of sensitivities of a model: which layers separate samples, and step sizes.

Both are found out by trial.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from ..randomness import Stream, normal
from .changes import Change
from .layers import Layer, Pass, layers_of
from .nonsmooth import ActivationPattern, OtherOperations
from .parameters import DifferencePlan, cache_of, code_of
from .replay import nodes_of
from .types import ClientMap, Tensors

STEP = 5.0
"""Of a difference, in square roots of the type's precision, relative to the input's root mean
square: truncation and rounding are then about as large as each other.
"""
SHRINKS = (1.0, 0.25, 0.0625)
"""Of the step, where two steps do not agree: what curves strongly needs shorter ones."""
TOLERANCE = 0.1
"""The relative error above which a difference is not used. Probes themselves err by more."""
AGREE = 0.02
"""The relative error at which no shorter step is tried."""
TRIES = 16
"""Uses after which a plan is tried out anew, since weights change."""


_NONSMOOTH_STEPS = re.compile(
    "(Abs|Ama|Ami|Clamp|Elu|Hard|Kth|L1Loss|LeakyRelu|Max|Median|Min|Prelu|Relu|Rrelu|Softshrink|Sort|"
    "Threshold|Topk|AdaptiveMax|FractionalMax)"
)
"""What autograd calls the steps whose derivative jumps."""


def plan_of(gmap: ClientMap) -> DifferencePlan:
    """Return how differences work for the map's model, tried out when needed.

    It is tried out when first asked for a kind of batch, and now and then again.
    """
    plans, key, plan = cache_of(gmap.model).difference_plans, _key(gmap), known_plan(gmap)
    if gmap.shards is not None and gmap.shards.any(plan is None):  # a trial is of all devices
        plan = None
    uses = plans[key][1] if plan is not None else 0
    plan = plan or _try_out(gmap)
    plans[key] = plan, uses + 1
    return plan


def known_plan(gmap: ClientMap) -> DifferencePlan | None:
    """Return what `plan_of` will say without trying, or `None`."""
    plans = cache_of(gmap.model).difference_plans
    plan, uses = plans.get(_key(gmap), (None, 0))
    return plan if uses < TRIES else None


def keep(gmap: ClientMap, plan: DifferencePlan) -> DifferencePlan:
    """Keep a plan in which more was found out than in the one of `plan_of`."""
    plans, key = cache_of(gmap.model).difference_plans, _key(gmap)
    plans[key] = plan, plans[key][1]
    return plan


def split_layers(gmap: ClientMap, plan: DifferencePlan) -> dict[str, Layer]:
    """Return the map's layers that separate samples."""
    layers = layers_of(gmap.model, gmap.parameters)
    return {name: layer for name, layer in layers.items() if name in plan.split_layers}


def first_pass(
    gmap: ClientMap, layers: Mapping[str, Layer], plan: DifferencePlan, needs_slope: bool = True
) -> Pass:
    """Evaluate a pass at the map's own input, which differences start from."""
    pattern = ActivationPattern() if plan.keeps_pattern else None
    return Pass.evaluate(gmap, gmap.input, layers, pattern, needs_slope)


def _key(gmap: ClientMap) -> Hashable:
    return (
        tuple(gmap.parameters),
        len(gmap.input) > 1,
        gmap.input.dtype,
        tuple(module.training for module in gmap.replay.modules),
        gmap.replay.recomputes(),
        gmap.replay.kind,
        code_of(gmap.loss_fn),
    )


def _try_out(gmap: ClientMap) -> DifferencePlan:
    """Two steps along one direction, and one of the first sample alone."""
    x = gmap.input
    is_nonsmooth = _is_nonsmooth(gmap)
    is_rough = torch.finfo(x.dtype).bits < 32 or (is_nonsmooth and not _can_keep_pattern(gmap))
    if gmap.shards is not None:
        is_rough = gmap.shards.any(is_rough)
    if is_rough:
        return DifferencePlan(frozenset(), 1.0)
    is_splittable = not gmap.replay.recomputes() and gmap.shards is None
    layers = layers_of(gmap.model, gmap.parameters) if is_splittable else {}
    direction = normal(Stream.from_seeds(0), x.shape, x.device, x.dtype)  # hides nothing
    start = Pass.evaluate(gmap, x, layers, ActivationPattern() if is_nonsmooth else None)
    full_step = step_size(gmap)
    longer = Pass.evaluate(gmap, x + full_step * direction, layers, start.pattern)
    tried: list[tuple[float, float]] = []
    for shrink in SHRINKS:
        step = shrink * full_step
        shorter = Pass.evaluate(gmap, x + step / 4 * direction, layers, start.pattern)
        error = _disagreement(start, longer, shorter, step, gmap)
        tried.append((error, shrink))
        if error <= AGREE:
            break
        longer = shorter
    apart = _find_split_layers(gmap, start, layers, direction)
    return DifferencePlan(apart, *min(tried), keeps_pattern=is_nonsmooth)


def _disagreement(start: Pass, longer: Pass, shorter: Pass, step: float, gmap: ClientMap) -> float:
    """Return the relative difference between the slopes of a step and of a quarter of it.

    It is the median over layers and parameters. Where the derivative is zero, as for a key's bias,
    only rounding differs, and the parameter does not count.
    """
    errors, samples = [], len(gmap.input)
    for name in start.layers:
        long = Change.between(start, longer, name, step, samples)
        short = Change.between(start, shorter, name, step / 4, samples)
        if long is not None and short is not None:
            pairs = zip(long.slopes, short.slopes, strict=True)
            errors += [_relative(long_slopes, short_slopes) for long_slopes, short_slopes in pairs]
    for name, start_gradient in start.unsplit.items():
        pair = (
            (longer.unsplit[name] - start_gradient) / step,
            (shorter.unsplit[name] - start_gradient) / (step / 4),
        )
        errors.append(_relative(*pair))
    finite_errors = [error for error in errors if error is not None]
    error = torch.tensor(finite_errors).median() if finite_errors else torch.tensor(0.0)
    if gmap.shards is not None:
        error = gmap.shards.joined({"": error}, "max")[""]
    largest = float(error)
    return largest if math.isfinite(largest) else math.inf


def _find_split_layers(
    gmap: ClientMap, start: Pass, layers: dict[str, Layer], direction: Tensor
) -> frozenset[str]:
    """The layers that know their samples apart."""
    if not layers:
        return frozenset()
    x, samples = gmap.input, len(gmap.input)
    first_sample = torch.zeros_like(direction)
    first_sample[0] = direction[0]
    step = step_size(gmap)
    alone = None
    if samples > 1:
        alone = Pass.evaluate(gmap, x + step * first_sample, layers, start.pattern)
    gradient = Pass.evaluate(gmap, x, {}).unsplit
    is_apart: dict[str, bool | None] = {
        name: _adds_up(start, name, layer, samples, gradient)
        and (alone is None or _first_alone(Change.between(start, alone, name, step, samples)))
        for name, layer in layers.items()
    }
    # What stands still (LoRA at its start) shows nothing: it is taken to be as the others are.
    is_rest_apart = all(verdict for verdict in is_apart.values() if verdict is not None)
    return frozenset(
        n for n, verdict in is_apart.items() if (is_rest_apart if verdict is None else verdict)
    )


def _is_nonsmooth(gmap: ClientMap, pattern: ActivationPattern | None = None) -> bool:
    """Tell whether anything of the loss has a derivative that jumps, on these sides of known ones.

    Trials would not do: of the steps of a small model one in ten crosses a kink, and is then off by
    the jump over the step.
    """
    kept = nullcontext() if pattern is None else pattern.kept()
    with gmap.replay.run(), kept:
        loss = gmap.evaluate(gmap.input.requires_grad_())
    return any(_NONSMOOTH_STEPS.match(node.name()) for node in nodes_of([loss]))


def _can_keep_pattern(gmap: ClientMap) -> bool:
    """Whether no derivative jumps in a pass that keeps the sides of another one."""
    # What runs again within the backward pass does so in another order; devices of one client
    # would have to agree.
    if gmap.shards is not None or gmap.replay.recomputes():
        return False
    pattern = ActivationPattern()
    try:
        _is_nonsmooth(gmap, pattern)
        return not _is_nonsmooth(gmap, pattern)
    except OtherOperations:
        return False


def _first_alone(change: Change | None) -> bool | None:
    """Return whether a change of the first sample left all others as they were.

    The result is `None` if the change moved no slopes at all.
    """
    if change is None:
        return False
    for changes in (change.slopes, change.features):
        for change_of_call in changes:
            sizes = change_of_call.flatten(1).square().sum(1)
            if sizes[1:].sum() > 1e-6 * sizes[0]:
                return False
    return True if any(slopes.any() for slopes in change.slopes) else None


def _adds_up(start: Pass, name: str, layer: Layer, samples: int, gradient: Tensors) -> bool:
    """Return whether the samples' products are all of the gradient.

    A weight may be used outside its layer, as fused losses use a head's.
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
            for sample in range(samples):
                sample_rows = slopes[sample : sample + 1], features[sample : sample + 1]
                missing -= (
                    layer.weight_gradients(*sample_rows)
                    if kind == "weight"
                    else layer.bias_gradients(sample_rows[0])
                )[0]
        if missing.norm() > max(1e-3 * float(gradient[parameter].norm()), 1e-5 * scale):
            return False
    return True


def _relative(tensor: Tensor, reference: Tensor) -> float | None:
    size = float(tensor.norm() + reference.norm()) / 2
    return float((tensor - reference).norm()) / size if size else None


def step_size(gmap: ClientMap) -> float:
    """Return the step of a difference along a standard normal direction, in the input's unit.

    It is the same on all of a client's devices.
    """
    size = gmap.input.square().mean().sqrt()
    if gmap.shards is not None:
        size = gmap.shards.joined({"": size}, "max")[""]
    return STEP * precision_root(gmap) * (float(size) or 1.0)


def precision_root(gmap: ClientMap) -> float:
    """Return √eps of the type in which differences are taken.

    That is the input's type, or the loss's if it is coarser: a float64 model's loss may be computed
    in float32.
    """
    is_coarser = gmap.input.dtype == torch.float64 and gmap.loss.dtype != torch.float64
    return float(torch.finfo(torch.float32 if is_coarser else gmap.input.dtype).eps ** 0.5)


Method = Literal["difference", "exact"]


def estimate_squares(
    gmap: ClientMap,
    num_probes: int,
    generator: Stream | torch.Generator | None,
    split: bool,
    method: Method | None,
) -> Tensors:
    """Return s_i² from random probes; see `GradientMap.squared_sensitivity`."""
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
    gmap: ClientMap,
    num_probes: int,
    generator: Stream | torch.Generator | None = None,
    split: bool = True,
    method: Method | None = None,
    start: Pass | None = None,
    layer_estimate: Callable[[Layer, Change], Iterator[tuple[str, Any]]] | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yield an estimate of s_i² from each probe, one parameter at a time.

    All names come `num_probes` times.

    Args:
        gmap: The map.
        num_probes: The number of probes, at least 1.
        generator: The source of the probes.
        split: Whether to square differences sample by sample, as for
            `GradientMap.squared_sensitivity`.
        method: The method, as for `GradientMap.squared_sensitivity`.
        start: A pass at the map's own input, if there was one.
        layer_estimate: The estimate of a layer that separates samples. Default: `layer_squares`.

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
    if method == "exact" or gmap.is_clipped:
        return _exact(gmap, num_probes, generator)
    plan = plan_of(gmap)
    if plan.error <= TOLERANCE:
        plan = plan if split else plan._replace(split_layers=frozenset())
        return _differences(
            gmap, plan, num_probes, generator, start, layer_estimate or layer_squares
        )
    reason = (
        f"Differences of {type(gmap.model).__name__}'s gradients are off by {plan.error:.0%}: "
        "its derivatives jump, or its arithmetic is too coarse."
    )
    if method == "difference":
        raise RuntimeError(f"{reason} Take method='exact'.")
    return _exact(gmap, num_probes, generator, reason)


def _differences(
    gmap: ClientMap,
    plan: DifferencePlan,
    num_probes: int,
    generator: Stream | torch.Generator,
    start: Pass | None,
    layer_estimate: Callable[[Layer, Change], Iterator[tuple[str, Any]]],
) -> Iterator[tuple[str, Any]]:
    x, step = gmap.input, plan.shrink * step_size(gmap)
    layers = split_layers(gmap, plan)
    has_pattern = start is not None and start.pattern is not None
    if start is None or start.layers.keys() != layers.keys() or has_pattern != plan.keeps_pattern:
        start = first_pass(gmap, layers, plan, needs_slope=False)
    for _ in range(num_probes):
        moved = x + step * normal(generator, x.shape, x.device, x.dtype)
        end = Pass.evaluate(gmap, moved, layers, start.pattern, needs_slope=False)
        for name, gradient in end.unsplit.items():
            yield name, ((gradient - start.unsplit[name]) / step).square_()
        del end.unsplit
        for name, layer in layers.items():
            change = Change.between(start, end, name, step, len(x))
            if change is None:
                raise RuntimeError(
                    f"{name} was given other shapes than it was when its samples were told apart. "
                    "Take method='exact'."
                )
            yield from layer_estimate(layer, change)


def layer_squares(layer: Layer, change: Change) -> Iterator[tuple[str, Tensor]]:
    """Yield Σ_b (J_bᵀv)_i² of a layer's parameters, by name, over samples b."""
    module: Any = layer.module
    if layer.bias is not None:
        bias_product = change.bias(layer) if change.slopes else torch.zeros_like(module.bias)[None]
        yield layer.bias, bias_product.square().sum(0)
    if layer.weight is not None:
        yield layer.weight, change.weight_squares(layer)


def _exact(
    gmap: ClientMap, num_probes: int, generator: Stream | torch.Generator, reason: str = ""
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
