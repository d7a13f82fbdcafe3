"""Token sets from shared embeddings, and lengths from shared position embeddings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import torch_rng
from test_span import ENCODER, TOKENIZER, build, collate, observe, sentences
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation
from hf_gradguard.attacks.embedding_rows import EmbeddingRows
from hf_gradguard.attacks.layer_inputs import observed_length, with_length


def share_all(
    name: str, texts: list[list[int]], noise: float = 0.0, length: int | None = None
) -> Observation:
    """Token embeddings included. `noise` is relative to the RMS of each tensor; `length` pads the
    batch further.
    """
    model = build(name)
    batch = collate(texts)
    if length is not None:
        missing = length - batch["input_ids"].shape[1]
        batch = {key: nn.functional.pad(value, (0, missing)) for key, value in batch.items()}
    labels: Tensor = torch.arange(len(texts)) % 2
    if name == "gpt2_lm":
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    gradient = GradientMap(
        model, batch | {"labels": labels}, share_input_embeddings=True, second_order=False
    ).gradient()
    generator = torch_rng(9)
    gradient = {
        key: g
        + noise
        * g.square().mean().sqrt()
        * torch.randn(g.shape, generator=generator, dtype=g.dtype)
        for key, g in gradient.items()
    }
    return Observation(
        model=model,
        gradient=gradient,
        input_shape=tuple(batch["input_ids"].shape),
        tokenizer=TOKENIZER,
    )


@pytest.mark.parametrize("name", ["bert", "distilbert", "roberta", "gpt2", "llama"])
def test_the_token_set_is_exact(name: str) -> None:
    texts = sentences(3)
    found = EmbeddingRows()(share_all(name, texts))
    assert found.token_ids is not None
    assert len(found.token_ids) == 3
    for ids in found.token_ids:
        assert len(ids) == len(set(ids))
        assert set(ids) == {token for text in texts for token in text}
    assert found.objective == pytest.approx(0, abs=1e-12)


def test_a_tied_heads_part_is_told_apart() -> None:
    """Every row has a gradient; the inputs are all tokens but the last, which is only a label."""
    texts = sentences(2, (7, 9))
    seen = share_all("gpt2_lm", texts)
    assert bool((seen.gradient["transformer.wte.weight"] != 0).all())
    found = EmbeddingRows()(seen).token_ids
    assert set(found[0]) == {token for text in texts for token in text[:-1]}


def test_a_tied_head_with_too_many_directions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tied.*Use span"):
        EmbeddingRows()(share_all("gpt2_lm", sentences(4, (12, 12, 12, 12))))


def test_rows_stand_out_of_noise() -> None:
    texts = sentences(1, (8,))
    clean, noisy = (
        EmbeddingRows()(share_all("bert", texts, noise)).token_ids[0] for noise in (0.0, 0.1)
    )
    assert set(noisy) == set(clean) == set(texts[0])


def test_text_has_no_special_tokens() -> None:
    texts = [[2, 10, 11, 3]]
    found = EmbeddingRows()(share_all("bert", texts))
    assert sorted(found.text[0].split()) == ["w6", "w7"]


def test_refusals() -> None:
    seen = observe(build("bert"), sentences(1))  # the library's default withholds them
    with pytest.raises(ValueError, match=r"word_embeddings.*not shared.*span"):
        EmbeddingRows()(seen)
    zeros = dict(seen.gradient) | {"bert.embeddings.word_embeddings.weight": torch.zeros(128, 40)}
    with pytest.raises(ValueError, match="zero in every entry"):
        EmbeddingRows()(Observation(model=seen.model, gradient=zeros, input_shape=seen.input_shape))


@pytest.mark.parametrize("name", ["bert", "distilbert", "roberta", "gpt2", "gpt2_lm"])
def test_length_of_the_longest_text(name: str) -> None:
    texts = sentences(2, (6, 9))
    assert observed_length(share_all(name, texts)) == 9
    assert (
        observed_length(share_all(name, texts, length=13)) == 9
    )  # padded further: those rows are zero
    assert observed_length(share_all(name, texts[:1], length=13)) == 6


def test_length_under_noise_and_without_positions() -> None:
    texts = sentences(2, (6, 9))
    assert observed_length(share_all("bert", texts, noise=0.05, length=12)) == 9
    assert observed_length(share_all("llama", texts)) is None
    seen = share_all("bert", texts)
    withheld = {name: g for name, g in seen.gradient.items() if "position" not in name}
    assert (
        observed_length(
            Observation(model=seen.model, gradient=withheld, input_shape=seen.input_shape)
        )
        is None
    )


@pytest.mark.parametrize("rows", [128, 3000])
def test_the_length_is_read_beside_a_large_vocabulary(rows: int) -> None:
    """Most words have no gradient, which is no pruning; what was pruned tells nothing."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**ENCODER | {"vocab_size": rows})).eval()
    batch = collate([*sentences(1, (6,)), [5] * 12])
    batch = {name: entry[:1] for name, entry in batch.items()} | {"labels": torch.tensor([1])}
    gradient = GradientMap(model, batch, share_input_embeddings=True).gradient()
    seen = Observation(model, gradient, (1, 12))
    assert with_length(seen).input_shape == (1, 6)
    pruned = {n: g * (g.abs() >= g.abs().quantile(0.9)) for n, g in gradient.items()}
    assert with_length(replace(seen, gradient=pruned)).input_shape == (1, 12)
