"""What does each defense hide, and what does it cost, each at its own best learning rate?

    python -m recipes.studies.frontier.run PART --help

Parts: on texts `rates` first, then `text`, which reads what `rates` chose, then `lists`, which
takes what `text` trained, as `corpora` and `partly` do. `batches` trains nothing. `heads`,
`image_heads`, `images` and `elsewhere` choose their rates themselves.
"""

from ..lib.command import main
from . import batches, corpora, elsewhere, heads, image_heads, images, lists, partly, rates, text

if __name__ == "__main__":
    parts = [rates, text, lists, partly, corpora, batches, heads, images, elsewhere, image_heads]
    main(__doc__, parts)
