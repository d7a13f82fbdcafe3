r"""A perturbation of one size along four eigenvectors of J Jᵀ, and what DLG makes of it: Zhang et
al. (2023), Figure 6.

    python -m recipes.studies.leakage.run directions --mnist MNIST.npz --cifar10 LOSSLESS.npz \
        --output docs/results/influence_directions

For a unit eigenvector u with eigenvalue λ, δ = size · Jᵀu/√λ has the norm `size` and moves the
input by I(δ) = size/√λ along u: an MSE of size²/(λm). Eigenvalues are taken at equal ratios from
the largest to the smallest. The leakage papers' LeNet before training, one image a gradient, label
known, DLG by L-BFGS from one random start. The MSE is that of the attack's own input; clipped to
the pixel range, which first order knows nothing of, it is smaller. Below what is left undefended
nothing can be seen. About half an hour of one core.
"""

import functools

import numpy as np
import torch
from scipy.stats import spearmanr
from transformers import set_seed

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.leakage import smallest_directions

from ..lib.images import SINGLE_IMAGES, lenet_for, single_images
from ..lib.tables import plt, save, write_table
from .settings import DIRECTIONS, QUICK_DIRECTIONS

ARGUMENTS = SINGLE_IMAGES
DATA = {"MNIST": "mnist", "CIFAR-10": "cifar10"}


def plan(args) -> dict:
    return QUICK_DIRECTIONS if args.quick else DIRECTIONS


def cells(args) -> dict:
    settings = {name: value for name, value in plan(args).items() if name != "samples"}
    return {
        (data, str(sample)): {"data": data, "sample": sample, **settings}
        for data in DATA
        for sample in range(plan(args)["samples"])
    }


def prepare(args):
    @functools.cache
    def started(data: str, side: int) -> tuple:
        batches = single_images(getattr(args, DATA[data]), plan(args)["samples"], side)
        set_seed(0)
        return lenet_for(batches[0]), batches

    def measure(cell: dict) -> list[dict]:
        model, batches = started(cell["data"], cell["side"])
        return attacked(cell, model, batches[cell["sample"]])

    return measure


def attacked(cell: dict, model, batch: dict[str, torch.Tensor]) -> list[dict]:
    """One image, its gradient perturbed in four directions."""
    image, gmap = batch["pixel_values"], GradientMap(model, batch)
    gradient, start = (
        gmap.gradient(),
        torch.rand(image.shape, generator=torch.Generator().manual_seed(0)),
    )
    dlg = make_attack("dlg", steps=cell["steps"], start=start)

    def found(shared: dict[str, torch.Tensor]) -> torch.Tensor:
        # As if pixels came from -50 to 50: this attacker does not know their range.
        unbounded = {"image_mean": [0.5], "image_std": [0.01]}
        seen = Observation(model, shared, tuple(image.shape), labels=batch["labels"], **unbounded)
        return dlg(seen, torch.Generator().manual_seed(0)).input

    spectrum = smallest_directions(gmap, image.numel())
    logarithms = spectrum.eigenvalues.clamp_min(1e-12).log()
    wanted = torch.linspace(float(logarithms[-1]), float(logarithms[0]), 4)
    undefended, points = (found(gradient) - image).square().mean(), []
    for at in (logarithms[:, None] - wanted).abs().argmin(0):
        direction = gmap.jvp(spectrum.vectors[at])
        # The eigenvalue once more, as ‖Jᵀu‖²: the smallest of a large matrix carry the rounding of
        # the largest.
        root = torch.cat([d.flatten() for d in direction.values()]).norm()
        guess = found(
            {name: g + cell["size"] / root * direction[name] for name, g in gradient.items()}
        )
        mse, clipped = ((x - image).square().mean() for x in (guess, guess.clamp(0, 1)))
        point = {"eigenvalue": root**2, "predicted": cell["size"] ** 2 / root**2 / image.numel()}
        point |= {"undefended": undefended, "mse": mse, "clipped": clipped}
        points.append({key: float(f"{float(value):.4g}") for key, value in point.items()})
    return points


def report(figures: dict, args) -> None:
    """Table and picture."""
    rows, picture, axes = [], *plt.subplots(1, 2, figsize=(11, 4.3), layout="constrained")
    for axis, (data, samples) in zip(axes, figures.items(), strict=True):
        points = [point for points in samples.values() for point in points]
        columns = {key: np.array([point[key] for point in points]) for key in points[0]}
        plot(axis, data, columns)
        above = columns["predicted"] > columns["undefended"]
        ratios = np.sqrt(columns["mse"] / columns["predicted"])[above]
        low, middle, high = np.quantile(ratios, (0, 0.5, 1)) if above.any() else [float("nan")] * 3
        rank = spearmanr(columns["eigenvalue"], columns["mse"]).statistic
        undefended = f"{np.median(columns['undefended']):.1e}"
        rows.append([data, f"{rank:.2f}", undefended, f"{above.sum()} of {len(points)}"])
        rows[-1].append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
    header = ["", "Spearman of λ and MSE", "MSE undefended, median", "points predicted above that"]
    write_table(args.output, [*header, "their RMSE over predicted: median, range"], rows)
    save(picture, args.output, dpi=80)


def plot(axis, data: str, columns: dict[str, np.ndarray]) -> None:
    eigenvalues, order = columns["eigenvalue"], columns["eigenvalue"].argsort()
    axis.plot(eigenvalues[order], columns["predicted"][order], color="black", label="size² / λm")
    axis.scatter(eigenvalues, columns["mse"], s=18, label="DLG")
    axis.scatter(
        eigenvalues,
        columns["clipped"],
        s=18,
        facecolors="none",
        edgecolors="tab:blue",
        label="clipped",
    )
    axis.axhline(
        np.median(columns["undefended"]), color="gray", linestyle="--", label="undefended, median"
    )
    axis.set(xscale="log", yscale="log", xlabel="eigenvalue λ of J Jᵀ", ylabel="MSE", title=data)
    axis.legend()
