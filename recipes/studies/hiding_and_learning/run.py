"""What each defense hides from the span attack on text, and what it costs in accuracy on SST-2.

    python -m recipes.studies.hiding_and_learning.run PART --help

Each part's help has its command: `span` (what is hidden), `accuracy` (what is learned, and how
fast), `picture` (both).
"""

from ..lib.command import main
from . import accuracy, picture, span

if __name__ == "__main__":
    main(__doc__, [span, accuracy, picture])
