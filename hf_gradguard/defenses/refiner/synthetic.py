"""Refiner's second form: the gradient of synthetic samples, nearest to the one that is wanted.

    share Σ_b c_b g_b(x*),   c = argmin ‖v - Σ_b c_b g_b(x*)‖²,   ‖v - shared‖² = (1 - cos²) ‖v‖²

x* is drawn at random, labels too, and holds nothing of the batch: neither the number of its texts
nor their lengths. Of v, a message holds as many numbers as there are factors c. Adam can bring x*
nearer to v.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...gradient_map import GradientMap, Tensors
from ...gradient_map.differences import vjp_by_difference
from ...gradient_map.inputs import PixelSpace
from ...gradient_map.per_sample.span import Fit, Granularity, SampleSpan, scaled
from ...networks.image import ImageEvaluationNetwork, judge_images

Slope = Callable[[Tensor], Tensor]


@dataclass
class RobustData:
    """What refining a batch found.

    Args:
        input: x*, in the shape of the map's input; of synthetic samples in theirs.
        gradient: g(x*); of synthetic samples fitted to what is wanted.
        utility_metric: UM at the start and after every iteration; of synthetic samples 1 - cos.
        noise_ratio: D likewise, averaged over the batch; nothing without an evaluation network.
        movable_share: Of the batch's content, the share that was hidden.
    """

    input: Tensor
    gradient: Tensors
    utility_metric: list[float]
    noise_ratio: list[float]
    movable_share: float


_MARKS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class SpecialTokens(NamedTuple):
    """What a tokenizer says is special.

    Args:
        ids: All of it: these keep their embeddings.
        marks: Of those, the ones with a role of their own ([CLS], padding and so on), at most
            seven. They are no content that would have to be hidden; others may be.

    Example:
        >>> SpecialTokens.of(tokenizer)
        SpecialTokens(ids=(0, 1, 2, 3), marks=(0, 1, 2, 3))
        >>> SpecialTokens.of(None)  # nothing is special: everything is hidden
        SpecialTokens(ids=(), marks=())
    """

    ids: tuple[int, ...] = ()
    marks: tuple[int, ...] = ()

    @classmethod
    def of(cls, processing_class: Any) -> SpecialTokens:
        """Of a tokenizer, or of a processor that has one."""
        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        token_ids = (getattr(tokenizer, f"{mark}_token_id", None) for mark in _MARKS)
        marks: set[int] = {index for index in token_ids if index is not None}
        ids = marks.union(getattr(tokenizer, "all_special_ids", ()))
        return cls(tuple(sorted(ids)), tuple(sorted(marks)))


def check_embeddings_stay(gmap: GradientMap) -> None:
    """Refuse to share token embeddings."""
    weight = None if gmap.embedding is None else gmap.embedding.weight
    if weight is not None and any(p is weight for p in gmap.parameters.values()):
        raise ValueError(
            "refiner never shares the token embeddings: their gradient names the words, and "
            "training them changes the space that an evaluation network knows. Leave "
            "share_input_embeddings at False."
        )


class SyntheticInput:
    """Input of synthetic samples: all moves but the marks at a text's ends.

    Args:
        made: Their map.
        special: What the tokenizer says is special.
        mean: Of pixels, as for `Pixels`.
        std: Likewise.
    """

    def __init__(
        self,
        synthetic: GradientMap,
        special: SpecialTokens,
        mean: list[float] | None,
        std: list[float] | None,
    ) -> None:
        x, self._space = synthetic.input, None
        if synthetic.embedding is None:
            self.free = torch.ones_like(x[:, :1], dtype=torch.bool)
            self._space = PixelSpace(x, mean, std)
        else:
            self.free = ~is_among(synthetic.domain.main_input(synthetic.batch), special.ids)[
                ..., None
            ]

    def noise_ratio(self, network: Any, x: Tensor) -> Tensor:
        """D, averaged over the samples."""
        if self._space is None:
            return network.noise_ratio(x.float(), None).mean()
        return judged(self._space.plain(x).clamp(0, 1).float(), network)


@dataclass
class SyntheticSamples:
    """Synthetic samples, and how they are fitted.

    Args:
        gmap: Their map.
        target: v.
        factors: How many, as `Granularity` says.
    """

    gmap: GradientMap
    target: Tensors
    factors: Granularity

    def fit(self, x: Tensor) -> Fit:
        """At an input x*."""
        if self.factors == "message":
            return scaled(self.gmap.gradient_at(x), self.target)
        return SampleSpan(self.gmap, x).fit_by(self.target, self.factors)

    def slope(self, x: Tensor, fit: Fit) -> Tensor:
        """∂(1 - cos)/∂x* where the factors are best, so that their own change changes nothing:
        -Σ_b c_b J_b(v - shared)/(‖shared‖ ‖v‖). Parameters that no layer has count with the same
        factors.
        """
        if not fit.cosine:
            return torch.zeros_like(x)
        residual = {name: v - fit.nearest[name] for name, v in self.target.items()}
        product = vjp_by_difference(self.gmap, x, residual)
        factors = fit.factors.to(product).view(-1, *[1] * (x.dim() - 1))
        power = sum(float(v.double().square().sum()) for v in self.target.values())
        return -factors * product / (fit.cosine * power)

    def descend(
        self, iterations: int, rate: float, free: Tensor, penalty: Slope | None = None
    ) -> tuple[Tensor, Fit, list[float]]:
        """Steps of Adam from where the samples are.

        Args:
            iterations: How many.
            rate: Of the first step, in units of the input's root mean square; it falls to 0.
            free: Mask of what moves, broadcast to the input.
            penalty: The slope of what is added to 1 - cos.

        Returns:
            x*, the fit there, and cosines at the start and after every step.
        """
        x = self.gmap.input.clone()
        size = float(x.square().mean().sqrt())
        optimizer = torch.optim.Adam([x], lr=rate * size)
        fit = self.fit(x)
        cosines = [fit.cosine]
        for step in range(iterations):
            slope = self.slope(x, fit)
            x.grad = free * (slope if penalty is None else slope + penalty(x))
            optimizer.param_groups[0]["lr"] = rate * size * (1 - step / iterations)
            optimizer.step()
            fit = self.fit(x)
            cosines.append(fit.cosine)
        return x, fit, cosines


def judged(pixels: Tensor, network: Any) -> Tensor:
    if isinstance(network, ImageEvaluationNetwork):  # of any size
        return judge_images(pixels, network).mean()
    ratio: Tensor = network.noise_ratio(pixels).mean()
    return ratio


def is_among(ids: Tensor, listed: Sequence[int]) -> Tensor:
    return torch.isin(ids, torch.tensor(list(listed), dtype=ids.dtype, device=ids.device))
