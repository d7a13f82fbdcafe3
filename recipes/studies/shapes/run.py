"""Where noise goes and what pruning keeps: what a shape costs, and what it gives away.

    python -m recipes.studies.shapes.run PART --help

Each part's help has its command: `quality`, `estimates`, `naming` and `adam`.
"""

from ..lib.command import main
from . import adam, estimates, naming, quality

if __name__ == "__main__":
    main(__doc__, [quality, estimates, naming, adam])
