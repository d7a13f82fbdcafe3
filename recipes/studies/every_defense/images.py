r"""Every defense against attacks on images.

    python -m recipes.studies.evaluation_networks.train image \
        --data tinyimagenet32_10k_2k.npz --filters 32 64 128 --output NETWORK
    python -m recipes.studies.every_defense.run images --images LOSSLESS.npz \
        --evaluation_network NETWORK --output docs/results/image_defenses

The first 16 images of the file, one per message, on the leakage papers' LeNet as it is initialized;
labels read off the gradient. Budgets are such that undefended gradients give the image away, and
the same for every defense. The adaptive attacker takes the mean of eight uploads of the batch where
there is fresh noise, and weighs coordinates by its covariance where that is not the same
everywhere; matches only what a pruning left; leaves out Soteria's layer; starts four times over
against Refiner. Behind whatever defense, Inverting Gradients then takes the total variation that
shows most of images of the attacker's own, the next 4 of the file. Both attacks stop when so many
steps of L-BFGS (20 evaluations each) brought no better match: under noise, going on fits it.

PSNR with 95 % bootstrap intervals. About four hours of one core.
"""

import torch
from transformers import set_seed

from hf_gradguard import GradientMap
from hf_gradguard.metrics import score_images

from ..lib.attacks import attack_of
from ..lib.defenses import published
from ..lib.images import lenet_for, single_images, smoothed
from ..lib.tables import summary
from .attackers import cells_of, present, quickly, share
from .settings import IMAGES

ARGUMENTS = {"--images": "npz with x (N, 32, 32, 3) and y", "--evaluation_network": "Refiner's"}


def plan(args) -> dict:
    return quickly(IMAGES) if args.quick else IMAGES


def cells(args) -> dict:
    samples = plan(args)["samples"]
    chance = {"attack": "gray", "samples": samples["samples"]}
    return {("chance", "inverting_gradients"): chance} | cells_of(plan(args))


def prepare(args):
    torch.set_num_threads(1)
    set_seed(0)
    count, own = (plan(args)["samples"][name] for name in ("samples", "own"))
    batches = single_images(args.images, count + own)
    model, images = lenet_for(batches[0]), [batch["pixel_values"] for batch in batches]
    maps = [GradientMap(model, batch) for batch in batches]
    grants = {"input_shape": tuple(images[0].shape)}

    def measure(cell: dict) -> dict:
        if cell["attack"] == "gray":
            return scored([torch.full_like(image, 0.5) for image in images[:count]])
        network = {}
        if cell["defense"] == "refiner":
            network = {"evaluation_network": args.evaluation_network}
        made = published(cell["defense"], **cell["strength"], **network)
        seen = [
            share(model, gmap, made, number, grants, **cell["seen"])
            for number, gmap in enumerate(maps)
        ]
        settings = smoothed(cell["settings"], seen[count:], images[count:])
        attack = attack_of(cell["attack"], **settings)
        found = attack.together(seen[:count], torch.Generator().manual_seed(cell["seed"]))
        weight = {name: value for name, value in settings.items() if name == "total_variation"}
        return scored([one.input.nan_to_num(0.5) for one in found]) | weight

    def scored(guesses: list) -> dict:
        return summary(score_images(guesses, images[:count]), ("psnr", "ssim"))

    return measure


def report(figures: dict, args) -> None:
    chance = figures.pop("chance")["inverting_gradients"]["psnr"]
    present(plan(args), figures, chance, "psnr", 1, args.output)
