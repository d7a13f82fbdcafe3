r"""Which entries of a gradient can be left out: those of small |θ|, of small |g|, or of small |g
θ|?

    python -m recipes.studies.refiner.run pruning --train TRAIN.parquet --test TEST.parquet \
        --output docs/results/refiner_pruning

Refiner paper (2025), Table 1. The leakage papers' LeNet on CIFAR-10, one client, 128 images a step.
Of each gradient the given share of entries is zeroed, over all layers together. The paper trains
for 20 epochs at a learning rate of 0.01 and names no optimizer; here 5 epochs of Adam from 0.005
down to 0, as in federation.py. Test accuracy in %, with its 95 % t-interval over seeds. About an
hour of one core.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.utils import logging

from hf_gradguard import GradientMap

from ..lib.images import parquet_images
from ..lib.tables import interval, write_table
from .federation import LEARNING_RATE, TRAINING, lenet, tested
from .settings import (
    EPOCHS,
    PAPER_PRUNING,
    QUICK_EPOCHS,
    QUICK_RATIOS,
    QUICK_SEEDS,
    RATIOS,
    SCORES,
    SEEDS,
)

ARGUMENTS, BATCH = TRAINING, 128
Changed = Callable[[dict[str, Tensor], dict[str, Tensor]], dict[str, Tensor]]


def cells(args) -> dict:
    ratios, epochs, seeds = (RATIOS, EPOCHS, SEEDS)
    if args.quick:
        ratios, epochs, seeds = (QUICK_RATIOS, QUICK_EPOCHS, QUICK_SEEDS)
    rows = [("none", 0.0), *((name, ratio) for name in SCORES for ratio in ratios)]
    return {
        (name, str(ratio), str(seed)): {
            "score": name,
            "ratio": ratio,
            "epochs": epochs,
            "seed": seed,
        }
        for seed in range(seeds)
        for name, ratio in rows
    }


def prepare(args):
    train, test = parquet_images(args.train), parquet_images(args.test)

    def measure(cell: dict) -> float:
        def changed(gradient: dict, parameters: dict) -> dict:
            if cell["score"] == "none":
                return gradient
            return pruned(gradient, parameters, cell["score"], cell["ratio"])

        return accuracy(cell, train, test, changed)

    return measure


def report(figures: dict, args) -> None:
    plain, table = figures["none"]["0.0"], []
    for name, ratios in figures.items():
        for ratio, mine in ratios.items():
            found = interval([100 * one for one in mine.values()], 1)
            paper = PAPER_PRUNING.get(name, {}).get(float(ratio), "")
            table.append([name, f"{float(ratio):.0%}", found, less(mine, plain), paper])
    for other in ("gradient", "weight"):
        for ratio, mine in figures["product"].items():
            apart = less(mine, figures[other][ratio])
            ours, theirs = (PAPER_PRUNING[name].get(float(ratio)) for name in ("product", other))
            paper = f"{ours - theirs:.2f}" if ours and theirs else ""
            table.append([f"product less {other}", f"{float(ratio):.0%}", "", apart, paper])
    header = ["left out by small", "share left out", "accuracy", "less none, same seeds"]
    write_table(args.output, [*header, "paper: accuracy"], table)


def less(mine: dict[str, float], other: dict[str, float]) -> str:
    """Points of accuracy on the same seeds, with their interval."""
    return interval([100 * (one - other[seed]) for seed, one in mine.items()], 1)


def accuracy(cell: dict, train: tuple, test: tuple, changed: Changed) -> float:
    """After the cell's epochs, where what is learned from is what a function makes of the gradient
    and the parameters.
    """
    (images, labels), seed = train, cell["seed"]
    model, draw = lenet(seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    steps = cell["epochs"] * -(-len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    bar = logging.tqdm(total=steps, desc=", ".join(map(str, cell.values())))
    for _ in range(cell["epochs"]):
        for rows in torch.randperm(len(images), generator=draw).split(BATCH):
            batch = {"pixel_values": images[rows].float() / 255, "labels": labels[rows]}
            gradient = GradientMap(model, batch, second_order=False).gradient()
            used = changed(gradient, dict(model.named_parameters()))
            for key, parameter in model.named_parameters():
                parameter.grad = used[key]
            optimizer.step()
            schedule.step()
            bar.update()
    return tested(model, test)


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
    together = torch.cat([score.flatten() for score in scores.values()])
    count = round(ratio * len(together))
    if count == 0:
        return gradient
    bound = together.kthvalue(count).values
    return {key: g * (scores[key] > bound) for key, g in gradient.items()}
