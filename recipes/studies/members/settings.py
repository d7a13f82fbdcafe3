"""Rows of the table, and sizes.

Rates are each defense's own best on held-out images, as docs/results/frontier_images.md has them:
of the same network, and of as many messages of as many images.
"""

from typing import Any

POOL = 2000  # images, half of which a client owns
BATCH, STEPS, SEEDS = 64, 600, 3


def _row(defense: str, rate: float, steps: int = STEPS, **strength: Any) -> dict:
    return {"defense": defense, "strength": strength, "learning_rate": rate, "steps": steps}


NONE = _row("none", 4e-3)
NOISE = {  # by strength, the strongest last
    f"gaussian_noise relative_scale={scale:g}": _row("gaussian_noise", rate, relative_scale=scale)
    for scale, rate in ((1.0, 4e-3), (5.0, 4e-3), (20.0, 4e-3), (100.0, 2e-3))
}
STOPPED = {  # nothing protected, and fewer messages
    f"none, {steps} messages": _row("none", 4e-3, steps) for steps in (300, 150, 100, 80, 60, 40)
}
ROWS: dict[str, dict] = {
    "none": NONE,
    **STOPPED,
    **NOISE,
    "gaussian_noise relative_scale=20, half the rate": _row(
        "gaussian_noise", 2e-3, relative_scale=20.0
    ),
    "optimal_noise relative_scale=1": _row("optimal_noise", 8e-3, relative_scale=1.0),
    "pruning ratio=0.99": _row("pruning", 2e-3, ratio=0.99),
    "pruning ratio=0.99 error_feedback=True": _row(
        "pruning", 2e-3, ratio=0.99, error_feedback=True
    ),
    "refiner": _row("refiner", 2e-3),
    "dp_sgd per_sample=True clip=1 noise_multiplier=0.5": _row(
        "dp_sgd", 4e-3, per_sample=True, clip=1.0, noise_multiplier=0.5
    ),
}

QUICK, QUICK_SEEDS = {"pool": 16, "batch": 4}, 3
QUICK_ROWS = {
    row: ROWS[row] | {"steps": 2}
    for row in ("none", "none, 40 messages", "gaussian_noise relative_scale=20")
}
