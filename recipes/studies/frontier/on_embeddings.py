"""One client's training of a linear head on embeddings that stay as they are."""

import functools
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers.modeling_outputs import SequenceClassifierOutput

from ..lib.device import DEVICE, there
from .client import Client


def classified(
    head: nn.Linear, embeddings: Tensor, labels: Tensor | None
) -> SequenceClassifierOutput:
    """What a head says of embeddings, and its loss where labels are given."""
    logits = head(embeddings)
    loss = None if labels is None else F.cross_entropy(logits, labels)
    return SequenceClassifierOutput(loss=loss, logits=logits)


class Rows(Dataset):
    """Tensors `{name: (N, ...)}` as a client's rows."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors["labels"])

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {name: tensor[row] for name, tensor in self.tensors.items()}


class OnEmbeddings(Client):
    """Trainings of heads, on embeddings that are made once and kept.

    Args:
        folder: Keeps what was trained.
        embeddings: Keeps embeddings as the encoder makes them, before they are whitened.
    """

    held_back: int  # of the training rows, on which rates are chosen
    whitening: nn.Module

    def __init__(self, folder: Path, embeddings: Path) -> None:
        super().__init__(folder)
        self._embeddings = embeddings

    def embed(self, name: str) -> dict[str, Tensor]:
        """`embeddings` (N, width) and `labels` (N,) of the rows of that name: train or test."""
        raise NotImplementedError

    @functools.cached_property
    def train_rows(self) -> dict[str, Tensor]:
        return self._whitened("train")

    @functools.cached_property
    def test_rows(self) -> dict[str, Tensor]:
        return self._whitened("test")

    def rows_to_learn(self) -> Rows:
        return Rows({name: rows[self.held_back :] for name, rows in self.train_rows.items()})

    def held_out(self) -> dict[str, Tensor]:
        return {name: rows[: self.held_back] for name, rows in self.train_rows.items()}

    @torch.no_grad()
    def right(self, model: nn.Module, rows: dict[str, Tensor]) -> np.ndarray:
        classes = model.to(DEVICE)(**there(rows)).logits.argmax(1)
        return (classes.cpu() == rows["labels"]).numpy()

    @torch.no_grad()
    def _whitened(self, name: str) -> dict[str, Tensor]:
        found = self.kept(name)
        return found | {"embeddings": self.whitening(found["embeddings"])}

    def kept(self, name: str) -> dict[str, Tensor]:
        """As the encoder makes them."""
        path = self._embeddings / f"embeddings-{name}.safetensors"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(self.embed(name), path)
        return load_file(path)
