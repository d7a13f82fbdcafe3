"""Refiner's ablations on CIFAR-10 with the leakage papers' LeNet: what each setting costs and what it hides.

    python recipes/train_evalnets.py image --data tinyimagenet32_10k_2k.npz --filters 32 64 128 --output NETWORK
    python recipes/reproductions/refiner_ablations.py --train TRAIN.parquet --test TEST.parquet --images LOSSLESS.npz \
        --evaluation_network NETWORK --output docs/results/refiner_ablations

After Tables 7, 8 and 10 and Appendix J of the Refiner paper (2025). Ten clients with equal shares of the training images; two,
drawn at random, answer each round with a protected gradient of 16 images; the server averages and takes a step of Adam. PMM is
the accuracy relative to that without a defence, same seed. PSNR is what Inverting Gradients (cosine, total variation, L-BFGS)
makes of single lossless images' protected gradients at the initial weights; the label is read off the gradient.
"""

import argparse
import copy
import statistics
from collections.abc import Sequence

import numpy as np
import torch
from datasets import load_dataset
from lenet import single_images
from reporting import Results, interval, parser_of, write_table
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
}
PAPER = {  # PMM and PSNR of Tables 7, 8 and 10
    "none": (100, ""), "alpha=0.0": (98.52, 21.24), "alpha=0.1": (95.45, 16.52), "alpha=0.3": (92.61, 14.99),
    "alpha=0.5": (90.69, 13.20), "alpha=0.7": (90.08, 12.53), "alpha=0.9": (89.34, 10.52), "tau=0.91": (90.98, 12.93),
    "tau=0.93": (90.82, 13.05), "tau=0.97": (90.46, 13.25), "tau=1.0": (89.28, 15.44), "element_wise=False": (85.32, 13.15),
}  # fmt: skip
FULL = {"seeds": 3, "rounds": 500, "attacked": 16, "attack_steps": 60}
QUICK = {"seeds": 2, "rounds": 1, "attacked": 2, "attack_steps": 1}


def main() -> None:
    parser = federation_parser(__doc__)
    args = parser.parse_args()
    rows = dict(list(ROWS.items())[::6]) if args.quick else ROWS
    plan = {"rows": rows} | (QUICK if args.quick else FULL)
    train, test, attacked = federation_data(args, plan)
    results = Results(args.output, plan)
    for seed in range(plan["seeds"]):
        for row, settings in rows.items():
            if "epsilon" in row and seed:  # one seed: what these rows show is their PSNR
                continue
            network = {} if row == "none" else {"evaluation_network": args.evaluation_network}
            defense = make_defense("none" if row == "none" else "refiner", **settings, **network)
            draw = torch.Generator().manual_seed(seed)
            parts = torch.randperm(len(train[0]), generator=draw).chunk(CLIENTS)
            results.get((row, "accuracy", str(seed)), accuracy, defense, seed, train, test, parts, draw, plan["rounds"])
            if seed == 0:
                results.get((row, "attack"), attack, defense, attacked, plan["attack_steps"])
    header = ["", "PMM", "accuracy", "PSNR", "cosine", "distance to the true gradient", "paper: PMM", "paper: PSNR"]
    write_table(
        args.output, header, [[row, *cells, *PAPER.get(row, ("", ""))] for row, cells in scores(results.figures)]
    )


def federation_parser(description: str | None) -> argparse.ArgumentParser:
    parser = parser_of(description)
    parser.add_argument("--train", required=True, help="parquet with img and label, to train on")
    parser.add_argument("--test", required=True, help="the same, for the accuracy")
    parser.add_argument("--images", required=True, help="npz with x (N, 32, 32, 3) and y: images to attack")
    parser.add_argument("--evaluation_network", required=True, help="a smaller one trains faster; see docs/results.md")
    return parser


def federation_data(args: argparse.Namespace, plan: dict) -> tuple[tuple, tuple, list[dict[str, Tensor]]]:
    """What is trained on, what is tested on, and what is attacked."""
    return as_tensors(args.train), as_tensors(args.test), single_images(args.images, plan["attacked"])


def as_tensors(path: str) -> tuple[Tensor, Tensor]:
    data = load_dataset("parquet", data_files=path, split="train")
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in data["img"]]))
    return pixels.permute(0, 3, 1, 2), torch.tensor(data["label"])


def lenet(seed: int) -> LeakageLeNetForImageClassification:
    set_seed(seed)
    return LeakageLeNetForImageClassification(LeakageLeNetConfig()).eval()


def accuracy(
    defense, seed: int, train: tuple, test: tuple, parts: Sequence, draw: torch.Generator, rounds: int
) -> float:
    """Test accuracy after so many rounds, in each of which some clients answer; `parts` are the clients' rows."""
    model, noise = lenet(seed), torch.Generator().manual_seed(seed + 1000)
    defenses = [copy.deepcopy(defense) for _ in parts]  # what one remembers is of its client's batches
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / rounds)
    for _ in logging.tqdm(range(rounds), desc=f"{defense.name}, seed {seed}"):
        optimizer.zero_grad()
        for client in torch.randperm(CLIENTS, generator=draw)[:DRAWN]:
            rows = parts[client][torch.randint(len(parts[client]), (BATCH,), generator=draw)]
            batch = {"pixel_values": train[0][rows].float() / 255, "labels": train[1][rows]}
            gmap = GradientMap(model, batch, second_order=defense.needs_jacobian)
            shared = defenses[client](gmap, generator=noise)
            for name, parameter in model.named_parameters():
                mine = shared[name] / DRAWN
                parameter.grad = mine if parameter.grad is None else parameter.grad + mine
        optimizer.step()
        schedule.step()
    return tested(model, test)


def tested(model, test: tuple) -> float:
    """Accuracy on test images."""
    with torch.no_grad():
        right = [
            model(x.float() / 255).logits.argmax(1) == y for x, y in zip(*(t.split(500) for t in test), strict=True)
        ]
    return float(torch.cat(right).float().mean())


def attack(defense, batches: list[dict[str, Tensor]], steps: int) -> dict:
    """Scores of the reconstructions, and what the defence did to the gradients that they are from."""
    model = lenet(seed=0)
    settings = {"optimizer": "lbfgs", "learning_rate": 1.0, "schedule": "constant", "signed": False, "start": "uniform"}
    inverting = make_attack("inverting_gradients", total_variation=1e-5, steps=steps, **settings)
    found, cosines, distances, norms = [], [], [], []
    images = [batch["pixel_values"] for batch in batches]
    for number, batch in enumerate(batches):
        gmap = GradientMap(model, batch)
        generator = torch.Generator().manual_seed(number)
        shared = copy.deepcopy(defense)(gmap, generator=generator)
        true, sent = (torch.cat([t.flatten() for t in g.values()]) for g in (gmap.gradient(), shared))
        cosines.append(float(torch.nn.functional.cosine_similarity(true, sent, dim=0)))
        distances.append(float((true - sent).norm()))
        norms.append(float(true.norm()))
        seen = Observation(model=model, gradient=shared, input_shape=tuple(images[0].shape))
        found.append(inverting(seen, generator=generator).input)
    psnr = score_images(found, images).per_sample["psnr"]
    means = {"cosine": cosines, "distance": distances, "norm": norms}
    return {"psnr": psnr, **{name: statistics.mean(values) for name, values in means.items()}}


def pmm(figures: dict, row: str) -> list[float]:
    """Accuracies relative to those without a defence, in %, seed by seed."""
    plain = figures["none"]["accuracy"]
    return [100 * one / plain[seed] for seed, one in figures[row]["accuracy"].items()]


def scores(figures: dict) -> list[tuple[str, list[str]]]:
    """Cells of PMM, accuracy, PSNR, cosine and distance for every row."""
    rows = []
    for row, found in figures.items():
        cells = [interval(pmm(figures, row), 0), interval([100 * one for one in found["accuracy"].values()], 1)]
        cells.append(interval(found["attack"]["psnr"], 1))
        cells += [f"{found['attack']['cosine']:.3f}", f"{found['attack']['distance']:.2f}"]
        rows.append((row, cells))
    return rows


if __name__ == "__main__":
    main()
