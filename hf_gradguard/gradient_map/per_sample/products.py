"""Inner products of many samples' gradients with messages, and squared norms, by parameter.

They come from layers' inputs and slopes, so no gradient of a weight is written out. For a linear
layer with a sample's inputs A and slopes Δ, ⟨M, g⟩ = Σ_t δ_tᵀ M a_t and ‖g‖² = ⟨A Aᵀ, Δ Δᵀ⟩
(Goodfellow, "Efficient Per-Example Gradient Computations", 2015).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.utils import logging

from ..inputs import model_loss
from ..layers import Contribution, Listener, NotApartError
from ..replay import Replay
from ..types import Tensors
from ..vectorized import ManyGradients, batch_shape, has_draws
from .clipping import WEIGHT_RULES, sample_weights

logger = logging.get_logger(__name__)

AT_ONCE = 64
"""The number of samples in one pass."""
_TOLERANCE = 2e-3  # in units of the gradient's norm, against gradients that are written out


class Products(NamedTuple):
    """The products of K samples' gradients g with messages M, in float64.

    Args:
        inner: ⟨M, g⟩, `(K, messages)`, by parameter.
        squares: Σ_i W_i g_i², `(K,)`, by parameter. W is 1 unless weights were given.
    """

    inner: Tensors
    squares: Tensors


class GradientProducts:
    """A function that returns products with a model's gradients at many batches of one sample.

    The model stays in its mode. Samples of one shape share a pass. A trial on two samples, against
    gradients that are written out, finds the parameters whose products are right. For all others,
    gradients are written out, and a warning says for which, and why. These are parameters that
    several modules hold, samples that cannot be separated, and models with dropout.

    Args:
        dense: The function that writes gradients of the same model and parameters out.

    Example:
        >>> many = ManyGradients(model, ["classifier.bias", "classifier.weight"])
        >>> products = GradientProducts(many)
        >>> one = {key: entry[:1] for key, entry in batch.items()}
        >>> batches, message = [one, {**one, "labels": 1 - one["labels"]}], dict(shared)
        >>> [(rows, found.inner["classifier.bias"].shape) for rows, found in
        ...  products(batches, [message])]
        [([0, 1], torch.Size([2, 1]))]
    """

    def __init__(self, dense: ManyGradients) -> None:
        self.model, self.parameters, self._dense = dense.model, dense.parameters, dense
        modules = list(self.model.modules())
        holders = Counter(p for m in modules for p in m.parameters(recurse=False))
        self._apart = {n: p for n, p in self.parameters.items() if holders[p] == 1}
        self._plans: dict[tuple[Any, ...], _Plan] = {}

    def __call__(
        self,
        batches: Sequence[Mapping[str, Any]],
        messages: Sequence[Mapping[str, Tensor]],
        weights: Mapping[str, Tensor] | None = None,
    ) -> Iterator[tuple[list[int], Products]]:
        """Yield the numbers of some batches and their products, until all batches had their turn.

        Args:
            batches: Batches of one sample each, as a collator returns them.
            messages: Messages, by parameter. A parameter that a message lacks counts as zero.
            weights: The weights of entries' squares, by parameter, each in the parameter's shape or
                as one number. Weights for each entry take gradients that are written out, layer by
                layer.
        """
        groups: dict[str, list[int]] = {}
        for number, batch in enumerate(batches):
            groups.setdefault(repr(batch_shape(batch)), []).append(number)
        for numbers in groups.values():
            plan = self._plan_of([batches[number] for number in numbers])
            at_once = AT_ONCE if plan.by_products else self._dense.at_once
            for start in range(0, len(numbers), at_once):
                rows = numbers[start : start + at_once]
                chosen = [batches[number] for number in rows]
                yield rows, self._products(plan, chosen, messages, weights or {})

    def _products(
        self, plan: _Plan, batches: Sequence[Mapping[str, Any]],
        messages: Sequence[Mapping[str, Tensor]], weights: Mapping[str, Tensor],
    ) -> Products:  # fmt: skip
        total = Products({}, {})
        if plan.by_products:
            total = self._by_layers(plan.by_products, plan.rule, batches, messages, weights)
        written = [name for name in self.parameters if name not in plan.by_products]
        if not written:
            return total
        many = self._dense.of_parameters(written)
        for rows, gradients in many(batches):
            for name, g in gradients.items():
                target = torch.stack([_message_of(m, name, g[0]) for m in messages])
                inner = g.flatten(1) @ target.flatten(1).to(g).T
                _put(total.inner, name, rows, inner, len(batches))
                weighed = g.square() * weights[name] if name in weights else g.square()
                squares = weighed.flatten(1).sum(1, dtype=torch.float64)
                _put(total.squares, name, rows, squares, len(batches))
        return total

    def _by_layers(
        self, names: frozenset[str], rule: str, batches: Sequence[Mapping[str, Any]],
        messages: Sequence[Mapping[str, Tensor]], weights: Mapping[str, Tensor],
    ) -> Products:  # fmt: skip
        """Return products for some parameters from layers' inputs and slopes.

        Raises:
            NotApartError: If samples cannot be separated.
        """
        stacked = _stacked(batches)
        contributions = self._contributions(stacked, len(batches))
        device = next(iter(self.parameters.values())).device
        factor = 1 / sample_weights(rule, stacked).to(device)
        inner = {
            name: torch.zeros(len(batches), len(messages), dtype=torch.float64, device=device)
            for name in names
        }
        squares = {name: torch.zeros_like(factor) for name in names}
        for contribution in contributions.values():
            for number, message in enumerate(messages):
                for name, product in contribution.inner_products(message).items():
                    if name in names:
                        inner[name][:, number] = product * factor
            for name, square in contribution.weighted_squares(weights).items():
                if name in names:
                    squares[name] = square * factor**2
        return Products(inner, squares)

    def _contributions(self, stacked: dict[str, Any], count: int) -> dict[str, Contribution]:
        with Replay(self.model, second_order=False).run(), torch.enable_grad():
            listener = Listener(self.model, self._apart, stacked, count)
            with listener.listening():
                loss = model_loss(self.model, stacked)
            return listener.contributions(loss)

    def _plan_of(self, batches: Sequence[Mapping[str, Any]]) -> _Plan:
        """Return the plan for batches, which is found once for each kind of batch.

        Kinds differ in their entries, and in whether there are several batches.
        """
        key = (*sorted(batches[0]), len(batches) > 1)
        if key not in self._plans:
            self._plans[key] = plan = self._try([batches[0], batches[-1]][: len(batches)])
            if plan.reason:
                logger.warning_once(
                    f"{type(self.model).__name__}: {plan.reason}. Gradients of it are written out "
                    "for each candidate, which takes longer."
                )
        return self._plans[key]

    def _try(self, batches: Sequence[Mapping[str, Any]]) -> _Plan:
        nothing = frozenset[str]()
        if type(self._dense) is not ManyGradients:
            return _Plan(nothing, "", "a client's training has several steps")
        if self._dense.draws > 1 or has_draws(self.model, dict(batches[0])):
            return _Plan(nothing, "", "dropout draws for each candidate alike")
        if not self._apart:
            return _Plan(nothing, "", f"{next(iter(self.parameters))} is held by several modules")
        signs = {
            name: torch.randn(p.shape, generator=torch.Generator().manual_seed(0)).to(p)
            for name, p in self._apart.items()
        }
        alone = [
            {name: g[0] for name, g in gradient.items()}
            for batch in batches
            for _, gradient in self._dense([batch])
        ]
        best, reason = nothing, "its loss of several samples is no mean of theirs"
        names = frozenset(self._apart)
        for rule in WEIGHT_RULES:
            try:
                products = self._by_layers(names, rule, batches, [signs], {})
            except (NotApartError, RuntimeError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                return _Plan(nothing, "", str(error).splitlines()[0])
            right = _right(products, alone, signs)
            if len(right) > len(best):
                best, best_rule = right, rule
            if len(best) == len(self.parameters):
                return _Plan(best, best_rule, "")
        if not best:
            return _Plan(nothing, "", reason)
        wrong = next(name for name in self.parameters if name not in best)
        held = "is held by several modules" if wrong not in self._apart else "is not as written out"
        return _Plan(best, best_rule, f"{wrong} {held}")


class _Plan(NamedTuple):
    """The result of a trial of products.

    Args:
        by_products: The parameters whose products are right.
        rule: The rule by which samples weigh in a loss.
        reason: Why products are not right for all parameters; an empty text if they are.
    """

    by_products: frozenset[str]
    rule: str
    reason: str


def _right(
    products: Products, alone: Sequence[Tensors], signs: Mapping[str, Tensor]
) -> frozenset[str]:
    """Return the parameters whose products equal those of gradients that are written out."""
    powers = [
        {name: float(torch.linalg.vector_norm(g)) ** 2 for name, g in gradient.items()}
        for gradient in alone
    ]
    right = set()
    for name, inner in products.inner.items():
        errors = []
        for row, (gradient, power) in enumerate(zip(alone, powers, strict=True)):
            g = gradient[name]
            off = abs(float(inner[row, 0]) - float(torch.dot(g.flatten(), signs[name].flatten())))
            away = abs(float(products.squares[name][row]) - power[name])
            # A tensor that holds nothing but rounding errors is compared with the whole gradient.
            least = (1e4 * torch.finfo(g.dtype).eps) ** 2
            size = max(power[name], least * sum(power.values())) + 1e-300
            errors += [off / size**0.5, away / size]
        if max(errors) <= _TOLERANCE:
            right.add(name)
    return frozenset(right)


def _stacked(batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one batch whose rows are the samples of all batches.

    Raises:
        NotApartError: If the batches cannot be stacked.
    """
    stacked = dict(batches[0])
    for key, value in batches[0].items():
        if isinstance(value, Tensor) and value.dim():
            if len(value) != 1:
                raise NotApartError(f"{key} has {len(value)} rows for one sample")
            stacked[key] = torch.cat([batch[key] for batch in batches])
        elif len(batches) > 1 and any(repr(batch[key]) != repr(value) for batch in batches[1:]):
            raise NotApartError(f"{key} differs between samples, and has no rows")
    return stacked


def _message_of(message: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    return message[name] if name in message else torch.zeros_like(like)


def _put(into: Tensors, name: str, rows: Sequence[int], values: Tensor, count: int) -> None:
    if name not in into:
        into[name] = values.new_zeros(count, *values.shape[1:], dtype=torch.float64)
    into[name][list(rows)] = values.double()
