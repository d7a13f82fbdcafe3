"""Put the metrics.json files of several runs into one table.

python recipes/compare.py runs/demo/*/metrics.json
"""

import json
import math
import sys
from dataclasses import fields

from hf_gradguard import DEFENSES, make_defense

HEADER = (
    "defense",
    "not at their defaults",
    "accuracy",
    "± 95 %",
    "relative error",
    "cosine",
    "s/step",
)


def _figure(value: float | None) -> str:
    """Of `dp_sgd` by samples there is none: it would tell of the rows that were drawn."""
    return "-" if value is None else f"{value:.3f}"


def main(paths: list[str]) -> None:
    if not paths:
        sys.exit(__doc__)
    rows = []
    for path in paths:
        with open(path, encoding="utf-8") as file:
            run = json.load(file)
        p, n = run["accuracy"], run.get("eval_sentences") or run["eval_images"]
        defaults = {field.name: field.default for field in fields(DEFENSES[run["defense"]])}
        defaults |= make_defense(run["defense"]).settings()
        changed = {key: value for key, value in run["settings"].items() if value != defaults[key]}
        rows.append(
            (
                run["defense"],
                ", ".join(f"{key}={value}" for key, value in changed.items()) or "-",
                f"{p:.3f}",
                f"{1.96 * math.sqrt(p * (1 - p) / n):.3f}",
                *map(_figure, (run["defense/relative_error"], run["defense/cosine"])),
                f"{run['seconds_per_step']:.2f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(HEADER, *rows, strict=True)]
    for row in (HEADER, ["-" * width for width in widths], *rows):
        print(
            "| "
            + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            + " |"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
