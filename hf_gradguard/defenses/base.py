"""The base of defenses, functions from a gradient map to a message, and what a message is.

In reading order: `Defense` and `NoDefense`; `Message`, which says what is true of it, and its
contract; numbers of whole gradients, also where devices hold shards of them; checks of settings.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from ..gradient_map import GradientMap, Tensors
from ..gradient_map.inputs import NOT_FINITE
from ..gradient_map.per_sample.clipping import SampleMap
from ..gradient_map.types import How, Shards
from ..randomness import Stream
from .mechanism import Mechanism


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

        Raises:
            TypeError: If the class overrides `apply`, which a Trainer would not call.
        """
        super().__init_subclass__(**kwargs)
        if "apply" in vars(cls):
            raise TypeError(f"{cls.__name__} overrides apply: override protect, which it calls.")
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
            FloatingPointError, TypeError, ValueError: If a call raises it.
            RuntimeError: If a call raises it, or if the defense keeps something in an attribute,
                where it would be lost.

        Example:
            >>> defense = make_defense("pruning", ratio=0.9, error_feedback=True)
            >>> _, state = defense.apply(gmap, {})
            >>> defense.apply(gmap, state)[0].has_residual, defense.apply(gmap, {})[0].has_residual
            (True, False)
        """
        return self.with_state(state)._send(gmap, generator, step)

    def _send(
        self, gmap: GradientMap, generator: Stream | None, step: int | None
    ) -> tuple[Message, State]:
        """Do what `apply` does for the client whose copy this is; see `with_state`."""
        if step is not None:
            self.at_step(step)
        attributes = dict(vars(self))
        message = self(gmap, generator)
        if not self._keeps_tensors:
            _check_forgets(self, attributes, vars(self))
        return message, self._current_state()

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


class Noise(NamedTuple):
    """The Gaussian noise that a message carries, as seen from the undefended gradient.

    Args:
        variance: The diagonal Σ that noise on the undefended gradient would need in order to hide
            its input as well, or less well: infinite where the coordinate was not shared, or was
            clipped to a constant.
        added: The diagonal covariance of what was added to what is shared: 0 where nothing was.
            `None` if that is not known, because something came after the noise that changed it.
        shape_trace: The trace of the Fisher information about the batch's input that lies in Σ
            itself, ½ Σ_i ‖∂ log Σ_ii/∂x‖²: 0 where Σ's shape is no function of the batch.
        plain: Whether it was added to all of the gradient, unclipped, with a covariance that does
            not follow the gradient entry by entry. Where there was Gaussian noise before, the
            covariances then add up.

    Example:
        >>> noise = make_defense("gaussian_noise", scale=0.1)(gmap).noise
        >>> bool(torch.isclose(noise.added["classifier.bias"], torch.tensor(0.01)).all())
        True
    """

    variance: Tensors
    added: Tensors | None
    shape_trace: float = 0.0
    plain: bool = False


class Message(dict[str, Tensor]):
    """The message of a client: one tensor per shared parameter, by name, in place of its gradient.

    It also says what is true of it, so that nobody has to estimate it again.

    Args:
        tensors: Tensors in the parameters' names, shapes and types.
        noise: The Gaussian noise that it carries, if it has a Fisher information: noise of known
            covariance on the true gradient; or a function that finds it when it is first asked for.
            `None` otherwise.
        transmitted: Masks of the entries that were transmitted; the others are zero and carry
            nothing. `None`: all but what turned to zero.
        exact: Whether the transmitted entries are the true gradient's, unchanged.
        has_residual: Whether what the client's earlier messages left out is in it.
        metrics: Further figures of this message, by name; the Trainer logs each as
            `defense/<name>`. They stay on the rank.

    Example:
        >>> message = make_defense("pruning", ratio=0.9)(gmap)
        >>> message.exact, message.noise
        (True, None)
        >>> shared = sum(int(mask.sum()) for mask in message.transmitted.values())
        >>> shared <= sum(tensor.numel() for tensor in message.values())
        True
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        noise: Noise | Callable[[], Noise | None] | None = None,
        transmitted: Mapping[str, Tensor] | None = None,
        exact: bool = False,
        has_residual: bool = False,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(tensors)
        self._noise = noise
        self.transmitted, self.exact, self.has_residual = transmitted, exact, has_residual
        self.metrics = dict(metrics or {})

    @property
    def noise(self) -> Noise | None:
        """The Gaussian noise that it carries, or `None`."""
        if callable(self._noise):
            self._noise = self._noise()
        return self._noise

    def of_part(self) -> Message:
        """Return this message as one device's shard of it.

        Statements about its noise still hold for the whole message.
        """
        return Message(
            self, transmitted=self.transmitted, exact=self.exact, has_residual=self.has_residual,
            metrics=self.metrics,
        )  # fmt: skip

    def __repr__(self) -> str:
        facts = f"noise={self._noise is not None}, exact={self.exact}"
        return f"Message({len(self)} tensors, {facts})"


def nothing_of(gmap: GradientMap) -> Message:
    """Return an empty message: zeros, of which none was transmitted."""
    zeros = {name: torch.zeros_like(g) for name, g in gmap.gradient().items()}
    none = {name: torch.zeros_like(g, dtype=torch.bool) for name, g in zeros.items()}
    return Message(zeros, transmitted=none, exact=True)


def check_message(name: str, message: object, gmap: GradientMap) -> Message:
    """Return the message that a defense made, if it is what its contract promises.

    Args:
        name: The name of the defense, for errors.
        message: What `protect` returned. A plain mapping is a message that says nothing of itself.
        gmap: The map that it was made from.

    Raises:
        TypeError: If it is no mapping of tensors.
        ValueError: If names are missing or unknown, or shapes, types or devices are not the
            gradient's; the message names the tensor.
        FloatingPointError: If there is NaN or infinity; the message names the tensor.
    """
    form = gmap.form()
    if not isinstance(message, Mapping) or message.keys() != form.keys():
        raise _wrong_names(name, message, form)
    for key, g in form.items():
        tensor = message[key]
        if not isinstance(tensor, Tensor) or tensor.requires_grad or _kind(tensor) != _kind(g):
            raise _wrong_tensor(name, key, tensor, g)
    if not isinstance(message, Message):
        message = Message(message)
    for key, mask in (message.transmitted or {}).items():
        if key not in form or mask.dtype != torch.bool or mask.shape != form[key].shape:
            raise ValueError(f"{name} says nothing usable of what it transmitted of {key!r}.")
    return message


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _wrong_names(name: str, message: object, gradient: Tensors) -> Exception:
    if not isinstance(message, Mapping):
        return TypeError(
            f"{name} must return a mapping of one tensor per shared parameter, but returned a "
            f"{type(message).__name__}."
        )
    if missing := [key for key in gradient if key not in message]:
        return ValueError(
            f"{name} shared nothing for {missing[0]!r} ({len(missing)} missing). To withhold a "
            "tensor share zeros, and say so in Message.transmitted."
        )
    unknown = next(key for key in message if key not in gradient)
    return ValueError(f"{name} shared {unknown!r}, which is no shared parameter.")


def _wrong_tensor(name: str, key: str, tensor: object, g: Tensor) -> Exception:
    if not isinstance(tensor, Tensor):
        return TypeError(f"{name} shared a {type(tensor).__name__} for {key!r}, and no tensor.")
    if tensor.requires_grad:
        return ValueError(
            f"{name} shared a tensor for {key!r} that holds its graph. Compute it under "
            "torch.no_grad(), or detach it."
        )
    attribute, shared, expected = next(
        difference
        for difference in (
            ("shape", tuple(tensor.shape), tuple(g.shape)),
            ("type", tensor.dtype, g.dtype),
            ("device", tensor.device, g.device),
        )
        if difference[1] != difference[2]
    )
    return ValueError(
        f"{name} shared {key!r} with {attribute} {shared}, where the gradient has {expected}."
    )


def effect(
    name: str, versions_before: Mapping[str, int], versions_after: Mapping[str, int]
) -> RuntimeError:
    """Return the error for a defense that wrote to what belongs to a map or its model.

    Args:
        name: The name of the defense.
        versions_before: `GradientMap.versions()` before its call.
        versions_after: `GradientMap.versions()` after it, where something differs.
    """
    for tensor, version in versions_after.items():
        if tensor in versions_before and versions_before[tensor] != version:
            return RuntimeError(
                f"{name} wrote to {tensor} in place, so nothing was shared: it was to read it "
                "only. Compute new tensors."
            )
    tensor = next(iter(versions_before.keys() ^ versions_after.keys()))
    verb = "made" if tensor in versions_after else "removed"
    return RuntimeError(f"{name} {verb} {tensor}, so nothing was shared: a defense has no effects.")


def true_gradient(gmap: GradientMap) -> Tensors:
    """Return g in at least float32.

    Raises:
        FloatingPointError: If it is not finite.
    """
    return wide(finite_gradient(gmap))


def wide(tensors: Tensors) -> Tensors:
    """Return tensors in at least float32."""
    return {name: t.to(torch.promote_types(t.dtype, torch.float32)) for name, t in tensors.items()}


def finite_gradient(gmap: GradientMap) -> Tensors:
    """Return g.

    Raises:
        FloatingPointError: If it is not finite; the message names the parameter.
    """
    gradient = gmap.gradient()
    if name := first_not_finite(gradient, gmap.shards):
        raise FloatingPointError(NOT_FINITE.format(name=name))
    return gradient


def first_not_finite(tensors: Mapping[str, Tensor], shards: Shards | None) -> str | None:
    """Return the first name whose tensor holds NaN or infinity, or `None`."""
    # A sum with NaN or infinity in it is neither finite: one fast pass, and a closer look only
    # where a sum is not.
    sums = torch.stack([tensor.sum(dtype=torch.float32) for tensor in tensors.values()])
    is_finite = bool(torch.isfinite(sums).all())
    if is_finite if shards is None else not shards.any(not is_finite):
        return None
    broken = {name: ~torch.isfinite(tensor).all() for name, tensor in tensors.items()}
    broken = of_whole(broken, shards, "max")
    return next((name for name, is_broken in broken.items() if is_broken), None)


def cast_like(shared: Tensors, gmap: GradientMap) -> Tensors:
    """Return `shared` in the types of the gradient that it stands for."""
    form = gmap.form()
    return {name: tensor.to(form[name].dtype) for name, tensor in shared.items()}


class OnDemand(Mapping[str, Tensor]):
    """A mapping whose tensors are made each time they are asked for, so that none are kept.

    Args:
        names: The names of all tensors.
        make: A function that makes the tensor of a name; whoever asks may write to it.
        total: The sum of all their entries, if that is known.
    """

    def __init__(
        self, names: Iterable[str], make: Callable[[str], Tensor], total: float | None = None
    ) -> None:
        self._names, self._make, self.total = dict.fromkeys(names), make, total

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def of_whole(
    numbers: Mapping[str, Tensor], shards: Shards | None, how: How = "sum"
) -> dict[str, Tensor]:
    """Return numbers of whole parameters, given those of this device's shards of them."""
    return dict(numbers) if shards is None else shards.joined(numbers, how)


def add_up(numbers: Mapping[str, Tensor], shards: Shards | None) -> Tensor:
    """Return the sum of one number per parameter, over all shards."""
    return torch.stack(list(of_whole(numbers, shards).values())).sum()


def total(tensors: Mapping[str, Tensor], shards: Shards | None) -> Tensor:
    """Return the sum over all entries of all tensors, tensors added up in float64."""
    known_total = getattr(tensors, "total", None)
    if known_total is not None:
        return torch.tensor(known_total, dtype=torch.float64)
    return add_up({name: _sum(tensor) for name, tensor in tensors.items()}, shards)


def count(tensors: Mapping[str, Tensor], shards: Shards | None) -> int:
    """Return how many entries all tensors have."""
    return int(add_up({name: torch.tensor(t.numel()) for name, t in tensors.items()}, shards))


def power(tensors: Mapping[str, Tensor], shards: Shards | None) -> Tensor:
    """Return the sum of squares over all entries of all tensors."""
    return add_up({name: _square_sum(tensor) for name, tensor in tensors.items()}, shards)


def _sum(tensor: Tensor) -> Tensor:
    if (number := single_number(tensor)) is not None:
        return number.double() * tensor.numel()
    return tensor.sum().double()


def _square_sum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's squares without a tensor of squares.

    The norm is taken row by row, because the norm of many entries adds up in the tensor's own type,
    and rounds.
    """
    if (number := single_number(tensor)) is not None:
        return number.double().square() * tensor.numel()
    wide = torch.promote_types(tensor.dtype, torch.float32)
    if tensor.dim() < 2:
        return tensor.to(wide).square().sum().double()
    rows = torch.linalg.vector_norm(tensor.flatten(1), dim=1, dtype=wide)
    return rows.double().square().sum()


def single_number(tensor: Tensor) -> Tensor | None:
    """Return the number `()` that an expanded tensor holds everywhere, `None` for any other."""
    if tensor.numel() and not any(tensor.stride()):
        return tensor[(0,) * tensor.dim()]
    return None


def norm(tensors: Mapping[str, Tensor], shards: Shards | None) -> float:
    """Return the Euclidean norm over all entries of all tensors."""
    return float(power(tensors, shards).sqrt())


def scaled(tensor: Tensor, factor: float, offset: float = 0.0) -> Tensor:
    """Return `factor * tensor + offset`, in place where possible, and one number for one."""
    if (number := single_number(tensor)) is not None:
        return (number * factor + offset).expand_as(tensor)
    return tensor.mul_(factor).add_(offset) if offset else tensor.mul_(factor)


def root(variances: Mapping[str, Tensor], squares: dict[str, Tensor], name: str) -> Tensor:
    """Return standard deviations of variances, one number for one, in place where possible.

    The sum of the variances' squares is written to `squares`, so that they need not be computed
    again.
    """
    squares[name] = _square_sum(variance := variances[name])
    if (number := single_number(variance)) is not None:
        return number.sqrt().expand_as(variance)
    return variance.sqrt_() if isinstance(variances, OnDemand) else variance.sqrt()


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
