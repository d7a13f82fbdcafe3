"""Every defense at three strengths against every attack, and against attackers who know it.

    python -m recipes.studies.every_defense.run text --tokenizer MODEL --data_dir SST2 \
        --output docs/results/text_defenses
    python -m recipes.studies.every_defense.run images --images LOSSLESS.npz \
        --evaluation_network NETWORK --output docs/results/image_defenses

A new defense is a row in settings.py: only its own cells are computed.
"""

from ..lib.command import main
from . import images, text

if __name__ == "__main__":
    main(__doc__, [text, images])
