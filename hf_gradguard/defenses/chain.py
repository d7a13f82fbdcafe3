"""Chains of defenses, one after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from ..gradient_map import GradientMap, Tensors
from ..randomness import Stream
from .base import Defense, DefenseFacts, Message, Noise, State
from .mechanism import Mechanism


@dataclass
class Chain(Defense):
    """A defense that applies two others, `second` to the message of `first`.

    Entries that `first` withheld stay withheld. A message states the noise of `first` only if
    `second` processes nothing but that message. If `second` asks for the client's data again, as
    Soteria and shapes of the batch do, no noise is stated.

    Args:
        first: The defense that is applied to the gradient.
        second: The defense that is applied to the message of `first`.

    Raises:
        ValueError: If `second` would undo `first`, as Refiner as published does after anything but
            pruning.

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
            is_refiner = name.startswith("refiner")
            fits = " (refiner and gradient_sketch fit what they are given.)" if is_refiner else ""
            raise ValueError(
                f"{name} shares a gradient of the client's own data, so what {self.first.name} did "
                f"to it would be gone. Put {name} first.{fits}"
            )

    def protect(self, gmap: GradientMap, generator: Stream) -> Message:
        first_message, first_state = self.first.apply(
            gmap, self.state.get("first", self.first.state), generator, self._step
        )
        masked_map = gmap.masked(first_message, first_message.transmitted)
        second_message, second_state = self.second.apply(
            masked_map, self.state.get("second", self.second.state), generator, self._step
        )
        self.remember(first=first_state, second=second_state)
        # Entries are transmitted if neither defense withholds them.
        masks = [
            m.transmitted for m in (first_message, second_message) if m.transmitted is not None
        ]
        transmitted = {n: masks[0][n] & masks[-1][n] for n in masks[0]} if masks else None
        shared = dict(second_message)
        if first_message.transmitted is not None:  # what was withheld stays so, whatever came after
            shared = {
                name: t.masked_fill(~first_message.transmitted[name], 0)
                for name, t in second_message.items()
            }

        def noise() -> Noise | None:
            return (
                _noise_within(second_message.noise, first_message.transmitted)
                if first_message.exact
                else _noise_after(first_message, second_message)
            )

        return Message(
            shared,
            noise=noise if self.facts.adds_gaussian_noise else None,
            transmitted=transmitted,
            exact=first_message.exact and second_message.exact,
            has_residual=first_message.has_residual or second_message.has_residual,
            metrics=self._still_true(first_message.metrics) | second_message.metrics,
        )

    def _still_true(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Without what is proved of noise, where `second` asks for more than the noisy gradient."""
        proved = () if self.second.facts.post_processes else ("client_noise_multiplier",)
        return {name: metric for name, metric in metrics.items() if name not in proved}

    def prepare(self, model: nn.Module, processing_class: Any = None) -> None:
        for defense in (self.first, self.second):
            defense.prepare(model, processing_class)

    def _mechanism(self, message: Message) -> Mechanism | None:
        """Of exact entries the second's. Noise that something came after has other facts."""
        if self.first.facts.is_exact:
            return self.second.mechanism(message)
        return None if message.noise is None else self.first.mechanism(message)

    def informed(self) -> dict[str, Any]:
        return self.first.informed() | self.second.informed()

    @property
    def facts(self) -> DefenseFacts:
        first_facts, second_facts = (defense.facts for defense in self._links)
        first_ratio, second_ratio = first_facts.noise_ratio, second_facts.noise_ratio
        still_noisy = first_facts.adds_gaussian_noise and second_facts.post_processes
        return DefenseFacts(
            needs_input=first_facts.needs_input or second_facts.needs_input,
            needs_samples=first_facts.needs_samples,
            needs_second_order=first_facts.needs_second_order or second_facts.needs_second_order,
            reruns_model=first_facts.reruns_model or second_facts.reruns_model,
            sharded_refusal=_refusal(self.first) or _refusal(self.second),
            adds_gaussian_noise=still_noisy
            or (first_facts.is_exact and second_facts.adds_gaussian_noise),
            # the second is relative to what the first leaves, its noise included
            noise_ratio=None
            if first_ratio is None or second_ratio is None
            else math.hypot(first_ratio, second_ratio, first_ratio * second_ratio),
            is_exact=first_facts.is_exact and second_facts.is_exact,
            warmup_messages=first_facts.warmup_messages + second_facts.warmup_messages,
            selection=first_facts.selection,  # by the first that leaves something out
            post_processes=first_facts.post_processes and second_facts.post_processes,
            replaces_gradient=first_facts.replaces_gradient or second_facts.replaces_gradient,
            follows_transcript=first_facts.follows_transcript or second_facts.follows_transcript,
        )

    @property
    def _links(self) -> Iterator[Defense]:
        """Both defenses, each with its part of the state."""
        for place, defense in (("first", self.first), ("second", self.second)):
            yield defense.with_state(self.state.get(place, defense.state))

    def flatten(self, state: State) -> Tensors:
        return {
            f"{place}.{name}": tensor
            for place, link_state in state.items()
            for name, tensor in getattr(self, place).flatten(link_state).items()
        }

    def unflatten(self, tensors: Mapping[str, Tensor]) -> State:
        state = {}
        for place in ("first", "second"):
            prefix = f"{place}."
            link_tensors = {
                name.removeprefix(prefix): tensor
                for name, tensor in tensors.items()
                if name.startswith(prefix)
            }
            state[place] = getattr(self, place).unflatten(link_tensors)
        return state


def _refusal(defense: Defense) -> str | None:
    """Why the chain does not protect a sharded model, as far as that is a part's."""
    reason = defense.facts.sharded_refusal
    return reason and f"of {defense.name}, {reason}"


def _noise_within(noise: Noise | None, transmitted: Mapping[str, Tensor] | None) -> Noise | None:
    """Noise as it is where something was transmitted: elsewhere nothing was shared."""
    if noise is None or transmitted is None:
        return noise
    return noise._replace(
        variance={n: v.masked_fill(~transmitted[n], math.inf) for n, v in noise.variance.items()},
        added=_masked(noise.added, transmitted),
        plain=False,
    )


def _noise_after(first_message: Message, second_message: Message) -> Noise | None:
    """The noise of `two`, which was made from `one`, whose own noise it carries.

    Plain noise adds its variance. Its strength may be relative to the noisy gradient's norm, which
    counts as a constant: it is one but for a share of 1/√d. Whatever else was done only processes
    what the noise released: its variance bounds the information as before, but what is shared
    carries noise of another kind.
    """
    noise, second_noise = first_message.noise, second_message.noise
    if noise is None:
        return None
    if second_message.exact:
        if second_message.transmitted is None:
            return noise
        return noise._replace(added=_masked(noise.added, second_message.transmitted), plain=False)
    chosen = first_message.transmitted is not None and any(
        bool((variance.isfinite() & ~first_message.transmitted[name]).any())
        for name, variance in noise.variance.items()
    )  # by what is noisy: that choice tells of the first noise alone
    if (
        noise.added is None
        or second_noise is None
        or second_noise.added is None
        or not second_noise.plain
        or chosen
    ):
        return noise._replace(added=None, plain=False)
    added = second_noise.added
    return noise._replace(
        variance={name: variance + added[name] for name, variance in noise.variance.items()},
        added={name: variance + added[name] for name, variance in noise.added.items()},
    )


def _masked(variance: Tensors | None, transmitted: Mapping[str, Tensor]) -> Tensors | None:
    if variance is None:
        return None
    return {name: v.masked_fill(~transmitted[name], 0) for name, v in variance.items()}


def chain(*defenses: Defense) -> Defense:
    """Return defenses that are applied one after the other, each to what the last would share.

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
    *head, final = defenses
    return Chain(chain(*head), final) if head else final
