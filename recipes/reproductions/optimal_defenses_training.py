"""Optimal noise and optimal pruning against plain ones: what a network learns of MNIST, and where
the noise goes.

    python recipes/reproductions/optimal_defenses_training.py --data mnist.npz \
        --output docs/results/optimal_defenses_training

After Chen, Gürsoy and Lei (2024, 2025), Section 4.1, Appendices C.1 and D. As there: the network of
119,530 parameters; four clients with 1,024 images each, whose gradients of 16 images are defended
one by one and averaged; Adam at 1e-3 for noise and 5e-4 for pruning; ten probes; every coordinate
clipped to ±1 before noise. `scale` is the root mean square of the noise's standard deviation over
all parameters, so rows of equal scale add equal noise power. The paper does not say for how long it
trains. Here 8 epochs with noise, after which the plain row's first seed came near the paper's 0.886
(the other rows had not been run), and 3 with pruning. A seed is a start, a choice of images, their
order and the draws of noise.
"""

from pathlib import Path

import matplotlib
import numpy as np
import torch
from reporting import Results, interval, named, parser_of, write_table
from transformers import set_seed
from transformers.utils import logging

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.models import LeakyConvNetConfig, LeakyConvNetForImageClassification

matplotlib.use("agg")
from matplotlib import pyplot as plt

CLIENTS, TRAINED_ON, BATCH, WINDOW, EPOCH = 4, 4096, 16, 8, 64
NOISE = {"scale": 0.1, "clip": 1.0}
NOISES = {"none": {}, "dp_sgd": {**NOISE, "clip_by": "coordinate"}, "optimal_dp_sgd": NOISE}
RATIOS = {
    "pruning 0.8": {"ratio": 0.8},
    "pruning 0.9": {"ratio": 0.9},
    "optimal_pruning 0.8": {"ratio": 0.8},
}
PARTS = {
    "noise": {"rows": NOISES, "learning_rate": 1e-3, "steps": 8 * EPOCH, "seeds": 5},
    "pruning": {
        "rows": {"none": {}, **RATIOS},
        "learning_rate": 5e-4,
        "steps": 3 * EPOCH,
        "seeds": 5,
    },
}
PAPER = {"noise: dp_sgd": 0.886, "noise: optimal_dp_sgd": 0.910}  # Appendix D.2: test accuracies
AGAINST = {"optimal_dp_sgd": ["dp_sgd"], "optimal_pruning 0.8": ["pruning 0.8", "pruning 0.9"]}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--data", required=True, help="npz with x_train, y_train, x_test, y_test in uint8"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    with np.load(args.data) as file:
        pixels = (
            torch.from_numpy(file[name])[:, None].float() / 255 for name in ("x_train", "x_test")
        )
        labels = (torch.from_numpy(file[name]).long() for name in ("y_train", "y_test"))
        data, test = zip(pixels, labels, strict=True)
    plan = {
        part: settings | ({"steps": 1, "seeds": 2} if args.quick else {})
        for part, settings in PARTS.items()
    }
    results = Results(args.output, plan)
    for part, settings in plan.items():
        for seed in range(settings["seeds"]):
            for row, strength in settings["rows"].items():
                defense, title = (
                    make_defense(row.split()[0], **strength),
                    f"{part}: {row}, seed {seed}",
                )
                results.get(
                    (part, row, str(seed)), train, defense, seed, data, test, settings, title
                )
    write_table(
        args.output,
        ["", "test accuracy", "training loss, last epoch", "paper: test accuracy"],
        table(results.figures),
    )
    plot(results.figures, named(args.output, ".png"))


def train(defense, seed: int, data: tuple, test: tuple, settings: dict, title: str) -> dict:
    images, labels = data
    set_seed(seed)
    model = LeakyConvNetForImageClassification(LeakyConvNetConfig())
    optimizer = torch.optim.Adam(model.parameters(), lr=settings["learning_rate"])
    draw, noise = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1000)
    shares = torch.randperm(len(images), generator=draw)[:TRAINED_ON].chunk(CLIENTS)
    defense.record_noise(True)
    losses, stds, drawn = [], [], []
    for _ in logging.tqdm(range(settings["steps"]), desc=title):
        if not drawn:  # an epoch is over
            orders = [
                share[torch.randperm(len(share), generator=draw)].split(BATCH) for share in shares
            ]
            drawn = list(zip(*orders, strict=True))[::-1]
        batches = [{"pixel_values": images[rows], "labels": labels[rows]} for rows in drawn.pop()]
        maps = [GradientMap(model, batch, second_order=defense.needs_jacobian) for batch in batches]
        sent = [defense(gmap, generator=noise) for gmap in maps]
        for name, parameter in model.named_parameters():
            parameter.grad = sum(one[name] for one in sent) / CLIENTS
        optimizer.step()
        losses.append(float(np.mean([float(gmap.loss) for gmap in maps])))
        if defense.noise is not None:  # that of the last client
            stds.append(
                {
                    name: float(v[v.isfinite()].sqrt().mean())
                    for name, v in defense.noise.variance.items()
                }
            )
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
                for other in AGAINST.get(row, ())
            ]
    return rows


def plot(figures: dict, path: Path) -> None:
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
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
