"""How time and memory of a step grow, with defenses and without: over the length of texts, the
batch, the parameters, and the clients that one process simulates.

A BERT with random weights in training mode, AdamW included, embeddings frozen. Of each size the
stock step and those of all defenses take turns. An exponent is the slope of the logarithm of
seconds, or of bytes at the peak, over that of the size, by least squares over the sizes; there is
one for each round. Each of several clients runs its own batch and shares its own message; stock
then is a step of as many accumulated batches. One thread, processor time.
"""

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.defenses import Defense
from hf_gradguard.randomness import Stream
from recipes.studies.lib.device import DEVICE

from .measuring import cells, clock, peak, random_batch, spread

STOCK = "stock"
DEFENSES: dict[str, tuple[str, dict]] = {
    "none": ("none", {}),
    "gaussian_noise": ("gaussian_noise", {}),
    "pruning": ("pruning", {}),
    "optimal_noise, measuring": ("optimal_noise", {"refresh_every": 1}),
    "dp_sgd, per sample": (
        "dp_sgd", {"per_sample": True, "clip": 1.0, "noise_multiplier": 1.0},
    ),
}  # fmt: skip
WORDS, ROUNDS = 1000, 3


class Size(NamedTuple):
    """Of a model and what it is given."""

    width: int = 128
    layers: int = 4
    batch: int = 4
    length: int = 64
    clients: int = 1


AXES: dict[str, dict[int, Size]] = {
    "tokens of a text": {n: Size(batch=1, length=n) for n in (64, 128, 256, 512, 1024, 2048)},
    "texts of a batch": {n: Size(batch=n) for n in (1, 2, 4, 8, 16, 32, 64)},
    "parameters": {
        12 * 6 * width**2: Size(width, layers=6, batch=2, length=32)
        for width in (256, 384, 512, 768, 1024)
    },
    "clients": {n: Size(batch=2, length=32, clients=n) for n in (1, 2, 4, 8, 16, 32, 64)},
}
QUICK: dict[str, dict[int, Size]] = {
    "tokens of a text": {n: Size(16, 1, 1, n) for n in (4, 8)},
    "clients": {n: Size(16, 1, 2, 4, n) for n in (1, 2)},
}


def measure(args) -> dict:
    torch.set_num_threads(1)
    axes, rounds = (QUICK, 1) if args.quick else (AXES, ROUNDS)
    report: dict = {}
    for axis, sizes in axes.items():
        seconds: dict[str, list[list[float]]] = {}
        memory: dict[str, list[int]] = {}
        for size in sizes.values():
            for row, (of_rounds, highest) in _measured(size, rounds).items():
                seconds.setdefault(row, []).append(of_rounds)
                memory.setdefault(row, []).append(highest)
        report[axis] = {
            "sizes": list(sizes),
            "seconds": {
                row: [round(statistics.median(times), 5) for times in of_sizes]
                for row, of_sizes in seconds.items()
            },
            "exponents": _exponents(list(sizes), seconds),
            "memory": {row: _slope(list(sizes), highest) for row, highest in memory.items()},
        }
    return {"threads": 1, "axes": report}


def _measured(size: Size, rounds: int) -> dict[str, tuple[list[float], int]]:
    """Seconds of each round, and bytes at the peak, of a step with each defense and of a stock
    one.
    """
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=size.width, num_hidden_layers=size.layers,
        num_attention_heads=max(1, size.width // 64), intermediate_size=4 * size.width,
        max_position_embeddings=max(512, size.length),
    )  # fmt: skip
    model = BertForSequenceClassification(config).to(DEVICE).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embeddings" not in name)
    batches = [random_batch(model, size.batch, size.length) for _ in range(size.clients)]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0)
    steps: dict[str, Callable[[], None]] = {STOCK: lambda: _stock(model, batches, optimizer)}
    for row, (name, settings) in DEFENSES.items():
        defense, stream = make_defense(name, **settings), Stream()
        steps[row] = _protected_step(model, batches, optimizer, defense, stream)
    for step in steps.values():
        step(), step()  # trials, and the first averages
    measured = {row: (list[float](), peak(step)) for row, step in steps.items()}
    for _ in range(rounds):
        for row, step in steps.items():
            measured[row][0].append(clock(step))
    return measured


def _stock(model: nn.Module, batches: list, optimizer: torch.optim.Optimizer) -> None:
    for batch in batches:
        (model(**batch).loss / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _protected_step(
    model: nn.Module,
    batches: list,
    optimizer: torch.optim.Optimizer,
    defense: Defense,
    stream: Stream,
) -> Callable[[], None]:
    def step() -> None:
        for batch in batches:
            gmap = GradientMap(model, batch, second_order=False)
            for name, tensor in defense(gmap, stream).items():
                parameter = gmap.parameters[name]
                share = tensor / len(batches) if len(batches) > 1 else tensor
                parameter.grad = share if parameter.grad is None else parameter.grad.add_(share)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _slope(sizes: list[int], values: list) -> float:
    """Of the logarithms, by least squares."""
    x, y = ([math.log(value) for value in of] for of in (sizes, values))
    return round(statistics.linear_regression(x, y).slope, 3)


def _exponents(sizes: list[int], seconds: dict[str, list[list[float]]]) -> dict[str, dict]:
    """Of each row, and by how much they are above stock's, over the rounds."""
    slopes = {
        row: [_slope(sizes, list(times)) for times in zip(*of_sizes, strict=True)]
        for row, of_sizes in seconds.items()
    }
    return {
        row: {
            "exponent": spread(of_rounds),
            "above stock": spread(
                [own - stock for own, stock in zip(of_rounds, slopes[STOCK], strict=True)]
            ),
        }
        for row, of_rounds in slopes.items()
    }


def plot(report: dict, path: Path) -> None:
    """Seconds over sizes, one picture an axis."""
    axes = report["axes"]
    figure, places = plt.subplots(1, len(axes), figsize=(4 * len(axes), 3.6), squeeze=False)
    for place, (axis, measured) in zip(places[0], axes.items(), strict=True):
        for row, seconds in measured["seconds"].items():
            place.loglog(measured["sizes"], seconds, marker="o", ms=3, lw=1.2, label=row)
        place.set_xlabel(axis)
    places[0][0].set_ylabel("seconds of a step")
    places[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def table(report: dict) -> tuple[list[str], list]:
    header = ["", "exponent of time", "range", "above stock's", "range", "exponent of memory"]
    rows = []
    for axis, measured in report["axes"].items():
        sizes = measured["sizes"]
        rows.append([f"**{axis}**, {sizes[0]:,} to {sizes[-1]:,}", "", "", "", "", ""])
        for row, found in measured["exponents"].items():
            memory = f"{measured['memory'][row]:.2f}"
            above = ["", ""] if row == STOCK else cells(found["above stock"])
            rows.append([row, *cells(found["exponent"]), *above, memory])
    return header, rows
