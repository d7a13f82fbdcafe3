r"""The learning rate of each defense at each strength, chosen on a held-out part of SST-2's
training set.

    python -m recipes.studies.frontier.run rates --model MODEL --data_dir SST2 \
        --output docs/results/frontier_rates

A client of 16 phrases per message, 200 steps of AdamW with the Trainer's defaults, a seed that the
frontier itself does not use. Rates come from one grid in steps of two. Three are tried: around
2e-4, and for noise of r times the gradient around √(1 + r²) times that, because AdamW divides its
steps by as much. Where the best is at an end, more are, until it is not. About two minutes of one
core a cell.
"""

from collections.abc import Sequence

from ..lib.results import Results
from ..lib.tables import write_table
from .client import rates, row_of
from .settings import ALL, BATCH, FIRST, GRID, QUICK, QUICK_ROWS, RATES_SEED, ROWS, SPREAD, STEPS
from .training import TEXTS, Task

ARGUMENTS = TEXTS | {"--all": ALL}


def cells(args) -> dict:
    """Those of the start, and those that they ask for next. Without `--all` of the first rows, and
    of those whose search has ended.
    """
    sizes = QUICK if args.quick else {"steps": STEPS, "batch": BATCH}
    results, found = Results(args.output), {}
    for defense, strength in QUICK_ROWS if args.quick else ROWS:
        common = {"defense": defense, "strength": strength, "seed": RATES_SEED, **sizes}
        start = rates(strength, 0 if args.quick else SPREAD)
        tried = start if args.quick else searched(results, common, start)
        search = by_rate(common, tried)
        ended = all(cell in results for cell in search.values())
        if not (args.quick or args.all or ended or (defense, strength) in FIRST):
            continue
        found |= {(row_of(defense, strength), rate): cell for rate, cell in search.items()}
    return found


def searched(
    results: Results, common: dict, start: Sequence[float], grid: Sequence[float] = GRID
) -> list[float]:
    """Those to start with, and those that their results ask for next."""
    tried = list(start)
    while more := _next(results, common, tried, grid):
        tried = sorted([*tried, more])
    return tried


def by_rate(common: dict, tried: Sequence[float]) -> dict[str, dict]:
    """Cells of a row, by rate."""
    return {f"{rate:g}": common | {"learning_rate": rate} for rate in tried}


def chosen(results: Results, search: dict[str, dict]) -> float | None:
    """The best rate of such cells, once all are there."""
    if any(cell not in results for cell in search.values()):
        return None
    return best({"": {rate: results[cell] for rate, cell in search.items()}})[""]


def _next(
    results: Results, common: dict, tried: list[float], grid: Sequence[float] = GRID
) -> float | None:
    """The rate beyond the end that is best of those tried, if there is one."""
    cells = [common | {"learning_rate": rate} for rate in tried]
    if any(cell not in results for cell in cells):
        return None
    scores = [results[cell]["held_out"] for cell in cells]
    best, place = scores.index(max(scores)), grid.index(tried[0])
    if best == 0 and place > 0:
        return grid[place - 1]
    last = grid.index(tried[-1])
    if best == len(tried) - 1 and last + 1 < len(grid):
        return grid[last + 1]
    return None


def prepare(args):
    return Task(args.model, args.data_dir).on_held_out


def best(figures: dict) -> dict[str, float]:
    """The best rate of each row; of equals the smaller."""
    return {
        row: float(min(tried, key=lambda rate: (-tried[rate]["held_out"], float(rate))))
        for row, tried in figures.items()
    }


def report(figures: dict, args) -> None:
    rates = best(figures)
    rows = [
        [f"`{row}`", f"{rates[row]:g}"]
        + [f"{tried[f'{rate:g}']['held_out']:.3f}" if f"{rate:g}" in tried else "" for rate in GRID]
        for row, tried in figures.items()
    ]
    write_table(args.output, ["", "chosen", *(f"{rate:g}" for rate in GRID)], rows)
