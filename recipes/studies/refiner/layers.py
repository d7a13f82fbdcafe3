r"""Does noise on the gradient of an early layer cost more than on that of a late one?

    python -m recipes.studies.refiner.run layers --train TRAIN.parquet --test TEST.parquet \
        --output docs/results/refiner_layers

Refiner paper (2025), Table 2, which its layer-wise weight rests on. Gaussian noise on the gradient
of one layer, weights and bias; network, data and training as in the part pruning. The paper's
noise has the same variance whatever layer it is on. Beside it stands noise of three times the
root mean square of that layer's gradient at each step: gradients of this network grow from layer to
layer, at first by five. Test accuracy in %, with its 95 % t-interval over seeds. Some 75 minutes of
one core.
"""

import torch
from torch import Tensor

from ..lib.images import parquet_images
from ..lib.tables import interval, write_table
from .federation import TRAINING, lenet
from .pruning import accuracy, less
from .settings import (
    EPOCHS,
    LAYER_NOISE,
    PAPER_LAYERS,
    QUICK_EPOCHS,
    QUICK_LAYER_NOISE,
    QUICK_SEEDS,
    SEEDS,
)

ARGUMENTS = TRAINING


def cells(args) -> dict:
    noises, epochs, seeds = LAYER_NOISE, EPOCHS, SEEDS
    if args.quick:
        noises, epochs, seeds = QUICK_LAYER_NOISE, QUICK_EPOCHS, QUICK_SEEDS
    layers = layers_of(dict(lenet(0).named_parameters()))
    found = {}
    for seed in range(seeds):
        common = {"epochs": epochs, "seed": seed}
        found["none", "", str(seed)] = {"layer": "none"} | common
        for noise in noises:
            for layer in layers:
                found[_said(noise), layer, str(seed)] = {"layer": layer} | noise | common
    return found


def layers_of(parameters: dict[str, Tensor]) -> list[str]:
    """Weights and bias are one."""
    return list(dict.fromkeys(map(_layer, parameters)))


def _layer(name: str) -> str:
    return name.rsplit(".", 1)[0]


def _said(noise: dict) -> str:
    ((name, amount),) = noise.items()
    return f"{amount:g} times the gradient" if name == "relative" else f"variance {amount:g}"


def prepare(args):
    train, test = parquet_images(args.train), parquet_images(args.test)

    def measure(cell: dict) -> float:
        draw = torch.Generator().manual_seed(1000 + cell["seed"])

        def changed(gradient: dict, parameters: dict) -> dict:
            return noisy(gradient, cell, draw)

        return accuracy(cell, train, test, changed)

    return measure


def noisy(gradient: dict[str, Tensor], cell: dict, draw: torch.Generator) -> dict[str, Tensor]:
    """With the cell's noise on its layer, and the others as they are."""
    of = {name: g for name, g in gradient.items() if _layer(name) == cell["layer"]}
    if not of:
        return gradient
    if "variance" in cell:
        spread = cell["variance"] ** 0.5
    else:
        entries = torch.cat([g.flatten() for g in of.values()])
        spread = cell["relative"] * float(entries.square().mean().sqrt())
    found = {name: g + spread * torch.randn(g.shape, generator=draw) for name, g in of.items()}
    return gradient | found


def report(figures: dict, args) -> None:
    plain = figures["none"][""]
    table = [["none", "", interval([100 * one for one in plain.values()], 1), "", "", ""]]
    for noise, by_layer in figures.items():
        if noise == "none":
            continue
        last = list(by_layer.values())[-1]
        for number, (layer, mine) in enumerate(by_layer.items()):
            found = interval([100 * one for one in mine.values()], 1)
            papers = PAPER_LAYERS.get(noise, {})
            paper = papers.get("linear" if mine is last else number, "")
            beside = "" if mine is last else less(mine, last)
            table.append([noise, layer, found, less(mine, plain), beside, paper])
    header = ["noise", "on", "accuracy", "less none", "less the classifier's"]
    write_table(args.output, [*header, "paper: accuracy"], table)
