"""What the stock Trainer would have weighed a client's loss with.

Noise scales and bounds speak of the gradient of a client's *mean* loss. So the weight is taken out
before protection and applied after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from ..gradient_map.domain import domain_of_batch

Loss = Callable[[nn.Module, dict[str, Any], int | None], Tensor]
"""`(module, batch, items)`: the Trainer's loss, with `items` as its `num_items_in_batch`."""


@dataclass(frozen=True)
class Normalization:
    """How the stock Trainer normalizes the losses of a micro-batch.

    Args:
        num_items: Labels that count in the whole optimizer step, on all ranks; `None` if losses are
            means over rows.
        rank_factor: What `compute_loss` multiplies a loss with that is normalized over all ranks,
            since ranks are averaged later.
        accumulation: Micro-batches of the optimizer step.
        accumulated: Whether the loss is normalized over those already.
        shifts_labels: Whether the first label of a row does not count.

    Example:
        >>> means = Normalization(None, 1.0, accumulation=2, accumulated=False, shifts_labels=False)
        >>> LossWeights(loss=lambda model, batch, items: model(**batch).loss)(model, [batch], means)
        [0.5]
    """

    num_items: Tensor | int | None
    rank_factor: float
    accumulation: int
    accumulated: bool
    shifts_labels: bool

    @classmethod
    def of(cls, trainer: Trainer, num_items: Tensor | int | None) -> Normalization:
        """What a Trainer says at this step: its subclasses set some of it after construction."""
        accepts = trainer.model_accepts_loss_kwargs and num_items is not None
        own = trainer.compute_loss_func is not None
        over_ranks = accepts or (own and num_items is not None)
        scaled = trainer.loss_is_scaled_for_ga
        return cls(
            num_items,
            float(trainer.accelerator.num_processes)
            if over_ranks and trainer.args.average_tokens_across_devices
            else 1.0,
            trainer.current_gradient_accumulation_steps,
            (accepts or own) if scaled is None else scaled,
            trainer._loss_shifts_labels,
        )

    def items(self, batch: dict[str, Any]) -> int | None:
        """Labels of a batch that count toward the loss, as the Trainer counts them; `None` if the
        loss is a mean over rows.
        """
        if self.num_items is None:
            return None
        labels = batch.get("shift_labels")
        if labels is None:
            labels = batch["labels"][..., 1:] if self.shifts_labels else batch["labels"]
        return int(labels.ne(-100).sum())

    def mean_loss(self, loss: Loss, module: nn.Module, batch: dict[str, Any]) -> Tensor:
        """A client's mean loss: the Trainer's own, normalized by the client's items."""
        return loss(module, batch, self.items(batch)) / self.rank_factor


class LossWeights:
    """The factors that the stock Trainer would have given clients' mean losses.

    Args:
        loss: The Trainer's.
    """

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self._divides: bool | None = None

    def __call__(
        self, module: nn.Module, batches: Sequence[dict[str, Any]], normalization: Normalization
    ) -> list[float]:
        """The factor of each batch; 0 for one in which nothing counts.

        Raises:
            NotImplementedError: If the loss neither divides by `num_items_in_batch` nor ignores it.
        """
        counts = [normalization.items(batch) for batch in batches]
        sizes = [
            len(domain_of_batch(batch).main_input(batch)) if count is None else count
            for batch, count in zip(batches, counts, strict=True)
        ]
        whole = float(sum(sizes))
        if normalization.num_items is not None and whole:
            fullest = batches[max(range(len(sizes)), key=sizes.__getitem__)]
            if self._divides_by_items(module, fullest):
                whole = float(normalization.num_items)
        factor = normalization.rank_factor
        if not normalization.accumulated:
            factor /= normalization.accumulation
        return [size * factor / whole if size else 0.0 for size in sizes]

    def _divides_by_items(self, module: nn.Module, batch: dict[str, Any]) -> bool:
        """Whether the loss is a sum over `num_items_in_batch`. Some models accept that argument and
        take their own mean.
        """
        if self._divides is None:
            one, two = self._losses(module, batch)
            if not one or not abs(one) < float("inf"):
                # a vanishing loss cannot tell, and one that is not finite is refused later
                return False
            if min(abs(one / two - 1), abs(one / two - 2)) > 1e-3:
                raise NotImplementedError(
                    f"The loss changes by a factor of {two / one:g} when num_items_in_batch "
                    "doubles. It has to halve (a sum divided by it) or to stay (a mean that "
                    "ignores it): change compute_loss_func or compute_loss."
                )
            self._divides = abs(one / two - 2) <= 1e-3
        return self._divides

    def _losses(self, module: nn.Module, batch: dict[str, Any]) -> tuple[float, float]:
        """The loss per item, and per two items."""
        modes = {part: part.training for part in module.modules()}
        # no dropout and no batch statistics: the global generator and the buffers stay as they are
        module.eval()
        try:
            with torch.no_grad():
                return float(self._loss(module, batch, 1)), float(self._loss(module, batch, 2))
        finally:
            for part, mode in modes.items():
                part.training = mode
