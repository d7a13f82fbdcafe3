"""A network trained by private SGD, and what a step says about each sample: the information in
gradients that are clipped one by one.

A batch's sum of clipped gradients g̃ gets noise σC, so that a sample in it gives away FIM =
J̃ J̃ᵀ/(σC)² (Guo et al., 2022, Eq. 1, which prints 1/σ²). With g the sample's own gradient, n its
norm and J its Jacobian, J̃ = J D and D = φI + c g gᵀ, where g̃ = φ(n) g and c = φ'(n)/n:

    clipped by `dp_sgd`:    φ = min(1, C/n),              c = -C/n³ above C and 0 below
    clipped smoothly:       φ = 1/(GELU(n/C - 1) + 1),    c = -φ² GELU'(n/C - 1)/(Cn)

So above C what `dp_sgd` shares says nothing along g itself, and the kink at n = C is met with
probability 0. J D w = φ Jw + c⟨g, w⟩ Jg, and Tr J̃J̃ᵀ = E‖J̃w‖² over random signs w.

Which samples are in a batch nobody knows. Given all the rest, a batch that holds each sample with
probability q is a mixture of two Gaussians; with s = ‖g̃‖/(σC) ≤ 1/σ, z normal and
f = 1/(q + (1-q) exp(-sz - s²/2)), its information is q² E[f] of that above across g̃ and q² E[z² f]
along it: what `poisson_factor` bounds, without a δ.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant
from torch import Tensor, nn
from transformers import set_seed

from hf_gradguard import GradientMap
from hf_gradguard.defenses.dp import DPSGD
from hf_gradguard.gradient_map.per_sample.clipping import SampleMap
from hf_gradguard.gradient_map.views import ZeroGradient
from hf_gradguard.leakage import FisherAccountant
from hf_gradguard.randomness import Stream
from hf_gradguard.training.clients.batches import DUMMY, PoissonSampler
from recipes.small_networks import TanhConvNetConfig, TanhConvNetForImageClassification

from .influence_epochs import accuracy, logits_of

CHUNK = 250  # samples at once
Direction = dict[str, Tensor]


class SampleInformation(NamedTuple):
    """What each sample's gradient tells of it, before clipping.

    Args:
        norms: n, `(N,)`.
        along: ‖Jg/n‖²: by where on the line of g it ends.
        across: Tr J(I - ggᵀ/n²)Jᵀ of each random direction, `(k, N)`: by all the rest.
    """

    norms: Tensor
    along: Tensor
    across: Tensor

    def hard(self, clip: float) -> Tensor:
        """Tr J̃J̃ᵀ as clipped by `dp_sgd`, of each direction, `(k, N)`."""
        factor = (clip / self.norms).clamp(max=1)
        return factor**2 * (self.across + torch.where(self.norms > clip, 0.0, self.along))

    def smooth(self, clip: float) -> Tensor:
        """As clipped in Algorithm 1."""
        u = self.norms / clip - 1
        below = torch.special.ndtr(u)
        factor = 1 / (u * below + 1)
        slope = below + u * torch.exp(-u * u / 2) / math.sqrt(2 * math.pi)  # GELU'(u)
        along_factor = factor - factor**2 * slope * self.norms / clip  # φ + cn²
        return factor**2 * self.across + along_factor**2 * self.along


def information_of(
    model: nn.Module, images: Tensor, labels: Tensor, directions: list[Direction]
) -> SampleInformation:
    """Of every image by itself, some together."""
    single = GradientMap(model, {"pixel_values": images[:1], "labels": labels[:1]})
    informations = [
        _information(single, x, y, directions)
        for x, y in zip(images.split(CHUNK), labels.split(CHUNK), strict=True)
    ]
    return SampleInformation(
        *(torch.cat(chunks_of_field, -1) for chunks_of_field in zip(*informations, strict=True))
    )


def _information(
    single: GradientMap, images: Tensor, labels: Tensor, directions: list[Direction]
) -> SampleInformation:
    def slopes(function) -> tuple[Tensor, Tensor]:
        values, slope, _ = single.slopes_at(function, images[:, None], {}, labels=labels[:, None])
        return values.double(), slope.flatten(1).double()

    def along(w: Direction) -> tuple[Tensor, Tensor]:
        return slopes(lambda g, _: sum((tensor * w[name]).sum() for name, tensor in g.items()))

    halves, product = slopes(lambda g, _: sum(t.square().sum() for t in g.values()) / 2)  # and Jg
    squares = (2 * halves).clamp_min(1e-30)
    across = []
    for w in directions:
        inner, remainder = along(w)  # ⟨g, w⟩ and Jw
        remainder = remainder - (inner / squares)[:, None] * product
        across.append(remainder.square().sum(1))
    return SampleInformation(squares.sqrt(), product.square().sum(1) / squares, torch.stack(across))


def random_directions(model: nn.Module, count: int, stream: Stream) -> list[Direction]:
    """Independent signs for every parameter."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    return [{n: stream.signs(shape) for n, shape in shapes.items()} for _ in range(count)]


def rdp(noise_multiplier: float, rate: float, steps: int, order: float = 2.0) -> float:
    """ε of Poisson-sampled batches with Gaussian noise, for a sample more or less, by
    `dp-accounting`: what is published at order 2. Mironov et al. (2019).
    """
    accountant = RdpAccountant([order], NeighboringRelation.ADD_OR_REMOVE_ONE)
    event = PoissonSampledDpEvent(rate, GaussianDpEvent(noise_multiplier))
    return float(accountant.compose(event, steps).rdp[0])


def rdp_replacing(noise_multiplier: float, rate: float, steps: int) -> float:
    """ε₂ for a sample replaced, at most: by way of the data without it, with the triangle
    inequality of Mironov (2017), Proposition 11: 3/2 ε₄ + ε₃.
    """
    fourth, third = (rdp(noise_multiplier, rate, steps, order) for order in (4.0, 3.0))
    return 1.5 * fourth + third


def poisson_factor(noise_multiplier: float, rate: float) -> float:
    """κ of a Poisson-sampled step, for any s ≤ 1/σ and both directions: above 0 and at most 1."""
    z = np.linspace(-12, 12, 4001)
    weights = np.exp(-(z**2) / 2)
    weights /= weights.sum()

    def largest(strengths: Iterable[float]) -> float:
        factors = []
        for s in strengths:
            f = weights / (rate + (1 - rate) * np.exp(-s * z - s * s / 2))
            factors += [f.sum(), (z**2 * f).sum()]
        return max(factors)

    return float(rate * largest(np.linspace(0, 1 / noise_multiplier, 101)))


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
    for picks in PoissonSampler(rows, [rate], rank=0, ranks=1, rounds=rounds, seed=seed):
        yield model
        batch = [pick.row for pick in picks]
        entries = {"pixel_values": x[batch], "labels": y[batch]}
        gmap = SampleMap(model, entries, second_order=False, needs_input=False)
        source = ZeroGradient(gmap.parameters) if batch == [DUMMY] else gmap
        message = defense(source, generator=noise)
        for name, parameter in model.named_parameters():
            parameter.grad = message[name]
        optimizer.step()
    yield model


def stretches(cell: dict, seed: int) -> dict[int, int]:
    """The steps that are measured, and how many each stands for."""
    draws, measured, start = np.random.default_rng(seed), {}, 0
    for length in cell["stretches"]:
        measured[start + int(draws.integers(length))] = length
        start += length
    return measured


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

    def add(self, step: int, length: int, information, pixels: int) -> None:
        """A measured step, for all that it stands for: q of their batches hold an image."""
        scale = self._rate * length / (pixels * self._std**2)
        for accounts, traces in (
            (self.hard, information.hard(self._clip)), (self.smooth, information.smooth(self._clip))
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
            information = information_of(
                model, x, y, random_directions(model, cell["probes"], probes)
            )
            account.add(step, chosen[step], information, x[0].numel())
            share = chosen[step] / cell["steps"][-1]
            norms += share * information.norms
            losses += share * torch.nn.functional.cross_entropy(
                logits_of(model, x), y, reduction="none"
            )
    return {
        "accuracy": right, "loss": losses.numpy(), "norm": norms.numpy(),
        "wrong": (logits_of(model, x).argmax(1) != y).numpy(),
        "dfil": {steps: account.dfil(steps) for steps in cell["steps"]},
        "smooth": {steps: account.smoothly(steps) for steps in cell["steps"]},
    }  # fmt: skip
