"""Differential privacy (`dp_sgd`): clip and add Gaussian noise, to a mean gradient or per sample.

References: Abadi et al., "Deep Learning with Differential Privacy" (2016); Balle and Wang,
"Improving the Gaussian Mechanism for Differential Privacy" (2018).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers.utils import logging

from ..gradient_map import GradientMap, Tensors
from ..gradient_map.per_sample.clipping import clipped_sum
from ..gradient_map.types import Shards
from ..gradient_map.views import ZeroGradient
from ..randomness import Stream
from .base import (
    DefenseFacts,
    Message,
    Reader,
    State,
    cast_like,
    check_whole,
    first_not_finite,
    is_number,
    norm,
    wide,
)
from .correlated import CorrelatedNoise, Keys, add_on_grid, make_factor
from .mechanism import Mechanism
from .noise import STRENGTHS, NoiseDefense, OptimalNoise, add_noise
from .sensitivity import PUBLISHED_SMALLEST, ShapedBy

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class PrivacyPlan:
    """A plan of what decides ε of a whole training, made where the number of messages is known.

    Args:
        noise_multiplier: The multiplier σ of one message's noise.
        batch_size: The mean number B of rows of a message.
        messages: The number T of messages, where noise is correlated over them.
        min_separation: The least number of messages between two of one row, where noise is
            correlated.
        falling_rate: Whether learning rates fall to zero, where noise is correlated.

    Example:
        >>> plan = PrivacyPlan(noise_multiplier=1.0, batch_size=16)
        >>> private = {"per_sample": True, "target_epsilon": 3.0, "delta": 1e-5}
        >>> make_defense("dp_sgd", **private).planned(plan).noise_multiplier
        1.0
    """

    noise_multiplier: float
    batch_size: float
    messages: int | None = None
    min_separation: int | None = None
    falling_rate: bool | None = None


@dataclass
class DPSGD(NoiseDefense):
    """Clips, then adds the same Gaussian noise everywhere.

    By default the client's batch-mean gradient is clipped: client-level noise. With
    `clip_by="norm"` and an absolute `scale` every message is a Gaussian mechanism for the client as
    a whole: whatever its batch is replaced by moves the message by 2C at most, so its noise
    multiplier is scale/(2C) (`client_noise_multiplier`, logged as
    `defense/client_noise_multiplier`).

    With `per_sample=True` each sample's gradient is clipped to norm C and the message is (Σ_b
    clip(g_b) + σC N(0, I))/B: DP-SGD, which is (ε, δ)-differentially private for every row of the
    data where a Trainer draws batches by Poisson sampling.

    With `correlated=True` too, the noise of a client's messages is correlated, so that most of it
    cancels in the weights: a row in one message is as well protected against whoever has all of
    them, μ = 1/σ, and T messages leave noise of about σ (1 + ln(T)/π) in place of σ √T (see
    `correlated.py`). A message is (Σ_b clip(g_b) + σC‖C‖ (C⁻¹ z)_t)/B. It needs an optimizer
    that adds messages up: SGD, with momentum or without.

    `correlated=True` without `per_sample` is for updates of several local steps, and for batches
    that are clipped as a whole: what is in one message (or in `participations`) may be replaced,
    and all messages together are a Gaussian mechanism with the multiplier scale/(2C). It gains
    where a row is in few messages. A client whose data is the same in all of them gains nothing.

    Args:
        clip: The bound C.
        clip_by: `"norm"` scales the whole gradient down to norm C; `"coordinate"` clips every
            coordinate to ±C, the plain counterpart of `optimal_dp_sgd`.
        per_sample: Whether to clip each sample's gradient, that of its own mean loss.
        noise_multiplier: σ, with `per_sample`.
        target_epsilon: ε that a whole training may spend, with `per_sample` and `delta` in place of
            σ: the Trainer, who knows steps and sampling rate, finds σ.
        delta: δ, well below one over the number of rows, with `per_sample` or `correlated`. With it
            the Trainer logs `defense/epsilon`.
        expected_batch_size: B. Default: the rows that there are, which is right where their number
            is no secret. The Trainer sets it.
        correlated: Whether noise is correlated over messages. σ or `scale` is then relative to what
            a row in all of its messages can move.
        factorization: The factor: `"blt"` (default), `"banded"` or `"square_root"`; see
            `correlated.make_factor`.
        participations: In how many messages a row may be.
        min_separation: How far apart these are, at least. The Trainer sets it: a pass over the
            data.
        bands: The number of bands of `"banded"`.
        messages: T. The Trainer sets it.
        falling_rate: Whether learning rates fall to zero. The Trainer sets it by its schedule.
        sampling: How a Trainer puts rows into correlated messages, with `per_sample`: `"shuffle"`
            (default), or each into one drawn in secret; see `leakage.balls_in_bins_epsilon`.
    """

    name: ClassVar[str] = "dp_sgd"
    _of_samples: ClassVar[tuple[str, ...]] = (
        "noise_multiplier", "target_epsilon", "delta", "expected_batch_size",
    )  # fmt: skip
    clip: float = 1.0
    clip_by: Literal["norm", "coordinate"] = "norm"
    per_sample: bool = False
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    delta: float | None = None
    expected_batch_size: float | None = None
    correlated: bool = False
    factorization: Literal["blt", "banded", "square_root"] | None = None
    participations: int | None = None
    min_separation: int | None = None
    bands: int | None = None
    messages: int | None = None
    falling_rate: bool | None = None
    sampling: Literal["shuffle", "balls_in_bins"] | None = None

    def __new__(cls, *_: Any, correlated: bool = False, **__: Any) -> DPSGD:
        """Make a `DPFTRL`, a mechanism of its own, if noise is to be correlated."""
        return object.__new__(DPFTRL if correlated and cls is DPSGD else cls)

    def __post_init__(self) -> None:
        _check_clip(self.clip)
        self.plan: PrivacyPlan | None = None
        self._check_noise()
        if self.clip_by not in ("norm", "coordinate"):
            raise ValueError(f"clip_by must be 'norm' or 'coordinate', but is {self.clip_by!r}.")
        if not self.per_sample:
            if unusable := [name for name in self._of_samples if getattr(self, name) is not None]:
                raise ValueError(f"{' and '.join(unusable)} of dp_sgd: set per_sample=True too.")
            super().__post_init__()
            return
        if unusable := [name for name in STRENGTHS if getattr(self, name) is not None]:
            raise ValueError(
                f"dp_sgd with per_sample=True takes no {' and no '.join(unusable)}: its noise is "
                "noise_multiplier times clip on the sum of samples' gradients, whatever they are. "
                "Give noise_multiplier, or target_epsilon and delta."
            )
        self._check_private()

    def _check_noise(self) -> None:
        """Raise ValueError for settings of correlated noise."""
        if self.correlated:
            raise TypeError(f"{type(self).__name__} with correlated=True: derive it from DPFTRL.")
        if unusable := [name for name in _CORRELATED if getattr(self, name) is not None]:
            raise ValueError(f"{' and '.join(unusable)} of dp_sgd: set correlated=True too.")

    def _check_private(self) -> None:
        if self.clip_by != "norm":
            raise ValueError("dp_sgd with per_sample=True clips by norm: leave clip_by out.")
        if (self.noise_multiplier is None) == (self.target_epsilon is None):
            raise ValueError(
                "dp_sgd with per_sample=True needs noise_multiplier, or target_epsilon and delta: "
                "one of both."
            )
        for name in ("noise_multiplier", "target_epsilon", "expected_batch_size"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and value > 0):
                raise ValueError(f"{name} must be a finite number above 0, but is {value!r}.")
        if self.delta is not None and not (is_number(self.delta) and 0 < self.delta < 1):
            raise ValueError(f"delta must be between 0 and 1, but is {self.delta!r}.")
        if self.target_epsilon is not None and self.delta is None:
            raise ValueError("target_epsilon needs delta, well below one over the number of rows.")

    def clipped(self, gradient: Tensors, shards: Shards | None) -> Tensors:
        if self.clip_by == "coordinate":
            return {name: g.clamp(-self.clip, self.clip) for name, g in gradient.items()}
        size = norm(gradient, shards)
        return (
            gradient
            if size <= self.clip
            else {name: g * (self.clip / size) for name, g in gradient.items()}
        )

    def unclipped(self, undefended: Tensors, gradient: Tensors) -> Tensors:
        if self.clip_by == "coordinate":
            return _within(undefended, self.clip)
        # The norm of what is clipped by it does not move.
        zeros = {name: torch.zeros_like(g) for name, g in gradient.items()}
        return gradient if gradient is undefended else zeros

    def referred(self, gradient: Tensors, variance: Tensors, shards: Shards | None) -> Tensors:
        if self.clip_by == "coordinate":
            return _infinite_where_clipped(gradient, variance, self.clip)
        # J̃ = (C/‖g‖) J (I - ĝĝᵀ), and a projection only takes information away from uniform noise.
        grown = max(norm(gradient, shards) / self.clip, 1.0) ** 2
        return {name: v * grown for name, v in variance.items()}

    @property
    def client_noise_multiplier(self) -> float | None:
        """The noise multiplier scale/(2C) of a message for a client whose whole batch is replaced.

        It is `None` where that does not hold: noise relative to the gradient, clipping by
        coordinate, or by sample.
        """
        if self.per_sample or self.clip_by != "norm" or not self.scale:
            return None
        return self.scale / (2 * self.clip)

    @property
    def facts(self) -> DefenseFacts:
        # Σ' on the undefended gradient that would hide as much exists for one clipping factor, not
        # for one per sample.
        return replace(
            super().facts,
            needs_samples=self.per_sample,
            reruns_model=self.per_sample or super().facts.reruns_model,
            adds_gaussian_noise=not self.per_sample,
            post_processes=not self.per_sample,
            follows_transcript=not self.per_sample and self.follows_transcript,
            sharded_refusal=_NO_SAMPLES if self.per_sample else None,
        )

    def _mechanism(self, message: Message) -> Mechanism | None:
        """Return the mechanism of a clipped gradient, or of a sum of samples' clipped gradients."""
        if not self.per_sample:
            mechanism = super()._mechanism(message)
            return None if mechanism is None else replace(mechanism, **self.informed())
        samples = message.metrics.get("samples", 1.0)
        size = self.expected_batch_size or samples
        std = (self.noise_multiplier or 0.0) * self.clip / size
        std *= message.metrics.get("correlated_noise", 1.0)
        return Mechanism(
            clip_sample=self.clip, scale=samples / size, noise="gaussian", variance=std**2
        )

    def informed(self) -> dict[str, Any]:
        return {"clip_norm" if self.clip_by == "norm" else "clip_coordinate": self.clip}

    def planned(self, plan: PrivacyPlan) -> DPSGD:
        """Return the mechanism of a training that was planned, with the same state.

        Args:
            plan: The plan that a Trainer made.
        """
        planned = replace(self, **self._settings_of(plan))
        planned.plan, planned.state = plan, self.state
        return planned

    def _settings_of(self, plan: PrivacyPlan) -> dict[str, Any]:
        """Return the settings that a plan decides."""
        if not self.per_sample:  # of updates as a whole `scale` says it
            return {}
        return {
            "noise_multiplier": plan.noise_multiplier,
            "target_epsilon": None,
            "expected_batch_size": plan.batch_size,
        }

    def protect(self, gmap: GradientMap, generator: Stream) -> Message:
        if not self.per_sample:
            return self._protect_whole(gmap, generator)
        if self.noise_multiplier is None:
            raise ValueError(
                "dp_sgd with target_epsilon is calibrated by a Trainer, which knows the sampling "
                "rate and the number of steps. Elsewhere give noise_multiplier, as "
                "hf_gradguard.leakage.dp_sgd_noise_multiplier finds it."
            )
        if isinstance(gmap, ZeroGradient):  # a batch that turned out empty shares noise alone
            total, samples, metrics = wide(gmap.gradient()), 0, {}
        else:
            clipped = clipped_sum(gmap, self.clip)
            total, samples = clipped.total, len(clipped.norms)
            metrics = {
                "clipped_samples": float((clipped.norms > self.clip).double().mean()),
                "samples": float(samples),
            }
        noise_std = self.noise_multiplier * self.clip
        noisy, facts = self._with_noise(total, noise_std, generator)
        size = self.expected_batch_size or samples
        shared = {name: tensor.div_(size) for name, tensor in noisy.items()}
        return Message(cast_like(shared, gmap), metrics=metrics | facts)

    def _with_noise(
        self, total: Tensors, noise_std: float, generator: Stream
    ) -> tuple[Tensors, dict[str, float]]:
        """Return a clipped sum with noise of a standard deviation, and what to log of it."""
        std = torch.tensor(noise_std, dtype=torch.float64)
        entries = sum(tensor.numel() for tensor in total.values())
        noisy = add_noise(total, lambda name: std.expand_as(total[name]), entries, generator)
        return dict(noisy), {}

    def _protect_whole(self, gmap: GradientMap, generator: Stream) -> Message:
        """The client's gradient, or its update, clipped as one."""
        message = super().protect(gmap, generator)
        if gmap.transmitted is None:
            message.metrics.update(self._client_metrics)
        return message

    @property
    def _client_metrics(self) -> dict[str, float]:
        multiplier = self.client_noise_multiplier
        return {} if multiplier is None else {"client_noise_multiplier": multiplier}


@dataclass
class DPFTRL(DPSGD):
    """Adds noise that is correlated over a client's messages: `dp_sgd` with `correlated=True`.

    Reference: Kairouz et al., "Practical and Private (Deep) Learning Without Sampling or Shuffling"
    (2021); factors in `correlated.py`.

    Example:
        >>> private = {"per_sample": True, "noise_multiplier": 1.0, "messages": 8}
        >>> type(make_defense("dp_sgd", correlated=True, **private)).__name__
        'DPFTRL'
    """

    name: ClassVar[str] = "dp_sgd"
    # δ is not among them: all messages are one mechanism, whose ε is known
    _of_samples: ClassVar[tuple[str, ...]] = (
        "noise_multiplier", "target_epsilon", "expected_batch_size",
    )  # fmt: skip
    correlated: bool = True

    def _check_noise(self) -> None:
        if not self.per_sample and not (self.scale and self.clip_by == "norm"):
            raise ValueError(
                "dp_sgd with correlated=True needs per_sample=True and noise_multiplier, or scale "
                "(above 0) and clip_by='norm' for updates as a whole: noise relative to a gradient "
                "has no sensitivity that a factor could be planned for."
            )
        if self.factorization not in (None, "blt", "banded", "square_root"):
            raise ValueError(
                "factorization must be 'blt', 'banded' or 'square_root', but is "
                f"{self.factorization!r}."
            )
        if self.falling_rate not in (None, True, False):
            raise ValueError(f"falling_rate must be true or false, not {self.falling_rate!r}.")
        if self.sampling not in (None, "shuffle", "balls_in_bins"):
            raise ValueError(f"sampling must be shuffle or balls_in_bins, not {self.sampling!r}.")
        if self.sampling == "balls_in_bins" and not self.per_sample:
            raise ValueError("sampling='balls_in_bins' places single rows: set per_sample=True.")
        for name in _WHOLE_NUMBERS:
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), least=1)

    @property
    def facts(self) -> DefenseFacts:
        refusal = super().facts.sharded_refusal or _NO_STREAMS
        return replace(
            super().facts,
            adds_gaussian_noise=False,
            post_processes=False,
            sharded_refusal=refusal,
        )

    def _mechanism(self, message: Message) -> Mechanism | None:
        if self.per_sample:
            return super()._mechanism(message)
        std = (self.scale or 0.0) * message.metrics.get("correlated_noise", 1.0)
        return Mechanism(noise="gaussian", variance=std**2, **self.informed())

    def _settings_of(self, plan: PrivacyPlan) -> dict[str, Any]:
        names = ("messages", "min_separation", "falling_rate")
        return super()._settings_of(plan) | {name: getattr(plan, name) for name in names}

    def at_message(self, state: State, position: int, keys: Keys = lambda _: None) -> State:
        """Return a client's state before a message of the plan.

        If the remembered noise is of a later message or of another plan, noise begins anew.

        Args:
            state: The client's state.
            position: The message's number.
            keys: The function that returns the keys of messages that left without being remembered;
                see `CorrelatedNoise.resumed_at`.
        """
        return {**state, "noise": self.noise_at(state, position).resumed_at(position, keys)}

    def noise_at(self, state: State, position: int) -> CorrelatedNoise:
        """Return the noise that continues at a message: the remembered one, or else a new one.

        Raises:
            ValueError: If the defense has no number of messages to plan the noise for.
        """
        noise: CorrelatedNoise | None = state.get("noise")
        if noise is not None and noise.messages == self.messages and noise.position <= position:
            return noise
        if self.messages is None:
            raise ValueError(
                "dp_sgd with correlated=True needs messages, for how many the noise is planned. A "
                "Trainer knows their number; elsewhere give it."
            )
        factor = make_factor(
            self.factorization or "blt", self.messages, self.participations or 1,
            self.min_separation, self.bands, bool(self.falling_rate),
        )  # fmt: skip
        return CorrelatedNoise(factor, self.messages, position)

    def state_readers(self) -> dict[str, Reader]:
        return {**super().state_readers(), "noise": CorrelatedNoise.from_tensors}

    def _protect_whole(self, gmap: GradientMap, generator: Stream) -> Message:
        gradient = gmap.gradient()
        if first_not_finite(gradient, gmap.shards):
            logger.warning_once(_SHARES_NOISE)
            gradient = {name: torch.zeros_like(g) for name, g in gradient.items()}
        clipped = self.clipped(wide(gradient), gmap.shards)
        noisy, metrics = self._with_noise(clipped, self.scale or 0.0, generator)
        return Message(cast_like(noisy, gmap), metrics=self._client_metrics | metrics)

    def _with_noise(
        self, total: Tensors, noise_std: float, generator: Stream
    ) -> tuple[Tensors, dict[str, float]]:
        if self.sampling is not None and self.plan is None:
            raise ValueError(
                f"dp_sgd with sampling={self.sampling!r} needs a Trainer that draws its batches "
                "itself. Elsewhere leave sampling out."
            )
        correlated: CorrelatedNoise = self.state.get("noise") or self.noise_at(self.state, 0)
        values = torch.cat([tensor.flatten() for tensor in total.values()])
        noise, next_noise = correlated.draw(len(values), values.device, generator)
        strength = correlated.sensitivity(self.participations or 1, self.min_separation)
        noisy = add_on_grid(values, noise.mul_(noise_std * strength), noise_std, len(values))
        self.remember(noise=next_noise)
        sizes = [tensor.numel() for tensor in total.values()]
        entries = zip(total.items(), noisy.split(sizes), strict=True)
        # of this message, seen by itself, in units of independent noise
        gain = strength * math.sqrt(next_noise.power())
        return {name: e.view_as(tensor) for (name, tensor), e in entries}, {
            "correlated_noise": gain
        }


@dataclass
class OptimalDPSGD(OptimalNoise):
    """Clips every coordinate to ±clip, then adds optimal noise for what is left.

    A clipped coordinate does not change with the input, so with `shape="own"` it gets no noise.
    (Theorem 3 of the paper's first version.) Which ones have none then says what was clipped.

    Args:
        clip: The bound P of every coordinate.
    """

    name: ClassVar[str] = "optimal_dp_sgd"
    facts = OptimalNoise.facts
    clip: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_clip(self.clip)

    def clipped(self, gradient: Tensors, shards: Shards | None) -> Tensors:
        return {name: g.clamp(-self.clip, self.clip) for name, g in gradient.items()}

    def referred(self, gradient: Tensors, variance: Tensors, shards: Shards | None) -> Tensors:
        return _infinite_where_clipped(gradient, variance, self.clip)

    def unclipped(self, undefended: Tensors, gradient: Tensors) -> Tensors:
        return _within(undefended, self.clip)

    def bare_where_clipped(self, ratio: Tensors, gradient: Tensors) -> Tensors:
        # With one ratio per tensor the clipped ones have it too.
        return {name: tensor * self._is_within(gradient[name]) for name, tensor in ratio.items()}

    def learned(self, gradient: Tensors, squares: Tensors) -> tuple[Tensors, Tensors]:
        squares = {name: s * self._is_within(gradient[name]) for name, s in squares.items()}
        if self.shape == "own":
            return {name: g * self._is_within(g) for name, g in gradient.items()}, squares
        return self.clipped(gradient, None), squares

    def learns_all(self, gradient: Tensors, shards: Shards | None) -> bool:
        is_clipped = not all(bool(self._is_within(g).all()) for g in gradient.values())
        return not (is_clipped if shards is None else shards.any(is_clipped))

    def _mechanism(self, message: Message) -> Mechanism | None:
        mechanism = super()._mechanism(message)
        return None if mechanism is None else replace(mechanism, clip_coordinate=self.clip)

    def informed(self) -> dict[str, Any]:
        return super().informed() | {"clip_coordinate": self.clip}

    def _is_within(self, g: Tensor) -> Tensor:
        return g.abs() < self.clip


@dataclass
class OptimalDPSGDPublished(OptimalDPSGD):
    """Clips and adds noise exactly as the paper on optimal DP-SGD describes.

    Every coordinate is clipped to ±1. The noise then has this very batch's shape, Σ_ii = λ s_i /
    max(|g_i|, 1e-6), and is left out where a coordinate was clipped; s comes from k = 10 random
    directions.

    The paper names no λ. Its strength is that of `optimal_noise` unless you give another. It is no
    differential privacy: no ε follows from it.

    Reference: Chen, Gürsoy, Lei, first version (2024), Theorem 3, Appendix B.

    Example:
        >>> make_defense("optimal_dp_sgd_published", relative_scale=5.0).clip
        1.0
    """

    name: ClassVar[str] = "optimal_dp_sgd_published"
    facts = OptimalDPSGD.facts
    smallest_gradient: ClassVar[float] = PUBLISHED_SMALLEST
    shape: ShapedBy = "own"
    num_probes: int | None = 10
    strength: Literal["transcript", "own"] = "own"


def _infinite_where_clipped(gradient: Tensors, variance: Tensors, clip: float) -> Tensors:
    """Return the variance with infinity at clipped coordinates.

    A clipped coordinate does not change with the input. It says as little as one that is not sent.
    """
    return {
        name: v.masked_fill(gradient[name].abs() >= clip, math.inf) for name, v in variance.items()
    }


def _within(gradient: Tensors, clip: float) -> Tensors:
    return {name: g.where(g.abs() < clip, 0) for name, g in gradient.items()}


def _check_clip(clip: float) -> None:
    if not (is_number(clip) and clip > 0):
        raise ValueError(f"clip must be a finite number above 0, but is {clip!r}.")


_WHOLE_NUMBERS = ("participations", "min_separation", "bands", "messages")
_CORRELATED = ("factorization", "falling_rate", "sampling", *_WHOLE_NUMBERS)
_NO_SAMPLES = (
    "with per_sample=True it needs samples' gradients, which no device holds. Leave per_sample "
    "out, or give each rank the whole model."
)
_NO_STREAMS = (
    "with correlated=True its noise is one stream of the whole message, which no device holds. "
    "Leave correlated out, or give each rank the whole model."
)
_SHARES_NOISE = (
    "The gradient of a batch is not finite, so its message is noise alone: a training that stopped "
    "would tell what is in the batch. Only this process is told. Look for labels out of range, or "
    "a learning rate that made the weights diverge."
)
