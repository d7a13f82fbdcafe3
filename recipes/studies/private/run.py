"""What does differential privacy cost, and is it what others compute?

python -m recipes.studies.private.run PART --help
"""

from ..lib.command import main
from . import accuracy

if __name__ == "__main__":
    main(__doc__, [accuracy])
