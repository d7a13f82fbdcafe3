"""Linear heads on features of a frozen encoder, and encoders that move under them.

Both are trained by differentially private gradients of few samples a message.
"""

from .body import SketchedBody, sketched_body
from .head import FeatureHead, LayerFeatures, head_of
from .head import half_whitened as half_whitened
from .head import packaged_sentences as packaged_sentences
from .head import whitened_directions as whitened_directions

__all__ = ["FeatureHead", "LayerFeatures", "SketchedBody", "head_of", "sketched_body"]
