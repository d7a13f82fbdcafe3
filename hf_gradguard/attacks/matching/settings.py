"""What attacks by gradient matching may choose: the settings that all of them share, and the
distance, priors and moves in which they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .objectives import Objective
from .priors import squared_norm
from .problem import Problem
from .space import STARTS

OPTIMIZERS: dict[str, Callable[[list[Tensor], float], torch.optim.Optimizer]] = {
    "adam": lambda leaves, rate: torch.optim.Adam(leaves, lr=rate),
    "adamw": lambda leaves, rate: torch.optim.AdamW(leaves, lr=rate),
    "lbfgs": lambda leaves, rate: torch.optim.LBFGS(
        leaves, lr=rate, history_size=100, line_search_fn="strong_wolfe"
    ),
}


def _linear(step: int, steps: int, warmup: int) -> float:
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return max(0.0, (steps - step) / max(1, steps - warmup))


def _in_steps(step: int, steps: int, warmup: int) -> float:
    return 0.1 ** sum(step >= steps * eighths / 8 for eighths in (3, 5, 7))


SCHEDULES: dict[str, Callable[[int, int, int], float]] = {
    "constant": lambda step, steps, warmup: 1.0,
    "linear": _linear,
    "steps": _in_steps,
}


@dataclass
class MatchingSettings:
    """What an attack by gradient matching may choose: numbers, and in subclasses its distance,
    priors, and moves between steps.

    Args:
        steps: Iterations. One costs a plain gradient, and its derivative by the input: 7/3 plain
            gradients in matrix products.
        learning_rate: Peak rate of the optimizer, in the input's unit.
        optimizer: `"adam"`, `"adamw"` or `"lbfgs"`. L-BFGS takes up to 20 evaluations a step.
        schedule: `"constant"`, `"linear"` (down to 0, after `warmup` steps up), or `"steps"` (a
            tenth at 3/8, 5/8 and 7/8).
        warmup: Steps over which a linear schedule rises.
        signed: Follow the sign of the input's gradient.
        start: `"normal"`, `"uniform"` (images), `"tokens"` (embeddings of random tokens), or a
            tensor in the input's shape: an attacker's own guess, such as robust data. `None`:
            uniform on images, normal on texts.
        prior: `"deep"`: an image is what an untrained convolutional network draws, whose weights
            are descended on in the place of its pixels, at the same rate; it starts from random
            weights. `steps` says how strong a prior it is: noise is fitted last. `None` for none.
        restarts: Starts from which to descend; the best match is returned. They are evaluated in
            one vectorized pass.
        total_variation: Weight of that prior on images.
        squared_norm: Weight of that prior.
        match_nonzero: Match only where the shared gradient is not zero: against pruning.
        leave_out: Parts of parameter names to leave out of the matching: against defenses of single
            layers.
        clip_norm: Clip candidates' gradients to this norm, as the defense does: against clipping by
            norm.
        clip_coordinate: Coordinates that were shared at ± this bound match whatever lies beyond it:
            against clipping of coordinates that get no noise.
        tolerance: Stop when the objective falls to it.
        patience: Stop after so many steps without a new best.
        time_budget: Stop after so many seconds.
        progress: Show a bar.

    Raises:
        ValueError: For a setting out of range, saying the range.

    Example:
        >>> MatchingSettings(steps=10, schedule="linear", warmup=4).rate(0)
        0.2
    """

    name: ClassVar[str]
    optimize_labels: ClassVar[bool] = False
    steps: int = 1000
    learning_rate: float = 0.1
    optimizer: str = "adam"
    schedule: str = "constant"
    warmup: int = 0
    signed: bool = False
    start: Any = "normal"
    prior: str | None = None
    restarts: int = 1
    total_variation: float = 0.0
    squared_norm: float = 0.0
    match_nonzero: bool = False
    leave_out: Sequence[str] = ()
    clip_norm: float | None = None
    clip_coordinate: float | None = None
    tolerance: float = 0.0
    patience: int | None = None
    time_budget: float | None = None
    progress: bool = False

    def __post_init__(self) -> None:
        for name, known in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(known)}, but is {getattr(self, name)!r}."
                )
        if not isinstance(self.start, Tensor) and self.start not in (None, *STARTS):
            raise ValueError(
                f"start must be one of {', '.join(STARTS)} or a tensor, but is {self.start!r}."
            )
        if min(self.steps, self.restarts) < 1:
            raise ValueError(
                f"steps and restarts must be at least 1, but are {self.steps} and {self.restarts}."
            )
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate must be above 0, but is {self.learning_rate}.")
        for name in ("clip_norm", "clip_coordinate"):
            if (bound := getattr(self, name)) is not None and bound <= 0:
                raise ValueError(f"{name} must be above 0, but is {bound}.")
        if self.signed and self.optimizer == "lbfgs":
            raise ValueError("L-BFGS needs the gradient and not its sign: set signed=False.")
        if isinstance(self.leave_out, str):
            raise ValueError("leave_out is a list of parts of names, not one string.")
        if self.prior is not None:
            self._check_prior()

    def _check_prior(self) -> None:
        if self.prior != "deep":
            raise ValueError(f"prior must be 'deep' or None, but is {self.prior!r}.")
        if self.optimizer != "adam":
            raise ValueError(
                "prior='deep' descends on a network's weights, of which all layers have slopes of "
                f"another size: Adam evens that out, {self.optimizer} does not. Set "
                "optimizer='adam' and a learning_rate near 0.01."
            )
        if self.signed:
            raise ValueError(
                "prior='deep' needs the image's gradient and not its sign, to go on to the "
                "weights: set signed=False."
            )
        if isinstance(self.start, Tensor):
            raise ValueError(
                "prior='deep' starts from random weights, and which ones draw a given image nobody "
                "knows: leave start out, or set prior=None."
            )
        if type(self).between_steps is not MatchingSettings.between_steps:
            raise ValueError(
                f"{self.name} moves candidates between steps, and with prior='deep' a network "
                "draws them anew: set prior=None."
            )

    def objective(self) -> Objective:
        """The distance between gradients. Implemented by subclasses."""
        raise NotImplementedError

    def penalty(self, problem: Problem, x: Tensor) -> Tensor | float:
        """The priors' penalty of candidates `(K, B, ...)`: `(K,)`."""
        value: Tensor | float = 0.0
        if self.total_variation:
            value = value + self.total_variation * problem.space.total_variation(x)
        if self.squared_norm:
            value = value + self.squared_norm * squared_norm(x)
        return value

    def between_steps(
        self, problem: Problem, step: int, x: Tensor, first: int, generator: torch.Generator
    ) -> None:
        """What happens to candidates after a step, in place: to those from number `first` on."""

    def rate(self, step: int) -> float:
        """The schedule: the share of the learning rate that a step takes."""
        return SCHEDULES[self.schedule](step, self.steps, self.warmup)
