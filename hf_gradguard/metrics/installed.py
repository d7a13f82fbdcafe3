"""Says what to install where a library is missing that this room cannot do without."""

from ..registry import need

need("metrics", "attacks", "nltk", "regex", "rouge_score", "sacrebleu", "scipy", "torchmetrics")
