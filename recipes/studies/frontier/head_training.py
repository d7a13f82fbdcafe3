"""One client's training of a linear head on sentence embeddings that stay as they are."""

import functools
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel, set_seed
from transformers.modeling_outputs import SequenceClassifierOutput

from .client import Client
from .settings import HELD_OUT
from .training import Task


class MeanPooled(nn.Module):
    """A frozen encoder, the means of its last layers' states, and a linear head, which alone is
    shared. It takes texts, or `embeddings` that were made of them before.
    """

    def __init__(self, encoder: PreTrainedModel, layers: int = 1, labels: int = 2) -> None:
        super().__init__()
        self.config, self.layers = encoder.config, layers
        self.encoder = encoder.requires_grad_(False)
        self.head = nn.Linear(layers * encoder.config.hidden_size, labels)

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.get_input_embeddings()

    def embed(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """`(B, T)` or `(B, T, width)` to `(B, layers · width)`."""
        every = self.encoder(
            input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds,
            output_hidden_states=True,
        ).hidden_states  # fmt: skip
        states = torch.cat(every[-self.layers :], -1)
        if attention_mask is None:
            return states.mean(1)
        heard = attention_mask[..., None].to(states)
        return (states * heard).sum(1) / heard.sum(1)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        embeddings: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs,
    ) -> SequenceClassifierOutput:
        if embeddings is None:
            embeddings = self.embed(input_ids, attention_mask, inputs_embeds)
        logits = self.head(embeddings)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class HeadTask(Client):
    """Trainings of heads, on embeddings that are made once and kept in `folder`."""

    def __init__(self, model: str, data_dir: str, folder: str, layers: int = 1) -> None:
        super().__init__(Path(folder) / f"layers-{layers}")
        self.texts = Task(model, data_dir)
        self.tokenizer, self._name, self._layers = self.texts.tokenizer, model, layers

    def start(self, seed: int) -> MeanPooled:
        """The encoder with the head that a seed gives it."""
        set_seed(seed)
        encoder = AutoModel.from_pretrained(self._name, trust_remote_code=False)
        return MeanPooled(encoder, self._layers).eval()

    @functools.cached_property
    def train_rows(self) -> dict[str, Tensor]:
        return self._embedded("train", self.texts.train_rows)

    @functools.cached_property
    def test_rows(self) -> dict[str, Tensor]:
        return self._embedded("test", self.texts.test_rows)

    def rows_to_learn(self) -> Dataset:
        return self._rows_to_learn

    @functools.cached_property
    def _rows_to_learn(self) -> Dataset:
        rows = {name: tensor[HELD_OUT:].numpy() for name, tensor in self.train_rows.items()}
        return Dataset.from_dict(rows).with_format("torch")

    def held_out(self) -> dict[str, Tensor]:
        return {name: tensor[:HELD_OUT] for name, tensor in self.train_rows.items()}

    @torch.no_grad()
    def right(self, model: nn.Module, rows: dict[str, Tensor]) -> np.ndarray:
        return (model(**rows).logits.argmax(1) == rows["labels"]).numpy()

    def _embedded(self, name: str, rows) -> dict[str, Tensor]:
        assert self.folder is not None
        path = Path(self.folder) / f"embeddings-{name}.safetensors"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(self._embed(rows), path)
        return load_file(path)

    @torch.no_grad()
    def _embed(self, rows) -> dict[str, Tensor]:
        model = self.start(0)
        found = torch.zeros(len(rows), model.head.in_features)
        for some, batch in self.texts.by_length(rows):
            found[some] = model.embed(batch["input_ids"], batch["attention_mask"])
        return {"embeddings": found, "labels": torch.tensor([row["label"] for row in rows])}
