"""Batches by Poisson sampling: every row is in one with a probability, independently of the others.

Sampling that others cannot foresee is what makes a row's ε small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.utils.data import Sampler

from ..randomness import Stream
from .clients import Pick
from .partition import Rows

DUMMY = -1
"""The row that stands in an empty batch, for its shapes: the last one."""


@dataclass
class PoissonSampler(Sampler[list[Pick]]):
    """Batches of every rank in turn, of which a rank draws its own; the others' are left empty.

    Args:
        parts: The rows of each client. Client k lives on rank k modulo `ranks`.
        rates: The probability of each client's rows.
        rank: This rank.
        ranks: How many there are.
        rounds: Batches of a rank in an epoch.
        seed: Makes draws reproducible, by anybody. `None`: keys from the operating system.

    Example:
        >>> sampler = PoissonSampler([torch.arange(4).numpy()], [1.0], rank=0, ranks=1, rounds=1)
        >>> [[pick.row for pick in batch] for batch in sampler]
        [[0, 1, 2, 3]]
    """

    parts: Sequence[Rows]
    rates: Sequence[float]
    rank: int
    ranks: int
    rounds: int
    seed: int | None = None
    epoch: int = 0

    def __len__(self) -> int:
        return self.rounds * self.ranks

    def set_epoch(self, epoch: int) -> None:
        """Called by the data loader, so that seeded epochs differ."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[Pick]]:
        stream = Stream()
        if self.seed is not None:
            stream = Stream.from_seeds(self.seed, self.rank, self.epoch, 3)
        share = 1 / len(self.parts)
        for _ in range(self.rounds):
            for rank in range(self.ranks):
                if rank != self.rank:
                    yield []
                    continue
                batch = []
                for client in range(rank, len(self.parts), self.ranks):
                    own = self.parts[client]
                    drawn = stream.uniform((len(own),), dtype=torch.float64) < self.rates[client]
                    rows = own[drawn.numpy()].tolist() or [DUMMY]
                    batch += [Pick(row, client, share) for row in rows]
                yield batch
