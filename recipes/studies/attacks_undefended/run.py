"""What the attacks recover from gradients that nobody defended.

    python -m recipes.studies.attacks_undefended.run PART --help

Each part's help has its command: `images`, `batches`, `deep_prior`, `text`, `families`, `lengths`
and `lora`.
"""

from ..lib.command import main
from . import batches, deep_prior, families, images, lengths, lora, text

if __name__ == "__main__":
    main(__doc__, [batches, deep_prior, families, images, lengths, lora, text])
