"""What a decoder's layers read at the end of a prefix that it has kept, against whole texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import SPECIAL_TOKENS, randomize, word_tokenizer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation
from hf_gradguard.attacks.layer_inputs import find_projections
from hf_gradguard.attacks.span.decoder import can_use_cache, inputs_of_endings

TOKENIZER = word_tokenizer([f"w{i}" for i in range(40 - len(SPECIAL_TOKENS))])
COMMON: dict[str, Any] = {
    "vocab_size": 40, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "num_labels": 2,
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 32,
}  # fmt: skip
HEADS = {"num_key_value_heads": 1, "head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": HEADS,
    "mistral": HEADS | {"sliding_window": 4},  # shorter than the prefix
    "qwen2": HEADS,
    "qwen3": HEADS,
    "gemma2": HEADS | {"sliding_window": 4},
    "gemma3_text": HEADS | {"sliding_window": 4},
    "phi3": {"num_key_value_heads": 1},
    "gpt_neox": {},
    "gpt2": {"n_positions": 32},
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 16},
    "bloom": {},
}


def observed(model: nn.Module) -> Observation:
    ids = torch.arange(5, 14)[None]
    labels = torch.zeros(1, dtype=torch.long)
    if "CausalLM" in type(model).__name__ or "LMHead" in type(model).__name__:
        labels = ids
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    gradient = GradientMap(model, batch, second_order=False).gradient()
    return Observation(model, gradient, (1, 9), tokenizer=TOKENIZER)


def build(family: str, kind: Any) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **COMMON | FAMILIES[family])
    return randomize(kind.from_config(config)).double().eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_kept_prefix_changes_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64 throughout: eager attention (Gemma 2, BLOOM) takes its softmax in float32, whose
    vectorized sums round by how many tokens there are.
    """
    softmax = nn.functional.softmax
    monkeypatch.setattr(nn.functional, "softmax", lambda x, dim=None, dtype=None: softmax(x, dim))
    for kind in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        if family == "gemma3_text" and kind is AutoModelForSequenceClassification:
            continue  # exists in the newest Transformers only
        seen = observed(build(family, kind))
        projections = next(r for r in find_projections(seen) if r.mixing == "causal")
        assert can_use_cache(seen, projections)
        prefixes, tokens = [(5, 9, 5, 30, 31, 7, 8), (8, 7, 31, 30, 5, 9, 5)], [6, 5, 39]
        one, other = (
            inputs_of_endings(seen, projections, prefixes, tokens, keeps) for keeps in (True, False)
        )
        assert one.shape == (6, 8, projections.width)
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
        assert len(one[:, -1].unique(dim=0)) == 6  # what is compared depends on the last token
        empty = inputs_of_endings(seen, projections, [()], tokens, uses_cache=True)
        torch.testing.assert_close(
            empty, inputs_of_endings(seen, projections, [()], tokens, uses_cache=False)
        )


class Forgetful(nn.Module):
    """Takes a past, and does not look at it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def forward(self, past_key_values: Any = None, use_cache: Any = None, **batch: Any) -> Any:
        return self.model(**batch)


def test_a_model_that_forgets_runs_whole_texts() -> None:
    seen = observed(Forgetful(build("llama", AutoModelForSequenceClassification)))
    assert not can_use_cache(seen, next(r for r in find_projections(seen) if r.mixing == "causal"))
    bert = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert", **COMMON))
    seen = observed(bert.eval())
    assert not can_use_cache(seen, find_projections(seen)[1])
