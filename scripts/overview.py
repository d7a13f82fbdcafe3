"""README's figure: what defenses cost on SST-2, and leave to the strongest attackers there are.

    python scripts/overview.py docs/assets/overview.png

Of the tables of docs/findings/text.md, heads.md and attacks_text.md: nothing is measured here.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from recipes.figures import published  # noqa: E402

TEXT_ROWS = {
    "none": "none",
    "quantization bits=1": "1 bit",
    "pruning ratio=0.99": "pruning, 1 % left",
    "gaussian_noise relative_scale=5": "noise × 5",
    "gaussian_noise relative_scale=20": "noise × 20",
    "optimal_pruning ratio=0.97 error_feedback=True": "pruning with feedback",
    "gradient_sketch samples=16": "gradient sketch",
}
"""Of frontier_text, with what the figure calls them."""

HEAD_ROW = "`dp_sgd` 2, last four layers whitened, 1,600 messages of 1,024"
SEARCHED = {"gaussian_noise relative_scale=5": "5", "gaussian_noise relative_scale=20": "20"}
"""Defenses that were also attacked by `likelihood_search`, at the start of training, with what its
table calls their noise.
"""

RECONSTRUCTION = ("span", "tag", "inverting_gradients_published", "lamp")
CHANCE_WORDS, CHANCE_MEMBERS = 0.31, 0.01
"""Token F1 of the most frequent tokens, in likelihood_search; members at 1 % FPR by a blind
draw.
"""


@dataclass(frozen=True)
class Range:
    """A mean with its 95 % interval; without one, both ends are the mean."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """What a defense costs and leaves, as shares; `None` where no attack was tried."""

    name: str
    lost: Range
    words: Range | None
    members: Range


def read_table(name: str) -> list[dict[str, str]]:
    """A generated table's rows by column; the first column is `""`."""
    table = published()[name]
    return [dict(zip(table.header, row, strict=True)) for row in table.rows]


def read_range(cell: str) -> Range | None:
    """Of `0.27 [0.10, 0.48]` or `0.00 (all 8)`; `None` of an empty cell."""
    numbers = re.match(r"(-?[\d.]+)(?: \[(-?[\d.]+), (-?[\d.]+)\])?", cell)
    if numbers is None:
        return None
    mean, low, high = (float(number or numbers[1]) for number in numbers.groups())
    return Range(mean, low, high)


def worst(row: dict[str, str], attacks: tuple[str, ...], size: int) -> Range | None:
    """What the best of some attackers recovers at the worst stage, of messages of one size."""
    cells = [
        read_range(cell)
        for column, cell in row.items()
        if column.split(", ")[0] in attacks and f", {size}, " in column
    ]
    return max(filter(None, cells), key=lambda leak: leak.mean, default=None)


def rows() -> list[Row]:
    """The figure's points.

    Raises:
        KeyError: If a table has no such row.
    """
    text = {row[""].strip("`"): row for row in read_table("frontier_text")}
    found = []
    for label, name in TEXT_ROWS.items():
        row = text[label]
        words, members = worst(row, RECONSTRUCTION, 1), worst(row, ("candidates",), 16)
        if label in SEARCHED:
            words = searched(SEARCHED[label])
        lost = read_range(row["less than none"])
        assert lost is not None
        assert members is not None
        found.append(Row(name, lost, words, members))
    head = {row[""]: row for row in read_table("frontier_heads")}[HEAD_ROW]
    lost, members = read_range(head["less than none"]), worst(head, ("candidates",), 16)
    assert lost is not None
    assert members is not None
    return [*found, Row("head + dp_sgd (proved)", lost, None, members)]


def searched(noise: str) -> Range:
    """What the strongest search found of most sentences, one in a message."""
    table = [
        row for row in read_table("likelihood_search")
        if row["model"].startswith("start") and "in a message" not in row["model"]
        and row["noise, or defense"] == noise
    ]  # fmt: skip
    most = max(int(row["messages"]) for row in table)
    ranges = [read_range(row["token F1"]) for row in table if int(row["messages"]) == most]
    return max((found for found in ranges if found), key=lambda found: found.mean)


def front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other one beats in both."""
    return sorted(
        p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)
    )


def draw(target: Path) -> None:
    """Two panels, 830 pixels wide at half of their resolution."""
    figure, panels = plt.subplots(1, 2, figsize=(8.3, 4.1), sharey=True, layout="constrained")
    colors = plt.get_cmap("tab10")
    for panel, name, title, chance in zip(
        panels,
        ("words", "members"),
        ("words reconstructed (token F1)", "batch members found at 1 % FPR"),
        (CHANCE_WORDS, CHANCE_MEMBERS),
        strict=True,
    ):
        panel.axvspan(-0.04, chance, color="#0f766e", alpha=0.13, linewidth=0)
        panel.text(chance + 0.01, 4.4, "a blind guess", fontsize=8.5, color="#0f766e")
        shown = [(row, getattr(row, name)) for row in rows()]
        points = [(leak.mean, 100 * row.lost.mean) for row, leak in shown if leak]
        panel.plot(*zip(*front(points), strict=True), color="#cbd5e1", linestyle=":", zorder=1)
        for number, (row, leak) in enumerate(shown):
            if leak is None:
                continue
            x, y, lost = leak.mean, 100 * row.lost.mean, row.lost
            panel.errorbar(
                x, y, [[y - 100 * lost.low], [100 * lost.high - y]],
                [[x - leak.low], [leak.high - x]], fmt="o", markersize=6, linewidth=0.8,
                color=colors(number), alpha=0.9,
            )  # fmt: skip
            right = x > 0.7
            panel.annotate(
                row.name, (x, y), (-7 if right else 7, 6), textcoords="offset points",
                ha="right" if right else "left", fontsize=8.5, color=colors(number),
            )  # fmt: skip
        panel.set(xlabel=title, xlim=(-0.04, 1.06), ylim=(4.6, -0.9))
        panel.xaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1))
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("points of accuracy lost (up is better)")
    figure.savefig(target, dpi=200, facecolor="white")
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
