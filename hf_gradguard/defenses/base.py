"""The base of defenses, functions from a gradient map to what is shared, and `NoDefense`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from ..gradient_map import GradientMap, Tensors
from ..gradient_map.per_sample.clipping import SampleMap
from ..randomness import Stream
from .mechanism import Mechanism
from .message import (
    Message,
    check_message,
    effect,
    finite_gradient,
    first_not_finite,
)


@dataclass(frozen=True)
class DefenseFacts:
    """The facts of a defense: what it needs of a client, and what its messages are.

    The defaults are safe: if a defense declares nothing, nothing is assumed that would leave out
    what it needs, or would claim privacy.

    Args:
        needs_input: Whether it asks for the continuous input, or how the gradient depends on it. If
            not, it takes batches of any kind.
        needs_samples: Whether it asks for what each sample adds to the gradient.
        needs_second_order: Whether its next call differentiates twice, so that its map needs
            `second_order=True`.
        reruns_model: Whether its next call may run the model again, on other inputs or sample by
            sample. If not, its map keeps no state to do so in, which saves time, and refuses.
        sharded_refusal: Why it does not protect a sharded model, with the way out. `None`: it does,
            since it takes figures of a whole gradient (norms, counts, ranges) over all shards.
        adds_gaussian_noise: Whether its messages have `noise`: Gaussian noise of known covariance
            on the true gradient.
        noise_ratio: The noise's norm over that of the gradient it is added to; `None` if settings
            do not say it.
        is_exact: Whether its messages are `exact`: the true gradient wherever anything is
            transmitted.
        warmup_messages: How many of a client's first messages are empty.
        selection: The rule by which it leaves entries out, if it does: `"largest"`, the smallest
            ones are dropped; `"chosen"`, by a rule of its own.
        post_processes: Whether it asks nothing of a client but the gradient it is given, so that
            noise in that gradient bounds what its messages tell.
        replaces_gradient: Whether it shares a gradient of the client's own data whatever it is
            given: what an earlier defense of a chain did would be gone.
        follows_transcript: Whether its noise is relative to the usual gradient, as its earlier
            messages show it. Its first message begins with random inputs, which it needs the model
            for.

    Example:
        >>> make_defense("pruning", ratio=0.9).facts.selection
        'largest'
    """

    needs_input: bool = True
    needs_samples: bool = False
    needs_second_order: bool = False
    reruns_model: bool = True
    sharded_refusal: str | None = (
        "it asks for second derivatives or for a whole gradient, which no device holds, or does "
        "not say that it asks for neither (sharded_refusal=None in its facts). Use "
        "gaussian_noise, laplace_noise, optimal_noise, dp_sgd, optimal_dp_sgd, pruning, "
        "optimal_pruning or quantization, or give each rank the whole model."
    )
    adds_gaussian_noise: bool = False
    noise_ratio: float | None = 0.0
    is_exact: bool = False
    warmup_messages: int = 0
    selection: Literal["chosen", "largest"] = "chosen"
    post_processes: bool = False
    replaces_gradient: bool = False
    follows_transcript: bool = False


State = Mapping[str, Any]
"""What a defense remembers of one client between messages: values that never change, by name. An
empty one is that of a client without a message so far.
"""
NO_STATE: State = MappingProxyType({})
Reader = Callable[[dict[str, Tensor]], Any]
"""Takes the tensors of one part of a state out of a dictionary. Returns the part, or `None` if the
dictionary has none of it.
"""

_UNDECLARED: dict[str, Any] = {
    name: getattr(DefenseFacts, name)
    for name in ("needs_input", "sharded_refusal", "post_processes")
}


class Defense:
    """A base of all defenses; a subclass is a dataclass of its settings with one method, `protect`.

    A defense touches neither the model nor `.grad`, and all its randomness comes from `generator`.
    What it remembers of a client is a value, its state. `apply` takes a state and returns the next
    one. So one defense serves many clients, and a message that is not shared is forgotten if the
    caller keeps the state before it. Called as a function, a defense keeps the state itself, in
    `state`. `hf_gradguard.testing.check_defense` checks all of this.

    A subclass that remembers something has two ways. It keeps immutable values in `state`
    (`remember`), and `state_readers` says how they are read from tensors. Or it overrides
    `state_dict` and `load_state_dict`, and its state is the tensors that these return and take.

    Example:
        >>> defense = make_defense("gaussian_noise", relative_scale=0.1)
        >>> message, state = defense.apply(gmap, {})
        >>> message.keys() == gmap.gradient().keys(), list(state)
        (True, ['usual'])
    """

    name: ClassVar[str]
    state: State = NO_STATE
    """What it remembers of the client that it was called for."""
    _step: int | None = None  # optimizer steps that are finished, where somebody counts them

    @property
    def facts(self) -> DefenseFacts:
        """The facts on what it needs of a client, and what its messages are.

        A subclass declares them as a class attribute, or as a property if its settings decide.
        """
        return DefenseFacts()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Reset the facts of a class that declares none.

        What its base declares holds for the base's own `protect`.
        """
        super().__init_subclass__(**kwargs)
        if "facts" in vars(cls):
            return

        def undeclared(self: Defense) -> DefenseFacts:
            base: Any = super(cls, self)
            return replace(base.facts, **_UNDECLARED)

        cls.facts = property(undeclared)  # type: ignore[assignment]

    def apply(
        self,
        gmap: GradientMap,
        state: State,
        generator: Stream | None = None,
        step: int | None = None,
    ) -> tuple[Message, State]:
        """Return what a client shares, and the state after it.

        Neither this object nor the given state changes.

        Args:
            gmap: The client's gradient map.
            state: The client's state so far; `{}` before its first message.
            generator: The source of all randomness, as for a call.
            step: The number of finished optimizer steps, where somebody counts them.

        Returns:
            The message and the state after it.

        Raises:
            FloatingPointError, TypeError, ValueError: As for a call.
            RuntimeError: As for a call; or if the defense keeps something in an attribute, which
                would be lost.

        Example:
            >>> defense = make_defense("pruning", ratio=0.9, error_feedback=True)
            >>> _, state = defense.apply(gmap, {})
            >>> defense.apply(gmap, state)[0].has_residual, defense.apply(gmap, {})[0].has_residual
            (True, False)
        """
        client = self.with_state(state)
        if step is not None:
            client.at_step(step)
        attributes = dict(vars(client))
        message = client(gmap, generator)
        if not self._keeps_tensors:
            _check_forgets(self, attributes, vars(client))
        return message, client._current_state()

    def with_state(self, state: State) -> Self:
        """Return a copy of the defense with a client's state, for its next message.

        The copy shares whatever the defense loaded.

        Args:
            state: The client's state.
        """
        client = copy.copy(self)
        if self._keeps_tensors:
            client.load_state_dict(dict(state))
        else:
            client.state = state
        return client

    def _current_state(self) -> State:
        """Return the present state as a value that later calls do not change."""
        if self._keeps_tensors:
            return {name: tensor.clone() for name, tensor in self.state_dict().items()}
        return self.state

    def remember(self, **values: Any) -> None:
        """Put values into `state`, in place of earlier ones of the same names."""
        self.state = {**self.state, **values}

    def state_readers(self) -> dict[str, Reader]:
        """Return, for each part of `state`, the function that reads it from tensors.

        Each part has a method `tensors`, which returns its tensors for a checkpoint.
        """
        return {}

    @property
    def _keeps_tensors(self) -> bool:
        """Whether the class keeps its state in attributes of its own, as plug-ins do."""
        return type(self).load_state_dict is not Defense.load_state_dict

    def __call__(self, gmap: GradientMap, generator: Stream | None = None) -> Message:
        """Return what a client shares in place of its gradient, and keep the new state in `state`.

        Args:
            gmap: The client's gradient map.
            generator: The source of all randomness. Default: a new one, with a key from the
                operating system.

        Returns:
            One finite tensor per shared parameter, in the parameters' shapes and types.

        Raises:
            FloatingPointError: If a true or a protected gradient is not finite; the message names
                the parameter.
            TypeError: If the defense returns no mapping of tensors, or if `generator` is a
                `torch.Generator`, whose numbers can be predicted.
            ValueError: If a name is missing or unknown, or a shape, type or device differs.
            RuntimeError: If the defense wrote to a tensor of the map or the model.
        """
        if isinstance(generator, torch.Generator):
            raise TypeError(
                f"{self.name} takes no torch.Generator: whoever sees one message can compute its "
                "state, and with it all the noise. Leave generator out, or pass a "
                "hf_gradguard.randomness.Stream; in tests Stream.from_seeds(1)."
            )
        # Two looks at the counts of in-place writes find a defense that writes to what it reads.
        versions = gmap.versions()
        message = check_message(self.name, self.protect(gmap, generator or Stream()), gmap)
        if (versions_after := gmap.versions()) != versions:
            raise effect(self.name, versions, versions_after)
        if name := first_not_finite(message, gmap.shards):
            raise FloatingPointError(
                f"{self.name} made the gradient of {name} not finite. Weaken its settings: {self}."
            )
        return message if gmap.shards is None else message.of_part()

    def protect(self, gmap: GradientMap, generator: Stream) -> Mapping[str, Tensor]:
        """Return the protected gradient; subclasses implement it.

        It is a `Message`, or a plain mapping of tensors if the defense states nothing about it.
        """
        raise NotImplementedError

    def prepare(self, model: nn.Module, processing_class: Any = None) -> None:
        """Load or make what the defense needs for this model and its tokenizer or image processor.

        It is called before training, and again for every other model.
        """

    def at_step(self, step: int) -> None:
        """Set the number of finished optimizer steps.

        Loops that count steps call this before a message.
        """
        self._step = step

    def gradient_map(
        self, model: nn.Module, batch: Mapping[str, Any], measured: bool = False,
        kind: Any = GradientMap, **sharing: Any
    ) -> GradientMap:  # fmt: skip
        """Return the map of a client's batch, with what the next call asks for and no more.

        Args:
            model: The model, as for `GradientMap`.
            batch: The batch, as for `GradientMap`.
            measured: Whether its leakage is estimated too, which differentiates the input.
            kind: Another class than `GradientMap`, where samples are not asked for.
            **sharing: Settings of `GradientMap`: `loss_fn`, `share_input_embeddings`, `withhold`.

        Example:
            >>> defense = make_defense("pruning", ratio=0.9)
            >>> defense(defense.gradient_map(model, batch)).keys() == gmap.gradient().keys()
            True
        """
        facts = self.facts
        needed: Any = {
            "needs_input": facts.needs_input or measured, "second_order": facts.needs_second_order,
            "reruns": facts.reruns_model or measured,
        }  # fmt: skip
        kind = SampleMap if facts.needs_samples and not measured else kind
        return kind(model, batch, **needed, **sharing)

    def mechanism(self, message: Message) -> Mechanism | None:
        """Return the mechanism by which a message comes from a gradient.

        Audits grant it to attackers who know the defense and its settings. It is `None` if no
        attacker can follow the defense.

        Args:
            message: A message of this defense.
        """
        mechanism = self._mechanism(message)
        if message.has_residual:  # whatever else was done
            mechanism = Mechanism(
                fitted=None if mechanism is None else mechanism.fitted, has_residual=True
            )
        if mechanism is None or message.transmitted is None:
            return mechanism
        return replace(mechanism, selection=self.facts.selection)

    def _mechanism(self, message: Message) -> Mechanism | None:
        """Return the mechanism that a message's own facts give, such as its noise's covariance.

        `mechanism` adds the coordinates that were not sent.
        """
        if message.noise is not None and message.noise.added is not None:
            return Mechanism(noise="gaussian", variance=message.noise.added)
        return Mechanism() if message.exact else None

    def informed(self) -> dict[str, Any]:
        """Return what attackers who know the defense do about it.

        It has settings, of which each attack takes those that it has, and grants by the names of an
        observation's fields: `noise_variance`, or `mechanism` alone where nothing else would help.
        It is empty if knowing the defense is of no use.
        """
        return {}

    def flatten(self, state: State) -> Tensors:
        """Return the tensors of a state, for a checkpoint.

        They depend on the client's data, and are private to the client.
        """
        if self._keeps_tensors:
            return dict(state)
        return {
            name: tensor for value in state.values() for name, tensor in value.tensors().items()
        }

    def unflatten(self, tensors: Mapping[str, Tensor]) -> State:
        """Return the state whose tensors `flatten` returned.

        Raises:
            ValueError: If some tensors belong to nothing that this defense remembers.
        """
        if self._keeps_tensors:
            return dict(tensors)
        remaining, state = dict(tensors), {}
        for name, reader in self.state_readers().items():
            if (value := reader(remaining)) is not None:
                state[name] = value
        if remaining:
            raise ValueError(f"{self.name} keeps no state, but got {sorted(remaining)[:3]}.")
        return state

    def state_dict(self) -> Tensors:
        """Return this object's state as tensors, which are private to the client."""
        return self.flatten(self.state)

    def load_state_dict(self, state: Tensors) -> None:
        """Load what `state_dict` returned; an empty one clears the state."""
        self.state = self.unflatten(state)

    def settings(self) -> dict[str, Any]:
        """Return the settings that are not `None`, for cards and logs."""
        named = ((f.name, getattr(self, f.name)) for f in fields(self))  # type: ignore[arg-type]
        return {name: value for name, value in named if value is not None}


def _check_forgets(
    defense: Defense, attributes: Mapping[str, Any], changed: Mapping[str, Any]
) -> None:
    """Raise RuntimeError if a call changed attributes.

    What an attribute holds would be lost, or shared by all clients.
    """
    for name, value in changed.items():
        is_cache = isinstance(getattr(type(defense), name, None), cached_property)
        if (
            name not in ("state", "_step")
            and not is_cache
            and attributes.get(name, _NOTHING) is not value
        ):
            raise RuntimeError(
                f"{defense.name} keeps {name!r} in an attribute, where it is lost after the "
                "message. Put it into its state (Defense.remember), or override state_dict and "
                "load_state_dict."
            )


_NOTHING = object()


@dataclass
class NoDefense(Defense):
    """Shares the true gradient; it has to be asked for by name."""

    name: ClassVar[str] = "none"
    facts = DefenseFacts(
        needs_input=False,
        reruns_model=False,
        post_processes=True,
        sharded_refusal=None,
        is_exact=True,
    )

    def protect(self, gmap: GradientMap, generator: Stream) -> Message:
        return Message(finite_gradient(gmap), exact=True)


def is_number(value: object) -> bool:
    """Return whether a setting is a finite int or float, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_range(name: str, value: object, low: float, high: float, above: bool = False) -> None:
    """Refuse a setting that is no number from `low`, or above it, to `high`.

    Raises:
        ValueError: If it is out of range.
    """
    if not is_number(value) or not low <= value <= high or (above and value == low):  # type: ignore[operator]
        least = f"above {low}" if above else f"at least {low}"
        most = f" and at most {high}" if high < math.inf else ""
        raise ValueError(f"{name} must be a finite number {least}{most}, but is {value!r}.")


def check_whole(name: str, value: object, least: int) -> None:
    """Refuse a setting that is no whole number of at least `least`.

    Raises:
        ValueError: If it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, but is {value!r}.")


def floor_share(ratio: float, count: int) -> int:
    """Return floor(ratio · count), through the decimal that was written.

    In binary, 0.29 * 100 is 28.999….
    """
    return int(Decimal(str(ratio)) * count)
