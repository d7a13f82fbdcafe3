"""One defense after the other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from ..gradient_map import GradientMap, Tensors
from ..randomness import Stream
from .base import Defense, DefenseFacts
from .mechanism import Mechanism
from .message import Message, Noise


@dataclass
class Chain(Defense):
    """Applies `second` to what `first` would share; what `first` withheld stays withheld.

    Noise of `first` counts where `second` only processes what it is given. Where it asks for the
    client's data again (Soteria, shapes of the batch or of earlier ones), nothing is said of noise.

    Raises:
        ValueError: If `second` shares anew what `first` changed: Refiner as published, after
            anything but pruning.

    Example:
        >>> first, second = make_defense("pruning"), make_defense("gaussian_noise")
        >>> Chain(first, second)(gmap).transmitted is not None
        True
    """

    name: ClassVar[str] = "chain"
    first: Defense
    second: Defense

    def __post_init__(self) -> None:
        if self.second.facts.replaces_gradient and not self.first.facts.is_exact:
            name = self.second.name
            fits = " (objective='cosine' fits what it is given.)" if name == "refiner" else ""
            raise ValueError(
                f"{name} shares a gradient of the client's own data, so what {self.first.name} did "
                f"to it would be gone. Put {name} first.{fits}"
            )

    def protect(self, gmap: GradientMap, generator: Stream) -> Message:
        one = self.first(gmap, generator)
        two = self.second(gmap.masked(one, one.transmitted), generator)
        masks = [m.transmitted for m in (one, two) if m.transmitted is not None]
        transmitted = {n: masks[0][n] & masks[-1][n] for n in masks[0]} if masks else None
        shared = dict(two)
        if one.transmitted is not None:  # what was withheld stays so, whatever came after
            shared = {name: t.masked_fill(~one.transmitted[name], 0) for name, t in two.items()}

        def noise() -> Noise | None:
            return _within(two.noise, one.transmitted) if one.exact else _after(one, two)

        return Message(
            shared,
            noise=noise if self.facts.adds_gaussian_noise else None,
            transmitted=transmitted,
            exact=one.exact and two.exact,
            has_residual=one.has_residual or two.has_residual,
            metrics=self._still_true(one.metrics) | two.metrics,
        )

    def _still_true(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Without what is proved of noise, where `second` asks for more than the noisy gradient."""
        proved = () if self.second.facts.post_processes else ("client_noise_multiplier",)
        return {name: metric for name, metric in metrics.items() if name not in proved}

    def prepare(self, model: nn.Module, processing_class: Any = None) -> None:
        for part in (self.first, self.second):
            part.prepare(model, processing_class)

    def at_step(self, step: int) -> None:
        for part in (self.first, self.second):
            part.at_step(step)

    def _mechanism(self, message: Message) -> Mechanism | None:
        """Of exact entries the second's. Noise that something came after has other facts."""
        if self.first.facts.is_exact:
            return self.second.mechanism(message)
        return None if message.noise is None else self.first.mechanism(message)

    def informed(self) -> dict[str, Any]:
        return self.first.informed() | self.second.informed()

    @property
    def facts(self) -> DefenseFacts:
        first, second = self.first.facts, self.second.facts
        one, two = first.noise_ratio, second.noise_ratio
        still_noisy = first.adds_gaussian_noise and second.post_processes
        return DefenseFacts(
            needs_input=first.needs_input or second.needs_input,
            needs_samples=first.needs_samples,
            needs_second_order=first.needs_second_order or second.needs_second_order,
            sharded_refusal=_refusal(self.first) or _refusal(self.second),
            adds_gaussian_noise=still_noisy or (first.is_exact and second.adds_gaussian_noise),
            # the second is relative to what the first leaves, its noise included
            noise_ratio=None if one is None or two is None else math.hypot(one, two, one * two),
            is_exact=first.is_exact and second.is_exact,
            warmup_messages=first.warmup_messages + second.warmup_messages,
            selection=first.selection,  # by the first that leaves something out
            post_processes=first.post_processes and second.post_processes,
            replaces_gradient=first.replaces_gradient or second.replaces_gradient,
        )

    def state_dict(self) -> Tensors:
        return {
            f"{part}.{k}": v
            for part in ("first", "second")
            for k, v in getattr(self, part).state_dict().items()
        }

    def load_state_dict(self, state: Tensors) -> None:
        for part in ("first", "second"):
            prefix = f"{part}."
            own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            getattr(self, part).load_state_dict(own)


def _refusal(part: Defense) -> str | None:
    """Why the chain does not protect a sharded model, as far as that is a part's."""
    reason = part.facts.sharded_refusal
    return reason and f"of {part.name}, {reason}"


def _within(noise: Noise | None, transmitted: Mapping[str, Tensor] | None) -> Noise | None:
    """Noise as it is where something was transmitted: elsewhere nothing was shared."""
    if noise is None or transmitted is None:
        return noise
    return noise._replace(
        variance={n: v.masked_fill(~transmitted[n], math.inf) for n, v in noise.variance.items()},
        added=_masked(noise.added, transmitted),
        plain=False,
    )


def _after(one: Message, two: Message) -> Noise | None:
    """The noise of `two`, which was made from `one`, whose own noise it carries.

    Plain noise adds its variance. Its strength may be relative to the noisy gradient's norm, which
    counts as a constant: it is one but for a share of 1/√d. Whatever else was done only processes
    what the noise released: its variance bounds the information as before, but what is shared
    carries noise of another kind.
    """
    noise, more = one.noise, two.noise
    if noise is None:
        return None
    if two.exact:
        if two.transmitted is None:
            return noise
        return noise._replace(added=_masked(noise.added, two.transmitted), plain=False)
    chosen = one.transmitted is not None and any(
        bool((variance.isfinite() & ~one.transmitted[name]).any())
        for name, variance in noise.variance.items()
    )  # by what is noisy: that choice tells of the first noise alone
    if noise.added is None or more is None or more.added is None or not more.plain or chosen:
        return noise._replace(added=None, plain=False)
    added = more.added
    return noise._replace(
        variance={name: variance + added[name] for name, variance in noise.variance.items()},
        added={name: variance + added[name] for name, variance in noise.added.items()},
    )


def _masked(variance: Tensors | None, transmitted: Mapping[str, Tensor]) -> Tensors | None:
    if variance is None:
        return None
    return {name: v.masked_fill(~transmitted[name], 0) for name, v in variance.items()}


def chain(*defenses: Defense) -> Defense:
    """One defense after the other, each applied to what the ones before it would share.

    Noise after pruning falls only on the coordinates that pruning left.

    Raises:
        ValueError: If no defense is given.

    Example:
        >>> noise = make_defense("optimal_noise", relative_scale=0.5)
        >>> message = chain(make_defense("optimal_pruning", ratio=0.8), noise)(gmap)
        >>> message.noise is not None
        True
    """
    if not defenses:
        raise ValueError("chain needs at least one defense.")
    *head, last = defenses
    return Chain(chain(*head), last) if head else last
