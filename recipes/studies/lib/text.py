"""Sentences of GLUE SST-2, and models that read them."""

from collections import Counter
from collections.abc import Iterable

import torch
from datasets import Dataset, load_dataset
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
)

TEXT_FLAGS = {"--model": "a text encoder and its tokenizer", "--data_dir": "folder of SST-2"}
NETWORK = {"default": "text-evaluation-network-minilm-l6", "help": "Refiner's, of --model"}
SMALL = {  # of a BERT that every attack can afford
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256,
    "max_position_embeddings": 64, "initializer_range": 0.05,
}  # fmt: skip


def sst2(folder: str, split: str = "dev") -> Dataset:
    """`sentence` and `label` of FOLDER/SPLIT.tsv."""
    return load_dataset(
        "csv", data_files={split: f"{folder}/{split}.tsv"}, delimiter="\t", quoting=3
    )[split]


def of_usual_length(rows: Iterable[dict]) -> list[dict]:
    """Those of 8 to 20 words."""
    return [row for row in rows if 8 <= len(row["sentence"].split()) <= 20]


def batches_of_one(tokenizer, rows: Iterable[dict], **settings) -> list[dict[str, Tensor]]:
    """Each sentence as a batch with its label."""
    return [
        dict(tokenizer(row["sentence"], return_tensors="pt", **settings))
        | {"labels": torch.tensor([row["label"]])}
        for row in rows
    ]


def of_length(batches: Iterable[dict], length: int, count: int) -> list[dict[str, Tensor]]:
    """The first of so many tokens."""
    return [batch for batch in batches if batch["input_ids"].shape[1] == length][:count]


def small_bert(tokenizer) -> BertForSequenceClassification:
    """A random one, from the global generator."""
    return BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), **SMALL)).eval()


def load_tokenizer(name: str):
    return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def load_classifier(name: str, **settings):
    """In evaluation mode; a new head is from the global generator."""
    return AutoModelForSequenceClassification.from_pretrained(
        name, trust_remote_code=False, **settings
    ).eval()


def batch_of(tokenizer, rows: Iterable[dict], **settings) -> dict[str, Tensor]:
    """Padded sentences, with their labels."""
    rows = list(rows)
    batch = dict(
        tokenizer([row["sentence"] for row in rows], padding=True, return_tensors="pt", **settings)
    )
    return batch | {"labels": torch.tensor([row["label"] for row in rows])}


def token_counts(tokenizer, texts: Iterable[str]) -> Counter:
    """How often each token is in texts, without the special ones around them."""
    return Counter(
        token for text in texts for token in tokenizer(text, add_special_tokens=False)["input_ids"]
    )
