r"""What an attack sees of a batch behind them, and how well the batch is learned.

    python -m recipes.studies.optimal_defenses.run attacked mnist --data MNIST.npz \
        --output docs/results/optimal_defenses_mnist
    python -m recipes.studies.optimal_defenses.run attacked cifar10 --data LOSSLESS.npz \
        --output docs/results/optimal_defenses_cifar10

The scatter plots of Chen, Gürsoy and Lei (2024, 2025), Section 4 and Appendix C. As there: the loss
of a batch after five steps of Adam on it (MNIST: 64 images, learning rate 1e-3; CIFAR-10: 8
images), whose gradients four clients defend one by one; and Inverting Gradients on a gradient at
the same initial weights, the same for every row, labels known. Here with 4 images a message and 400
updates (MNIST; paper: 16 and 2,000), 2 and 200 (CIFAR-10; paper: 2 and 1,000) and total variation
1e-2. That was chosen on the undefended gradient at seed 0's start, after seven and eleven tries
with other batches, optimizers and weights: of 16 images of MNIST 400 updates showed nothing, and
nothing of CIFAR-10 through batch normalization in training mode. So CIFAR-10's network is without
it, half as wide (732,000 parameters; paper: 2.9 M), and learns at 5e-4 (paper: 5e-5, at which five
steps hardly move this one's loss). Clipping: every coordinate to ±1. "Known" is the same attack by
one who knows the defense, and matches only what a pruning left, or weighs coordinates by optimal
noise's covariance.

`scale` is the root mean square of the noise's standard deviation: rows of equal scale add equal
noise power. A seed is a start, a batch, the attack's start and a draw of noise. Leakage and cost
are the two sides of the paper's theorems. With noise: Σ s²/Σ_ii and Σ g²Σ_ii, as multiples of those
of uniform noise. With pruning: the shares of Σ s² that is sent and of Σ g² that is not. Half an
hour of one core for MNIST, hours for CIFAR-10.
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
from transformers import set_seed

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation
from hf_gradguard.defenses import Message
from hf_gradguard.metrics import score_images
from hf_gradguard.randomness import Stream
from recipes.small_networks import MODELS

from ..lib.attacks import attack_of
from ..lib.defenses import published
from ..lib.tables import interval, plt, save, write_table
from .settings import (
    AGAINST,
    CLIENTS,
    QUICK,
    QUICK_NETWORKS,
    QUICK_PROBES,
    QUICK_SEEDS,
    ROWS,
    SEEDS,
    SETTINGS,
)

ARGUMENTS = {
    "data_set": {"choices": list(ROWS)},
    "--data": "npz: x_train (N, 28, 28) and y_train, or x (N, 32, 32, 3) and y",
}
SCORES = {
    "loss": "loss after five steps",
    "mse": "MSE",
    "psnr": "PSNR",
    "mse known": "MSE, known",
    "psnr known": "PSNR, known",
}
SIDES = ("leakage", "cost")


def cells(args) -> dict:
    name, seeds = args.data_set, SEEDS[args.data_set]
    settings, fast = SETTINGS[name], {}
    if args.quick:
        seeds, fast = QUICK_SEEDS, {"num_probes": QUICK_PROBES}
        settings = settings | QUICK | {"network": QUICK_NETWORKS[name]}
    return {
        (row, str(seed)): {
            "data": name,
            "defense": row.split()[0],
            "strength": strength | (fast if "optimal" in row else {}),
            **settings,
            "seed": seed,
        }
        for seed in range(seeds)
        for row, strength in ROWS[name].items()
    }


def prepare(args):
    torch.set_num_threads(1)
    with np.load(args.data) as file:
        if args.data_set == "mnist":
            x, y = file["x_train"][:, None], file["y_train"]
        else:
            x, y = file["x"].transpose(0, 3, 1, 2), file["y"]
    images, labels = torch.from_numpy(x).float() / 255, torch.from_numpy(y).long()
    return lambda cell: point(cell, images, labels)


def point(cell: dict, images: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    name, seed = cell["defense"], cell["seed"]
    set_seed(seed)
    network, shape = cell["network"]
    model = MODELS[network](MODELS[network].config_class(**shape)).train()
    defense = published(name, **cell["strength"])
    draw = torch.Generator().manual_seed(seed)
    noise, probes = (Stream.from_seeds(seed + 1000 * k) for k in (1, 2))
    rows = torch.randperm(len(images), generator=draw)[: CLIENTS * cell["client_batch"]]
    clients = [
        {"pixel_values": images[mine], "labels": labels[mine]} for mine in rows.chunk(CLIENTS)
    ]

    batch = {key: tensor[: cell["attacked"]] for key, tensor in clients[0].items()}
    gmap = GradientMap(model, batch)
    shared = defense(gmap, generator=noise)
    scores = both_sides(gmap, defense, shared, probes)
    seen = Observation(
        model, shared, input_shape=tuple(batch["pixel_values"].shape), labels=batch["labels"]
    )
    scores |= (found := attacked(cell, batch, seen))
    if name == "optimal_dp_sgd":  # variance is infinite where clipping left no noise
        variance = {key: v.where(v.isfinite(), 0.0) for key, v in shared.noise.variance.items()}
        found = attacked(cell, batch, replace(seen, noise_variance=variance))
    elif "pruning" in name:
        found = attacked(cell, batch, seen, match_nonzero=True)
    scores |= {f"{key} known": score for key, score in found.items()}

    optimizer = torch.optim.Adam(model.parameters(), lr=cell["learning_rate"])
    for _ in range(cell["steps"]):
        maps = [
            GradientMap(model, mine, second_order=defense.facts.needs_second_order)
            for mine in clients
        ]
        sent = [defense(gmap, generator=noise) for gmap in maps]
        for key, parameter in model.named_parameters():
            parameter.grad = sum(one[key] for one in sent) / CLIENTS
        optimizer.step()
    with torch.no_grad():
        scores["loss"] = np.mean([float(model(**mine).loss) for mine in clients])
    return {key: round(float(score), 6) for key, score in scores.items()}


def attacked(cell: dict, batch: dict, seen: Observation, **knowledge) -> dict[str, torch.Tensor]:
    attack = attack_of(
        "inverting_gradients", steps=cell["updates"], total_variation=1e-2, **knowledge
    )
    found = attack(seen, generator=torch.Generator().manual_seed(cell["seed"] + 3000)).input.clamp(
        0, 1
    )
    scores = score_images([found], [batch["pixel_values"]], bootstrap=0).mean
    return {"mse": scores["mse"], "psnr": scores["psnr"]}


def both_sides(
    gmap: GradientMap, defense, shared: Message, probes: Stream
) -> dict[str, torch.Tensor]:
    """What the defense leaks and what it costs, to first order; by probes of its own."""
    variance = shared.noise.variance if shared.noise is not None else {}
    squares = gmap.squared_sensitivity(10, probes, method="exact")
    s2, g, sent, v = (
        torch.cat([tensor.flatten().double() for tensor in some.values()] or [torch.empty(0)])
        for some in (squares, gmap.gradient(), shared, variance)
    )
    if not len(v):
        return {
            "leakage": s2[sent != 0].sum() / s2.sum(),
            "cost": g[sent == 0].square().sum() / g.square().sum(),
        }
    v = (
        torch.where((v > 0) & v.isfinite(), v, torch.nan) / defense.scale**2
    )  # no noise: insensitive, or clipped
    return {
        "leakage": (s2 / v).nansum() / s2.sum(),
        "cost": (g.square() * v).nansum() / g.square().sum(),
    }


def report(figures: dict, args) -> None:
    write_table(args.output, ["", *SCORES.values(), *SIDES], table(figures))
    plot(figures, args.output)


def table(points: dict) -> list[list[str]]:
    rows = []
    scores = {row: of(runs, SCORES) for row, runs in points.items()}
    for row, mine in scores.items():
        rows.append([row, *shown(mine), *(interval(side) for side in of(points[row], SIDES).T)])
        rows += [
            [f"{row} less {o}", *shown(mine - scores[o]), *[""] * len(SIDES)]
            for o in AGAINST.get(row, ())
        ]
    return rows


def of(runs: dict, names: Iterable[str]) -> np.ndarray:
    return np.array([[run[name] for name in names] for run in runs.values()])


def shown(seeds: np.ndarray) -> list[str]:
    return [
        interval(values, 1 if "psnr" in name else 3)
        for name, values in zip(SCORES, seeds.T, strict=True)
    ]


def plot(points: dict, output) -> None:
    families = [
        family for family in ("dp_sgd", "pruning") if any(row.startswith(family) for row in points)
    ]
    figure, axes = plt.subplots(
        1, len(families), figsize=(6.5 * len(families), 5), layout="constrained", squeeze=False
    )
    for axis, family in zip(axes[0], families, strict=True):
        for name, color in (
            (family, "tab:blue"),
            (f"optimal_{family}", "tab:orange"),
            ("none", "black"),
        ):
            mine = {row: runs for row, runs in points.items() if row.split()[0] == name}
            x, theirs, y = np.array(
                [of(runs, ("mse", "mse known", "loss")).mean(0) for runs in mine.values()]
            ).T
            axis.plot(x, y, "o-", color=color, label=name)
            if name.startswith(("optimal", "pruning")):
                axis.plot(theirs, y, "x--", color=color, label=f"{name}, known")
            for row, *place in zip(mine, x, y, strict=True):
                axis.annotate(
                    row.split()[-1], place, textcoords="offset points", xytext=(5, 5), color=color
                )
        axis.set_xscale("log")
        axis.set(
            xlabel="reconstruction MSE (right: hides more)",
            ylabel="training loss (down: learns more)",
        )
        axis.legend()
    save(figure, output, dpi=110)
