"""The entry point of `python -m hf_gradguard`, which is the same as `gradguard`."""

import sys

from .cli import main

sys.exit(main())
