"""A learning rate for heads by proof that nobody searches for: chosen on two tasks, checked on
others.
"""

import functools
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_gradguard.heads import default_learning_rate

from ..study import Study
from . import frontier_clients as clients
from . import frontier_tables as tables
from .correlated_heads import HeadTask
from .lib.linear_heads import HeadSettings, cut
from .lib.many_rates import heads_of_rates, rightly
from .lib.results import Results
from .lib.tables import write_table
from .rate_tasks import Articles, Pairs, RateImages, SomePhrases

GRID = tuple(1.25 * 2**power for power in range(10))  # of messages of 16
CLIP, SIGMA, SHARE = 0.3, 1.5, 16
SEARCH_SEEDS, SEEDS = 3, range(10, 15)  # of searches; of trainings that are judged
KINDS = ("best rate", "rule")


class Condition(NamedTuple):
    """A training of a head.

    Args:
        steps: Messages.
        batch: Samples of each.
        share: Samples for each direction, up to those that a task has.
        noise_multiplier: σ, 0: no noise.
        clip: Of a sample's gradient.
        correlated: Whether noise cancels in the weights.
    """

    steps: int
    batch: int = 16
    share: int = SHARE
    noise_multiplier: float = SIGMA
    clip: float = CLIP
    correlated: bool = True

    @property
    def is_judged(self) -> bool:
        """Whether the rule's loss is measured there."""
        return self.clip == CLIP and self.share == SHARE

    @property
    def lowest(self) -> float:
        """The grid's lowest rate."""
        return GRID[0] * self.batch / 16 * (1 if self.correlated else 1 / 8)

    def text(self) -> str:
        """As tables show it."""
        kind = "correlated" if self.correlated else "independent"
        others = [f"clip {self.clip:g}"] * (self.clip != CLIP)
        others += [f"a direction for {self.share} rows"] * (self.share != SHARE)
        size = f"{self.steps:,} messages of {self.batch}"
        return ", ".join([size, f"σ {self.noise_multiplier:g} {kind}", *others])


class TaskPlan(NamedTuple):
    """What is measured on a task.

    Args:
        classes: How many.
        rows: To learn from.
        directions: The most there are.
        lengths: Messages by the samples of each.
        is_chosen_on: Whether the rule was chosen on it, by more conditions.
    """

    classes: int
    rows: int
    directions: int
    lengths: Mapping[int, Sequence[int]]
    is_chosen_on: bool = False

    def conditions(self) -> list[Condition]:
        """All, the plain ones first."""
        plain = [
            Condition(steps, batch)
            for batch, lengths in self.lengths.items()
            for steps in lengths
            if steps * batch <= self.rows
        ]
        if not self.is_chosen_on:
            return plain
        varied: list[tuple[dict[str, Any], Collection[tuple[int, int]]]] = [
            *(({"noise_multiplier": sigma}, NOISY) for sigma in (0.0, 0.95, 3.0)),
            *(({"clip": clip}, VARIED) for clip in (0.1, 1.0)),
            *(({"share": share}, VARIED) for share in (8, 32)), ({"correlated": False}, VARIED),
        ]  # fmt: skip
        others = [
            one._replace(**other)
            for other, sizes in varied
            for one in plain
            if (one.batch, one.steps) in sizes
        ]
        return plain + others


QUICK = Condition(2, 4)
VARIED = {(16, 200), (16, 800)}
NOISY = {(16, 200), (16, 1590), (64, 200)}
MANY = {16: (50, 200, 800, 1590), 64: (50, 200, 400), 256: (50, 100)}
SOME = {16: (50, 200, 800), 64: (50, 200), 256: (50,)}
TASKS = {
    "SST-2, MiniLM": TaskPlan(2, 26000, 1400, MANY, True),
    "CIFAR-10, patches": TaskPlan(10, 26000, 800, MANY, True),
    "articles, MiniLM": TaskPlan(200, 16500, 1400, SOME),
    "pairs, MiniLM": TaskPlan(2, 13000, 1400, SOME),
    "MNIST, patches": TaskPlan(10, 13000, 800, SOME),
    "Tiny ImageNet, patches": TaskPlan(200, 8000, 800, SOME),
}


class DefaultRates(Study):
    """Accuracy of heads at a learning rate that a rule gives, and at the best of a grid.

    Conditions and figures: docs/findings/heads.md.
    """

    ARGUMENTS = clients.TEXT_FLAGS | {
        "--models": "folder that keeps features",
        "--wikitext": "folder of WikiText-2, train.txt and valid.txt",
        "--train": "parquet of CIFAR-10, to train on", "--test": "the same, to judge on",
        "--mnist": "npz of MNIST", "--tiny_imagenet": "npz of Tiny ImageNet at 32 pixels",
        "--cifar10": "npz of CIFAR-10 images, public for Tiny ImageNet",
        "--only": {"nargs": "*", "help": "tasks by a part of their names"},
    }  # fmt: skip
    TASKS: Mapping[str, TaskPlan] = TASKS

    def cells(self) -> dict:
        """Grids first, then trainings at each grid's best rate and at the rule's."""
        cells: dict = {}
        self.rates: dict[str, list[float]] = {}
        only = self.args.only or [""]
        named = {name: plan for name, plan in self.TASKS.items() if any(o in name for o in only)}
        results = Results(self.output)
        for name, plan in named.items():
            for condition in [QUICK] if self.quick else plan.conditions():
                row, common = f"{name}, {condition.text()}", self.common(name, plan, condition)
                searched = common | {"seeds": SEARCH_SEEDS}
                if condition.lowest != GRID[0]:
                    searched["lowest"] = condition.lowest
                cells[row, tables.RATES] = searched
                if (cell := self.marked(searched)) not in results:
                    continue
                self.rates[row] = [best_rate(results[cell]), rule(condition)]
                for seed in SEEDS if condition.is_judged else ():
                    judged = common | {"rates": self.rates[row], "seed": seed}
                    cells[row, tables.ACCURACY, str(seed)] = judged
        return dict(sorted(cells.items(), key=lambda pair: (pair[1]["task"], len(pair[0]))))

    def marked(self, cell: dict) -> dict:
        """As `run` stores it."""
        return cell | ({"quick": True} if self.quick else {})

    def common(self, name: str, plan: TaskPlan, condition: Condition) -> dict:
        """A condition's settings."""
        directions = max(2, condition.steps * condition.batch // condition.share)
        settings = condition._asdict() | {"directions": min(directions, plan.directions)}
        del settings["share"]
        return {"task": name} | settings

    @functools.cached_property
    def tasks(self) -> dict[str, Callable[[], HeadTask]]:
        """Made when they are needed."""
        args = self.args
        cifar10, mnist, tiny = (args.train, args.test), (args.mnist,) * 2, (args.tiny_imagenet,) * 2
        text, folder = (args.model, args.wikitext, args.models), args.models
        return {
            "SST-2, MiniLM": lambda: SomePhrases(
                args.model, args.data_dir, folder, f"{args.wikitext}/train.txt"
            ),
            "CIFAR-10, patches": lambda: RateImages(
                "cifar10", cifar10, args.tiny_imagenet, folder, (28000, 5000)
            ),
            "articles, MiniLM": lambda: Articles(*text),
            "pairs, MiniLM": lambda: Pairs(*text),
            "MNIST, patches": lambda: RateImages(
                "mnist", mnist, args.tiny_imagenet, folder, (15000, 3000)
            ),
            "Tiny ImageNet, patches": lambda: RateImages(
                "tiny", tiny, args.cifar10, folder, (10000, 2000), "val"
            ),
        }

    @functools.lru_cache(maxsize=1)  # noqa: B019
    def task(self, name: str) -> HeadTask:
        """One at a time: features are large."""
        return self.tasks[name]()

    @functools.lru_cache(maxsize=1)  # noqa: B019
    def parts(self, name: str, directions: int) -> list[tuple[Tensor, Tensor]]:
        """Rows to learn, to choose by and to judge on."""
        task = self.task(name)
        cuts = [cut(part, directions) for part in (*task.split, task.test_rows)]
        return [(rows["features"], rows["labels"]) for rows in cuts]

    def measure(self, cell: dict) -> dict:
        rows, held_out, judged = self.parts(cell["task"], cell["directions"])
        settings = HeadSettings(
            0.0, cell["steps"], cell["batch"], cell["clip"], cell["noise_multiplier"],
            cell["correlated"],
        )  # fmt: skip
        classes = self.TASKS[cell["task"]].classes
        train = functools.partial(heads_of_rates, *rows, settings, classes=classes)
        if "seed" in cell:
            right = rightly(train(rates=cell["rates"], seed=cell["seed"]), *judged).T.numpy()
            return {name: clients.judgment(one) for name, one in zip(KINDS, right, strict=True)}
        grid = [rate * cell.get("lowest", GRID[0]) / GRID[0] for rate in GRID]
        sums = {"held_out": torch.zeros(len(grid)), "test": torch.zeros(len(grid))}
        for seed in range(cell["seeds"]):
            weights = train(rates=grid, seed=seed)
            sums["held_out"] += rightly(weights, *held_out).float().mean(0)
            sums["test"] += rightly(weights, *judged).float().mean(0)
        return {
            name: {
                f"{rate:g}": round(total / cell["seeds"], 5)
                for rate, total in zip(grid, totals.tolist(), strict=True)
            }
            for name, totals in sums.items()
        }

    def report(self, metrics: dict) -> None:
        rows = []
        for row, columns in metrics.items():
            searched = columns[tables.RATES]["held_out"]
            best, _ = rates = self.rates[row]
            shown = [
                f"{f'**{rate}**' if float(rate) == best else rate} ({score:.3f})"
                for rate, score in searched.items()
            ]
            runs = [
                {seed: judged[kind] for seed, judged in columns.get(tables.ACCURACY, {}).items()}
                for kind in KINDS
            ]
            scores = [*map(tables.accuracy_text, runs), tables.lost(*reversed(runs))]
            rows.append([row, ", ".join(shown), *(f"{rate:.3g}" for rate in rates), *scores])
        header = ["", "rates (held out)", "best rate", "rule's", "accuracy at the best", "by rule",
                  "less by rule"]  # fmt: skip
        write_table(self.output, header, rows)


def best_rate(figures: dict) -> float:
    """Of held-out rows; of equals the smaller."""
    scores = figures["held_out"]
    return float(min(scores, key=lambda rate: (-scores[rate], float(rate))))


def rule(condition: Condition) -> float:
    """Return the rate that nobody searched for, also where samples are clipped without noise."""
    return default_learning_rate(
        condition.batch, condition.noise_multiplier or sys.float_info.min, condition.clip,
        independent_messages=None if condition.correlated else condition.steps,
    )  # fmt: skip
