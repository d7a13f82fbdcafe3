"""Who was trained on: what a server can tell of it from the weights that it ends up with.

    python -m recipes.studies.members.run weights --help

Its part is `weights`; its help has the command.
"""

from ..lib.command import main
from . import weights

if __name__ == "__main__":
    main(__doc__, [weights])
