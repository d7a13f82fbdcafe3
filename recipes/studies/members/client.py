"""A client that owns half of a pool of images of CIFAR-10, another half for every seed."""

from pathlib import Path

import torch
from torch import Tensor

from ..frontier.image_training import Images, ImageTask


class Owner(ImageTask):
    """One client, and its training.

    Args:
        data: All images, loaded once for all clients.
        folder: Keeps what was trained.
        pool: How many images there are that a client may own.
        seed: Says which half it owns; others' halves say nothing of it.
    """

    def __init__(self, data: ImageTask, folder: str, pool: int, seed: int) -> None:
        super().__init__("", "", str(Path(folder) / f"members-{pool}"))
        self.train_rows, self.test_rows = data.train_rows, data.test_rows
        kept_out = len(self.held_out()[1])
        self.pool = tuple(part[kept_out : kept_out + pool] for part in data.train_rows)
        draws = torch.Generator().manual_seed(seed)
        self.owned: Tensor = torch.randperm(pool, generator=draws) < pool // 2

    def rows_to_learn(self) -> Images:
        """Its half of the pool."""
        return Images(*(part[self.owned] for part in self.pool))

    def learned(self, cell: dict) -> dict:
        """Accuracies on images that nobody trained on and on its own, and what a proof says."""
        found = super().learned(cell)
        own = self.rows_to_learn()
        right = self.right(self.stage(cell, "end").model, (own.pixels, own.labels))
        more = {key: found[key] for key in ("accuracy", "epsilon") if key in found}
        return {"trained_on": float(right.mean()), **more}
