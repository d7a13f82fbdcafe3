r"""Which noise gives away least at the progress that Adam makes under it?

    python -m recipes.studies.shapes.run adam --model MODEL --data_dir SST2 \
        --output docs/results/shapes_adam

Adam's steps are ḡ/√(p + Σ) in expectation, with p = E g² over batches, so what a step gains is
Σ_i ḡ_i²/√(p_i + Σ_ii). Each shape is scaled until that is a given share of what it is without
noise; then Tr J_F is compared with uniform noise's. Shapes follow s² and p of other batches, of
which a matrix keeps rows and columns. The encoder at its start and after 100 steps of AdamW (2e-4,
16 phrases per batch), 12 batches to learn shapes from, 12 to evaluate them on; s² of one probe per
batch, split by samples; every 20th coordinate. Six minutes of one core.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from transformers.utils import logging

from hf_gradguard import GradientMap
from hf_gradguard.randomness import Stream

from ..lib.tables import interval, write_table
from .quality import _task

ARGUMENTS = {
    "--model": "a text encoder and its tokenizer",
    "--data_dir": "folder of train.tsv",
}
STEPS, SEEDS, BATCHES, BATCH, RATE = (0, 100), 3, 12, 16, 2e-4
SHARES = (0.5, 0.2, 0.05)  # of the progress without noise
EVERY_NTH = 20
PRIOR = 1e-3  # of the mean, added to all

Parts = dict[str, Tensor]  # flat


def cells(args) -> dict:
    sizes = {"batches": 2, "size": 4} if args.quick else {"batches": BATCHES, "size": BATCH}
    return {
        (str(step), str(seed)): {
            "task": "minilm", "step": min(step, 1) if args.quick else step, "seed": seed,
            "learning_rate": RATE, "shares": SHARES, **sizes,
        }
        for step in (STEPS[:1] if args.quick else STEPS)
        for seed in range(1 if args.quick else SEEDS)
    }  # fmt: skip


def prepare(args):
    torch.set_num_threads(1)
    return lambda cell: measure(cell, *_task(cell, args))


def measure(cell: dict, model, draw) -> dict:
    """By share and shape: Tr J_F over uniform noise's, and the root of the noise's power over the
    gradient's.
    """
    model.get_input_embeddings().requires_grad_(False)  # as withheld
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=cell["learning_rate"]
    )
    for _ in logging.tqdm(range(cell["step"]), desc=f"to step {cell['step']}"):
        optimizer.zero_grad()
        model(**draw(cell["size"])).loss.backward()
        optimizer.step()
    model.eval()
    learned, evaluated = (moments(model, draw, cell, part) for part in range(2))
    found: dict = {str(share): {} for share in cell["shares"]}
    for share in cell["shares"]:
        for name, shape in shapes(learned["s"], learned["p"]).items():
            variance = scaled(shape, evaluated, share)
            information = float((evaluated["s"] / variance).sum())
            power = float(variance.sum() / evaluated["p"].sum()) ** 0.5
            found[str(share)][name] = {"information": information, "noise": round(power, 2)}
    for rows in found.values():
        plain = rows["uniform"]["information"]
        for row in rows.values():
            row["information"] = round(row["information"] / plain, 4)
    return found


def moments(model, draw, cell: dict, part: int) -> Parts:
    """s², E g² and the unbiased (E g)² over batches. Learned ones as averages keep them."""
    count, sums = cell["batches"], []
    for number in logging.tqdm(range(count), desc="batches"):
        gmap = GradientMap(model, draw(cell["size"]), second_order=False)
        squares = gmap.squared_sensitivity(1, Stream.from_seeds(cell["seed"], part, number))
        g = gmap.gradient()
        if part == 0:
            squares = {name: factored(tensor) for name, tensor in squares.items()}
        kept = {n: factored(t.square()) if part == 0 else t.square() for n, t in g.items()}
        parts = [flat(squares), flat(kept), flat(g)]
        sums = parts if number == 0 else [a + b for a, b in zip(sums, parts, strict=True)]
    s, p, total = sums
    mean = (total.square() - p) / (count * (count - 1))
    return {"s": s / count, "p": p / count, "mean": mean}


def factored(tensor: Tensor) -> Tensor:
    """Rows and columns of a matrix."""
    if tensor.dim() < 2:
        return tensor
    matrix = tensor.flatten(1)
    return torch.outer(matrix.sum(1) / matrix.sum().clamp(min=1e-30), matrix.sum(0)).view_as(tensor)


def flat(tensors: dict) -> Tensor:
    """Every so many coordinates of all."""
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])[::EVERY_NTH].double()


def shapes(s: Tensor, p: Tensor, prior: float = PRIOR) -> dict[str, Callable[[float], Tensor]]:
    """Variances, growing with a number.

    Adam's optimum: least Σ s²/Σ at given Σ p/√(p + Σ), in which ḡ² stands as a share of p that is
    the same everywhere. With y = √(p/Σ) it solves y (1 + y²)^(3/2) = p^(3/2)/(c s²).
    """
    s, p = s + prior * s.mean(), p + prior * p.mean()

    def adam(factor: float) -> Tensor:
        wanted = 1.5 * p.log() - s.log() - factor
        y = wanted.clamp(max=0) + wanted.clamp(min=0) / 4
        for _ in range(10):  # Newton's method, of a function between slopes 1 and 4
            square = (2 * y).exp()
            y = y - (y + 1.5 * torch.log1p(square) - wanted) / (1 + 3 * square / (1 + square))
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


def scaled(shape: Callable[[float], Tensor], found: Parts, share: float) -> Tensor:
    """The variance at which Adam makes the given share of its progress; by bisection."""
    whole = float((found["mean"] / found["p"].clamp(min=1e-30).sqrt()).sum())

    def progress(factor: float) -> float:
        return float((found["mean"] / (found["p"] + shape(factor)).sqrt()).sum()) / whole

    low, high = -80.0, 80.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if progress(middle) > share else (low, middle)
    return shape(low)


def report(figures: dict, args) -> None:
    rows = []
    for step, seeds in figures.items():
        for share in map(str, SHARES):
            for name in next(iter(seeds.values()))[share]:
                found = [runs[share][name] for runs in seeds.values()]
                information = interval([one["information"] for one in found], 2)
                noise = interval([one["noise"] for one in found], 1)
                rows.append([step, share, name.replace("|", "\\|"), information, noise])
    header = ["step", "progress", "noise", "Tr J_F over uniform's", "noise over gradient"]
    write_table(args.output, header, rows)
