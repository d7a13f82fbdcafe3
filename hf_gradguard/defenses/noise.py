"""Noise defenses, which share y = g + N(0, Σ) with diagonal Σ.

With Fisher information J_F = J Σ⁻¹ Jᵀ about the input, Tr J_F = Σ_i s_i²/Σ_ii bounds every
attacker, and U₂ = -Σ_i g_i² Σ_ii is the second-order utility. Tr J_F is least at fixed U₂
(Cauchy-Schwarz) for

    Σ_ii = λ s_i / |g_i|

Reference: Chen, Gürsoy, Lei, "Optimal Defenses Against Data Reconstruction Attacks" (2024, 2025).
Their Algorithm 1 prints s_i squared; their theorem, its proof and this module have it plain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..gradient_map import GradientMap, Tensors
from ..gradient_map.domain import Text, domains_in, special_ids
from ..gradient_map.random_batch import random_batch, resize_texts
from ..gradient_map.types import Shards
from ..gradient_map.views import ZeroGradient
from ..randomness import Distribution, Stream
from .base import (
    Defense,
    DefenseFacts,
    Message,
    Noise,
    OnDemand,
    Reader,
    add_up,
    cast_like,
    count,
    is_number,
    power,
    root,
    scaled,
    single_number,
    total,
    true_gradient,
)
from .mechanism import Mechanism
from .sensitivity import (
    PUBLISHED_SMALLEST,
    SensitivityDefense,
    ShapedBy,
    capped,
    sensitivity_ratio,
)
from .shape_information import own_shape_trace, strength_trace

logger = logging.get_logger(__name__)

STRENGTHS = ("scale", "relative_scale", "utility_budget")
"""Settings of which one says how strong noise is."""
RECOMMENDED_SCALE = 20.0
"""`relative_scale` of noise named alone, as docs/choose.md recommends: span found no word behind
it, TAG 1 to 6 %, and span behind noise of once the gradient up to 76 to 86 %
(docs/findings/text.md).
"""
_SHARED_DRAW, _SHARED_DRAW_ELSEWHERE = 2**20, 2**24
"""Numbers of small tensors in one draw, on a processor and on other devices."""


@dataclass
class NoiseDefense(Defense):
    """A base of noise defenses of a given strength.

    At most one of `scale`, `relative_scale` and `utility_budget` may be given; none of them means
    `relative_scale=20`.

    Args:
        scale: The root mean square of the noise's standard deviation over all shared parameters, in
            the gradient's unit. Defenses of equal `scale` add equal noise power Tr Σ/d = scale².
        relative_scale: `scale` as a multiple of the root mean square of the gradients that noise is
            usually added to.
        utility_budget: C ≥ 0 with U₂ = -C: the variance of ⟨g, y⟩ that the noise may cause.
        strength: Which gradient `relative_scale` and `utility_budget` are relative to.
            `"transcript"`: the usual one, known from random inputs at the first message and then
            from what was shared, so that the strength tells nothing more (`UsualPower`). `"own"`:
            the one that is shared, as in papers. The message then shows its norm.
    """

    distribution: ClassVar[Distribution] = "gaussian"
    scale: float | None = None
    relative_scale: float | None = None
    utility_budget: float | None = None
    strength: Literal["transcript", "own"] = "transcript"

    def __post_init__(self) -> None:
        strengths = {
            name: getattr(self, name) for name in STRENGTHS if getattr(self, name) is not None
        }
        if self.strength not in ("transcript", "own"):
            raise ValueError(f"strength must be 'transcript' or 'own', but is {self.strength!r}.")
        if len(strengths) > 1:
            raise ValueError(
                f"Give one of scale, relative_scale and utility_budget, not "
                f"{' and '.join(strengths)}."
            )
        for name, value in strengths.items():
            if not (is_number(value) and value >= 0):
                raise ValueError(f"{name} must be a finite number of at least 0, but is {value!r}.")
        if not strengths:
            self.relative_scale = RECOMMENDED_SCALE

    def clipped(self, gradient: Tensors, shards: Shards | None) -> Tensors:
        """Return the gradient that noise is added to; override it together with `referred`."""
        return gradient

    def referred(self, gradient: Tensors, variance: Tensors, shards: Shards | None) -> Tensors:
        """Return the variance that noise on the gradient itself would need to hide its input.

        It hides the input as well, or less well. With J̃ the Jacobian of `clipped`, it is any Σ'
        with J̃ Σ⁻¹ J̃ᵀ ≼ J Σ'⁻¹ Jᵀ, so that figures err toward more leakage.
        """
        return variance

    def unclipped(self, undefended: Tensors, gradient: Tensors) -> Tensors:
        """Return `clipped`'s outcome where it moves as the input does, zeros elsewhere."""
        return gradient

    def shaped(
        self, gmap: GradientMap, gradient: Tensors, generator: Stream
    ) -> Mapping[str, Tensor]:
        """Return variances up to a common factor.

        Here they are the same wherever an earlier defense left something.
        """
        uniform = {name: g.new_ones(()).expand_as(g) for name, g in gradient.items()}  # no memory
        return gmap.restrict(uniform)

    def shape_trace(
        self, gmap: GradientMap, undefended: Tensors, gradient: Tensors, shape: Mapping[str, Tensor]
    ) -> float:
        """Return `Noise.shape_trace`.

        Here it is what lies in the strength, if that is the batch's own.
        """
        moving = self.unclipped(undefended, gradient)
        return strength_trace(gmap, gradient, moving, shape, self)

    def variance(
        self, gradient: Tensors, shape: Mapping[str, Tensor], shards: Shards | None
    ) -> Mapping[str, Tensor]:
        """Return the diagonal of Σ: `shape` times the factor λ that gives the strength."""
        entries, cost = count(gradient, shards), float(total(shape, shards))
        usual = self._usual.mean if self.follows_transcript else None
        if self.scale is not None:
            budget = self.scale**2 * entries
        elif self.relative_scale is not None:
            usual = float(power(gradient, shards)) if usual is None else usual
            budget = self.relative_scale**2 * usual
        else:
            budget = self.utility_budget or 0.0
            costs = OnDemand(gradient, lambda name: gradient[name].square() * shape[name])
            cost = float(total(costs, shards)) if usual is None else cost / entries * usual
        if budget and not cost:
            logger.warning_once(
                f"{self.name} added no noise: the gradient or all its sensitivities are zero, so "
                "to first order there is nothing about the input in it."
            )
        # The factor is the strength asked for over the strength of the shape as it is.
        factor = budget / cost if cost else 0.0
        if isinstance(shape, OnDemand):
            noise_power = budget if self.utility_budget is None and cost else None
            return OnDemand(shape, lambda name: scaled(shape[name], factor), noise_power)
        return {name: scaled(tensor, factor) for name, tensor in shape.items()}

    @property
    def follows_transcript(self) -> bool:
        """Whether its strength is relative to the usual gradient, and not to this one."""
        return self.strength == "transcript" and self.scale is None

    def protect(self, gmap: GradientMap, generator: Stream) -> Message:
        undefended, shards = true_gradient(gmap), gmap.shards
        gradient = self.clipped(undefended, shards)
        has_strength = self.follows_transcript and is_anything_left(gmap)
        if has_strength and not self._usual.mean:
            power_of_inputs = random_power(gmap, generator, lambda g: self.clipped(g, shards))
            self.remember(usual=UsualPower.of_random_inputs(power_of_inputs))
        shape = self.shaped(gmap, gradient, generator)
        variance = self.variance(gradient, shape, shards)
        entries, squares = count(gradient, shards), dict[str, Tensor]()
        deviations = partial(root, variance, squares)
        groups = [(gradient, generator)] if shards is None else shards.streams(gradient, generator)
        noisy: Tensors = {}
        for group, stream in groups:
            noisy.update(add_noise(group, deviations, entries, stream, self.distribution))
        shared, metrics = cast_like(noisy, gmap), {}
        if has_strength:
            noise_power = float(total(variance, shards))
            metrics["noise_scale"] = math.sqrt(noise_power / entries)
            message_power = float(power(shared, shards))
            noise_squares = float(add_up(squares, shards))
            self.remember(usual=self._usual.updated(message_power, noise_power, noise_squares))

        # Only meters and audits ask for it, and it takes as much memory as gradients do.
        def noise() -> Noise:
            added = dict(variance)
            referred = self.referred(undefended, added, shards)
            trace = self.shape_trace(gmap, undefended, gradient, shape)
            return Noise(referred, added, trace, plain=self._plain)

        return Message(
            shared,
            noise=noise if self.facts.adds_gaussian_noise else None,
            transmitted=gmap.transmitted,
            metrics=metrics,
        )

    def _mechanism(self, message: Message) -> Mechanism | None:
        mechanism = super()._mechanism(message)
        is_own = self.strength == "own" and self.scale is None and self.relative_scale
        if not is_own or mechanism is None or not isinstance(mechanism.variance, Mapping):
            return mechanism
        noise_power = float(total(mechanism.variance, None))
        return replace(mechanism, relative_to=noise_power / self.relative_scale**2)  # type: ignore[operator]

    @property
    def _usual(self) -> UsualPower:
        return self.state.get("usual") or UsualPower()

    def state_readers(self) -> dict[str, Reader]:
        return {**super().state_readers(), "usual": UsualPower.from_tensors}

    @property
    def facts(self) -> DefenseFacts:
        return DefenseFacts(
            needs_input=False,
            reruns_model=self.follows_transcript and not self._usual.mean,  # its first message
            post_processes=True,
            sharded_refusal=None,
            adds_gaussian_noise=self.distribution == "gaussian",
            noise_ratio=self.relative_scale,
            follows_transcript=self.follows_transcript,
        )

    @property
    def stands_alone(self) -> bool:
        """Whether a client in whose batch nothing counts shares noise.

        Then its strength follows no gradient, and is known.
        """
        return bool(self.scale or (self.follows_transcript and self._usual.mean))

    @property
    def _plain(self) -> bool:
        """Whether covariances add up where Gaussian noise was before; see `Noise`."""
        return type(self).clipped is NoiseDefense.clipped


@dataclass
class GaussianNoise(NoiseDefense):
    """Adds the same Gaussian noise to every parameter: Σ = scale² I."""

    name: ClassVar[str] = "gaussian_noise"
    facts = NoiseDefense.facts


@dataclass
class LaplaceNoise(NoiseDefense):
    """Adds the same Laplace noise to every parameter, with a Gaussian's variance: b = scale/√2."""

    name: ClassVar[str] = "laplace_noise"
    distribution: ClassVar[Distribution] = "laplace"
    facts = NoiseDefense.facts

    def _mechanism(self, message: Message) -> Mechanism | None:
        """Of relative noise, y itself tells its strength: E ‖y‖² = ‖g‖² (1 + r²)."""
        masks, entries = message.transmitted, count(message, None)
        noisy = max(entries if masks is None else int(total(masks, None)), 1)
        scale = message.metrics.get("noise_scale", self.scale)
        if scale is not None:
            variance = scale**2 * entries / noisy
        elif self.relative_scale is not None:
            share = self.relative_scale**2 / (1 + self.relative_scale**2)
            squares = sum(float(t.double().square().sum()) for t in message.values())
            variance = share * squares / noisy
        else:
            return None
        if not variance:
            return Mechanism()
        relative_to = None if scale is not None else squares - variance * noisy
        return Mechanism(noise="laplace", variance=variance, relative_to=relative_to)


@dataclass
class OptimalNoise(SensitivityDefense, NoiseDefense):
    """Adds noise shaped by sensitivity, Σ_ii = λ s_i / |g_i|.

    It gives the least information about the input at a given utility, of all shapes that know s and
    g. With `shape="own"` they are this batch's, as published, and parameters with s_i = 0 get no
    noise. With `"public"` and `"past"` Σ does not depend on the batch.

    Args:
        floor: ρ in [0, 1], the fraction of the noise's power that `"public"` and `"past"` spread
            over all coordinates equally, so that none of an unusual batch stays bare. Default: 0.2.
    """

    name: ClassVar[str] = "optimal_noise"
    facts = SensitivityDefense.facts
    floor: float | None = None

    def __post_init__(self) -> None:
        NoiseDefense.__post_init__(self)
        SensitivityDefense.__post_init__(self)
        if self.follows_transcript and self.utility_budget is not None:
            raise ValueError(
                f"utility_budget of {self.name} weighs entries by this batch's squares, so its "
                "strength follows the batch: give relative_scale or scale, or strength='own'."
            )
        if self.shape == "own":
            if self.floor is not None:
                raise ValueError(
                    "shape='own' leaves coordinates bare that know nothing of this batch, as "
                    "published: leave floor out, or take shape='public' or 'past'."
                )
            return
        self.floor = 0.2 if self.floor is None else self.floor
        if not (is_number(self.floor) and 0 <= self.floor <= 1):
            raise ValueError(f"floor must be from 0 to 1, but is {self.floor!r}.")

    @property
    def _plain(self) -> bool:
        return super()._plain and self.shape != "own"

    def informed(self) -> dict[str, Any]:
        return {"noise_variance": True}

    def bare_where_clipped(self, ratio: Tensors, gradient: Tensors) -> Tensors:
        """Return ratios, without those of coordinates that clipping holds."""
        return ratio

    def shaped(
        self, gmap: GradientMap, gradient: Tensors, generator: Stream
    ) -> Mapping[str, Tensor]:
        is_empty = isinstance(gmap, ZeroGradient)
        if self.shape == "own" and not is_empty:
            own = self.own_sensitivity(gmap, gradient, generator)
            ratio = sensitivity_ratio(*own, self.smallest_gradient)
            own_ratio = capped(self.bare_where_clipped(gmap.restrict(ratio), gradient))
            return OnDemand(gradient, lambda name: own_ratio[name].clone())
        averaged = self.known_ratio(gradient) if is_empty else self.averaged_ratio(gmap, generator)
        product = self._measured.product
        is_uniform = product is not None and product.says_uniform(self.name)
        if averaged is None or is_uniform:
            return NoiseDefense.shaped(self, gmap, gradient, generator)
        # What an earlier defense withheld gets no noise, so the floor is spread over the rest.
        shape, masks = averaged, gmap.transmitted
        entries = count(gradient, gmap.shards) if masks is None else int(total(masks, gmap.shards))
        if masks is not None:
            shape = OnDemand(gradient, lambda name: gmap.restrict({name: averaged[name]})[name])
        shape_sum = float(total(shape, gmap.shards))
        assert self.floor is not None
        lift = self.floor * shape_sum / max(int(entries), 1)

        spread = 1 - self.floor

        def lifted(name: str) -> Tensor:
            lifted_shape = scaled(shape[name], spread, lift)
            return gmap.restrict({name: lifted_shape})[name]

        # The power that is lifted off is as much as what is spread.
        return OnDemand(gradient, lifted, shape_sum)

    def shape_trace(
        self, gmap: GradientMap, undefended: Tensors, gradient: Tensors, shape: Mapping[str, Tensor]
    ) -> float:
        if self.shape != "own" or isinstance(gmap, ZeroGradient):
            return super().shape_trace(gmap, undefended, gradient, shape)
        return own_shape_trace(gmap, gradient, dict(shape), self)


@dataclass
class OptimalNoisePublished(OptimalNoise):
    """Adds optimal noise exactly as its paper describes.

    It is Σ_ii = λ s_i / max(|g_i|, 1e-6) of this very batch, s from k = 10 random directions, and
    no noise where s_i = 0. The paper names no λ. Its strength is that of `optimal_noise` unless you
    give another. The shape follows the batch, and attackers see it: `optimal_noise` has a public
    one.

    Reference: Chen, Gürsoy, Lei (2025), Theorem 3.5, Eq. 7, Algorithm 1, Appendix C. (Algorithm 1
    prints s_i squared; the theorem, its proof and the authors' code have it plain.)

    Example:
        >>> make_defense("optimal_noise_published", relative_scale=5.0).shape
        'own'
    """

    name: ClassVar[str] = "optimal_noise_published"
    facts = OptimalNoise.facts
    smallest_gradient: ClassVar[float] = PUBLISHED_SMALLEST
    shape: ShapedBy = "own"
    num_probes: int | None = 10
    strength: Literal["transcript", "own"] = "own"


def add_noise(
    tensors: Mapping[str, Tensor],
    deviations: Callable[[str], Tensor],
    entries: int,
    stream: Stream,
    noise: Distribution = "gaussian",
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors with noise, see `Stream.noisy`.

    Small neighbors share a draw, since a draw costs as much as a thousand numbers. Large ones have
    draws of their own.

    Args:
        tensors: Tensors by name.
        deviations: A function that gives the standard deviations of a tensor's noise, in its shape.
            An expanded number stands for a tensor of it.
        entries: The number of entries of the whole message, of which these may be a part.
        stream: The source of the noise.
        noise: The distribution of the noise.

    Yields:
        A name, and the tensor with noise, in the order of `tensors`.

    Example:
        >>> zeros = {"weight": torch.zeros(4, 3), "bias": torch.zeros(4)}
        >>> std = torch.tensor(0.5)
        >>> noisy = dict(add_noise(zeros, lambda name: std.expand_as(zeros[name]), 16, Stream()))
        >>> noisy["weight"].shape, noisy["bias"].shape
        (torch.Size([4, 3]), torch.Size([4]))
    """
    for group in _neighbors(tensors):
        rows = [tensor.flatten() for tensor in group.values()]
        stds = [deviations(name) for name in group]
        values = torch.cat(rows) if len(rows) > 1 else rows[0]  # joining would copy a large one
        noisy = stream.noisy(values, _joined(stds), entries, noise).split([*map(len, rows)])
        for (name, tensor), noisy_tensor in zip(group.items(), noisy, strict=True):
            yield name, noisy_tensor.view(tensor.shape)


def _neighbors(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Runs of small tensors of one type and device, and large ones alone."""
    group: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        neighbor = next(iter(group.values()), tensor)
        size = sum(waiting.numel() for waiting in group.values()) + tensor.numel()
        fits = size <= (_SHARED_DRAW if tensor.device.type == "cpu" else _SHARED_DRAW_ELSEWHERE)
        if group and not (
            fits and (tensor.dtype, tensor.device) == (neighbor.dtype, neighbor.device)
        ):
            yield group
            group = {}
        group[name] = tensor
    if group:
        yield group


def _joined(stds: Sequence[Tensor]) -> Tensor:
    """`()` where all are one number, else `(n,)`."""
    numbers = {None if (n := single_number(std)) is None else float(n) for std in stds}
    if len(numbers) == 1 and None not in numbers:
        return torch.tensor(numbers.pop(), dtype=torch.float64)
    return torch.cat([std.flatten() for std in stds]) if len(stds) > 1 else stds[0].flatten()


# The strength of noise that is relative to a client's usual gradient: estimates from random inputs,
# and from what was shared since.

FIRST_BATCHES = 4
"""Random batches that the first estimate is of."""
_REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError,
             ValueError)  # fmt: skip
"""What models and losses raise of inputs that they do not take."""
PRIOR_SPREAD = 2.0
"""Of ‖g‖² on random inputs, relative to that on real ones: hardly more than its order is known."""
BATCH_SPREAD = 0.5
"""Of ‖g‖² between batches, relative to its mean."""
DRIFT = 0.05
"""Of the mean from one message to the next, relative to it."""
STRENGTH_KEY = "usual_power"
"""What the state of a strength is called."""
LEAST_STEP = 0.5
"""What an estimate keeps at least from one message to the next: it stays above 0."""


class UsualPower(NamedTuple):
    """An estimate of E ‖g‖², by a Kalman filter over messages.

    It is a function of random numbers and of what was shared, so it reveals nothing new.

    Noise of r times *this* gradient shows its norm: ‖y‖² is ‖g‖² (1 + r²), to 2 in 10,000 of a
    model of 22 million parameters, and the norm alone names a sentence among hundreds. Noise of r
    times the *usual* gradient shows nothing.

    Args:
        mean: The estimate of E ‖g‖²; 0 before the first message.
        variance: The variance of the estimate.

    Example:
        >>> usual = UsualPower.of_random_inputs(4.0)
        >>> for _ in range(100):
        ...     usual = usual.updated(message_power=51.0, noise_power=50.0, noise_squares=0.1)
        >>> round(usual.mean, 2)
        1.0
    """

    mean: float = 0.0
    variance: float = 0.0

    @classmethod
    def of_random_inputs(cls, random_power: float) -> UsualPower:
        """Return the first estimate, given ‖g‖² of random inputs."""
        return cls(random_power, (PRIOR_SPREAD * random_power) ** 2)

    def updated(self, message_power: float, noise_power: float, noise_squares: float) -> UsualPower:
        """Return the estimate after one more message.

        Args:
            message_power: The squared norm ‖y‖² of the message.
            noise_power: The trace Tr Σ of the noise's covariance.
            noise_squares: The trace Tr Σ².
        """
        # Of ‖g + n‖² - Tr Σ: of ‖n‖², of 2⟨g, n⟩ with n along g as anywhere, and of batches.
        along = noise_squares / noise_power if noise_power else 0.0
        error = 2 * noise_squares + 4 * along * self.mean + (BATCH_SPREAD * self.mean) ** 2
        variance = self.variance + (DRIFT * self.mean) ** 2
        gain = variance / (variance + error)
        change = gain * (message_power - noise_power - self.mean)
        return UsualPower(max(self.mean + change, LEAST_STEP * self.mean), (1 - gain) * variance)

    def tensors(self) -> Tensors:
        """Return the mean and the variance, for a checkpoint; nothing before the first message."""
        state = torch.tensor([self.mean, self.variance], dtype=torch.float64)
        return {STRENGTH_KEY: state} if self.mean else {}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> UsualPower | None:
        """Read the estimate from a checkpoint's tensors, if they hold one."""
        state = tensors.pop(STRENGTH_KEY, None)
        return None if state is None else cls(*state.tolist())


def random_power(
    gmap: GradientMap, generator: Stream, prepared: Callable[[Tensors], Tensors]
) -> float:
    """Return the mean of ‖g‖² over random inputs with random labels.

    Args:
        gmap: The client's map.
        generator: The source of the inputs.
        prepared: What is done to a gradient before noise is added, such as clipping.

    Raises:
        ValueError: If the model takes no inputs that can be made up; the message has the way out.
    """
    powers = []
    try:
        client = gmap.undefended
        for _ in range(FIRST_BATCHES):
            gradient = prepared(_on_public_data(client, generator).gradient())
            powers.append(float(power(gmap.restrict(gradient), gmap.shards)))
    except _REFUSALS as error:
        raise ValueError(
            "Noise relative to the usual gradient begins with random inputs, and such as this "
            "model's cannot be made up. Give `scale` in place of relative_scale and "
            f"utility_budget. {error}"
        ) from error
    mean = math.fsum(powers) / len(powers)
    if not 0 < mean < math.inf:
        raise ValueError(
            "The gradient of random inputs is zero or not finite, so nothing says how strong noise "
            "must be. Give `scale` in place of relative_scale and utility_budget."
        )
    return mean


def is_anything_left(gmap: GradientMap) -> bool:
    """Return whether a defense before this one left an entry to transmit.

    One that waits for more batches leaves none.
    """
    if gmap.transmitted is None:
        return True
    is_here = any(bool(mask.any()) for mask in gmap.transmitted.values())
    return is_here if gmap.shards is None else gmap.shards.any(is_here)


def _on_public_data(client: GradientMap, generator: Stream) -> GradientMap:
    """Return the client's map on a public batch.

    Its texts have a length of their own, which is not the private batch's. Models that take one
    length alone are given that length.
    """
    try:
        return client.on_other_data(lambda b: public_batch(client.model, b, generator, True))
    except _REFUSALS:
        return client.on_other_data(lambda b: public_batch(client.model, b, generator, False))


def public_batch(
    model: nn.Module, batch: Mapping[str, Any], generator: Stream, of_own_length: bool = True
) -> dict[str, Any]:
    """Return random inputs and labels, with as many rows as a batch has.

    Entries of an unknown kind are replaced by normal numbers, `True`, or indices that every table
    of the model has.

    Args:
        model: The model, which says how many tokens and classes there are.
        batch: The batch, for shapes and types.
        generator: The source of the inputs and labels.
        of_own_length: Whether texts are of 16 tokens, whatever the batch's length.

    Example:
        >>> public_batch(model, batch, Stream())["input_ids"].shape
        torch.Size([2, 16])
    """

    def unknown(entry: Any) -> Any:
        if not isinstance(entry, Tensor):
            return entry
        if entry.is_floating_point():
            return generator.normal(entry.shape, device=entry.device).to(entry.dtype)
        if entry.dtype == torch.bool or entry.dim() < 2:
            return torch.full_like(entry, entry.dtype == torch.bool)
        tables = (getattr(module, "num_embeddings", None) for module in model.modules())
        rows = min((rows for rows in tables if isinstance(rows, int)), default=1)
        return generator.integers(rows, entry.shape, device=entry.device).to(entry.dtype)

    domains = domains_in(batch)
    try:
        (domain,) = domains
        if isinstance(domain, Text) and of_own_length:
            batch = resize_texts(domain, model, batch)
        return random_batch(domain, model, batch, generator, special_ids(model), unknown)
    except (AttributeError, ValueError):  # no text or image, or several, or tables without a name
        return {name: unknown(entry) for name, entry in batch.items()}
