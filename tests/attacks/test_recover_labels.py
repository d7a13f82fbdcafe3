"""Labels, read off the last layer's weight and bias under noise, and off the layer below."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from helpers import make_task, rng
from torch import Tensor, nn
from transformers import GPT2Config, GPT2ForSequenceClassification

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Observation, recover_labels, recover_labels_below
from hf_gradguard.models import LeakageLeNetConfig, LeakageLeNetForImageClassification

CLASSES, BATCH, MESSAGES = 20, 8, 12


def model(classes: int = CLASSES) -> LeakageLeNetForImageClassification:
    torch.manual_seed(0)
    config = LeakageLeNetConfig(num_labels=classes, initializer_range=None)
    return LeakageLeNetForImageClassification(config).eval()


def batches(size: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "pixel_values": torch.rand(size, 3, 32, 32, generator=generator),
            "labels": torch.randint(CLASSES, (size,), generator=generator),
        }
        for _ in range(MESSAGES)
    ]


def found(
    attack, without: tuple[str, ...] = (), relative_scale: float = 0.0, size: int = BATCH
) -> float:
    """The share of labels that an attack finds in messages that lack some parameters."""
    network, right = model(), 0
    for number, batch in enumerate(batches(size)):
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
    return right / (size * MESSAGES)


@cache
def under_noise(*without: str, size: int = BATCH) -> float:
    return found(recover_labels, without, relative_scale=10, size=size)


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


@pytest.mark.parametrize("size", [1, BATCH])
def test_a_withheld_head_protects_no_label(size: int) -> None:
    """The layer below gets what the head knows, through the head's weight, which is public."""
    assert found(recover_labels_below, ("classifier.weight", "classifier.bias"), size=size) > 0.95


def test_a_text_model_too() -> None:
    network, batch = make_task("bert", batch_size=1)
    gmap = GradientMap(network, batch, withhold=["classifier.*"])
    shape = tuple(batch["input_ids"].shape)
    seen = Observation(model=network, gradient=gmap.gradient(), input_shape=shape)
    with pytest.raises(ValueError, match="recover_labels_below"):
        recover_labels(seen)
    assert recover_labels_below(seen).tolist() == batch["labels"].tolist()


def test_a_decoders_label_is_read_at_its_last_token() -> None:
    """Its head has no bias, and runs at every position. Features of last tokens, from the decoder
    itself, tell the sign of (p - y) hᵀ; those of all positions are others.
    """
    sizes = {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    config = GPT2Config(**sizes, num_labels=2, pad_token_id=0, bos_token_id=1, eos_token_id=1)
    for seed in range(12):
        torch.manual_seed(seed)
        network, ids = GPT2ForSequenceClassification(config).eval(), torch.randint(2, 50, (65, 24))
        with torch.no_grad():
            mean = network.transformer(ids[1:]).last_hidden_state[:, -1].mean(0)
        batch = {"input_ids": ids[:1], "labels": torch.tensor([seed % 2])}
        gradient = GradientMap(network, batch).gradient()
        found = recover_labels(Observation(network, gradient, (1, 24)))
        assert found.tolist() == [seed % 2] == [int((gradient["score.weight"] @ mean).argmin())]


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
