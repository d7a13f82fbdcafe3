"""The best learning rate of a grid: rates around a usual one, judged on what is held out, and the
next one beyond where the best is at an end.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..study import Study
from .frontier_rows import GRID
from .lib.results import Place, Results

ACCURACY, RATES = "accuracy", "learning rate"  # in the places of cells


class RateStudy(Study):
    """A study whose trainings take the best rate of a search, which is among its cells."""

    def search(
        self, common: dict, grid: Sequence[float], middle: float, spread: int = 1
    ) -> dict[str, dict]:
        """Cells of the rates so far, by rate; of quick runs the one in the middle."""
        place = grid.index(middle)
        if self.quick:
            return cells_by_rate(common, [middle])
        start = grid[place - spread : place + spread + 1]
        return cells_by_rate(common, rates_so_far(Results(self.output), common, start, grid))

    def best(self, search: dict[str, dict]) -> float | None:
        """The best rate, once its search has ended; of quick runs the one that is tried."""
        if self.quick:
            return next(iter(search.values()))["learning_rate"]
        return chosen_rate(Results(self.output), search)

    def rated_cells(
        self, place: str, search: dict[str, dict], trained: Mapping[str, Any], seeds: Iterable[int]
    ) -> dict[Place, dict]:
        """A row's cells: of the search, and, once it has ended, of trainings at the best rate."""
        cells: dict[Place, dict] = {(place, RATES, rate): cell for rate, cell in search.items()}
        rate = self.best(search)
        for seed in seeds if rate is not None else ():
            cells[place, ACCURACY, str(seed)] = {**trained, "learning_rate": rate, "seed": seed}
        return cells


def rates_to_try(
    strength: dict, spread: int, usual: float = 2e-4, grid: Sequence[float] = GRID
) -> Sequence[float]:
    """Of the grid: around the usual one, or for noise of r times the gradient around that times
    √(1 + r²), by which AdamW divides its steps. Noise in proportion to a clip is far larger.
    """
    ratio = 1e3 if "noise_multiplier" in strength else strength.get("relative_scale", 0.0)
    scaled = usual * math.sqrt(1 + ratio**2)
    near = min(range(len(grid)), key=lambda i: abs(math.log(grid[i] / scaled)))
    near = min(max(near, spread), len(grid) - 1 - spread)
    return grid[near - spread : near + spread + 1]


def rates_so_far(
    results: Mapping, common: dict, start: Sequence[float], grid: Sequence[float] = GRID
) -> list[float]:
    """Those to start with, and those that their results ask for next."""
    rates = list(start)
    while next_one := next_rate(results, common, rates, grid):
        rates = sorted([*rates, next_one])
    return rates


def next_rate(
    results: Mapping, common: dict, rates: Sequence[float], grid: Sequence[float] = GRID
) -> float | None:
    """The rate beyond the end that is best of those tried, if there is one."""
    cells = [common | {"learning_rate": rate} for rate in rates]
    if any(cell not in results for cell in cells):
        return None
    scores = [results[cell]["held_out"] for cell in cells]
    best, place = scores.index(max(scores)), grid.index(rates[0])
    if best == 0 and place > 0:
        return grid[place - 1]
    last_place = grid.index(rates[-1])
    if best == len(rates) - 1 and last_place + 1 < len(grid):
        return grid[last_place + 1]
    return None


def cells_by_rate(common: dict, rates: Sequence[float]) -> dict[str, dict]:
    return {f"{rate:g}": common | {"learning_rate": rate} for rate in rates}


def chosen_rate(results: Results, search: dict[str, dict]) -> float | None:
    """The best rate of such cells, once all are there."""
    if any(cell not in results for cell in search.values()):
        return None
    return best_rates({"": {rate: results[cell] for rate, cell in search.items()}})[""]


def best_rates(metrics: dict) -> dict[str, float]:
    """The best rate of each row; of equals the smaller."""
    return {
        row: float(min(rates, key=lambda rate: (-rates[rate]["held_out"], float(rate))))
        for row, rates in metrics.items()
    }
