"""How sensitivities of a model are estimated: which layers know their samples apart, and how long a
step a difference takes. Found out by trial.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ...randomness import Stream, normal
from ..devices import devices
from ..graphs import nodes_of
from .changes import Change, Layer, Pass, layers_of

if TYPE_CHECKING:
    from ..map import GradientMap, Tensors

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


_KINKS = re.compile(
    "(Abs|Ama|Ami|Hard|Kth|L1Loss|LeakyRelu|Max|Median|Min|Prelu|Relu|Rrelu|Softshrink|Sort|"
    "Threshold|Topk|AdaptiveMax|FractionalMax)"
)
"""What autograd calls the steps whose derivative jumps."""


class Plan(NamedTuple):
    """How a model's sensitivities are estimated, found out by trial.

    Args:
        split: The layers whose samples are known apart.
        error: How much differences over two steps differ, relative to them.
        shrink: Of the step.
        shifted: How much differences over two steps in the parameters differ, once tried.
    """

    split: frozenset[str]
    error: float
    shrink: float = 1.0
    shifted: float | None = None

    def layers_of(self, gmap: GradientMap) -> dict[str, Layer]:
        """The map's layers that are split."""
        found = layers_of(gmap.model, gmap.parameters)
        return {name: layer for name, layer in found.items() if name in self.split}


_PLANS: WeakKeyDictionary[nn.Module, dict[object, tuple[Plan, int]]] = WeakKeyDictionary()


def plan_of(gmap: GradientMap) -> Plan:
    """How differences work for the map's model, tried out when first asked for a kind of
    batch, and now and then again."""
    plans, key, plan = _PLANS.setdefault(gmap.model, {}), _key(gmap), known_plan(gmap)
    if devices().any(plan is None):  # a trial is of all devices
        plan = None
    uses = plans[key][1] if plan is not None else 0
    plan = plan or _try_out(gmap)
    plans[key] = plan, uses + 1
    return plan


def known_plan(gmap: GradientMap) -> Plan | None:
    """What `plan_of` will say without trying, if that is so."""
    plan, uses = _PLANS.get(gmap.model, {}).get(_key(gmap), (None, 0))
    return plan if uses < TRIES else None


def forget(model: nn.Module) -> None:
    """Let everything about a model be tried out anew."""
    _PLANS.pop(model, None)


def keep(gmap: GradientMap, plan: Plan) -> Plan:
    """Remember a plan in which more was found out than in the one of `plan_of`."""
    uses = _PLANS[gmap.model][_key(gmap)][1]
    _PLANS[gmap.model][_key(gmap)] = plan, uses
    return plan


def _key(gmap: GradientMap) -> object:
    return (
        tuple(gmap.parameters),
        len(gmap.input) > 1,
        gmap.input.dtype,
        tuple(module.training for module in gmap.replay.modules),
        gmap.replay.recomputes(),
        gmap.replay.kind,
        code_of(gmap.loss_fn),
    )


def code_of(loss_fn: Any) -> object:
    """What a loss function is by, since lambdas and partial functions are made anew every time."""
    while hasattr(loss_fn, "func"):
        loss_fn = loss_fn.func
    return getattr(loss_fn, "__code__", type(loss_fn))


def _try_out(gmap: GradientMap) -> Plan:
    """Two steps along one direction, and one of the first sample alone."""
    x = gmap.input
    if devices().any(torch.finfo(x.dtype).bits < 32 or _has_kinks(gmap)):
        return Plan(frozenset(), 1.0)
    whole = not gmap.replay.recomputes() and devices().size == 1
    layers = layers_of(gmap.model, gmap.parameters) if whole else {}
    direction = normal(Stream.from_seeds(0), x.shape, x.device, x.dtype)  # hides nothing
    start = Pass.of(gmap, x, layers)
    longer = Pass.of(gmap, x + step_size(x) * direction, layers)
    tried: list[tuple[float, float]] = []
    for shrink in SHRINKS:
        step = shrink * step_size(x)
        shorter = Pass.of(gmap, x + step / 4 * direction, layers)
        error = _disagreement(start, longer, shorter, step, len(x))
        tried.append((error, shrink))
        if error <= AGREE:
            break
        longer = shorter
    return Plan(_apart(gmap, start, layers, direction), *min(tried))


def _disagreement(start: Pass, longer: Pass, shorter: Pass, step: float, samples: int) -> float:
    """How much what a step and a quarter of it change differs, relative to it: the median over
    layers and parameters. Of those whose derivative is zero, as of a key's bias, only rounding
    changes.
    """
    errors = []
    for name in start.layers:
        long = Change.between(start, longer, name, step, samples)
        short = Change.between(start, shorter, name, step / 4, samples)
        if long is not None and short is not None:
            pairs = zip(long.slopes, short.slopes, strict=True)
            errors += [_relative(one, other) for one, other in pairs]
    for name, rest in start.rest.items():
        pair = (longer.rest[name] - rest) / step, (shorter.rest[name] - rest) / (step / 4)
        errors.append(_relative(*pair))
    found = [error for error in errors if error is not None]
    error = torch.tensor(found).median() if found else torch.tensor(0.0)
    largest = float(devices().each({"": error}, "max")[""])
    return largest if math.isfinite(largest) else math.inf


def _apart(
    gmap: GradientMap, start: Pass, layers: dict[str, Layer], direction: Tensor
) -> frozenset[str]:
    """The layers that know their samples apart."""
    if not layers:
        return frozenset()
    x, samples = gmap.input, len(gmap.input)
    one = torch.zeros_like(direction)
    one[0] = direction[0]
    alone = Pass.of(gmap, x + step_size(x) * one, layers) if samples > 1 else None
    whole = Pass.of(gmap, x, {}).rest
    known: dict[str, bool | None] = {
        name: _adds_up(start, name, layer, samples, whole)
        and (
            alone is None or _first_alone(Change.between(start, alone, name, step_size(x), samples))
        )
        for name, layer in layers.items()
    }
    # What stands still (LoRA at its start) shows nothing: it is taken to be as the others are.
    others = all(apart for apart in known.values() if apart is not None)
    return frozenset(n for n, apart in known.items() if (others if apart is None else apart))


def _has_kinks(gmap: GradientMap) -> bool:
    """Whether anything of the loss has a derivative that jumps. Trials would not do: of the steps
    of a small model one in ten crosses a kink, and is then off by the jump over the step.
    """
    with gmap.replay.run():
        loss = gmap.evaluate(gmap.input.requires_grad_())
    return any(_KINKS.match(node.name()) for node in nodes_of([loss]))


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
    """How far a difference goes along a standard normal direction, in the input's unit: on all of a
    client's devices as far.
    """
    precision: float = torch.finfo(x.dtype).eps ** 0.5
    size = float(devices().each({"": x.square().mean().sqrt()}, "max")[""])
    return STEP * precision * (size or 1.0)
