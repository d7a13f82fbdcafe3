"""What a client's message costs behind each defense, network by network: Refiner's Table 4."""

import copy
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from transformers import set_seed

from hf_gradguard import GradientMap
from hf_gradguard.networks import load_network
from hf_gradguard.randomness import Stream

from ..study import Study
from .evaluation_networks import IMAGE
from .frontier_images import network
from .influence_more import resnet18
from .lib.defenses import published
from .lib.images import array_images, lenet_for
from .lib.tables import write_table

DEFENSES: dict[str, tuple[str, dict]] = {
    "pruning": ("pruning", {"ratio": 0.9}),
    "gaussian_noise": ("gaussian_noise", {"relative_scale": 1.0}),
    "laplace_noise": ("laplace_noise", {"relative_scale": 1.0}),
    "quantization": ("quantization", {"bits": 8}),
    "soteria": ("soteria", {"ratio": 0.5}),
    "refiner": ("refiner", {"alpha": 0.5}),
    "refiner, warm start": ("refiner", {"alpha": 0.5, "warm_start": 64}),
}
NETWORKS = ("LeNet", "ResNet10", "ResNet-18")
PAPER = {"LeNet": 0.4103 / 0.3340, "ResNet10": 11.3148 / 1.7341, "ResNet-18": 21.7539 / 2.8539}
"""Soteria's seconds over Refiner's."""


class Seconds(Study):
    """Processor seconds of a message over those of a plain gradient of the same batch. Messages and
    plain gradients take turns.

    Conditions and figures: docs/findings/cost.md.
    """

    ARGUMENTS = {"--images": "npz with x (N, 32, 32, 3) and y"}

    def cells(self) -> dict:
        sizes = {"batch": 2, "rounds": 1} if self.quick else {"batch": 8, "rounds": 3}
        return {
            (name, defense): {"network": name, "defense": defense, **sizes}
            for name in NETWORKS
            for defense in DEFENSES
        }

    def load(self) -> None:
        torch.set_num_threads(1)
        pixels, self.labels = array_images(self.args.images, samples=64)
        self.pixels = pixels.float() / 255
        self.judge = load_network(IMAGE).eval()

    def model(self, name: str) -> nn.Module:
        set_seed(0)
        if name == "LeNet":
            return lenet_for({"pixel_values": self.pixels})
        if name == "ResNet-18":
            return resnet18({"pixel_values": self.pixels})
        return network({"ResNet10": "resnet", "ViT": "vit"}[name], 3, 32, 10).eval()

    def measure(self, cell: dict) -> dict:
        model, (name, strength) = self.model(cell["network"]), DEFENSES[cell["defense"]]
        count = cell["batch"]
        batch = {"pixel_values": self.pixels[:count], "labels": self.labels[:count]}
        defense = copy.deepcopy(published(name, self.judge, **strength))
        second_order = defense.facts.needs_second_order
        stream = Stream.from_seeds(0)

        def plain() -> None:
            GradientMap(model, batch, second_order=False).gradient()

        def message() -> None:
            defense(GradientMap(model, batch, second_order=second_order), generator=stream)

        message(), plain()  # the first visit of a warm start is not timed
        ratios = [seconds(message) / seconds(plain) for _ in range(cell["rounds"])]
        return {"ratios": [round(ratio, 3) for ratio in ratios]}

    def report(self, metrics: dict) -> None:
        rows = []
        for defense in DEFENSES:
            shown = []
            for name in NETWORKS:
                ratios = metrics[name][defense]["ratios"]
                low, high = min(ratios), max(ratios)
                shown.append(f"{statistics.median(ratios):.1f} ({low:.1f} to {high:.1f})")
            rows.append([defense, *shown])
        rows.append(["paper: soteria over refiner", *(f"{PAPER[name]:.1f}" for name in NETWORKS)])
        shown = []
        for name in NETWORKS:
            refined = statistics.median(metrics[name]["refiner"]["ratios"])
            ratios = metrics[name]["soteria"]["ratios"]
            shown.append(f"{min(ratios) / refined:.2f} to {max(ratios) / refined:.2f}")
        rows.append(["soteria over refiner", *shown])
        write_table(self.output, ["", *NETWORKS], rows)


def seconds(work: Callable[[], None]) -> float:
    """Of the processor."""
    started = time.process_time()
    work()
    return time.process_time() - started
