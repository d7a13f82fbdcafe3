r"""What gradient matching reads from the change of a network's weights after several local steps,
with and without going through them.

    python -m recipes.studies.updates.run images --cifar10 CIFAR10.npz \
        --output docs/results/updates_images

A client has two images of CIFAR-10 and trains the leakage papers' LeNet (weights before training)
by an optimizer of torch for two epochs, one image a step. Inverting Gradients with L-BFGS (40
steps) matches the change of weights in float64, labels known: through all the steps in the client's
order; as if every step were on both images; and as if it were one gradient. Where the order is
shuffled the attacker assumes the order of the first epoch. PSNR in dB with 95 % bootstrap intervals
over three clients; images go to the nearer ones found. Half an hour of one core.
"""

import torch
from torch import Tensor
from transformers import set_seed

from hf_gradguard.attacks import Observation
from hf_gradguard.metrics import score_images

from ..lib.attacks import attack_of
from ..lib.images import INVERTING, lenet_for, single_images
from ..lib.tables import bracketed, summary, write_table
from .client import observed, train
from .settings import IMAGES, MATCHED, PAIRS, QUICK_IMAGES, QUICK_STEPS, STEPS

ARGUMENTS = {"--cifar10": "npz with x (N, 32, 32, 3) and y"}


def cells(args) -> dict:
    size = {"pairs": 1, "steps": QUICK_STEPS} if args.quick else {"pairs": PAIRS, "steps": STEPS}
    return {
        (name, column): row | {"matched": matched} | size
        for name, row in IMAGES.items()
        if name in QUICK_IMAGES or not args.quick
        for column, matched in MATCHED.items()
    }


def prepare(args):
    torch.set_num_threads(1)
    images = single_images(args.cifar10, 2 * PAIRS)
    return lambda cell: measure(cell, images)


def measure(cell: dict, images: list[dict[str, Tensor]]) -> dict:
    found, true = [], []
    for pair in range(cell["pairs"]):
        set_seed(pair)
        two = images[2 * pair : 2 * pair + 2]
        batch = {key: torch.cat([one[key] for one in two]) for key in two[0]}
        batch["pixel_values"] = batch["pixel_values"].double()
        model = lenet_for(batch).double()
        seen = seen_by(cell["matched"], model, train(model, batch, cell, pair), cell, batch)
        attack = attack_of("inverting_gradients", **INVERTING | {"steps": cell["steps"]})
        images_found = attack(seen, torch.Generator().manual_seed(pair)).input
        found += list(nearer(images_found, batch["pixel_values"])[:, None])
        true += list(batch["pixel_values"][:, None])
    return summary(score_images(found, true), ["psnr"])


def seen_by(matched: str, model, weights: tuple, cell: dict, batch: dict) -> Observation:
    grants = {"input_shape": tuple(batch["pixel_values"].shape), "labels": batch["labels"]}
    if matched == "one gradient":
        seen = observed(model, weights, cell, None, **grants)
        return Observation(model=model, gradient=seen.gradient, **grants)
    size = cell["size"] if matched == "steps" else None
    return observed(model, weights, cell, size, **grants)


def nearer(found: Tensor, true: Tensor) -> Tensor:
    """In the order of two images that fits better."""
    swapped = found.flip(0)
    return min((found, swapped), key=lambda some: float((some - true).square().sum()))


def report(figures: dict, args) -> None:
    rows = [
        [name, *(bracketed(row[column]["psnr"], ".1f") for column in MATCHED)]
        for name, row in figures.items()
    ]
    write_table(args.output, ["PSNR in dB", *MATCHED], rows)
