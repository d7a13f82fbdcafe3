r"""Refiner's ablations on CIFAR-10 with the leakage papers' LeNet: what each setting costs and what
it hides.

    python -m recipes.studies.evaluation_networks.train image \
        --data tinyimagenet32_10k_2k.npz --filters 32 64 128 --output NETWORK
    python -m recipes.studies.refiner.run ablations --train TRAIN.parquet --test TEST.parquet \
        --images LOSSLESS.npz --evaluation_network NETWORK --output docs/results/refiner_ablations

After Tables 5 to 8 and 10 and Appendix J of the Refiner paper (2025), in the federation of
federation.py: PMM with 95 % t-intervals over seeds (rows of ε, and 20 iterations: one seed), PSNR
with those over images. About six hours of one core.
"""

from ..lib.tables import interval, write_table
from .federation import ARGUMENTS, attack, learning, pmm, prepare
from .settings import ABLATIONS, ONE_SEED, PAPER_ABLATIONS, QUICK_ABLATIONS, QUICK_SEEDS, SEEDS

__all__ = ["ARGUMENTS", "cells", "prepare", "report"]


def cells(args) -> dict:
    quick, found = args.quick, {}
    for row in QUICK_ABLATIONS if quick else ABLATIONS:
        defended = ("none" if row == "none" else "refiner", ABLATIONS[row])
        found[row, "attack"] = attack(quick, *defended)
        seeds = 1 if row.startswith(ONE_SEED) else QUICK_SEEDS if quick else SEEDS
        for seed in range(seeds):
            found[row, "accuracy", str(seed)] = learning(quick, *defended, "iid", seed)
    return found


def report(figures: dict, args) -> None:
    table: list[list[object]] = []
    for row, found in figures.items():
        learned, attacked = found["accuracy"], found["attack"]
        shown = [interval(pmm(learned, figures["none"]["accuracy"]), 0)]
        shown += [interval([100 * one for one in learned.values()], 1)]
        shown += [interval(attacked["psnr"], 1)]
        shown += [f"{attacked['cosine']:.3f}", f"{attacked['distance']:.2f}"]
        table.append([row, *shown, *PAPER_ABLATIONS.get(row, ("", ""))])
    header = ["", "PMM", "accuracy", "PSNR", "cosine", "distance to the true gradient"]
    write_table(args.output, [*header, "paper: PMM", "paper: PSNR"], table)
