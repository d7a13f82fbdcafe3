"""Rows of the table."""

EPSILONS = (None, 4.0, 2.0, 1.0, 0.1)
CLASSES = (2, 20)
SEEDS, ROWS, BATCH, MESSAGES = 3, 15_000, 128, 200
QUICK = {"rows": 64, "batch": 8, "messages": 2}
QUICK_SEEDS = 1
