"""The one function the library is about: from a client's continuous input to the gradient it would
share.
"""

from .inputs import Batch, LossFunction
from .map import GradientMap, Tensors
from .shifted import by_differences
from .update import UpdateMap

__all__ = ["Batch", "GradientMap", "LossFunction", "Tensors", "UpdateMap", "by_differences"]
