"""Can leakage be told without attacking? Estimates against what attacks find.

    python -m recipes.studies.leakage.run PART --help

Each part's help has its command: `logistic`, `predicts_attacks`, `directions`, `unfairness` and
`initializations`.
"""

from ..lib.command import main
from . import directions, initializations, logistic, predicts_attacks, unfairness

if __name__ == "__main__":
    main(__doc__, [logistic, predicts_attacks, directions, unfairness, initializations])
