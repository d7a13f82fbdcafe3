"""Estimates of how large a client's gradients usually are.

They come from random inputs, and from what was shared since.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..gradient_map import GradientMap, Tensors
from ..gradient_map.domain import Text, domains_in, special_ids
from ..gradient_map.random_batch import random_batch, resize_texts
from ..randomness import Stream
from .message import power

FIRST_BATCHES = 4
"""Random batches that the first estimate is of."""
_REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError,
             ValueError)  # fmt: skip
"""What models and losses raise of inputs that they do not take."""
PRIOR_SPREAD = 2.0
"""Of ‖g‖² on random inputs, relative to that on real ones: hardly more than its order is known."""
BATCH_SPREAD = 0.5
"""Of ‖g‖² between batches, relative to its mean."""
DRIFT = 0.05
"""Of the mean from one message to the next, relative to it."""
STRENGTH_KEY = "usual_power"
"""What the state of a strength is called."""
LEAST_STEP = 0.5
"""What an estimate keeps at least from one message to the next: it stays above 0."""


class UsualPower(NamedTuple):
    """An estimate of E ‖g‖², by a Kalman filter over messages.

    It is a function of random numbers and of what was shared, so it reveals nothing new.

    Noise of r times *this* gradient shows its norm: ‖y‖² is ‖g‖² (1 + r²), to 2 in 10,000 of a
    model of 22 million parameters, and the norm alone names a sentence among hundreds. Noise of r
    times the *usual* gradient shows nothing.

    Args:
        mean: The estimate of E ‖g‖²; 0 before the first message.
        variance: The variance of the estimate.

    Example:
        >>> usual = UsualPower.of_random_inputs(4.0)
        >>> for _ in range(100):
        ...     usual = usual.updated(message_power=51.0, noise_power=50.0, noise_squares=0.1)
        >>> round(usual.mean, 2)
        1.0
    """

    mean: float = 0.0
    variance: float = 0.0

    @classmethod
    def of_random_inputs(cls, random_power: float) -> UsualPower:
        """Return the first estimate, given ‖g‖² of random inputs."""
        return cls(random_power, (PRIOR_SPREAD * random_power) ** 2)

    def updated(self, message_power: float, noise_power: float, noise_squares: float) -> UsualPower:
        """Return the estimate after one more message.

        Args:
            message_power: The squared norm ‖y‖² of the message.
            noise_power: The trace Tr Σ of the noise's covariance.
            noise_squares: The trace Tr Σ².
        """
        # Of ‖g + n‖² - Tr Σ: of ‖n‖², of 2⟨g, n⟩ with n along g as anywhere, and of batches.
        along = noise_squares / noise_power if noise_power else 0.0
        error = 2 * noise_squares + 4 * along * self.mean + (BATCH_SPREAD * self.mean) ** 2
        variance = self.variance + (DRIFT * self.mean) ** 2
        gain = variance / (variance + error)
        change = gain * (message_power - noise_power - self.mean)
        return UsualPower(max(self.mean + change, LEAST_STEP * self.mean), (1 - gain) * variance)

    def tensors(self) -> Tensors:
        """Return the mean and the variance, for a checkpoint; nothing before the first message."""
        state = torch.tensor([self.mean, self.variance], dtype=torch.float64)
        return {STRENGTH_KEY: state} if self.mean else {}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> UsualPower | None:
        """Read the estimate from a checkpoint's tensors, if they hold one."""
        state = tensors.pop(STRENGTH_KEY, None)
        return None if state is None else cls(*state.tolist())


def random_power(
    gmap: GradientMap, generator: Stream, prepared: Callable[[Tensors], Tensors]
) -> float:
    """Return the mean of ‖g‖² over random inputs with random labels.

    Args:
        gmap: The client's map.
        generator: The source of the inputs.
        prepared: What is done to a gradient before noise is added, such as clipping.

    Raises:
        ValueError: If the model takes no inputs that can be made up; the message has the way out.
    """
    powers = []
    try:
        client = gmap.undefended
        for _ in range(FIRST_BATCHES):
            gradient = prepared(_on_public_data(client, generator).gradient())
            powers.append(float(power(gmap.restrict(gradient), gmap.shards)))
    except _REFUSALS as error:
        raise ValueError(
            "Noise relative to the usual gradient begins with random inputs, and such as this "
            "model's cannot be made up. Give `scale` in place of relative_scale and "
            f"utility_budget. {error}"
        ) from error
    mean = math.fsum(powers) / len(powers)
    if not 0 < mean < math.inf:
        raise ValueError(
            "The gradient of random inputs is zero or not finite, so nothing says how strong noise "
            "must be. Give `scale` in place of relative_scale and utility_budget."
        )
    return mean


def is_anything_left(gmap: GradientMap) -> bool:
    """Return whether a defense before this one left an entry to transmit.

    One that waits for more batches leaves none.
    """
    if gmap.transmitted is None:
        return True
    is_here = any(bool(mask.any()) for mask in gmap.transmitted.values())
    return is_here if gmap.shards is None else gmap.shards.any(is_here)


def _on_public_data(client: GradientMap, generator: Stream) -> GradientMap:
    """Return the client's map on a public batch.

    Its texts have a length of their own, which is not the private batch's. Models that take one
    length alone are given that length.
    """
    try:
        return client.on_other_data(lambda b: public_batch(client.model, b, generator, True))
    except _REFUSALS:
        return client.on_other_data(lambda b: public_batch(client.model, b, generator, False))


def public_batch(
    model: nn.Module, batch: Mapping[str, Any], generator: Stream, of_own_length: bool = True
) -> dict[str, Any]:
    """Return random inputs and labels, with as many rows as a batch has.

    Entries of an unknown kind are replaced by normal numbers, `True`, or indices that every table
    of the model has.

    Args:
        model: The model, which says how many tokens and classes there are.
        batch: The batch, for shapes and types.
        generator: The source of the inputs and labels.
        of_own_length: Whether texts are of 16 tokens, whatever the batch's length.

    Example:
        >>> public_batch(model, batch, Stream())["input_ids"].shape
        torch.Size([2, 16])
    """

    def unknown(entry: Any) -> Any:
        if not isinstance(entry, Tensor):
            return entry
        if entry.is_floating_point():
            return generator.normal(entry.shape, device=entry.device).to(entry.dtype)
        if entry.dtype == torch.bool or entry.dim() < 2:
            return torch.full_like(entry, entry.dtype == torch.bool)
        tables = (getattr(module, "num_embeddings", None) for module in model.modules())
        rows = min((rows for rows in tables if isinstance(rows, int)), default=1)
        return generator.integers(rows, entry.shape, device=entry.device).to(entry.dtype)

    domains = domains_in(batch)
    try:
        (domain,) = domains
        if isinstance(domain, Text) and of_own_length:
            batch = resize_texts(domain, model, batch)
        return random_batch(domain, model, batch, generator, special_ids(model), unknown)
    except (AttributeError, ValueError):  # no text or image, or several, or tables without a name
        return {name: unknown(entry) for name, entry in batch.items()}
