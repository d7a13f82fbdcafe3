"""The best test of all messages of a head's training, for rows of a training that is at hand.

It knows all that a proof lets an attacker know: the weights before each message, the noise's
covariance, in which message a row would be, and all other rows. What is left is Gaussian noise,
and no test of a row is better than the likelihood ratio (Neyman and Pearson). An attacker that has
a list of candidates, and does not know the other rows, has no better one. So what is found says how
near a training comes to its bound. It is measured, and promises nothing.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import TrainerCallback

from ..defenses.correlated import CorrelatedNoise
from ..training.privacy.private_rows import PrivateRows
from .evidence import FALSE_ALARMS

MOST_ENTRIES = 20_000_000
"""The most numbers of all messages together for a test, which keeps five times as many."""
_CHUNK = 256  # rows at once, each with a matrix of its own


class HeadRows(NamedTuple):
    """Rows that a head is trained on or judged by.

    Args:
        features: The features, `(N, directions + 1)`.
        labels: The class ids, `(N,)`.
    """

    features: Tensor
    labels: Tensor


class HeadMessages(TrainerCallback):
    """A callback that keeps what a server sees of a head's training.

    Attributes:
        weights: The head's weights before each message.
        messages: The messages.
    """

    def __init__(self) -> None:
        self.weights, self.messages = list[Tensor](), list[Tensor]()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        weight = kwargs["model"].head.weight
        self.weights.append(weight.detach().cpu().double().clone())
        self.messages.append(weight.grad.detach().cpu().double().clone())


class RecognizedRows(NamedTuple):
    """The findings of the test, for each message of a training.

    Rows of one message share its noise. So what was found of them is no independent sample each.

    Args:
        rows_found: The fraction of a message's rows that were found, where `FALSE_ALARMS` of the
            samples that are in no message would be.
        told_apart: The fraction of a message's rows that were taken for themselves, and not for
            another sample in their place.
    """

    rows_found: list[float]
    told_apart: list[float]


class RowGradients(NamedTuple):
    """The clipped gradients of rows, each the outer product of two vectors.

    Args:
        errors: How far scores are from the label, scaled down to the clip, `(N, classes)`.
        features: The rows' features, `(N, directions + 1)`.
        places: The message that each is looked for in, `(N,)`.
    """

    errors: Tensor
    features: Tensor
    places: Tensor

    def norms(self) -> Tensor:
        return self.errors.norm(dim=1) * self.features.norm(dim=1)

    def dot(self, other: RowGradients) -> Tensor:
        """Return each row's inner product with another's."""
        return (self.errors * other.errors).sum(1) * (self.features * other.features).sum(1)

    def along(self, matrices: Tensor) -> Tensor:
        """Return each row's inner product with its message's matrix."""
        return (self.errors * scores_of(matrices, self.features, self.places)).sum(1)


def scores_of(matrices: Tensor, features: Tensor, places: Tensor) -> Tensor:
    """Return the product of each row's features with the matrix of its message, `(N, classes)`.

    Args:
        matrices: A matrix for each message, `(T, classes, d)`.
        features: Features, `(N, d)`.
        places: The messages of the rows, `(N,)`.
    """
    chunks = zip(features.split(_CHUNK), places.split(_CHUNK), strict=True)
    return torch.cat(
        [torch.einsum("ncd,nd->nc", matrices[at_places], rows) for rows, at_places in chunks]
    )


class RowTest:
    """The likelihood ratio of each row of a training, whose messages are known.

    Args:
        transcript: The weights and messages of the training.
        private: The `dp_sgd` of the training: correlated noise, each row in one message, and a rate
            that falls to zero.
        rows: What it was trained on.

    Attributes:
        noise: What is left of all messages without the rows, `(T, classes, directions + 1)`,
            uncorrelated and in units of the noise. It is standard normal if messages are as they
            are proved to be.
    """

    def __init__(self, transcript: HeadMessages, private: PrivateRows, rows: HeadRows) -> None:
        count, sigma, defense = len(transcript.messages), private.noise_multiplier, private.defense
        assert sigma is not None  # it was trained
        self._weights, self._clip = torch.stack(transcript.weights), defense.clip
        batches = [[place.row for place in batch] for batch in private.sampler()][:count]
        sizes = torch.tensor(list(map(len, batches)))
        numbers = torch.tensor([row for batch in batches for row in batch])
        places = torch.arange(count).repeat_interleave(sizes)
        self._members = self._gradients(rows, numbers, places)
        planned: Any = replace(defense, messages=count, falling_rate=True)
        noise: CorrelatedNoise = planned.noise_at({}, 0)
        deviation = sigma * self._clip * noise.sensitivity(1, None)
        factor = _lower_triangular(noise.factor.column(count)) / deviation
        residual = torch.stack(transcript.messages) * private.batch_size
        for place in range(count):
            errors, features = (entries[places == place] for entries in self._members[:2])
            residual[place] -= errors.T @ features
        self.noise = torch.tensordot(factor, residual, dims=1)
        self._heard = torch.tensordot(factor.T, self.noise, dims=1)
        self._loudness = factor.norm(dim=0)

    def _gradients(self, rows: HeadRows, numbers: Tensor, places: Tensor) -> RowGradients:
        """Return the gradients of some rows at the weights before messages."""
        features = rows.features[numbers].double()
        scores = scores_of(self._weights, features, places)
        errors = scores.softmax(-1) - F.one_hot(rows.labels[numbers].long(), scores.shape[1])
        unclipped = RowGradients(errors, features, places)
        clipped = (self._clip / unclipped.norms().clamp(min=self._clip))[:, None]
        return unclipped._replace(errors=errors * clipped)

    def recognized(self, nonmembers: HeadRows, seed: int) -> RecognizedRows:
        """Return what the test finds of each row of the training.

        Args:
            nonmembers: Samples that were not trained on, one of which stands in each row's place.
            seed: The seed of these places.
        """
        members = self._members
        heard, distance = members.along(self._heard), self._distance(members.norms())
        # What the noise holds of a sample that is in no message is standard normal.
        rows_found = heard / distance + distance > NormalDist().inv_cdf(1 - FALSE_ALARMS)
        random = np.random.default_rng(seed)
        numbers = torch.from_numpy(
            random.integers(len(nonmembers.labels), size=len(members.places))
        )
        decoys = self._gradients(nonmembers, numbers, members.places)
        squares = members.dot(members) + decoys.dot(decoys) - 2 * members.dot(decoys)
        distance = self._distance(squares.clamp(min=0).sqrt())
        told_apart = (heard - decoys.along(self._heard)) / distance + distance / 2 > 0  # the middle
        return RecognizedRows(self._by_message(rows_found), self._by_message(told_apart))

    def _by_message(self, is_right: Tensor) -> list[float]:
        counts = torch.bincount(self._members.places, minlength=len(self._weights))
        sums = torch.bincount(self._members.places, is_right.double(), len(self._weights))
        by_message: list[float] = (sums / counts).tolist()
        return by_message

    def _distance(self, norms: Tensor) -> Tensor:
        """Return how far members' gradients move all messages, in deviations of the noise."""
        return (norms * self._loudness[self._members.places]).clamp(min=1e-300)


def _lower_triangular(column: Tensor) -> Tensor:
    """Return the Toeplitz matrix of a first column, with zeros above the diagonal."""
    number = torch.arange(len(column))
    return torch.tril(column[(number[:, None] - number).abs()])
