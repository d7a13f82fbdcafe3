"""`python -m recipes NAME ...` runs the study or benchmark of that name in `results.RUNS`."""

import sys

from .results import RUNS

if __name__ == "__main__":
    runs = {run.output: run for run in RUNS}
    if len(sys.argv) < 2 or sys.argv[1] not in runs:
        sys.exit(f"Name one of {', '.join(runs)}.")
    runs[sys.argv[1]].run_here(sys.argv[2:])
