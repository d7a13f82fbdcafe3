"""Clients that train for several steps before they send: their updates, protected."""

from ..gradient_map import UpdateMap
from .updates import protect_update

__all__ = ["UpdateMap", "protect_update"]
