"""How well the packaged evaluation networks do on data sets they never saw.

    python -m recipes.studies.evaluation_networks.run figures --data DATA --model MODEL \
        --cards model_cards --output docs/results/evalnets

`train.py` trains them, `publish.py` pushes them to the Hub.
"""

from ..lib.command import main
from . import figures

if __name__ == "__main__":
    main(__doc__, [figures])
