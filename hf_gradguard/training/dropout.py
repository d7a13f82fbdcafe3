"""Dropout that no other rank can repeat.

A Trainer seeds all ranks alike, so every rank would know which units another one's message left
out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..randomness import Stream

_STATE_WORDS = 624  # of a Mersenne Twister


@contextmanager
def private_draws(stream: Stream | None, device: torch.device | str) -> Iterator[None]:
    """Let torch's global generators follow `stream`. Afterwards they are as before, so that
    whatever else draws from them (the order of data, checkpoints of their state) never sees it.

    Args:
        stream: `None` leaves them alone.
        device: Of the model. On the CPU the generator's whole state is drawn; an accelerator's has
            a key of 64 bits.

    Example:
        >>> with private_draws(Stream(), "cpu"):
        ...     mask = torch.nn.functional.dropout(torch.ones(9))
    """
    if stream is None:
        yield
        return
    device = torch.device(device)
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(_state(stream))
            yield
        return
    accelerator = torch.get_device_module(device.type)
    index = accelerator.current_device() if device.index is None else device.index
    with torch.random.fork_rng(devices=[index], device_type=device.type):
        torch.set_rng_state(_state(stream))
        accelerator.manual_seed(int.from_bytes(stream.bytes(8), "little"))
        yield


def _state(stream: Stream) -> torch.Tensor:
    """The state of a CPU generator, of 19,968 bits. A seed would be cut to 32."""
    state = torch.Generator().manual_seed(0).get_state()
    words = torch.cat([part.long() for part in stream.words(_STATE_WORDS)])
    # after the seed, two flags and the place: the words, as unsigned 64 bits each
    state.view(torch.int64)[3 : 3 + _STATE_WORDS] = words & 0xFFFFFFFF
    return state
