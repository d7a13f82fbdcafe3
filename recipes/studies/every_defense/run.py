"""Every defense at three strengths against every attack, and against attackers who know it.

    python -m recipes.studies.every_defense.run PART --help

Each part's help has its command: `text` and `images`, and `knowing`, which compares what they
found. A new defense is a row in settings.py: only its own cells are computed.
"""

from ..lib.command import main
from . import images, knowing, text

if __name__ == "__main__":
    main(__doc__, [text, images, knowing])
