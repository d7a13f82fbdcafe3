"""Row and column sums of s² without s², against those of squares that are written out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import flat, make_task, rng, small_convolution
from torch import Tensor

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.gradient_map import marginals
from hf_gradguard.gradient_map.layers import Pass
from hf_gradguard.gradient_map.marginals import heard, own_pass, power_sums, probe_sums, sums_of
from hf_gradguard.gradient_map.sensitivity import plan_of, split_layers
from hf_gradguard.randomness import Stream

NAMES = ("bert", "bert_lora", "gpt2", "gpt2_lm", "t5", "vit", "convnext", "convolution")


def task(name: str) -> tuple[Any, dict[str, Tensor]]:
    """In float64; T5 normalizes in float32 whatever it is, so that steps for float64 drown."""
    if name == "convolution":
        return small_convolution()
    return make_task(name, dtype=torch.float32 if name == "t5" else torch.float64)


def other_batch(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    generator, other = torch.Generator().manual_seed(5), dict(batch)
    if "input_ids" in batch:
        other["input_ids"] = torch.randint(4, 20, batch["input_ids"].shape, generator=generator)
    else:
        pixels = batch["pixel_values"]
        other["pixel_values"] = torch.rand(pixels.shape, generator=generator).to(pixels)
    return other


def assert_sums(found: dict[str, tuple[Tensor, ...]], squares: dict[str, Tensor]) -> None:
    assert found.keys() == squares.keys()
    for name, parts in found.items():
        expected = sums_of(squares[name])
        assert [part.shape for part in parts] == [part.shape for part in expected]
        for part, other in zip(parts, expected, strict=True):
            rtol = 1e-6 if part.dtype == torch.float64 else 1e-3
            torch.testing.assert_close(
                part, other, rtol=rtol, atol=1e-3 * rtol * float(other.max())
            )


@pytest.mark.parametrize("gram", [0.0, math.inf], ids=["written out", "Gram"])
@pytest.mark.parametrize("name", NAMES)
def test_sums_are_those_of_the_squares(
    name: str, gram: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same probe, in float64: linear layers of both kinds, those called twice, convolutions,
    normalization, biases, and what is not split.
    """
    monkeypatch.setattr(marginals, "GRAM_AT_MOST", gram)
    gmap = GradientMap(*task(name), second_order=False)
    found = dict(probe_sums(gmap, 1, rng()))
    assert_sums(found, gmap.squared_sensitivity(1, rng()))


@pytest.mark.parametrize("gram", [0.0, math.inf], ids=["written out", "Gram"])
@pytest.mark.parametrize("name", NAMES)
def test_powers_are_those_of_single_samples(
    name: str, gram: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the gradients of each sample alone, as shares of the mean; g² where samples are not
    known apart.
    """
    monkeypatch.setattr(marginals, "GRAM_AT_MOST", gram)
    model, batch = task(name)
    gmap = GradientMap(model, batch, second_order=False)
    start, samples = own_pass(gmap), len(gmap.input)
    assert start is not None
    split = {name for layer in start.layers.values() for name in (layer.weight, layer.bias)}
    alone = [
        GradientMap(
            model, {key: value[one : one + 1] for key, value in batch.items()}, second_order=False
        ).gradient()
        for one in range(samples)
    ]
    shares = torch.full((samples,), 1 / samples, dtype=torch.float64)
    if batch["labels"].dim() == 2:  # a mean over words, not over texts
        words = (
            (batch["labels"][:, 1:] != -100).sum(1)
            if "lm" in name
            else batch["labels"].ne(-100).sum(1)
        )
        shares = words / words.sum()
    plain = {name: g.square() for name, g in gmap.gradient().items()}
    expected = {
        name: sum((share * g[name]).square() for share, g in zip(shares, alone, strict=True))
        if name in split
        else square
        for name, square in plain.items()
    }
    assert split & set(expected)
    found = dict(power_sums(gmap.gradient(), samples, start))
    assert found.keys() == expected.keys()
    size = max(float(square.max()) for square in expected.values())
    for key, parts in found.items():
        for part, own in zip(parts, sums_of(expected[key]), strict=True):
            rtol = 1e-6 if part.dtype == torch.float64 else 1e-3
            torch.testing.assert_close(part, own, rtol=rtol, atol=1e-9 * size)
    assert_sums(dict(power_sums(gmap.gradient(), samples, None)), plain)


@pytest.mark.parametrize("length", [4, 64])
def test_short_samples_write_nothing_out(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gram matrices of what is short, squares of what is long."""
    written: list[str] = []
    real = marginals.layer_squares

    def counted(layer: Any, change: Any) -> Any:
        if isinstance(layer.module, torch.nn.Linear):
            written.append(layer.weight)
        return real(layer, change)

    monkeypatch.setattr(marginals, "layer_squares", counted)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 64}
    model, batch = make_task("bert", **sizes)
    ids = torch.randint(4, 20, (2, length), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": batch["labels"]}
    gmap = GradientMap(model, batch, second_order=False)
    found = dict(probe_sums(gmap, 1, rng()))
    blocks = {name for name in written if "encoder" in name}
    linear = {n for n, p in gmap.parameters.items() if "encoder" in n and p.dim() == 2}
    assert blocks == (linear if length == 64 else set())
    monkeypatch.undo()
    assert_sums(found, gmap.squared_sensitivity(1, rng()))


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "convolution"])
def test_what_is_heard_is_a_pass_of_its_own(name: str) -> None:
    """Another batch's gradient, and its layers' features and slopes, from the same two passes."""
    model, batch = task(name)
    gmap, other = GradientMap(model, batch, second_order=False), other_batch(batch)
    made, start = heard(gmap, other)
    assert start is None  # nothing was tried out yet
    layers = split_layers(made, plan_of(made))
    made, start = heard(gmap, other)
    expected = gmap.of_batch(other)
    torch.testing.assert_close(flat(made.gradient()), flat(expected.gradient()))
    assert start is not None
    assert layers
    again = Pass.evaluate(expected, expected.input, layers)
    for layer in layers:
        calls = again.slopes[layer].keys()
        pairs = start.rows(layer, len(made.input), calls), again.rows(layer, len(made.input))
        for one, two in zip(*pairs, strict=True):
            torch.testing.assert_close(one, two)
    assert start.unsplit.keys() == again.unsplit.keys()
    torch.testing.assert_close(start.unsplit, again.unsplit)
    sums = dict(probe_sums(made, 1, rng(), start))
    for name_, parts in probe_sums(expected, 1, rng()):
        for part, own in zip(sums[name_], parts, strict=True):
            rtol = 1e-5 if part.dtype == torch.float64 else 1e-2
            torch.testing.assert_close(part, own, rtol=rtol, atol=rtol * float(own.max()))


def test_what_is_heard_is_of_full_precision() -> None:
    """Under autocast a start in bf16 and an end in float32 would differ by rounding alone."""
    model, batch = make_task("bert", dtype=torch.float32)
    gmap, other = GradientMap(model, batch, second_order=False), other_batch(batch)
    expected = dict(probe_sums(gmap.of_batch(other), 1, rng()))
    with torch.autocast("cpu", torch.bfloat16):
        gmap = GradientMap(model, batch, second_order=False)
        plan_of(gmap)
        made, start = heard(gmap, other)
        assert start is not None
        found = dict(probe_sums(made, 1, rng(), start))
    for name, parts in expected.items():
        for one, two in zip(found[name], parts, strict=True):
            torch.testing.assert_close(one, two, rtol=0.02, atol=1e-3 * float(two.max()))


def test_dropout_is_heard_as_it_is_drawn() -> None:
    """The masks of the client's own passes, in training mode, and none of its generator's draws."""
    model, batch = make_task("bert", dropout=0.3)
    gmap, other = GradientMap(model.train(), batch, second_order=False), other_batch(batch)
    plan_of(gmap)
    state = torch.get_rng_state()
    made, start = heard(gmap, other)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(flat(made.gradient()), flat(gmap.gradient_at(made.input)))
    assert_sums(dict(probe_sums(made, 1, rng(), start)), made.squared_sensitivity(1, rng()))


@pytest.mark.parametrize("name", ["optimal_noise", "optimal_dp_sgd", "optimal_pruning"])
def test_averages_of_sums_are_those_of_squares(name: str) -> None:
    """Of clipped gradients too, of which some entries count as insensitive."""
    gmap = GradientMap(*make_task("bert"), second_order=False)
    clip = 0.9 * float(flat(gmap.gradient()).abs().max())
    for settings in ({}, {"clip": clip}) if name == "optimal_dp_sgd" else ({},):
        strength = {} if name == "optimal_pruning" else {"scale": 0.1}
        defense = make_defense(name, shape="past", **strength, **settings)
        defense(gmap, Stream.from_seeds(1))
        squares = gmap.squared_sensitivity(1, Stream.from_seeds(1))
        if settings:
            kept = {n: g.abs() < clip for n, g in gmap.gradient().items()}
            assert not all(bool(mask.all()) for mask in kept.values())
            squares = {n: s * kept[n] for n, s in squares.items()}
        size, state = sum(float(s.sum()) for s in squares.values()), defense.state_dict()
        for parameter, square in squares.items():
            for part, expected in enumerate(sums_of(square)):
                found = state[f"squares.{part}.{parameter}"]
                torch.testing.assert_close(found, expected / size, rtol=1e-5, atol=1e-9)
