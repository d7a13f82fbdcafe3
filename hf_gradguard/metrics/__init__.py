"""How near a reconstruction is to what it reconstructs."""

from . import installed as installed
from .images import score_images
from .scores import Scores
from .text import score_text
from .text_reconstruction import TextReconstruction

__all__ = ["Scores", "TextReconstruction", "score_images", "score_text"]
