"""Likelihood of a message of one sample if a candidate is behind it, given the mechanism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...defenses.mechanism import Mechanism
from ...gradient_map import Tensors
from ...gradient_map.per_sample.clipping import count_items
from ...gradient_map.per_sample.products import Products
from ..base import Observation
from ..layer_inputs import is_causal_lm
from ..local_training import scale_mechanism
from .regression import WhitenedMessage


def clip_of_samples(mechanisms: Sequence[Mechanism | None]) -> float | None:
    """Return the norm that each sample's gradient is clipped to, by mechanisms of messages.

    Raises:
        ValueError: If messages differ in it.

    Example:
        >>> clip_of_samples([Mechanism(clip_sample=2.0), Mechanism(clip_sample=2.0)])
        2.0
    """
    bounds = {None if mechanism is None else mechanism.clip_sample for mechanism in mechanisms}
    if len(bounds) > 1:
        raise ValueError(
            "Messages that are attacked together must have samples clipped alike. Attack the "
            "others by themselves."
        )
    return bounds.pop()


def count_labels(model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> Tensor:
    """Return over how many labels the mean loss of each batch of one is taken, `(P,)`.

    For a causal language model a text's first token is no label.

    Example:
        >>> text = {"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[-100, 1, 2]])}
        >>> texts = [text, {**text, "labels": torch.tensor([1])}]
        >>> count_labels(model, texts[:1]), count_labels(model, texts[1:])
        (tensor([2.]), tensor([1.]))
    """
    causal = is_causal_lm(model)
    return torch.tensor([float(count_items(batch, causal)) for batch in batches])


def mean_items(
    observation: Observation, batches: Sequence[Mapping[str, Any]], items: Tensor
) -> float:
    """Return how many labels a sample of the message has on average.

    It is the mean over candidates, or if the message's lengths are known, over those nearest to
    each in length.

    Args:
        observation: The observation of the server.
        batches: The candidates, as batches of one.
        items: How many labels each has, `(P,)`.

    Example:
        >>> masks = [torch.ones(1, length) for length in (3, 5)]
        >>> listed, known = [{"attention_mask": mask} for mask in masks], torch.ones(2, 5)
        >>> mean_items(observation, listed, torch.tensor([2.0, 4.0]))
        3.0
        >>> padded = Observation(model, shared, (2, 5), attention_mask=known)
        >>> mean_items(padded, listed, torch.tensor([2.0, 4.0]))
        4.0
    """
    if observation.attention_mask is None or bool((items == items[0]).all()):
        return float(items.mean())
    lengths = observation.tokens.sum(1, keepdim=True).cpu()
    candidate_lengths = torch.tensor([int(batch["attention_mask"].sum()) for batch in batches])
    away = (candidate_lengths - lengths).abs()
    near = (away == away.amin(1, keepdim=True)).float()
    return float(((near * items / candidate_lengths).sum(1) / near.sum(1) * lengths[:, 0]).mean())


def rescale(
    observation: Observation, mechanism: Mechanism | None, by: float
) -> tuple[Observation, Mechanism | None]:
    """Return a message and its mechanism, as if gradients were `by` times as large.

    Example:
        >>> mechanism = Mechanism(clip_norm=1.0, noise="gaussian", variance=0.5)
        >>> twice, scaled_mechanism = rescale(observation, mechanism, 2.0)
        >>> bool((twice.gradient["classifier.bias"] == 2 * shared["classifier.bias"]).all())
        True
        >>> scaled_mechanism.clip_norm, scaled_mechanism.variance
        (2.0, 2.0)
    """
    if by == 1:
        return observation, mechanism
    mechanism = mechanism and scale_mechanism(mechanism, by)
    gradient = {name: g * by for name, g in observation.gradient.items()}
    rescaled = replace(observation, gradient=gradient, mechanism=mechanism, noise_variance=None)
    return rescaled, mechanism


def to_filter(
    observation: Observation,
    mechanism: Mechanism | None,
    center: Tensors,
    weights: Tensors | None,
    variance: float | None,
) -> WhitenedMessage:
    """Return a message in units of its mean, unless it was clipped.

    Args:
        observation: The observation of the server.
        mechanism: How the message was made.
        center: The mean of such messages.
        weights: Weights of coordinates, `None` if all weigh the same.
        variance: The variance of the noise in these units, `None` if it is unknown.

    Example:
        >>> twice = {name: 2 * y for name, y in shared.items()}
        >>> to_filter(observation, Mechanism(scale=0.5), shared, None, 1.0).variance
        4.0
        >>> whitened = to_filter(observation, None, twice, None, None)
        >>> torch.allclose(whitened.message["classifier.bias"], twice["classifier.bias"])
        True
    """
    counted_center = center
    if weights is not None and variance is None:
        counted_center = {name: c * (weights[name] != 0) for name, c in center.items()}
    scaled_alike = (
        mechanism is not None and mechanism.clip_norm is None and not mechanism.has_residual
    )
    scale = mechanism.scale if scaled_alike else _fit_scale(observation.gradient, counted_center)  # type: ignore[union-attr]
    message = {name: g / scale for name, g in observation.gradient.items()}
    variance = None if variance is None else variance / scale**2
    return WhitenedMessage(message, _clipped(center, mechanism), observation.batch_size, variance)


def _clipped(center: Tensors, mechanism: Mechanism | None) -> Tensors:
    if mechanism is None or mechanism.clip_coordinate is None:
        return center
    bound = mechanism.clip_coordinate
    return {name: c.clamp(-bound, bound) for name, c in center.items()}


def _fit_scale(message: Mapping[str, Tensor], center: Mapping[str, Tensor]) -> float:
    """Return how large a message is in units of its mean: defenses may scale it down."""
    product = sum(float((g.double() * center[name]).sum()) for name, g in message.items())
    square = sum(float(center[name].double().square().sum()) for name in message)
    return product / square if product > 1e-3 * square else 1.0


_LEAST_SIZE = 0.1  # of gradients' coordinates, in units of their mean
_ALONE = 0.1  # batches: as far as others' are in entries of a message's own batch alone


def weigh_by_noise(
    observation: Observation,
    mechanism: Mechanism | None,
    center: Tensors,
    floor: Mapping[str, float],
) -> tuple[Tensors | None, float | None]:
    """Return the weights of coordinates, and the noise's variance in these units.

    Weights are `None` if all are the same, the variance is `None` if it is unknown. A coordinate
    that is clipped on average says nothing of its members.

    Args:
        observation: The observation of the server.
        mechanism: How the message was made.
        center: The mean of such messages.
        floor: The variance by which evaluations of one gradient differ, by parameter.

    Example:
        >>> mechanism = Mechanism(noise="gaussian", variance=0.5)
        >>> weigh_by_noise(observation, mechanism, shared, dict.fromkeys(shared, 0.0))
        (None, 0.5)
    """
    if mechanism is None or mechanism.rounding == "sign" or mechanism.has_residual:
        return None, None
    bound = mechanism.clip_coordinate
    if mechanism.uniform and mechanism.rounding is None and bound is None:
        mean = sum(v * observation.gradient[n].numel() for n, v in floor.items())
        size = sum(g.numel() for g in observation.gradient.values())
        return None, mechanism.mean_variance(observation.gradient) + mean / size
    weights = {}
    for name, y in observation.gradient.items():
        variance = mechanism.variance_of(name) + floor[name]
        if mechanism.levels is not None:  # uniform within its cell
            step = float(y.max() - y.min()) / (mechanism.levels - 1)
            variance = variance + step**2 / (12 if mechanism.rounding == "nearest" else 6)
        precise = torch.as_tensor(variance, device=y.device).float().rsqrt()
        is_known = y != 0 if mechanism.selection != "all" else torch.ones_like(y, dtype=torch.bool)
        if bound is not None:
            is_known = is_known & (center[name].abs() < bound)
        weights[name] = precise.expand_as(y) * is_known
    return weights, 1.0


def weigh_beside_others(
    observation: Observation, mechanism: Mechanism | None, sizes: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the weights of coordinates beside what earlier messages left out.

    What was left out is taken to be as large as gradients are, coordinate by coordinate. If its
    number of batches is known, it is taken to be of that many.

    Args:
        observation: The observation of the server.
        mechanism: How the message was made.
        sizes: The root mean square of samples' gradients.

    Example:
        >>> sizes = {name: torch.ones_like(y) for name, y in shared.items()}
        >>> of = ({name: torch.tensor(count) for name in shared} for count in (1, 11))
        >>> mechanisms = (Mechanism(has_residual=True, batches=batches) for batches in of)
        >>> once, again = (weigh_beside_others(seen, mechanism, sizes) for mechanism in mechanisms)
        >>> bool((once["classifier.bias"] > 10 * again["classifier.bias"]).all())
        True
    """
    total = sum(float(size.sum(dtype=torch.float64)) for size in sizes.values())
    least = _LEAST_SIZE * total / sum(size.numel() for size in sizes.values()) + 1e-30
    weights = {name: 1 / (size + least) for name, size in sizes.items()}
    if mechanism is not None and mechanism.batches is not None:
        weights = {n: w / (mechanism.batches[n] - 1 + _ALONE).sqrt() for n, w in weights.items()}
    if mechanism is None or mechanism.selection == "all":
        return weights
    return {name: weight * (observation.gradient[name] != 0) for name, weight in weights.items()}


class ProductLikelihood:
    """The `Likelihood` of Gaussian noise, from inner products with candidates' gradients.

    The gradients are not written out (`GradientProducts`).

    log p(y | g) = ⟨y/v, s g⟩ - ½ ‖s g‖²/v - ½ ‖y‖²/v with the noise's variance v, and the factor s
    by which a mechanism clips and scales g.

    Args:
        mechanism: A mechanism to which it `applies`.
        message: The shared message.
        floor: The variance by which evaluations of one gradient differ, as for `Likelihood`.

    Example:
        >>> mechanism = Mechanism(noise="gaussian", variance=0.5)
        >>> likelihood = ProductLikelihood(mechanism, {"w": torch.tensor([1.0])}, {"w": 0.0})
        >>> inner, squares = likelihood.message["w"] * torch.tensor([[0.0], [1.0]]), [0.0, 1.0]
        >>> likelihood(Products({"w": inner}, {"w": torch.tensor(squares)}), 0).tolist()
        [-1.0, 0.0]
    """

    def __init__(self, mechanism: Mechanism, message: Tensors, floor: Mapping[str, float]) -> None:
        self.mechanism = mechanism
        precision = {}
        for name, y in message.items():
            variance = torch.as_tensor(mechanism.variance_of(name), device=y.device) + floor[name]
            precision[name] = variance.flatten()[:1].squeeze() if _is_even(variance) else variance
            precision[name] = 1 / precision[name].float()
        self.message = {name: y * precision[name] for name, y in message.items()}
        self.constant = -sum(
            float((y.float() * self.message[name]).sum(dtype=torch.float64)) / 2
            for name, y in message.items()
        )
        is_entrywise = any(weight.numel() > 1 for weight in precision.values())
        self._precision = precision
        self._noisy = sum(y.numel() for y in message.values())
        self.weights = precision if is_entrywise else None

    @staticmethod
    def applies(mechanism: Mechanism, message: Tensors) -> bool:
        """Return whether products determine the likelihood in single precision.

        They do for noise as large as what it is added to.
        """
        if mechanism.noise != "gaussian" or mechanism.selection != "all" or mechanism.rounding:
            return False
        if mechanism.clip_coordinate is not None or mechanism.has_residual or mechanism.fitted:
            return False
        variances = [torch.as_tensor(mechanism.variance_of(name)) for name in message]
        needs_norms = mechanism.clip_norm is not None or mechanism.relative_to is not None
        if needs_norms and not all(map(_is_even, variances)):
            return False
        power = sum(float(y.square().sum(dtype=torch.float64)) for y in message.values())
        size = sum(y.numel() for y in message.values())
        return 2 * mechanism.mean_variance(message) * size >= power

    def __call__(self, products: Products, place: int) -> Tensor:
        """Return the log-likelihood of K gradients, `(K,)` in float64.

        Args:
            products: Products with `message`, and squares weighed by `weights`.
            place: Which of the products' messages this is.
        """
        inner = torch.stack([products.inner[name][:, place] for name in self.message]).sum(0)
        squares = {name: products.squares[name] for name in self.message}
        scale = torch.full_like(inner, self.mechanism.scale)
        if self.mechanism.clip_norm is not None:
            norms = torch.stack(list(squares.values())).sum(0).sqrt()
            scale = scale * (self.mechanism.clip_norm / norms).clamp(max=1)
        growth = torch.ones_like(inner)
        if self.mechanism.relative_to is not None:  # noise that follows the gradient's own norm
            powers = scale.square() * torch.stack(list(squares.values())).sum(0)
            growth = (powers / self.mechanism.relative_to).clamp(min=1e-12)
        if self.weights is None:
            squares = {n: s * self._precision[n].to(s) for n, s in squares.items()}
        quadratic = torch.stack(list(squares.values())).sum(0)
        misfit = scale * inner - scale.square() * quadratic / 2 + self.constant
        return misfit / growth - self._noisy / 2 * growth.log()


def _is_even(variance: Tensor) -> bool:
    """Return whether the variance is one number for all entries."""
    return (
        variance.numel() < 2 or not any(variance.stride()) or bool(variance.min() == variance.max())
    )
