"""Optimal noise and optimal pruning against plain ones: Chen, Gürsoy and Lei (2024, 2025).

    python -m recipes.studies.optimal_defenses.run PART --help

Each part's help has its command: `training` and `attacked`.
"""

from ..lib.command import main
from . import attacked, training

if __name__ == "__main__":
    main(__doc__, [training, attacked])
