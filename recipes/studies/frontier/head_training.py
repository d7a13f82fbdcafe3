"""One client's training of a linear head on sentence embeddings that stay as they are."""

import functools
import random
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel, set_seed
from transformers.modeling_outputs import SequenceClassifierOutput

from ...head import SHRINKAGE, whitening_of
from ..lib.device import DEVICE, there
from .corpora import usual_sentences
from .on_embeddings import OnEmbeddings, classified
from .settings import HELD_OUT, LENGTH, PUBLIC
from .training import Task


class MeanPooled(nn.Module):
    """A frozen encoder, the means of its last layers' states, perhaps whitened, and a linear head,
    which alone is shared. It takes texts, or `embeddings` that were made of them before.
    """

    def __init__(
        self, encoder: PreTrainedModel, layers: int, whitening: nn.Module, labels: int = 2
    ) -> None:
        super().__init__()
        self.config, self.layers = encoder.config, layers
        self.encoder = encoder.requires_grad_(False)
        self.whitening = whitening.requires_grad_(False)
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
            return self.whitening(states.mean(1))
        heard = attention_mask[..., None].to(states)
        return self.whitening((states * heard).sum(1) / heard.sum(1))

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
        return classified(self.head, embeddings, labels)


class HeadTask(OnEmbeddings):
    """Heads on sentence embeddings. Those are whitened if there is a `public` text, a paragraph a
    line.
    """

    def __init__(
        self, model: str, data_dir: str, folder: str, layers: int = 1, public: str | None = None
    ) -> None:
        name = f"layers-{layers}"
        trained = name if public is None else f"{name}-whitened"
        super().__init__(Path(folder) / trained, Path(folder) / name)
        self.texts = Task(model, data_dir)
        self.tokenizer, self._name = self.texts.tokenizer, model
        self._layers, self._public = layers, public

    @property
    def held_back(self) -> int:
        return HELD_OUT

    def start(self, seed: int) -> MeanPooled:
        """The encoder with the head that a seed gives it."""
        return self._started(seed, self.whitening)

    def _started(self, seed: int, whitening: nn.Module) -> MeanPooled:
        set_seed(seed)
        encoder = AutoModel.from_pretrained(self._name, trust_remote_code=False)
        return MeanPooled(encoder, self._layers, whitening).eval()

    @functools.cached_property
    def whitening(self) -> nn.Module:
        """By sentences that are nobody's secret."""
        if self._public is None:
            return nn.Identity()
        return whitening_of(self.kept("public")["embeddings"], SHRINKAGE)

    def _rows(self, name: str):
        if name != "public":
            return self.texts.train_rows if name == "train" else self.texts.test_rows
        assert self._public is not None
        found = usual_sentences(self._public)
        random.Random(0).shuffle(found)
        rows = self.tokenizer(found[:PUBLIC], truncation=True, max_length=LENGTH)
        return [{"input_ids": ids, "label": 0} for ids in rows["input_ids"]]

    @torch.no_grad()
    def embed(self, name: str) -> dict[str, Tensor]:
        rows, model = self._rows(name), self._started(0, nn.Identity()).to(DEVICE)
        found = torch.zeros(len(rows), model.head.in_features)
        for some, batch in self.texts.by_length(rows):
            batch = there(batch)
            found[some] = model.embed(batch["input_ids"], batch["attention_mask"]).cpu()
        return {"embeddings": found, "labels": torch.tensor([row["label"] for row in rows])}
