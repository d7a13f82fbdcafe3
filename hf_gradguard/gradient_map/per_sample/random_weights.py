"""Random weights in the place of a model's weight, for a trial at a point that hides nothing.

What a trial of a fresh model sees may be due to where it begins. A head of zeros gives all rows the
same output, so a loss of rows' differences is zero there, with its slopes; no slope passes it into
the layers before; and a branch behind a product of zeros is not seen at all. A step later all of
that counts. Whether rows are coupled follows from the code of the model and its loss, not from its
weights, so a second look at random weights sees what the first cannot: where two functions that are
analytic in the weights differ at all, they differ at nearly every point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

SPREAD = 0.1
"""Of vectors and single numbers, relative to what they are: gains and temperatures stay positive.
"""
ROUNDING = 2.0**-20
"""Relative: 16 times a rounding of float32, as of a sum over some hundred numbers."""


@contextmanager
def random_weights(parameters: Mapping[str, nn.Parameter], seed: int) -> Iterator[None]:
    """Let parameters hold random numbers inside the context, and their own again afterwards.

    Matrices are drawn with Σ w² of 1 over the inputs of an output, as after the usual
    initializations, so that numbers neither vanish nor grow from layer to layer. Vectors, as gains
    and biases, and single numbers move by a tenth of their size, and those near zero to one tenth.
    The tensors themselves are exchanged: no count of writes changes, no graph that was made before
    sees anything, and no generator of the user's is drawn from.

    Args:
        parameters: The parameters, by name. A parameter with several names is exchanged once.
        seed: Makes all numbers.

    Example:
        >>> weight = nn.Parameter(torch.zeros(2, 3))
        >>> with random_weights({"weight": weight}, seed=0):
        ...     bool(weight.any())
        True
        >>> bool(weight.any())
        False
    """
    generators: dict[torch.device, torch.Generator] = {}

    def randomized(weight: Tensor) -> Tensor:
        if weight.device not in generators:
            generators[weight.device] = torch.Generator(weight.device).manual_seed(seed)
        return _random(weight, generators[weight.device])

    with _exchanged(parameters, randomized):
        yield


@contextmanager
def last_bits_moved(parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Let parameters be off by about as much as rounding is off, inside the context.

    Example:
        >>> weight = nn.Parameter(torch.ones(2, 3))
        >>> with last_bits_moved({"weight": weight}):
        ...     (weight - 1).abs().max().item() < 1e-5
        True
    """

    def moved(weight: Tensor) -> Tensor:
        generator = torch.Generator(weight.device).manual_seed(0)
        return weight * (1 + ROUNDING * torch.empty_like(weight).normal_(generator=generator))

    with _exchanged(parameters, moved):
        yield


@contextmanager
def _exchanged(
    parameters: Mapping[str, nn.Parameter], make: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    weights = [(parameter, parameter.data) for parameter in parameters.values()]
    try:
        for parameter, weight in weights:
            parameter.data = make(weight)
        yield
    finally:
        for parameter, weight in weights:
            parameter.data = weight


def _random(weight: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.empty_like(weight).normal_(generator=generator)
    if weight.dim() > 1:
        return noise * (len(weight) / max(weight.numel(), 1)) ** 0.5
    # A single number may be a temperature, which is small and above zero.
    least = SPREAD if weight.numel() > 1 else SPREAD**3
    return weight + SPREAD * noise * torch.where(weight.abs() < least, 1.0, weight.abs())
