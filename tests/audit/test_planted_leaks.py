"""What gives texts away is never called "At chance": weak settings of defenses, audited."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, set_seed

from hf_gradguard.audit import audit, summarize
from hf_gradguard.leakage.fisher import DFILBound
from hf_gradguard.testing.small import WORDS, small_tokenizer

WEAK = {
    "weak pruning": "pruning:ratio=0.5",
    "tiny noise": "gaussian_noise:relative_scale=0.01",
    "clipped only": "dp_sgd:clip=0.1,scale=0",
    "Soteria": "soteria:ratio=0.5",
    "synthetic samples": "gradient_sketch",
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


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of one audit of all."""
    model, tokenizer, texts = leaking(width=48, count=4)
    listed = [text for text, _ in texts] + [" ".join(WORDS[k : k + 5]) for k in range(8)]
    folder = tmp_path_factory.mktemp("audit")
    weak = list(WEAK.values())
    with patch.object(DFILBound, "probes", 2):
        return summarize(
            audit(model, tokenizer, texts, weak, "span", candidates=listed, output=folder)
        )


@pytest.mark.long
@pytest.mark.parametrize("weak", WEAK)
def test_planted_leaks_are_not_at_chance(summary: Any, weak: str) -> None:
    """Span reads all of them but behind synthetic samples, and somebody with a list names every
    text, whichever attack is asked: so the verdict is that they leak.
    """
    standings = {verdict.defense: verdict.standing for verdict in summary.verdicts}
    assert set(standings) == {"none", *WEAK.values()}
    assert standings["none"] == "open"
    assert standings[WEAK[weak]] in ("open", "reduced")
    rows = [row for row in summary.rows if row.defense == WEAK[weak]]
    assert max(row.scores["token_f1"].mean for row in rows) > 0.9
    (named,) = (one.scores["top1"].mean for one in summary.membership if one.defense == WEAK[weak])
    assert named == 1
