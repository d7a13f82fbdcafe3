"""The one function the library is about: from a client's continuous input to the gradient it would
share.
"""

from .differences import by_differences
from .local_training.update import UpdateMap
from .map import GradientMap
from .types import Batch, LossFunction, Tensors

__all__ = ["Batch", "GradientMap", "LossFunction", "Tensors", "UpdateMap", "by_differences"]
