"""Clients that train for several steps before they send: what their updates give away.

    python -m recipes.studies.updates.run PART --help

Its part is `words`; its help has the command.
"""

from ..lib.command import main
from . import words

if __name__ == "__main__":
    main(__doc__, [words])
