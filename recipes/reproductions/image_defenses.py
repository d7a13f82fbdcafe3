"""Every defence at three strengths against attacks on images, and against attackers who know the defence.

    python recipes/train_evalnets.py image --data tinyimagenet32_10k_2k.npz --filters 32 64 128 --output NETWORK
    python recipes/reproductions/image_defenses.py --images LOSSLESS.npz --evaluation_network NETWORK \
        --output docs/results/image_defenses.json

The first 16 images of the file, one a message, on the leakage papers' LeNet at its initial weights; labels read off the
gradient. Budgets are such that undefended gradients give the image away, and the same for every defence. The adaptive attacker
takes the mean of eight uploads of the batch where there is fresh noise, and weighs coordinates by its covariance where that is
not the same everywhere; matches only what a pruning left; leaves out soteria's layer; starts four times over against refiner.

PSNR with 95 % bootstrap intervals. Run again, it goes on with what is missing, then prints the table.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from transformers import set_seed
from transformers.utils import logging

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Observation, average, make_attack
from hf_gradguard.metrics import score_images
from hf_gradguard.models import LeakageLeNetConfig, LeakageLeNetForImageClassification

POWER, SHARE = [{"relative_scale": s} for s in (0.01, 0.1, 1.0)], [{"ratio": r} for r in (0.5, 0.9, 0.99)]
DEFENSES = {
    "none": [{}],
    "gaussian_noise": POWER,
    "laplace_noise": POWER,
    "optimal_noise": POWER,
    "dp_sgd": [{"clip": 1.0, **p} for p in POWER],
    "optimal_dp_sgd": [{"clip": 0.01, **p} for p in POWER],
    "pruning": SHARE,
    "optimal_pruning": SHARE,
    "quantization": [{"bits": b} for b in (8, 4, 2)],
    "soteria": SHARE,
    "refiner": [{"alpha": a} for a in (0.1, 0.5, 0.9)],
}
LBFGS = {"optimizer": "lbfgs", "learning_rate": 1.0, "schedule": "constant", "start": "uniform"}
ATTACKS = {
    "inverting_gradients": {"steps": 60, "signed": False, "total_variation": 1e-5, **LBFGS},
    "idlg": {"steps": 60, "start": "uniform"},
}
NOISE, UPLOADS = ("gaussian_noise", "laplace_noise", "optimal_noise", "dp_sgd", "optimal_dp_sgd"), 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", required=True, help="npz with x (N, 32, 32, 3) and y")
    parser.add_argument("--evaluation_network", required=True, help="refiner's")
    parser.add_argument("--defenses", nargs="+", default=list(DEFENSES), choices=DEFENSES)
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=ATTACKS)
    parser.add_argument("--adaptive", nargs="+", type=int, default=[0, 1], choices=[0, 1])
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    set_seed(args.seed)
    model = LeakageLeNetForImageClassification(LeakageLeNetConfig()).eval()
    with np.load(args.images) as file:
        images = (torch.from_numpy(file["x"][: args.samples]).permute(0, 3, 1, 2).float() / 255).split(1)
        labels = torch.from_numpy(file["y"][: args.samples]).long().split(1)
    maps = [GradientMap(model, {"pixel_values": x, "labels": y}) for x, y in zip(images, labels, strict=True)]

    def share(number: int, defense: str, strength: dict, uploads: int = 1, covariance: bool = False) -> Observation:
        """What the server sees of an image: the mean of so many uploads, and the noise's covariance if it knows it."""
        network = {"evaluation_network": args.evaluation_network} if defense == "refiner" else {}
        made, gmap = make_defense(defense, **strength, **network), maps[number]
        generator, grants = torch.Generator().manual_seed(1000 + number), {"input_shape": tuple(images[0].shape)}
        if covariance:
            gradient = made.clipped(gmap.gradient())
            grants["noise_variance"] = made.variance(gradient, made.shape(gmap, gradient, generator))
        return average([Observation(model, made(gmap, generator=generator), **grants) for _ in range(uploads)])

    def summary(found: list) -> dict:
        scores = score_images([image.nan_to_num(0.5).clamp(0, 1) for image in found], list(images))
        return {name: [round(v, 4) for v in (scores.mean[name], *scores.interval[name])] for name in ("psnr", "ssim")}

    report = json.loads(args.output.read_text(encoding="utf-8")) if args.output.exists() else {}
    report["chance"] = {"inverting_gradients": summary([torch.full_like(image, 0.5) for image in images])}  # grey
    cells = [(a, b, c, d) for a in args.adaptive for b in args.attacks for c in args.defenses for d in DEFENSES[c]]
    for adaptive, attack, defense, strength in logging.tqdm(cells):
        row, column = (
            " ".join([defense, *map("{0[0]}={0[1]}".format, strength.items())]),
            attack + ", adaptive" * adaptive,
        )
        what_else = knowledge(defense) if adaptive else ({}, {})
        if column in report.get(row, {}) or what_else is None:
            continue
        seen = [share(number, defense, strength, **what_else[0]) for number in range(len(maps))]
        made, generator = (
            make_attack(attack, **ATTACKS[attack], **what_else[1]),
            torch.Generator().manual_seed(args.seed),
        )
        report.setdefault(row, {})[column] = summary([made(one, generator).input for one in seen])
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(report))


def knowledge(defense: str) -> tuple[dict, dict] | None:
    """What an attacker who knows the defence has seen, and how its attack is set; `None` if all is as before."""
    if defense in NOISE:
        return {"uploads": UPLOADS, "covariance": defense.startswith("optimal")}, {}
    return {
        "pruning": ({}, {"match_nonzero": True}),
        "optimal_pruning": ({}, {"match_nonzero": True}),
        "soteria": ({}, {"leave_out": ["classifier"]}),
        "refiner": ({}, {"restarts": 4}),
    }.get(defense)


def table(report: dict) -> str:
    columns = [attack + ", adaptive" * adaptive for attack in ATTACKS for adaptive in (0, 1)]
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row, cells in report.items():
        shown = [cells[column]["psnr"] if column in cells else None for column in columns]
        lines.append(
            f"| {row} | " + " | ".join(f"{v[0]:.1f} [{v[1]:.1f}, {v[2]:.1f}]" if v else "" for v in shown) + " |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
