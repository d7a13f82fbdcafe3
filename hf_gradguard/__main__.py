"""`python -m hf_gradguard`, the same as `gradguard`."""

import sys

from .cli import main

sys.exit(main())
