"""The sum of samples' gradients, each clipped by itself: Σ_b min(1, C/‖g_b‖) g_b.

g_b is the gradient of sample b's own mean loss, so that what a sample adds depends on no other. Of
a batch-mean loss L = Σ_b n_b L_b / N (n_b = 1 for a mean over rows, or a row's tokens; N = Σ_b n_b)
the sum N L is differentiated, to which a sample adds n_b g_b. So no number that a sample's part is
made of follows how many others there are. A mean's slopes would: they carry 1/N, each is rounded,
and all would err together.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..domain import count_rows
from ..layers import Contribution, Listener, NotApartError, listen
from ..map import GradientMap
from ..types import Tensors
from .lengths import refuse_other_lengths, row_shapes
from .plan import (
    is_padded,
    known_plan,
    norms_of,
    plain_gradient,
    plan_of,
    real_tokens,
    rows_of,
    sample_items,
    shorter,
    total_of,
)

logger = logging.get_logger(__name__)

LEFT_OUT = (
    "A row's gradient is not finite, or too large for float32. It adds nothing to its message, as "
    "do all such rows from now on: a training that stopped would tell that the row is there. Only "
    "this process is told."
)


class ClippedSum(NamedTuple):
    """Samples' clipped gradients, added up.

    Args:
        total: Σ_b min(1, C/‖g_b‖) g_b, by parameter, at least in float32. A sample whose gradient
            is not finite adds nothing, so that it stops no training, which would tell of it.
        norms: ‖g_b‖, `(B,)` in float64; never below the true one by more than rounding.
    """

    total: Tensors
    norms: Tensor


def clipped_sum(gmap: GradientMap, clip: float) -> ClippedSum:
    """The sum of the batch's gradients, each clipped to the norm C.

    Samples' norms come from one pass, by products of what layers took in and gave back, and the sum
    from the same products. Where a model does not let samples be told apart so, or computes in half
    precision, they are differentiated one by one, which is said once. Which of both is tried out on
    a model's first batch of several samples, against gradients of single ones.

    Args:
        gmap: A client's own map; first-order ones will do.
        clip: C > 0.

    Raises:
        NotImplementedError: If samples are coupled (batch statistics, losses between samples), so
            that a sample has no gradient of its own, or the batch cannot be cut into rows. If rows
            have another length than those of the first batch, and no mask says what is padding.

    Example:
        >>> total, norms = clipped_sum(gmap, clip=0.1)
        >>> bool(torch.nn.utils.get_total_norm(list(total.values())) <= 0.1 * len(norms))
        True
    """
    if gmap.replay.kind:
        raise NotImplementedError(
            "After several local steps a sample has no gradient of its own that could be clipped. "
            "Clip the update as a whole: dp_sgd without per_sample."
        )

    if type(gmap) not in (GradientMap, SampleMap) and gmap.undefended is gmap:
        raise NotImplementedError(
            f"{type(gmap).__name__}: only of a loss's gradient are there samples' gradients. Use "
            "dp_sgd without per_sample, whose clipping is of all that a client shares."
        )
    if gmap.undefended is not gmap:
        raise NotImplementedError(
            "Samples' gradients are clipped before anything else is done to them: put dp_sgd with "
            "per_sample=True first in a chain."
        )
    _refuse_batch_statistics(gmap.model)
    samples, real = count_rows(gmap.batch), real_tokens(gmap.model, gmap.batch)
    if (tried := known_plan(gmap)) is not None:
        refuse_other_lengths(tried.shapes, row_shapes(gmap.batch, real))
    if samples == 1:
        if is_padded(gmap.model, gmap.batch):
            return _one_by_one(gmap, 1, clip)
        total = _zeros(gmap)
        return _summed(gmap, total, [_add_clipped(total, gmap.gradient(), clip)])
    # Before a model is tried out again, whose passes may write to what this pass has saved.
    contributions, scale = (
        (gmap.contributions, gmap.scale) if isinstance(gmap, SampleMap) else (None, 0.0)
    )
    plan, items = plan_of(gmap, samples, clip)
    if plan.reason:
        return _one_by_one(gmap, samples, clip)
    count = float(items.sum().clamp(min=1))
    try:
        if contributions is None:
            scale = count
            with gmap.replay.run():
                contributions = listen(gmap, gmap.batch, samples, scale)
    except NotApartError:  # samples lie otherwise than when the model was tried out
        return _one_by_one(gmap, samples, clip)
    if not contributions or contributions.keys() - plan.modules:
        return _one_by_one(gmap, samples, clip)
    # What a sample adds is n_b g_b, unless the rule was found out after the pass.
    inverse = torch.where(items > 0, count / scale / items, 0.0)
    inverse = inverse.to(next(iter(gmap.parameters.values())).device)
    norms = inverse * norms_of(contributions)
    is_usable = _usable(norms, clip)
    if not bool(is_usable.all()):
        logger.warning_once(LEFT_OUT)
        contributions = {
            name: contribution.with_zeros(~is_usable)
            for name, contribution in contributions.items()
        }
    factors = (inverse * _factors(norms, clip)).where(is_usable, 0.0)
    return ClippedSum(total_of(gmap.parameters, contributions, factors), norms)


def _factors(norms: Tensor, clip: float) -> Tensor:
    """Gives min(1, C/‖g‖)."""
    return torch.where(norms > clip, clip / norms, torch.ones_like(norms))


def _usable(norms: Tensor, clip: float) -> Tensor:
    """Tells which samples add something: not those whose gradient is no number, or so large that
    float32 has few digits for the factor that clips it.
    """
    return norms * torch.finfo(torch.float32).tiny < clip  # false where it is no number


def _one_by_one(gmap: GradientMap, samples: int, clip: float) -> ClippedSum:
    """Clips each sample's gradient in a pass that is the same whatever stands beside it: of its own
    tokens, without the padding of the longest text.
    """
    total = _zeros(gmap)
    norms = []
    with gmap.replay.run():
        for row in range(samples):
            sample = rows_of(gmap.batch, [row], samples)
            sample = shorter(gmap.model, sample)
            norms.append(_add_clipped(total, plain_gradient(gmap, sample), clip))
    return _summed(gmap, total, norms)


def _zeros(gmap: GradientMap) -> Tensors:
    return {
        name: torch.zeros_like(p, dtype=torch.float64, requires_grad=False)
        for name, p in gmap.parameters.items()
    }


def _summed(gmap: GradientMap, total: Tensors, norms: list[Tensor]) -> ClippedSum:
    types = {n: torch.promote_types(p.dtype, torch.float32) for n, p in gmap.parameters.items()}
    return ClippedSum({n: tensor.to(types[n]) for n, tensor in total.items()}, torch.stack(norms))


def _add_clipped(total: Tensors, gradient: Tensors, clip: float) -> Tensor:
    """Adds one sample's clipped gradient to a sum in float64, in which the order does not matter.
    Returns its norm before.
    """
    squares = [tensor.double().square().sum() for tensor in gradient.values()]
    size = torch.stack(squares).sum().sqrt()
    if not bool(_usable(size, clip)):
        logger.warning_once(LEFT_OUT)
        return size
    factor = _factors(size, clip)
    for name, tensor in gradient.items():
        total[name] += tensor.double() * factor
    return size


def _refuse_batch_statistics(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and (
            module.training or module.running_mean is None
        ) and not isinstance(module, nn.modules.instancenorm._InstanceNorm):  # fmt: skip
            raise NotImplementedError(
                f"{name} normalizes with the statistics of the batch, so that every sample's "
                "gradient depends on all others. Use batch_statistics='frozen', or group or layer "
                "normalization."
            )


class SampleMap(GradientMap):
    """A first-order map for `clipped_sum`, which then takes no pass of its own.

    Its gradient is the sum of what samples add: that of a `GradientMap`, to rounding. Where a model
    does not let samples be told apart, and on its first batch, where that has to be tried out, it
    is a `GradientMap` like any other.

    Example:
        >>> from hf_gradguard.gradient_map.per_sample.clipping import clipped_sum
        >>> _ = clipped_sum(GradientMap(model, batch), clip=0.1)  # tries the model out
        >>> seen = SampleMap(model, batch, second_order=False, needs_input=False)
        >>> seen.contributions is not None
        True
    """

    scale: float = 1.0
    """What the loss was multiplied by before it was differentiated: how many rows or tokens its
    mean is over, so that slopes are those of the sum.
    """
    _listener: Listener | None = None
    _gradient_versions: dict[str, int] | None = None

    @cached_property
    def contributions(self) -> Mapping[str, Contribution] | None:
        """What samples add, by module; `None` if this pass does not tell: where a module did not
        run when the model was tried out, or samples lie in it otherwise than then.
        """
        if self._listener is None:
            return None
        try:
            with self.replay.kernels():
                contributions = self._listener.contributions(self._loss, self.scale)
        except NotApartError:
            return None
        plan = known_plan(self)
        is_known = plan is not None and contributions.keys() <= plan.modules
        return (
            contributions if is_known and contributions else None
        )  # none where all layers were dropped

    def versions(self) -> dict[str, int]:
        """As in `GradientMap`, without asking for the gradient: of that, writes since it was
        made.
        """
        versions = super().versions()
        if self._listener is not None:
            gradient, fresh_versions = self._gradient or {}, self._gradient_versions or {}
            for name in self._parameters:
                writes = gradient[name]._version - fresh_versions[name] if gradient else 0
                versions[f"the true gradient of {name!r}"] = writes
        return versions

    def form(self) -> Tensors:
        """The parameters: the sum of samples' gradients is a pass that clipping them does not
        need.
        """
        return super().form() if self._listener is None else {**self._parameters}

    def _own_gradient(self) -> Tensors:
        if self._listener is None:
            return super()._own_gradient()
        if self.contributions is None:
            with self.replay.run():
                gradient = plain_gradient(self, self._batch)
        else:
            factors = torch.full((count_rows(self._batch),), 1 / self.scale)
            gradient = total_of(self.parameters, self.contributions, factors.to(self._loss.device))
        gradient = {name: gradient[name].to(p.dtype) for name, p in self._parameters.items()}
        self._gradient_versions = {name: g._version for name, g in gradient.items()}
        return gradient

    def _first_pass(self) -> tuple[Tensor, Tensor]:
        plan, samples = known_plan(self), count_rows(self._batch)
        if plan is None or plan.reason or samples == 1 or self.replay.recomputes():
            return super()._first_pass()
        self._listener = Listener(self.model, self._parameters, self._batch, samples, is_exact=True)
        items = sample_items(plan.rules[0], self._batch)
        self.scale = float(items.sum().clamp(min=1))
        try:
            with self._listener.listening():
                return super()._first_pass()
        except NotApartError:  # a module is called otherwise than when it was tried out
            self._listener = None
            return super()._first_pass()
