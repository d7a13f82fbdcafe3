"""Generators: private ones cannot be repeated, seeded ones can."""

from __future__ import annotations

import secrets

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_gradguard.randomness import private_generator, seeded_generator

OFFSET, WORDS = 24, 624  # of the Mersenne Twister's words in torch's state: checked below


def words_of(generator: torch.Generator) -> np.ndarray:
    return generator.get_state().numpy()[OFFSET : OFFSET + 8 * WORDS].view("<u8")


def draws(generator: torch.Generator, count: int = 1500) -> Tensor:
    """Raw output, 31 bits a number. More numbers than words, so that the state is mixed at least
    twice.
    """
    return torch.empty(count, dtype=torch.int32).random_(generator=generator)


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**32 - 1])
def test_layout_of_torchs_state(seed: int) -> None:
    """NumPy's RandomState is the same Mersenne Twister, seeded in the same way: words and output
    must be equal.
    """
    generator, reference = torch.Generator().manual_seed(seed), np.random.RandomState(seed)
    words = reference.get_state()[1]
    assert np.array_equal(words_of(generator), words)
    assert generator.get_state().numel() >= OFFSET + 8 * WORDS
    expected = reference.randint(0, 2**32, 1500, dtype=np.uint32) % 2**31
    assert np.array_equal(draws(generator).numpy(), expected)


def test_private_words_are_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn from the system is what the Twister runs on: NumPy's from the same words gives
    the same output.
    """
    entropy = np.random.default_rng(0).bytes(4 * WORDS)
    monkeypatch.setattr(secrets, "token_bytes", lambda size: entropy[:size])
    reference = np.random.RandomState()
    reference.set_state(("MT19937", np.frombuffer(entropy, dtype="<u4"), WORDS))
    expected = reference.randint(0, 2**32, 1500, dtype=np.uint32) % 2**31
    assert np.array_equal(draws(private_generator()).numpy(), expected)


def test_private_generators_differ() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    one, two = private_generator(), private_generator()
    assert torch.equal(torch.get_rng_state(), state)  # and do not touch the global one
    streams = [draws(one), draws(two), draws(torch.default_generator)]
    torch.manual_seed(0)
    streams += [draws(private_generator())]
    for i, a in enumerate(streams):
        for b in streams[:i]:
            assert (a == b).sum() < 10  # of 1,500 numbers of 31 bits


def test_private_state_is_more_than_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the seed forced to be equal, the streams still differ: 2³² trials do not find them."""
    monkeypatch.setattr(secrets, "randbits", lambda bits: 7)
    one, two = private_generator(), private_generator()
    assert one.initial_seed() == two.initial_seed()
    assert (words_of(one) != words_of(two)).sum() > WORDS - 5
    assert (draws(one) == draws(two)).sum() < 10


def test_private_state_is_no_seeds_expansion() -> None:
    """`manual_seed` computes each word from the one before it; here hardly any follows from its
    predecessor.
    """

    def following(words: np.ndarray) -> int:
        words = words.astype(np.uint64)
        i = np.arange(1, WORDS, dtype=np.uint64)
        successor = (1812433253 * (words[:-1] ^ (words[:-1] >> np.uint64(30))) + i) % 2**32
        return int((successor == words[1:]).sum())

    assert following(words_of(torch.Generator().manual_seed(5))) == WORDS - 1
    assert following(words_of(private_generator())) < 5
    assert following(words_of(seeded_generator("cpu", 5))) < 5


@pytest.mark.parametrize("word", [0, 1, 311, 623])
def test_every_word_counts(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    entropy = bytearray(np.random.default_rng(1).bytes(4 * WORDS))
    monkeypatch.setattr(secrets, "token_bytes", lambda size: bytes(entropy[:size]))
    before = draws(private_generator())
    entropy[4 * word + 3] ^= 0x80  # the top bit, the only one of word 0 that the algorithm uses
    assert not torch.equal(draws(private_generator()), before)


def test_seeded_generators_are_reproducible() -> None:
    assert torch.equal(
        draws(seeded_generator("cpu", 1, 2, 3)), draws(seeded_generator("cpu", 1, 2, 3))
    )
    state = torch.get_rng_state()
    seeded_generator("cpu", 1)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "other", [(2, 2, 3), (1, 3, 3), (1, 2, 4), (2, 1, 3), (1, 2), (1,), (1, 2, 3 + 2**32)]
)
def test_seeded_generators_differ_by_each_seed(other: tuple[int, ...]) -> None:
    assert (
        draws(seeded_generator("cpu", 1, 2, 3)) == draws(seeded_generator("cpu", *other))
    ).sum() < 10


def test_seeded_generators_have_more_than_a_seed() -> None:
    """Two that torch's own seed could not tell apart: the words come from more than it."""
    words = words_of(seeded_generator("cpu", 1, 2, 3))
    seed = seeded_generator("cpu", 1, 2, 3).initial_seed()
    assert (words != words_of(torch.Generator().manual_seed(seed))).sum() > WORDS - 5


def test_seeds_must_not_be_negative() -> None:
    with pytest.raises(ValueError, match="non-negative"):
        seeded_generator("cpu", 1, -2)


@pytest.mark.parametrize("kind", ["private", "seeded"])
def test_normals(kind: str) -> None:
    """Moments within 6 standard errors of n = 10⁶ draws: a private stream fails once in 10⁸
    runs.
    """
    generator = private_generator() if kind == "private" else seeded_generator("cpu", 1, 2)
    n = 10**6
    x = torch.randn(n, generator=generator, dtype=torch.float64)
    assert abs(x.mean()) < 6 * n**-0.5
    assert abs(x.square().mean() - 1) < 6 * (2 / n) ** 0.5
    assert abs(x.pow(3).mean()) < 6 * (15 / n) ** 0.5
    assert abs(x.pow(4).mean() - 3) < 6 * (96 / n) ** 0.5
    assert abs((x[1:] * x[:-1]).mean()) < 6 * n**-0.5
    assert abs((x[WORDS:] * x[:-WORDS]).mean()) < 6 * n**-0.5
