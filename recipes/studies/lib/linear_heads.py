"""Many trainings of a linear head at once, by which settings are chosen: SGD by clipped samples
with a rate that falls to zero, each sample in one message, as `GradGuardTrainer` does it under
`dp_sgd`. Noise here is drawn in float32 by torch's generator, so it protects nobody.
"""

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_gradguard.defenses.correlated import Banded, Factor, make_factor, sensitivity

WORDS = 10  # of a phrase that may be held out


@dataclass(frozen=True)
class HeadSettings:
    """Of a training.

    Args:
        learning_rate: Before the first message.
        steps: Messages.
        batch: Samples of each.
        clip: Of a sample's gradient.
        noise_multiplier: Of all messages together, in clips.
        correlated: Whether noise cancels in the weights.
        momentum: Of SGD.
        falling_rate: Whether the correlation is planned for the rate that is used here.
    """

    learning_rate: float
    steps: int
    batch: int
    clip: float = math.inf
    noise_multiplier: float = 0.0
    correlated: bool = False
    momentum: float = 0.0
    falling_rate: bool = True


def simulated_heads(
    features: Tensor, labels: Tensor, settings: HeadSettings, trainings: int, seed: int
) -> Tensor:
    """Weights `(trainings, width, classes)` of trainings that differ in their noise alone.

    Args:
        features: `(N, width)`, with N at least `steps · batch`.
        labels: `(N,)` class ids.
        settings: Of all trainings.
        trainings: How many.
        seed: Of the samples' order, and of the noise.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(features), generator=generator)
    width, classes, steps = features.shape[1], int(labels.max()) + 1, settings.steps
    factor: Factor = Banded((1.0,))
    if settings.correlated:
        factor = make_factor("blt", steps, falling_rate=settings.falling_rate)
    deviation = settings.noise_multiplier * sensitivity(factor.column(steps))
    memory = torch.zeros(factor.memory, trainings * width * classes)
    weights = torch.zeros(trainings, width, classes)
    velocity = torch.zeros_like(weights)
    for step, rows in enumerate(order[: steps * settings.batch].split(settings.batch)):
        samples = features[rows]
        errors = (samples @ weights).softmax(-1) - F.one_hot(labels[rows], classes)
        norms = errors.norm(dim=2) * samples.norm(dim=1)
        errors = errors * (settings.clip / norms.clamp(min=1e-12)).clamp(max=1)[..., None]
        total = samples.T @ errors
        if deviation:
            white_noise = torch.randn(memory.shape[1], generator=generator)
            noise, memory = factor.correlate(white_noise, memory)
            total += settings.clip * deviation * noise.view_as(total)
        velocity = settings.momentum * velocity + total / settings.batch
        weights -= settings.learning_rate * (1 - step / steps) * velocity
    return weights


def mean_accuracy(weights: Tensor, features: Tensor, labels: Tensor) -> float:
    """Of all trainings' heads."""
    return float(((features @ weights).argmax(-1) == labels).double().mean())


def cut(rows: dict[str, Tensor], directions: int) -> dict[str, Tensor]:
    """Features as `private_head` makes them by the first directions alone."""
    features = rows["features"]
    if directions >= features.shape[1] - 1:
        return rows
    constant = features[:, -1:]
    kept = nn.functional.normalize(features[:, :directions]) * (1 - constant**2).sqrt()
    return rows | {"features": torch.cat([kept, constant], 1)}


def with_constant(rows: dict[str, Tensor], constant: float) -> dict[str, Tensor]:
    """With another constant among the features, within norm 1; 1: beside it, as a bias is."""
    kept = nn.functional.normalize(rows["features"][:, :-1])
    if constant < 1:
        kept = kept * (1 - constant**2) ** 0.5
    column = torch.full((len(kept), 1), constant)
    return rows | {"features": torch.cat([kept, column], 1)}


def held_out_sentences(texts: Sequence[str], count: int) -> tuple[list[int], list[int]]:
    """Which of them to hold out, and which to learn: SST-2's are phrases of each other.

    Returns:
        Some long texts that are part of no other one, and what is part of none of these.
    """
    texts = [" ".join(text.split()) for text in texts]
    by_words: dict[tuple[str, ...], list[str]] = defaultdict(list)
    whole = []
    for row in sorted(range(len(texts)), key=lambda row: -len(texts[row])):
        words = texts[row].split()
        if len(words) < WORDS:
            continue
        triples = list(zip(words, words[1:], words[2:], strict=False))
        if not any(f" {texts[row]} " in f" {longer} " for longer in by_words[triples[0]]):
            whole.append(row)
            for triple in set(triples):
                by_words[triple].append(texts[row])
    random.Random(0).shuffle(whole)
    held_out = whole[:count]
    together = "\n".join(f" {texts[row]} " for row in held_out)
    return held_out, [row for row, text in enumerate(texts) if f" {text} " not in together]
