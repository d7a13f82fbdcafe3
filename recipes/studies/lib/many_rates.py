"""Trainings of a linear head at many learning rates at once, which have samples and noise in
common: what `linear_heads.simulated_heads` makes rate by rate.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_gradguard.defenses.correlated import Banded, Factor, make_factor, sensitivity

from .linear_heads import HeadSettings


def heads_of_rates(
    features: Tensor,
    labels: Tensor,
    settings: HeadSettings,
    rates: Sequence[float],
    classes: int,
    seed: int,
) -> Tensor:
    """Return weights `(width, rates, classes)`.

    Args:
        features: `(N, width)`, with N at least `steps · batch`.
        labels: `(N,)` class ids.
        settings: Of all trainings; the rate is not used, and there is no momentum.
        rates: Learning rates before the first message.
        classes: The number of classes.
        seed: Of the samples' order, and of the noise.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(features), generator=generator)
    width, steps, count = features.shape[1], settings.steps, len(rates)
    factor: Factor = Banded((1.0,))
    if settings.correlated:
        factor = make_factor("blt", steps, falling_rate=settings.falling_rate)
    deviation = settings.noise_multiplier * sensitivity(factor.column(steps))
    memory = torch.zeros(factor.memory, width * classes)
    weights = torch.zeros(width, count, classes)
    scales = torch.tensor(rates)[:, None] / settings.batch
    for step, rows in enumerate(order[: steps * settings.batch].split(settings.batch)):
        samples, remaining = features[rows], 1 - step / steps
        logits = (samples @ weights.view(width, -1)).view(len(rows), count, classes)
        errors = logits.softmax(-1) - F.one_hot(labels[rows], classes)[:, None]
        norms = errors.norm(dim=-1, keepdim=True) * samples.norm(dim=1)[:, None, None]
        errors *= (settings.clip / norms.clamp(min=1e-12)).clamp(max=1) * (scales * remaining)
        weights.view(width, -1).addmm_(samples.T, errors.view(len(rows), -1), alpha=-1)
        if deviation:
            white_noise = torch.randn(memory.shape[1], generator=generator)
            noise, memory = factor.correlate(white_noise, memory)
            noise = noise.view(width, 1, classes) * (settings.clip * deviation * remaining)
            weights.addcmul_(noise.expand_as(weights), scales.expand(count, classes), value=-1)
    return weights


def rightly(weights: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    """Return which rows each head classifies rightly, `(N, rates)`."""
    return torch.cat(
        [
            torch.einsum("nw,wrc->nrc", rows, weights).argmax(-1) == right[:, None]
            for rows, right in zip(features.split(1000), labels.split(1000), strict=True)
        ]
    )
