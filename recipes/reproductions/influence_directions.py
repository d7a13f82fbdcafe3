"""A perturbation of one size along four eigenvectors of J Jᵀ, and what DLG makes of it: Zhang et al. (2023), Figure 6.

    python recipes/reproductions/influence_directions.py --mnist MNIST.npz --cifar10 LOSSLESS.npz \
        --output docs/results/influence_directions

For a unit eigenvector u with eigenvalue λ, δ = size · Jᵀu/√λ has the norm `size` and moves the input by I(δ) = size/√λ along u:
an MSE of size²/(λm). Eigenvalues are taken at equal ratios from the largest to the smallest. The leakage papers' LeNet before
training, one image a gradient, label known, DLG by L-BFGS from one random start. The MSE is that of the attack's own input; clipped
to the pixel range, which first order knows nothing of, it is smaller. Below what is left undefended nothing can be seen.

Writes OUTPUT.json and OUTPUT.png.
"""

import argparse
import json
from pathlib import Path

import matplotlib
import numpy as np
import torch
from scipy.stats import spearmanr
from transformers import set_seed
from transformers.utils import logging

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.leakage import smallest_directions
from hf_gradguard.models import LeakageLeNetConfig, LeakageLeNetForImageClassification

matplotlib.use("agg")
from matplotlib import pyplot as plt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", required=True, help="npz with x_train and y_train")
    parser.add_argument("--cifar10", required=True, help="npz with x and y")
    parser.add_argument("--samples", type=int, default=3, help="images of each data set")
    parser.add_argument("--size", type=float, default=0.3, help="norm of δ; the gradient's is about 30")
    parser.add_argument("--steps", type=int, default=60, help="steps of L-BFGS")
    parser.add_argument("--pictures", help="start of the names of two PNGs to write; they hold images of the data sets")
    parser.add_argument("--output", default="docs/results/influence_directions")
    args = parser.parse_args()
    report: dict = {"arguments": {name: getattr(args, name) for name in ("samples", "size", "steps")}}
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.3), layout="constrained")
    for number, (data, path, names) in enumerate(
        (("mnist", args.mnist, ("x_train", "y_train")), ("cifar10", args.cifar10, ("x", "y")))
    ):
        with np.load(path) as file:
            pixels, labels = (torch.from_numpy(file[name][: args.samples]) for name in names)
        images = (pixels[:, None] if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2)).float() / 255
        set_seed(0)
        config = LeakageLeNetConfig(num_channels=images.shape[1], image_size=images.shape[2])
        model = LeakageLeNetForImageClassification(config).eval()
        points, pictures = [], [images[0]]
        for sample in logging.tqdm(range(args.samples), desc=data):
            found = attack(args, model, images[sample : sample + 1], labels[sample : sample + 1].long())
            points += [point for point, _ in found]
            if sample == 0:
                pictures += [picture for _, picture in found]
        report[data] = summary(points) | {"points": points}
        plot(axes[number], data, points)
        if args.pictures:
            show(f"{args.pictures}_{data}.png", pictures, points)
    print(json.dumps({data: report[data] | {"points": "..."} for data in ("mnist", "cifar10")}, indent=2))
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    Path(f"{args.output}.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    figure.savefig(f"{args.output}.png", dpi=80)


def attack(
    args: argparse.Namespace, model, image: torch.Tensor, label: torch.Tensor
) -> list[tuple[dict, torch.Tensor]]:
    gmap = GradientMap(model, {"pixel_values": image, "labels": label})
    gradient = gmap.gradient()
    spectrum = smallest_directions(gmap, image.numel())
    logarithms = spectrum.eigenvalues.clamp_min(1e-12).log()
    wanted = torch.linspace(float(logarithms[-1]), float(logarithms[0]), 4)
    dlg = make_attack("dlg", steps=args.steps, start="uniform")
    undefended = Observation(model, gradient, tuple(image.shape), labels=label)
    floor = (dlg(undefended, torch.Generator().manual_seed(0)).input - image).square().mean()
    results = []
    for at in (logarithms[:, None] - wanted).abs().argmin(0):
        direction = gmap.jvp(spectrum.vectors[at])
        # The eigenvalue once more, as ‖Jᵀu‖²: the smallest of a large matrix carry the rounding of the largest.
        root = torch.cat([d.flatten() for d in direction.values()]).norm()
        shared = {name: g + args.size / root * direction[name] for name, g in gradient.items()}
        seen = Observation(model, shared, tuple(image.shape), labels=label)
        found = dlg(seen, torch.Generator().manual_seed(0)).input
        mse, clipped = ((x - image).square().mean() for x in (found, found.clamp(0, 1)))
        point = {"eigenvalue": root**2, "predicted": args.size**2 / root**2 / image.numel(), "undefended": floor}
        point |= {"mse": mse, "clipped": clipped}
        results.append(({k: float(f"{float(v):.4g}") for k, v in point.items()}, found.clamp(0, 1)[0]))
    return results


def show(path: str, pictures: list[torch.Tensor], points: list[dict]) -> None:
    """The first image, and what is made of it for each direction of δ."""
    figure, axes = plt.subplots(1, len(pictures), figsize=(1.2 * len(pictures), 1.5), layout="constrained")
    titles = ["true", *(f"λ = {point['eigenvalue']:.2g}" for point in points)]
    for axis, picture, title in zip(axes, pictures, titles, strict=False):
        axis.imshow(picture.permute(1, 2, 0), cmap="gray", vmin=0, vmax=1)
        axis.set_title(title, fontsize=8)
        axis.axis("off")
    figure.savefig(path, dpi=80)


def summary(points: list[dict]) -> dict:
    """Spearman of λ and MSE, and realised over predicted RMSE where the prediction is above what is left undefended."""
    eigenvalues, predicted, undefended, mse = (
        np.array([point[key] for point in points]) for key in ("eigenvalue", "predicted", "undefended", "mse")
    )
    above = predicted > undefended
    ratios = np.quantile(np.sqrt(mse / predicted)[above], (0, 0.5, 1))
    return {
        "spearman": round(float(spearmanr(eigenvalues, mse).statistic), 3),
        "points with predicted > undefended": int(above.sum()),
        "their RMSE over predicted: least, median, most": ratios.round(2).tolist(),
        "median undefended MSE": float(np.median(undefended)),
    }


def plot(axis, data: str, points: list[dict]) -> None:
    eigenvalues = np.array([point["eigenvalue"] for point in points])
    order = eigenvalues.argsort()
    axis.plot(eigenvalues[order], np.array([p["predicted"] for p in points])[order], color="black", label="size² / λm")
    axis.scatter(eigenvalues, [point["mse"] for point in points], s=18, label="DLG")
    axis.scatter(
        eigenvalues, [p["clipped"] for p in points], s=18, facecolors="none", edgecolors="tab:blue", label="clipped"
    )
    axis.axhline(np.median([p["undefended"] for p in points]), color="gray", linestyle="--", label="undefended, median")
    axis.set(xscale="log", yscale="log", xlabel="eigenvalue λ of J Jᵀ", ylabel="MSE", title=data)
    axis.legend()


if __name__ == "__main__":
    main()
