"""A message's linear layers in units in which its noise is white, for every mechanism."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...defenses.mechanism import Mechanism
from ...gradient_map.types import Tensors
from ..base import Observation

_GUESS = 0.1  # of a tensor's mean square, as the variance of what no mechanism states
_FLOOR = 1e-3  # the least variance, in units of a tensor's mean square
_STEEP = 0.25  # entries' power in units of Laplace noise's, up to which signs say most


@dataclass(frozen=True)
class WhiteMessage:
    """Linear layers' tensors, divided by the noise's scales of outputs and of inputs.

    Args:
        tensors: The tensors, `(out, in)` each, with noise of variance 1.
        scales: The scales of outputs and of inputs, by name.
        is_noise_known: Whether the mechanism states the noise, and does nothing else.
    """

    tensors: Tensors
    scales: Mapping[str, tuple[Tensor, Tensor]]
    is_noise_known: bool

    def gradient_norm(self, names: Iterable[str], texts: int) -> float:
        """Return the gradient norm of one of `texts` texts in these tensors.

        Texts' gradients are taken to be equally long and orthogonal. If noise drowns the norm, it
        is the norm that would just stand out.
        """
        tensors = [self.tensors[name] for name in names]
        power = sum(float(y.square().sum(dtype=torch.float64)) for y in tensors)
        if self.is_noise_known:
            entries = sum(y.numel() for y in tensors)
            power = max(power - entries, 2 * (2 * entries) ** 0.5)
        return (power / texts) ** 0.5

    def for_fraction(self, fraction: float) -> WhiteMessage:
        """Return the message in units for a text that has this fraction of the gradient."""
        scales = {
            name: (outputs / fraction, inputs) for name, (outputs, inputs) in self.scales.items()
        }
        return replace(self, scales=scales)

    def whiten(self, name: str, slopes: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's slopes and features in these units."""
        outputs, inputs = self.scales[name]
        return slopes.float() / outputs, features.float() / inputs


def white_message(
    observation: Observation, mechanism: Mechanism | None, linear: Mapping[str, bool]
) -> WhiteMessage:
    """Return the message's linear layers in units of the noise.

    - Gaussian noise is divided by its standard deviation. For noise that differs between entries,
      the nearest product of outputs' and inputs' scales, in logarithms, is used.
    - For Laplace noise far above the gradient, signs are what is to be known of entries: their
      products with gradients vary half as much.
    - Rounding to levels counts as noise as wide as a cell.
    - Where nothing is stated (pruning, sketches, Refiner, error feedback), what was changed counts
      as noise of a tenth of each tensor: the score is then a cosine.

    Args:
        observation: The observation of the server.
        mechanism: How the message was made, if that was granted.
        linear: Weights of linear layers, and whether they are stored as `(in, out)`.

    Raises:
        ValueError: If no linear layer was shared.
    """
    tensors: Tensors = {}
    scales: dict[str, tuple[Tensor, Tensor]] = {}
    for name, is_turned in linear.items():
        if name not in observation.gradient or not observation.gradient[name].any():
            continue
        y = observation.gradient[name].float()
        variance = _variance(mechanism, name, y)
        outputs, inputs = _scales(*(x.T if is_turned else x for x in (variance.expand_as(y), y)))
        tensors[name] = (y.T if is_turned else y) / (outputs[:, None] * inputs)
        scales[name] = outputs, inputs
    if not tensors:
        raise ValueError("likelihood_search needs linear layers' gradients, and there is none.")
    if mechanism is not None and mechanism.noise == "laplace":
        for name, y in tensors.items():
            if float(y.square().mean()) <= 1 + _STEEP:
                tensors[name] = y.sign()
                scales[name] = scales[name][0] / 2**0.5, scales[name][1]
    return WhiteMessage(tensors, scales, _states_noise(mechanism))


def _variance(mechanism: Mechanism | None, name: str, y: Tensor) -> Tensor:
    """Return the variance of what was added to each entry, or one number for all."""
    power = y.square().mean()
    if mechanism is None or mechanism.has_residual or mechanism.fitted is not None:
        return _GUESS * power
    variance = torch.zeros((), device=y.device)
    if mechanism.noise is not None:
        variance = torch.as_tensor(mechanism.variance_of(name), device=y.device).float()
    if mechanism.levels is not None:
        step = (y.max() - y.min()) / (mechanism.levels - 1)
        variance = variance + step.square() / (12 if mechanism.rounding == "nearest" else 6)
    elif mechanism.noise is None:
        return _GUESS * power
    return variance.clamp(min=float(_FLOOR * power))


def _scales(variance: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales of outputs `(out,)` and of inputs `(in,)`."""
    if not any(variance.stride()):
        return variance[:, 0].sqrt().clone(), torch.ones_like(y[0])
    logs = variance.log() / 2
    outputs, inputs = logs.mean(1), logs.mean(0)
    return outputs.exp(), (inputs - inputs.mean()).exp()


def _states_noise(mechanism: Mechanism | None) -> bool:
    return (
        mechanism is not None
        and mechanism.noise is not None
        and mechanism.selection == "all"
        and mechanism.scale == 1
        and not (mechanism.has_residual or mechanism.fitted)
        and {mechanism.clip_sample, mechanism.clip_norm, mechanism.clip_coordinate} == {None}
    )
