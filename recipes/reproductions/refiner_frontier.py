"""Refiner against the other defences on CIFAR-10: what each strength costs in accuracy, and what it hides.

    python recipes/reproductions/refiner_frontier.py --train TRAIN.parquet --test TEST.parquet --images LOSSLESS.npz \
        --evaluation_network NETWORK --partition iid --output docs/results/refiner_frontier_iid
    (the same with --partition dirichlet and refiner_frontier_dirichlet)

After Tables 5 and 6 and the PMM-PSNR curves of the Refiner paper (2025), with the federation, the attack and the cuts of
refiner_ablations.py: 500 rounds instead of 8,000, two of ten clients a round, 16 images each. Partition "dirichlet" has parameter
1. PMM is the accuracy relative to that without a defence, same seed and partition; PSNR is at the initial weights. Soteria, which
takes a second and a half a message, has one seed.
"""

import matplotlib
import numpy as np
import torch
from refiner_ablations import CLIENTS, FULL, QUICK, accuracy, attack, federation_data, federation_parser, pmm, scores
from reporting import Results, named, write_table

from hf_gradguard import make_defense
from hf_gradguard.clients import partition_dirichlet

matplotlib.use("agg")
from matplotlib import pyplot as plt

STRENGTHS = {
    "refiner": [{"alpha": a} for a in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)],
    "gaussian_noise": [{"relative_scale": s} for s in (0.01, 0.03, 0.1, 0.3, 1.0)],
    "laplace_noise": [{"relative_scale": s} for s in (0.01, 0.03, 0.1, 0.3, 1.0)],
    "optimal_noise": [{"relative_scale": s, "refresh_every": 10} for s in (0.03, 0.1, 0.3)],
    "pruning": [{"ratio": r} for r in (0.5, 0.7, 0.9, 0.99)],
    "quantization": [{"bits": b} for b in (8, 4, 2)],
    "soteria": [{"ratio": r} for r in (0.3, 0.5, 0.8)],
}


def main() -> None:
    parser = federation_parser(__doc__)
    parser.add_argument("--partition", choices=("iid", "dirichlet"), default="iid")
    args = parser.parse_args()
    rows = {"none": ("none", {})}
    for name, strengths in STRENGTHS.items():
        rows |= {label(name, strength): (name, strength) for strength in strengths[: 1 if args.quick else None]}
    plan = {"rows": rows, "partition": args.partition} | (QUICK if args.quick else FULL)
    train, test, attacked = federation_data(args, plan)
    results = Results(args.output, plan)
    for seed in range(plan["seeds"]):
        draw = torch.Generator().manual_seed(seed)
        parts = torch.randperm(len(train[0]), generator=draw).chunk(CLIENTS)
        if args.partition == "dirichlet":
            generator = np.random.default_rng(seed)
            parts = [torch.from_numpy(p) for p in partition_dirichlet(train[1].numpy(), CLIENTS, 1.0, generator)]
        for row, (name, strength) in rows.items():
            if name == "soteria" and seed:
                continue
            network = {"evaluation_network": args.evaluation_network} if name == "refiner" else {}
            defense = make_defense(name, **strength, **network)
            draw.manual_seed(seed + 2000)  # the same clients and images for every row
            results.get((row, "accuracy", str(seed)), accuracy, defense, seed, train, test, parts, draw, plan["rounds"])
            if seed == 0:
                results.get((row, "attack"), attack, defense, attacked, plan["attack_steps"])
    header = ["", "PMM", "accuracy", "PSNR", "cosine", "distance to the true gradient"]
    write_table(args.output, header, [[row, *cells] for row, cells in scores(results.figures)])
    plot(results.figures, rows, args)


def label(name: str, strength: dict) -> str:
    return " ".join([name, *(f"{key}={value}" for key, value in strength.items() if key != "refresh_every")])


def plot(figures: dict, rows: dict, args) -> None:
    """PMM over PSNR."""
    curves: dict[str, list] = {}
    for row, (name, _) in rows.items():
        mean = np.mean(pmm(figures, row))
        curves.setdefault(name, []).append((np.mean(figures[row]["attack"]["psnr"]), mean))
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for name, points in curves.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    axes.set(xlabel="PSNR of Inverting Gradients in dB (left: hidden)", ylabel="PMM in % (up: useful)")
    axes.set_title(args.partition)
    axes.legend(fontsize=8)
    figure.savefig(named(args.output, ".png"), dpi=110)


if __name__ == "__main__":
    main()
