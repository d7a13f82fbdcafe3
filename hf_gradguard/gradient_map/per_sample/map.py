"""A map that knows what each sample adds to the gradient, from its own one pass."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..domain import count_rows
from ..map import GradientMap, Tensors
from .listening import Listener, NotApartError
from .plan import known_plan, plain_gradient, total_of
from .shares import Share


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
    _shares: Mapping[str, Share] | None = None

    @property
    def shares(self) -> Mapping[str, Share] | None:
        """What samples add, by module; `None` if this pass does not tell."""
        self.gradient()
        return self._shares

    def gradient(self) -> Tensors:
        if self._listener is None:
            return super().gradient()
        self._devices.check_present()
        if self._gradient is None:
            self._shares = self._heard()
            if self._shares is not None:
                ones = torch.ones(count_rows(self._batch), device=self._loss.device)
                found = total_of(self.parameters, self._shares, ones)
            else:
                with self.replay.run():
                    found = plain_gradient(self, self._batch)
            self._gradient = {n: found[n].to(p.dtype) for n, p in self._parameters.items()}
        return self._gradient

    def _heard(self) -> Mapping[str, Share] | None:
        """`None` where a module did not run when the model was tried out, or samples lie in it
        otherwise than then.
        """
        assert self._listener is not None
        try:
            with self.replay.kernels():
                shares = self._listener.shares(self._loss)
        except NotApartError:
            return None
        plan = known_plan(self)
        return shares if plan is not None and shares.keys() <= plan.modules else None

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
