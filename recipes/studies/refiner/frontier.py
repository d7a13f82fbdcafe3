r"""Refiner against the other defenses on CIFAR-10: what each strength costs in accuracy, and what
it hides.

    python -m recipes.studies.refiner.run frontier --train TRAIN.parquet --test TEST.parquet \
        --images LOSSLESS.npz --evaluation_network NETWORK --output docs/results/refiner_frontier

After the PMM-PSNR curves of the Refiner paper (2025), Figures 6 and 12, in the federation of
federation.py: clients with equal shares of the images, and with labels drawn from a Dirichlet
distribution of parameter 1. PSNR is at the initial weights and does not depend on the partition;
"known" is that of an attacker who knows the defense: he weighs total variation as is best on images
of his own behind it, matches only what a pruning left, or leaves out Soteria's layer. For time,
Soteria has one ratio and one seed, with equal shares only. About nine hours of one core.
"""

import numpy as np

from ..lib.images import SMOOTHING
from ..lib.tables import interval, plt, save, write_table
from .federation import ARGUMENTS, attack, learning, pmm, prepare
from .settings import FEWER_SEEDS, FRONTIER, KNOWN, PARTITIONS, QUICK_SEEDS, SEEDS

__all__ = ["ARGUMENTS", "cells", "prepare", "report"]


def cells(args) -> dict:
    quick, found = args.quick, {}
    for name, strengths in FRONTIER.items():
        for strength in strengths[: 1 if quick else None]:
            row, defended = label(name, strength), (name, strength)
            found[row, "attack"] = attack(quick, *defended)
            found[row, "known"] = attack(quick, *defended, SMOOTHING | KNOWN.get(name, {}))
            for partition in PARTITIONS:
                seeds = FEWER_SEEDS.get((name, partition), QUICK_SEEDS if quick else SEEDS)
                for seed in range(seeds):
                    place = (row, partition, str(seed))
                    found[place] = learning(quick, *defended, partition, seed)
    return found


def label(name: str, strength: dict) -> str:
    said = [f"{key}={value}" for key, value in strength.items() if key != "refresh_every"]
    return " ".join([name, *said])


def report(figures: dict, args) -> None:
    learned = [f"{what}, {partition}" for partition in PARTITIONS for what in ("PMM", "accuracy")]
    table = [[row, *shown(found, figures["none"])] for row, found in figures.items()]
    write_table(args.output, ["", "PSNR", "PSNR, known", "cosine", *learned], table)
    plot(figures, args.output)


def shown(found: dict, plain: dict) -> list[str]:
    texts = [interval(found[who]["psnr"], 1) for who in ("attack", "known")]
    texts += [f"{found['attack']['cosine']:.3f}"]
    for partition in PARTITIONS:
        learned = found.get(partition, {})
        relative = pmm(learned, plain[partition])
        percent = [100 * one for one in learned.values()]
        texts += [interval(relative, 0), interval(percent, 1)] if learned else ["", ""]
    return texts


def plot(figures: dict, output) -> None:
    """PMM over PSNR, with standard errors."""
    size = {"figsize": (13, 4.8), "layout": "constrained"}
    figure, panels = plt.subplots(1, len(PARTITIONS), sharey=True, **size)
    names = list(dict.fromkeys(row.split()[0] for row in figures))
    for axes, partition in zip(panels, PARTITIONS, strict=True):
        curves: dict[tuple[str, str], list] = {}
        for row, found in figures.items():
            if partition not in found:
                continue
            relative = pmm(found[partition], figures["none"][partition])
            error = np.std(relative, ddof=1) / len(relative) ** 0.5 if len(relative) > 1 else 0.0
            for who in ("attack", "known"):
                point = (np.mean(found[who]["psnr"]), np.mean(relative), error)
                curves.setdefault((row.split()[0], who), []).append(point)
        for color, name in enumerate(names):
            for who, title, style in (("attack", name, "o-"), ("known", None, "x--")):
                if points := curves.get((name, who)):
                    x, y, errors = zip(*sorted(points), strict=True)
                    look = {"fmt": style, "color": f"C{color}", "capsize": 2, "label": title}
                    axes.errorbar(x, y, errors, **look)
        axes.set(title=partition, xlabel="PSNR of Inverting Gradients in dB (left: hidden)")
    panels[0].set(ylabel="PMM in % (up: useful)")
    handles, titles = panels[0].get_legend_handles_labels()
    figure.legend(handles, titles, loc="outside right upper", title="dashed: known")
    save(figure, output, dpi=110)
