"""One defense after the other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from ..gradient_map import GradientMap, Tensors
from ..gradient_map.law import Law
from ..gradient_map.views import MaskedMap
from ..randomness import Stream
from .base import Defense
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
        if self.second.shares_anew and not self.first.exact:
            name = self.second.name
            fits = " (objective='cosine' fits what it is given.)" if name == "refiner" else ""
            raise ValueError(
                f"{name} shares a gradient of the client's own data, so what {self.first.name} did "
                f"to it would be gone. Put {name} first.{fits}"
            )

    def protect(self, gmap: GradientMap, generator: Stream) -> Message:
        one = self.first(gmap, generator)
        two = self.second(MaskedMap(gmap, one, one.transmitted), generator)
        masks = [m.transmitted for m in (one, two) if m.transmitted is not None]
        transmitted = {n: masks[0][n] & masks[-1][n] for n in masks[0]} if masks else None
        shared = dict(two)
        if one.transmitted is not None:  # what was withheld stays so, whatever came after
            shared = {name: t.masked_fill(~one.transmitted[name], 0) for name, t in two.items()}

        def noise() -> Noise | None:
            return _within(two.noise, one.transmitted) if one.exact else _after(one, two)

        return Message(
            shared,
            noise=noise if self.adds_gaussian_noise else None,
            transmitted=transmitted,
            exact=one.exact and two.exact,
            carries=one.carries or two.carries,
            figures=self._kept(one.figures) | two.figures,
        )

    def _kept(self, figures: Mapping[str, float]) -> dict[str, float]:
        """Without what is proved of noise, where `second` asks for more than the noisy gradient."""
        proved = () if self.second.only_processes else ("client_noise_multiplier",)
        return {name: figure for name, figure in figures.items() if name not in proved}

    def prepare(self, model: nn.Module, processing_class: Any = None) -> None:
        for part in (self.first, self.second):
            part.prepare(model, processing_class)

    def at_step(self, step: int) -> None:
        for part in (self.first, self.second):
            part.at_step(step)

    def check_sharded(self) -> None:
        for part in (self.first, self.second):
            part.check_sharded()

    @property
    def kept(self) -> Literal["chosen", "largest"]:
        """By the first that leaves something out."""
        return self.first.kept

    def _law(self, message: Message) -> Law | None:
        """Of exact entries the second's. Noise that something came after has other facts."""
        if self.first.exact:
            return self.second.law(message)
        return None if message.noise is None else self.first.law(message)

    def informed(self) -> dict[str, Any]:
        return self.first.informed() | self.second.informed()

    @property
    def exact(self) -> bool:
        return self.first.exact and self.second.exact

    @property
    def held(self) -> int:
        return self.first.held + self.second.held

    @property
    def adds_gaussian_noise(self) -> bool:
        after = self.first.exact and self.second.adds_gaussian_noise
        return (self.first.adds_gaussian_noise and self.second.only_processes) or after

    @property
    def only_processes(self) -> bool:
        return self.first.only_processes and self.second.only_processes

    @property
    def shares_anew(self) -> bool:
        return self.first.shares_anew or self.second.shares_anew

    @property
    def noise_ratio(self) -> float | None:
        one, two = self.first.noise_ratio, self.second.noise_ratio
        # the second is relative to what the first leaves, its noise included
        return None if one is None or two is None else math.hypot(one, two, one * two)

    @property
    def needs_jacobian(self) -> bool:
        return self.first.needs_jacobian or self.second.needs_jacobian

    @property
    def needs_input(self) -> bool:
        return self.first.needs_input or self.second.needs_input

    @property
    def needs_samples(self) -> bool:
        return self.first.needs_samples

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
