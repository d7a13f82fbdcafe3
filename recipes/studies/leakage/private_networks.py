r"""What networks trained by private SGD leak of each image, by two accounts: Guo et al. (2022),
Section 7.3, Figures 5 and 6.

    python -m recipes.studies.leakage.run private_networks --mnist MNIST.npz \
        --cifar10 LOSSLESS.npz --output docs/results/fil_networks

The paper's network for MNIST, on CIFAR-10 too, and the first 2,000 training images of each, all of
them tracked (the paper: all 60,000 and 50,000, a larger network for CIFAR-10, ten runs, at least
1,000 steps of 600 and 12,500 of 200). `dp_sgd` clips each sample's gradient and adds noise σC to
the sum of batches by Poisson sampling, 100 expected. A run's account is read off after 100, 200 and
400 steps.

RDP: ε₂ as published, for a sample more or less, and for a sample replaced, which Theorem 1 is
about. Labels are public, pixels in [0, 1]. dFIL: Algorithm 1 with κ of Eq. 3 (`FisherAccountant`,
at δ = 1e-5 for all steps together). The expectation over batches in Eq. 4 is taken exactly: a step
adds q FIM for *every* image, in its batch or not. Of each stretch of 25 or 50 steps one at random
is measured, and stands for all. The Jacobian is that of `dp_sgd`'s clipping (clipped.py, also for κ
without a δ), its trace exact along the gradient and across it from one random direction a step.

Figure 6: `--pictures FILE` draws the images of highest and lowest dFIL. 35 minutes of one core.
"""

import functools

import numpy as np
import scipy.stats
import torch
from torch import Tensor

from hf_gradguard.leakage import FisherAccountant

from ..lib.images import SINGLE_IMAGES, single_images
from ..lib.results import named
from ..lib.tables import plt, write_table
from .clipped import poisson_factor, rdp, rdp_replacing
from .private_runs import one_run
from .private_tables import (
    HEADER,
    IMAGES_HEADER,
    QUANTILES,
    RANKED,
    VERDICT_HEADER,
    images_table,
    plot,
    table,
    verdict,
)
from .settings import GRIDS, PRIVATE, QUICK_GRIDS, QUICK_PRIVATE

ARGUMENTS = SINGLE_IMAGES | {
    "--pictures": {"help": "PNG of Figure 6 to write; holds images of the data sets"}
}
SHOWN = 8  # images at either end


def cells(args) -> dict:
    plan, grids = (QUICK_PRIVATE, QUICK_GRIDS) if args.quick else (PRIVATE, GRIDS)
    return {
        (data, f"σ = {sigma:g}, C = {clip:g}, ρ = {rate:g}"): {
            "data": data, "noise_multiplier": sigma, "clip": clip, "learning_rate": rate, **plan
        }
        for data, grid in grids.items()
        for sigma, clip, rate in grid
    }  # fmt: skip


def prepare(args):
    def measure(cell: dict) -> dict:
        return measured(cell, *images(args, cell["data"], cell["images"]))

    return measure


@functools.cache
def loaded(path: str, count: int) -> tuple[Tensor, ...]:
    """Images and labels to train on, and to test on: the test set, or where there is none the
    training images that follow.
    """
    with np.load(path) as file:
        split = "x_test" in file
    batches = single_images(path, count if split else None)
    tests = single_images(path, None, split="test") if split else batches[count:]
    return tuple(
        torch.cat([batch[name] for batch in part])
        for part in (batches[:count], tests)
        for name in ("pixel_values", "labels")
    )


def images(args, data: str, count: int) -> tuple[Tensor, ...]:
    return loaded(args.mnist if data == "MNIST" else args.cifar10, count)


def measured(cell: dict, x: Tensor, y: Tensor, test_x: Tensor, test_y: Tensor) -> dict:
    runs: list[dict] = [one_run(cell, seed, x, y, test_x, test_y) for seed in range(cell["seeds"])]
    sigma, rate = cell["noise_multiplier"], cell["batch"] / len(x)
    accounted = {}
    for steps in cell["steps"]:
        factor = FisherAccountant(rate, sigma, cell["delta"] / steps).factor
        sharper = poisson_factor(sigma, rate) / factor
        each = [run["dfil"][steps] for run in runs]
        mean, smooth = (np.mean([run[key][steps] for run in runs], 0) for key in ("dfil", "smooth"))
        accounted[str(steps)] = {
            "accuracy": [run["accuracy"][steps] for run in runs],
            "epsilon": digits(rdp(sigma, rate, steps)),
            "replacing": digits(rdp_replacing(sigma, rate, steps)),
            "factor": digits(factor), "without delta": digits(sharper * factor),
            "largest": [digits(one.max()) for one in each],
            "median": [digits(np.median(one)) for one in each],
            "mean over runs": {
                "largest": digits(mean.max()), "median": digits(np.median(mean)),
                "safe": digits((mean < 1).mean()),
                "safe without delta": digits((sharper * mean < 1).mean()),
            },
            "smoothly over hard": [
                digits(part(smooth) / part(mean)) for part in (np.max, np.median)
            ],
        }  # fmt: skip
    return {"accounts": accounted, "images": of_images(cell, runs, x, y)}


def of_images(cell: dict, runs: list[dict], x: Tensor, y: Tensor) -> dict:
    """Which images have the highest dFIL after the last step."""
    last = [run["dfil"][cell["steps"][-1]] for run in runs]
    mean, pixels, labels = np.mean(last, 0), x.flatten(1).double(), y.numpy()
    own = {"contrast": pixels.std(1).numpy(), "brightness": pixels.mean(1).numpy()}
    order, top = mean.argsort(), max(1, len(x) // 20)
    return {
        "quantiles": [digits(value) for value in np.quantile(mean, QUANTILES)],
        "spearman": {
            name: [spearman(one, {**run, **own}[name]) for one, run in zip(last, runs, strict=True)]
            for name in RANKED
        },
        "between classes": [between(np.log(one), labels) for one in last],
        "medians of classes": [digits(np.median(mean[labels == one])) for one in np.unique(labels)],
        "between runs": [
            spearman(last[a], last[b]) for a in range(len(last)) for b in range(a)
        ],
        "wrong": [
            [digits(run["wrong"][some].mean()) for some in (one.argsort()[-top:], slice(None))]
            for one, run in zip(last, runs, strict=True)
        ],
        "highest": [[int(row), digits(mean[row])] for row in order[::-1][:SHOWN]],
        "lowest": [[int(row), digits(mean[row])] for row in order[:SHOWN]],
    }  # fmt: skip


def digits(value) -> float:
    return float(f"{float(value):.4g}")


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    return round(float(scipy.stats.spearmanr(a, b).statistic), 4)


def between(values: np.ndarray, labels: np.ndarray) -> float:
    """The share of the variance that lies between classes."""
    means = np.array([values[labels == label].mean() for label in labels])
    return digits(means.var() / values.var())


def report(figures: dict, args) -> None:
    write_table(args.output, HEADER, table(figures))
    write_table(named(args.output, "_verdict"), VERDICT_HEADER, verdict(figures, cells(args)))
    write_table(named(args.output, "_images"), IMAGES_HEADER, images_table(figures))
    plot(figures, args.output)
    if args.pictures:
        show(figures, args)


def show(figures: dict, args) -> None:
    """Figure 6: images of highest dFIL over those of lowest, with η̄ and label."""
    drawn = {data: next(iter(settings.values()))["images"] for data, settings in figures.items()}
    count = (args.quick and QUICK_PRIVATE["images"]) or PRIVATE["images"]
    figure, axes = plt.subplots(
        2 * len(drawn), SHOWN, figsize=(11, 3.4 * len(drawn)), layout="constrained"
    )
    ends = ((data, found[end]) for data, found in drawn.items() for end in ("highest", "lowest"))
    for row, (data, some) in zip(axes, ends, strict=True):
        x, y = images(args, data, count)[:2]
        for axis, (index, value) in zip(row, some, strict=True):
            axis.imshow(x[index].permute(1, 2, 0), cmap="gray", vmin=0, vmax=1)
            axis.set_title(f"{value**0.5:.3g} (label {int(y[index])})", fontsize=8)
            axis.axis("off")
    figure.savefig(args.pictures, dpi=90)
