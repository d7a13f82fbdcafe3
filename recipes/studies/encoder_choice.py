"""Which public encoder a head should stand on: an ε-private choice by the private rows, and what it
loses against the best of three.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_gradguard.heads import default_learning_rate
from hf_gradguard.heads.choice import GROUPS, group_losses
from hf_gradguard.heads.head import directions_for

from ..study import Study
from . import frontier_clients as clients
from .correlated_heads import HeadTask
from .lib.intervals import student
from .lib.linear_heads import HeadSettings, cut
from .lib.many_rates import heads_of_rates, rightly
from .lib.tables import write_table
from .rate_tasks import Articles, BlockMeans, Pairs, Pixels, RateImages, SomePhrases

SIGMA, CLIP, BATCH, SEEDS = 1.5, 0.3, 16, 5
EPSILONS = (0.5, 1.0, 2.0)
GROUPINGS = 10  # random ones, over which chances of being chosen are averaged
ROWS = (2000, 13000)
TEXTS, IMAGES = (
    ("MiniLM", "MPNet", "MiniLM, first layer"),
    ("patches", "EfficientNet-Lite0", "pixels"),
)
TASKS = {
    "SST-2": (2, TEXTS), "200 articles": (200, TEXTS), "pairs of sentences": (2, TEXTS),
    "CIFAR-10": (10, IMAGES), "MNIST": (10, IMAGES),
}  # fmt: skip


class EncoderChoice(Study):
    """What a private choice among three encoders loses against the best of them.

    Conditions and figures: docs/findings/heads.md.
    """

    ARGUMENTS = Study.ALL | clients.TEXT_FLAGS | {
        "--mpnet": "folder of all-mpnet-base-v2", "--models": "folder that keeps features",
        "--wikitext": "folder of WikiText-2, train.txt and valid.txt",
        "--train": "parquet of CIFAR-10, to train on", "--test": "the same, to judge on",
        "--mnist": "npz of MNIST", "--tiny_imagenet": "npz of Tiny ImageNet at 32 pixels",
        "--network": "folder of the packages of EfficientNet-Lite0",
        "--only": {"nargs": "*", "help": "tasks by a part of their names"},
    }  # fmt: skip

    def cells(self) -> dict:
        rows = (2000,) if self.quick else ROWS
        return self.published({
            (task, f"{count:,} rows"): {"task": task, "rows": count, "groups": GROUPS}
            for task in TASKS
            if any(name in task for name in self.args.only or [""])
            for count in rows
        })  # fmt: skip

    def encoders(self, task: str) -> dict[str, Callable[[], HeadTask]]:
        """Makers of a task's features, by the encoder's name."""
        args = self.args
        if task == "SST-2":
            public = f"{args.wikitext}/train.txt"

            def text(model: str) -> SomePhrases:
                return SomePhrases(model, args.data_dir, args.models, public)
        elif task in ("CIFAR-10", "MNIST"):
            is_cifar = task == "CIFAR-10"
            files = (args.train, args.test) if is_cifar else (args.mnist,) * 2
            counts = (28000, 5000) if is_cifar else (15000, 3000)
            name = "cifar10" if is_cifar else "mnist"
            settings = (name, files, args.tiny_imagenet, args.models, counts)
            return {
                "patches": lambda: RateImages(*settings), "pixels": lambda: Pixels(*settings),
                "EfficientNet-Lite0": lambda: BlockMeans(args.network, *settings),
            }  # fmt: skip
        else:
            kind = Articles if task == "200 articles" else Pairs

            def text(model: str) -> Any:
                return kind(model, args.wikitext, args.models)

        return {
            "MiniLM": lambda: text(args.model), "MPNet": lambda: text(args.mpnet),
            "MiniLM, first layer": lambda: text(args.model).with_layers(1),
        }  # fmt: skip

    def measure(self, cell: dict) -> dict:
        classes, names = TASKS[cell["task"]]
        makers = self.encoders(cell["task"])
        count, order = cell["rows"], torch.Generator().manual_seed(0)
        accuracies: dict[str, list[float]] = {}
        rows: list[tuple[Tensor, Tensor]] = []
        for name in names:
            task = makers[name]()
            parts = [cut(part, directions_for(count)) for part in (task.split[0], task.test_rows)]
            (features, labels), judged = (
                (part["features"], part["labels"]) for part in parts
            )  # fmt: skip
            chosen = torch.randperm(len(labels), generator=order.manual_seed(0))[:count]
            rows.append((features[chosen], labels[chosen]))
            accuracies[name] = [
                accuracy_by_proof(rows[-1], judged, classes, seed) for seed in range(SEEDS)
            ]
        chances = {f"{epsilon:g}": np.zeros(len(names)) for epsilon in EPSILONS}
        shares = np.zeros(len(names))
        for _ in range(GROUPINGS):
            places = torch.randint(cell["groups"], (count,), generator=order).tolist()
            losses = [
                group_losses(features, F.one_hot(labels, classes).float(), places, True)
                for features, labels in rows
            ]
            votes = torch.stack(losses).argmin(0).bincount(minlength=len(names)).numpy()
            shares += votes / len(losses[0]) / GROUPINGS
            for epsilon in EPSILONS:
                weights = np.exp(epsilon / 2 * (votes - votes.max()))
                chances[f"{epsilon:g}"] += weights / weights.sum() / GROUPINGS
        return {
            "accuracy": accuracies,
            "votes": dict(zip(names, shares.round(4).tolist(), strict=True)),
            "chances": {epsilon: chance.round(6).tolist() for epsilon, chance in chances.items()},
        }

    def report(self, metrics: dict) -> None:
        rows = []
        for task, columns in metrics.items():
            for size, found in columns.items():
                scores = {name: np.array(runs) for name, runs in found["accuracy"].items()}
                best = max(scores, key=lambda name: scores[name].mean())
                lost = [100 * (scores[best] - runs).mean() for runs in scores.values()]
                shown = [
                    f"{name} {student(runs.tolist()).text()}, {found['votes'][name]:.0%} of votes"
                    for name, runs in scores.items()
                ]
                means = [f"{np.dot(chance, lost):.2f}" for chance in found["chances"].values()]
                rows.append([f"{task}, {size}", *shown, best, *means])
        header = ["", "first", "second", "third", "best"]
        header += [f"points lost by the choice, ε = {epsilon:g}" for epsilon in EPSILONS]
        write_table(self.output, header, rows)


def accuracy_by_proof(
    rows: tuple[Tensor, Tensor], judged: tuple[Tensor, Tensor], classes: int, seed: int
) -> float:
    """Of a head that was trained on all rows at the default rate, each in one message of 16."""
    settings = HeadSettings(0.0, len(rows[1]) // BATCH, BATCH, CLIP, SIGMA, True)
    rates = [default_learning_rate(BATCH, SIGMA, CLIP)]
    weights = heads_of_rates(*rows, settings, rates, classes, seed)
    return float(rightly(weights, *judged).double().mean())
