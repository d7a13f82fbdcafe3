"""The former place of `hf_gradguard.data.images.to_pil`, which works here for one version more."""

from __future__ import annotations

import warnings

from ...data.images import to_pil

__all__ = ["to_pil"]

warnings.warn(
    "hf_gradguard.audit.modality.pictures moved: import to_pil from hf_gradguard.data.images.",
    FutureWarning,
    stacklevel=2,
)
