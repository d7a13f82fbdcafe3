"""A network trained by private SGD, and what each of its images has given away meanwhile."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from transformers import set_seed

from hf_gradguard.defenses.dp import DPSGD, NoSample
from hf_gradguard.gradient_map.per_sample.clipping import SampleMap
from hf_gradguard.leakage import FisherAccountant
from hf_gradguard.randomness import Stream
from hf_gradguard.training.privacy.private_rows import DUMMY, PoissonSampler
from recipes.small_networks import TanhConvNetConfig, TanhConvNetForImageClassification

from .clipped import random_directions, told
from .training import accuracy, logits_of


def network(x: Tensor) -> TanhConvNetForImageClassification:
    """Before training: weights from the global generator."""
    config = TanhConvNetConfig(num_channels=x.shape[1], image_size=x.shape[2])
    return TanhConvNetForImageClassification(config)


def training(cell: dict, seed: int, x: Tensor, y: Tensor) -> Iterator:
    """The model before each step, and after the last."""
    set_seed(seed)
    model = network(x)
    defense = DPSGD(
        per_sample=True, clip=cell["clip"], noise_multiplier=cell["noise_multiplier"],
        expected_batch_size=cell["batch"],
    )  # fmt: skip
    optimizer = torch.optim.SGD(
        model.parameters(), lr=cell["learning_rate"], momentum=cell["momentum"]
    )
    rounds, rate = cell["steps"][-1], cell["batch"] / len(x)
    noise, rows = Stream.from_seeds(seed, 0), [np.arange(len(x))]
    for drawn in PoissonSampler(rows, [rate], rank=0, ranks=1, rounds=rounds, seed=seed):
        yield model
        batch = [pick.row for pick in drawn]
        protect = NoSample.of(defense) if batch == [DUMMY] else defense
        entries = {"pixel_values": x[batch], "labels": y[batch]}
        gmap = SampleMap(model, entries, second_order=False, needs_input=False)
        message = protect(gmap, generator=noise)
        for name, parameter in model.named_parameters():
            parameter.grad = message[name]
        optimizer.step()
    yield model


def stretches(cell: dict, seed: int) -> dict[int, int]:
    """The steps that are measured, and how many each stands for."""
    draws, found, start = np.random.default_rng(seed), {}, 0
    for length in cell["stretches"]:
        found[start + int(draws.integers(length))] = length
        start += length
    return found


class Account:
    """What one run says of each image, after several numbers of steps.

    Args:
        cell: Its settings.
        images: How many there are.
    """

    def __init__(self, cell: dict, images: int) -> None:
        self._rate, sigma = cell["batch"] / images, cell["noise_multiplier"]
        self._std, self._clip, self._rows = sigma * cell["clip"], cell["clip"], range(images)
        self.hard, self.smooth = (
            {T: FisherAccountant(self._rate, sigma, cell["delta"] / T) for T in cell["steps"]}
            for _ in range(2)
        )

    def add(self, step: int, length: int, found, pixels: int) -> None:
        """A measured step, for all that it stands for: q of their batches hold an image."""
        scale = self._rate * length / (pixels * self._std**2)
        for accounts, traces in (
            (self.hard, found.hard(self._clip)), (self.smooth, found.smooth(self._clip))
        ):  # fmt: skip
            for steps, account in accounts.items():
                if step < steps:
                    account.step(self._rows, scale * traces.mean(0))

    def dfil(self, steps: int) -> np.ndarray:
        return np.array([self.hard[steps].dfil(row) for row in self._rows])

    def smoothly(self, steps: int) -> np.ndarray:
        return np.array([self.smooth[steps].dfil(row) for row in self._rows])


def one_run(cell: dict, seed: int, x: Tensor, y: Tensor, test_x: Tensor, test_y: Tensor) -> dict:
    chosen, account = stretches(cell, seed), Account(cell, len(x))
    probes, right = Stream.from_seeds(seed, 1), {}
    losses, norms = (torch.zeros(len(x), dtype=torch.float64) for _ in range(2))
    for step, model in enumerate(training(cell, seed, x, y)):
        if step in cell["steps"]:
            right[step] = round(accuracy(model, test_x, test_y), 4)
        if step in chosen:
            found = told(model, x, y, random_directions(model, cell["probes"], probes))
            account.add(step, chosen[step], found, x[0].numel())
            share = chosen[step] / cell["steps"][-1]
            norms += share * found.norms
            losses += share * torch.nn.functional.cross_entropy(
                logits_of(model, x), y, reduction="none"
            )
    return {
        "accuracy": right, "loss": losses.numpy(), "norm": norms.numpy(),
        "wrong": (logits_of(model, x).argmax(1) != y).numpy(),
        "dfil": {steps: account.dfil(steps) for steps in cell["steps"]},
        "smooth": {steps: account.smoothly(steps) for steps in cell["steps"]},
    }  # fmt: skip
