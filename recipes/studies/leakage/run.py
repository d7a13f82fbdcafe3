"""Can leakage be told without attacking? Estimates against what attacks find.

    python -m recipes.studies.leakage.run PART --help

Each part's help has its command: `logistic`, `predicts_attacks`, `directions`, `unfairness`,
`initializations`, `epochs` and `private_networks`.
"""

from ..lib.command import main
from . import (
    directions,
    epochs,
    initializations,
    logistic,
    predicts_attacks,
    private_networks,
    unfairness,
)

PARTS = [
    logistic, predicts_attacks, directions, unfairness, initializations, epochs, private_networks
]  # fmt: skip

if __name__ == "__main__":
    main(__doc__, PARTS)
