"""What the whole encoder reaches on SST-2 with as many undefended messages of 16 as heads and
bodies have: the price of protection is counted from it. And what is left of it, and of LoRA, by
proof.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from peft import LoraConfig, TaskType, get_peft_model
from torch import nn

from hf_gradguard import GradGuardTrainer
from hf_gradguard.gradient_map.parameters import shared_parameters

from . import correlated_heads as heads
from . import frontier_clients as clients
from . import frontier_tables as tables
from .frontier_rows import BATCH, GRID, RATES_SEED
from .lib.tables import write_table
from .rate_search import RateStudy, cells_by_rate

RATES = (1.25e-5, 2.5e-5, *GRID)
SHARE = 0.98  # of the accuracy: what protection should keep


class WholeModels(RateStudy):
    """Accuracy on SST-2 of an undefended encoder, all of whose weights are trained.

    Conditions and figures: docs/findings/heads.md.
    """

    ARGUMENTS: dict[str, Any] = clients.TEXT_FLAGS | {"--models": "folder that keeps trainings"}
    SEEDS: Mapping[int, int] = {200: 1, 1590: 1, 4209: 1}  # by the number of messages
    LONGEST_SEARCH = 1590  # the rate of longer ones is searched at that length
    MIDDLE_RATE = GRID[1]

    def cells(self) -> dict:
        """Rates first, then what takes the best of them."""
        cells: dict = {}
        for steps, seeds in ({2: 1} if self.quick else self.SEEDS).items():
            place = f"{steps:,} messages of {BATCH}"
            place += f", rates of {self.LONGEST_SEARCH:,}" * (steps > self.LONGEST_SEARCH)
            common = self._trained(min(steps, self.LONGEST_SEARCH)) | {"seed": RATES_SEED}
            search = self.search(common, RATES, self.MIDDLE_RATE)
            cells |= self.rated_cells(place, search, self._trained(steps), range(seeds))
        return cells

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


class WholeMPNet(WholeModels):
    """The same for a stronger encoder: all-mpnet-base-v2.

    Conditions and figures: docs/findings/heads.md.
    """

    SEEDS = {400: 3, 1590: 1}
    LONGEST_SEARCH, MIDDLE_RATE = 400, GRID[0]


class Part(NamedTuple):
    """What is trained of an encoder.

    Args:
        name: In the tables.
        rank: Of LoRA on queries and values; `None`: all weights but the words' table.
        steps: Messages.
        middle_rate: Around which rates are tried, without defense and with it.
        searched_rank: With which they are tried, if it is another.
        seeds: How many.
        judged: Whether the best rate is judged on the test set: not where none learns.
    """

    name: str
    rank: int | None
    steps: int
    middle_rate: dict[str, float]
    searched_rank: int | None = None
    seeds: int = 1
    judged: bool = True


SGD_GRID = tuple(1e-3 * 4**power for power in range(9))
PARTS = (
    Part("LoRA of rank 8", 8, 1590, {heads.NONE: SGD_GRID[4], heads.CORRELATED: SGD_GRID[4]}),
    Part("LoRA of rank 2", 2, 1590, {heads.CORRELATED: SGD_GRID[4]}, 8, seeds=2),
    Part("whole model", None, 800, {heads.CORRELATED: SGD_GRID[2]}, judged=False),
)
CLIP = 1.0  # below the norm of nearly every sentence's gradient


class PartTask(clients.TextTask):
    """Trainings of a part of the encoder by SGD, with a rate that falls to zero."""

    def trainer(self, model: nn.Module, rows: Any, cell: dict) -> GradGuardTrainer:
        if cell["rank"] is not None:
            lora = LoraConfig(
                task_type=TaskType.SEQ_CLS, r=cell["rank"], lora_alpha=2 * cell["rank"],
                target_modules=["query", "value"],
            )  # fmt: skip
            model = get_peft_model(model, lora)
        args = heads.sgd_arguments(self._scratch.name, cell)
        return GradGuardTrainer(
            model, args, train_dataset=rows, processing_class=self.processing_class
        )

    def learned(self, cell: dict) -> dict:
        """Accuracy, how many numbers a message has, and what a proof says."""
        trainer = self.trainer(self.start(cell["seed"]), self.rows_to_learn(), cell)
        trainer.train()
        right = self.right(trainer.model, self.test_rows)
        shared = shared_parameters(trainer.model).values()
        metrics = clients.judgment(right) | {"numbers": sum(p.numel() for p in shared)}
        noise = cell["strength"].get("noise_multiplier")
        return metrics if noise is None else metrics | heads.of_known_messages(noise)


class Parts(RateStudy):
    """Accuracy on SST-2 of LoRA and of the whole encoder by messages of 16 phrases, each in one of
    them, with correlated noise and none.

    Conditions and figures: docs/findings/heads.md.
    """

    ARGUMENTS: dict[str, Any] = clients.TEXT_FLAGS

    def cells(self) -> dict:
        """Rates first, then what takes the best of them."""
        cells: dict = {}
        for part in PARTS:
            for name in part.middle_rate:
                place, common = self._place(part, name), self._trained(part, name)
                search = self._search(part, name, common)
                seeds = range(part.seeds if part.judged else 0)
                cells |= self.rated_cells(place, search, common, seeds)
        return cells

    def _place(self, part: Part, name: str) -> str:
        return f"{part.name}, {name}, {self._steps(part):,} messages"

    def _steps(self, part: Part) -> int:
        return 2 if self.quick else part.steps

    def _search(self, part: Part, name: str, common: dict) -> dict[str, dict]:
        """Cells of the rates so far, each judged on held-out rows."""
        common = common | {"seed": RATES_SEED, "rank": part.searched_rank or part.rank}
        middle = part.middle_rate[name]
        if part.judged:
            return self.search(common, SGD_GRID, middle)
        place = SGD_GRID.index(middle)
        rates = [middle] if self.quick else SGD_GRID[place - 1 : place + 2]
        return cells_by_rate(common, rates)

    def _trained(self, part: Part, name: str) -> dict:
        strength = heads.KINDS[name].strength
        strength |= {"clip": CLIP} if strength else {}
        return {"defense": "dp_sgd" if strength else "none", "strength": strength,
                "rank": part.rank, "steps": self._steps(part), "batch": BATCH}  # fmt: skip

    def load(self) -> None:
        self.task = PartTask(self.args.model, self.args.data_dir)

    def measure(self, cell: dict) -> dict:
        return self.task.trained(cell)

    def report(self, metrics: dict) -> None:
        rows, tried = [], tables.pop_rates(metrics)
        for part in PARTS:
            plain = metrics.get(self._place(part, heads.NONE), {}).get(tables.ACCURACY, {})
            for name in part.middle_rate:
                place = self._place(part, name)
                runs = metrics.get(place, {}).get(tables.ACCURACY, {})
                first = next(iter(runs.values()), {})
                proof = [f"{first[key]:.2g}" if key in first else "" for key in heads.PROOF]
                numbers = f"{first['numbers']:,}" if first else ""
                shown = [place, numbers, tried.get(place, ""), tables.accuracy_text(runs)]
                rows.append([*shown, "" if runs is plain else tables.lost(runs, plain), *proof])
        header = ["", "numbers shared", "rates (held out)", "accuracy", "less than none", "ε"]
        write_table(self.output, [*header, "members found at most"], rows)
