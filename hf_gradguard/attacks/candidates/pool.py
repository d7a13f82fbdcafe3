"""Pairs of a candidate and a label, of several messages together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...gradient_map import Tensors
from .candidate_inputs import Entries, place_of


@dataclass(frozen=True)
class PairPrior:
    """The prior of a pool's pairs for one message.

    Args:
        prior: The prior of pairs, `(P,)`; 0 for those of other messages. The numbers of one
            candidate add up to 1.
        label_fractions: The fraction of each of the pool's labels in the message.
    """

    prior: Tensor
    label_fractions: dict[int, float]

    @property
    def fraction(self) -> Tensor:
        """The fractions of pairs in the population of candidates, `(P,)`; they add up to 1."""
        return self.prior / self.prior.sum()

    def among(self, is_scored: Tensor) -> PairPrior:
        """Return the prior restricted to pairs that were scored, a mask `(P,)`."""
        return replace(self, prior=self.prior * is_scored)

    def select(self, rows: list[int], gradient: Tensors) -> tuple[list[int], Tensors]:
        """Return which of these pairs the message may have, and their gradients.

        Args:
            rows: The numbers of K pairs.
            gradient: The candidates' gradients, `(K, *parameter.shape)`.
        """
        possible = (self.prior[rows] > 0).nonzero().flatten()
        if len(possible) < len(rows):
            gradient = {name: g[possible.to(g.device)] for name, g in gradient.items()}
        return [rows[i] for i in possible.tolist()], gradient


class Pool:
    """A pool of P pairs of a candidate and a label, as batches of one.

    It has each candidate with every label that any of the messages may have. A text that is cut to
    a message's length is another pair if the length is another.

    Args:
        entries: The entries of one list, one per message.

    Attributes:
        batches: One batch per pair.
        candidate: Which of the candidates a pair is of, `(P,)`.
        label: Which of the labels of all messages a pair has.
        size: What each pair weighs in a batch's mean loss, `(P,)`, in units of their mean.
        units: The factor that brings each message into these units.
        priors: One prior per message.

    Example:
        >>> from hf_gradguard.attacks.candidates.candidate_inputs import make_entries
        >>> pool = Pool([make_entries(observation, ["a fine film", "a dull plot"], [0, 1])])
        >>> len(pool.batches), pool.label, pool.candidate.tolist()
        (2, [0, 1], [0, 1])
    """

    def __init__(self, entries: Sequence[Entries]) -> None:
        self.batches: list[dict[str, Any]] = []
        self.label: list[int] = []
        row_of: dict[tuple[Any, ...], int] = {}
        values: list[Tensor] = []
        candidates: list[int] = []
        items: list[float] = []
        message_rows: list[list[int]] = []
        label_fractions: list[dict[int, float]] = []
        for entry in entries:
            places = [_add_label(values, value) for value in entry.values]
            labels = [places[label] if places else label for label in entry.label]
            rows = []
            for batch, candidate, label, count in zip(
                entry.batches, entry.candidate.tolist(), labels, entry.items.tolist(), strict=True
            ):
                shape = tuple(t.shape for t in batch.values() if isinstance(t, Tensor))
                row = row_of.setdefault((candidate, label, shape), len(row_of))
                if row == len(self.batches):
                    self.batches.append(batch)
                    self.label.append(label)
                    candidates.append(candidate)
                    items.append(count)
                rows.append(row)
            message_rows.append(rows)
            label_fractions.append({places[k] if places else k: s for k, s in entry.counts.items()})
        device = entries[0].prior.device
        self.candidate = torch.tensor(candidates, device=device)
        size = torch.tensor(items, device=device)
        self.size = size / size.mean()
        self.units = [entry.mean_items / float(size.mean()) for entry in entries]
        self.priors = []
        for entry, rows, fractions in zip(entries, message_rows, label_fractions, strict=True):
            prior = entry.prior.new_zeros(len(self.batches))
            prior.index_copy_(0, torch.tensor(rows, device=device), entry.prior)
            self.priors.append(PairPrior(prior, fractions))


def _add_label(values: list[Tensor], value: Tensor) -> int:
    """Return a label's place among these, and add it if it is new."""
    place = place_of(values, value)
    if place == len(values):
        values.append(value)
    return place
