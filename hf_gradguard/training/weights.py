"""The weights that the stock Trainer would have given clients' losses.

Noise scales and bounds are stated for the gradient of a client's *mean* loss. So the weight is
taken out before protection and applied after.

A loss may change while it is trained: a penalty that is warmed up, a distillation that fades in. So
weights are right for any A/n + B, whatever of it there is at a step, and no step looks for it. Only
what noise is measured against, a mean with B counted once or as often as the stock Trainer counts
it, follows the first loss that is not 0: three passes without gradients, once a training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Trainer

from ..gradient_map.domain import count_rows
from ..gradient_map.forward_hooks import has_forward_hooks
from ..gradient_map.replay import Replay
from .refusals import refusal

Loss = Callable[[nn.Module, dict[str, Any], float | None], Tensor]
"""`(module, batch, items)`: the Trainer's loss, with `items` as its `num_items_in_batch`."""


class Spread(NamedTuple):
    """The factors that turn the Trainer's loss into a client's mean loss.

    Args:
        items: How many items count as one in `num_items_in_batch`.
        loss: The factor of the loss. A loss A/n + B of n items has the mean `loss`/`items` · A/n +
            `loss` · B.
    """

    items: float = 1.0
    loss: float = 1.0


@dataclass(frozen=True)
class Normalization:
    """The stock Trainer's normalization of a micro-batch's losses.

    Args:
        num_items: The number of labels that count in the whole optimizer step, on all ranks; `None`
            if losses are means over rows.
        rank_factor: The factor of `compute_loss` for a loss that is normalized over all ranks,
            since ranks are averaged later.
        accumulation: The number of micro-batches of the optimizer step.
        accumulated: Whether the loss is normalized over those already.
        shifts_labels: Whether the first label of a row does not count.

    Example:
        >>> means = Normalization(None, 1.0, accumulation=2, accumulated=False, shifts_labels=False)
        >>> LossWeights(loss=lambda model, batch, items: model(**batch).loss)(model, [batch], means)
        Weights(factors=[0.5], spread=Spread(items=1.0, loss=1.0))
    """

    num_items: Tensor | int | None
    rank_factor: float
    accumulation: int
    accumulated: bool
    shifts_labels: bool

    @classmethod
    def of_trainer(cls, trainer: Trainer, is_counted: bool) -> Normalization:
        """Return the normalization of a whole training.

        It is that of steps whose labels are counted, or of steps whose labels are not.
        """
        has_own_loss = trainer.compute_loss_func is not None
        accepts = trainer.model_accepts_loss_kwargs and is_counted
        over_ranks = is_counted and (accepts or has_own_loss)
        averages = over_ranks and trainer.args.average_tokens_across_devices
        scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        return cls(
            num_items=None,
            rank_factor=float(trainer.accelerator.num_processes) if averages else 1.0,
            accumulation=1,
            accumulated=(accepts or has_own_loss) if scaled is None else scaled,
            shifts_labels=getattr(trainer, "_loss_shifts_labels", False),
        )

    def items(self, batch: dict[str, Any]) -> int | None:
        """Return the number of a batch's labels that count toward the loss.

        They are counted as the Trainer counts them. It is `None` if the loss is a mean over rows.
        """
        if self.num_items is None:
            return None
        labels = batch.get("shift_labels")
        if labels is None:
            labels = batch["labels"][..., 1:] if self.shifts_labels else batch["labels"]
        return int(labels.ne(-100).sum())

    def mean_loss(
        self, loss: Loss, spread: Spread, module: nn.Module, batch: dict[str, Any]
    ) -> Tensor:
        """Return a client's mean loss: the Trainer's own, normalized by the client's items.

        See `LossWeights`.
        """
        items: float | None = self.items(batch)
        if items is not None and spread.items != 1:
            items = items * spread.items
        return loss(module, batch, items) / (self.rank_factor / spread.loss)


class Weights(NamedTuple):
    """The weights of clients' mean losses in the loss of a step.

    Args:
        factors: The factor of each client's mean loss; 0 for one in which nothing counts.
        spread: How mean losses are taken.
    """

    factors: list[float]
    spread: Spread = Spread()


class LossWeights:
    """The factors that the stock Trainer would have given clients' mean losses.

    A loss that is given the number of items n of the whole step is A/n + B: A alone for a sum over
    tokens, B alone where a model takes its own mean, both in a mixture of experts with a router
    loss. The stock Trainer adds up A_i/N + B_i over micro-batches i, so a micro-batch of C items
    counts as C/N times its mean loss A_i/C + (N/C) B_i, or, where there is B alone, once as its
    mean loss B_i. Clients share A_i and B_i in proportion to their items.

    Either is right for both parts, since it asks for the loss of N items: one client's is the stock
    Trainer's, whichever part comes or goes.

    Args:
        loss: The Trainer's.
    """

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self._is_mean: bool | None = None

    def __call__(
        self, module: nn.Module, batches: Sequence[dict[str, Any]], normalization: Normalization
    ) -> Weights:
        """Return the factor of each batch, and the spread of all.

        Raises:
            NotImplementedError: If the loss depends on `num_items_in_batch` in another way.
        """
        if normalization.num_items is None:
            sizes, spread = [count_rows(batch) for batch in batches], Spread()
            total = float(sum(sizes))
        else:
            sizes = [normalization.items(batch) or 0 for batch in batches]
            fullest = batches[sizes.index(max(sizes))]
            total, spread = self._spread(module, fullest, sum(sizes), normalization.num_items)
        factor = normalization.rank_factor
        if not normalization.accumulated:
            factor /= normalization.accumulation
        return Weights([size * factor / total if size else 0.0 for size in sizes], spread)

    def _spread(
        self, module: nn.Module, fullest: dict[str, Any], size: int, num_items: Tensor | int
    ) -> tuple[float, Spread]:
        """What sizes are divided by, and the spread."""
        if not size:
            return 1.0, Spread()
        items = float(num_items)
        if self._is_mean is None:  # a batch that cannot tell is asked again
            self._is_mean = self._takes_a_mean(module, fullest)
        ratio = items / size
        return (size, Spread(ratio)) if self._is_mean else (items, Spread(ratio, ratio))

    def _takes_a_mean(self, module: nn.Module, batch: dict[str, Any]) -> bool | None:
        """Whether of A/n + B there is B alone; `None` if this batch cannot tell."""
        of_one, of_two, of_many = self._losses(module, batch)
        largest = max(abs(of_one), abs(of_two), abs(of_many))
        if not 0 < largest < math.inf:
            return None  # a loss that is not finite is refused later
        if abs(of_two - (of_one + of_many) / 2) > 1e-2 * largest:
            raise refusal("loss-normalization", factor=of_two / of_one)
        # so small an A makes no difference that arithmetic could tell
        return abs(of_one - of_many) <= 1e-6 * largest

    def _losses(self, module: nn.Module, batch: dict[str, Any]) -> tuple[float, float, float]:
        """The loss per item, per two items, and per so many that only B is left."""
        # In the mode that stock runs in, with one set of draws: the loss may draw as well.
        replay, losses = Replay(module, second_order=False), []
        hooked = has_forward_hooks(module)
        for items in (1, 2, _MANY_ITEMS):
            with replay.draws(), torch.set_grad_enabled(hooked):
                losses.append(float(self._loss(module, batch, items).detach()))
        of_one, of_two, of_many = losses
        return of_one, of_two, of_many


_MANY_ITEMS = 2**30
