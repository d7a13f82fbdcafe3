"""`check_received`: what is planted is named, what is ordinary is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import make_task
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, set_seed

from hf_gradguard.attacks import make_attack
from hf_gradguard.attacks.analytic import divide_rows
from hf_gradguard.leakage import check_received
from hf_gradguard.leakage.received import sharp_attention
from hf_gradguard.training.exchange.start import say_received
from recipes.studies.malicious_models import (
    BUILT,
    CONSTRUCTIONS,
    HONEST,
    NOISY,
    RARE,
    SHARPENED,
    leaks,
)
from recipes.studies.received import Malicious


def encoder() -> BertForSequenceClassification:
    set_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=100, hidden_size=48, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=32, num_labels=3,
        )
    )  # fmt: skip


def checks(model: nn.Module, *reference: Any) -> set[str]:
    return {one.check for one in check_received(model, *reference)}


@pytest.mark.parametrize("name", ["bert", "bert_lora", "gpt2_lm", "llama", "t5", "vit", "convnext"])
def test_ordinary_models_pass(name: str) -> None:
    assert not check_received(make_task(name)[0])


@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_constructions_leak_and_are_found(name: str) -> None:
    """Each gives away images or tokens to an attack that only divides, and is named."""
    set_seed(1)
    smooth = nn.functional.interpolate(torch.rand(200, 3, 4, 4), size=16, mode="bilinear")
    public, private = smooth[:-4], smooth[-4:]
    planted = BUILT[name](public, Malicious.QUICK)
    if name != SHARPENED:  # which only exposes what is behind it
        assert leaks(planted, private, Malicious.QUICK) >= 0.25  # of four images one at least
    assert checks(planted.model) - {"reads_all_pixels"}


def plant(model: nn.Module, name: str, change: Any) -> nn.Module:
    with torch.no_grad():
        change(model.get_parameter(name))
    return model


@pytest.mark.long
def test_each_check_by_itself() -> None:
    layer = "bert.encoder.layer.0.intermediate.dense"

    def alike(weight: torch.Tensor) -> None:
        weight[:3] = weight[0] * torch.tensor([[1.0], [-2.0], [0.5]])

    assert checks(plant(encoder(), f"{layer}.weight", alike)) == {"rows_alike"}
    two = plant(encoder(), f"{layer}.weight", lambda w: w[:2].copy_(w[:1].expand(2, -1)))
    assert not checks(two)  # two rows may be
    assert checks(plant(encoder(), f"{layer}.weight", lambda w: w[5].zero_())) == {"rows_of_zeros"}
    assert checks(plant(encoder(), f"{layer}.weight", lambda w: w[:4, 3:].zero_())) >= {
        "rows_of_zeros"
    }
    assert not checks(plant(encoder(), f"{layer}.weight", lambda w: w.zero_())) - {
        "biases_out_of_reach"
    }
    assert checks(plant(encoder(), f"{layer}.bias", lambda b: b[0].fill_(-50))) == {
        "biases_out_of_reach"
    }
    assert checks(plant(encoder(), "classifier.weight", lambda w: w[0].mul_(1e3))) == {
        "rows_out_of_scale"
    }
    words = "bert.embeddings.word_embeddings.weight"
    assert checks(plant(encoder(), words, lambda w: w[7:10].copy_(w[7:8].expand(3, -1)))) == {
        "equal_embeddings"
    }
    frozen = plant(encoder(), f"{layer}.weight", alike)
    frozen.get_submodule(layer).requires_grad_(False)
    assert not checks(frozen)


def test_what_was_added() -> None:
    model = encoder()
    trusted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert not checks(model, trusted)
    model.bert.pooler.dense.extra = nn.Linear(48, 48)
    found = check_received(model)
    assert {one.name for one in found} == {
        "bert.pooler.dense.extra.weight",
        "bert.pooler.dense.extra.bias",
    }
    assert checks(model, trusted) == {"added"}
    model = plant(encoder(), "classifier.weight", lambda w: w.mul_(100))
    assert checks(model, encoder()) == {"larger_than_reference"}
    assert "100 times as large" in str(check_received(model, encoder())[0])
    model.classifier = nn.Linear(48, 5)
    assert checks(model, encoder()) == {"reshaped"}


def test_a_rank_that_receives_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("hf_gradguard.training.exchange.start.logger.warning", said.append)
    say_received(encoder())
    assert not said
    say_received(plant(encoder(), "classifier.weight", lambda w: w[1].zero_()))
    (text,) = said
    assert "- classifier: 1 of 3 rows are zero" in text
    assert "compare it with a copy that you trust" in text


@pytest.mark.parametrize(
    ("rank", "wanted", "expected"), [(1, True, 1), (0, True, 0), (1, False, 0), (2, None, 1)]
)
def test_who_looks(
    rank: int, wanted: bool | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks above 0, once, unless they opted out; also with stock training arguments."""
    from hf_gradguard.training.exchange import start

    looked: list[nn.Module] = []
    for name in ("check_agreed", "broadcast"):
        monkeypatch.setattr(start, name, lambda *_: None)
    monkeypatch.setattr(start, "agreed_upon", lambda *_: {})
    monkeypatch.setattr(start, "say_received", looked.append)
    args = SimpleNamespace(world_size=3, process_index=rank, device="cpu")
    if wanted is not None:
        args.check_received = wanted
    callback, model = start.StartAlike(), encoder()
    for _ in range(2):
        callback.on_train_begin(args, model=model)
    assert len(looked) == expected


def test_layer_inputs_by_hand() -> None:
    """Two samples: unit 0 saw the first, units 1 and 2 (a step apart) both and the second."""
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([5.0, -1.0])
    delta = torch.tensor([[2.0, 0.0], [1.0, 3.0], [0.0, 3.0]])  # (unit, sample)
    weight, bias = delta @ torch.stack([first, second]), delta.sum(1)
    rows = divide_rows(weight, bias, torch.tensor([0.0, 0.5, 1.0]))
    for true in (first, second):
        assert (rows - true).norm(dim=1).min() < 1e-6


def test_analytic_reads_one_image_of_a_perceptron() -> None:
    set_seed(0)
    planted = BUILT[HONEST](torch.rand(10, 3, 16, 16), Malicious.QUICK)
    assert leaks(planted, torch.rand(1, 3, 16, 16), Malicious.QUICK) == 1
    model, batch = make_task("convnext", dtype=torch.float32)
    from hf_gradguard import GradientMap
    from hf_gradguard.attacks import Observation

    gradient = GradientMap(model, batch, second_order=False).gradient()
    seen = Observation(model, gradient, tuple(batch["pixel_values"].shape))
    with pytest.raises(ValueError, match="No linear layer of ConvNext"):
        make_attack("analytic")(seen)


@pytest.mark.parametrize("name", ["bert", "gpt2_lm", "llama", "t5", "vit"])
def test_attention_that_picks_single_tokens(name: str) -> None:
    """By queries and keys, split or fused, shared by heads or not, frozen or trained."""
    model = make_task(name)[0]
    names = ("query", "key", "q_proj", "k_proj", "c_attn", ".q", ".k")
    layers = [layer for where, layer in model.named_modules() if where.endswith(names)]
    assert layers
    with torch.no_grad():
        for layer in layers:
            layer.weight.mul_(1e3)
    model.requires_grad_(False)
    assert not checks(model)  # nothing is shared of it
    next(p for n, p in model.named_parameters() if "attn" not in n and p.dim() == 1).requires_grad_(
        True
    )
    assert checks(model) == {"single_tokens"}


def test_a_constant_query_picks_a_place() -> None:
    """The bias alone decides on which key is taken; queries of no size tell nothing."""
    model = encoder()
    own = model.bert.encoder.layer[0].attention.self
    with torch.no_grad():
        own.query.weight.mul_(1e-3)
        own.key.weight.mul_(1e2)
    assert "single_tokens" not in checks(model)
    with torch.no_grad():
        own.query.bias.fill_(50.0)
    assert "single_tokens" in checks(model)


@pytest.mark.parametrize("strength", [0.02, 0.07, 0.2])
def test_units_that_fire_rarely_are_noticed_by_what_they_do(strength: float) -> None:
    """Rows are as drawn, and biases within reach: weights show nothing."""
    set_seed(0)
    smooth = nn.functional.interpolate(torch.rand(200, 3, 4, 4), size=16, mode="bilinear")
    planted = BUILT[RARE](smooth, Malicious.QUICK | {"strength": strength})
    findings = check_received(planted.model, probes={"pixel_values": smooth[:64]})
    assert {(one.check, one.name) for one in findings} == {
        ("reads_all_pixels", "input_layer"),
        ("single_samples", "input_layer"),
    }
    honest = BUILT[HONEST](smooth, Malicious.QUICK).model
    assert {one.check for one in check_received(honest, probes={"pixel_values": smooth[:64]})} == {
        "reads_all_pixels"
    }


@pytest.mark.parametrize("strength", [0.05, 0.1, 0.3])
def test_noisy_rows_that_measure_one_thing(strength: float) -> None:
    set_seed(0)
    planted = BUILT[NOISY](torch.rand(200, 3, 16, 16), Malicious.QUICK | {"strength": strength})
    with torch.no_grad():  # the layer by itself
        nn.init.kaiming_uniform_(planted.model.second.weight)
    findings = check_received(planted.model)
    assert ("units_alike", "input_layer") in {(one.check, one.name) for one in findings}


@pytest.mark.parametrize("factor", [30, 40])
def test_sharpened_attention(factor: int) -> None:
    """By its weights on inputs: its parameters are within bounds."""
    model = encoder()
    own = model.bert.encoder.layer[0].attention.self
    with torch.no_grad():
        own.query.weight.mul_(factor)
        own.key.weight.mul_(factor)
    assert not list(sharp_attention(model))
    assert checks(model) == {"single_tokens"}


def test_probes_leave_the_model_as_it_was() -> None:
    model = encoder().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    assert not check_received(model)
    assert model.training
    assert model.config._attn_implementation != "eager"
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    assert not any("gradguard" in hook.__module__ for hook in hooks)  # Transformers keeps its own
    assert torch.equal(state, torch.get_rng_state())


def test_what_cannot_be_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr("hf_gradguard.leakage.received.logger.warning", warnings.append)
    network = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    assert not check_received(network)
    assert "takes neither" in warnings[0]
    assert not check_received(network, probes={"pixels": torch.randn(8, 32)})
    assert "fails on probes" in warnings[1]
