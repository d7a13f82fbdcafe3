"""Every table, figure and theorem of the five papers, and what became of it here: writes
docs/coverage.md from coverage.yaml.

    python recipes/coverage.py

A verdict rests on figures that docs/findings has, with their intervals, or on tests. What was
`found` looks figures up as pages do, by `recipes/figures.py`. A verdict whose interval is wider
than the effect is "cannot tell". One on an experiment stands beside its conditions, the paper's and
ours; "reproduced" is refused where they differ.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import scipy.stats
import yaml

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes import figures

PAGE = Path(__file__).resolve().parents[1] / "docs" / "coverage.md"
DATA = Path(__file__).with_suffix(".yaml")

NOT_ATTEMPTED, REPRODUCED = "not attempted", "reproduced"
STATES = {
    REPRODUCED: "the effect is there, outside our interval, in about the paper's size, by the "
    "paper's model, data, attack and settings",
    "holds where tried": "of a theorem or an equation: no case that we computed breaks it, which "
    "is no proof",
    "direction": "the effect is there, in another size or under other conditions",
    "refuted": "our interval excludes the paper's effect, under our conditions; of a theorem: a "
    "case that meets its assumptions breaks it",
    "cannot tell": "our interval is wider than the effect, or what we ran is not what was claimed; "
    "with what would decide it",
    NOT_ATTEMPTED: "no study or test of ours asks it",
}
CONDITIONS = ("model", "data", "n", "seeds", "attack", "settings")
EQUAL_CONDITIONS = ("model", "data", "attack", "settings")  # where something is reproduced
JUDGED = (REPRODUCED, "direction", "refuted")
_UNCERTAINTY = re.compile(r"±|\[-?\d[^\]]*, |\d of (over )?\d|p = |\d to -?\d")
"""An interval, a count, a p, or a range: `± 1`, `[0.1, 0.2]`, `3 of 5`, `p = 0.1`, `1 to 2`."""


def papers(source: Path = DATA) -> list[dict]:
    """Each with `title`, how many `figures` and `tables`, which `theorems`, which of all these are
    `silent`, and `items`: `where` it stands, what it `claim`s, its `state` (where none is given,
    not attempted), what was `found`, a `link` to the figures with the conditions of `paper` and
    `ours`, or the `tests` that show it.

    Raises:
        ValueError: For an experiment whose conditions are not all said, whose verdict shows no
            interval, or that is called reproduced under other ones.
    """
    read = yaml.safe_load(source.read_text(encoding="utf-8"))
    for paper in read["papers"]:
        for item in paper["items"]:
            item.setdefault("state", NOT_ATTEMPTED)
            if "found" in item:
                item["found"] = figures.filled(item["found"], figures.published())
            tests = item.get("tests", [])
            item["tests"] = [tests] if isinstance(tests, str) else tests
            for side in ("paper", "ours"):
                item[side] = _conditions(item.get(side), read["conditions"])
            check_conditions(item)
    return read["papers"]


def _conditions(given: Any, named: Mapping[str, dict]) -> dict[str, str]:
    """The six of one side: by name, by name and what differs from it, or all of them."""
    if isinstance(given, str):
        return named[given]
    conditions = dict(given or {})
    return named.get(conditions.pop("as", None), {}) | {k: str(v) for k, v in conditions.items()}


def differences(item: Mapping[str, Any]) -> list[str]:
    """The conditions of a claim that are not the paper's, of those that have to be."""
    paper, ours = item["paper"], item["ours"]
    return [name for name in EQUAL_CONDITIONS if paper.get(name) != ours.get(name)]


def check_conditions(item: Mapping[str, Any]) -> None:
    """Refuses an experiment whose conditions are not all said, a verdict without an interval, and
    one called reproduced under other conditions than the paper's.
    """
    name = f"{item['where']}, {item['claim']!r}"
    for side in ("paper", "ours"):
        if "link" in item and set(item[side]) != set(CONDITIONS):
            raise ValueError(f"{name}: {side} must have {', '.join(CONDITIONS)}.")
    is_shown = "exact" in item or _UNCERTAINTY.search(item.get("found", ""))
    if "link" in item and item["state"] in JUDGED and not is_shown:
        raise ValueError(f"{name} says {item['state']} without an interval, a count or a range.")
    if item["state"] != REPRODUCED:
        return
    if "link" not in item:
        raise ValueError(f"{name} rests on tests alone: it holds where tried, at most.")
    if changed := differences(item):
        raise ValueError(f"{name}: {', '.join(changed)} differ, so it is direction at most.")


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
        "`python recipes/coverage.py` makes this page. It refuses *reproduced* under other",
        "conditions than the paper's, and verdicts on samples without an interval or a count.",
        "Linked pages have the figures, with their seeds and commands. Linked tests compute what",
        "they show.",
        "",
        "| state | means |",
        "|---|---|",
        *(f"| {state} | {meaning} |" for state, meaning in STATES.items()),
    ]  # fmt: skip
    for paper in all_papers:
        lines += ["", f"## {paper['title']}", "", "| | claim | state | here |", "|---|---|---|---|"]
        lines += rows(paper)
        lines += ["", f"Without a claim: {paper['silent']}."]
    lines += ["", "## Conditions, side by side", ""]
    lines += ["Of every experiment: the paper's, then ours. Bold is what differs.", ""]
    lines += [f"| | {' | '.join(CONDITIONS)} |", "|---" * (len(CONDITIONS) + 1) + "|"]
    for paper in all_papers:
        lines += condition_rows(paper)
    return "\n".join(lines) + "\n"


def rows(paper: dict) -> Iterator[str]:
    for item in paper["items"]:
        finding = re.sub(r"{seeds\((\d+), (\d+), (\d+)\)}", _seeds, item.get("found", ""))
        if "exact" in item:
            finding += f" ({item['exact']})"
        if "chosen" in item:
            finding += f". The paper does not say, and we chose: {item['chosen']}"
        shown = [f"[{item['link']}](findings/{item['link']})"] if "link" in item else []
        files = dict.fromkeys(test.split("::")[0] for test in item["tests"])
        shown += [f"[{Path(file).name}](../{file})" for file in files]
        if shown:
            finding += f": {', '.join(shown)}"
        yield _row(item["where"], item["claim"], item["state"], finding)


def condition_rows(paper: dict) -> Iterator[str]:
    """Two rows for claims under the same conditions: what the paper did, and what we did."""
    claims: dict[tuple, list[dict]] = {}
    for item in paper["items"]:
        if "link" in item:
            key = (*item["paper"].values(), *item["ours"].values())
            claims.setdefault(key, []).append(item)
    author = re.split(r"[ ,]", paper["title"])[0]
    for items in claims.values():
        published, ours = items[0]["paper"], items[0]["ours"]
        places = ", ".join(dict.fromkeys(item["where"] for item in items))
        changed = [ours[c] if ours[c] == published[c] else f"**{ours[c]}**" for c in CONDITIONS]
        yield _row(f"{author}, {places}", *(published[c] for c in CONDITIONS))
        yield _row("here", *changed)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


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
