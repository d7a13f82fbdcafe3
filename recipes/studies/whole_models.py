"""What the whole encoder reaches on SST-2 with as many undefended messages of 16 as heads and
bodies have: the price of protection is counted from it.
"""

from typing import Any

from ..study import Study
from . import frontier_clients as clients
from . import frontier_tables as tables
from .frontier_rows import BATCH, GRID, RATES_SEED
from .lib.results import Results
from .lib.tables import write_table

LENGTHS = (200, 1590, 4209)  # messages
LONGEST_SEARCH = 1590  # the rate of longer ones is searched at that length
RATES = (1.25e-5, 2.5e-5, *GRID)
SHARE = 0.98  # of the accuracy: what protection should keep


class WholeModels(Study):
    """Accuracy on SST-2 of an undefended encoder, all of whose weights are trained.

    Conditions and figures: docs/findings/correlated_heads.md.
    """

    ARGUMENTS: dict[str, Any] = clients.TEXT_FLAGS | {"--models": "folder that keeps trainings"}
    SEEDS = 1

    def cells(self) -> dict:
        """Rates first, then what takes the best of them."""
        cells: dict = {}
        for steps in (2,) if self.quick else LENGTHS:
            place = f"{steps:,} messages of {BATCH}"
            place += f", rates of {LONGEST_SEARCH:,}" * (steps > LONGEST_SEARCH)
            search = self.search(min(steps, LONGEST_SEARCH))
            cells |= {(place, tables.RATES, tried): cell for tried, cell in search.items()}
            rate = GRID[0] if self.quick else clients.chosen_rate(Results(self.output), search)
            for seed in range(self.SEEDS) if rate is not None else ():
                cells[place, tables.ACCURACY, str(seed)] = (
                    self._trained(steps) | {"learning_rate": rate, "seed": seed}
                )  # fmt: skip
        return cells

    def search(self, steps: int) -> dict[str, dict]:
        """Cells of the rates so far, each judged on held-out rows."""
        common = self._trained(steps) | {"seed": RATES_SEED}
        rates = GRID[:1]
        if not self.quick:
            rates = clients.rates_so_far(Results(self.output), common, GRID[:3], RATES)
        return clients.cells_by_rate(common, rates)

    def _trained(self, steps: int) -> dict:
        return {"defense": "none", "strength": {}, "steps": steps, "batch": BATCH}

    def load(self) -> None:
        args = self.args
        self.task = clients.TextTask(args.model, args.data_dir, args.models)

    def measure(self, cell: dict) -> dict:
        return self.task.trained(cell)

    def report(self, metrics: dict) -> None:
        tried, rows = tables.pop_rates(metrics), []
        for place, cells in metrics.items():
            runs = cells.get(tables.ACCURACY, {})
            mean = sum(run["accuracy"] for run in runs.values()) / max(len(runs), 1)
            kept = f"{SHARE * mean:.3f}" if runs else ""
            rows.append([place, tried[place], tables.accuracy_text(runs), kept])
        header = ["whole model, undefended", "rates (held out)", "accuracy"]
        write_table(self.output, [*header, f"{SHARE:.0%} of it"], rows)
