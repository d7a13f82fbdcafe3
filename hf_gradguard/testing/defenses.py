"""The contract of defenses, as a check that anybody can run on their own defense."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..defenses import Chain, Defense, Message, make_defense
from ..defenses.base import NO_STATE, State
from ..gradient_map import GradientMap
from ..randomness import Stream
from .facts import model_facts, random_states, same
from .small import SMALL_TASKS

Task = tuple[nn.Module, Mapping[str, Tensor]]
"""A model and a batch for it, as `GradientMap` takes them."""


def check_defense(defense: Defense | str, tasks: Sequence[Task] | None = None) -> None:
    """Check that a defense keeps the contract of defenses.

    It runs the defense some ten times on each task. A defense:

    - is a dataclass of its settings with a name; its settings can be written as JSON;
    - shares one finite tensor per shared parameter, in the gradient's shapes, types and devices;
    - changes the gradient, or says that what it transmits is exact;
    - says the truth in its `Message`: entries that are not transmitted are zero, exact entries are
      the gradient's, the noise that it claims has that variance;
    - says beforehand what it needs (`facts.needs_second_order`) and adds (`adds_gaussian_noise`,
      `is_exact`);
    - is pure: it leaves model, batch, gradient map and the process's random numbers as they were;
    - draws from the generator that it is given: the same seed gives the same message;
    - keeps all that it remembers of a client in its state: it continues from there after
      `load_state_dict`, and one client's messages do not change another's;
    - leaves no trace of a message that is not shared: `apply` changes neither the defense nor the
      state that it is given.

    Args:
        defense: A defense, or the name of one, which then runs with its default settings.
        tasks: The tasks to run it on. Default: a small text classifier in float32 and float64, and
            a small image classifier.

    Raises:
        AssertionError: If the contract is broken. The message names the defense, the tensor, and
            what the contract says.

    Example:
        >>> from hf_gradguard import make_defense
        >>> check_defense(make_defense("pruning", ratio=0.5))
    """
    if isinstance(defense, str):
        defense = make_defense(defense)
    contract = _Contract(defense)
    contract.check_declaration()
    for model, batch in small_tasks() if tasks is None else tasks:
        contract.check_task(model, batch)


def small_tasks() -> list[Task]:
    """Return small classifiers of both domains, the text one in two types.

    Example:
        >>> [next(model.parameters()).dtype for model, _ in small_tasks()]
        [torch.float32, torch.float64, torch.float32]
    """
    text, double_text, image = (SMALL_TASKS[domain]() for domain in ("text", "text", "image"))
    return [text[:2], (double_text[0].double(), double_text[1]), image[:2]]


@dataclass
class _Contract:
    defense: Defense

    @property
    def name(self) -> str:
        return getattr(self.defense, "name", None) or type(self.defense).__name__

    def require(self, is_kept: bool, breach: str) -> None:
        if not is_kept:
            raise AssertionError(f"{self.name}: {breach}")

    def check_declaration(self) -> None:
        defense: Any = self.defense
        self.require(isinstance(defense, Defense), "a defense is a subclass of `Defense`.")
        name = getattr(defense, "name", None)
        self.require(isinstance(name, str) and bool(name), "a defense has a `name`.")
        self.require(is_dataclass(defense), "a defense is a dataclass of its settings.")
        try:
            json.dumps(defense.settings(), default=lambda setting: repr(setting))
        except (TypeError, ValueError) as error:
            raise AssertionError(
                f"{self.name}: `settings()` can be written as JSON, but: {error}"
            ) from error

    def check_task(self, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
        self.defense.prepare(model)
        message, gmap = self.send(self.copy(), model, batch)
        self.check_facts(message, gmap)
        repetition, _ = self.send(self.copy(), model, batch)
        self.equal(
            message, repetition, "one seed gives one message, but {} differs the second time."
        )
        if message.noise is not None:
            other_message, _ = self.send(self.copy(), model, batch, seed=4)
            self.check_noise(message, other_message)
        self.check_memory(model, batch)
        self.check_clients(model, batch)

    def copy(self) -> Defense:
        """Return a client's own copy of the defense."""
        return self.defense.with_state({})

    def send(
        self, defense: Defense, model: nn.Module, batch: Mapping[str, Tensor], seed: int = 3
    ) -> tuple[Message, GradientMap]:
        """Return one message and its map, and check that nothing around the defense changed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # dropout draws from the process's generator
            facts = defense.facts
            needed: Any = {"second_order": facts.needs_second_order, "reruns": facts.reruns_model}
            gmap = GradientMap(model, batch, **needed)
        gmap.gradient()
        generator = Stream.from_seeds(seed)
        with self.unchanged(gmap, batch):
            try:
                message = defense(gmap, generator)
            except Exception as error:
                raise AssertionError(
                    f"{self.name}: on a batch of {gmap.domain.name} with "
                    f"second_order={gmap.replay.second_order} it raised "
                    f"{type(error).__name__}: {error}"
                ) from error
        return message, gmap

    @contextmanager
    def unchanged(self, gmap: GradientMap, batch: Mapping[str, Tensor]) -> Iterator[None]:
        def tensors() -> dict[str, Tensor]:
            state = gmap.model.state_dict(keep_vars=True)
            tensors_by_name = {
                f"the model's {name}": tensor.detach() for name, tensor in state.items()
            }
            tensors_by_name |= {
                f"the gradient of {name!r}": g for name, g in gmap.gradient().items()
            }
            tensors_by_name |= {f"the batch's {name}": tensor for name, tensor in batch.items()}
            return {**tensors_by_name, "the continuous input": gmap.input}

        tensors_before, facts_before = (
            {n: t.clone() for n, t in tensors().items()},
            _facts(gmap.model),
        )
        yield
        for name, facts_now in _facts(gmap.model).items():
            self.require(
                facts_now == facts_before[name], f"a defense has no effects, but it changed {name}."
            )
        for name, tensor in tensors().items():
            self.require(
                same(tensor, tensors_before[name]),
                f"a defense has no effects, but it changed {name}.",
            )

    def check_facts(self, message: Message, gmap: GradientMap) -> None:
        gradient = gmap.gradient()
        is_noisy = message.noise is not None
        for fact, of_message in (("is_exact", message.exact), ("adds_gaussian_noise", is_noisy)):
            declared = getattr(self.defense.facts, fact)
            self.require(
                declared == of_message,
                f"`facts.{fact}` is {declared}, but its message says {of_message}.",
            )
        for name, mask in (message.transmitted or {}).items():
            self.require(
                not message[name][~mask].any(),
                f"what is not transmitted is zero, but {name!r} holds something there.",
            )
        if message.exact:
            for name, g in gradient.items():
                mask = torch.ones_like(g, dtype=torch.bool)
                mask = message.transmitted[name] if message.transmitted is not None else mask
                self.require(
                    same(message[name][mask], g[mask]),
                    f"what is exact is the true gradient's, but {name!r} differs from it.",
                )
        else:
            self.require(
                not all(same(message[name], g) for name, g in gradient.items()),
                "a defense changes the gradient, or says that its message is exact.",
            )

    def check_noise(self, message: Message, other_message: Message) -> None:
        """Check that two messages differ by noise of the variances that they claim.

        Nothing may come after the noise.
        """
        if message.noise is None or other_message.noise is None:
            raise AssertionError(f"{self.name}: one message says its noise, and another does not.")
        added, other_added = message.noise.added or {}, other_message.noise.added or {}
        for variances in (message.noise.variance, added, other_added):
            for name, variance in variances.items():
                self.require(
                    bool((variance >= 0).all()),
                    f"a variance is not below 0, but one of {name!r} is.",
                )
        if not added or not other_added:  # what came after the noise changed it
            return
        ratios = []
        for name in added:
            total_variance = added[name] + other_added[name]
            change = (message[name] - other_message[name]).to(total_variance.dtype)
            self.require(
                self.processed or not change[total_variance == 0].any(),
                f"noise of variance 0 changes nothing, but {name!r} changed.",
            )
            ratios.append((change.square() / total_variance)[total_variance > 0].flatten())
        ratio = torch.cat(ratios)
        if len(ratio) and not self.processed:
            error = float((ratio.mean() - 1) / (2 / len(ratio)) ** 0.5)
            self.require(
                abs(error) < 6,
                f"its noise has {float(ratio.mean()):.3g} times the variance that it says, "
                f"{error:+.1f} standard errors from 1.",
            )

    @property
    def processed(self) -> bool:
        """Whether another defense comes after the noise, so that the message holds it changed."""
        final = self.defense
        while isinstance(final, Chain):
            final = final.second
        return not final.facts.adds_gaussian_noise

    def check_memory(self, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
        """Check that a restored defense continues as the saved one does."""
        for calls in (1, 2):
            saved = self.copy()
            for seed in range(calls):
                self.send(saved, model, batch, seed)
            state = saved.state_dict()
            for name, tensor in state.items():
                self.require(
                    isinstance(name, str) and isinstance(tensor, Tensor),
                    f"`state_dict` holds tensors by name, but {name!r} is a "
                    f"{type(tensor).__name__}.",
                )
            restored = self.copy()
            restored.load_state_dict({name: tensor.clone() for name, tensor in state.items()})
            for seed in (7, 8):
                message, restored_message = (
                    self.send(d, model, batch, seed)[0] for d in (saved, restored)
                )
                self.equal(
                    message,
                    restored_message,
                    "`load_state_dict` restores what it remembers, but {} differs then.",
                )
            restored.load_state_dict({})
            fresh_message, _ = self.send(self.copy(), model, batch, seed=10)
            cleared_message, _ = self.send(restored, model, batch, seed=10)
            self.equal(
                fresh_message,
                cleared_message,
                "`load_state_dict({{}})` forgets all, but {} differs then.",
            )

    def check_clients(self, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
        """Check that the state of one client does not affect another's messages.

        A message that is not shared leaves no trace either: `apply` is a function of the state that
        it is given.
        """
        defense = self.copy()
        other_batch = {name: _turned(name, tensor) for name, tensor in batch.items()}

        def message_of(state: State, batch: Mapping[str, Tensor], seed: int) -> Message:
            return self.send(defense.with_state(state), model, batch, seed)[0]

        undisturbed, state = message_of({}, batch, seed=11), NO_STATE
        for seed in (12, 13):
            client = defense.with_state(state)
            self.send(client, model, other_batch, seed)
            state = client.unflatten(client.state_dict())
        self.equal(
            undisturbed,
            message_of({}, batch, seed=11),
            "a client's state is its own, but another client's messages change {}.",
        )
        following = message_of(state, batch, seed=14)
        self.equal(
            following,
            message_of(state, batch, seed=14),
            "a message that is not shared leaves its state as it was, but {} differs the second "
            "time.",
        )

    def equal(self, message: Message, other_message: Message, breach: str) -> None:
        for name, tensor in message.items():
            self.require(same(tensor, other_message[name]), breach.format(repr(name)))


def _turned(name: str, tensor: Tensor) -> Tensor:
    """Return an entry of another client's batch: other content, and samples in another order."""
    if name == "labels":
        return tensor.flip(0)
    if tensor.is_floating_point():
        return 1 - tensor
    return tensor.flip(0)


def _facts(model: nn.Module) -> dict[str, Any]:
    return {**model_facts(model), **random_states()}
