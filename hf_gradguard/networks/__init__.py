"""Evaluation networks, which say how much of an image or a text is noise.

Their answer is the privacy metric of the Refiner defense.
"""

from .configuration import ImageEvaluationNetworkConfig, TextEvaluationNetworkConfig
from .fitting import cache_folder, cached_text_network, network_for
from .image_network import ImageEvaluationNetwork, adapt_images, judge_images
from .loading import (
    load_network,
    packaged_image_network,
    packaged_networks,
    packaged_text_network,
    save_network,
)
from .noising import blend_images, replace_tokens
from .text_network import TextEvaluationNetwork, embedding_fingerprint
from .training import train_image_network, train_text_network
from .trial import check_network, check_order, check_slope, check_special, try_on_noise

__all__ = [
    "ImageEvaluationNetwork",
    "ImageEvaluationNetworkConfig",
    "TextEvaluationNetwork",
    "TextEvaluationNetworkConfig",
    "adapt_images",
    "blend_images",
    "cache_folder",
    "cached_text_network",
    "check_network",
    "check_order",
    "check_slope",
    "check_special",
    "embedding_fingerprint",
    "judge_images",
    "load_network",
    "network_for",
    "packaged_image_network",
    "packaged_networks",
    "packaged_text_network",
    "replace_tokens",
    "save_network",
    "train_image_network",
    "train_text_network",
    "try_on_noise",
]
