r"""What a step of private SGD says about each sample: the information in gradients that are clipped
one by one.

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
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant
from torch import Tensor, nn

from hf_gradguard import GradientMap
from hf_gradguard.randomness import Stream

TOGETHER = 250  # samples at once
Direction = dict[str, Tensor]


class Told(NamedTuple):
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
        rest = factor - factor**2 * slope * self.norms / clip  # φ + cn²
        return factor**2 * self.across + rest**2 * self.along


def told(model: nn.Module, images: Tensor, labels: Tensor, directions: list[Direction]) -> Told:
    """Of every image by itself, some together."""
    one = GradientMap(model, {"pixel_values": images[:1], "labels": labels[:1]})
    parts = [
        _told(one, some, own, directions)
        for some, own in zip(images.split(TOGETHER), labels.split(TOGETHER), strict=True)
    ]
    return Told(*(torch.cat(part, -1) for part in zip(*parts, strict=True)))


def _told(one: GradientMap, images: Tensor, labels: Tensor, directions: list[Direction]) -> Told:
    def slopes(function) -> tuple[Tensor, Tensor]:
        values, found, _ = one.slopes_at(function, images[:, None], {}, labels=labels[:, None])
        return values.double(), found.flatten(1).double()

    def along(w: Direction) -> tuple[Tensor, Tensor]:
        return slopes(lambda g, _: sum((tensor * w[name]).sum() for name, tensor in g.items()))

    halves, own = slopes(lambda g, _: sum(t.square().sum() for t in g.values()) / 2)  # and Jg
    squares = (2 * halves).clamp_min(1e-30)
    across = []
    for w in directions:
        inner, product = along(w)  # ⟨g, w⟩ and Jw
        rest = product - (inner / squares)[:, None] * own
        across.append(rest.square().sum(1))
    return Told(squares.sqrt(), own.square().sum(1) / squares, torch.stack(across))


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
        found = []
        for s in strengths:
            f = weights / (rate + (1 - rate) * np.exp(-s * z - s * s / 2))
            found += [f.sum(), (z**2 * f).sum()]
        return max(found)

    return float(rate * largest(np.linspace(0, 1 / noise_multiplier, 101)))
