"""What is learned, from what, and by whom: real SST-2 with a pretrained encoder, or CIFAR-10 with
a small convolutional network. Nothing here is about protection.
"""

import csv
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedConfig
from transformers.modeling_outputs import ImageClassifierOutputWithNoAttention

from hf_gradguard.models import explain_missing_model
from hf_gradguard.training.clients.partition import partition_dirichlet, partition_iid

Batch = dict[str, Tensor]
TESTED = 500


class ConvNet(nn.Module):
    """Two 3 × 3 convolutions with leaky ReLU and max pooling, two dense layers: 32 × 32 pixels in,
    ten classes out.
    """

    main_input_name = "pixel_values"

    def __init__(self) -> None:
        super().__init__()
        self.config = PreTrainedConfig(num_labels=10)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.LeakyReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.LeakyReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * 8 * 8, 64), nn.LeakyReLU(), nn.Linear(64, 10),
        )  # fmt: skip

    def forward(
        self, pixel_values: Tensor, labels: Tensor | None = None
    ) -> ImageClassifierOutputWithNoAttention:
        logits = self.layers(pixel_values)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return ImageClassifierOutputWithNoAttention(loss=loss, logits=logits)


class Task:
    """A model and its data, as a run's configuration says.

    Args:
        config: `task`, `model`, `data`, `batch-size`, `alpha`, `partitioner` and `seed`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.is_text = config["task"] == "sst2"
        self.tokenizer = _tokenizer(config["model"]) if self.is_text else None

    def model(self) -> nn.Module:
        """The same weights on every node."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.config["seed"])
            if self.is_text:
                with explain_missing_model(self.config["model"]):
                    return AutoModelForSequenceClassification.from_pretrained(
                        self.config["model"], num_labels=2, trust_remote_code=False
                    ).eval()
            return ConvNet()

    def batches(self, client: int, clients: int, seed: int) -> Iterator[Batch]:
        """Batches of a client's own rows in random order, without an end."""
        inputs, labels = self._rows("train")
        parts = self.parts(labels, clients)
        order, size = np.random.default_rng([seed, client]), self.config["batch-size"]
        while True:
            rows = order.permutation(parts[client])
            for first in range(0, len(rows) - size + 1, size):
                yield self._batch(inputs, labels, rows[first : first + size])

    def parts(self, labels: np.ndarray, clients: int) -> list[np.ndarray]:
        """Rows of each client, the same division on every node."""
        alpha, seed = self.config["alpha"], self.config["seed"]
        if self.config["partitioner"] == "flwr-datasets":
            return _parts_of_flower(labels, clients, alpha, seed)
        if self.config["partitioner"] != "hf-gradguard":
            raise ValueError("partitioner must be 'hf-gradguard' or 'flwr-datasets'.")
        draws = np.random.default_rng(seed)
        if alpha:
            return partition_dirichlet(labels, clients, alpha, draws)
        return partition_iid(len(labels), clients, draws)

    def accuracy(self, model: nn.Module) -> float:
        """Of held-out rows."""
        inputs, labels = self._rows("test")
        right, model = 0, model.eval()
        tested = np.arange(len(labels))[:TESTED]
        for first in range(0, len(tested), 50):
            batch = self._batch(inputs, labels, tested[first : first + 50])
            with torch.no_grad():
                right += int((model(**batch).logits.argmax(1) == batch["labels"]).sum())
        return right / len(tested)

    def _rows(self, split: str) -> tuple[Any, np.ndarray]:
        return (_sentences if self.is_text else _images)(self.config["data"], split)

    def _batch(self, inputs: Any, labels: np.ndarray, rows: np.ndarray) -> Batch:
        truth = torch.from_numpy(labels[rows])
        if not self.is_text:
            pixels = torch.from_numpy(inputs[rows]).permute(0, 3, 1, 2).float() / 255
            return {"pixel_values": pixels, "labels": truth}
        texts = [inputs[row] for row in rows]
        batch = dict(self.tokenizer(texts, padding=True, truncation=True, max_length=64,
                                    return_tensors="pt"))  # fmt: skip
        return batch | {"labels": truth}


def _parts_of_flower(labels: np.ndarray, clients: int, alpha: float, seed: int) -> list[np.ndarray]:
    from datasets import Dataset
    from flwr_datasets.partitioner import DirichletPartitioner, IidPartitioner

    made = (
        DirichletPartitioner(clients, "label", alpha, seed=seed)
        if alpha
        else IidPartitioner(clients)
    )
    made.dataset = Dataset.from_dict({"row": np.arange(len(labels)), "label": labels})
    return [np.array(made.load_partition(client)["row"]) for client in range(clients)]


@cache
def _tokenizer(name: str) -> Any:
    with explain_missing_model(name):
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


@cache
def _sentences(folder: str, split: str) -> tuple[list[str], np.ndarray]:
    path = Path(folder) / ("train.tsv" if split == "train" else "dev.tsv")
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [row["sentence"] for row in rows], np.array([int(row["label"]) for row in rows])


@cache
def _images(path: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    with np.load(path) as file:
        x, y = file["x"], file["y"].astype(np.int64)
    return (x[:-TESTED], y[:-TESTED]) if split == "train" else (x[-TESTED:], y[-TESTED:])
