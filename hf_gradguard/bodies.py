"""The old place of `hf_gradguard.heads`' bodies, which goes with the next version."""

import warnings

from .heads.body import SketchedBody, scaled_directions, sketch, sketched_body

__all__ = ["SketchedBody", "scaled_directions", "sketch", "sketched_body"]

warnings.warn(
    "hf_gradguard.bodies is hf_gradguard.heads now, and goes with the next version.",
    FutureWarning,
    stacklevel=2,
)
