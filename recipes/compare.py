"""Put the metrics.json files of several runs into one table.

python recipes/compare.py runs/demo/*/metrics.json
"""

import json
import math
import sys
from dataclasses import fields
from pathlib import Path

from hf_gradguard import DEFENSES, make_defense

HEADER = (
    "defense", "not at their defaults", "accuracy", "± 95 %", "relative error", "cosine", "s/step"
)  # fmt: skip


def main(paths: list[str]) -> None:
    if not paths:
        sys.exit(__doc__)
    rows = []
    for path in paths:
        run = json.loads(Path(path).read_text(encoding="utf-8"))
        p, n = run["accuracy"], run.get("eval_sentences") or run["eval_images"]
        defaults = {field.name: field.default for field in fields(DEFENSES[run["defense"]])}
        defaults |= make_defense(run["defense"]).settings()
        changed = [f"{k}={value}" for k, value in run["settings"].items() if value != defaults[k]]
        row = [run["defense"], ", ".join(changed) or "-", f"{p:.3f}"]
        row.append(f"{1.96 * math.sqrt(p * (1 - p) / n):.3f}")
        for name in ("defense/relative_error", "defense/cosine"):
            # `dp_sgd` by samples has none, which would tell of the rows that were drawn.
            row.append("-" if run[name] is None else f"{run[name]:.3f}")
        rows.append([*row, f"{run['seconds_per_step']:.2f}"])
    widths = [max(map(len, column)) for column in zip(HEADER, *rows, strict=True)]
    for row in (HEADER, ["-" * width for width in widths], *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
