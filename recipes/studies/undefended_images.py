"""What attacks recover of images from gradients that nobody defended."""

import functools
import time

import numpy as np
import torch
from transformers import ResNetConfig, ResNetForImageClassification, ViTConfig, set_seed
from transformers import ViTForImageClassification as ViT

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Observation, make_attack, recover_labels
from hf_gradguard.metrics import score_images
from hf_gradguard.randomness import Stream

from ..study import Study
from .lib.attacks import attack_of, observe
from .lib.images import INVERTING, SINGLE_IMAGES, lenet_for, single_images
from .lib.tables import bracketed, interval, summary, write_table

CIFAR10 = {"--cifar10": "npz with x (N, 32, 32, 3) and y"}
SCORES = ("psnr", "ssim")
SINGLE = 4  # single images that are attacked


class Images(Study):
    """Images on the leakage papers' LeNet.

    The first 16 of each file, one a gradient, initial weights, labels recovered from the gradient.
    Means with 95 % bootstrap intervals.
    """

    ARGUMENTS = SINGLE_IMAGES
    ATTACKS = {
        "dlg": {"steps": 100, "start": "uniform"},
        "idlg": {"steps": 100, "start": "uniform"},
        "inverting_gradients": {"steps": 100, **INVERTING},
        "inverting_gradients, as published": {"steps": 4800},
    }

    def cells(self) -> dict:
        samples, fast = (2, {"steps": 1}) if self.quick else (16, {})
        return {
            (f"{data}, {row}",): {
                "data": data, "attack": row.split(",")[0], "settings": settings | fast,
                "samples": samples, "seed": 0,
            }
            for data in ("cifar10", "mnist")
            for row, settings in self.ATTACKS.items()
        }  # fmt: skip

    def load(self) -> None:
        self.observed = functools.cache(self._observed)

    def _observed(self, data: str, samples: int) -> tuple[list[dict], list[Observation]]:
        batches = single_images(getattr(self.args, data), samples)
        set_seed(0)
        model, shape = lenet_for(batches[0]), tuple(batches[0]["pixel_values"].shape)
        gradients = [GradientMap(model, batch).gradient() for batch in batches]
        return batches, [Observation(model, g, input_shape=shape) for g in gradients]

    def measure(self, cell: dict) -> dict:
        batches, observations = self.observed(cell["data"], cell["samples"])
        attack = attack_of(cell["attack"], **cell["settings"])
        generator = torch.Generator().manual_seed(cell["seed"])
        reconstructions = attack.reconstruct_many(observations, generator)
        right = [
            bool((recover_labels(observation) == batch["labels"]).all())
            for observation, batch in zip(observations, batches, strict=True)
        ]
        truth = [batch["pixel_values"] for batch in batches]
        scores = score_images([guess.input for guess in reconstructions], truth)
        return {
            **summary(scores, SCORES),
            "labels right": sum(right) / len(right),
            "psnr of each": [round(value, 2) for value in scores.per_sample["psnr"]],
        }

    def report(self, metrics: dict) -> None:
        write_scores(metrics, SCORES, self.output)


def write_scores(metrics: dict, scores: tuple[str, ...], output) -> None:
    """Each row's scores with intervals, and how many labels were right."""
    rows = [
        [row, *(bracketed(cell[name], ".3g") for name in scores), f"{cell['labels right']:.0%}"]
        for row, cell in metrics.items()
    ]
    write_table(output, ["", *scores, "labels recovered"], rows)


class Batches(Study):
    """Images in batches, on networks of other kinds.

    Conditions and figures: docs/findings/attacks_images.md.
    """

    ARGUMENTS = CIFAR10
    NETWORKS = {"LeNet": (4, 8, 16), "ResNet": (4, 8), "ResNet in training mode": (4, 8),
                "ViT": (4, 8)}  # fmt: skip

    def cells(self) -> dict:
        single = 1 if self.quick else SINGLE
        networks = dict.fromkeys(self.NETWORKS, (2,)) if self.quick else self.NETWORKS
        fast = {"steps": 1} if self.quick else {}
        cells = {}

        def add(network: str, size: int, attack: str, settings: dict) -> None:
            cells[f"{network}, {size}", attack] = {
                "network": network, "batch": size, "messages": single if size == 1 else 1,
                "attack": attack, "settings": settings, "seed": 0,
            }  # fmt: skip

        for size in (1, *max(networks.values(), key=len)):
            add("any network", size, "gray", {})
        for network, sizes in networks.items():
            for size in (1, *sizes):
                add(network, size, "inverting_gradients", fast)
            add(network, 1, "inverting_gradients_published", {"steps": 1200} | fast)
        add("ViT", 1, "analytic", {})
        return cells

    def measure(self, cell: dict) -> dict:
        torch.set_num_threads(1)
        size, count = cell["batch"], cell["messages"]
        images = single_images(self.args.cifar10, size * count)
        batches = [
            {key: torch.cat([image[key] for image in images[start:][:size]]) for key in images[0]}
            for start in range(0, size * count, size)
        ]
        truth = [batch["pixel_values"] for batch in batches]
        if cell["attack"] == "gray":
            return summary(score_images([torch.full_like(x, 0.5) for x in truth], truth), SCORES)
        set_seed(cell["seed"])
        model = network_of(cell["network"], batches[0])
        observations = [
            observe(model, batch, GradientMap(model, batch).gradient()) for batch in batches
        ]
        attack, started = make_attack(cell["attack"], **cell["settings"]), time.perf_counter()
        reconstructions = [
            attack(observation, torch.Generator().manual_seed(number))
            for number, observation in enumerate(observations)
        ]
        seconds = time.perf_counter() - started
        scores = score_images([guess.input.nan_to_num(0.5) for guess in reconstructions], truth)
        return {
            **summary(scores, SCORES),
            "evaluations": sum(len(guess.history) for guess in reconstructions) / count,
            "seconds": round(seconds / count, 1),
        }

    def report(self, metrics: dict) -> None:
        rows = []
        for place, attacks in metrics.items():
            for attack, cell in attacks.items():
                cost = f"{cell['evaluations']:.0f}" if "evaluations" in cell else ""
                rows.append([place, attack, *(bracketed(cell[n], ".3g") for n in SCORES), cost])
        write_table(self.output, ["network, images", "attack", *SCORES, "evaluations"], rows)


def network_of(name: str, batch: dict) -> torch.nn.Module:
    """Random weights from the global generator."""
    if name == "LeNet":
        return lenet_for(batch)
    if name == "ViT":
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"intermediate_size": 128, "image_size": 32, "patch_size": 8}
        return ViT(ViTConfig(**sizes, num_labels=10)).eval()
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 32, 64], "depths": [1, 1, 1]}
    config = ResNetConfig(**sizes, layer_type="basic", num_labels=10)
    return ResNetForImageClassification(config).train(name == "ResNet in training mode")


class DeepPrior(Study):
    """Images drawn by an untrained network, against images that are smooth.

    Conditions and figures: docs/findings/attacks_images.md.
    """

    ARGUMENTS = CIFAR10
    SMOOTH, DEEP, STEPS = "total variation", "deep prior", (100, 500)
    WEIGHTS = {  # by noise, around the best
        0.0: (1e-4, 1e-2, 3e-2),
        0.1: (1e-4, 1e-3, 1e-2, 3e-2),
        1.0: (1e-4, 1e-2, 3e-2, 1e-1, 3e-1),
    }

    def cells(self) -> dict:
        images, fast = (2, {"steps": 1}) if self.quick else (SINGLE, {})
        cells = {}
        for noise, weights in ({1.0: (1e-4, 1e-1)} if self.quick else self.WEIGHTS).items():
            smooth = {f"{self.SMOOTH} {w:g}": {"total_variation": w} | fast for w in weights}
            rows = {row: ("inverting_gradients", settings) for row, settings in smooth.items()}
            for steps in self.STEPS:
                settings = {"steps": steps // (100 if self.quick else 1)}
                rows[f"{self.DEEP}, {steps} steps"] = "deep_image_prior", settings
            for row, (attack, settings) in rows.items():
                cells[f"{noise:g}", row] = {
                    "noise": noise, "attack": attack, "settings": settings, "images": images,
                    "seed": 0,
                }  # fmt: skip
        return cells

    def measure(self, cell: dict) -> dict:
        torch.set_num_threads(1)
        batches = single_images(self.args.cifar10, cell["images"])
        set_seed(cell["seed"])
        model = lenet_for(batches[0])
        observations = [
            noisy_observation(model, batch, cell["noise"], number)
            for number, batch in enumerate(batches)
        ]
        attack, started = make_attack(cell["attack"], **cell["settings"]), time.perf_counter()
        generator = torch.Generator().manual_seed(cell["seed"])
        reconstructions = attack.reconstruct_many(observations, generator)
        seconds, count = time.perf_counter() - started, len(batches)
        guesses = [guess.input.nan_to_num(0.5) for guess in reconstructions]
        scores = score_images(guesses, [batch["pixel_values"] for batch in batches])
        return {
            "psnr of each": [round(value, 2) for value in scores.per_sample["psnr"]],
            "evaluations": sum(len(guess.history) for guess in reconstructions) / count,
            "seconds": round(seconds / count, 1),
        }

    def report(self, metrics: dict) -> None:
        rows = []
        for noise, attacks in metrics.items():
            psnr = {row: np.array(cell["psnr of each"]) for row, cell in attacks.items()}
            smooth = [row for row in psnr if row.startswith(self.SMOOTH)]
            best = max(smooth, key=lambda row: psnr[row].mean())
            for row, cell in attacks.items():
                difference = (
                    interval(psnr[row] - psnr[best], 1) if row.startswith(self.DEEP) else ""
                )
                cost = [f"{cell['evaluations']:.0f}", f"{cell['seconds']:.0f}"]
                rows.append([noise, row, interval(psnr[row], 1), difference, *cost])
        header = ["noise", "", "PSNR, dB", f"less that of the best {self.SMOOTH}"]
        write_table(self.output, [*header, "evaluations", "seconds an image"], rows)


def noisy_observation(model: torch.nn.Module, batch: dict, noise: float, seed: int) -> Observation:
    """Of one image's message, with noise of its own."""
    gmap = GradientMap(model, batch)
    shared = gmap.gradient()
    if noise:
        defense = make_defense("gaussian_noise", relative_scale=noise, strength="own")
        shared = defense(gmap, generator=Stream.from_seeds(seed))
    return observe(model, batch, shared)
