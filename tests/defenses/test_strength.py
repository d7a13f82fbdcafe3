"""Strength from the transcript: noise as strong as the usual gradient asks for, whatever this
batch's own is.
"""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers import flat, make_task, small_convolution
from torch import Tensor, nn

from hf_gradguard import GradientMap, chain, make_defense
from hf_gradguard.defenses.noise import UsualPower
from hf_gradguard.federation import UpdateMap, protect_update
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


CANDIDATES, MESSAGES, FIRST = 400, 40, 20


@functools.cache
def sentences() -> tuple[list[GradientMap], np.ndarray, int]:
    """Maps of some sentences, the gradients' norms of all of them, and entries of a gradient."""
    generator = torch.Generator().manual_seed(1)
    model, batch = make_task("bert")
    with torch.no_grad():  # sure of some sentences, as trained models are: gradients' norms differ
        model.classifier.weight.mul_(30)
    words = len(model.get_input_embeddings().weight)
    one = {name: entry[:1] for name, entry in batch.items()}
    texts = (
        {**one, "input_ids": torch.randint(words, one["input_ids"].shape, generator=generator)}
        for _ in range(CANDIDATES)
    )
    made = [GradientMap(model, text, second_order=False) for text in texts]
    norms = np.array([float(flat(gmap.gradient()).norm()) for gmap in made])
    return made[:MESSAGES], norms, len(flat(made[0].gradient()))


def named_by_norms(defense: Any, clip: float) -> int:
    """Of messages of one client, how many are of a sentence whose gradient's norm is among the
    nearest of all sentences to what the message's own says.

    The attacker knows the settings, and what it was told of the noise's strength by the transcript.
    """
    made, norms, entries = sentences()
    norms, named = np.minimum(norms, clip), 0
    for truth, gmap in enumerate(made):
        message = defense(gmap, Stream())
        shared = float(flat(message).double().square().sum())
        if defense.strength == "own":
            power = shared / (1 + defense.relative_scale**2)
        else:
            power = shared - entries * message.metrics["noise_scale"] ** 2
        named += int(truth in np.argsort(np.abs(norms**2 - power), kind="stable")[:FIRST])
    return named


@pytest.mark.statistics
@pytest.mark.parametrize("relative", [20.0, 1_000.0])
@pytest.mark.parametrize("kind", NOISES)
def test_norms_of_messages_name_no_sentence(kind: str, relative: float) -> None:
    """Of 400, by what the norm says of the gradient's. The control: with its own strength a message
    is named at any strength.
    """
    name, settings = NOISES[kind]
    clip = settings.get("clip", math.inf) if name == "dp_sgd" else math.inf
    if name == "dp_sgd":  # a bound that leaves norms as they are
        clip, settings = 1e3, {"clip": 1e3}
    elif name == "optimal_dp_sgd":
        settings = {"clip": 1e3}
    _, norms, entries = sentences()
    spread = (norms**2).std() / (norms**2).mean()
    # Of a known strength the law of the noise hides that; of the batch's own it does not.
    assert 4 * math.sqrt(2 / entries) < spread < 0.25 * relative**2 * math.sqrt(2 / entries)
    counts = {
        strength: named_by_norms(
            make_defense(name, relative_scale=relative, strength=strength, **settings), clip
        )
        for strength in ("transcript", "own")
    }
    assert counts["transcript"] <= 8  # 2 of 40 by chance: P(more than 8) < 2e-4
    assert counts["own"] > 8


@pytest.mark.long
def test_weak_noise_says_no_more_by_its_strength_than_a_stated_one() -> None:
    """Noise as large as the gradient hides no norm, whatever its strength follows: what is left is
    that of a stated `scale`.
    """
    made, _, entries = sentences()
    defense = make_defense("gaussian_noise", relative_scale=1.0)
    for gmap in made[:5]:
        usual = defense.state_dict().get("usual_power")
        message = defense(gmap, Stream.from_seeds(7))
        if usual is None:
            continue
        stated = make_defense("gaussian_noise", scale=math.sqrt(float(usual[0]) / entries))
        torch.testing.assert_close(flat(message), flat(stated(gmap, Stream.from_seeds(7))))


@pytest.mark.parametrize("kind", NOISES)
def test_the_next_strength_follows_from_what_was_shared(kind: str) -> None:
    """A batch of another gradient gets the same noise, and moves the state by its message alone."""
    name, settings = NOISES[kind]
    *earlier, first, second = maps(6)
    client = make_defense(name, relative_scale=20, **settings)
    for gmap in earlier:
        client(gmap, Stream())
    scales = []
    for gmap in (first, second):
        other = copy.deepcopy(client)
        scales.append(other(gmap, Stream()).metrics["noise_scale"])
    assert scales[0] == pytest.approx(scales[1], rel=1e-9)


def test_a_length_is_not_in_the_first_strength() -> None:
    model, batch = make_task("bert")
    scales = []
    for length in (4, 7):
        short = {
            name: entry[:, :length] if entry.dim() == 2 else entry for name, entry in batch.items()
        }
        defense = make_defense("gaussian_noise", relative_scale=20)
        gmap = GradientMap(model, short, second_order=False)
        scales.append(defense(gmap, Stream.from_seeds(3)).metrics["noise_scale"])
    assert scales[0] == scales[1]


def audio(batch: Tensor, labels: Tensor) -> dict[str, Tensor]:
    return {"input_values": batch, "labels": labels}


class Sounds(nn.Module):
    """Neither text nor image, and classes that no config counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(30, 3)

    def forward(self, input_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layer(input_values), labels)}


class Bags(nn.Module):
    """Texts of a module that names no embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.EmbeddingBag(50, 8), nn.Linear(8, 2)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layer(self.words(input_ids))
        return {"loss": nn.functional.cross_entropy(logits, labels)}


class OneLength(nn.Module):
    """Texts of seven tokens and no others."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(50, 8), nn.Linear(7 * 8, 2)

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layer(self.words(input_ids).flatten(1))
        return {"loss": nn.functional.cross_entropy(logits, labels)}


@pytest.mark.parametrize("module", [Sounds, Bags, OneLength])
def test_plain_modules_have_a_first_strength(module: type[nn.Module]) -> None:
    torch.manual_seed(0)
    labels, ids = torch.tensor([0, 1]), torch.randint(50, (2, 7))
    batch = audio(torch.randn(2, 30), labels)
    if module is not Sounds:
        batch = {"input_ids": ids, "labels": labels}
    gmap = GradientMap(module(), batch, second_order=False, needs_input=False)
    message = make_defense("gaussian_noise", relative_scale=5)(gmap, Stream())
    usual = 5 * float(flat(gmap.gradient()).norm()) / math.sqrt(len(flat(message)))
    assert 0.2 < message.metrics["noise_scale"] / usual < 5


def test_local_training_has_a_first_strength() -> None:
    """Of any kind of batches, whose number of steps and rates are the client's."""
    model, batch = make_task("bert")
    noise = make_defense("gaussian_noise", relative_scale=1.0)
    sent = protect_update(model, [batch, batch], noise, learning_rate=0.1)
    change = UpdateMap(model, [batch, batch], learning_rate=0.1).update()
    usual = float(flat(change).norm()) / math.sqrt(len(flat(sent)))
    assert 0.2 < sent.metrics["noise_scale"] / usual < 5


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
        usual = UsualPower.of_random_inputs(start)
        for _ in range(300):
            variance = relative**2 * usual.mean / entries
            norm, std = math.sqrt(power) * random.lognormal(0, 0.1), math.sqrt(variance)
            shared = norm**2 + 2 * norm * random.normal(0, std)
            shared += variance * random.chisquare(entries)
            usual = usual.updated(shared, variance * entries, variance**2 * entries)
        assert usual.mean == pytest.approx(power, rel=0.5)


def best_estimate(start: float, messages: list[float], noise: float) -> float:
    """The mean after some messages by one regression of all of them, where each says the power of
    its own day: by hand, of spreads of 200 % before, 5 % a message, and 50 % between batches.

    Args:
        start: Of random inputs.
        messages: ‖y‖² - Tr Σ of each.
        noise: Tr Σ of each, with entries so many that nothing else of it counts.
    """
    mean, days = start, len(messages)
    for day in range(1, days + 1):  # spreads are relative to the estimate of the day
        rates = [start] + [best_estimate(start, messages[:d], noise) for d in range(1, day)]
        steps = [(2.0 * start) ** 2] + [(0.05 * rate) ** 2 for rate in rates]
        drift = np.array([[sum(steps[: 2 + min(a, b)]) for b in range(day)] for a in range(day)])
        errors = np.diag([(0.5 * rate) ** 2 for rate in rates])
        apart = np.array(messages[:day]) - start
        mean = start + float(drift[-1] @ np.linalg.solve(drift + errors, apart))
    return mean


@pytest.mark.parametrize("factor", [30.0, 1.5, 0.9])
def test_the_estimate_is_the_best_of_its_spreads(factor: float) -> None:
    """A first strength that is 30 times too weak is mended by the first message."""
    usual = UsualPower.of_random_inputs(2.0)
    messages = [2.0 * factor, 2.2 * factor, 1.9 * factor, 2.1 * factor]
    for day, power in enumerate(messages, 1):
        usual = usual.updated(power + 50.0, noise_power=50.0, noise_squares=1e-12)
        assert usual.mean == pytest.approx(best_estimate(2.0, messages[:day], 50.0), rel=1e-6)
    if factor == 30.0:
        assert usual.mean > 0.9 * 2.0 * factor


def test_it_never_falls_to_zero() -> None:
    usual = UsualPower.of_random_inputs(1.0)
    for _ in range(20):
        before = usual.mean
        usual = usual.updated(message_power=0.0, noise_power=5.0, noise_squares=1e-6)
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
