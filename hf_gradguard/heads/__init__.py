"""Linear heads on features of a frozen encoder, and encoders that move under them.

Both are trained by differentially private gradients of few samples a message.
"""

from .arguments import default_learning_rate
from .body import SketchedBody, sketched_body
from .choice import choose_encoder
from .client import HeadClient
from .configuration import PrivateHeadConfig
from .features import half_whitened as half_whitened
from .features import layer_features as layer_features
from .features import whitened_directions as whitened_directions
from .head import (
    PrivateHead,
    PrivateHeadForImageClassification,
    PrivateHeadForSequenceClassification,
    PrivateHeadForTokenClassification,
)
from .making import packaged_sentences as packaged_sentences
from .making import private_head

__all__ = [
    "HeadClient",
    "PrivateHead",
    "PrivateHeadConfig",
    "PrivateHeadForImageClassification",
    "PrivateHeadForSequenceClassification",
    "PrivateHeadForTokenClassification",
    "SketchedBody",
    "choose_encoder",
    "default_learning_rate",
    "private_head",
    "sketched_body",
]
