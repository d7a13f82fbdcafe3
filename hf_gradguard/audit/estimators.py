"""What estimators say of a message that was shared, to stand beside what attacks found in it."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..defenses import Message
from ..gradient_map import GradientMap
from ..leakage import Eigenvalue, dfil, inversion_influence_lower_bound, mse_bound_from_dfil

FIGURES = {"i2f_lower_bound": "I²F lower bound", "dfil_bound": "dFIL bound"}
"""Names of the figures, as they are stored and as they are shown. Both are errors of the input:
higher leaks less.
"""

PROBES = 50


def figures(
    gmap: GradientMap,
    shared: Message,
    eigenvalue: Eigenvalue,
    generator: torch.Generator,
) -> dict[str, Any]:
    """One number a sample for each figure that exists.

    Args:
        gmap: The message's gradient map.
        shared: What the defense made of its gradient.
        eigenvalue: λ_max(J Jᵀ) of the map.
        generator: Of the probes for dFIL.

    Returns:
        `i2f_lower_bound`: I_lb of each sample, a norm; divided by √m it would put short texts,
        which are found more easily, above long ones. `dfil_bound`, under Gaussian noise: the least
        RMSE of an unbiased attacker, 1/√dFIL; `None` where it is infinite.
    """
    delta = {name: shared[name] - g for name, g in gmap.gradient().items()}
    bound = inversion_influence_lower_bound(gmap, delta, eigenvalue=eigenvalue)
    found: dict[str, Any] = {"i2f_lower_bound": bound.per_sample.tolist()}
    if (noise := shared.noise) is not None:
        leakage = dfil(gmap, noise.variance, PROBES, generator).value
        bounds = mse_bound_from_dfil(leakage).sqrt().tolist()
        found["dfil_bound"] = [value if math.isfinite(value) else None for value in bounds]
    return found
