"""Refiner's ablations on CIFAR-10 with the leakage papers' LeNet: what each setting costs and what it hides.

    python recipes/train_evalnets.py image --data tinyimagenet32_10k_2k.npz --filters 32 64 128 --output NETWORK
    python recipes/reproductions/refiner_ablations.py --train TRAIN.parquet --test TEST.parquet --images LOSSLESS.npz \
        --evaluation_network NETWORK --output docs/results/refiner_ablations

After Tables 7, 8 and 10 and Appendix J of the Refiner paper (2025). Ten clients with equal shares of the training images; two,
drawn at random, answer each round with a protected gradient of 16 images; the server averages and takes a step of Adam. PMM is
the accuracy relative to that without a defence, same seed. PSNR is what Inverting Gradients (cosine, total variation, L-BFGS)
makes of single lossless images' protected gradients at the initial weights; the label is read off the gradient.

Keeps each run as OUTPUT/ROW-seedN.json (those that exist are not run again) and prints the table.
"""

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from datasets import load_dataset
from torch import Tensor
from transformers import set_seed
from transformers.utils import logging

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.metrics import score_images
from hf_gradguard.models import LeakageLeNetConfig, LeakageLeNetForImageClassification

CLIENTS, DRAWN, BATCH, LEARNING_RATE = 10, 2, 16, 5e-3
BASE = {"alpha": 0.5}  # the paper's; beta 1, tau 0.95, ten iterations
ROWS: dict[str, dict] = {
    "none": {},
    **{f"alpha={a}": {"alpha": a} for a in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)},
    **{f"tau={t}": BASE | {"tau": t} for t in (0.91, 0.93, 0.97, 1.0)},
    "element_wise=False": BASE | {"element_wise": False},
    **{f"epsilon={e}": BASE | {"epsilon": e} for e in (0.05, 0.1, 1.0)},
    "packaged network": BASE | {"evaluation_network": "image-evaluation-network-32"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True, help="parquet with img and label, to train on")
    parser.add_argument("--test", required=True, help="the same, for the accuracy")
    parser.add_argument("--images", required=True, help="npz with x (N, 32, 32, 3) and y: images to attack")
    parser.add_argument("--evaluation_network", required=True, help="a smaller one trains faster; see docs/results.md")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--attacked", type=int, default=16, help="images to attack")
    parser.add_argument("--attack_steps", type=int, default=60, help="steps of L-BFGS")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    train, test = as_tensors(args.train), as_tensors(args.test)
    with np.load(args.images) as file:
        images = torch.from_numpy(file["x"][: args.attacked]).permute(0, 3, 1, 2).float() / 255
        labels = torch.from_numpy(file["y"][: args.attacked]).long()
    for seed in args.seeds:
        for row in args.rows:
            path = args.output / f"{row}-seed{seed}.json"
            if not path.exists():
                defense, draw = defense_of(args, row), torch.Generator().manual_seed(seed)
                parts = torch.randperm(len(train[0]), generator=draw).chunk(CLIENTS)
                reached = accuracy(defense, seed, train, test, parts, draw, args.rounds)
                report = {"accuracy": reached, "rounds": args.rounds}
                if seed == args.seeds[0]:
                    report |= attack(defense, seed, images, labels, args.attack_steps)
                path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(table(args.output))


def as_tensors(path: str) -> tuple[Tensor, Tensor]:
    data = load_dataset("parquet", data_files=path, split="train")
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in data["img"]]))
    return pixels.permute(0, 3, 1, 2), torch.tensor(data["label"])


def lenet(seed: int) -> LeakageLeNetForImageClassification:
    set_seed(seed)
    return LeakageLeNetForImageClassification(LeakageLeNetConfig()).eval()


def defense_of(args: argparse.Namespace, row: str):
    if row == "none":
        return make_defense("none")
    return make_defense("refiner", **{"evaluation_network": args.evaluation_network} | ROWS[row])


def accuracy(
    defense, seed: int, train: tuple, test: tuple, parts: Sequence, draw: torch.Generator, rounds: int
) -> float:
    """Test accuracy after so many rounds, in each of which some clients answer; `parts` are the clients' rows."""
    model, noise = lenet(seed), torch.Generator().manual_seed(seed + 1000)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / rounds)
    for _ in logging.tqdm(range(rounds), desc=f"{defense.name}, seed {seed}"):
        optimizer.zero_grad()
        for client in torch.randperm(CLIENTS, generator=draw)[:DRAWN]:
            rows = parts[client][torch.randint(len(parts[client]), (BATCH,), generator=draw)]
            batch = {"pixel_values": train[0][rows].float() / 255, "labels": train[1][rows]}
            shared = defense(GradientMap(model, batch, second_order=defense.needs_jacobian), generator=noise)
            for name, parameter in model.named_parameters():
                mine = shared[name] / DRAWN
                parameter.grad = mine if parameter.grad is None else parameter.grad + mine
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        right = [
            model(x.float() / 255).logits.argmax(1) == y for x, y in zip(*(t.split(500) for t in test), strict=True)
        ]
    return float(torch.cat(right).float().mean())


def attack(defense, seed: int, images: Tensor, labels: Tensor, steps: int) -> dict:
    """Scores of the reconstructions, and what the defence did to the gradients that they are from."""
    model = lenet(seed)
    settings = {"optimizer": "lbfgs", "learning_rate": 1.0, "schedule": "constant", "signed": False, "start": "uniform"}
    inverting = make_attack("inverting_gradients", total_variation=1e-5, steps=steps, **settings)
    found, cosines, distances, norms = [], [], [], []
    for number, (image, label) in enumerate(zip(images.split(1), labels.split(1), strict=True)):
        gmap = GradientMap(model, {"pixel_values": image, "labels": label})
        generator = torch.Generator().manual_seed(number)
        shared = defense(gmap, generator=generator)
        true, sent = (torch.cat([t.flatten() for t in g.values()]) for g in (gmap.gradient(), shared))
        cosines.append(float(torch.nn.functional.cosine_similarity(true, sent, dim=0)))
        distances.append(float((true - sent).norm()))
        norms.append(float(true.norm()))
        seen = Observation(model=model, gradient=shared, input_shape=(1, *images.shape[1:]))
        found.append(inverting(seen, generator=generator).input)
    psnr = score_images(found, list(images.split(1))).per_sample["psnr"]
    means = {"cosine": cosines, "distance": distances, "norm": norms}
    return {"psnr": psnr, **{name: statistics.mean(values) for name, values in means.items()}}


def table(folder: Path) -> str:
    runs = {row: [json.loads(p.read_text()) for p in sorted(folder.glob(f"{row}-seed*.json"))] for row in ROWS}
    lines = ["| | PMM | accuracy | PSNR | cosine | distance |", "|---|---|---|---|---|---|"]
    for row, mine in runs.items():
        if not mine:
            continue
        pmm = [100 * one["accuracy"] / plain["accuracy"] for one, plain in zip(mine, runs["none"], strict=False)]
        cells = [interval(pmm), interval([100 * one["accuracy"] for one in mine]), interval(mine[0]["psnr"])]
        cells += [f"{mine[0]['cosine']:.3f}", f"{mine[0]['distance']:.2f} of {mine[0]['norm']:.2f}"]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def interval(values: list[float]) -> str:
    """Mean and 95 % interval (Student's t for few seeds)."""
    if len(values) < 2:
        return f"{values[0]:.1f}"
    t = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}.get(len(values), 2.0)
    return f"{statistics.mean(values):.1f} ± {t * statistics.stdev(values) / math.sqrt(len(values)):.1f}"


if __name__ == "__main__":
    main()
