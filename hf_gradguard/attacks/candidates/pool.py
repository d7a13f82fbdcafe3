"""Pairs of a candidate and a label, of several messages together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...gradient_map import Tensors
from .inputs import Entries, place_of


@dataclass(frozen=True)
class PairPrior:
    """Which pairs of a pool a message may have.

    Args:
        prior: `(P,)`, of pairs; 0 for those of other messages. Those of one candidate add up to 1.
        label_shares: The share of each of the pool's labels in the message.
    """

    prior: Tensor
    label_shares: dict[int, float]

    @property
    def share(self) -> Tensor:
        """`(P,)`, of the population of candidates: they add up to 1."""
        return self.prior / self.prior.sum()

    def among(self, is_scored: Tensor) -> PairPrior:
        """The same, where it may only have pairs that were scored, `(P,)`."""
        return replace(self, prior=self.prior * is_scored)

    def select(self, rows: list[int], gradient: Tensors) -> tuple[list[int], Tensors]:
        """Which of these pairs it may have, and their gradients, `(K, *parameter.shape)`."""
        possible = (self.prior[rows] > 0).nonzero().flatten()
        if len(possible) < len(rows):
            gradient = {name: g[possible.to(g.device)] for name, g in gradient.items()}
        return [rows[i] for i in possible.tolist()], gradient


class Pool:
    """P pairs of a candidate and a label, as batches of one, each with every label that any of the
    messages may have.

    Texts that are cut to a message's length are other pairs where the length is another.

    Args:
        entries: Of one list, one per message.

    Attributes:
        batches: One per pair.
        candidate: `(P,)`, which of the candidates a pair is of.
        label: Which of the labels of all messages it has.
        size: `(P,)`, what each weighs in a batch's mean loss, in units of their mean.
        units: By what each message is multiplied to be in these.
        priors: One per message.

    Example:
        >>> from hf_gradguard.attacks.candidates.inputs import make_entries
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
        label_shares: list[dict[int, float]] = []
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
            label_shares.append({places[k] if places else k: s for k, s in entry.counts.items()})
        device = entries[0].prior.device
        self.candidate = torch.tensor(candidates, device=device)
        size = torch.tensor(items, device=device)
        self.size = size / size.mean()
        self.units = [entry.mean_items / float(size.mean()) for entry in entries]
        self.priors = []
        for entry, rows, shares in zip(entries, message_rows, label_shares, strict=True):
            prior = entry.prior.new_zeros(len(self.batches))
            prior.index_copy_(0, torch.tensor(rows, device=device), entry.prior)
            self.priors.append(PairPrior(prior, shares))


def _add_label(values: list[Tensor], value: Tensor) -> int:
    """A label's place among these, to which it is added if it is new."""
    place = place_of(values, value)
    if place == len(values):
        values.append(value)
    return place
