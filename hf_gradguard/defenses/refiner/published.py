"""Refiner as published: robust data whose gradient stays near the true one where that counts.

    x* = argmin UM(x*) - β D(x*)
    UM(x*) = Σ_l ‖w_l ⊙ (g_l(x*) - g_l(x))‖²,   w_l = |g_l(x) ⊙ θ_l| τ^l

UM, the utility metric, is small where the gradient stays what it was; l = 1 is the layer nearest
the input. D in [0, 1] is an evaluation network's prediction of how much of its input is noise.

Reference: "Refiner" (2025), Eq. 2 to 5 and Appendices F and J. As printed, UM holds |g θ|². For
some models that is many orders of magnitude below β D, and β = 1 would ignore it; by default it is
divided by Σ_l ‖w_l ⊙ g_l(x)‖², which makes it a relative error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...gradient_map import GradientMap, Tensors
from ...gradient_map.domain import embed, ordinary_ids
from ...gradient_map.inputs import PixelSpace
from ...gradient_map.parameters import layer_numbers
from ...networks.configuration import EvaluationNetworkBase
from ...networks.image_network import ImageEvaluationNetwork, judge_images
from ...networks.trial import FEW_WORDS, LEAST_GAP, check_order, check_slope
from ...randomness import Stream
from ..base import norm
from ..sketch import SpecialTokens, is_among

OPTIMIZERS = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
LEAST_MOVABLE = 0.9
"""Of a batch's tokens, marks and padding left out, the share that has to be hidden."""


@dataclass
class RobustData:
    """The robust data that refining a batch found.

    Args:
        input: x*, in the shape of the map's input; for synthetic samples in theirs.
        gradient: g(x*); for synthetic samples fitted to what is wanted.
        utility_metric: UM at the start and after every iteration; for synthetic samples 1 - cos.
        noise_ratio: D at the same points, averaged over the batch; nothing without an evaluation
            network.
        movable_share: The fraction of the batch's content that was hidden.
    """

    input: Tensor
    gradient: Tensors
    utility_metric: list[float]
    noise_ratio: list[float]
    movable_share: float


@dataclass
class Descent:
    """The descent of UM - β D.

    Args:
        gmap: The batch's map.
        gradient: g.
        inputs: The inputs, which say what may move.
        network: The evaluation network.
        beta: β.
        weights: w.
    """

    gmap: GradientMap
    gradient: Tensors
    inputs: Words | Pixels
    network: Any
    beta: float
    weights: Tensors

    def run(self, x: Tensor, iterations: int, optimizer: Optimizer) -> RobustData:
        """Run from a start, which the optimizer has and writes to."""
        gmap, inputs = self.gmap, self.inputs
        x.requires_grad_()
        metrics, ratios = [], []
        for _ in range(iterations):
            metric = self._distance(gmap.gradient_at(x, create_graph=True))
            ratio = inputs.noise_ratio(self.network, x)
            (slope,) = gmap.input_gradient(metric - self.beta * ratio, x)
            x.grad = slope * inputs.free  # padding and special tokens stay
            metrics.append(float(metric.detach()))
            ratios.append(float(ratio.detach()))
            with torch.no_grad():
                optimizer.step()
                inputs.project_(x)
        x = x.detach()
        gradient_there = gmap.gradient_at(x)
        with torch.no_grad():
            metrics.append(float(self._distance(gradient_there)))
            ratios.append(float(inputs.noise_ratio(self.network, x)))
        return RobustData(x, gradient_there, metrics, ratios, inputs.movable_share)

    def _distance(self, gradient_there: Tensors) -> Tensor:
        """UM = Σ_l ‖w_l ⊙ (g_l(x*) - g_l(x))‖²."""
        return torch.stack(
            [
                (self.weights[name] * (gradient_there[name] - g)).square().sum()
                for name, g in self.gradient.items()
            ]
        ).sum()


def utility_weights(
    gmap: GradientMap, gradient: Tensors, tau: float, element_wise: bool, normalize: bool
) -> Tensors:
    """Return w, divided by ‖w ⊙ g‖ if UM is to be relative."""
    layers = layer_numbers(gmap.parameters)
    weights = {}
    for name, g in gradient.items():
        weight = (g * gmap.parameters[name].detach()).abs() if element_wise else torch.ones_like(g)
        weights[name] = weight * tau ** layers[name]
    size = 1.0
    if normalize:
        size = norm({name: weights[name] * g for name, g in gradient.items()}, None)
    return {name: weight / (size or 1.0) for name, weight in weights.items()}


def brought_near(gradient: Tensors, shared: Tensors, bound: float | None) -> Tensors:
    """Return a gradient no farther than ε, `bound`, from g (Appendix J).

    It is g + ε (g(x*) - g)/‖g(x*) - g‖ if `shared`, g(x*), is farther.
    """
    distance = norm({name: shared[name] - g for name, g in gradient.items()}, None)
    if bound is None or distance <= bound:
        return shared
    return {name: g + (shared[name] - g) * (bound / distance) for name, g in gradient.items()}


class Words:
    """The token embeddings `(B, T, H)` of a batch as inputs that may move.

    Padding and special tokens keep theirs; noise is embeddings of random tokens.

    Args:
        gmap: The batch's map.
        network: The evaluation network, if it does not read every token.
        special: The ids of the tokenizer's special tokens. Only these count, never what a network
            says.

    Raises:
        ValueError: If every token of the batch is padding or special; or if of the rest, more than
            a tenth would not move or is not read by the network.
    """

    def __init__(self, gmap: GradientMap, network: Any, special: SpecialTokens) -> None:
        assert gmap.embedding is not None
        self.embedding, self.ids = gmap.embedding, gmap.domain.main_input(gmap.batch)
        mask = gmap.domain.present(gmap.batch)
        self.mask = None if mask is None else mask.long()
        self.special = special.ids
        present = torch.ones_like(self.ids, dtype=torch.bool) if mask is None else mask
        self.present = present
        words = present & ~is_among(self.ids, self.special)
        if not words.any():
            raise ValueError(
                "The batch holds no word: every token is padding or special, so there is nothing "
                "to refine, and its true gradient would be shared. Leave empty texts out of the "
                "data set."
            )
        self.free = words[..., None]
        self.has_few_words = int(words.sum()) < FEW_WORDS
        content = present & ~is_among(self.ids, special.marks)
        hidden = words & network.reads(gmap.input) if hasattr(network, "reads") else words
        self.movable_share = float(hidden.sum() / content.sum())
        if self.movable_share < LEAST_MOVABLE:
            raise ValueError(
                f"Of the {int(content.sum())} tokens in this batch that are neither padding nor a "
                f"mark such as [CLS], only {self.movable_share:.0%} would be hidden, and at least "
                f"{LEAST_MOVABLE:.0%} must be, so nothing was shared. Words that the tokenizer or "
                "the evaluation network takes for special stay as they are. Give the tokenizer "
                "(processing_class of the Trainer, or `prepare(model, tokenizer)`), leave ordinary "
                "words out of its special tokens, and take a network that was trained with it."
            )

    def noise(self, x: Tensor, generator: Stream) -> Tensor:
        """Draw v: embeddings of tokens, uniform over the vocabulary without the special ones."""
        count = len(self.embedding.weight)  # type: ignore[arg-type]
        ordinary = ordinary_ids(count, self.special).to(x.device)
        random_ids = ordinary[generator.integers(len(ordinary), self.ids.shape, device=x.device)]
        return embed(self.embedding, random_ids).to(x.dtype)

    def project_(self, x: Tensor) -> None:
        """Leave embeddings unchanged, for they have no range to stay in."""

    def noise_ratio(self, network: Any, x: Tensor) -> Tensor:
        """Return the mean D of the samples that hold a word."""
        return network.noise_ratio(x.float(), self.mask).mean()

    def digests(self) -> list[str]:
        """Return a name for each text, made from its tokens."""
        return [_digest(ids[row]) for ids, row in zip(self.ids, self.present, strict=True)]

    def recall_(self, x: Tensor, row: int, remembered: Tensor) -> None:
        x[row, self.present[row]] = remembered.to(x)

    def memory(self, x: Tensor, row: int) -> Tensor:
        return x[row, self.present[row]]


class Pixels:
    """The images `(B, C, H, W)` of a batch as inputs that may move.

    Their pixels were in [0, 1] before mean and deviation were taken out. Noise is uniform. All of
    an image moves.

    Raises:
        ValueError: If pixels are outside that range.
    """

    def __init__(
        self, gmap: GradientMap, mean: list[float] | None, std: list[float] | None
    ) -> None:
        x = gmap.input
        self.images = x
        self.space = PixelSpace(x, mean, std)
        pixels = self.space.plain(x)
        if pixels.min() < -1e-3 or pixels.max() > 1 + 1e-3:
            raise ValueError(
                f"Pixels range from {float(pixels.min()):.3g} to {float(pixels.max()):.3g}, where "
                "[0, 1] is expected. Give refiner the image processor's image_mean and image_std, "
                "or pass the processor to the Trainer as processing_class."
            )
        self.free = torch.ones_like(x[:, :1], dtype=torch.bool)
        self.has_few_words, self.movable_share = False, 1.0

    def noise(self, x: Tensor, generator: Stream) -> Tensor:
        """Draw v, uniform over the pixel range."""
        shares = generator.uniform(x.shape, device=x.device, dtype=x.dtype)
        return self.space.low + shares * (self.space.high - self.space.low)

    def project_(self, x: Tensor) -> None:
        self.space.project_(x)

    def noise_ratio(self, network: Any, x: Tensor) -> Tensor:
        return judged(self.space.plain(x).float(), network)

    def digests(self) -> list[str]:
        """Return a name for each image, made from its pixels."""
        return [_digest(image) for image in self.images]

    def recall_(self, x: Tensor, row: int, remembered: Tensor) -> None:
        x[row] = remembered.to(x)

    def memory(self, x: Tensor, row: int) -> Tensor:
        return x[row]


def noise_ratio_of_samples(
    synthetic: GradientMap,
    network: Any,
    x: Tensor,
    mean: list[float] | None,
    std: list[float] | None,
) -> Tensor:
    """Return the mean D of synthetic samples at x*.

    Args:
        synthetic: The gradient map of the synthetic samples.
        network: The evaluation network.
        x: x*, in the shape of the map's input.
        mean: What was subtracted from pixels, as for `Pixels`.
        std: What they were divided by, as for `Pixels`.
    """
    if synthetic.embedding is not None:
        ratio: Tensor = network.noise_ratio(x.float(), None).mean()
        return ratio
    space = PixelSpace(synthetic.input, mean, std)
    return judged(space.plain(x).clamp(0, 1).float(), network)


@dataclass(frozen=True, eq=False)
class Memory:
    """The results of a client's earlier refinements, which later ones reuse.

    Args:
        robust_data: The robust data of examples that were refined before, by their content, the
            last one last.
        tried: The version of the embeddings for which the evaluation network was tried on the
            client's own data; `None` before that.
    """

    robust_data: Mapping[str, Tensor] = field(default_factory=dict)
    tried: tuple[int, int] | None = None

    def recall_(self, x: Tensor, inputs: Words | Pixels) -> bool:
        """Write what is known of a batch's examples into `x`. Return whether all are known."""
        digests = inputs.digests() if self.robust_data else []
        remembered = [self.robust_data.get(key) for key in digests]
        for row, robust_data in enumerate(remembered):
            if robust_data is not None:
                inputs.recall_(x, row, robust_data)
        return bool(remembered) and all(robust_data is not None for robust_data in remembered)

    def with_batch(self, x: Tensor, inputs: Words | Pixels, size: int) -> Memory:
        """Return the memory with a batch's robust data, cut to the last `size` examples."""
        robust_data = dict(self.robust_data)
        for row, key in enumerate(inputs.digests() if size else []):
            robust_data.pop(key, None)
            robust_data[key] = inputs.memory(x, row).cpu().clone()
        newest = list(robust_data.items())[-size:] if size else []
        return replace(self, robust_data=dict(newest))

    def tensors(self) -> Tensors:
        """Return the robust data, for a checkpoint; they are private to the client."""
        numbered = enumerate(self.robust_data.items())
        return {f"robust.{index}.{key}": data for index, (key, data) in numbered}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Memory | None:
        """Read the memory from a checkpoint's tensors, if they hold one."""
        keys = sorted((k for k in tensors if k.startswith("robust.")),
                      key=lambda key: int(key.split(".")[1]))  # fmt: skip
        robust_data = {key.split(".")[2]: tensors.pop(key).cpu() for key in keys}
        return cls(robust_data) if robust_data else None


def try_on_batch(gmap: GradientMap, network: Any, inputs: Words | Pixels) -> None:
    """Check that D rises from a client's own data to noise, and has a slope in between.

    The noise is drawn from a stream of its own, so that a resumed run, which tries again, shares
    the same messages. Networks that do not derive from `EvaluationNetworkBase` are not tried.

    Raises:
        ValueError: If D does not rise or has no slope there. The message holds the figures.
    """
    if not isinstance(network, EvaluationNetworkBase):
        return
    x, noise = gmap.input, inputs.noise(gmap.input, Stream())
    halfway, noisy = (
        torch.where(inputs.free, torch.lerp(x, noise, share), x).detach() for share in (0.5, 1.0)
    )
    ratios = [inputs.noise_ratio(network, x_at) for x_at in (x, halfway.requires_grad_(), noisy)]
    check_order(
        network, [float(r.detach()) for r in ratios], 0.0 if inputs.has_few_words else LEAST_GAP
    )
    (slope,) = gmap.input_gradient(ratios[1], halfway)
    check_slope(network, slope * inputs.free)


def judged(pixels: Tensor, network: Any) -> Tensor:
    if isinstance(network, ImageEvaluationNetwork):  # of any size
        return judge_images(pixels, network).mean()
    ratio: Tensor = network.noise_ratio(pixels).mean()
    return ratio


def _digest(content: Tensor) -> str:
    return hashlib.blake2b(
        content.detach().cpu().contiguous().numpy().tobytes(), digest_size=16
    ).hexdigest()
