"""Which learning rate suits noise of r times the gradient? Rules against the best of a grid."""

import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn

from hf_gradguard import GradientMap
from hf_gradguard.gradient_map.domain import domain_of_batch, special_ids
from hf_gradguard.gradient_map.random_batch import random_batch
from hf_gradguard.randomness import Stream

from ..study import Study
from . import frontier_clients as clients
from . import frontier_rows as plan
from .frontier_images import ElsewhereTask
from .frontier_tables import accuracy_lost
from .lib.results import PUBLISHED, Results
from .lib.tables import write_table

RATIO = 20.0
NOISE = "gaussian_noise"


class PlaceOfTraining(NamedTuple):
    """Where the frontiers searched for rates.

    Args:
        search: The published results with the grid of rates.
        trained: Those with trainings of seeds 0 to 2 at the best rate.
        sizes: Of a training, as those name it.
    """

    search: str
    trained: str
    sizes: dict


IMAGES = plan.IMAGE_SIZES
TEXT, CONVOLUTIONS = "MiniLM, SST-2", "convolutions, CIFAR-10"
PLACES = {
    **{
        name: PlaceOfTraining("frontier_elsewhere", "frontier_elsewhere", IMAGES | {"place": name})
        for name in plan.ELSEWHERE
    },
    CONVOLUTIONS: PlaceOfTraining("frontier_images", "frontier_images", IMAGES),
    TEXT: PlaceOfTraining("frontier_rates", "frontier_text", plan.SIZES),
}


class CorrectedAdamW(torch.optim.Optimizer):
    """AdamW that subtracts the noise's variance from its second moment: Δ = m̂/√max(v̂ - σ², γ)
    (DP-AdamBC; Tang, Panaitescu-Liess and Lécuyer, 2023).

    Args:
        parameters: To train.
        lr: Learning rate.
        ratio: r. The noise's variance is r²/(1 + r²) of the mean square of what is received.

    γ is one standard error of v̂, which averages squares of Gaussian noise: less than that is not
    known of v̂ - σ².
    """

    BETAS, EPSILON = (0.9, 0.999), 1e-8

    def __init__(self, parameters: Any, lr: float, ratio: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self._share = ratio**2 / (1 + ratio**2)
        self._step, self._variance = 0, 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step."""
        (first, second), parameters = self.BETAS, [
            (p, group["lr"]) for group in self.param_groups for p in group["params"]
            if p.grad is not None
        ]  # fmt: skip
        entries = sum(p.numel() for p, _ in parameters)
        power = math.fsum(float(p.grad.double().square().sum()) for p, _ in parameters)
        self._step += 1
        kept = second**self._step
        self._variance = second * self._variance + (1 - second) * self._share * power / entries
        variance = self._variance / (1 - kept)
        weights_squared = (1 - second) / (1 + second) * (1 + kept) / (1 - kept)
        floor = math.sqrt(2 * weights_squared) * variance
        for parameter, rate in parameters:
            state, gradient = self.state[parameter], parameter.grad
            if not state:
                state["mean"] = torch.zeros_like(parameter)
                state["square"] = torch.zeros_like(parameter)
            state["mean"].lerp_(gradient, 1 - first)
            state["square"].lerp_(gradient.square(), 1 - second)
            signal = (state["square"] / (1 - kept) - variance).clamp_min(floor)
            mean = state["mean"] / (1 - first**self._step)
            parameter.sub_(rate * mean / (signal.sqrt() + self.EPSILON))


class LearningRates(Study):
    """Which learning rate suits noise of twenty times the gradient? Rules, and an Adam whose second
    moment is corrected, against the best of a grid, in six places.

    The grids, and three trainings at the best rates, are the frontiers'. Conditions and verdict:
    docs/findings/rates.md.
    """

    ARGUMENTS = clients.TEXT_FLAGS | plan.FOLDER | Study.ALL | {
        "--train": "parquet with img and label, to train on",
        "--test": "the same, to judge on",
        "--mnist": "npz with x_train, y_train, x_test and y_test",
        "--tiny_imagenet": "npz with x_train, y_train, x_val and y_val",
    }  # fmt: skip
    SAME, TWICE, CORRECTED = "the undefended rate", "twice that", "corrected AdamW at it"
    COLUMNS: ClassVar[dict[str, float]] = {SAME: 1.0, CORRECTED: 1.0, TWICE: 2.0}
    SEEDS = 2

    def cells(self) -> dict:
        places = ["digits"] if self.quick else list(PLACES)
        cells: dict = {
            (place, "c"): {"place": place, "of": "public inputs", "batches": 4} for place in places
        }
        for seed in range(1 if self.quick else self.SEEDS):
            for column, factor in self.COLUMNS.items():
                for place in places:
                    undefended, best = best_rate(place, 0.0), best_rate(place, RATIO)
                    # The frontier's own trainings are at the best rate.
                    if column != self.CORRECTED and undefended * factor == best:
                        continue
                    cells[place, column, str(seed)] = {
                        "optimizer": "corrected" if column == self.CORRECTED else "AdamW",
                        "defense": NOISE, "seed": seed, "learning_rate": undefended * factor,
                        "strength": {"relative_scale": RATIO, "strength": "own"},
                        **PLACES[place].sizes, "place": place,
                        **({"steps": 2, "batch": 4} if self.quick else {}),
                    }  # fmt: skip
        return self.published(cells)

    def load(self) -> None:
        args = self.args
        files = {"cifar10": (args.train, args.test), "mnist": (args.mnist,) * 2}
        files["tiny_imagenet"] = (args.tiny_imagenet,) * 2
        cifar = functools.cache(lambda: clients.ImageTask(*files["cifar10"], folder=args.models))

        def task_of(place: str) -> Any:
            if place == TEXT:
                return clients.TextTask(args.model, args.data_dir, args.models)
            if place == CONVOLUTIONS:
                return cifar()
            task = ElsewhereTask(place, files, args.models)
            if task.images == "cifar10":  # decoded once
                vars(task).update(train_rows=cifar().train_rows, test_rows=cifar().test_rows)
            return task

        self.task = functools.cache(task_of)

    def measure(self, cell: dict) -> dict:
        task = self.task(cell["place"])
        return spread(task, cell["batches"]) if "of" in cell else accuracy(task, cell)

    def report(self, metrics: dict) -> None:
        header = [
            "place", "undefended", "held out, by multiples of it", "c √(1 + r²)",
            "held out lost, nearest to it", "nearest to √(1 + r²)",
            *(f"test accuracy lost: {name}" for name in self.COLUMNS),
        ]  # fmt: skip
        rows = []
        for place, columns in metrics.items():
            undefended, noisy = best_rate(place, 0.0), held_out(place, RATIO)
            best = best_rate(place, RATIO)
            factor = math.sqrt(1 + RATIO**2)
            by_rule = columns["c"]["c"] * factor
            tried = {rate / undefended: accuracy for rate, accuracy in noisy.items()}
            row = [
                place, f"{undefended:g}", _grid_text(tried, best / undefended), f"{by_rule:.1f}",
                _lost_nearest(tried, by_rule), _lost_nearest(tried, factor),
            ]  # fmt: skip
            for name, multiple in self.COLUMNS.items():
                runs = columns.get(name, {})
                row.append(_lost(runs, published_runs(place, best)))
                if name != self.CORRECTED and undefended * multiple == best:
                    row[-1] = "is the best"
            rows.append(row)
        write_table(self.output, header, rows)


def _grid_text(tried: dict[float, float], best: float) -> str:
    shown = (f"**{m:g}**" if m == best else f"{m:g}" for m in tried)
    return ", ".join(f"{m} ({a:.3f})" for m, a in zip(shown, tried.values(), strict=True))


def _lost_nearest(tried: dict[float, float], factor: float) -> str:
    """Held-out accuracy lost at the rate of the grid that is nearest to a rule's."""
    nearest = min(tried, key=lambda multiple: abs(math.log(multiple / factor)))
    return f"{max(tried.values()) - tried[nearest]:.3f} at {nearest:g}"


def _lost(runs: dict, best: Mapping[str, dict]) -> str:
    if not runs:
        return ""
    seeds = f" ({len(runs)} seed{'s' * (len(runs) > 1)})"
    return accuracy_lost(runs, dict(best)).text() + seeds


def held_out(place: str, ratio: float) -> dict[float, float]:
    """Held-out accuracies of the published grid, by rate."""
    defense, strength = (NOISE, {"relative_scale": ratio}) if ratio else ("none", {})
    common = {"defense": defense, "strength": strength, "seed": plan.RATES_SEED}
    common |= PLACES[place].sizes
    stored, accuracies = Results(PUBLISHED / PLACES[place].search), {}
    for cell in stored:
        rate = cell.get("learning_rate")
        if cell == common | {"learning_rate": rate}:
            accuracies[rate] = stored[cell]["held_out"]
    return dict(sorted(accuracies.items()))


def best_rate(place: str, ratio: float) -> float:
    """Of that grid; of equals the smaller."""
    accuracies = held_out(place, ratio)
    return max(accuracies, key=lambda rate: (accuracies[rate], -rate))


def published_runs(place: str, rate: float) -> Mapping[str, dict]:
    """Trainings at a rate, by seed."""
    stored, sizes = Results(PUBLISHED / PLACES[place].trained), PLACES[place].sizes
    common = {"defense": NOISE, "strength": {"relative_scale": RATIO}, **sizes}
    cells = {str(seed): common | {"seed": seed, "learning_rate": rate} for seed in range(3)}
    return {seed: stored[cell] for seed, cell in cells.items() if cell in stored}


def accuracy(task: clients.Client, cell: dict) -> dict:
    """On the test rows, after a training by the cell's optimizer."""
    trainer = task.trainer(task.start(cell["seed"]), task.rows_to_learn(), cell)
    if cell["optimizer"] == "corrected":
        trained = [p for p in trainer.model.parameters() if p.requires_grad]
        trainer.optimizer = CorrectedAdamW(trained, cell["learning_rate"], RATIO)
    trainer.train()
    return clients.judgment(task.right(trainer.model, task.test_rows))


def spread(task: Any, batches: int) -> dict[str, float]:
    """c = ‖g‖₁/(√d ‖g‖) of random inputs at the start, a mean over batches; and by how much noise
    lessens the first-order gain of a step of AdamW at the same rate, Σ|g|/Σ(g²/√(g² + σ²)).
    """
    model = task.start(0).eval()
    batch = next(iter(task.later_batches()))
    _withhold_tables(model)
    ratios, factors = [], []
    for number in range(batches):
        drawn = random_batch(
            domain_of_batch(batch), model, batch, Stream.from_seeds(number), special_ids(model)
        )
        gradient = GradientMap(model, drawn, second_order=False).gradient()
        g = torch.cat([tensor.flatten() for tensor in gradient.values()]).double()
        norm, root = float(g.norm()), math.sqrt(len(g))
        ratios.append(float(g.abs().sum()) / (root * norm))
        noisy = (g.square() + (RATIO * norm / root) ** 2).sqrt()
        factors.append(float(g.abs().sum() / (g.square() / noisy).sum()))
    return {"c": round(float(np.mean(ratios)), 4), "gain": round(float(np.mean(factors)), 3)}


def _withhold_tables(model: nn.Module) -> None:
    """Which the Trainer does not share."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.requires_grad_(False)
