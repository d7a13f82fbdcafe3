"""Received models: what `check_received` says of ordinary and of malicious ones.

python -m recipes.studies.received.run PART --help
"""

from ..lib.command import main
from . import alarms, malicious

if __name__ == "__main__":
    main(__doc__, [alarms, malicious])
