"""Every defense on the update of several local steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import SmallNetwork, flat, make_task, rng
from torch import Tensor, nn

from hf_gradguard import DEFENSES, GradientMap, chain, make_defense
from hf_gradguard.federation import UpdateMap, protect_update

SPECIAL = SmallNetwork.special_token_ids
RATE = 0.05

CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "gaussian_noise": {"relative_scale": 0.1},
    "laplace_noise": {"relative_scale": 0.1},
    "optimal_noise": {"relative_scale": 0.1},
    "dp_sgd": {"clip": 0.01, "relative_scale": 0.1},
    "optimal_dp_sgd": {"clip": 0.001, "relative_scale": 0.1},
    "pruning": {"ratio": 0.5},
    "optimal_pruning": {"ratio": 0.5},
    "quantization": {"bits": 4},
    "soteria": {"ratio": 0.5},
    "gradient_sketch": {"samples": 3, "min_batches": 1},
    "refiner": {
        "objective": "weighted", "iterations": 2, "evaluation_network": SmallNetwork("text", 8),
    },
    "refiner_published": {"iterations": 2, "evaluation_network": SmallNetwork("text", 8)},
    "optimal_noise_published": {"relative_scale": 0.1},
    "optimal_pruning_published": {},
    "optimal_dp_sgd_published": {"clip": 0.001, "relative_scale": 0.1},
}  # fmt: skip


class Marks:
    """What Refiner asks of a tokenizer."""

    all_special_ids = SPECIAL
    pad_token_id, cls_token_id, sep_token_id = SPECIAL


def task() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """Two batches, the second shorter; each sample begins and ends with a special token."""
    model, batch = make_task("bert", dtype=torch.float32)
    ids = batch["input_ids"].clamp(min=3)
    ids[:, 0], ids[:, -1] = 1, 2
    first = {"input_ids": ids, "labels": batch["labels"], "attention_mask": torch.ones_like(ids)}
    short = ids[:, 1:].clone()
    short[:, 0] = 1
    second = first | {"input_ids": short, "attention_mask": torch.ones_like(short)}
    return model, [first, second]


def test_there_is_a_case_of_every_defense() -> None:
    assert set(CASES) == set(DEFENSES)


@pytest.mark.parametrize("name", CASES)
def test_every_defense_protects_an_update(name: str) -> None:
    model, (one, two) = task()
    order = [one, one, one] if name == "soteria" else [one, two, one]
    defense = make_defense(name, **CASES[name])
    defense.prepare(model, Marks())
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    plain = UpdateMap(
        model, order, learning_rate=RATE, second_order=defense.facts.needs_second_order
    ).update()
    sent = protect_update(model, order, defense, learning_rate=RATE, generator=rng())
    assert sent.keys() == plain.keys()
    assert all(torch.equal(p, before[key]) for key, p in model.named_parameters())
    distance = float((flat(dict(sent)) - flat(plain)).norm() / flat(plain).norm())
    assert (distance == 0) == (name == "none")
    assert distance < 10
    if name != "quantization":  # whose levels need not hold what it rounds
        assert any(not torch.equal(sent[key], plain[key]) for key in plain) == (name != "none")


@pytest.mark.parametrize("shape", ["public", "past", "own"])
def test_shapes_are_of_updates(shape: str) -> None:
    """Also in the next round, from what was remembered."""
    model, order = task()
    settings: dict[str, Any] = {"relative_scale": 0.5, "shape": shape}
    defense = make_defense("optimal_noise", **settings)
    first, second = (
        protect_update(model, order, defense, learning_rate=RATE, generator=rng()) for _ in "ab"
    )
    assert first.noise is not None
    assert second.noise is not None
    assert first.noise.added is not None
    even = len(flat(dict(first.noise.added)).unique()) == 1
    assert even == (shape == "past")  # nothing is past in the first round
    assert len(flat(dict(second.noise.added or {})).unique()) > 1
    again = make_defense("optimal_noise", **settings)
    again.load_state_dict(defense.state_dict())
    both = [
        protect_update(model, order, one, learning_rate=RATE, generator=rng(3))
        for one in (defense, again)
    ]
    assert torch.equal(flat(dict(both[0])), flat(dict(both[1])))


def test_the_unit_is_the_updates() -> None:
    """Noise of scale σ has that deviation on Δθ, whatever the learning rate is."""
    model, order = task()
    for rate in (0.001, 0.1):
        plain = UpdateMap(model, order, learning_rate=rate).update()
        sent = protect_update(
            model, order, make_defense("gaussian_noise", scale=0.25), learning_rate=rate
        )
        noise = flat(dict(sent)) - flat(plain)
        # The deviation of d draws is off by σ/√(2d): here by less than five of these.
        assert abs(float(noise.std()) / 0.25 - 1) < 5 / math.sqrt(2 * len(noise))


def test_one_step_of_sgd_is_a_protected_gradient() -> None:
    """Defenses that scale with what they are given do the same to either."""
    model, (batch, _) = task()
    gradient = GradientMap(model, batch)
    for defense in (
        make_defense("pruning", ratio=0.7),
        make_defense("gaussian_noise", relative_scale=0.5, strength="own"),
        chain(make_defense("pruning", ratio=0.7), make_defense("gaussian_noise", strength="own")),
    ):
        sent = protect_update(model, [batch], defense, learning_rate=1.0, generator=rng())
        noise_turned = flat(dict(defense(gradient, rng())))
        pair = flat(dict(sent)), noise_turned
        if defense.name == "pruning":
            torch.testing.assert_close(pair[0], -pair[1])
        else:
            torch.testing.assert_close(pair[0].norm(), pair[1].norm(), rtol=0.1, atol=0.0)


def test_soteria_needs_one_representation() -> None:
    model, order = task()
    with pytest.raises(ValueError, match="runs once"):
        protect_update(model, order, "soteria", learning_rate=RATE)


def test_samples_of_several_steps_are_not_clipped_apart() -> None:
    model, order = task()
    defense = make_defense("dp_sgd", per_sample=True, clip=0.1, noise_multiplier=1.0)
    with pytest.raises(NotImplementedError, match="dp_sgd without per_sample"):
        protect_update(model, order, defense, learning_rate=RATE)


def test_checkpointed_layers_are_not_differentiated_twice() -> None:
    """First-order defenses work, and are right; the others are refused with the way out."""
    model, order = task()
    plain = UpdateMap(model, order, learning_rate=RATE, second_order=False).update()
    model.train()
    model.gradient_checkpointing_enable()
    sent = protect_update(model, order, "none", learning_rate=RATE)
    for name, change in plain.items():
        torch.testing.assert_close(sent[name], change)
    gmap = UpdateMap(model, order, learning_rate=RATE)
    with pytest.raises(RuntimeError, match="gradient_checkpointing_disable"):
        gmap.vjp(gmap.gradient())


def test_divergence_is_not_sent() -> None:
    model, order = task()
    with pytest.raises(FloatingPointError, match="not finite"):
        protect_update(model, [*order] * 4, "none", learning_rate=1e30)
