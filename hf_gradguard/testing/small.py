"""Small models with a batch each, built from configurations without a download."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    ResNetConfig,
    ResNetForImageClassification,
)

Task = tuple[nn.Module, dict[str, Tensor], PreTrainedTokenizerBase | None]
WORDS = [f"word{index}" for index in range(60)]


def small_tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer of whole words, `word0` to `word59`, between [CLS] and [SEP].

    Example:
        >>> small_tokenizer()("word0 word7").input_ids
        [2, 4, 11, 3]
    """
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {token: index for index, token in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token")
    wrapped: PreTrainedTokenizerBase = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **dict(zip(names, special, strict=True))
    )
    return wrapped


def small_text_task() -> Task:
    """Return a BERT classifier of width 32 in training mode, with dropout, and two sentences.

    Example:
        >>> model, batch, tokenizer = small_text_task()
        >>> batch["input_ids"].shape
        torch.Size([2, 6])
    """
    tokenizer = small_tokenizer()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=16,
        intermediate_size=40,
        num_labels=3,
        pad_token_id=0,
        **sizes,
    )
    model = _seeded(BertForSequenceClassification, config).train()
    texts = ["word3 word14 word15 word9", "word26 word5"]
    batch = dict(tokenizer(texts, padding=True, return_tensors="pt"))
    batch.pop("token_type_ids", None)
    return model, {**batch, "labels": torch.tensor([2, 0])}, tokenizer


def small_image_task() -> Task:
    """Return a ResNet classifier and two images of 3 × 16 × 16 pixels in [0, 1].

    Its batch normalization is in evaluation mode.

    Example:
        >>> model, batch, _ = small_image_task()
        >>> model(**batch).logits.shape
        torch.Size([2, 3])
    """
    config = ResNetConfig(
        embedding_size=4, hidden_sizes=[4], depths=[1], layer_type="basic", num_labels=3
    )
    model = _seeded(ResNetForImageClassification, config).eval()
    pixels = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return model, {"pixel_values": pixels, "labels": torch.tensor([1, 0])}, None


SMALL_TASKS = {"text": small_text_task, "image": small_image_task}
"""Functions that build a small task, by the name of the domain."""


def _seeded(kind: Any, config: Any) -> nn.Module:
    """Return the same model every time, without touching the process's random numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = kind(config)
    return model
