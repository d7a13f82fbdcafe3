"""Labels, read off the last layer's weight and bias under noise, and off the layer below."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from helpers import make_task, rng, word_tokenizer
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    T5Config,
    T5ForSequenceClassification,
)

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Observation, recover_labels, recover_labels_below
from hf_gradguard.attacks.label_recovery import random_inputs
from recipes.small_networks import LeakageLeNetConfig, LeakageLeNetForImageClassification

CLASSES, BATCH, MESSAGES = 20, 8, 12


def model(classes: int = CLASSES) -> LeakageLeNetForImageClassification:
    torch.manual_seed(0)
    config = LeakageLeNetConfig(num_labels=classes, initializer_range=None)
    return LeakageLeNetForImageClassification(config).eval()


def batches(size: int, messages: int = MESSAGES) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "pixel_values": torch.rand(size, 3, 32, 32, generator=generator),
            "labels": torch.randint(CLASSES, (size,), generator=generator),
        }
        for _ in range(messages)
    ]


def found(
    attack,
    without: tuple[str, ...] = (),
    relative_scale: float = 0.0,
    size: int = BATCH,
    messages: int = MESSAGES,
) -> float:
    """The share of labels that an attack finds in messages that lack some parameters."""
    network, right = model(), 0
    for number, batch in enumerate(batches(size, messages)):
        gmap = GradientMap(network, batch, second_order=False)
        shared = dict(gmap.gradient())
        if relative_scale:
            defense = make_defense("gaussian_noise", relative_scale=relative_scale)
            shared = dict(defense(gmap, rng(number)))
        shared = {name: tensor for name, tensor in shared.items() if name not in without}
        shape = tuple(batch["pixel_values"].shape)
        labels = attack(Observation(model=network, gradient=shared, input_shape=shape))
        assert len(labels) == size
        right += (Counter(labels.tolist()) & Counter(batch["labels"].tolist())).total()
    return right / (size * messages)


@cache
def under_noise(*without: str, size: int = BATCH) -> float:
    return found(recover_labels, without, relative_scale=10, size=size)


@pytest.mark.long
@pytest.mark.parametrize("size", [1, BATCH])
def test_the_weight_says_more_than_the_bias_under_noise(size: int) -> None:
    """At noise of 10 times the gradient; 588 features average it out."""
    bias = under_noise("classifier.weight", size=size)
    assert under_noise(size=size) > 0.9
    assert bias < 0.7
    assert under_noise("classifier.bias", size=BATCH) > bias - 0.2


def test_a_batch_is_read_off_a_layer_without_a_bias() -> None:
    assert found(recover_labels, ("classifier.bias",)) > 0.8


def test_without_noise_every_label_is_found() -> None:
    assert found(recover_labels) == 1.0


@pytest.mark.long
@pytest.mark.parametrize("size", [1, BATCH])
def test_a_withheld_head_protects_no_label(size: int) -> None:
    """The layer below gets what the head knows, through the head's weight, which is public."""
    without = ("classifier.weight", "classifier.bias")
    assert found(recover_labels_below, without, size=size, messages=3) > 0.95


def test_a_text_model_too() -> None:
    network, batch = make_task("bert", batch_size=1)
    gmap = GradientMap(network, batch, withhold=["classifier.*"])
    shape = tuple(batch["input_ids"].shape)
    seen = Observation(model=network, gradient=gmap.gradient(), input_shape=shape)
    with pytest.raises(ValueError, match="recover_labels_below"):
        recover_labels(seen)
    assert recover_labels_below(seen).tolist() == batch["labels"].tolist()


@pytest.mark.long
def test_a_decoders_label_is_read_at_its_last_token() -> None:
    """Its head has no bias, and runs at every position. Features of last tokens, from the decoder
    itself, tell the sign of (p - y) hᵀ; those of all positions are others.
    """
    sizes = {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    config = GPT2Config(**sizes, num_labels=2, pad_token_id=0, bos_token_id=1, eos_token_id=1)
    for seed in range(6):
        torch.manual_seed(seed)
        network, ids = GPT2ForSequenceClassification(config).eval(), torch.randint(2, 50, (65, 24))
        with torch.no_grad():
            mean = network.transformer(ids[1:]).last_hidden_state[:, -1].mean(0)
        batch = {"input_ids": ids[:1], "labels": torch.tensor([seed % 2])}
        gradient = GradientMap(network, batch).gradient()
        found = recover_labels(Observation(network, gradient, (1, 24)))
        assert found.tolist() == [seed % 2] == [int((gradient["score.weight"] @ mean).argmin())]


@pytest.mark.long
def test_batch_statistics_stay() -> None:
    network = model()
    network.convolutions[0] = nn.Sequential(network.convolutions[0], nn.BatchNorm2d(12))
    network.train()
    batch = batches(2)[0]
    gradient = GradientMap(network, batch).gradient()
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    seen = Observation(model=network, gradient=gradient, input_shape=(2, 3, 32, 32))
    recover_labels(seen)
    recover_labels_below(seen)
    assert all(torch.equal(buffer, before[name]) for name, buffer in network.named_buffers())


ENDS: dict[str, Any] = {
    "vocab_size": 12, "d_model": 16, "num_labels": 3, "pad_token_id": 0, "bos_token_id": 2,
    "eos_token_id": 3,
}  # fmt: skip
ENCODER_DECODERS = {
    "bart": lambda: BartForSequenceClassification(
        BartConfig(
            **ENDS, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
            max_position_embeddings=16, decoder_start_token_id=3, forced_eos_token_id=3,
        )
    ),
    "t5": lambda: T5ForSequenceClassification(
        T5Config(**ENDS, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENCODER_DECODERS)
@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "mask"])
def test_classifiers_that_read_at_the_end_of_a_text(name: str, masked: bool) -> None:
    """They refuse texts with several ends, or with none: no random token is one."""
    torch.manual_seed(0)
    network = ENCODER_DECODERS[name]().eval()
    ids = torch.tensor([[2, 5, 7, 9, 11, 3], [2, 4, 6, 3, 0, 0]])
    batch = {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([0, 2])}
    mask = batch["attention_mask"] if masked else None
    gradient = GradientMap(network, batch).gradient()
    seen = Observation(network, gradient, tuple(ids.shape), attention_mask=mask)
    assert recover_labels(seen).tolist() == [0, 2]
    assert len(recover_labels_below(seen)) == 2


@pytest.mark.parametrize("tokenizer", [None, word_tokenizer(["a", "b", "c", "d"])])
def test_random_texts_have_no_special_tokens_inside(tokenizer: Any) -> None:
    network, batch = make_task("gpt2")
    network.config.eos_token_id = [1, 2]
    gradient = GradientMap(network, batch).gradient()
    seen = Observation(network, gradient, (9, 8), tokenizer=tokenizer)
    ids = random_inputs(seen, torch.Generator().manual_seed(0))["input_ids"]
    ids = ids if tokenizer is None else ids[:, 1:-1]
    assert not torch.isin(ids, torch.tensor([0, 1, 2])).any()
    assert tokenizer is None or not torch.isin(ids, torch.tensor(tokenizer.all_special_ids)).any()
