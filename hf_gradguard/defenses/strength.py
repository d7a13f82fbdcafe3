"""How large a client's gradients usually are, known without the one that is about to be shared.

Noise of r times *this* gradient shows its norm: ‖y‖² is ‖g‖² (1 + r²), to 2 in 10,000 of a model of
22 million parameters. The norm alone names a sentence among hundreds. Noise of r times the *usual*
gradient shows nothing: that is known from random inputs at first, and later from what was shared
already, ‖y‖² - Tr Σ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..gradient_map import GradientMap, Tensors
from ..gradient_map.domain import domain_of_batch, special_ids
from ..gradient_map.random_batch import random_batch
from ..randomness import Stream
from .message import power

FIRST_BATCHES = 4
"""Random batches that the first estimate is of."""
PRIOR_SPREAD = 2.0
"""Of ‖g‖² on random inputs, relative to that on real ones: hardly more than its order is known."""
BATCH_SPREAD = 0.5
"""Of ‖g‖² between batches, relative to its mean."""
DRIFT = 0.05
"""Of the mean from one message to the next, relative to it."""
LEAST_STEP = 0.5
"""What an estimate keeps at least from one message to the next: it stays above 0."""


class UsualPower:
    """An estimate of E ‖g‖², by a Kalman filter over messages. It is a function of random numbers
    and of what was shared, so it tells nothing that was not told.

    Example:
        >>> usual = UsualPower()
        >>> usual.begin(4.0)
        >>> for _ in range(100):
        ...     usual.take_in(message_power=1.0 + 50.0, noise_power=50.0, noise_squares=0.1)
        >>> round(usual.mean, 2)
        1.0
    """

    def __init__(self) -> None:
        self.mean, self.variance = 0.0, 0.0

    @property
    def is_known(self) -> bool:
        """Whether there is an estimate."""
        return self.mean > 0

    def begin(self, random_power: float) -> None:
        """Begin with ‖g‖² of random inputs."""
        self.mean, self.variance = random_power, (PRIOR_SPREAD * random_power) ** 2

    def take_in(self, message_power: float, noise_power: float, noise_squares: float) -> None:
        """Take in a message.

        Args:
            message_power: ‖y‖².
            noise_power: Tr Σ.
            noise_squares: Tr Σ².
        """
        measured = message_power - noise_power
        # Of ‖g + n‖² - Tr Σ: of ‖n‖², of 2⟨g, n⟩ with n along g as anywhere, and of batches.
        along = noise_squares / noise_power if noise_power else 0.0
        error = 2 * noise_squares + 4 * along * self.mean + (BATCH_SPREAD * self.mean) ** 2
        variance = self.variance + (DRIFT * self.mean) ** 2
        gain = variance / (variance + error)
        self.mean = max(self.mean + gain * (measured - self.mean), LEAST_STEP * self.mean)
        self.variance = (1 - gain) * variance

    def state_dict(self) -> dict[str, Tensor]:
        """Two numbers, once there is an estimate."""
        known = torch.tensor([self.mean, self.variance], dtype=torch.float64)
        return {"usual_power": known} if self.is_known else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """What `state_dict` returned."""
        self.mean, self.variance = state.get("usual_power", torch.zeros(2)).tolist()


def random_power(
    gmap: GradientMap, generator: Stream, prepared: Callable[[Tensors], Tensors]
) -> float:
    """The mean of ‖g‖² over random inputs with random labels, in the batch's shapes.

    Args:
        gmap: The client's map.
        generator: Of the inputs.
        prepared: What is done to a gradient before noise is added, such as clipping.

    Raises:
        ValueError: Where inputs like the batch's cannot be made up, with the way out.
    """
    try:
        client = gmap.undefended
        domain, model = domain_of_batch(client.batch), client.model
        drawn = [
            random_batch(domain, model, client.batch, generator, special_ids(model))
            for _ in range(FIRST_BATCHES)
        ]
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            "strength='transcript' begins with random inputs, and such as this batch's cannot be "
            f"made up. Give `scale` in place of relative_scale and utility_budget. {error}"
        ) from error
    gradients = (prepared(client.of_batch(batch).gradient()) for batch in drawn)
    powers = [float(power(gmap.restrict(gradient), gmap.shards)) for gradient in gradients]
    mean = math.fsum(powers) / len(powers)
    if not mean:
        raise ValueError(
            "The gradient of random inputs is zero, so nothing says how strong noise must be. Give "
            "`scale` in place of relative_scale and utility_budget."
        )
    return mean
