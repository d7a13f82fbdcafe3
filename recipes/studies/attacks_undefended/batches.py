r"""Images in batches, on networks of other kinds.

    python -m recipes.studies.attacks_undefended.run batches --cifar10 LOSSLESS.npz \
        --output docs/results/undefended_batches

The first images of the file, as many as the batch has, and of single ones the first four. Random
networks at 32 pixels: the leakage papers' LeNet, a residual network with its batch normalization in
evaluation and in training mode, and a vision transformer of 16 patches. Labels are known.
Inverting Gradients by its plain name, and of single images also with the published settings but for
1,200 steps: as many evaluations as L-BFGS has at most. PSNR and SSIM with 95 % bootstrap intervals
over images. Half an hour of one core.
"""

import time

import torch
from transformers import (
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.metrics import score_images

from ..lib.images import lenet_for, single_images
from ..lib.tables import bracketed, summary, write_table
from .settings import NETWORKS, PUBLISHED_STEPS, QUICK_BATCHES, SINGLE

ARGUMENTS = {"--cifar10": "npz with x (N, 32, 32, 3) and y"}
SCORES = ("psnr", "ssim")


def cells(args) -> dict:
    single = 1 if args.quick else SINGLE
    networks = dict.fromkeys(NETWORKS, QUICK_BATCHES) if args.quick else NETWORKS
    fast = {"steps": 1} if args.quick else {}
    published = {"steps": PUBLISHED_STEPS} | fast
    found = {}

    def add(network: str, size: int, attack: str, settings: dict) -> None:
        found[f"{network}, {size}", attack] = {
            "network": network,
            "batch": size,
            "messages": single if size == 1 else 1,
            "attack": attack,
            "settings": settings,
            "seed": 0,
        }

    for size in (1, *max(networks.values(), key=len)):
        add("any network", size, "gray", {})
    for network, sizes in networks.items():
        for size in (1, *sizes):
            add(network, size, "inverting_gradients", fast)
        add(network, 1, "inverting_gradients_published", published)
    add("ViT", 1, "analytic", {})
    return found


def prepare(args):
    torch.set_num_threads(1)

    def measure(cell: dict) -> dict:
        size, count = cell["batch"], cell["messages"]
        images = single_images(args.cifar10, size * count)
        batches = [
            {key: torch.cat([one[key] for one in images[at:][:size]]) for key in images[0]}
            for at in range(0, size * count, size)
        ]
        truth = [batch["pixel_values"] for batch in batches]
        if cell["attack"] == "gray":
            return summary(score_images([torch.full_like(x, 0.5) for x in truth], truth), SCORES)
        set_seed(cell["seed"])
        model, shape = network_of(cell["network"], batches[0]), tuple(truth[0].shape)
        seen = [
            Observation(model, GradientMap(model, one).gradient(), shape, labels=one["labels"])
            for one in batches
        ]
        attack, started = make_attack(cell["attack"], **cell["settings"]), time.perf_counter()
        found = [
            attack(one, torch.Generator().manual_seed(number)) for number, one in enumerate(seen)
        ]
        seconds = time.perf_counter() - started
        scores = score_images([one.input.nan_to_num(0.5) for one in found], truth)
        return {
            **summary(scores, SCORES),
            "evaluations": sum(len(one.history) for one in found) / count,
            "seconds": round(seconds / count, 1),
        }

    return measure


def network_of(name: str, batch: dict) -> torch.nn.Module:
    """Random weights from the global generator."""
    if name == "LeNet":
        return lenet_for(batch)
    if name == "ViT":
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"intermediate_size": 128, "image_size": 32, "patch_size": 8}
        return ViTForImageClassification(ViTConfig(**sizes, num_labels=10)).eval()
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 32, 64], "depths": [1, 1, 1]}
    config = ResNetConfig(**sizes, layer_type="basic", num_labels=10)
    return ResNetForImageClassification(config).train(name == "ResNet in training mode")


def report(figures: dict, args) -> None:
    rows = []
    for place, attacks in figures.items():
        for attack, found in attacks.items():
            scores = [bracketed(found[name], ".3g") for name in SCORES]
            cost = f"{found['evaluations']:.0f}" if "evaluations" in found else ""
            rows.append([place, attack, *scores, cost])
    write_table(args.output, ["network, images", "attack", *SCORES, "evaluations"], rows)
