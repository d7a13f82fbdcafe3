"""Clients that train for several steps before they send: what their updates give away.

    python -m recipes.studies.updates.run PART --help

Each part's help has its command: `words`, `images` and `rounds`.
"""

from ..lib.command import main
from . import images, rounds, words

if __name__ == "__main__":
    main(__doc__, [words, images, rounds])
