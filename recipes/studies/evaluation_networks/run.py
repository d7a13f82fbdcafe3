"""The packaged evaluation networks: how well they do on data sets they never saw.

    python -m recipes.studies.evaluation_networks.run figures --help

`train.py` trains them, `publish.py` pushes them to the Hub.
"""

from ..lib.command import main
from . import figures

if __name__ == "__main__":
    main(__doc__, [figures])
