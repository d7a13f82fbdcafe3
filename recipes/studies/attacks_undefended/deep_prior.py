r"""Images drawn by an untrained network, against images that are smooth.

    python -m recipes.studies.attacks_undefended.run deep_prior --cifar10 LOSSLESS.npz \
        --output docs/results/undefended_deep_prior

The first four images of the file, one per message, on the leakage papers' LeNet at its initial
weights, labels known: undefended and behind Gaussian noise of a tenth of the gradient's norm and of
all of it. A deep image prior of 100 and of 500 steps, and Inverting Gradients with several weights
of total variation, one start each. PSNR with 95 % t-intervals over images, and of each number of
steps the difference from the weight with the highest mean, image by image; whoever attacks has to
find that weight and that number of steps. A quarter of an hour of one core.
"""

import time

import numpy as np
import torch
from transformers import set_seed

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.metrics import score_images
from hf_gradguard.randomness import Stream

from ..lib.images import lenet_for, single_images
from ..lib.tables import interval, write_table
from .settings import DEEP_STEPS, QUICK_SMOOTHED, SINGLE, SMOOTHED

ARGUMENTS = {"--cifar10": "npz with x (N, 32, 32, 3) and y"}
SMOOTH, DEEP = "total variation", "deep prior"


def cells(args) -> dict:
    images, fast = (2, {"steps": 1}) if args.quick else (SINGLE, {})
    found = {}
    for noise, weights in (QUICK_SMOOTHED if args.quick else SMOOTHED).items():
        rows = {
            f"{SMOOTH} {weight:g}": ("inverting_gradients", {"total_variation": weight} | fast)
            for weight in weights
        }
        for steps in DEEP_STEPS:
            settings = {"steps": steps // (100 if args.quick else 1)}
            rows[f"{DEEP}, {steps} steps"] = "deep_image_prior", settings
        for row, (attack, settings) in rows.items():
            found[f"{noise:g}", row] = {
                "noise": noise,
                "attack": attack,
                "settings": settings,
                "images": images,
                "seed": 0,
            }
    return found


def prepare(args):
    torch.set_num_threads(1)

    def measure(cell: dict) -> dict:
        batches = single_images(args.cifar10, cell["images"])
        set_seed(cell["seed"])
        model = lenet_for(batches[0])
        seen = [observed(model, batch, cell["noise"], k) for k, batch in enumerate(batches)]
        attack, started = make_attack(cell["attack"], **cell["settings"]), time.perf_counter()
        found = attack.together(seen, torch.Generator().manual_seed(cell["seed"]))
        seconds = time.perf_counter() - started
        scores = score_images(
            [one.input.nan_to_num(0.5) for one in found],
            [batch["pixel_values"] for batch in batches],
        )
        return {
            "psnr of each": [round(value, 2) for value in scores.per_sample["psnr"]],
            "evaluations": sum(len(one.history) for one in found) / len(found),
            "seconds": round(seconds / len(found), 1),
        }

    return measure


def observed(model: torch.nn.Module, batch: dict, noise: float, seed: int) -> Observation:
    """One image's message; noise of its own."""
    gmap = GradientMap(model, batch)
    shared = gmap.gradient()
    if noise:
        defense = make_defense("gaussian_noise", relative_scale=noise)
        shared = defense(gmap, generator=Stream.from_seeds(seed))
    return Observation(model, shared, tuple(batch["pixel_values"].shape), labels=batch["labels"])


def report(figures: dict, args) -> None:
    rows = []
    for noise, attacks in figures.items():
        psnr = {row: np.array(found["psnr of each"]) for row, found in attacks.items()}
        best = max(
            (row for row in psnr if row.startswith(SMOOTH)), key=lambda row: psnr[row].mean()
        )
        for row, found in attacks.items():
            beside = interval(psnr[row] - psnr[best], 1) if row.startswith(DEEP) else ""
            cost = [f"{found['evaluations']:.0f}", f"{found['seconds']:.0f}"]
            rows.append([noise, row, interval(psnr[row], 1), beside, *cost])
    header = ["noise", "", "PSNR, dB", f"less that of the best {SMOOTH}"]
    write_table(args.output, [*header, "evaluations", "seconds an image"], rows)
