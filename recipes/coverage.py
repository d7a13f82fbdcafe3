"""Every table, figure and theorem of the five papers, and what became of it here: writes
docs/coverage.md from coverage.yaml.

    python recipes/coverage.py

A verdict rests on figures that docs/findings has, with their intervals, or on tests. One whose
interval is wider than the effect is "cannot tell".
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import scipy.stats
import yaml

PAGE = Path(__file__).resolve().parents[1] / "docs" / "coverage.md"
DATA = Path(__file__).with_suffix(".yaml")

NOT_ATTEMPTED = "not attempted"
STATES = {
    "reproduced": "the effect is there, outside our interval, in about the paper's size; of a "
    "theorem: no case that we computed breaks it, which is no proof",
    "direction": "the effect is there, in another size or under other conditions",
    "refuted": "our interval excludes the paper's effect, at its operating point or one we name; "
    "of a theorem: a case that meets its assumptions breaks it",
    "cannot tell": "our interval is wider than the effect; with what would decide it",
    NOT_ATTEMPTED: "no study or test of ours asks it",
}


def papers() -> list[dict]:
    """Each with `title`, how many `figures` and `tables`, which `theorems`, which of all these are
    `silent`, and `items`: `where` it stands, what it `claim`s, its `state` (where none is given,
    not attempted), what was `found`, and a `link` to the figures, or the `tests` that show it.
    """
    all_papers_read = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    for paper in all_papers_read:
        for item in paper["items"]:
            item.setdefault("state", NOT_ATTEMPTED)
            tests = item.get("tests", [])
            item["tests"] = [tests] if isinstance(tests, str) else tests
    return all_papers_read


def page() -> str:
    """The page's text."""
    all_papers = papers()
    states = Counter(item["state"] for paper in all_papers for item in paper["items"])
    counts = ", ".join(f"{states[state]} {state}" for state in STATES)
    lines = [
        "# Which published claims hold here",
        "",
        f"Five papers, {sum(states.values())} claims: {counts}.",
        "Both versions of Chen et al. stand in one table.",
        "",
        "`python recipes/coverage.py` makes this page. Linked pages have the figures, with their",
        "seeds, intervals and commands. Linked tests compute what they show.",
        "",
        "| state | means |",
        "|---|---|",
        *(f"| {state} | {meaning} |" for state, meaning in STATES.items()),
    ]
    for paper in all_papers:
        lines += ["", f"## {paper['title']}", ""]
        lines += ["| | claim | state | here |", "|---|---|---|---|"]
        lines += rows(paper)
        lines += ["", f"Without a claim: {paper['silent']}."]
    return "\n".join(lines) + "\n"


def rows(paper: dict) -> Iterator[str]:
    for item in paper["items"]:
        finding = re.sub(r"{seeds\((\d+), (\d+), (\d+)\)}", _seeds, item.get("found", ""))
        shown = [f"[{item['link']}](findings/{item['link']})"] if "link" in item else []
        files = dict.fromkeys(test.split("::")[0] for test in item["tests"])
        shown += [f"[{Path(file).name}](../{file})" for file in files]
        if shown:
            finding += f": {', '.join(shown)}"
        cells = (item["where"], item["claim"], item["state"], finding)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def seeds(half: float, count: int, effect: float) -> int:
    """How many seeds narrow the 95 % t-interval of a difference to the effect, when each of both
    rows has such a half-width over so many now.

    Example:
        >>> seeds(20, 3, effect=5)
        22
    """
    spread = half * math.sqrt(count) / scipy.stats.t.ppf(0.975, count - 1)
    needed = 2
    while scipy.stats.t.ppf(0.975, 2 * needed - 2) * spread * math.sqrt(2 / needed) > effect:
        needed += 1
    return needed


def _seeds(match: re.Match) -> str:
    return str(seeds(*map(int, match.groups())))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
