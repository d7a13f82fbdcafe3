"""Strength from the transcript: noise as strong as the usual gradient asks for, whatever this
batch's own is.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers import flat, make_task, small_convolution
from torch import Tensor, nn

from hf_gradguard import GradientMap, chain, make_defense
from hf_gradguard.defenses.noise import UsualPower
from hf_gradguard.gradient_map.views import PrecomputedGradient
from hf_gradguard.randomness import Stream

NOISES: dict[str, tuple[str, dict[str, Any]]] = {
    "gaussian": ("gaussian_noise", {}),
    "laplace": ("laplace_noise", {}),
    "optimal": ("optimal_noise", {}),
    "optimal_past": ("optimal_noise", {"shape": "past"}),
    "dp_client": ("dp_sgd", {"clip": 0.5}),
    "optimal_dp": ("optimal_dp_sgd", {"clip": 0.05}),
}


def maps(count: int, factor: float = 1.0) -> list[GradientMap]:
    """Batches whose gradients' norms differ many times over."""
    model, batch = small_convolution()
    batches = [
        {**batch, "pixel_values": batch["pixel_values"] * 3.0 ** (n % 4)} for n in range(count)
    ]

    def loss_fn(module: nn.Module, inputs: Any) -> Tensor:
        return factor * module(**inputs)["loss"]

    return [GradientMap(model, b, loss_fn=loss_fn, second_order=False) for b in batches]


@pytest.mark.parametrize("kind", NOISES)
def test_the_first_strength_is_the_same_whatever_the_batch(kind: str) -> None:
    """The control: with strength="own" it names the batch."""
    name, settings = NOISES[kind]
    scales, norms = [], []
    for gmap in maps(4):
        defense = make_defense(name, relative_scale=20, strength="transcript", **settings)
        scales.append(defense(gmap, Stream.from_seeds(1)).metrics["noise_scale"])
        own = make_defense(name, relative_scale=20, strength="own", **settings)
        norms.append(float(flat(own(gmap, Stream.from_seeds(1))).norm()))
    assert max(scales) - min(scales) < 1e-6 * max(scales)
    assert max(norms) > 1.05 * min(norms) or name in ("dp_sgd", "optimal_dp_sgd")


@pytest.mark.statistics
def test_norms_of_messages_name_no_batch() -> None:
    """Of 60 sentences, by the gradient whose norm fits the message's best: at noise of 1,000 times,
    its own strength names them; the usual one, whatever came before, does not.
    """
    generator = torch.Generator().manual_seed(1)
    model, batch = make_task("bert")
    words = len(model.get_input_embeddings().weight)
    sentences = [
        {**batch, "input_ids": torch.randint(words, batch["input_ids"].shape, generator=generator)}
        for _ in range(60)
    ]
    maps_of = [GradientMap(model, s, second_order=False) for s in sentences]
    norms = np.array([float(flat(g.gradient()).norm()) for g in maps_of])
    entries, named = len(flat(maps_of[0].gradient())), {"own": 0, "transcript": 0}
    for strength in named:
        defense = make_defense("gaussian_noise", relative_scale=1000, strength=strength)
        for truth, gmap in enumerate(maps_of):
            shared = float(flat(defense(gmap, Stream())).norm())
            fits = np.abs(shared / math.sqrt(1 + 1000**2) - norms)
            named[strength] += int(truth in np.argsort(fits)[:5])
        spread = float(norms.std() / norms.mean())
    assert spread > 3 / math.sqrt(2 * entries)  # else there is nothing to tell them by
    assert named["transcript"] <= 13  # 5 of 60 by chance: P(more than 13) < 3e-4
    assert named["own"] > named["transcript"] + 10


def test_it_follows_what_was_shared() -> None:
    """Gradients ten times as large: noise grows with them, a few messages later."""
    defense = make_defense("gaussian_noise", relative_scale=2, strength="transcript")
    for factor in (1.0, 10.0):
        for gmap in maps(1, factor) * 40:
            message = defense(gmap, Stream())
        expected = 2 * float(flat(gmap.gradient()).norm()) / math.sqrt(len(flat(message)))
        assert message.metrics["noise_scale"] == pytest.approx(expected, rel=0.35)


@pytest.mark.parametrize("relative", [0.1, 1.0, 20.0])
def test_the_filter_finds_the_mean(relative: float) -> None:
    """Of messages made up here, from a start that is wrong by 30 times; entries: 100,000."""
    random, entries, power = np.random.default_rng(2), 100_000, 4.0
    for start in (power / 30, power * 30):
        usual = UsualPower()
        usual.begin(start)
        for _ in range(300):
            variance = relative**2 * usual.mean / entries
            norm, std = math.sqrt(power) * random.lognormal(0, 0.1), math.sqrt(variance)
            shared = norm**2 + 2 * norm * random.normal(0, std)
            shared += variance * random.chisquare(entries)
            usual.observe(shared, variance * entries, variance**2 * entries)
        assert usual.mean == pytest.approx(power, rel=0.5)


def test_it_never_falls_to_zero() -> None:
    usual = UsualPower()
    usual.begin(1.0)
    for _ in range(20):
        before = usual.mean
        usual.observe(message_power=0.0, noise_power=5.0, noise_squares=1e-6)
        assert 0.5 * before <= usual.mean


def test_in_a_chain_it_is_of_what_pruning_left() -> None:
    (gmap,) = maps(1)
    defense = chain(
        make_defense("pruning", ratio=0.7),
        make_defense("gaussian_noise", relative_scale=3, strength="transcript"),
    )
    for _ in range(30):
        message = defense(gmap, Stream())
    left = flat(make_defense("pruning", ratio=0.7)(gmap, Stream()))
    expected = 3 * float(left.norm()) / math.sqrt(len(left))
    assert message.metrics["noise_scale"] == pytest.approx(expected, rel=0.5)


def test_its_state_goes_on() -> None:
    (gmap,) = maps(1)
    defense, other = (
        make_defense("optimal_noise", relative_scale=2, strength="transcript", shape="past")
        for _ in range(2)
    )
    for _ in range(3):
        defense(gmap, Stream())
    other.load_state_dict(defense.state_dict())
    messages = [d(gmap, Stream.from_seeds(3)) for d in (defense, other)]
    assert torch.equal(*map(flat, messages))
    assert make_defense("gaussian_noise", scale=1.0).state_dict() == {}


def test_a_utility_budget_of_uniform_noise_is_met_on_average() -> None:
    (gmap,) = maps(1)
    gradient = flat(gmap.gradient())
    power = float(gradient.square().sum())
    budget = 4 * power**2 / len(gradient)  # of noise of twice the gradient
    defense = make_defense("gaussian_noise", utility_budget=budget, strength="transcript")
    for _ in range(60):
        message = defense(gmap, Stream())
    assert message.metrics["noise_scale"] ** 2 * power == pytest.approx(budget, rel=0.5)


def test_what_has_no_public_inputs_is_refused() -> None:
    defense = make_defense("gaussian_noise", relative_scale=2, strength="transcript")
    with pytest.raises(ValueError, match="scale"):
        defense(PrecomputedGradient({"w": torch.ones(3)}))
    with pytest.raises(ValueError, match="utility_budget"):
        make_defense("optimal_noise", utility_budget=1.0, strength="transcript")
    with pytest.raises(ValueError, match="strength"):
        make_defense("gaussian_noise", strength="usual")
