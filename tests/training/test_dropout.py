"""Dropout follows a private stream, and leaves torch's global generators as they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import dropout

from hf_gradguard.randomness import Stream, private_draws
from hf_gradguard.training.message import RandomStreams


def mask(stream: Stream) -> torch.Tensor:
    with private_draws(stream, "cpu"):
        return dropout(torch.ones(1000), 0.5) != 0


def test_the_generators_state_is_the_streams_words() -> None:
    """NumPy has the same Mersenne Twister: with those 624 words as its state it draws the same."""
    twister = np.random.RandomState()
    words = torch.cat([part.clone() for part in Stream.from_seeds(3).words(624)]).numpy()
    twister.set_state(("MT19937", words.view(np.uint32), 624))
    expected = twister.randint(0, 2**32, 4000, dtype=np.uint32)[1::2] % 2**31
    with private_draws(Stream.from_seeds(3), "cpu"):  # two words a number, the lower one last
        drawn = [int(torch.randint(0, 2**31, ())) for _ in range(2000)]
    assert len(set(drawn)) > 1990
    assert drawn == expected.tolist()


def test_generators_go_on_as_if_nothing_had_been_drawn() -> None:
    before = torch.get_rng_state()
    assert not torch.equal(mask(Stream()), mask(Stream()))
    with pytest.raises(ValueError, match="dropout probability"), private_draws(Stream(), "cpu"):
        dropout(torch.rand(3), 2.0)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(mask(Stream.from_seeds(1)), mask(Stream.from_seeds(1)))


def test_dropout_has_a_stream_only_if_it_is_private() -> None:
    *_, private = RandomStreams().next_message(step=0)
    *_, public = RandomStreams(private_dropout=False).next_message(step=0)
    assert isinstance(private, Stream)
    assert public is None


def test_a_torch_seed_is_too_short() -> None:
    """The reason that the state is drawn: the generator of the CPU cuts its seed to 32 bits."""
    one, two = (torch.Generator().manual_seed(seed) for seed in (7, 7 + 2**32))
    assert torch.equal(torch.rand(5, generator=one), torch.rand(5, generator=two))
