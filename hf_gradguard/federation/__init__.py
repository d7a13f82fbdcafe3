"""Protection of updates: clients train for several steps before they send."""

from ..gradient_map import UpdateMap
from .updates import protect_update

__all__ = ["UpdateMap", "protect_update"]
