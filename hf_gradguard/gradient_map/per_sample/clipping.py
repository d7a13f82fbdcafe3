"""The sum of samples' gradients, each clipped by itself: Σ_b min(1, C/‖g_b‖) g_b.

g_b is the gradient of sample b's own mean loss, so that what a sample adds depends on no other. Of
a batch-mean loss L = Σ_b w_b L_b (w_b = 1/B for a mean over rows, n_b/Σn for one over tokens) it is
1/w_b times what the sample adds to the batch's gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..domain import count_rows
from ..map import GradientMap
from ..types import Tensors
from .listener import Listener, NotApartError, listen
from .plan import known_plan, norms_of, plain_gradient, plan_of, rows_of, total_of, wide
from .shares import Share


class ClippedSum(NamedTuple):
    """Samples' clipped gradients, added up.

    Args:
        total: Σ_b min(1, C/‖g_b‖) g_b, by parameter, at least in float32.
        norms: ‖g_b‖, `(B,)` in float64; never below the true one by more than rounding.
    """

    total: Tensors
    norms: Tensor


def clipped_sum(gmap: GradientMap, clip: float) -> ClippedSum:
    """The sum of the batch's gradients, each clipped to the norm C.

    Samples' norms come from one pass, by products of what layers took in and gave back, and the sum
    from the same products. Where a model does not let samples be told apart so, they are
    differentiated one by one, which is said once. Which of both is tried out on a model's first
    batch of several samples, against gradients of single ones.

    Args:
        gmap: A client's own map; first-order ones will do.
        clip: C > 0.

    Raises:
        NotImplementedError: If samples are coupled (batch statistics, losses between samples), so
            that a sample has no gradient of its own, or the batch cannot be cut into rows.

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
    samples = count_rows(gmap.batch)
    if samples == 1:
        return _clipped({n: wide(g)[None] for n, g in gmap.gradient().items()}, clip)
    # Before a model is tried out again, whose passes may write to what this pass has saved.
    shares = gmap.shares if isinstance(gmap, SampleMap) else None
    plan, weights = plan_of(gmap, samples)
    if plan.reason:
        return _one_by_one(gmap, samples, clip)
    try:
        if shares is None:
            with gmap.replay.run():
                shares = listen(gmap, gmap.batch, samples)
    except NotApartError:  # samples lie otherwise than when the model was tried out
        return _one_by_one(gmap, samples, clip)
    if not shares or shares.keys() - plan.modules:
        return _one_by_one(gmap, samples, clip)
    counts = weights > 0
    inverse = torch.where(counts, 1 / weights, 0.0)
    norms = inverse * norms_of(shares)
    return ClippedSum(total_of(gmap.parameters, shares, inverse * _factors(norms, clip)), norms)


def _factors(norms: Tensor, clip: float) -> Tensor:
    """min(1, C/‖g‖); not a number stays so, to be refused."""
    return torch.where(norms > clip, clip / norms, torch.ones_like(norms)).where(
        norms.isfinite(), math.nan
    )


def _clipped(sample_gradients: Tensors, clip: float) -> ClippedSum:
    squares = [tensor.flatten(1).double().square().sum(1) for tensor in sample_gradients.values()]
    norms = torch.stack(squares).sum(0).sqrt()
    factors = _factors(norms, clip)
    total = {n: torch.tensordot(factors.to(t.dtype), t, 1) for n, t in sample_gradients.items()}
    return ClippedSum(total, norms)


def _one_by_one(gmap: GradientMap, samples: int, clip: float) -> ClippedSum:
    total = {n: wide(torch.zeros_like(p, requires_grad=False)) for n, p in gmap.parameters.items()}
    norms = []
    with gmap.replay.run():
        for row in range(samples):
            sample = rows_of(gmap.batch, [row], samples)
            gradient = plain_gradient(gmap, sample)
            clipped = _clipped({n: g[None] for n, g in gradient.items()}, clip)
            norms.append(clipped.norms)
            for name, tensor in clipped.total.items():
                total[name] += tensor
    return ClippedSum(total, torch.cat(norms))


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
        >>> seen.shares is not None
        True
    """

    _listener: Listener | None = None
    _gradient_versions: dict[str, int] | None = None

    @cached_property
    def shares(self) -> Mapping[str, Share] | None:
        """What samples add, by module; `None` if this pass does not tell: where a module did not
        run when the model was tried out, or samples lie in it otherwise than then.
        """
        if self._listener is None:
            return None
        try:
            with self.replay.kernels():
                shares = self._listener.shares(self._loss)
        except NotApartError:
            return None
        plan = known_plan(self)
        is_known = plan is not None and shares.keys() <= plan.modules
        return shares if is_known and shares else None  # none where all layers were dropped

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
        if self.shares is None:
            with self.replay.run():
                gradient = plain_gradient(self, self._batch)
        else:
            unit_factors = torch.ones(count_rows(self._batch), device=self._loss.device)
            gradient = total_of(self.parameters, self.shares, unit_factors)
        gradient = {name: gradient[name].to(p.dtype) for name, p in self._parameters.items()}
        self._gradient_versions = {name: g._version for name, g in gradient.items()}
        return gradient

    def _first_pass(self) -> tuple[Tensor, Tensor]:
        plan, samples = known_plan(self), count_rows(self._batch)
        if plan is None or plan.reason or samples == 1 or self.replay.recomputes():
            return super()._first_pass()
        self._listener = Listener(self.model, self._parameters, self._batch, samples)
        try:
            with self._listener.listening():
                return super()._first_pass()
        except NotApartError:  # a module is called otherwise than when it was tried out
            self._listener = None
            return super()._first_pass()
