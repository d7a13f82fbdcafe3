"""Which noise gives away least at the progress that Adam makes under it."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from transformers.utils import logging

from hf_gradguard import GradientMap
from hf_gradguard.randomness import Stream

from .lib.images import flat
from .lib.tables import interval, write_table
from .lib.training import learn
from .shapes import ShapeStudy


class Adam(ShapeStudy):
    """Which noise gives away least at the progress that Adam makes under it?

    Adam's steps are ḡ/√(p + Σ) in expectation, with p = E g² over batches, so what a step gains is
    Σ_i ḡ_i²/√(p_i + Σ_ii). Each shape is scaled until that is a given share of what it is without
    noise; then Tr J_F is compared with uniform noise's. Shapes follow s² and p of other batches, of
    which a matrix keeps rows and columns; every 20th coordinate counts. Conditions and figures:
    docs/findings/shapes.md.
    """

    SHARES = (0.5, 0.2, 0.05)  # of the progress without noise

    def cells(self) -> dict:
        sizes = {"batches": 2, "size": 4} if self.quick else {"batches": 12, "size": 16}
        return {
            (str(step), str(seed)): {
                "task": "minilm", "step": step, "seed": seed, "learning_rate": 2e-4,
                "shares": self.SHARES, **sizes,
            }
            for step in ((0,) if self.quick else (0, 100))
            for seed in range(1 if self.quick else 3)
        }  # fmt: skip

    def measure(self, cell: dict) -> dict:
        """By share and shape: Tr J_F over uniform noise's; the root of noise's power over g's."""
        model, draw = self.task(cell)
        model.get_input_embeddings().requires_grad_(False)  # as withheld
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=cell["learning_rate"])
        for _ in logging.tqdm(range(cell["step"]), desc=f"to step {cell['step']}"):
            learn(model, optimizer, draw(cell["size"]))
        model.eval()
        learned, evaluated = (moments(model, draw, cell, number) for number in range(2))
        scores: dict = {}
        for progress in cell["shares"]:
            rows = scores[str(progress)] = {}
            for name, shape in adam_shapes(learned["s"], learned["p"]).items():
                variance = scaled(shape, evaluated, progress)
                information = float((evaluated["s"] / variance).sum())
                power = float(variance.sum() / evaluated["p"].sum()) ** 0.5
                rows[name] = {"information": information, "noise": round(power, 2)}
            plain = rows["uniform"]["information"]
            for row in rows.values():
                row["information"] = round(row["information"] / plain, 4)
        return scores

    def report(self, metrics: dict) -> None:
        rows = []
        for step, seeds in metrics.items():
            for progress in map(str, self.SHARES):
                for name in next(iter(seeds.values()))[progress]:
                    runs = [run[progress][name] for run in seeds.values()]
                    information = interval([run["information"] for run in runs], 2)
                    noise = interval([run["noise"] for run in runs], 1)
                    rows.append([step, progress, name.replace("|", "\\|"), information, noise])
        header = ["step", "progress", "noise", "Tr J_F over uniform's", "noise over gradient"]
        write_table(self.output, header, rows)


def moments(model, draw, cell: dict, half: int) -> dict[str, Tensor]:
    """s², E g² and the unbiased (E g)² over batches. Learned ones as averages keep them."""
    count, sums = cell["batches"], []
    keep: Callable[[Tensor], Tensor] = factored if half == 0 else lambda tensor: tensor
    for number in logging.tqdm(range(count), desc="batches"):
        gmap = GradientMap(model, draw(cell["size"]), second_order=False)
        squares = gmap.squared_sensitivity(1, Stream.from_seeds(cell["seed"], half, number))
        g = gmap.gradient()
        terms = [
            thinned({name: keep(tensor) for name, tensor in squares.items()}),
            thinned({name: keep(tensor.square()) for name, tensor in g.items()}),
            thinned(g),
        ]
        sums = terms if number == 0 else [a + b for a, b in zip(sums, terms, strict=True)]
    s, p, total = sums
    mean = (total.square() - p) / (count * (count - 1))
    return {"s": s / count, "p": p / count, "mean": mean}


def factored(tensor: Tensor) -> Tensor:
    """Rows and columns of a matrix."""
    if tensor.dim() < 2:
        return tensor
    matrix = tensor.flatten(1)
    return torch.outer(matrix.sum(1) / matrix.sum().clamp(min=1e-30), matrix.sum(0)).view_as(tensor)


def thinned(tensors: dict) -> Tensor:
    """Every 20th coordinate of all."""
    return flat({name: tensors[name] for name in sorted(tensors)})[::20].double()


def adam_shapes(s: Tensor, p: Tensor, prior: float = 1e-3) -> dict[str, Callable[[float], Tensor]]:
    """Variances, growing with a number. So much of the mean is added to all.

    Adam's optimum: least Σ s²/Σ at given Σ p/√(p + Σ), in which ḡ² stands as a share of p that is
    the same everywhere. With y = √(p/Σ) it solves y (1 + y²)^(3/2) = p^(3/2)/(c s²).
    """
    s, p = s + prior * s.mean(), p + prior * p.mean()

    def adam(factor: float) -> Tensor:
        target = 1.5 * p.log() - s.log() - factor
        y = target.clamp(max=0) + target.clamp(min=0) / 4
        for _ in range(10):  # Newton's method, of a function between slopes 1 and 4
            square = (2 * y).exp()
            y = y - (y + 1.5 * torch.log1p(square) - target) / (1 + 3 * square / (1 + square))
        return p * (-2 * y).exp()

    def family(shape: Tensor) -> Callable[[float], Tensor]:
        return lambda factor: shape * np.exp(factor)

    return {
        "uniform": family(torch.ones_like(s)),
        "SGD's optimum, s/|g|": family((s / p).sqrt()),
        "weak noise under Adam, s √|g|": family(s.sqrt() * p**0.25),
        "s |g|": family((s * p).sqrt()),
        "Adam's optimum": adam,
    }


def scaled(shape: Callable[[float], Tensor], evaluated: dict[str, Tensor], share: float) -> Tensor:
    """The variance at which Adam makes the given share of its progress; by bisection."""
    mean, p = evaluated["mean"], evaluated["p"]
    undefended = float((mean / p.clamp(min=1e-30).sqrt()).sum())
    low, high = -80.0, 80.0
    for _ in range(50):
        middle = (low + high) / 2
        progress = float((mean / (p + shape(middle)).sqrt()).sum()) / undefended
        low, high = (middle, high) if progress > share else (low, middle)
    return shape(low)
