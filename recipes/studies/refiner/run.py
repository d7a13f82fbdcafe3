"""Refiner's price and worth: the tables and curves of the Refiner paper (2025), and our own.

    python -m recipes.studies.refiner.run PART --help

Each part's help has its command: `sentences`, `in_training`, `text`, `fine_tuned`, `parts`,
`ablations`, `frontier`, `warm`, `pruning` and `layers`.
"""

from ..lib.command import main
from . import (
    ablations,
    fine_tuned,
    frontier,
    in_training,
    layers,
    parts,
    pruning,
    sentences,
    text,
    warm,
)

PARTS = [
    sentences, in_training, text, fine_tuned, parts, ablations, frontier, warm,
    pruning, layers,
]  # fmt: skip

if __name__ == "__main__":
    main(__doc__, PARTS)
