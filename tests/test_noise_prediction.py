"""The noise cannot be predicted: attacks that solve torch's own generator, from noise that is seen
bare and from the signs of large noise, find nothing in what is shared.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from helpers import flat, torch_rng
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification
from twister import Equations, linear_complexity, next_words, normals

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.defenses.noise import NoiseDefense
from hf_gradguard.randomness import Stream

LENGTH, WIDTH = 16, 64
Floats = NDArray[np.float64]


class Victim(NamedTuple):
    """Two messages of one client, one after the other.

    Args:
        first, second: What is shared.
        gradient: The true one, of both.
        noise: Of unit variance, of both messages.
    """

    first: Floats
    second: Floats
    gradient: Floats
    noise: tuple[Floats, Floats]


def share(gmap: GradientMap, defense: NoiseDefense, twister: bool) -> Victim:
    """What a defense shares with noise from a Mersenne Twister, or with its own."""
    generator, stream, drawn = torch_rng(1), Stream(), []

    noisy_of = Stream.noisy

    def noisy(own: Stream, values: Tensor, deviation: Tensor, *more: Any) -> Tensor:
        if twister:
            drawn.append(torch.randn(values.shape, generator=generator, dtype=values.dtype))
            return values + drawn[-1] * deviation.to(values)
        shared = noisy_of(own, values, deviation, *more)
        drawn.append((shared - values) / deviation)
        return shared

    messages, noises = [], []
    for _ in range(2):
        drawn.clear()
        with patch.object(Stream, "noisy", noisy):
            messages.append(flat(defense(gmap, stream)).double().numpy())
        noises.append(torch.cat(drawn).double().numpy())
    return Victim(*messages, flat(gmap.gradient()).double().numpy(), (noises[0], noises[1]))


def small_bert(layers: int, positions: int, sentences: int = 4) -> GradientMap:
    """Of tensors in multiples of 16 entries, as all but the heads of usual sizes are."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=WIDTH, num_hidden_layers=layers, num_attention_heads=2,
        intermediate_size=4 * WIDTH, max_position_embeddings=positions, type_vocab_size=1,
        num_labels=16,
    )  # fmt: skip
    ids = torch.randint(1, 50, (sentences, LENGTH))
    batch = {"input_ids": ids, "labels": torch.arange(sentences)}
    gmap = GradientMap(BertForSequenceClassification(config).eval(), batch)
    assert all(tensor.numel() % 16 == 0 for tensor in gmap.gradient().values())
    return gmap


def relative_error(found: Floats, true: Floats) -> float:
    return float(np.linalg.norm(found - true) / np.linalg.norm(true))


def correlation(one: Floats, two: Floats) -> float:
    return float(abs(np.corrcoef(one, two)[0, 1]) * len(one) ** 0.5)  # in standard deviations


def state_of(seed: int) -> NDArray[np.uint32]:
    """numpy's, an implementation of its own."""
    return np.random.RandomState(seed).get_state(legacy=False)["state"]["key"]


# The tools


def test_the_twister_is_the_published_one() -> None:
    """The ten-thousandth number of its standard seed, as in the C++ standard [rand.predef]."""
    assert next_words(state_of(5489), 10_000)[-1] == 4_123_659_995


LAYOUT = """
import sys, torch
capability, seed, count, path = sys.argv[1:]
assert torch.backends.cpu.get_cpu_capability() == capability, "not here"
torch.save(torch.randn(int(count), generator=torch.Generator().manual_seed(int(seed))), path)
"""


def test_torchs_noise_is_made_so() -> None:
    """Whatever this machine's capability: the attacks below depend on it."""
    found = torch.randn(40, 16, generator=torch_rng(7)).flatten().double().numpy()
    assert np.abs(normals(next_words(state_of(7), 640)) - found).max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_torchs_noise_is_made_so_under_every_capability(capability: str, tmp_path: Path) -> None:
    arguments = [capability.upper(), "7", "640", str(tmp_path / "noise.pt")]
    ran = subprocess.run(
        [sys.executable, "-c", LAYOUT, *arguments],
        env=os.environ | {"ATEN_CPU_CAPABILITY": capability}, capture_output=True, text=True,
    )  # fmt: skip
    if "not here" in ran.stderr:
        pytest.skip(f"this machine has no {capability}")
    assert ran.returncode == 0, ran.stderr
    found = torch.load(arguments[-1]).double().numpy()
    assert np.abs(normals(next_words(state_of(7), 640)) - found).max() < 1e-5


def test_linear_complexity_by_hand() -> None:
    """Massey's own kind of example: 0011101 is of s[i] = s[i-1] + s[i-3]; ones need one bit."""
    assert linear_complexity([1, 1, 1, 1]) == (1, 0b11)
    assert linear_complexity([0, 0, 1, 1, 1, 0, 1] * 3) == (3, 0b1011)
    assert linear_complexity([0, 0, 0, 1])[0] == 4
    random = np.random.default_rng(1).integers(0, 2, 2000).tolist()
    assert abs(linear_complexity(random)[0] - 1000) < 10


# Signs alone, by a recurrence: fast, and it needs to know nothing of the generator


class WithUnused(nn.Module):
    """A classifier with parameters that nothing uses, so that their noise is seen bare."""

    def __init__(self, unused: int) -> None:
        super().__init__()
        self.head, self.unused = nn.Linear(12, 3), nn.Parameter(torch.zeros(unused))

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.head(pixel_values.flatten(1)), labels)}


KNOWN, FURTHER = 42_000, 2000


def bare_signs(name: str, twister: bool) -> NDArray[np.int64]:
    batch = {"pixel_values": torch.rand(2, 3, 2, 2), "labels": torch.tensor([0, 1])}
    gmap = GradientMap(WithUnused(16 * (KNOWN + FURTHER)), batch, second_order=False)
    shared = share(gmap, make_defense(name, scale=0.1), twister).first
    return (shared[-16 * (KNOWN + FURTHER) :] < 0).astype(np.int64)


def predicted(bits: NDArray[np.int64], recurrence: int) -> float:
    """For which share of the last bits the recurrence holds."""
    back = np.array([k for k in range(recurrence.bit_length()) if recurrence >> k & 1])
    last = np.arange(len(bits) - FURTHER, len(bits))
    return float((bits[last[:, None] - back].sum(1) % 2 == 0).mean())


def test_signs_of_torchs_noise_follow_a_recurrence() -> None:
    """The control of the test below: from 42,000 signs, every 16th one, the others follow; also
    those of the other values, and of any other seed.
    """
    bits = bare_signs("gaussian_noise", twister=True).reshape(-1, 16)
    length, recurrence = linear_complexity(bits[:KNOWN, 8].tolist())
    assert (length, recurrence.bit_count()) == (19_937, 135)
    others = torch.randn(KNOWN + FURTHER, 16, generator=torch_rng(2)).numpy() < 0
    for signs in (*bits.T, *others.T):  # at angles of just 90° a sign is rounding's
        assert predicted(signs.astype(np.int64), recurrence) > 0.95


@pytest.mark.parametrize("name", ["gaussian_noise", "laplace_noise", "dp_sgd"])
def test_signs_of_our_noise_follow_none(name: str) -> None:
    bits = bare_signs(name, twister=False)
    chance = 6 / (2 * FURTHER**0.5)
    for signs in (bits[8::16], bits[: KNOWN + FURTHER]):
        length, recurrence = linear_complexity(signs[:KNOWN].tolist())
        assert abs(length - KNOWN // 2) < 30  # as random bits: its variance is 86/81
        assert abs(predicted(signs, recurrence) - 0.5) < chance


# The state, by linear algebra


ROWS_KNOWN = 8000 // WIDTH  # position rows beyond the text that are enough


@pytest.mark.slow
def test_noise_that_is_seen_bare_gives_nothing_away() -> None:
    """Position rows beyond the text have no gradient. From torch's noise on them follows all noise
    of this message and of the next; ours contradicts itself.
    """
    gmap = small_bert(layers=1, positions=LENGTH + ROWS_KNOWN)
    names, sizes = zip(*((n, g.numel()) for n, g in gmap.gradient().items()), strict=True)
    end = int(np.cumsum(sizes)[names.index("bert.embeddings.position_embeddings.weight")])
    places = np.arange(end - ROWS_KNOWN * WIDTH, end, 16)
    known = slice(int(places[0]), end)
    victims = [
        share(gmap, make_defense("gaussian_noise", relative_scale=3.0), twister)
        for twister in (True, False)
    ]
    assert not victims[0].gradient[known].any()
    bare = [victim.first[known].reshape(-1, 16) for victim in victims]
    torchs, ours = Equations.of_angles(places, *bare).solve()
    size = len(victims[0].first)

    def subtracted(victim: Victim, state: NDArray[np.uint32]) -> tuple[Floats, list[Floats]]:
        """The next message's noise, and the gradients that both messages give."""
        unit = normals(next_words(state, 2 * size)).reshape(2, size)
        clean = []
        for message, noise in zip((victim.first, victim.second), unit, strict=True):
            scale = message[known] @ noise[known] / (noise[known] @ noise[known])
            clean.append(message - scale * noise)
        return unit[1], clean

    victim = victims[0]
    assert torchs.contradictions == 0
    assert 2.9 < relative_error(victim.second, victim.gradient) < 3.1
    noise, clean = subtracted(victim, torchs.state)
    assert relative_error(noise, victim.noise[1]) < 1e-5
    assert max(relative_error(found, victim.gradient) for found in clean) < 1e-5

    victim = victims[1]
    assert ours.contradictions > 1000  # half of the equations beyond the 19,937 that fix a state
    noise, clean = subtracted(victim, ours.state)
    assert correlation(noise, victim.noise[1]) < 6
    assert min(relative_error(found, victim.gradient) for found in clean) > 2.9


SIGNS = 22_500


@pytest.mark.slow
@pytest.mark.parametrize("twister", [True, False])
@pytest.mark.parametrize("name", ["gaussian_noise", "optimal_noise"])
def test_signs_give_nothing_away(name: str, twister: bool) -> None:
    """No zeros are known, and no scale. But where gradients are small is: the attacker takes the
    values that are largest beside each tensor's gradient of random sentences.
    """
    gmap = small_bert(layers=4, positions=LENGTH)
    own = {"input_ids": torch.randint(1, 50, (16, LENGTH)), "labels": torch.arange(16)}
    usual = GradientMap(gmap.model, own, second_order=False).gradient()
    sizes = flat({n: g.square().mean().sqrt().expand_as(g) for n, g in usual.items()}).numpy()
    settings = {"num_probes": 2} if name == "optimal_noise" else {}
    victim = share(gmap, make_defense(name, relative_scale=3.0, **settings), twister)
    places = np.argsort(-np.abs(victim.first) / sizes)[:SIGNS]
    values = victim.first[places]
    assert ((values < 0) == (victim.noise[0][places] < 0)).all()  # no wrong one
    (found,) = Equations.of_signs(places, values).solve()
    size = len(victim.first)
    noise = normals(next_words(found.state, 2 * size)).reshape(2, size)
    if twister:
        assert found.contradictions == 0
        assert relative_error(noise[1], victim.noise[1]) < 1e-5
    else:
        assert found.contradictions > 1000
        assert correlation(noise[1], victim.noise[1]) < 6
