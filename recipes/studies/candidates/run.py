"""Who has a list of candidates: which of them were in a message, behind each defense?

python -m recipes.studies.candidates.run PART --help
"""

from ..lib.command import main
from . import text, thousand

if __name__ == "__main__":
    main(__doc__, [text, thousand])
