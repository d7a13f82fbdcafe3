"""What each defense hides from the span attack on text, and what it costs in accuracy on SST-2.

    python -m recipes.studies.hiding_and_learning.run span --model MODEL --data_dir SST2 \
        --output docs/results/span_attack
    python -m recipes.studies.hiding_and_learning.run accuracy --model MODEL --data_dir SST2 \
        --output docs/results/sst2
    python -m recipes.studies.hiding_and_learning.run accuracy --model MODEL --data_dir SST2 \
        --seconds --output docs/results/sst2_seconds
    python -m recipes.studies.hiding_and_learning.run picture --output docs/results/hiding_and_learning
"""

from ..lib.command import main
from . import accuracy, picture, span

if __name__ == "__main__":
    main(__doc__, [span, accuracy, picture])
