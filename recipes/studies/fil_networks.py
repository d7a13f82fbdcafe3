"""What networks trained by private SGD leak of each image, by two accounts."""

import functools
from collections.abc import Iterator

import numpy as np
import scipy.stats
import torch
from torch import Tensor

from hf_gradguard.leakage import FisherAccountant, mse_bound_from_rdp, subsampling_factor

from ..study import Study
from .lib.images import SINGLE_IMAGES, single_images
from .lib.intervals import half_width
from .lib.results import named
from .lib.tables import interval, plt, save, significant, write_table
from .private_sgd_runs import one_run, poisson_factor, rdp, rdp_replacing

# (σ, C, learning rate); the first of each is Figure 6's
GRIDS = {
    "MNIST": [
        (0.5, 1, 1.0), (0.5, 1, 0.3), (0.5, 4, 0.1), (1, 1, 1.0), (1, 1, 0.3), (1, 4, 0.1),
        (2, 1, 0.3), (2, 4, 0.1), (5, 1, 0.3), (5, 4, 0.1),
    ],
    "CIFAR-10": [(0.5, 1, 0.3), (0.5, 1, 1.0), (0.5, 4, 0.1), (1, 1, 0.3), (2, 1, 0.3)],
}  # fmt: skip
QUICK_GRIDS = {"MNIST": [(0.5, 1, 0.3), (5, 4, 0.1)], "CIFAR-10": [(0.5, 1, 0.3)]}
PRIVATE = {
    "images": 2000, "batch": 100, "momentum": 0.5, "steps": [100, 200, 400],
    "stretches": [25] * 8 + [50] * 4, "probes": 1, "delta": 1e-5, "seeds": 3,
}  # fmt: skip
QUICK_PRIVATE = PRIVATE | {
    "images": 20, "batch": 4, "steps": [2, 4], "stretches": [1, 1, 2], "seeds": 2,
}  # fmt: skip
SHOWN = 8  # images at either end
digits = functools.partial(significant, digits=4)
COLORS = {"RDP": "tab:blue", "largest dFIL": "tab:red", "median dFIL": "tab:orange"}
FLOOR = 1e-6  # of the picture
PAPERS_RATE = 0.01
QUANTILES = (0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1)
RANKED = ("loss", "norm", "contrast", "brightness")


class Networks(Study):
    """What networks trained by private SGD leak of each image, by two accounts: Guo et al. (2022),
    Section 7.3, Figures 5 and 6.

    Conditions and figures: docs/findings/estimators.md.
    """

    ARGUMENTS = SINGLE_IMAGES

    def cells(self) -> dict:
        plan, grids = (QUICK_PRIVATE, QUICK_GRIDS) if self.quick else (PRIVATE, GRIDS)
        return {
            (data, f"σ = {sigma:g}, C = {clip:g}, ρ = {rate:g}"): {
                "data": data, "noise_multiplier": sigma, "clip": clip, "learning_rate": rate, **plan
            }
            for data, grid in grids.items()
            for sigma, clip, rate in grid
        }  # fmt: skip

    def images(self, data: str, count: int) -> tuple[Tensor, ...]:
        return loaded(self.args.mnist if data == "MNIST" else self.args.cifar10, count)

    def measure(self, cell: dict) -> dict:
        x, y, test_x, test_y = self.images(cell["data"], cell["images"])
        runs: list[dict] = [
            one_run(cell, seed, x, y, test_x, test_y) for seed in range(cell["seeds"])
        ]
        sigma, rate = cell["noise_multiplier"], cell["batch"] / len(x)
        accounted = {}
        for steps in cell["steps"]:
            factor = FisherAccountant(rate, sigma, cell["delta"] / steps).factor
            sharper = poisson_factor(sigma, rate) / factor
            dfils_by_run = [run["dfil"][steps] for run in runs]
            mean, smooth = (
                np.mean([run[key][steps] for run in runs], 0) for key in ("dfil", "smooth")
            )
            accounted[str(steps)] = {
                "accuracy": [run["accuracy"][steps] for run in runs],
                "epsilon": digits(rdp(sigma, rate, steps)),
                "replacing": digits(rdp_replacing(sigma, rate, steps)),
                "factor": digits(factor), "without delta": digits(sharper * factor),
                "largest": [digits(dfil.max()) for dfil in dfils_by_run],
                "median": [digits(np.median(dfil)) for dfil in dfils_by_run],
                "mean over runs": {
                    "largest": digits(mean.max()), "median": digits(np.median(mean)),
                    "safe": digits((mean < 1).mean()),
                    "safe without delta": digits((sharper * mean < 1).mean()),
                },
                "smoothly over hard": [
                    digits(statistic(smooth) / statistic(mean)) for statistic in (np.max, np.median)
                ],
            }  # fmt: skip
        return {"accounts": accounted, "images": of_images(cell, runs, x, y)}

    def report(self, metrics: dict) -> None:
        write_table(self.output, HEADER, table(metrics))
        rows = verdict(metrics, self.cells())
        write_table(named(self.output, "_verdict"), VERDICT_HEADER, rows)
        write_table(named(self.output, "_images"), IMAGES_HEADER, images_table(metrics))
        plot(metrics, self.output)


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
        torch.cat([batch[name] for batch in batch_list])
        for batch_list in (batches[:count], tests)
        for name in ("pixel_values", "labels")
    )


def of_images(cell: dict, runs: list[dict], x: Tensor, y: Tensor) -> dict:
    """Which images have the highest dFIL after the last step."""
    last_dfils = [run["dfil"][cell["steps"][-1]] for run in runs]
    mean, pixels, labels = np.mean(last_dfils, 0), x.flatten(1).double(), y.numpy()
    measures = {"contrast": pixels.std(1).numpy(), "brightness": pixels.mean(1).numpy()}
    order, top = mean.argsort(), max(1, len(x) // 20)
    return {
        "quantiles": [digits(value) for value in np.quantile(mean, QUANTILES)],
        "spearman": {
            name: [
                spearman(dfil, {**run, **measures}[name])
                for dfil, run in zip(last_dfils, runs, strict=True)
            ]
            for name in RANKED
        },
        "between classes": [between(np.log(dfil), labels) for dfil in last_dfils],
        "medians of classes": [
            digits(np.median(mean[labels == label])) for label in np.unique(labels)
        ],
        "between runs": [
            spearman(last_dfils[a], last_dfils[b]) for a in range(len(last_dfils)) for b in range(a)
        ],
        "wrong": [
            [digits(run["wrong"][rows].mean()) for rows in (dfil.argsort()[-top:], slice(None))]
            for dfil, run in zip(last_dfils, runs, strict=True)
        ],
        "highest": [[int(row), digits(mean[row])] for row in order[::-1][:SHOWN]],
        "lowest": [[int(row), digits(mean[row])] for row in order[:SHOWN]],
    }  # fmt: skip


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    return round(float(scipy.stats.spearmanr(a, b).statistic), 4)


def between(values: np.ndarray, labels: np.ndarray) -> float:
    """The share of the variance that lies between classes."""
    means = np.array([values[labels == label].mean() for label in labels])
    return digits(means.var() / values.var())


HEADER = [
    "", "steps", "accuracy", "ε₂", "RDP bound", "replacing one", "dFIL bound, least",
    "of single runs", "median", "above 1", "least over RDP bound", "κ", "κ without δ",
    "least without δ", "above 1",
]  # fmt: skip


def points(metrics: dict) -> Iterator[tuple[str, str, str, dict]]:
    """Data, settings, steps and what was accounted."""
    for data, settings in metrics.items():
        for name, cell in settings.items():
            for steps, account in cell["accounts"].items():
                yield data, name, steps, account


def bounds(account: dict) -> dict[str, float]:
    """On the MSE: of RDP, and of the largest and the median dFIL over the images."""
    mean = account["mean over runs"]
    return {
        "RDP": mse_bound_from_rdp(account["epsilon"]),
        "largest dFIL": 1 / mean["largest"],
        "median dFIL": 1 / mean["median"],
    }


def geometric(values: list[float]) -> tuple[float, float]:
    """The ends of a 95 % interval (Student's t of logarithms)."""
    if len(values) < 2:
        return values[0], values[0]
    logs = np.log(values)
    half = half_width(logs.tolist())
    return float(np.exp(logs.mean() - half)), float(np.exp(logs.mean() + half))


def table(metrics: dict) -> list[list[str]]:
    rows = []
    for data, name, steps, account in points(metrics):
        bound, mean = bounds(account), account["mean over runs"]
        low, high = geometric([1 / value for value in account["largest"]])
        sharper = account["factor"] / account["without delta"]
        replacing = mse_bound_from_rdp(account["replacing"])
        over = bound["largest dFIL"] / bound["RDP"] if bound["RDP"] else float("inf")
        rows.append([
            f"{data}, {name}", steps, interval(account["accuracy"]), f"{account['epsilon']:.3g}",
            f"{bound['RDP']:.2g}", f"{replacing:.2g}", f"{bound['largest dFIL']:.2g}",
            f"{low:.2g} to {high:.2g}", f"{bound['median dFIL']:.2g}", f"{mean['safe']:.1%}",
            f"{over:.2g}", f"{account['factor']:.2g}", f"{account['without delta']:.2g}",
            f"{sharper * bound['largest dFIL']:.2g}", f"{mean['safe without delta']:.1%}",
        ])  # fmt: skip
    return rows


VERDICT_HEADER = [
    "", "points", "least dFIL bound above RDP's", "in every run", "its interval above",
    "above replacing one's", "at q = 0.01", "with κ without δ", "least ratio",
    "best accuracy with a bound above 1: RDP", "largest dFIL", "median dFIL",
    "largest dFIL, κ without δ", "clipped smoothly: largest dFIL", "median dFIL, times",
]  # fmt: skip


def verdict(metrics: dict, cells: dict) -> list[list[str]]:
    """How many points have the better bound by the largest dFIL, and accuracies at bounds of 1."""
    rows = []
    for data in metrics:
        wins, best = [], dict.fromkeys([*COLORS, "sharper"], 0.0)
        for (cell_data, name), cell in cells.items():
            if cell_data != data:
                continue
            for steps, account in metrics[data][name]["accounts"].items():
                bound, runs = bounds(account), [1 / value for value in account["largest"]]
                dfil, rdp_bound = bound["largest dFIL"], bound["RDP"]
                bound["sharper"] = dfil * account["factor"] / account["without delta"]
                wins.append((
                    dfil > rdp_bound, min(runs) > rdp_bound, geometric(runs)[0] > rdp_bound,
                    dfil > mse_bound_from_rdp(account["replacing"]),
                    at_papers_rate(cell, int(steps), account), bound["sharper"] > rdp_bound,
                    dfil / max(rdp_bound, 1e-300), *account["smoothly over hard"],
                ))  # fmt: skip
                for kind in best:
                    if bound[kind] > 1:
                        best[kind] = max(best[kind], float(np.mean(account["accuracy"])))
        *counts, ratios, largest, medians = zip(*wins, strict=True)
        shown = [f"{accuracy:.3f}" if accuracy else "none" for accuracy in best.values()]
        shown += [f"{min(values):.2f} to {max(values):.2f}" for values in (largest, medians)]
        rows.append([data, len(wins), *map(sum, counts), f"{min(ratios):.2g}", *shown])
    return rows


def at_papers_rate(cell: dict, steps: int, account: dict) -> bool:
    """Whether the largest dFIL would give the better bound at the paper's sampling rate, if an
    image told as much in each of as many batches.
    """
    sigma = cell["noise_multiplier"]
    longer = round(steps * cell["batch"] / cell["images"] / PAPERS_RATE)
    factor = subsampling_factor(PAPERS_RATE, sigma, cell["delta"] / longer)
    largest = account["mean over runs"]["largest"] * factor / account["factor"]
    return 1 / largest > mse_bound_from_rdp(rdp(sigma, PAPERS_RATE, longer))


IMAGES_HEADER = [
    "after the last step", "1 % to 99 % of images' dFIL, over the median", "largest",
    *(f"Spearman with {name}" for name in RANKED), "variance between classes",
    "Spearman between runs", "wrong among the 5 % highest", "wrong among all",
]  # fmt: skip


def images_table(metrics: dict) -> list[list[str]]:
    rows = []
    for data, settings in metrics.items():
        for name, cell in settings.items():
            ranked = cell["images"]
            spread = np.array(ranked["quantiles"]) / ranked["quantiles"][QUANTILES.index(0.5)]
            wrong, of_all = zip(*ranked["wrong"], strict=True)
            rows.append([
                f"{data}, {name}", f"{spread[1]:.2g} to {spread[-2]:.2g}", f"{spread[-1]:.3g}",
                *(interval(ranked["spearman"][rank], 2) for rank in RANKED),
                interval(ranked["between classes"], 2), interval(ranked["between runs"], 2),
                interval(wrong, 2), interval(of_all, 2),
            ])  # fmt: skip
    return rows


def plot(metrics: dict, output) -> None:
    """Figure 5."""
    figure, axes = plt.subplots(
        1, len(metrics), figsize=(11, 5), layout="constrained", sharey=True, squeeze=False
    )
    for axis, (data, settings) in zip(axes[0], metrics.items(), strict=True):
        accounts = [account for _, _, _, account in points({data: settings})]
        accuracy = [float(np.mean(account["accuracy"])) for account in accounts]
        for kind, color in COLORS.items():
            values = [bounds(account)[kind] for account in accounts]
            for x, value in zip(accuracy, values, strict=True):
                marker = "o" if value > FLOOR else "v"
                axis.scatter(x, max(value, FLOOR), s=18, color=color, marker=marker)
            axis.plot(*frontier(accuracy, values), "--", color=color, label=kind)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set(yscale="log", ylim=(FLOOR / 2, None), xlabel="test accuracy", title=data)
    axes[0, 0].set_ylabel("lower bound on the MSE (triangles: 1e-6 and below)")
    axes[0, 0].legend(loc="lower left")
    save(figure, output, dpi=90)


def frontier(accuracy: list[float], values: list[float]) -> tuple[list[float], list[float]]:
    """Points that no other one beats in both."""
    best: list[tuple[float, float]] = []
    for x, value in sorted(zip(accuracy, values, strict=True), reverse=True):
        if not best or value > best[-1][1]:
            best.append((x, value))
    xs, ys = zip(*best, strict=True)
    return list(xs), [max(y, FLOOR) for y in ys]
