"""What protects labels, and what it costs.

    python -m recipes.studies.labels.run PART --help

Its part is `recovery`; its help has the command.
"""

from ..lib.command import main
from . import recovery

if __name__ == "__main__":
    main(__doc__, [recovery])
