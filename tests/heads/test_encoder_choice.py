"""A private choice among encoders: what it draws, and what one row can change."""

import math

import pytest
import torch
from scipy.stats import chisquare
from torch import nn

from hf_gradguard.heads import choose_encoder, private_head
from hf_gradguard.heads.choice import draw, group_losses

DRAWS = 5_000


class Columns(nn.Module):
    """Some of an image's entries, as features."""

    def __init__(self, columns: slice) -> None:
        super().__init__()
        self.columns = columns

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels.flatten(1)[:, self.columns]


@pytest.mark.parametrize("votes", [(3, 1, 0), (2, 2), (0, 5, 5, 1)])
@pytest.mark.parametrize("epsilon", [0.5, 1.0, 4.7])
def test_draws_have_the_exponential_mechanisms_law(votes, epsilon):
    counts = torch.tensor([draw(votes, epsilon) for _ in range(DRAWS)]).bincount(
        minlength=len(votes)
    )
    weights = torch.tensor([math.exp(epsilon * count / 2) for count in votes])
    expected = (weights / weights.sum() * DRAWS).double()
    assert chisquare(counts.double(), expected * DRAWS / expected.sum()).pvalue > 1e-4


def test_one_row_changes_one_vote_at_most():
    generator = torch.Generator().manual_seed(0)
    features = [torch.randn(200, 6, generator=generator) for _ in range(3)]
    labels = torch.randint(2, (200,), generator=generator)
    places = torch.randint(10, (200,), generator=generator).tolist()

    def votes(rows):
        targets = nn.functional.one_hot(labels[rows], 2).float()
        kept = [places[row] for row in rows]
        losses = [group_losses(part[rows], targets, kept, True) for part in features]
        return torch.stack(losses).argmin(0)

    before = votes(list(range(200)))
    for removed in range(0, 200, 7):
        after = votes([row for row in range(200) if row != removed])
        changed = (before != after).nonzero().flatten().tolist()
        assert changed in ([], [places[removed]])


@pytest.mark.parametrize("is_class", [True, False])
def test_a_groups_loss_is_that_of_rows_left_out(is_class):
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(12, 5, generator=generator).double()
    classes = torch.randint(3, (12,), generator=generator)
    targets = nn.functional.one_hot(classes, 3).double()
    (found,) = group_losses(rows, targets, [0] * 12, is_class)
    losses = []
    for ridge in (1e-3, 1e-2, 1e-1):
        size = ridge * 12 * float((rows @ rows.T).diagonal().mean())
        errors = []
        for left_out in range(12):
            others = [row for row in range(12) if row != left_out]
            fit = rows[others].T @ rows[others] + size * torch.eye(5).double()
            weights = torch.linalg.solve(fit, rows[others].T @ targets[others])
            errors.append(targets[left_out] - rows[left_out] @ weights)
        predicted = (targets - torch.stack(errors)).argmax(1)
        squared = float(torch.stack(errors).square().mean() / targets.square().mean())
        wrong = float((predicted != classes).double().mean())
        losses.append(wrong + 1e-6 * min(squared, 1) if is_class else squared)
    assert float(found) == pytest.approx(min(losses), abs=1e-9)


def test_the_encoder_that_sees_the_classes_is_chosen():
    generator = torch.Generator().manual_seed(0)
    public = torch.rand(60, 1, 4, 4, generator=generator)
    images = torch.rand(160, 1, 4, 4, generator=generator)
    labels = torch.arange(160) % 2
    images[:, 0, 3] += labels[:, None]  # the last row of an image shows its class
    heads = {
        name: private_head(Columns(columns), public, task="image-classification")
        for name, columns in (("first", slice(8)), ("last", slice(8, 16)))
    }
    rows = [
        {"image": image, "label": int(label)} for image, label in zip(images, labels, strict=True)
    ]
    chosen = [choose_encoder(heads, rows, epsilon=4.0) for _ in range(3)]
    assert chosen == ["last"] * 3
    without_information = {choose_encoder(heads, rows, epsilon=1e-6) for _ in range(14)}
    assert without_information == {"first", "last"}


def test_what_cannot_be_chosen_by_is_refused():
    head = private_head(Columns(slice(8)), torch.rand(9, 1, 4, 4), task="image-classification")
    rows = [{"image": torch.rand(1, 4, 4), "label": 0}] * 20
    with pytest.raises(ValueError, match="80 rows or more"):
        choose_encoder({"one": head}, rows)
    with pytest.raises(ValueError, match="above 0"):
        choose_encoder({"one": head}, rows, epsilon=0.0, groups=4)
