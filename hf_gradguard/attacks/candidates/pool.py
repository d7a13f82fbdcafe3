"""Candidates of several messages: each once with each label that any of the messages may have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...gradient_map import Tensors
from .entries import Entries, place_of

T = TypeVar("T")


@dataclass(frozen=True)
class Asked:
    """What a message may have of a pool.

    Args:
        prior: `(P,)`, of pairs; 0 for those of other messages. Those of one candidate add up to 1.
        counts: The share of each of the pool's labels in the message.
    """

    prior: Tensor
    counts: dict[int, float]

    @property
    def share(self) -> Tensor:
        """`(P,)`, of the population of candidates: they add up to 1."""
        return self.prior / self.prior.sum()

    def of(self, rows: list[int], gradient: Tensors) -> tuple[list[int], Tensors]:
        """Which of these pairs it may have, and their gradients, `(K, *parameter.shape)`."""
        mine = (self.prior[rows] > 0).nonzero().flatten()
        if len(mine) < len(rows):
            gradient = {name: g[mine.to(g.device)] for name, g in gradient.items()}
        return [rows[i] for i in mine.tolist()], gradient


class Pool:
    """P pairs of a candidate and a label, as batches of one.

    Texts that are cut to a message's length are other pairs where the length is another.

    Args:
        entries: Of one list, one per message.

    Attributes:
        batches: One a pair.
        candidate: `(P,)`, which of the candidates a pair is of.
        label: Which of the labels of all messages it has.
        size: `(P,)`, what each weighs in a batch's mean loss, in units of their mean.
        units: By what each message is multiplied to be in these.
        asked: One a message.

    Example:
        >>> from hf_gradguard.attacks.candidates.entries import make_entries
        >>> pool = Pool([make_entries(seen, ["a fine film", "a dull plot"], [0, 1])])
        >>> len(pool.batches), pool.label, pool.candidate.tolist()
        (2, [0, 1], [0, 1])
    """

    def __init__(self, entries: Sequence[Entries]) -> None:
        self.batches: list[dict[str, Any]] = []
        self.label: list[int] = []
        rows: dict[tuple[Any, ...], int] = {}
        values: list[Tensor] = []
        candidates: list[int] = []
        items: list[float] = []
        found = []
        for one in entries:
            places = [_added(values, value) for value in one.values]
            labels = [places[label] if places else label for label in one.label]
            at = []
            for batch, candidate, label, count in zip(
                one.batches, one.candidate.tolist(), labels, one.items.tolist(), strict=True
            ):
                shape = tuple(t.shape for t in batch.values() if isinstance(t, Tensor))
                row = rows.setdefault((candidate, label, shape), len(rows))
                if row == len(self.batches):
                    self.batches.append(batch)
                    self.label.append(label)
                    candidates.append(candidate)
                    items.append(count)
                at.append(row)
            counts = {places[k] if places else k: share for k, share in one.counts.items()}
            found.append((torch.tensor(at), one.prior, counts))
        device = entries[0].prior.device
        self.candidate = torch.tensor(candidates, device=device)
        size = torch.tensor(items, device=device)
        self.size = size / size.mean()
        self.units = [one.mean_items / float(size.mean()) for one in entries]
        self.asked = [Asked(self._spread(at, prior), counts) for at, prior, counts in found]

    def _spread(self, at: Tensor, prior: Tensor) -> Tensor:
        return prior.new_zeros(len(self.batches)).index_copy_(0, at.to(prior.device), prior)


def evenly(listed: Sequence[T], count: int) -> Sequence[T]:
    """So many of them at most, from all over the list."""
    return listed[:: max(1, len(listed) // count)][:count]


def _added(values: list[Tensor], value: Tensor) -> int:
    """Its place among these, to which it is added if it is new."""
    place = place_of(values, value)
    if place == len(values):
        values.append(value)
    return place
