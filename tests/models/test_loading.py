"""Adapters and the heads beside them."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import DistilBertConfig, DistilBertForSequenceClassification

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
