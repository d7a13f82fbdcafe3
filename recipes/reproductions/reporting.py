"""What the scripts share: results that are kept as they come, and the table made of them. Nothing
to run by itself.

Every script takes `--output OUTPUT` and writes OUTPUT.json (settings and figures), OUTPUT.md (its
table, which docs/results.md shows) and, if it draws, OUTPUT.png. Run again, it goes on with what is
missing and makes table and picture anew. `--quick` takes seconds and shows only that it runs.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats


def parser_of(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="where results go, without an ending"
    )
    parser.add_argument("--quick", action="store_true", help="seconds, to see that it runs")
    return parser


class Results:
    """Figures in OUTPUT.json, written as each is there.

    Args:
        output: Path without an ending.
        plan: The settings that the figures depend on. A file that was made with others is refused.
            Data and networks that the command names are not compared: keep to one OUTPUT for each.
    """

    def __init__(self, output: Path, plan: dict) -> None:
        self.path, plan = named(output, ".json"), json.loads(json.dumps(plan))
        self.figures: dict = {}
        if self.path.exists():
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            if stored.get("plan") != plan:
                raise SystemExit(
                    f"{self.path} was made with other settings: choose another --output, or remove "
                    "it."
                )
            self.figures = stored["figures"]
        self.plan = plan
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def get(self, place: Sequence[str], compute: Callable[..., Any], *arguments: Any) -> Any:
        """The figures at `place`, a path of keys; where they are missing, `compute(*arguments)`
        makes them.
        """
        part = self.figures
        for key in place[:-1]:
            part = part.setdefault(key, {})
        if place[-1] not in part:
            part[place[-1]] = json.loads(json.dumps(compute(*arguments)))
            stored = {"plan": self.plan, "figures": self.figures}
            aside = self.path.with_name(
                self.path.name + ".new"
            )  # an interrupt here must not cost what is there
            aside.write_text(
                json.dumps(stored, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
            )
            os.replace(aside, self.path)
        return part[place[-1]]


def write_table(output: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """OUTPUT.md, and the same on the screen."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (header, *rows)]
    lines.insert(1, "|---" * len(header) + "|")
    named(output, ".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


def named(output: Path, ending: str) -> Path:
    """OUTPUT with an ending; names may hold dots."""
    return output.with_name(output.name + ending)


def summary(scores, names: Sequence[str]) -> dict[str, list[float]]:
    """Mean of each score with the ends of its 95 % bootstrap interval, of `score_text` or
    `score_images`.
    """
    return {
        name: [round(float(v), 4) for v in (scores.mean[name], *scores.interval[name])]
        for name in names
    }


def interval(values: Sequence[float], digits: int = 3) -> str:
    """Mean and 95 % interval of it (Student's t) over seeds or samples; of one value, that."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}"
    half = scipy.stats.t.ppf(0.975, len(values) - 1) * scipy.stats.sem(values)
    return f"{np.mean(values):.{digits}f} ± {half:.{digits}f}"
