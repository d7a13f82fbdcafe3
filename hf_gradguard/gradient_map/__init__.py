"""The one function the library is about: from a client's continuous input to the gradient it would
share.
"""

from .differences.shifted import by_differences
from .inputs import Batch, LossFunction
from .local_training.update import UpdateMap
from .map import GradientMap, Tensors

__all__ = ["Batch", "GradientMap", "LossFunction", "Tensors", "UpdateMap", "by_differences"]
