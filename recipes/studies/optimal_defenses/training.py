r"""What a network learns of MNIST with them, and where the noise goes.

    python -m recipes.studies.optimal_defenses.run training --data MNIST.npz \
        --output docs/results/optimal_defenses_training

After Chen, Gürsoy and Lei (2024, 2025), Section 4.1, Appendices C.1 and D. As there: the network of
119,530 parameters; four clients with 1,024 images each, whose gradients of 16 images are defended
one by one and averaged; Adam at 1e-3 for noise and 5e-4 for pruning; ten probes; every coordinate
clipped to ±1 before noise. `scale` is the root mean square of the noise's standard deviation over
all parameters, so rows of equal scale add equal noise power. The paper does not say for how long it
trains. Here 8 epochs with noise, after which the plain row's first seed came near the paper's 0.886
(the other rows had not been run), and 3 with pruning. A seed is a start, a choice of images, their
order and the draws of noise. 35 minutes of one core.
"""

import numpy as np
import torch
from transformers import set_seed
from transformers.utils import logging

from hf_gradguard import GradientMap
from hf_gradguard.randomness import Stream
from recipes.small_networks import LeakyConvNetConfig, LeakyConvNetForImageClassification

from ..lib.defenses import published
from ..lib.tables import interval, plt, save, write_table
from .settings import CLIENTS, EPOCH, PAPER, PARTS, TRAINED_AGAINST, TRAINED_SEEDS

ARGUMENTS = {"--data": "npz with x_train, y_train, x_test, y_test in uint8"}
TRAINED_ON, BATCH, WINDOW, SPLITS = 4096, 16, 8, ("train", "test")


def cells(args) -> dict:
    seeds, fast = (2, {"steps": 1}) if args.quick else (TRAINED_SEEDS, {})
    return {
        (part, row, str(seed)): {
            "defense": row.split()[0],
            "strength": strength,
            "learning_rate": settings["learning_rate"],
            "steps": settings["steps"],
            "seed": seed,
        }
        | fast
        for part, settings in PARTS.items()
        for seed in range(seeds)
        for row, strength in settings["rows"].items()
    }


def prepare(args):
    torch.set_num_threads(1)
    with np.load(args.data) as file:
        pixels = [torch.from_numpy(file[f"x_{split}"])[:, None].float() / 255 for split in SPLITS]
        labels = [torch.from_numpy(file[f"y_{split}"]).long() for split in SPLITS]
    data, test = zip(pixels, labels, strict=True)
    return lambda cell: train(cell, data, test)


def report(figures: dict, args) -> None:
    header = ["", "test accuracy", "training loss, last epoch", "paper: test accuracy"]
    write_table(args.output, header, table(figures))
    plot(figures, args.output)


def train(cell: dict, data: tuple, test: tuple) -> dict:
    (images, labels), seed = data, cell["seed"]
    defense = published(cell["defense"], **cell["strength"])
    set_seed(seed)
    model = LeakyConvNetForImageClassification(LeakyConvNetConfig())
    optimizer = torch.optim.Adam(model.parameters(), lr=cell["learning_rate"])
    draw, noise = torch.Generator().manual_seed(seed), Stream.from_seeds(seed + 1000)
    shares = torch.randperm(len(images), generator=draw)[:TRAINED_ON].chunk(CLIENTS)
    losses, stds, drawn = [], [], []
    for _ in logging.tqdm(range(cell["steps"]), desc=f"{cell['defense']}, seed {seed}"):
        if not drawn:  # an epoch is over
            orders = [
                share[torch.randperm(len(share), generator=draw)].split(BATCH) for share in shares
            ]
            drawn = list(zip(*orders, strict=True))[::-1]
        batches = [{"pixel_values": images[rows], "labels": labels[rows]} for rows in drawn.pop()]
        maps = [
            GradientMap(model, batch, second_order=defense.facts.needs_second_order)
            for batch in batches
        ]
        sent = [defense(gmap, generator=noise) for gmap in maps]
        for name, parameter in model.named_parameters():
            parameter.grad = sum(one[name] for one in sent) / CLIENTS
        optimizer.step()
        losses.append(float(np.mean([float(gmap.loss) for gmap in maps])))
        if (added := sent[-1].noise) is not None:
            finite = {name: v[v.isfinite()] for name, v in added.variance.items()}
            stds.append({name: float(v.sqrt().mean()) for name, v in finite.items()})
    layers = {name: smooth([one[name] for one in stds]) for name in (stds[0] if stds else ())}
    with torch.no_grad():
        found = torch.cat(
            [model(pixel_values=some).logits.argmax(1) for some in test[0].split(500)]
        )
    scores = {
        "accuracy": float((found == test[1]).float().mean()),
        "loss": float(np.mean(losses[-EPOCH:])),
    }
    return scores | {"losses": smooth(losses), "stds": layers}


def smooth(values: list[float]) -> list[float]:
    """Means of successive windows."""
    return [round(float(np.mean(values[i : i + WINDOW])), 6) for i in range(0, len(values), WINDOW)]


def table(figures: dict) -> list[list[object]]:
    rows = []
    for part in PARTS:
        scores = {
            row: np.array([[run["accuracy"], run["loss"]] for run in runs.values()])
            for row, runs in figures[part].items()
        }
        for row, mine in scores.items():
            title = f"{part}: {row}"
            rows.append([title, *map(interval, mine.T), PAPER.get(title, "")])
            rows += [
                [f"{row} less {other}, same seeds", *map(interval, (mine - scores[other]).T), ""]
                for other in TRAINED_AGAINST.get(row, ())
            ]
    return rows


def plot(figures: dict, output) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")

    def draw(axis, curves: list[list[float]], label: str) -> None:
        mean = np.mean(curves, axis=0)
        axis.plot(
            WINDOW * np.arange(1, len(mean) + 1),
            mean,
            "--" if "bias" in label else "-",
            marker=".",
            label=label,
        )

    for axis, part in zip(axes, PARTS, strict=False):
        for row, runs in figures[part].items():
            draw(axis, [run["losses"] for run in runs.values()], row)
        axis.set(title=f"{part}, mean over seeds", ylabel=f"training loss, mean of {WINDOW} steps")
    runs = figures["noise"]["optimal_dp_sgd"].values()
    for name in next(iter(runs))["stds"]:
        draw(axes[2], [run["stds"][name] for run in runs], name)
    axes[2].set(
        title="optimal noise by layer",
        yscale="log",
        ylabel="standard deviation, mean over the layer",
    )
    for axis in axes:
        axis.set(xlabel="step")
        axis.legend(fontsize=8)
    save(figure, output, dpi=110)
