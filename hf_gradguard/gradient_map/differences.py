"""Products with J as differences of two passes, without second derivatives.

J δ = ∇_x ⟨g(x), δ⟩ = d/dε ∇_x L(x; θ + εδ), Jᵀv = d/dα g(x + αv)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from ..randomness import Stream, normal
from .inputs import check_names
from .layers import Pass
from .map import GradientMap, View
from .nonsmooth import ActivationPattern
from .parameters import DifferencePlan
from .sensitivity import (
    TOLERANCE,
    first_pass,
    keep,
    plan_of,
    precision_root,
    split_layers,
    step_size,
)
from .types import Tensors

REACH = 0.3
"""How far Jδ goes at most, in square roots of the type's precision, of the parameters' norm."""
BEND = 8.0
"""How much it changes the slope at least, where that is known, in the same and of its norm."""


def by_differences(gmap: GradientMap) -> DifferencedMap | None:
    """Return a gradient map whose Jacobian products come from differences of gradients.

    They need no second derivatives. In units of a plain gradient, Jδ takes 2/3, Jᵀv takes 1, and
    the map takes 2/3 once.

    Args:
        gmap: The client's gradient map, without a defense.

    Returns:
        The map, or `None` if differences would not be exact enough. They are not in half precision,
            on several devices, or if derivatives jump and no pass can keep its activation pattern.
            A trial of two steps decides, once per model and now and then again.

    Example:
        >>> quick = by_differences(gmap)
        >>> product, exact = quick.vjp(gmap.gradient()), gmap.vjp(gmap.gradient())
        >>> bool((product - exact).norm() < 0.02 * exact.norm())
        True
    """
    if type(gmap) is not GradientMap or gmap.undefended is not gmap or gmap.shards is not None:
        return None
    plan = plan_of(gmap)
    if plan.error <= TOLERANCE and plan.shift_error is None:
        plan = keep(gmap, plan._replace(shift_error=DifferencedMap(gmap, plan).shift_error()))
    worst = max(plan.error, 1.0 if plan.shift_error is None else plan.shift_error)
    return DifferencedMap(gmap, plan) if worst <= TOLERANCE else None


class DifferencedMap(View):
    """A client's map whose products with J are differences; see `by_differences`.

    Args:
        base: The map.
        plan: The plan of differences for its model.
    """

    def __init__(self, base: GradientMap, plan: DifferencePlan) -> None:
        super().__init__(base)
        self.plan = plan
        self._worst = 0.0
        self._last_product: tuple[Tensor, Tensors] | None = None

    @property
    def product_error(self) -> float:  # type: ignore[override]
        """The relative error of a product.

        It is how much two steps differed when the model was tried out, or products from both sides
        since.
        """
        return max(self.plan.error, self.plan.shift_error or 0.0, self._worst)

    @cached_property
    def start(self) -> Pass:
        """The pass at the map's own input from which differences are taken."""
        layers = split_layers(self.base, self.plan)
        if layers:
            start = first_pass(self.base, layers, self.plan)
        else:
            start = Pass({}, pattern=ActivationPattern() if self.plan.keeps_pattern else None)
        if start.slope is None:
            weights = {name: p.detach() for name, p in self.parameters.items()}
            with start.pattern_kept():
                start.slope = self.base.slope_with(weights, self.input)
        return start

    @cached_property
    def _from(self) -> Tensors:
        """g(x) in full precision: the map's own, unless that was computed under autocast."""
        loss = self.start.loss
        if loss is not None and torch.equal(loss, self.base.loss):
            return self.base.gradient()
        return Pass.evaluate(self.base, self.input, {}).unsplit

    def vjp(self, delta: Tensors) -> Tensor:
        check_names(delta, self.parameters)
        slope, size = self.start.slope, _size(delta) if delta else 0.0
        assert slope is not None
        if not size:
            return torch.zeros_like(slope)
        root = precision_root(self.base)
        weights = {name: self.parameters[name].detach() for name in delta}
        step = REACH * root * (_size(weights) or 1.0) / size
        # ‖Jδ‖ ≥ ⟨Jδ, v⟩/‖v‖ = ⟨δ, Jᵀv⟩/‖v‖: what is known of it, and what it is compared with.
        known_product, v = self._known_inner(delta)
        if known_product:
            step = min(step, BEND * root * float(slope.norm()) / abs(known_product)) or step
        product = self._shifted(delta, step) / step
        norm = float(product.norm())
        if v is not None and norm:
            difference = float((product * v).sum()) - known_product
            self._worst = max(self._worst, abs(difference) / norm)
        return product

    def jvp(self, v: Tensor) -> Tensors:
        x = self.input
        # No position moves further than one along a normal vector does.
        rows = v.flatten(0, -2) if v.dim() > 1 else v[None]
        length = float(rows.square().mean(-1).max().sqrt())
        if not length:
            return {name: torch.zeros_like(p) for name, p in self._from.items()}
        step = self.plan.shrink * step_size(self.base) / (2 * length)
        with self.replay.full_precision(), self.start.pattern_kept():
            product = self.base.gradient_at(x + step * v)
        for name, start_gradient in self._from.items():
            product[name].sub_(start_gradient).div_(step)
        self._last_product = v, product
        return product

    def jvps(self, directions: Tensor) -> Sequence[Tensor]:
        products = [self.jvp(v) for v in directions]
        return [torch.stack([product[name] for product in products]) for name in self.parameters]

    def shift_error(self) -> float:
        """Return how much Jδ over a step and over a quarter of it differ, relative to it."""
        stream = Stream.from_seeds(0)  # hides nothing
        delta = {
            name: normal(stream, p.shape, p.device, p.dtype) for name, p in self.parameters.items()
        }
        weights = {name: p.detach() for name, p in self.parameters.items()}
        root = precision_root(self.base)
        step = REACH * root * (_size(weights) or 1.0) / _size(delta)
        long, short = self._shifted(delta, step), 4 * self._shifted(delta, step / 4)
        size = float(long.norm() + short.norm()) / 2
        error = float((long - short).norm()) / size if size else 0.0
        return error if error < 1 else 1.0

    def _shifted(self, delta: Tensors, step: float) -> Tensor:
        """What a step along δ changes of the slope."""
        moved = {
            name: torch.add(weight := self.parameters[name].detach(), tensor.to(weight), alpha=step)
            for name, tensor in delta.items()
        }
        start = self.start
        assert start.slope is not None
        with start.pattern_kept():
            shifted_slope = self.base.slope_with(moved, self.input)
        return shifted_slope.sub_(start.slope)

    def _known_inner(self, delta: Tensors) -> tuple[float, Tensor | None]:
        """⟨Jδ, v⟩ for the v whose Jᵀv was asked last, divided by its norm, and v likewise."""
        if self._last_product is None:
            return 0.0, None
        v, product = self._last_product
        inner = [
            torch.dot(product[name].flatten(), tensor.to(product[name]).flatten())
            for name, tensor in delta.items()
        ]
        return float(torch.stack(inner).sum() / v.norm()), v / v.norm()


def _size(tensors: Tensors) -> float:
    return float(torch.stack([t.norm() for t in tensors.values()]).norm())
