"""The function that the library is about: from a client's continuous input to its gradient."""

from .differences import by_differences
from .local_training.update import UpdateMap
from .map import GradientMap
from .types import Batch, LossFunction, Tensors

__all__ = ["Batch", "GradientMap", "LossFunction", "Tensors", "UpdateMap", "by_differences"]
