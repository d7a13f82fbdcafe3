"""Plain gradients of many batches, several in one vectorized pass where the model allows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.utils import logging

from .candidates import Held
from .graphs import differentiate
from .inputs import model_loss
from .kept import draws_kept, seed_draws
from .replay import Replay

if TYPE_CHECKING:
    from .map import Tensors

logger = logging.get_logger(__name__)

ENTRIES = 2**26
"""Of gradients that are written out at once: 256 MiB in float32."""


class ManyGradients:
    """The gradients of a model at many batches, in the mode in which the model is.

    Random draws (dropout) are the attacker's own: the same for every batch, from seeds, and the
    gradient is the mean over them. Generators, statistics and `.grad` stay as they were.

    Args:
        model: The model.
        names: The parameters to differentiate by.
        seeds: One for each set of draws over which to average.
        vectorized: Run several batches of one shape in one pass, if a trial of two gives what they
            give by themselves.

    Raises:
        ValueError: For a name that is no parameter of the model that can be trained.

    Example:
        >>> many = ManyGradients(model, ["classifier.bias"])
        >>> one = {key: entry[:1] for key, entry in batch.items()}
        >>> batches = [one, {**one, "labels": 1 - one["labels"]}]
        >>> [(rows, found["classifier.bias"].shape) for rows, found in many(batches)]
        [([0, 1], torch.Size([2, 2]))]
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        seeds: Sequence[int] = (0,),
        vectorized: bool = True,
    ) -> None:
        parameters = dict(model.named_parameters())
        if unknown := [n for n in names if n not in parameters or not parameters[n].requires_grad]:
            raise ValueError(f"{unknown[0]!r} is no parameter of the model that is trained.")
        self.model = model
        self.parameters = {name: parameters[name] for name in names}
        self._seeds = list(seeds)
        size = sum(parameter.numel() for parameter in self.parameters.values())
        self.at_once = max(1, ENTRIES // max(size, 1)) if vectorized else 1
        self._allowed: dict[tuple[str, ...], bool] = {}

    def __call__(
        self, batches: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """Which batches, and their gradients `(k, *parameter.shape)`, until all had their turn."""
        shapes: dict[str, list[int]] = {}
        for number, batch in enumerate(batches):
            shapes.setdefault(repr(_shape(batch)), []).append(number)
        for numbers in shapes.values():
            for first in range(0, len(numbers), self.at_once):
                rows = numbers[first : first + self.at_once]
                yield rows, self._mean([batches[number] for number in rows])

    def spread(self, batches: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """The variance between sets of draws of an entry of each parameter's gradient, a mean over
        its entries and the batches; 0 with one set.
        """
        total = dict.fromkeys(self.parameters, 0.0)
        if len(self._seeds) < 2:
            return total
        for batch in batches:
            draws = [self._one(batch, seed) for seed in self._seeds]
            for name in total:
                drawn = torch.stack([draw[name] for draw in draws]).float()
                total[name] += float(drawn.var(0).mean()) / len(batches)
        return total

    def _mean(self, batches: list[Mapping[str, Any]]) -> dict[str, Tensor]:
        found = [self._several(batches, seed) for seed in self._seeds]
        if len(found) == 1:
            return found[0]
        return {n: torch.stack([one[n] for one in found]).mean(0) for n in self.parameters}

    def _several(self, batches: list[Mapping[str, Any]], seed: int) -> dict[str, Tensor]:
        if len(batches) > 1:
            own = _different(batches)
            if own not in self._allowed:
                self._allowed[own] = self._try(batches, own, seed)
            if self._allowed[own]:
                return self._together(batches, own, seed)
        each = [self._one(batch, seed) for batch in batches]
        return {name: torch.stack([one[name] for one in each]) for name in self.parameters}

    def _one(self, batch: Mapping[str, Any], seed: int) -> Tensors:
        with self._replay(seed).run():
            return differentiate(model_loss(self.model, dict(batch)), self.parameters)

    def _together(
        self, batches: list[Mapping[str, Any]], own: tuple[str, ...], seed: int
    ) -> dict[str, Tensor]:
        fixed = {key: value for key, value in batches[0].items() if key not in own}
        stacked = {key: torch.stack([batch[key] for batch in batches]) for key in own}
        if not own:  # one batch, several times
            one = self._one(batches[0], seed)
            return {name: g.expand(len(batches), *g.shape) for name, g in one.items()}
        held = Held(self.model)
        parameters = {f"model.{name}": p.detach() for name, p in self.parameters.items()}

        def loss(parameters: Tensors, entries: Tensors) -> Tensor:
            def run() -> Tensor:
                return model_loss(self.model, {**fixed, **entries})

            value: Tensor = torch.func.functional_call(held, parameters, (run,))
            return value

        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0), randomness="same")
        with torch.no_grad(), self._replay(seed).draws(), sdpa_kernel(SDPBackend.MATH):
            found = each(parameters, stacked)
        return {name.removeprefix("model."): gradient for name, gradient in found.items()}

    def _try(self, batches: list[Mapping[str, Any]], own: tuple[str, ...], seed: int) -> bool:
        """Whether the model gives vectorized what it gives otherwise."""
        alone = [self._one(batch, seed) for batch in (batches[0], batches[-1])]
        try:
            together = self._together(batches, own, seed)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # control flow that looks at values, statistics, checkpoints
            logger.info(f"{type(self.model).__name__} runs batch by batch: {error}")
            return False
        change = size = 0.0
        for name in self.parameters:
            for row, one in zip((0, -1), alone, strict=True):
                change += float((together[name][row] - one[name]).double().square().sum())
                size += float(one[name].double().square().sum())
        eps = torch.finfo(next(iter(self.parameters.values())).dtype).eps
        return change <= (1e3 * eps) ** 2 * size

    def _replay(self, seed: int) -> Replay:
        with draws_kept(self.model):
            seed_draws(self.model, seed)
            return Replay(self.model, second_order=False)


def has_draws(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Whether a model's loss depends on random draws, in the mode in which it is."""
    if not any(module.training for module in model.modules()):
        return False
    losses = []
    for seed in (0, 1):
        with draws_kept(model):
            seed_draws(model, seed)
            replay = Replay(model, second_order=False)
        with replay.draws(), torch.no_grad():
            losses.append(float(model_loss(model, dict(batch))))
    return losses[0] != losses[1]


def _different(batches: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The entries that are not alike in all: only these are vectorized."""
    first = batches[0]
    keys = [key for key, value in first.items() if isinstance(value, Tensor)]
    return tuple(k for k in keys if any(not torch.equal(b[k], first[k]) for b in batches[1:]))


def _shape(batch: Mapping[str, Any]) -> tuple[Any, ...]:
    """What batches must have alike to run together: shapes, and masks, which decide on the way
    that a model takes.
    """
    return tuple(
        (key, tuple(value.shape), value.dtype, key.endswith("mask") and value.tolist())
        if isinstance(value, Tensor)
        else (key, repr(value))
        for key, value in sorted(batch.items())
    )
