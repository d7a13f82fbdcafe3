"""A choice among encoders by private rows, whose ε is counted.

Rows are dealt at random into groups. In each group a small classifier is fit on each encoder's
features, and the encoder that predicts best what was left out gets the group's vote. A row is in
one group, so it changes one vote. The exponential mechanism then draws an encoder by the number of
votes: only its name leaves, and no vote does.

References: Nissim, Raskhodnikova and Smith, "Smooth Sensitivity and Sampling in Private Data
Analysis" (2007): sample and aggregate. McSherry and Talwar, "Mechanism Design via Differential
Privacy" (2007): the exponential mechanism. Canonne, Kamath and Steinke, "The Discrete Gaussian for
Differential Privacy" (2020): exact draws of probability exp(-x).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .head import PrivateHead

__all__ = ["choose_encoder"]

GROUPS = 40
"""How many votes there are. With ε = 1, an encoder that gets 30 of 40 is chosen in 99 % of runs."""
_MOST_ROWS = 500  # of a group: time grows with the cube of them
_TIE = 1e-6  # times the squared error: less than one wrong row of a group
_RIDGES = (1e-3, 1e-2, 1e-1)  # of the mean squared norm of a group's rows


def choose_encoder(
    heads: Mapping[str, PrivateHead],
    rows: Any,
    epsilon: float = 1.0,
    groups: int = GROUPS,
) -> str:
    """Return the name of a head whose encoder suits rows well, by an ε-private choice.

    The rows may be trained on afterwards. Then ε of this choice adds to ε of the training. Of
    several clients one chooses, and tells the others; only its rows pay.

    Args:
        heads: Untrained heads by name, as `private_head` returns them. Their directions are cut to
            as many as a training on these rows takes.
        rows: Texts or images with labels, as `GradGuardTrainer` takes them.
        epsilon: ε of the choice, for one row that is replaced, added or removed. δ is 0.
        groups: The number of groups. A group should have 20 rows or more.

    Raises:
        ValueError: If there are no heads, ε is not above 0, there are fewer than two rows for each
            group, or a head is for words.

    Example:
        >>> from hf_gradguard.heads import private_head
        >>> settings = {"num_labels": 2, "processing_class": tokenizer}
        >>> heads = {"one": private_head(model, public_texts, **settings)}
        >>> rows = [{"text": "a fine film", "label": 1}, {"text": "a plot", "label": 0}] * 4
        >>> choose_encoder(heads, rows, groups=2)
        'one'
    """
    if not heads or not epsilon > 0:
        raise ValueError(f"A choice takes heads and ε above 0, not {len(heads)} and {epsilon}.")
    if len(rows) < 2 * groups:
        raise ValueError(f"{groups} groups take {2 * groups} rows or more, not {len(rows)}.")
    if any(head.reads_words for head in heads.values()):
        raise ValueError("Encoders for words are not chosen: try them on public data.")
    # A key of its own deals each row, so that one row more or less moves no other.
    keys = [secrets.randbits(63) for _ in range(len(rows))]
    order = torch.tensor(keys).argsort()
    places, losses = [keys[row] % groups for row in order.tolist()], []
    for head in heads.values():
        head.fit_directions(len(rows))  # so that a training finds these features made
        prepared = head.prepare_dataset(rows)[:]
        is_class = head.config.problem_type == "single_label_classification"
        features, targets = prepared["features"][order], targets_of(head, prepared)[order]
        losses.append(group_losses(features, targets, places, is_class))
    votes = torch.stack(losses).argmin(0).bincount(minlength=len(heads))
    return list(heads)[draw(votes.tolist(), epsilon)]


def targets_of(head: PrivateHead, prepared: Mapping[str, Tensor]) -> Tensor:
    """Return what a linear classifier of prepared rows is fit to, `(N, labels)`.

    Args:
        head: The head that prepared them.
        prepared: The rows.
    """
    labels = prepared["labels"]
    if head.config.problem_type in ("regression", "multi_label_classification"):
        return labels.float().reshape(len(labels), -1)
    return F.one_hot(labels, head.config.num_labels).float()


def group_losses(
    features: Tensor, targets: Tensor, places: Sequence[int], is_class: bool
) -> Tensor:
    """Return how badly each group's rows are predicted by the others of the group, `(groups,)`.

    For classes that is the share of rows with a wrong class, and of equal shares the squared error
    decides. Otherwise it is the squared error. Of a large group the first 500 rows count.

    Args:
        features: Features of norm 1, `(N, width)`.
        targets: What they should give, `(N, labels)`.
        places: The group of each row.
        is_class: Whether targets are 1 for a row's class and 0 for the others.
    """
    groups, losses = torch.tensor(places), []
    for place in range(int(groups.max()) + 1):
        rows = (groups == place).nonzero().flatten()[:_MOST_ROWS]
        losses.append(_loss(features[rows], targets[rows], is_class))
    return torch.stack(losses)


def _loss(features: Tensor, targets: Tensor, is_class: bool) -> Tensor:
    """Return the loss of predictions of each row by ridge regression on the others.

    Leaving one out has a closed form: the residual of all, over the diagonal of the inverse.
    """
    if len(features) < 2:
        return torch.tensor(0.0)
    rows, wanted = features.double(), targets.double()
    kernel = rows @ rows.T
    identity = kernel.diagonal().mean() * torch.eye(len(rows)).double()
    losses = []
    for ridge in _RIDGES:
        inverse = torch.linalg.inv(kernel + ridge * len(rows) * identity)
        errors = inverse @ wanted / inverse.diagonal()[:, None]
        squared = errors.square().mean() / wanted.square().mean().clamp(min=1e-12)
        wrong = ((wanted - errors).argmax(1) != wanted.argmax(1)).double().mean()
        losses.append(wrong + _TIE * squared.clamp(max=1) if is_class else squared)
    return torch.stack(losses).min()


def draw(votes: Sequence[int], epsilon: float) -> int:
    """Return a place, drawn with a probability in proportion to exp(ε · votes / 2), exactly.

    A row changes one vote, so it moves two counts by 1, and every probability by at most e^ε.

    Args:
        votes: The number of votes for each place.
        epsilon: ε.

    Example:
        >>> draw([40, 0], epsilon=100.0)
        0
    """
    most = max(votes)
    half = Fraction(epsilon) / 2
    while True:  # a place at random is kept with probability exp(-ε (most - votes) / 2)
        place = secrets.randbelow(len(votes))
        if _happens(half * (most - votes[place])):
            return place


def _happens(exponent: Fraction) -> bool:
    """Return whether an event of probability exp(-exponent) happens."""
    while exponent > 1:
        if not _happens(Fraction(1)):
            return False
        exponent -= 1
    count = 1
    while secrets.randbelow(exponent.denominator * count) < exponent.numerator:
        count += 1
    return count % 2 == 1
