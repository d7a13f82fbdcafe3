"""Steps of local training as functions, so that they can be differentiated and replayed.

What an optimizer of torch does in place is written here as a function from weights, gradient and
state to the change of the weights. Names and defaults are those of `torch.optim`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from ..types import Tensors

State = dict[str, Tensors]
"""What an optimizer remembers from step to step: one tensor per parameter, by kind."""


@dataclass(frozen=True)
class SGD:
    """The step θ ← θ - η d, with weight decay and momentum as in `torch.optim.SGD`.

    Args:
        momentum: μ in [0, 1).
        dampening: The dampening of the momentum.
        weight_decay: At least 0.
        nesterov: Whether to use Nesterov's momentum.

    Example:
        >>> weight, gradient = {"w": torch.ones(2)}, {"w": torch.ones(2)}
        >>> SGD().change(weight, gradient, {}, rate=0.1, step=1)[0]["w"]
        tensor([-0.1000, -0.1000])
    """

    name: ClassVar[str] = "sgd"
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check("momentum", self.momentum, below=1)
        _check("weight_decay", self.weight_decay)
        if self.nesterov and (not self.momentum or self.dampening):
            raise ValueError("nesterov needs momentum above 0 and dampening=0.")

    def change(
        self, weights: Tensors, gradient: Tensors, state: State, rate: float, step: int
    ) -> tuple[Tensors, State]:
        """Return what is added to the weights, and the state after it.

        Args:
            weights: The weights before the step.
            gradient: The gradient there.
            state: The state as the last step left it; empty before the first.
            rate: η, the learning rate.
            step: The step's number, from 1.
        """
        directions = {
            name: g + self.weight_decay * weights[name] if self.weight_decay else g
            for name, g in gradient.items()
        }
        if self.momentum:
            momentum = state.get("momentum")
            averaged = {
                name: d
                if momentum is None
                else self.momentum * momentum[name] + (1 - self.dampening) * d
                for name, d in directions.items()
            }
            state = {"momentum": averaged}
            if self.nesterov:
                averaged = {
                    name: d + self.momentum * averaged[name] for name, d in directions.items()
                }
            directions = averaged
        return {name: -rate * d for name, d in directions.items()}, state

    def linear(self, rates: list[float]) -> tuple[float, float]:
        """Return a and C in θ_K = a θ_0 - Σ_k c_k g_k, C = Σ_k c_k, for the given learning rates.

        All that plain SGD does is linear in weights and gradients, so a run on numbers tells.
        """
        return _run(self, rates, 1.0, 0.0), -_run(self, rates, 0.0, 1.0)


@dataclass(frozen=True)
class AdamW:
    """The step of Adam with decoupled weight decay, as in `torch.optim.AdamW`.

    Args:
        betas: The decay of the running means of g and g².
        eps: A number added to the root of the second.
        weight_decay: At least 0.

    Example:
        >>> weight, gradient = {"w": torch.ones(2)}, {"w": torch.tensor([3.0, -5.0])}
        >>> AdamW(weight_decay=0.0).change(weight, gradient, {}, rate=0.1, step=1)[0]["w"]
        tensor([-0.1000,  0.1000])
    """

    name: ClassVar[str] = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        for beta in self.betas:
            _check("betas", beta, below=1)
        _check("eps", self.eps)
        _check("weight_decay", self.weight_decay)

    def change(
        self, weights: Tensors, gradient: Tensors, state: State, rate: float, step: int
    ) -> tuple[Tensors, State]:
        """Return what is added to the weights, and the state after it; see `SGD.change`."""
        mean_beta, square_beta = self.betas
        zero = {name: torch.zeros_like(g) for name, g in gradient.items()}
        means, squares = state.get("mean", zero), state.get("square", zero)
        means = {name: torch.lerp(means[name], g, 1 - mean_beta) for name, g in gradient.items()}
        squares = {
            name: square_beta * squares[name] + (1 - square_beta) * g.square()
            for name, g in gradient.items()
        }
        size, correction = rate / (1 - mean_beta**step), math.sqrt(1 - square_beta**step)
        changes = {}
        for name, square in squares.items():
            # The root has no slope at 0, where a parameter had no gradient yet: it is held there.
            root = square.clamp_min(torch.finfo(square.dtype).tiny).sqrt()
            changes[name] = -size * means[name] / (root / correction + self.eps)
            if self.weight_decay:
                changes[name] = changes[name] - rate * self.weight_decay * weights[name]
        return changes, {"mean": means, "square": squares}

    def linear(self, rates: list[float]) -> tuple[float, float]:
        """Return a and C as for SGD, with Adam's normalized directions in place of gradients."""
        decays = [1 - rate * self.weight_decay for rate in rates]
        decay_after = [math.prod(decays[step + 1 :]) for step in range(len(rates))]
        return math.prod(decays), sum(rate * k for rate, k in zip(rates, decay_after, strict=True))


Optimizer = SGD | AdamW
OPTIMIZERS: dict[str, type[SGD] | type[AdamW]] = {"sgd": SGD, "adamw": AdamW}


def make_optimizer(name: str | Optimizer, settings: Mapping[str, Any] | None = None) -> Optimizer:
    """Return an optimizer by its name.

    Args:
        name: `"sgd"` or `"adamw"`; one that is made already is returned.
        settings: Settings as `torch.optim` calls them, without the learning rate.

    Raises:
        ValueError: If a name or a setting is unknown; the message lists those there are.

    Example:
        >>> make_optimizer("sgd", {"momentum": 0.9})
        SGD(momentum=0.9, dampening=0.0, weight_decay=0.0, nesterov=False)
    """
    if not isinstance(name, str):
        return name
    if name not in OPTIMIZERS:
        raise ValueError(
            f"Local training is known for {' and '.join(OPTIMIZERS)}, but not for {name!r}: its "
            "steps would have to be written as a function of the weights."
        )
    setting_names = [field.name for field in fields(OPTIMIZERS[name])]
    if unknown := [key for key in settings or {} if key not in setting_names]:
        raise ValueError(f"{name} has no {unknown[0]!r}. It has: {', '.join(setting_names)}.")
    return OPTIMIZERS[name](**(settings or {}))


def _run(optimizer: SGD, rates: list[float], start: float, gradient: float) -> float:
    weights: Tensors = {"": torch.tensor(start, dtype=torch.float64)}
    slope: Tensors = {"": torch.tensor(gradient, dtype=torch.float64)}
    state: State = {}
    for step, rate in enumerate(rates, 1):
        changes, state = optimizer.change(weights, slope, state, rate, step)
        weights = {"": weights[""] + changes[""]}
    return float(weights[""])


def _check(name: str, value: float, below: float = math.inf) -> None:
    if not 0 <= value < below:
        most = "" if below == math.inf else f" and below {below:g}"
        raise ValueError(f"{name} must be at least 0{most}, but is {value!r}.")
