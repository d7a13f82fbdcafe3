"""Training in fp16: losses are scaled before they are differentiated.

Gradients are unscaled before they are protected, so that noise, bounds and thresholds mean what
they say.

A gradient that overflows is not protected, and nothing leaves any rank in that step: ranks agree on
one bit, and the scaler skips the step on all of them and lowers its scale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..defenses.base import State
from ..gradient_map.scaled import ScaledMap, ScaleOverflow
from ..gradient_map.types import LossFunction
from .exchange.gradients import SecureSum, any_rank, average_gradients
from .message import Client, ClientBatch, MessageMaker, SharedMessages


class ScaledMessages(MessageMaker):
    """The messages of a training under a gradient scaler.

    Args:
        *args: All arguments of `MessageMaker`.
        scaler: The accelerator's scaler.
        optimizer: The function that returns the optimizer whose gradients the scaler unscales.
        counts: The counts of messages that were shared.
        **kwargs: All keyword arguments of `MessageMaker`.

    Example:
        >>> from hf_gradguard.training.exchange.gradients import Ledger
        >>> from hf_gradguard.training.message import RandomStreams
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> arguments = RandomStreams(), None, Ledger(), False, ()
        >>> how = {"scaler": torch.amp.GradScaler("cpu"), "optimizer": lambda: optimizer}
        >>> maker = ScaledMessages(*arguments, **how, counts=SharedMessages(dict))
        >>> maker.scale(torch.device("cpu"))
        65536.0
    """

    def __init__(
        self,
        *args: Any,
        scaler: Any,
        optimizer: Callable[[], Any],
        counts: SharedMessages,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._scaler, self._optimizer, self._counts = scaler, optimizer, counts
        self._has_overflow = False  # whether a gradient of this rank overflowed in this step
        self._counted = 0  # how many messages were shared before this step
        self._states: list[tuple[Client, State]] = []  # the clients' states before this step

    def scale(self, device: torch.device) -> float:
        """Return the factor that losses are multiplied with now."""
        return float(self._scaler.scale(torch.ones((), device=device)))

    def share(
        self,
        module: nn.Module,
        turn: ClientBatch,
        loss_fn: LossFunction,
        step: int,
        runner: Any = None,
    ) -> Tensor:
        """Share a message as `MessageMaker` does, unless the gradient overflows."""
        self._keep(turn.client)
        try:
            return super().share(module, turn, loss_fn, step, runner)
        except ScaleOverflow as overflow:
            self._has_overflow = True
            return overflow.loss

    def _sharing(self, module: nn.Module) -> dict[str, Any]:
        scale = self.scale(next(module.parameters()).device)
        return {**super()._sharing(module), "kind": functools.partial(ScaledMap, loss_scale=scale)}

    def share_noise(
        self, parameters: Mapping[str, nn.Parameter], client: Client, weight: float, step: int
    ) -> None:
        """Share noise alone as `MessageMaker` does."""
        self._keep(client)
        super().share_noise(parameters, client, weight, step)

    def _keep(self, client: Client) -> None:
        """Keep a client's state from before this step, for the case that the step is skipped."""
        if not self._states:
            self._counted = self._counts.total
        if not any(saved is client for saved, _ in self._states):
            self._states.append((client, client.state))

    @torch.no_grad()
    def average(
        self,
        parameters: Sequence[nn.Parameter],
        accelerator: Accelerator,
        secure: SecureSum | None = None,
    ) -> None:
        """Average as `MessageMaker` does, unless a gradient overflowed on any rank.

        After an overflow every gradient becomes infinite, so that the scaler skips the step.
        Clients get back the states that they had before it, and none of its messages counts.
        """
        if any_rank(self._has_overflow, accelerator, secure):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, torch.inf)
            for client, state in self._states:
                client.state = state
            self._counts.add(self._counted - self._counts.total)
        else:
            average_gradients(parameters, accelerator, secure)
            scale = self.scale(accelerator.device)
            for parameter in parameters:  # the scaler unscales what it steps by
                assert parameter.grad is not None  # average_gradients fills it in
                parameter.grad.mul_(scale)
        optimizer = self._optimizer()
        self._scaler.unscale_(getattr(optimizer, "optimizer", optimizer))  # Accelerate wraps it
        self._has_overflow = False
        self._states.clear()
