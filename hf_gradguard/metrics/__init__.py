"""Scores that say how close a reconstruction is to what it reconstructs."""

from ..extras import need

try:
    from .candidates import CandidateScores, membership_log_odds, score_candidates
    from .images import score_images
    from .scores import Scores
    from .text import score_text
    from .text_reconstruction import TextReconstruction
except ModuleNotFoundError:
    need("metrics", "attacks", "nltk", "regex", "rouge_score", "sacrebleu", "torchmetrics")
    raise

__all__ = [
    "CandidateScores",
    "Scores",
    "TextReconstruction",
    "membership_log_odds",
    "score_candidates",
    "score_images",
    "score_text",
]
