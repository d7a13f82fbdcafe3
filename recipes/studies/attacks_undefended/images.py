r"""Images on the leakage papers' LeNet.

    python -m recipes.studies.attacks_undefended.run images --cifar10 LOSSLESS.npz \
        --mnist MNIST.npz --output docs/results/undefended_images

The first 16 of each file, one a gradient, initial weights, labels read off the gradient. Means with
95 % bootstrap intervals. Half an hour of one core.
"""

import functools

import torch
from transformers import set_seed

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation, recover_labels
from hf_gradguard.metrics import score_images

from ..lib.attacks import attack_of
from ..lib.images import SINGLE_IMAGES, lenet_for, single_images
from ..lib.tables import bracketed, summary, write_table
from .settings import DATA, FULL, IMAGES, QUICK

ARGUMENTS = SINGLE_IMAGES
SCORES = ("psnr", "ssim")


def cells(args) -> dict:
    size, fast = (QUICK, {"steps": 1}) if args.quick else (FULL, {})
    return {
        (f"{data}, {row}",): {
            "data": data,
            "attack": row.split(",")[0],
            "settings": settings | fast,
            "samples": size["images"],
            "seed": 0,
        }
        for data in DATA
        for row, settings in IMAGES.items()
    }


def prepare(args):
    @functools.cache
    def observed(data: str, samples: int) -> tuple[list[dict], list[Observation]]:
        batches = single_images(getattr(args, data), samples)
        set_seed(0)
        model = lenet_for(batches[0])
        shape = tuple(batches[0]["pixel_values"].shape)
        gradients = [GradientMap(model, batch).gradient() for batch in batches]
        return batches, [Observation(model, one, input_shape=shape) for one in gradients]

    def measure(cell: dict) -> dict:
        batches, seen = observed(cell["data"], cell["samples"])
        attack = attack_of(cell["attack"], **cell["settings"])
        found = attack.together(seen, torch.Generator().manual_seed(cell["seed"]))
        right = [
            bool((recover_labels(one) == batch["labels"]).all())
            for one, batch in zip(seen, batches, strict=True)
        ]
        truth = [batch["pixel_values"] for batch in batches]
        scores = score_images([one.input for one in found], truth)
        return {
            **summary(scores, SCORES),
            "labels right": sum(right) / len(right),
            "psnr of each": [round(value, 2) for value in scores.per_sample["psnr"]],
        }

    return measure


def report(figures: dict, args) -> None:
    show(figures, SCORES, args.output)


def show(figures: dict, scores: tuple[str, ...], output) -> None:
    """The table of both parts."""
    rows = [
        [row, *(bracketed(found[name], ".3g") for name in scores), f"{found['labels right']:.0%}"]
        for row, found in figures.items()
    ]
    write_table(output, ["", *scores, "labels read off the gradient"], rows)
