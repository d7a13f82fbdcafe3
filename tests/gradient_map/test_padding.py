"""A text must not add another gradient where others of its batch are longer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import flat
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from hf_gradguard import GradientMap
from hf_gradguard.gradient_map.parameters import cache_of
from hf_gradguard.gradient_map.per_sample.clipping import clipped_sum

FIRST_ORDER = {"second_order": False, "needs_input": False}
SHORT = [[i, i + 1, i + 2, i + 3] for i in range(5, 11)]
LONG = list(range(4, 24))
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2}


def padded(rows: list[list[int]], side: str) -> dict[str, Tensor]:
    longest = max(map(len, rows))
    fill = [longest - len(row) for row in rows]
    before, after = (fill, [0] * len(rows)) if side == "left" else ([0] * len(rows), fill)

    def filled(value: int, inner: list[list[int]]) -> Tensor:
        found = [
            [value] * b + row + [value] * a for b, row, a in zip(before, inner, after, strict=True)
        ]
        return torch.tensor(found)

    return {
        "input_ids": filled(0, rows),
        "attention_mask": filled(0, [[1] * len(row) for row in rows]),
        # on the left the first token would be predicted from padding
        "labels": filled(-100, [[-100, *row[1:]] for row in rows]),
    }


def gpt2() -> Any:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, pad_token_id=0, tie_word_embeddings=False))


def llama() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, **SMALL}
    return LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=0, tie_word_embeddings=False))


def total(model: Any, batch: dict[str, Tensor], clip: float = 0.1) -> Tensor:
    return flat(clipped_sum(GradientMap(model, batch, **FIRST_ORDER), clip).total)


def test_padding_that_moves_positions_is_refused() -> None:
    """GPT-2 counts positions from the first column."""
    torch.manual_seed(0)
    with pytest.raises(NotImplementedError, match="reads the padding, or counts positions from it"):
        total(gpt2().eval(), padded([*SHORT, [7, 8], LONG], "left"))


def by_themselves(model: Any, batch: dict[str, Tensor], rows: list[int]) -> Tensor:
    """The sum of rows of which each is a batch of its own, without padding."""
    totals = []
    for row in rows:
        real = batch["attention_mask"][row].bool()
        cut = {n: t[row : row + 1] for n, t in batch.items()}
        cut = {n: t[:, real] if t.dim() > 1 else t for n, t in cut.items()}
        totals.append(total(model, cut))
    return torch.stack(totals).sum(0)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_after_a_message_rows_are_taken_by_themselves(is_resumed: bool) -> None:
    """A first batch may have no padding at all. A refusal later would tell of the long text."""
    torch.manual_seed(0)
    model = gpt2().eval()
    if is_resumed:  # no message of this process has left, but messages of an earlier one
        cache_of(model).is_underway = True
    else:
        total(model, padded(SHORT, "left"))
    batch = padded([*SHORT, LONG], "left")
    expected = by_themselves(model, batch, [*range(len(SHORT)), len(SHORT)])
    torch.testing.assert_close(total(model, batch), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("make", "side"), [(gpt2, "right"), (llama, "left"), (llama, "right")])
def test_one_more_text_moves_the_sum_by_what_it_is_clipped_to(make: Any, side: str) -> None:
    torch.manual_seed(0)
    model = make().eval()
    few, more = total(model, padded(SHORT, side)), total(model, padded([*SHORT, LONG], side))
    assert float((more - few).norm()) == pytest.approx(0.1, rel=1e-3)


def test_positions_that_are_given_are_taken() -> None:
    torch.manual_seed(0)
    model, sums = gpt2().eval(), []
    for rows in (SHORT, [*SHORT, LONG]):
        batch = padded(rows, "left")
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        sums.append(total(model, batch))
    assert float((sums[1] - sums[0]).norm()) == pytest.approx(0.1, rel=1e-3)


def test_padding_without_a_mask_is_refused() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32, intermediate_size=32, vocab_size=64, pad_token_id=0, **SMALL
    )
    model = BertForSequenceClassification(config).eval()
    batch = padded([*SHORT, LONG], "right")
    batch["labels"] = torch.arange(7) % 2
    total(model, batch)
    del batch["attention_mask"]
    with pytest.raises(NotImplementedError, match="reads the padding"):
        total(model, batch)


def test_targets_of_the_sources_length_stay_whole() -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 64}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    layers = {"encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 40}
    model = BartForConditionalGeneration(
        BartConfig(**sizes, **heads, **layers, pad_token_id=0, decoder_start_token_id=2)
    ).eval()
    batch = padded([*SHORT, LONG], "right")
    batch["labels"] = torch.randint(4, 60, batch["labels"].shape)
    assert float(total(model, batch).norm()) > 0


class ReadsSomePadding(torch.nn.Module):
    """Takes the last column of a text into account, unless it begins with one word."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(64, 8)
        self.head = torch.nn.Linear(8, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        words = self.table(input_ids)
        mean = (words * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)
        reads = (input_ids[:, :1] != SHORT[0][0]).float()
        logits = self.head(mean + reads * words[:, -1])
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize("batches", [1, 3])
def test_one_padded_text_proves_nothing_of_others(batches: int) -> None:
    """The first padded texts that are tried may be those that show nothing."""
    torch.manual_seed(0)
    model = ReadsSomePadding()
    for length in range(2, 1 + batches):  # others of that word pass at first
        batch = padded([SHORT[0][:length], LONG], "right")
        total(model, {**batch, "labels": torch.tensor([0, 1])})
    batch = padded([SHORT[0][:2], SHORT[1], LONG], "right")
    batch["labels"] = torch.tensor([0, 1, 0])
    if batches == 1:
        with pytest.raises(NotImplementedError, match="reads the padding"):
            [total(model, batch) for _ in range(4)]
        return
    found = [total(model, batch) for _ in range(4)][-1]
    torch.testing.assert_close(found, by_themselves(model, batch, [0, 1, 2]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("harmless", [1, 3, 5])
def test_six_padded_texts_are_tried(harmless: int) -> None:
    """Texts that pass prove nothing of the next one, until six different ones have passed."""
    torch.manual_seed(0)
    model, word = ReadsSomePadding(), SHORT[0][0]
    for number in range(harmless):
        batch = padded([[word, 20 + number], LONG], "right")
        total(model, {**batch, "labels": torch.tensor([0, 1])})
    batch = {**padded([SHORT[1], LONG], "right"), "labels": torch.tensor([1, 0])}
    found = total(model, batch)
    torch.testing.assert_close(found, by_themselves(model, batch, [0, 1]), rtol=1e-4, atol=1e-6)
    assert "reads the padding" in next(iter(cache_of(model).sample_plans.values())).reason
