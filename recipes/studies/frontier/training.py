"""One client's training on SST-2."""

import functools
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed

from ..lib.device import there
from ..lib.text import sst2
from .client import Client
from .settings import BATCH, HELD_OUT, LENGTH

TEXTS = {"--model": "a text encoder and its tokenizer", "--data_dir": "folder of SST-2"}
TEST = ("dev", "test_labelled_sst")


class Task(Client):
    """Sentences, the encoder, and trainings on them. What was trained is kept in `folder`."""

    def __init__(self, model: str, data_dir: str, folder: str | None = None) -> None:
        super().__init__(folder)
        self.name, self._data_dir = model, data_dir
        self.tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        self.processing_class = self.tokenizer

    @functools.cached_property
    def train_rows(self) -> Dataset:
        return self._encoded("train").shuffle(seed=0)

    @functools.cached_property
    def test_rows(self) -> list[dict]:
        return [row for split in TEST for row in self._encoded(split)]

    def _encoded(self, split: str) -> Dataset:
        rows = sst2(self._data_dir, split)
        return rows.map(
            lambda row: self.tokenizer(row["sentence"], truncation=True, max_length=LENGTH),
            remove_columns=["sentence"],
        )

    def start(self, seed: int) -> torch.nn.Module:
        """The encoder with the head that a seed gives it."""
        set_seed(seed)
        return AutoModelForSequenceClassification.from_pretrained(
            self.name, num_labels=2, trust_remote_code=False
        )

    def rows_to_learn(self) -> Dataset:
        """Without those that are held out."""
        return self.train_rows.select(range(HELD_OUT, len(self.train_rows)))

    def right(self, model: torch.nn.Module, rows) -> np.ndarray:
        """`(N,)`, which rows it classifies rightly."""
        model.eval()
        found = np.zeros(len(rows), dtype=bool)
        for some, batch in self.by_length(rows):
            with torch.no_grad():
                classes = model(**batch.to(model.device)).logits.argmax(1).tolist()
            found[some] = [c == rows[i]["label"] for c, i in zip(classes, some, strict=True)]
        return found

    def by_length(self, rows) -> Iterator[tuple[list[int], Mapping[str, torch.Tensor]]]:
        """Batches of 64 texts of about one length, and which rows they are."""
        ids = [row["input_ids"] for row in rows]
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        for start in range(0, len(ids), 64):
            some = order[start : start + 64]
            texts = [{"input_ids": ids[i]} for i in some]
            yield some, self.tokenizer.pad(texts, return_tensors="pt")

    def held_out(self) -> Dataset:
        return self.train_rows.select(range(HELD_OUT))

    def later(self) -> Iterator[dict[str, torch.Tensor]]:
        """Batches to come, of rows that nobody trained on."""
        rows = self.held_out()
        for start in range(0, len(rows) - BATCH + 1, BATCH):
            some = [rows[i] for i in range(start, start + BATCH)]
            texts = [{"input_ids": row["input_ids"]} for row in some]
            batch = dict(self.tokenizer.pad(texts, return_tensors="pt"))
            yield there(batch | {"labels": torch.tensor([row["label"] for row in some])})
