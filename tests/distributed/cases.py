"""Data and models that the two-rank tests share, and the cases in which training unprotected equals
the stock Trainer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from helpers import CHECKPOINTING, LABELS, TASKS, VOCABULARY, WIDTH, make_task, ragged_rows
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import ResNetConfig, ResNetForImageClassification

SAMPLES = 78  # on two ranks with batches of 4: 10 batches a rank, the last ones of 4 and 2 samples
Row = dict[str, Any]


def rows(task: str, count: int = SAMPLES) -> list[Row]:
    """`count` samples for a task of `helpers`, all of one length."""
    batch = TASKS[task][1](count)
    if "pixel_values" in batch:
        batch["pixel_values"] = batch["pixel_values"].float()
    return [{key: value[index] for key, value in batch.items()} for index in range(count)]


def marked_rows(count: int = SAMPLES) -> list[Row]:
    """Samples for `Branching`: the first token of batches of 4 alternates, so two ranks never take
    the same branch.
    """
    samples = rows("bert", count)
    for index, sample in enumerate(samples):
        sample["input_ids"] = sample["input_ids"].clone()
        sample["input_ids"][0] = 1 + (index // 4) % 2
    return samples


class Plain(nn.Module):
    """A classifier that is no `PreTrainedModel` and takes no loss arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, LABELS)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def body(self, hidden: Tensor, input_ids: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(hidden)))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        hidden = self.body(self.embed(input_ids), input_ids).tanh()
        logits = self.head((hidden * attention_mask[..., None]).mean(1))
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class Branching(Plain):
    """Uses `first` or `second`, by the batch's first token: the other one has no gradient."""

    def body(self, hidden: Tensor, input_ids: Tensor) -> Tensor:
        return (self.first if int(input_ids[0, 0]) % 2 else self.second)(hidden)


def make_model(name: str, dropout: float = 0.1) -> nn.Module:
    """A small float32 model, the same on every call and every rank."""
    if name == "resnet":
        config = {
            "embedding_size": 4,
            "hidden_sizes": [4, 8],
            "depths": [1, 1],
            "layer_type": "basic",
            "num_labels": LABELS,
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return ResNetForImageClassification(ResNetConfig(**config))
    if name in ("plain", "branching"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return {"plain": Plain, "branching": Branching}[name]()
    return make_task(name, dtype=torch.float32, dropout=dropout)[0]


@dataclass
class Case:
    """One comparison of `GradGuardTrainer(defense="none")` with `Trainer`.

    Args:
        model: A name for `make_model`.
        args: Training arguments of both.
        guarded: More of `GradGuardConfig`.
        freeze: Compare with a stock Trainer whose input embeddings are frozen, which is what
            withholding means.
        data: `"task"`, `"images"`, `"ragged"` or `"marked"`.
        atol: Allowed difference in a weight beside the relative 1e-6; 0 where both do the same
            arithmetic.
    """

    model: str = "bert"
    args: dict[str, Any] = field(default_factory=dict)
    guarded: dict[str, Any] = field(default_factory=lambda: {"share_input_embeddings": True})
    freeze: bool = False
    data: str = "task"
    dropout: float = 0.1
    atol: float = 1e-12

    def rows(self) -> list[Row]:
        if self.data == "task":
            return rows(self.model if self.model in TASKS else "bert")
        if self.data == "images":
            return rows("vit")
        return ragged_rows(SAMPLES) if self.data == "ragged" else marked_rows()


WITHHELD = {"guarded": {}, "freeze": True}
CHECKPOINTED = {
    CHECKPOINTING: True,
    f"{CHECKPOINTING}_kwargs": {"use_reentrant": False},
}
UNEVEN = {
    "accelerator_config": {"even_batches": False}
}  # 10 batches a rank; the last one has 4 samples or 2
IN_ORDER = {"train_sampling_strategy": "sequential"}
# Where the loss is divided by a count or by the accumulation steps, and where a batch is cut, the
# same numbers are added in another order and rounded otherwise, by about 1e-7 of the gradient's
# size, which is about 1 here. Plain SGD keeps that small in the weights; Adam would divide it by a
# gradient that can itself be a rounding error.
SGD = {"optim": "sgd", "learning_rate": 0.05}
ROUNDED = 1e-6


def _clients(count: int) -> dict[str, Any]:
    return {"share_input_embeddings": True, "clients_per_process": count}


IDENTITY: dict[str, Case] = {
    "accumulation 1": Case(),
    "accumulation 3, uneven tail": Case(args={"gradient_accumulation_steps": 3}),
    "withheld": Case(**WITHHELD),
    "withheld, tied": Case(model="bert_mlm", args=SGD, atol=ROUNDED, **WITHHELD),
    "lora, accumulation 3": Case(
        model="bert_lora", args={"gradient_accumulation_steps": 3}, guarded={}
    ),
    "bf16, accumulation 3": Case(args={"bf16": True, "gradient_accumulation_steps": 3}),
    "bf16, checkpointing, withheld": Case(args={"bf16": True, **CHECKPOINTED}, **WITHHELD),
    "weight decay, no clipping": Case(args={"weight_decay": 0.1, "max_grad_norm": 0.0}),
    "uneven last batch": Case(args={"gradient_accumulation_steps": 3, **UNEVEN}),
    "causal lm": Case(model="gpt2_lm", args=SGD, data="ragged", atol=ROUNDED),
    "causal lm, accumulation 3": Case(
        model="gpt2_lm",
        args={**SGD, **UNEVEN, "gradient_accumulation_steps": 3},
        data="ragged",
        atol=ROUNDED,
    ),
    "causal lm, own average": Case(
        model="gpt2_lm",
        args={**SGD, "average_tokens_across_devices": False},
        data="ragged",
        atol=ROUNDED,
    ),
    "causal lm, own average, accumulation 3": Case(
        model="gpt2_lm",
        args={**SGD, "average_tokens_across_devices": False, "gradient_accumulation_steps": 3},
        data="ragged",
        atol=ROUNDED,
    ),
    "causal lm, label smoothing": Case(
        model="gpt2_lm",
        args={**SGD, "label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
        data="ragged",
        atol=ROUNDED,
    ),
    "label smoothing": Case(args={**SGD, "label_smoothing_factor": 0.1}, atol=ROUNDED),
    "sequence to sequence": Case(model="t5", args=SGD, dropout=0.0, atol=ROUNDED),
    "llama": Case(model="llama", args=SGD, atol=ROUNDED),
    "vision": Case(model="vit"),
    "vision, accumulation 3": Case(
        model="vit", args={**SGD, **UNEVEN, "gradient_accumulation_steps": 3}, atol=ROUNDED
    ),
    "batch norm": Case(model="resnet", data="images"),
    "batch norm, accumulation 3": Case(
        model="resnet",
        data="images",
        args={**SGD, **UNEVEN, "gradient_accumulation_steps": 3},
        atol=ROUNDED,
    ),
    "no loss arguments": Case(
        model="convnext", args={**SGD, "gradient_accumulation_steps": 3}, atol=ROUNDED
    ),
    "plain module": Case(
        model="plain", args={**SGD, "gradient_accumulation_steps": 3, **UNEVEN}, atol=ROUNDED
    ),
    "unused on one rank": Case(model="branching", data="marked", args=IN_ORDER),
    "unused on one rank, accumulation 3": Case(
        model="branching",
        data="marked",
        args={**SGD, **IN_ORDER, "gradient_accumulation_steps": 3},
        atol=ROUNDED,
    ),
    "2 clients": Case(args=SGD, guarded=_clients(2), dropout=0.0, atol=ROUNDED),
    "3 clients": Case(
        args={**SGD, "gradient_accumulation_steps": 3},
        guarded=_clients(3),
        dropout=0.0,
        atol=ROUNDED,
    ),
    "3 clients, uneven last batch": Case(
        args={**SGD, **UNEVEN}, guarded=_clients(3), dropout=0.0, atol=ROUNDED
    ),
    "2 clients, causal lm": Case(
        model="gpt2_lm",
        args={**SGD, "gradient_accumulation_steps": 2},
        guarded=_clients(2),
        data="ragged",
        dropout=0.0,
        atol=ROUNDED,
    ),
    "3 clients, plain module": Case(model="plain", args=SGD, guarded=_clients(3), atol=ROUNDED),
}
