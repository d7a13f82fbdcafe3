"""Refiner against the other defenses on CIFAR-10: what each strength costs in accuracy, and what it
hides.

    python recipes/reproductions/refiner_frontier.py --train TRAIN.parquet --test TEST.parquet \
        --images LOSSLESS.npz --evaluation_network NETWORK --output docs/results/refiner_frontier

After the PMM-PSNR curves of the Refiner paper (2025), Figures 6 and 12, in the federation of
federation.py: clients with equal shares of the images, and with labels drawn from a Dirichlet
distribution of parameter 1. PSNR is at the initial weights and does not depend on the partition;
"known" is that of an attacker who knows the defense: he weighs total variation as is best on images
of his own behind it, matches only what a pruning left, or leaves out Soteria's layer. For time,
Soteria has one ratio and one seed, with equal shares only.
"""

from pathlib import Path

import matplotlib
import numpy as np
from federation import FULL, PARTITIONS, QUICK, Federation, federation_parser, pmm
from lenet import SMOOTHING
from reporting import Results, interval, named, write_table

from hf_gradguard import make_defense

matplotlib.use("agg")
from matplotlib import pyplot as plt

STRENGTHS = {
    "refiner": [{"alpha": a} for a in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)],
    "gaussian_noise": [{"relative_scale": s} for s in (0.01, 0.03, 0.1, 0.3, 1.0)],
    "laplace_noise": [{"relative_scale": s} for s in (0.01, 0.03, 0.1, 0.3, 1.0)],
    "optimal_noise": [{"relative_scale": s, "refresh_every": 10} for s in (0.03, 0.1, 0.3)],
    "pruning": [{"ratio": r} for r in (0.5, 0.7, 0.9, 0.99)],
    "quantization": [{"bits": b} for b in (8, 4, 2)],
    "soteria": [{"ratio": 0.5}],
}
KNOWN: dict[str, dict] = {
    "pruning": {"match_nonzero": True},
    "soteria": {"leave_out": ["classifier"]},
}
SEEDS = {("soteria", "iid"): 1, ("soteria", "dirichlet"): 0}  # fewer


def main() -> None:
    args = federation_parser(__doc__).parse_args()
    rows = {"none": ("none", {})}
    for name, strengths in STRENGTHS.items():
        rows |= {
            label(name, strength): (name, strength)
            for strength in strengths[: 1 if args.quick else None]
        }
    plan = {"rows": rows, "partitions": PARTITIONS, "known": KNOWN, "smoothing": SMOOTHING}
    plan |= QUICK | {"own": 1} if args.quick else FULL | {"own": 4}
    results, federation = Results(args.output, plan), Federation(args, plan)
    for row, (name, strength) in rows.items():
        defense = make_defense(
            name, **strength, **(federation.network if name == "refiner" else {})
        )
        results.get((row, "attack"), federation.attack, defense)
        results.get((row, "known"), federation.attack, defense, SMOOTHING | KNOWN.get(name, {}))
        for partition in PARTITIONS:
            for seed in range(SEEDS.get((name, partition), plan["seeds"])):
                results.get(
                    (row, partition, str(seed)), federation.accuracy, defense, seed, partition
                )
    learned = [f"{what}, {partition}" for partition in PARTITIONS for what in ("PMM", "accuracy")]
    table = [[row, *cells(results.figures, row)] for row in rows]
    write_table(args.output, ["", "PSNR", "PSNR, known", "cosine", *learned], table)
    plot(results.figures, rows, named(args.output, ".png"))


def label(name: str, strength: dict) -> str:
    return " ".join(
        [name, *(f"{key}={value}" for key, value in strength.items() if key != "refresh_every")]
    )


def cells(figures: dict, row: str) -> list[str]:
    found = figures[row]
    shown = [interval(found[who]["psnr"], 1) for who in ("attack", "known")]
    shown += [f"{found['attack']['cosine']:.3f}"]
    for partition in PARTITIONS:
        learned = found.get(partition, {})
        relative = pmm(learned, figures["none"][partition])
        shown += (
            [interval(relative, 0), interval([100 * one for one in learned.values()], 1)]
            if learned
            else ["", ""]
        )
    return shown


def plot(figures: dict, rows: dict, path: Path) -> None:
    """PMM over PSNR, with standard errors."""
    figure, panels = plt.subplots(
        1, len(PARTITIONS), figsize=(13, 4.8), layout="constrained", sharey=True
    )
    for axes, partition in zip(panels, PARTITIONS, strict=True):
        curves: dict[tuple[str, str], list] = {}
        for row, (name, _) in rows.items():
            if partition in figures[row]:
                relative = pmm(figures[row][partition], figures["none"][partition])
                error = (
                    np.std(relative, ddof=1) / len(relative) ** 0.5 if len(relative) > 1 else 0.0
                )
                for who in ("attack", "known"):
                    point = (np.mean(figures[row][who]["psnr"]), np.mean(relative), error)
                    curves.setdefault((name, who), []).append(point)
        for color, name in enumerate(dict.fromkeys(name for name, _ in rows.values())):
            for who, label, style in (("attack", name, "o-"), ("known", None, "x--")):
                if points := curves.get((name, who)):
                    x, y, errors = zip(*sorted(points), strict=True)
                    axes.errorbar(
                        x, y, errors, fmt=style, color=f"C{color}", capsize=2, label=label
                    )
        axes.set(title=partition, xlabel="PSNR of Inverting Gradients in dB (left: hidden)")
    panels[0].set(ylabel="PMM in % (up: useful)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", title="dashed: known")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
