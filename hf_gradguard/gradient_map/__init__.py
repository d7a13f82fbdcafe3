"""The one function the library is about: from a client's continuous input to the gradient it would
share.
"""

from .inputs import Batch, LossFunction
from .map import GradientMap, Tensors
from .update import UpdateMap

__all__ = ["Batch", "GradientMap", "LossFunction", "Tensors", "UpdateMap"]
