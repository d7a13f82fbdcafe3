"""Simulated trainings of heads, by which settings are chosen: against autograd, and their noise
against the dense factor. And what is held out meanwhile.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hf_gradguard.defenses.correlated import make_factor
from hf_gradguard.heads import private_head
from recipes.studies.lib.linear_heads import (
    HeadSettings,
    cut,
    held_out_sentences,
    mean_accuracy,
    simulated_heads,
    with_constant,
)

STEPS, BATCH, WIDTH, CLASSES = 6, 4, 5, 3


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(STEPS * BATCH, WIDTH, generator=generator)
    return features, torch.arange(STEPS * BATCH) % CLASSES


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_simulated_head_is_what_sgd_makes_of_clipped_samples(momentum: float) -> None:
    features, labels = samples()
    settings = HeadSettings(0.7, STEPS, BATCH, clip=0.8, momentum=momentum)
    (simulated,) = simulated_heads(features, labels, settings, trainings=1, seed=3)
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(3))
    weight = torch.zeros(CLASSES, WIDTH, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.7, momentum=momentum)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    clipped = 0
    for rows in order.split(BATCH):
        total = torch.zeros_like(weight)
        for row in rows:
            loss = F.cross_entropy(features[row] @ weight.T, labels[row])
            (gradient,) = torch.autograd.grad(loss, weight)
            clipped += int(gradient.norm() > 0.8)
            total += gradient * (0.8 / gradient.norm()).clamp(max=1)
        weight.grad = total / BATCH
        optimizer.step()
        schedule.step()
    assert 0 < clipped < len(features)
    torch.testing.assert_close(simulated, weight.detach().T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("correlated", "falling_rate"), [(True, True), (True, False), (False, True)]
)
def test_its_noise_is_that_of_the_factor(correlated: bool, falling_rate: bool) -> None:
    """Features of zero: what is left is noise. Its deviation is that of dense matrices."""
    steps, width = 40, 500
    settings = HeadSettings(2.0, steps, 4, 0.5, 1.5, correlated, falling_rate=falling_rate)
    labels = torch.arange(4 * steps) % CLASSES
    weights = simulated_heads(torch.zeros(4 * steps, width), labels, settings, 8, seed=0)
    column = torch.eye(steps)[0].double()
    if correlated:
        column = make_factor("blt", steps, falling_rate=falling_rate).column(steps)
    place = torch.arange(steps)
    distance = place[:, None] - place
    dense = torch.where(distance >= 0, column[distance.clamp(min=0)], 0.0)
    rates = 1 - place.double() / steps
    sensitivity = dense.norm(dim=0).max()
    expected = (rates @ torch.linalg.inv(dense)).norm() * sensitivity * 2.0 * 0.5 * 1.5 / 4
    assert weights.shape == (8, width, CLASSES)
    assert float(weights.std()) == pytest.approx(float(expected), rel=0.03)  # 12,000 numbers


def test_accuracy_is_the_mean_of_heads() -> None:
    right = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [0.0, 1.0]]])
    assert mean_accuracy(right, torch.eye(2), torch.tensor([0, 1])) == 0.75


def test_phrases_of_what_is_held_out_are_not_learned() -> None:
    whole = [" ".join(f"{word}{place}" for place in range(12)) for word in "abcd"]
    parts = [f"{word}3 {word}4" for word in "abcd"]
    long_parts = [" ".join(text.split()[:11]) for text in whole]
    texts = [*parts, *long_parts, *whole, "a3 a5", "a3"]
    held_out, learned = held_out_sentences(texts, 2)
    assert len(held_out) == 2
    assert {texts[row] for row in held_out} <= set(whole)
    assert all(texts[row] not in texts[other] for row in learned for other in held_out if row < 12)
    letters = {texts[row][0] for row in held_out}
    kept = [row for row, text in enumerate(texts[:12]) if text[0] not in letters]
    assert [row for row in learned if row < 12] == kept
    assert 12 in learned
    assert (13 in learned) == ("a" not in letters)


def test_fewer_directions_and_other_constants_are_those_of_such_a_head() -> None:
    public = torch.randn(40, 9, generator=torch.Generator().manual_seed(0))
    six, four = (private_head(nn.Identity(), public, directions=count) for count in (6, 4))
    rows = {"features": six.features_of(public), "labels": torch.zeros(40)}
    torch.testing.assert_close(cut(rows, 4)["features"], four.features_of(public))
    assert cut(rows, 6) is rows
    changed = with_constant(rows, 0.6)["features"]
    torch.testing.assert_close(changed.norm(dim=1), torch.ones(40))
    torch.testing.assert_close(changed[:, -1], torch.full((40,), 0.6))
    beside = with_constant(rows, 1.0)["features"]
    torch.testing.assert_close(beside[:, :-1].norm(dim=1), torch.ones(40))
    torch.testing.assert_close(beside[:, :-1] * 0.8, changed[:, :-1])
