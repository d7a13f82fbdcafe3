"""What gives texts away is never called "At chance": weak settings of defenses, audited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, set_seed

from hf_gradguard.audit import audit, summarize
from hf_gradguard.testing.small import WORDS, small_tokenizer

WEAK = {
    "weak pruning": "pruning:ratio=0.5",
    "tiny noise": "gaussian_noise:relative_scale=0.01",
    "clipped only": "dp_sgd:clip=0.1,scale=0",
    "Soteria": "soteria:ratio=0.5",
    "synthetic samples": "refiner",
}


def leaking(width: int, count: int) -> tuple[Any, Any, list[tuple[str, int]]]:
    """A classifier whose gradients span reads, its tokenizer, and labeled texts."""
    set_seed(0)
    tokenizer = small_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=width, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=16, num_labels=2, pad_token_id=0,
    )  # fmt: skip
    model = BertForSequenceClassification(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    texts = [" ".join(WORDS[(11 * k + 7 * place) % 60] for place in range(5)) for k in range(count)]
    return model, tokenizer, [(text, k % 2) for k, text in enumerate(texts)]


@pytest.mark.parametrize("weak", WEAK)
def test_planted_leaks_are_not_at_chance(weak: str, tmp_path: Path) -> None:
    """Span reads all of them but behind synthetic samples, and somebody with a list names every
    text, whichever attack is asked: so the verdict is that they leak.
    """
    model, tokenizer, texts = leaking(width=48, count=4)
    listed = [text for text, _ in texts] + [" ".join(WORDS[k : k + 5]) for k in range(8)]
    result = audit(
        model, tokenizer, texts, WEAK[weak], "span", candidates=listed, output=tmp_path / "out"
    )
    summary = summarize(result)
    undefended, verdict = summary.verdicts
    assert undefended.standing == "open"
    assert verdict.standing in ("open", "reduced")
    assert "chance" not in (one.standing for one in summary.verdicts)
    best = max(row.scores["token_f1"].mean for row in summary.rows if row.defense != "none")
    assert best > 0.9
    (named,) = (one.scores["top1"].mean for one in summary.membership if one.defense != "none")
    assert named == 1
