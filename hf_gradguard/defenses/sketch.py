"""The sketch of a gradient: its nearest point in the span of random samples' gradients.

    share Σ_b c_b g_b(x'),   c = argmin ‖v - Σ_b c_b g_b(x')‖²,   ‖v - shared‖² = (1 - cos²) ‖v‖²

x' is drawn at random, labels too, and holds nothing of the batch: neither the number of its texts
nor their lengths. A message holds as many numbers of v as there are factors c.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, NamedTuple, get_args

import torch
from torch import Tensor, nn

from ..gradient_map import GradientMap, Tensors
from ..gradient_map.per_sample.span import Fit, Granularity, SampleSpan, scaled, vjp_by_difference
from ..gradient_map.random_batch import synthetic_samples
from ..randomness import Stream
from .base import DefenseFacts, Message, cast_like, check_whole, nothing_of, true_gradient
from .feedback import BiasedDefense, check_min_batches
from .mechanism import Fitted, Mechanism

Slope = Callable[[Tensor], Tensor]


@dataclass
class GradientSketch(BiasedDefense):
    """Shares the gradient's nearest point in the span of random samples' gradients.

    `samples` random texts or images with random labels are drawn for each message, and share
    nothing with the batch but its shape. Their gradients are added up with the factors that bring
    the sum nearest to the client's. What the sum leaves out, later messages make up for. No sample
    is refined (`refiner` does), and no evaluation network is needed.

    The defaults are the strength that docs/choose.md recommends: with four texts training on SST-2
    lost 3.6 points [2.1, 5.1], and a candidate-set attacker found 11 of 144 batch members at its
    end; with 16 texts 2.0 [0.9, 3.1] and 31 (docs/findings/text.md).

    Args:
        samples: The number of samples drawn, at least 1. Default: 4 texts, or 16 images.
        factors: How many factors are fitted: one per `"message"`, per `"sample"`, per sample and
            `"parameter"`, or per `"token"` and linear weight.
        error_feedback: Whether to use error feedback, as for all biased defenses; on by default.
        min_batches: k in 1 to 255. With error feedback a message is made of the sum of k batches'
            gradients or more, so a client's first k-1 messages are empty. With 1 the first one is
            fitted to one batch's own gradient.

    Raises:
        ValueError: If a value is out of range.

    Example:
        >>> message = make_defense("gradient_sketch", samples=4, min_batches=1)(gmap)
        >>> 0 < message.metrics["fit"] < 1  # the cosine between message and gradient
        True
    """

    name: ClassVar[str] = "gradient_sketch"
    samples: int | None = None
    factors: Granularity = "token"
    _: KW_ONLY
    error_feedback: bool = True
    min_batches: int = 2

    def __post_init__(self) -> None:
        check_samples(self.samples, self.factors, get_args(Granularity))
        check_min_batches(self.min_batches)
        self._special = SpecialTokens()

    @property
    def facts(self) -> DefenseFacts:
        return replace(super().facts, post_processes=True)

    @property
    def special_ids(self) -> tuple[int, ...]:
        """The ids of the tokenizer's special tokens, which are public."""
        return self._special.ids

    def informed(self) -> dict[str, Any]:
        return {"restarts": 4}  # one start in a wrong place costs an attack all

    def prepare(self, model: nn.Module, processing_class: Any = None) -> None:
        """Take the tokenizer's special tokens, which stand at a text's ends only."""
        self._special = SpecialTokens.of(processing_class)

    def protect(self, gmap: GradientMap, generator: Stream) -> Message:
        check_embeddings_stay(gmap, self.name)
        if self.error_feedback and self._residual.too_few:
            return nothing_of(gmap)
        synthetic = synthetic_samples(gmap, self.samples, generator, self.special_ids)
        fit = SyntheticSamples(synthetic, true_gradient(gmap), self.factors).fit(synthetic.input)
        return Message(cast_like(fit.nearest, gmap), metrics={"fit": fit.cosine})

    def _mechanism(self, message: Message) -> Mechanism | None:
        return Mechanism(fitted=Fitted(self.samples, self.factors, self.special_ids))


_MARKS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class SpecialTokens(NamedTuple):
    """The special tokens of a tokenizer.

    Args:
        ids: All special ids, which keep their embeddings.
        marks: The special tokens with a role of their own, such as [CLS] and padding, at most
            seven. They are no content that would have to be hidden. Other special tokens may be.

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
        """Return the special tokens of a tokenizer, or of a processor that has one."""
        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        token_ids = (getattr(tokenizer, f"{mark}_token_id", None) for mark in _MARKS)
        marks: set[int] = {index for index in token_ids if index is not None}
        ids = marks.union(getattr(tokenizer, "all_special_ids", ()))
        return cls(tuple(sorted(ids)), tuple(sorted(marks)))


def check_samples(samples: int | None, factors: str, choices: Sequence[str]) -> None:
    """Refuse samples that cannot be counted, and factors that are not among the choices.

    Raises:
        ValueError: If so.
    """
    if samples is not None:
        check_whole("samples", samples, 1)
    if factors not in choices:
        raise ValueError(f"factors must be {' or '.join(map(repr, choices))}, but is {factors!r}.")


def check_embeddings_stay(gmap: GradientMap, name: str) -> None:
    """Raise ValueError if the token embeddings are among the parameters that are sent.

    Args:
        gmap: The client's map.
        name: The defense's name, for the message.

    Raises:
        ValueError: If the input embedding's weight is among the map's parameters.
    """
    weight = None if gmap.embedding is None else gmap.embedding.weight
    if weight is not None and any(p is weight for p in gmap.parameters.values()):
        raise ValueError(
            f"{name} never shares the token embeddings: their gradient names the words, and "
            "training them changes the space that an evaluation network knows. Leave "
            "share_input_embeddings at False."
        )


@dataclass
class SyntheticSamples:
    """Synthetic samples, and how they are fitted.

    Args:
        gmap: The gradient map of the synthetic samples.
        target: v.
        factors: How many factors, as `Granularity` says.
    """

    gmap: GradientMap
    target: Tensors
    factors: Granularity

    def fit(self, x: Tensor) -> Fit:
        """Return the fit at an input x*."""
        if self.factors == "message":
            return scaled(self.gmap.gradient_at(x), self.target)
        return SampleSpan(self.gmap, x).fit_by(self.target, self.factors)

    def slope(self, x: Tensor, fit: Fit) -> Tensor:
        """Return ∂(1 - cos)/∂x* at the best factors, whose own change changes nothing.

        It is -Σ_b c_b J_b(v - shared)/(‖shared‖ ‖v‖). Parameters that no layer has count with the
        same factors.
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
        """Descend by Adam from where the samples are.

        Args:
            iterations: The number of steps.
            rate: The rate of the first step, in units of the input's root mean square; it falls to
                0.
            free: A mask of what moves, broadcast to the input.
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


def free_positions(synthetic: GradientMap, special: Sequence[int]) -> Tensor:
    """Return a mask of what may move: all but the marks at a text's ends."""
    if synthetic.embedding is None:
        return torch.ones_like(synthetic.input[:, :1], dtype=torch.bool)
    return ~is_among(synthetic.domain.main_input(synthetic.batch), special)[..., None]


def is_among(ids: Tensor, listed: Sequence[int]) -> Tensor:
    return torch.isin(ids, torch.tensor(list(listed), dtype=ids.dtype, device=ids.device))
