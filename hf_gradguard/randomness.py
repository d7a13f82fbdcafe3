"""Random numbers that a peer cannot repeat.

A Trainer seeds every rank alike, so noise from the global generator is the same on all ranks:
whoever knows the seed subtracts it.
"""

from __future__ import annotations

import secrets

import numpy as np
import torch


def private_generator(device: torch.device | str = "cpu") -> torch.Generator:
    """A generator seeded from the operating system's entropy.

    On the CPU the whole state of the Mersenne Twister is drawn: `manual_seed` would keep 32 bits,
    few enough to try them all against noise seen on a coordinate whose true gradient is known.
    Other devices take a 64-bit key.

    Neither algorithm is cryptographic. See "sharp edges" in `docs/threat_model.md`.
    """
    generator = torch.Generator(device=device)
    generator.manual_seed(secrets.randbits(64))
    if generator.device.type == "cpu":
        _fill_mersenne_twister(
            generator, np.frombuffer(secrets.token_bytes(4 * _WORDS), dtype="<u4")
        )
    return generator


def seeded_generator(device: torch.device | str, *seeds: int) -> torch.Generator:
    """A generator that the same non-negative `seeds` reproduce. For tests: whoever knows them knows
    the noise.
    """
    sequence = np.random.SeedSequence(seeds)
    generator = torch.Generator(device=device)
    generator.manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> 1))
    if (
        generator.device.type == "cpu"
    ):  # all 32-bit seeds would collide after some ten thousand messages
        _fill_mersenne_twister(generator, sequence.generate_state(_WORDS, np.uint32))
    return generator


_WORDS = 624  # of the Mersenne Twister's state
_OFFSET = 24  # bytes before them in torch's layout: the seed, the words left, a flag, the next word


def _fill_mersenne_twister(generator: torch.Generator, words: np.ndarray) -> None:
    # torch keeps each 32-bit word in 64 bits. A fresh generator has no words left, so the first
    # draw mixes all of these.
    state = generator.get_state()
    state.numpy()[_OFFSET : _OFFSET + 8 * _WORDS] = words.astype("<u8").view(np.uint8)
    generator.set_state(state)
