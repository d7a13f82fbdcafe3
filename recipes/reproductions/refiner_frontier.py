"""Refiner against the other defences on CIFAR-10: what each strength costs in accuracy, and what it hides.

    python recipes/reproductions/refiner_frontier.py --train TRAIN.parquet --test TEST.parquet --images LOSSLESS.npz \
        --evaluation_network NETWORK --partition iid --output docs/results/refiner_frontier
    (the same with --partition dirichlet)

After Tables 5 and 6 and the PMM-PSNR curves of the Refiner paper (2025), with the federation, the attack and the cuts of
refiner_ablations.py: 500 rounds instead of 8,000, two of ten clients a round, 16 images each. Partition "dirichlet" has parameter
1. PMM is the accuracy relative to that without a defence, same seed and partition; PSNR is at the initial weights.

Keeps each run as OUTPUT/PARTITION ROW-seedN.json (those that exist are not run again), prints the table, and draws the curves.
"""

import argparse
import json
import statistics
from pathlib import Path

import numpy as np
import torch
from matplotlib import pyplot as plt
from refiner_ablations import CLIENTS, accuracy, as_tensors, attack, interval

from hf_gradguard import make_defense
from hf_gradguard.clients import partition_dirichlet

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True, help="parquet with img and label, to train on")
    parser.add_argument("--test", required=True, help="the same, for the accuracy")
    parser.add_argument("--images", required=True, help="npz with x (N, 32, 32, 3) and y: images to attack")
    parser.add_argument("--evaluation_network", required=True)
    parser.add_argument("--partition", choices=("iid", "dirichlet"), default="iid")
    parser.add_argument("--defenses", nargs="+", default=list(STRENGTHS), choices=STRENGTHS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--attacked", type=int, default=16, help="images to attack")
    parser.add_argument("--attack_steps", type=int, default=60, help="steps of L-BFGS")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    train, test = as_tensors(args.train), as_tensors(args.test)
    with np.load(args.images) as file:
        images = torch.from_numpy(file["x"][: args.attacked]).permute(0, 3, 1, 2).float() / 255
        labels = torch.from_numpy(file["y"][: args.attacked]).long()
    rows = [("none", {})] + [(name, settings) for name in args.defenses for settings in STRENGTHS[name]]
    for seed in args.seeds:
        draw = torch.Generator().manual_seed(seed)
        parts = torch.randperm(len(train[0]), generator=draw).chunk(CLIENTS)
        if args.partition == "dirichlet":
            generator = np.random.default_rng(seed)
            parts = [torch.from_numpy(p) for p in partition_dirichlet(train[1].numpy(), CLIENTS, 1.0, generator)]
        for name, settings in rows:
            path = args.output / f"{args.partition} {label(name, settings)}-seed{seed}.json"
            if path.exists():
                continue
            network = {"evaluation_network": args.evaluation_network} if name == "refiner" else {}
            defense = make_defense(name, **settings, **network)
            draw.manual_seed(seed + 2000)  # the same clients and images for every row
            reached = accuracy(defense, seed, train, test, parts, draw, args.rounds)
            report = {"accuracy": reached, "rounds": args.rounds}
            if seed == args.seeds[0]:
                report |= attack(defense, seed, images, labels, args.attack_steps)
            path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    show(args.output, args.partition, rows)


def label(name: str, settings: dict) -> str:
    return " ".join([name, *(f"{key}={value}" for key, value in settings.items() if key != "refresh_every")])


def show(folder: Path, partition: str, rows: list) -> None:
    """The table, and PMM over PSNR as a picture."""

    def runs(name: str, settings: dict) -> list[dict]:
        return [
            json.loads(p.read_text()) for p in sorted(folder.glob(f"{partition} {label(name, settings)}-seed*.json"))
        ]

    plain, curves = runs("none", {}), {}
    print("| | PMM | accuracy | PSNR | cosine |\n|---|---|---|---|---|")
    for name, settings in rows:
        mine = runs(name, settings)
        pmm = [100 * one["accuracy"] / other["accuracy"] for one, other in zip(mine, plain, strict=False)]
        curves.setdefault(name, []).append((statistics.mean(mine[0]["psnr"]), statistics.mean(pmm)))
        cells = [interval(pmm), interval([100 * one["accuracy"] for one in mine]), interval(mine[0]["psnr"])]
        print(f"| {label(name, settings)} | " + " | ".join([*cells, f"{mine[0]['cosine']:.3f}"]) + " |")
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for name, points in curves.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    axes.set(xlabel="PSNR of Inverting Gradients in dB (left: hidden)", ylabel="PMM in % (up: useful)", title=partition)
    axes.legend(fontsize=8)
    figure.savefig(f"{folder}_{partition}.png", dpi=110)


if __name__ == "__main__":
    main()
