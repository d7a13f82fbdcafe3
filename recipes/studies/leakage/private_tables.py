"""Tables and picture of `private_networks`."""

from collections.abc import Iterator

import numpy as np

from hf_gradguard.leakage import mse_bound_from_rdp, subsampling_factor

from ..lib.intervals import half_width
from ..lib.tables import interval, plt, save
from .clipped import rdp

COLORS = {"RDP": "tab:blue", "largest dFIL": "tab:red", "median dFIL": "tab:orange"}
FLOOR = 1e-6  # of the picture
PAPERS_RATE = 0.01
QUANTILES = (0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1)
RANKED = ("loss", "norm", "contrast", "brightness")

HEADER = [
    "", "steps", "accuracy", "ε₂", "RDP bound", "replacing one", "dFIL bound, least",
    "of single runs", "median", "above 1", "least over RDP bound", "κ", "κ without δ",
    "least without δ", "above 1",
]  # fmt: skip


def points(figures: dict) -> Iterator[tuple[str, str, str, dict]]:
    """Data, settings, steps and what was accounted."""
    for data, settings in figures.items():
        for name, found in settings.items():
            for steps, account in found["accounts"].items():
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


def table(figures: dict) -> list[list[str]]:
    rows = []
    for data, name, steps, account in points(figures):
        found, mean = bounds(account), account["mean over runs"]
        low, high = geometric([1 / one for one in account["largest"]])
        sharper = account["factor"] / account["without delta"]
        replacing = mse_bound_from_rdp(account["replacing"])
        over = found["largest dFIL"] / found["RDP"] if found["RDP"] else float("inf")
        rows.append([
            f"{data}, {name}", steps, interval(account["accuracy"]), f"{account['epsilon']:.3g}",
            f"{found['RDP']:.2g}", f"{replacing:.2g}", f"{found['largest dFIL']:.2g}",
            f"{low:.2g} to {high:.2g}", f"{found['median dFIL']:.2g}", f"{mean['safe']:.1%}",
            f"{over:.2g}", f"{account['factor']:.2g}", f"{account['without delta']:.2g}",
            f"{sharper * found['largest dFIL']:.2g}", f"{mean['safe without delta']:.1%}",
        ])  # fmt: skip
    return rows


VERDICT_HEADER = [
    "", "points", "least dFIL bound above RDP's", "in every run", "its interval above",
    "above replacing one's", "at q = 0.01", "with κ without δ", "least ratio",
    "best accuracy with a bound above 1: RDP", "largest dFIL", "median dFIL",
    "largest dFIL, κ without δ", "clipped smoothly: largest dFIL", "median dFIL, times",
]  # fmt: skip


def verdict(figures: dict, cells: dict) -> list[list[str]]:
    """How many points have the better bound by the largest dFIL, and accuracies at bounds of 1."""
    rows = []
    for data in figures:
        wins, best = [], dict.fromkeys([*COLORS, "sharper"], 0.0)
        for (where, name), cell in cells.items():
            if where != data:
                continue
            for steps, account in figures[data][name]["accounts"].items():
                found, runs = bounds(account), [1 / one for one in account["largest"]]
                mine, theirs = found["largest dFIL"], found["RDP"]
                found["sharper"] = mine * account["factor"] / account["without delta"]
                wins.append((
                    mine > theirs, min(runs) > theirs, geometric(runs)[0] > theirs,
                    mine > mse_bound_from_rdp(account["replacing"]),
                    at_papers_rate(cell, int(steps), account), found["sharper"] > theirs,
                    mine / max(theirs, 1e-300), *account["smoothly over hard"],
                ))  # fmt: skip
                for kind in best:
                    if found[kind] > 1:
                        best[kind] = max(best[kind], float(np.mean(account["accuracy"])))
        *counts, ratios, largest, medians = zip(*wins, strict=True)
        shown = [f"{accuracy:.3f}" if accuracy else "none" for accuracy in best.values()]
        shown += [f"{min(some):.2f} to {max(some):.2f}" for some in (largest, medians)]
        rows.append([data, len(wins), *map(sum, counts), f"{min(ratios):.2g}", *shown])
    return rows


def at_papers_rate(cell: dict, steps: int, account: dict) -> bool:
    """Whether the largest dFIL would give the better bound at the paper's sampling rate, if an
    image told as much in each of as many batches.
    """
    sigma, longer = (
        cell["noise_multiplier"],
        round(steps * cell["batch"] / cell["images"] / PAPERS_RATE),
    )
    factor = subsampling_factor(PAPERS_RATE, sigma, cell["delta"] / longer)
    largest = account["mean over runs"]["largest"] * factor / account["factor"]
    return 1 / largest > mse_bound_from_rdp(rdp(sigma, PAPERS_RATE, longer))


IMAGES_HEADER = [
    "after the last step", "1 % to 99 % of images' dFIL, over the median", "largest",
    *(f"Spearman with {name}" for name in RANKED), "variance between classes",
    "Spearman between runs", "wrong among the 5 % highest", "wrong among all",
]  # fmt: skip


def images_table(figures: dict) -> list[list[str]]:
    rows = []
    for data, settings in figures.items():
        for name, found in settings.items():
            one = found["images"]
            spread = np.array(one["quantiles"]) / one["quantiles"][QUANTILES.index(0.5)]
            wrong, of_all = zip(*one["wrong"], strict=True)
            rows.append([
                f"{data}, {name}", f"{spread[1]:.2g} to {spread[-2]:.2g}", f"{spread[-1]:.3g}",
                *(interval(one["spearman"][rank], 2) for rank in RANKED),
                interval(one["between classes"], 2), interval(one["between runs"], 2),
                interval(wrong, 2), interval(of_all, 2),
            ])  # fmt: skip
    return rows


def plot(figures: dict, output) -> None:
    """Figure 5."""
    figure, axes = plt.subplots(
        1, len(figures), figsize=(11, 5), layout="constrained", sharey=True, squeeze=False
    )
    for axis, (data, settings) in zip(axes[0], figures.items(), strict=True):
        accounts = [account for _, _, _, account in points({data: settings})]
        accuracy = [float(np.mean(account["accuracy"])) for account in accounts]
        for kind, color in COLORS.items():
            values = [bounds(account)[kind] for account in accounts]
            for at, value in zip(accuracy, values, strict=True):
                marker = "o" if value > FLOOR else "v"
                axis.scatter(at, max(value, FLOOR), s=18, color=color, marker=marker)
            axis.plot(*frontier(accuracy, values), "--", color=color, label=kind)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set(yscale="log", ylim=(FLOOR / 2, None), xlabel="test accuracy", title=data)
    axes[0, 0].set_ylabel("lower bound on the MSE (triangles: 1e-6 and below)")
    axes[0, 0].legend(loc="lower left")
    save(figure, output, dpi=90)


def frontier(accuracy: list[float], values: list[float]) -> tuple[list[float], list[float]]:
    """Points that no other one beats in both."""
    found: list[tuple[float, float]] = []
    for at, value in sorted(zip(accuracy, values, strict=True), reverse=True):
        if not found or value > found[-1][1]:
            found.append((at, value))
    xs, ys = zip(*found, strict=True)
    return list(xs), [max(y, FLOOR) for y in ys]
