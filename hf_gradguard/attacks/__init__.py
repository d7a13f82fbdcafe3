"""Attacks: from what the server sees to a reconstruction.

seen = Observation(model=model, gradient=shared, input_shape=(1, 12), labels=labels, tokenizer=tokenizer)
result = make_attack("tag", steps=1500)(seen)
"""

from __future__ import annotations

from .base import Attack, Reconstruction
from .observation import Observation, average

__all__ = ["Attack", "Observation", "Reconstruction", "average"]
