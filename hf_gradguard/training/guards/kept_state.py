"""What a model holds beside weights leaves with it, and no defense protects it.

A proof covers messages, and the weights that are made of them. A running mean of a batch in a
buffer is neither. Nor may it reach a later message: each row would move all messages after its own.
So behind a proof, and with `batch_statistics="frozen"`, every message ends with what modules held
before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn
from transformers.utils import logging

from ...gradient_map.exchanges import no_exchange
from ...gradient_map.lookups import vary
from ...gradient_map.replay import ModuleState, WeightState, draws_kept
from ...gradient_map.types import LossFunction
from ..refusals import refusal
from .watch import BufferGuard

logger = logging.get_logger(__name__)


def state_guard(proves: bool, batch_statistics: str, instead: str = "") -> BufferGuard:
    """Return what looks after the state of a model's modules while messages are made.

    Args:
        proves: Whether the messages prove something.
        batch_statistics: As for `GradGuardConfig`.
        instead: The way out where it refuses. Default: a Trainer's.

    Example:
        >>> type(state_guard(proves=False, batch_statistics="local")).__name__
        'BufferGuard'
    """
    is_frozen = batch_statistics == "frozen"
    if not (is_frozen or proves):
        return BufferGuard()
    return KeptState(proves, is_frozen, instead or _FROZEN)


class KeptState(BufferGuard):
    """Puts back, after each message, what modules held before it.

    At a model's first message it looks at what passes write. What another batch writes alike (a
    count of steps, a norm of weights) is no secret and goes on. Of the rest, what is saved with the
    model is refused, unless all is to be put back.

    Args:
        proves: Whether messages prove something: then no pass may write to weights either.
        is_frozen: Whether what is saved is put back, too, and not refused.
        instead: The way out of a refusal.

    Example:
        >>> layer, guard = nn.BatchNorm1d(2), KeptState(True, is_frozen=True, instead="")
        >>> with guard.watch(layer, {}, lambda layer, batch: layer(torch.rand(4, 2)).sum()):
        ...     _ = layer(torch.rand(4, 2))
        >>> layer.running_mean
        tensor([0., 0.])
    """

    def __init__(self, proves: bool, is_frozen: bool, instead: str) -> None:
        super().__init__()
        self._proves, self._is_frozen, self._instead = proves, is_frozen, instead
        self._public = frozenset[str]()  # written alike whatever the batch is

    @contextmanager
    def watch(
        self, model: nn.Module, batch: Mapping[str, Any], loss_fn: LossFunction
    ) -> Iterator[None]:
        is_first = self._watched is None or self._watched() is not model
        state = ModuleState(model)
        weights = WeightState(model, sums=is_first) if self._proves else None
        try:
            yield
            if is_first:
                self._look(model, batch, loss_fn, state)
        finally:
            changed = state.restore(self._public)
        self._watched: ReferenceType[nn.Module] | None = ref(model)
        if changed:
            logger.warning_once(_PUT_BACK.format(type(model).__name__, _listed(changed)))
        lasting = state.changed_extras() + ([] if weights is None else weights.changed())
        lasting += state.variables_set()
        if lasting := [name for name in lasting if name not in self._public]:
            raise refusal(
                "lasting-state-of-rows", kind=type(model).__name__, names=_listed(lasting)
            )

    def _look(
        self, model: nn.Module, batch: Mapping[str, Any], loss_fn: LossFunction, state: ModuleState
    ) -> None:
        """Find out at the first message what passes write, and refuse what is saved of it."""
        state_after, extras = ModuleState(model), state.changed_extras()
        changed = state.restore() + extras
        if not changed:
            return
        follows = _follow_the_batch(model, batch, loss_fn, state_after, changed)
        self._public = frozenset(set(changed) - follows)
        state_after.restore()
        saved = {*model.state_dict(keep_vars=True), *extras} & follows
        if (written := [name for name in changed if name in saved]) and not self._is_frozen:
            state.restore()
            raise refusal(
                "saved-state-of-rows",
                kind=type(model).__name__, names=_listed(written), way_out=self._instead,
            )  # fmt: skip


def _follow_the_batch(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss_fn: LossFunction,
    state_after: ModuleState,
    changed: list[str],
) -> set[str]:
    """Names of what a pass over another batch leaves otherwise than `state_after`: all, if the
    model does not run on another one.
    """
    try:
        with draws_kept(model), no_exchange(model), torch.no_grad():
            loss_fn(model, vary(model, batch)[0])
            return {*state_after.changed_extras(), *state_after.restore()}
    except Exception:  # of anybody's model
        return set(changed)


def _listed(names: list[str]) -> str:
    unlisted = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{unlisted}"


_FROZEN = (
    "Set batch_statistics='frozen', under which every message leaves modules as it found them; or "
    "compute this elsewhere than in forward, from public data."
)
_PUT_BACK = (
    "{} writes to {} as it runs. Each message puts that back as it found it: what is made of a "
    "batch stays in no model and reaches no later message."
)
