"""The test of a head's rows, against what is proved of its messages."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hf_gradguard.heads import PrivateHead, private_head
from hf_gradguard.leakage import membership_power
from hf_gradguard.recommend.evidence import pairs_bound
from hf_gradguard.recommend.head_attacks import (
    HeadMessages,
    HeadRows,
    RecognizedRows,
    RowGradients,
    RowTest,
)
from hf_gradguard.training.trainer import GradGuardTrainer

CLASSES, WIDTH, COUNT = 3, 20, 800


def rows_of(head: PrivateHead, count: int, seed: int) -> HeadRows:
    samples = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))
    return HeadRows(head.features_of(samples), samples[:, :CLASSES].argmax(1))


def trial_of(folder: Path, noise_multiplier: float) -> tuple[RowTest, RecognizedRows]:
    """A training on what can be learned, and what the test finds of it."""
    public = torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(0))
    head = private_head(nn.Identity(), public, CLASSES, directions=10)
    rows, others = rows_of(head, COUNT, 1), rows_of(head, 200, 2)
    dataset: Any = [{"features": x, "labels": y} for x, y in zip(*rows, strict=True)]
    args = head.training_arguments(
        str(folder), num_rows=COUNT, noise_multiplier=noise_multiplier, noise_seed=0, seed=0,
        use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    seen = HeadMessages()
    trainer = GradGuardTrainer(head, args, train_dataset=dataset, callbacks=[seen])
    trainer.train()
    assert len(seen.messages) == COUNT // 16
    assert trainer.private_rows is not None
    test = RowTest(seen, trainer.private_rows, rows)
    return test, test.recognized(others, seed=0)


def mean(found: list[float]) -> float:
    assert len(found) == COUNT // 16
    return sum(found) / len(found)


def error(found: list[float]) -> float:
    return statistics.stdev(found) / len(found) ** 0.5


@pytest.mark.parametrize("noise_multiplier", [1.5, 0.3])
def test_what_is_left_of_messages_is_the_noise_that_was_promised(
    tmp_path: Path, noise_multiplier: float
) -> None:
    """Its deviation has an error of 1 / sqrt(2 n), and so have its correlations, times sqrt(2)."""
    test, _ = trial_of(tmp_path, noise_multiplier)
    noise = test.noise.flatten(1)
    five = 5 / noise.numel() ** 0.5
    assert float(noise.mean()) == pytest.approx(0, abs=five)
    assert float(noise.std()) == pytest.approx(1, abs=five)
    for lag in (1, 2, 10):
        assert float((noise[lag:] * noise[:-lag]).mean()) == pytest.approx(0, abs=1.2 * five)


def test_no_more_is_found_than_is_proved(tmp_path: Path) -> None:
    _, found = trial_of(tmp_path, 1.5)
    assert 0.01 < mean(found.rows_found) < membership_power(1.5) + 3 * error(found.rows_found)
    assert 0.5 < mean(found.told_apart) < pairs_bound(1.5) + 3 * error(found.told_apart)


def test_little_noise_hides_little_and_much_hides_all(tmp_path: Path) -> None:
    """A row that was learned has a small gradient: the test finds it no more."""
    _, found = trial_of(tmp_path / "little", 0.1)
    assert mean(found.rows_found) > 0.3
    assert mean(found.told_apart) > 0.8
    _, found = trial_of(tmp_path / "much", 20.0)
    assert mean(found.rows_found) == pytest.approx(0.01, abs=0.012)
    assert mean(found.told_apart) == pytest.approx(0.5, abs=0.06)


def test_gradients_of_rows_are_those_of_their_losses() -> None:
    """By autograd, one row after the other."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(2, CLASSES, 4, generator=generator, dtype=torch.float64)
    features = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    labels, places = torch.tensor([0, 1, 2, 0, 1]), torch.tensor([0, 0, 1, 1, 0])
    test = object.__new__(RowTest)
    test._weights, test._clip = weights, 0.8
    gradients = test._gradients(HeadRows(features, labels), torch.arange(5), places)
    dense = torch.einsum("nc,nd->ncd", gradients.errors, gradients.features)
    for row in range(5):
        weight = weights[places[row]].clone().requires_grad_()
        F.cross_entropy(weight @ features[row], labels[row]).backward()
        assert weight.grad is not None
        clipped = weight.grad * min(1.0, 0.8 / float(weight.grad.norm()))
        torch.testing.assert_close(dense[row], clipped)
    assert (gradients.norms() < 0.8).any()
    torch.testing.assert_close(gradients.norms(), dense.flatten(1).norm(dim=1))
    field = torch.randn(2, CLASSES, 4, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(gradients.along(field), (dense * field[places]).sum((1, 2)))
    other = RowGradients(*(part.flip(0) for part in gradients))
    torch.testing.assert_close(gradients.dot(other), (dense * dense.flip(0)).sum((1, 2)))
