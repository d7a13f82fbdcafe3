"""Which entries of a gradient matter to a LeNet: Refiner's Tables 1 and 2."""

import time
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from transformers.utils import logging

from hf_gradguard import GradientMap

from ..study import Study
from .lib.images import flat, parquet_images
from .lib.tables import interval, write_table
from .refiner_federation import (
    LEARNING_RATE,
    QUICK_SEEDS,
    SEEDS,
    TRAINING,
    lenet,
    percent,
    test_accuracy,
)

SCORES = ("weight", "gradient", "product")
PAPER_PRUNING = {
    "weight": {0.2: 51.35, 0.4: 48.61, 0.6: 46.80, 0.8: 42.72},
    "gradient": {0.2: 51.67, 0.4: 50.90, 0.6: 49.14, 0.8: 47.35},
    "product": {0.2: 52.88, 0.4: 51.45, 0.6: 50.96, 0.8: 49.54},
}


class ChangedGradients(Study):
    """One client trains the leakage papers' LeNet on CIFAR-10, 128 images a step, on gradients of
    which something was changed.
    """

    ARGUMENTS = TRAINING
    BATCH = 128

    @property
    def epochs(self) -> int:
        return 1 if self.quick else 5

    @property
    def seeds(self) -> int:
        return QUICK_SEEDS if self.quick else SEEDS

    def load(self) -> None:
        self.train, self.test = parquet_images(self.args.train), parquet_images(self.args.test)

    at: tuple[Any, dict[str, Tensor]]
    """The model and the batch whose gradient is changed."""

    def changed(self, gradient: dict, parameters: dict, cell: dict, draw) -> dict:
        raise NotImplementedError

    def measure(self, cell: dict) -> float:
        """Accuracy after the cell's epochs."""
        (images, labels), seed = (
            (tensor[: cell.get("images")] for tensor in self.train),
            cell["seed"],
        )
        model, draw = lenet(seed), torch.Generator().manual_seed(seed)
        noise = torch.Generator().manual_seed(1000 + seed)
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        steps = cell["epochs"] * -(-len(images) // self.BATCH)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        bar = logging.tqdm(total=steps, desc=", ".join(map(str, cell.values())))
        for _ in range(cell["epochs"]):
            for rows in torch.randperm(len(images), generator=draw).split(self.BATCH):
                batch = {"pixel_values": images[rows].float() / 255, "labels": labels[rows]}
                self.at = model, batch
                gradient = GradientMap(model, batch, second_order=False).gradient()
                parameters = dict(model.named_parameters())
                changed = self.changed(gradient, parameters, cell, noise)
                for key, parameter in parameters.items():
                    parameter.grad = changed[key]
                optimizer.step()
                schedule.step()
                bar.update()
        return test_accuracy(model, self.test)


def points_less(accuracies: dict[str, float], other_accuracies: dict[str, float]) -> str:
    """Points of accuracy on the same seeds, with their interval."""
    return interval(
        [100 * (value - other_accuracies[seed]) for seed, value in accuracies.items()], 1
    )


class Pruning(ChangedGradients):
    """Which entries of a gradient can be left out: those of small |θ|, of small |g|, or of small |g
    θ|?

    Conditions and figures: docs/findings/refiner.md.
    """

    def cells(self) -> dict:
        ratios = (0.2, 1.0) if self.quick else (0.2, 0.4, 0.6, 0.8)
        rows = [("none", 0.0), *((name, ratio) for name in SCORES for ratio in ratios)]
        return {
            (name, str(ratio), str(seed)): {
                "score": name, "ratio": ratio, "epochs": self.epochs, "seed": seed,
            }
            for seed in range(self.seeds)
            for name, ratio in rows
        }  # fmt: skip

    def changed(self, gradient: dict, parameters: dict, cell: dict, draw) -> dict:
        if cell["score"] == "none":
            return gradient
        return pruned(gradient, parameters, cell["score"], cell["ratio"])

    def report(self, metrics: dict) -> None:
        plain, rows = metrics["none"]["0.0"], []
        for name, ratios in metrics.items():
            for ratio, runs in ratios.items():
                paper = PAPER_PRUNING.get(name, {}).get(float(ratio), "")
                shown = [percent(runs), points_less(runs, plain), paper]
                rows.append([name, f"{float(ratio):.0%}", *shown])
        for other_score in ("gradient", "weight"):
            for ratio, runs in metrics["product"].items():
                product, paper = (
                    PAPER_PRUNING[n].get(float(ratio)) for n in ("product", other_score)
                )
                difference = f"{product - paper:.2f}" if product and paper else ""
                shown = ["", points_less(runs, metrics[other_score][ratio]), difference]
                rows.append([f"product less {other_score}", f"{float(ratio):.0%}", *shown])
        header = ["left out by small", "share left out", "accuracy", "less none, same seeds"]
        write_table(self.output, [*header, "paper: accuracy"], rows)


def pruned(
    gradient: dict[str, Tensor], parameters: dict[str, Tensor], name: str, ratio: float
) -> dict[str, Tensor]:
    """The gradient without the share `ratio` of its entries that score lowest, over all tensors
    together.
    """
    scores = {
        key: {"weight": w.abs(), "gradient": g.abs(), "product": (g * w).abs()}[name]
        for key, g in gradient.items()
        for w in [parameters[key].detach()]
    }
    values = flat(scores)
    count = round(ratio * len(values))
    if count == 0:
        return gradient
    bound = values.kthvalue(count).values
    return {key: g * (scores[key] > bound) for key, g in gradient.items()}


LAYER_NOISE: list[dict[str, float]] = [
    {"variance": 0.001}, {"variance": 0.1}, {"relative": 3.0}, {"variance": 0.01},
]  # fmt: skip
QUICK_LAYER_NOISE: list[dict[str, float]] = [{"variance": 0.1}, {"relative": 3.0}]
PAPER_LAYERS: dict[str, dict[int | str, float]] = {  # it has three layers, and a linear one
    "variance 0.001": {0: 48.94, 1: 49.92, 2: 50.84, "linear": 51.73},
    "variance 0.01": {0: 48.40, 1: 49.72, 2: 50.25, "linear": 51.60},
    "variance 0.1": {0: 47.56, 1: 49.55, 2: 49.54, "linear": 51.38},
}


class Layers(ChangedGradients):
    """Does noise on the gradient of an early layer cost more than on that of a late one?

    Conditions and figures: docs/findings/refiner.md.
    """

    def cells(self) -> dict:
        layers = layers_of(dict(lenet(0).named_parameters()))
        cells = {}
        for seed in range(self.seeds):
            common = {"epochs": self.epochs, "seed": seed}
            cells["none", "", str(seed)] = {"layer": "none"} | common
            for noise in QUICK_LAYER_NOISE if self.quick else LAYER_NOISE:
                ((name, amount),) = noise.items()
                row = f"{amount:g} times the gradient"
                row = row if name == "relative" else f"variance {amount:g}"
                for layer in layers:
                    cells[row, layer, str(seed)] = {"layer": layer} | noise | common
        return cells

    def changed(self, gradient: dict, parameters: dict, cell: dict, draw) -> dict:
        return noisy(gradient, cell, draw)

    def report(self, metrics: dict) -> None:
        plain = metrics["none"][""]
        rows = [["none", "", percent(plain), "", "", ""]]
        for noise, by_layer in list(metrics.items())[1:]:
            last_runs = list(by_layer.values())[-1]
            for number, (layer, runs) in enumerate(by_layer.items()):
                papers = PAPER_LAYERS.get(noise, {})
                paper = papers.get("linear" if runs is last_runs else number, "")
                less_than_last = "" if runs is last_runs else points_less(runs, last_runs)
                rows.append(
                    [noise, layer, percent(runs), points_less(runs, plain), less_than_last, paper]
                )
        header = ["noise", "on", "accuracy", "less none", "less the classifier's"]
        write_table(self.output, [*header, "paper: accuracy"], rows)


def layers_of(parameters: dict[str, Tensor]) -> list[str]:
    """Weights and bias are one."""
    return list(dict.fromkeys(map(_layer, parameters)))


def _layer(name: str) -> str:
    return name.rsplit(".", 1)[0]


def noisy(gradient: dict[str, Tensor], cell: dict, draw: torch.Generator) -> dict[str, Tensor]:
    """With the cell's noise on its layer, and the others as they are."""
    layer = {name: g for name, g in gradient.items() if _layer(name) == cell["layer"]}
    if not layer:
        return gradient
    if "variance" in cell:
        spread = cell["variance"] ** 0.5
    else:
        spread = cell["relative"] * float(flat(layer).square().mean().sqrt())
    changed = {name: g + spread * torch.randn(g.shape, generator=draw) for name, g in layer.items()}
    return gradient | changed


IMPORTANCES = ("product", "integrated gradients", "Shapley values", "at random")
PAPER_IMPORTANCES = {  # accuracy and seconds
    "product": (49.55, 209.20), "integrated gradients": (49.54, 2155.85),
    "Shapley values": (49.50, 193672.67),
}  # fmt: skip


class Importance(ChangedGradients):
    """Which neurons matter, by three metrics, and what asking costs: Table 11. A step moves the
    fifth of the convolutions' channels that matter most, and the dense layer.

    Conditions and figures: docs/findings/refiner.md.
    """

    POINTS, REFRESH = 8, 8  # of the integral; steps after which Shapley values are asked anew

    def cells(self) -> dict:
        sizes = {"images": 256 if self.quick else 20000, "epochs": 1}
        return {
            (name, str(seed)): {"importance": name, "left out": 0.8, **sizes, "seed": seed}
            for seed in range(self.seeds)
            for name in IMPORTANCES
        }

    def measure(self, cell: dict) -> dict:
        self.seconds, self.calls, self.kept = 0.0, 0, {}
        accuracy = super().measure(cell)
        return {"accuracy": accuracy, "seconds": round(self.seconds / self.calls, 5)}

    def changed(self, gradient: dict, parameters: dict, cell: dict, draw) -> dict:
        started = time.process_time()
        name = cell["importance"]
        if name != "Shapley values" or self.calls % self.REFRESH == 0:
            scores = self.scores(name, gradient, parameters, draw)
            values = torch.cat(list(scores.values()))
            bound = values.kthvalue(round(cell["left out"] * len(values))).values
            self.kept = {layer: (score > bound).float() for layer, score in scores.items()}
        self.calls += 1
        kept = {
            key: g * self.kept[_layer(key)].view(-1, *[1] * (g.dim() - 1))
            if _layer(key) in self.kept
            else g
            for key, g in gradient.items()
        }
        # Asked at every REFRESH-th step alone, and counted as if asked at each.
        factor = self.REFRESH if name == "Shapley values" else 1
        self.seconds += factor * (time.process_time() - started)
        return kept

    def scores(self, name: str, gradient: dict, parameters: dict, draw) -> dict[str, Tensor]:
        """Of each channel of each convolution."""
        model, batch = self.at
        layers = [layer for layer in layers_of(parameters) if "convolutions" in layer]
        channels = {layer: len(gradient[f"{layer}.bias"]) for layer in layers}
        if name == "at random":
            return {layer: torch.rand(n, generator=draw) for layer, n in channels.items()}
        if name == "Shapley values":
            return shapley_values(model, batch, channels, draw)
        attributed = {key: parameters[key].detach() * g for key, g in gradient.items()}
        if name == "integrated gradients":
            attributed = integrated(model, batch, self.POINTS)
        return {
            layer: sum(
                attributed[f"{layer}.{part}"].abs().flatten(1).sum(1)
                if part == "weight"
                else attributed[f"{layer}.{part}"].abs()
                for part in ("weight", "bias")
            )
            for layer in layers
        }

    def report(self, metrics: dict) -> None:
        rows, ours = [], metrics[IMPORTANCES[0]]
        for name, runs in metrics.items():
            accuracies = {seed: run["accuracy"] for seed, run in runs.items()}
            own = {seed: run["accuracy"] for seed, run in ours.items()}
            less = "" if name == IMPORTANCES[0] else points_less(own, accuracies)
            times = [run["seconds"] / ours[seed]["seconds"] for seed, run in runs.items()]
            paper, paper_seconds = PAPER_IMPORTANCES.get(name, ("", ""))
            over = f"{paper_seconds / 209.20:.0f}" if paper_seconds else ""
            rows.append([name, percent(accuracies), less, interval(times, 0), paper, over])
        header = [
            "left out by",
            "accuracy",
            "product less this, same seeds",
            "times the product's seconds",
        ]
        write_table(self.output, [*header, "paper: accuracy", "paper: times"], rows)


def integrated(model, batch: dict[str, Tensor], points: int) -> dict[str, Tensor]:
    """Integrated gradients of the parameters, from none of them to all: θ times the mean gradient
    on the way.
    """
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for point in range(points):
        share = (point + 0.5) / points
        there = {name: (share * p).requires_grad_() for name, p in parameters.items()}
        loss = functional_call(model, there, kwargs=batch).loss
        for name, g in zip(there, torch.autograd.grad(loss, list(there.values())), strict=True):
            sums[name] += g / points
    return {name: parameters[name] * total for name, total in sums.items()}


@torch.no_grad()
def shapley_values(
    model, batch: dict[str, Tensor], channels: dict[str, int], draw: torch.Generator
) -> dict[str, Tensor]:
    """How much a channel lowers the loss when it joins those before it, in one random order."""
    masks = {layer: torch.zeros(count) for layer, count in channels.items()}
    places = [(layer, n) for layer, count in channels.items() for n in range(count)]
    values = {layer: torch.zeros(count) for layer, count in channels.items()}
    hooks = [
        model.get_submodule(layer).register_forward_hook(
            lambda _, __, out, mask=mask: out * mask[:, None, None]
        )
        for layer, mask in masks.items()
    ]
    try:
        before = float(model(**batch).loss)
        for place in torch.randperm(len(places), generator=draw):
            layer, number = places[place]
            masks[layer][number] = 1
            after = float(model(**batch).loss)
            values[layer][number] = abs(before - after)
            before = after
    finally:
        for hook in hooks:
            hook.remove()
    return values
