"""Adapters and the heads beside them."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
)

from hf_gradguard.models import load_model
from hf_gradguard.testing.small import small_tokenizer


def test_the_head_beside_adapters_is_the_last_layer(tmp_path: Path) -> None:
    """PEFT saves DistilBERT's `pre_classifier` too, which is as wide as the model."""
    sizes = {
        "dim": 32,
        "n_layers": 1,
        "n_heads": 2,
        "hidden_dim": 40,
        "max_position_embeddings": 16,
    }
    config = DistilBertConfig(vocab_size=64, num_labels=3, **sizes)
    DistilBertForSequenceClassification(config).save_pretrained(tmp_path / "base")
    small_tokenizer().save_pretrained(tmp_path / "base")
    base = DistilBertForSequenceClassification.from_pretrained(tmp_path / "base")
    adapted = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", target_modules=["q_lin"]))
    adapted.save_pretrained(tmp_path / "adapter")
    model, _ = load_model(str(tmp_path / "adapter"))
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3)


def test_a_decoders_classifier_takes_several_texts(tmp_path: Path) -> None:
    """GPT-2 comes without a token to pad with, and its head looks for the last that is none."""
    tokenizer = small_tokenizer()
    tokenizer.pad_token = None
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    config = GPT2Config(vocab_size=len(tokenizer), pad_token_id=None, **sizes)
    GPT2ForSequenceClassification(config).save_pretrained(tmp_path)
    for end in ("[SEP]", None):  # "[UNK]" is there
        tokenizer.eos_token = end
        tokenizer.save_pretrained(tmp_path)
        model, loaded = load_model(str(tmp_path))
        batch = loaded(["word1 word2 word3", "word1"], padding=True, return_tensors="pt")
        alone = loaded("word1", return_tensors="pt")
        model.eval()
        arguments = {key: batch[key] for key in ("input_ids", "attention_mask")}
        padded = model(**arguments).logits[1]
        expected = model(input_ids=alone["input_ids"]).logits[0]
        torch.testing.assert_close(padded, expected)
