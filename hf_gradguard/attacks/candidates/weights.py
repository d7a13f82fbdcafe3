"""What a message's coordinates weigh, by how well each is known."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...defenses.mechanism import Mechanism
from ...gradient_map import Tensors
from ..observation import Observation

_LEAST_SIZE = 0.1  # of gradients' coordinates, in units of their mean
_ALONE = 0.1  # batches: as far as others' are in entries of a message's own batch alone


def by_noise(
    seen: Observation, mechanism: Mechanism | None, center: Tensors, floor: Mapping[str, float]
) -> tuple[Tensors | None, float | None]:
    """What coordinates weigh, `None` where all do alike, and the noise's variance in these units,
    `None` where nobody knows it. What is clipped on average says nothing of who is in it.

    Args:
        seen: What the server saw.
        mechanism: How the message was made.
        center: What it is on average.
        floor: The variance by which evaluations of one gradient differ, a parameter.

    Example:
        >>> mechanism = Mechanism(noise="gaussian", variance=0.5)
        >>> by_noise(seen, mechanism, shared, dict.fromkeys(shared, 0.0))
        (None, 0.5)
    """
    if mechanism is None or mechanism.rounding == "sign" or mechanism.has_residual:
        return None, None
    bound = mechanism.clip_coordinate
    if mechanism.uniform and mechanism.rounding is None and bound is None:
        mean = sum(v * seen.gradient[n].numel() for n, v in floor.items())
        size = sum(g.numel() for g in seen.gradient.values())
        return None, mechanism.mean_variance(seen.gradient) + mean / size
    weights = {}
    for name, y in seen.gradient.items():
        variance = mechanism.variance_of(name) + floor[name]
        if mechanism.levels is not None:  # uniform within its cell
            step = float(y.max() - y.min()) / (mechanism.levels - 1)
            variance = variance + step**2 / (12 if mechanism.rounding == "nearest" else 6)
        precise = torch.as_tensor(variance, device=y.device).float().rsqrt()
        heard = y != 0 if mechanism.selection != "all" else torch.ones_like(y, dtype=torch.bool)
        if bound is not None:
            heard = heard & (center[name].abs() < bound)
        weights[name] = precise.expand_as(y) * heard
    return weights, 1.0


def beside_others(
    seen: Observation, mechanism: Mechanism | None, sizes: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """What coordinates weigh beside what was left out, which is taken to be as large as gradients
    are, coordinate by coordinate; of several batches, where it is known of how many.

    Args:
        seen: What the server saw.
        mechanism: How the message was made.
        sizes: The root mean square of samples' gradients.

    Example:
        >>> sizes = {name: torch.ones_like(y) for name, y in shared.items()}
        >>> of = ({name: torch.tensor(count) for name in shared} for count in (1, 11))
        >>> mechanisms = (Mechanism(has_residual=True, batches=batches) for batches in of)
        >>> once, again = (beside_others(seen, mechanism, sizes) for mechanism in mechanisms)
        >>> bool((once["classifier.bias"] > 10 * again["classifier.bias"]).all())
        True
    """
    total = sum(float(size.sum(dtype=torch.float64)) for size in sizes.values())
    least = _LEAST_SIZE * total / sum(size.numel() for size in sizes.values()) + 1e-30
    weights = {name: 1 / (size + least) for name, size in sizes.items()}
    if mechanism is not None and mechanism.batches is not None:
        weights = {n: w / (mechanism.batches[n] - 1 + _ALONE).sqrt() for n, w in weights.items()}
    if mechanism is None or mechanism.selection == "all":
        return weights
    return {name: weight * (seen.gradient[name] != 0) for name, weight in weights.items()}
