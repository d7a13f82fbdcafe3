"""The contract of defenses, as a check that anybody can run on a defense of theirs."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..defenses import Chain, Defense, Message, make_defense
from ..gradient_map import GradientMap
from ..randomness import Stream
from .facts import model_facts, random_states, same
from .small import SMALL_TASKS

Task = tuple[nn.Module, Mapping[str, Tensor]]
"""A model and a batch for it, as `GradientMap` takes them."""


def check_defense(defense: Defense | str, tasks: Sequence[Task] | None = None) -> None:
    """Check that a defense keeps the contract of defenses.

    Runs it some ten times on each task. A defense:

    - is a dataclass of its settings with a name; its settings can be written as JSON;
    - shares one finite tensor per shared parameter, in the gradient's shapes, types and devices;
    - changes the gradient, or says that what it transmits is exact;
    - says the truth in its `Message`: entries that are not transmitted are zero, exact entries are
      the gradient's, the noise that it claims has that variance;
    - says beforehand what it needs (`facts.needs_second_order`) and adds
      (`adds_gaussian_noise`, `is_exact`);
    - is pure: it leaves model, batch, gradient map and the process's random numbers as they were;
    - draws from the generator that it is given: the same seed gives the same message;
    - keeps what it remembers in `state_dict`, goes on from there after `load_state_dict`, and
      shares none of it between copies, since each client has a copy of its own.

    Args:
        defense: A defense, or the name of one, which then runs with its default settings.
        tasks: What to run it on. Default: a small text classifier in float32 and float64, and a
            small image classifier.

    Raises:
        AssertionError: For the first breach, with the name of the defense, that of the tensor, and
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
    """Small classifiers of both domains, the text one in two types.

    Example:
        >>> [next(model.parameters()).dtype for model, _ in small_tasks()]
        [torch.float32, torch.float64, torch.float32]
    """
    text, again, image = (SMALL_TASKS[domain]() for domain in ("text", "text", "image"))
    return [text[:2], (again[0].double(), again[1]), image[:2]]


@dataclass
class _Contract:
    defense: Defense

    @property
    def name(self) -> str:
        return getattr(self.defense, "name", None) or type(self.defense).__name__

    def require(self, kept: bool, breach: str) -> None:
        if not kept:
            raise AssertionError(f"{self.name}: {breach}")

    def check_declaration(self) -> None:
        defense: Any = self.defense
        self.require(isinstance(defense, Defense), "a defense is a subclass of `Defense`.")
        named = getattr(defense, "name", None)
        self.require(isinstance(named, str) and bool(named), "a defense has a `name`.")
        self.require(is_dataclass(defense), "a defense is a dataclass of its settings.")
        try:
            json.dumps(defense.settings(), default=lambda part: repr(part))
        except (TypeError, ValueError) as error:
            raise AssertionError(
                f"{self.name}: `settings()` can be written as JSON, but: {error}"
            ) from error

    def check_task(self, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
        self.defense.prepare(model)
        message, gmap = self.share(self.copy(), model, batch)
        self.check_facts(message, gmap)
        again, _ = self.share(self.copy(), model, batch)
        self.equal(message, again, "one seed gives one message, but {} differs the second time.")
        if message.noise is not None:
            other, _ = self.share(self.copy(), model, batch, seed=4)
            self.check_noise(message, other)
        self.check_memory(model, batch)
        self.check_clients(model, batch)

    def copy(self) -> Defense:
        """A client's own."""
        return copy.deepcopy(self.defense)

    def share(
        self, defense: Defense, model: nn.Module, batch: Mapping[str, Tensor], seed: int = 3
    ) -> tuple[Message, GradientMap]:
        """One message, with everything around it watched."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # dropout draws from the process's generator
            gmap = GradientMap(model, batch, second_order=defense.facts.needs_second_order)
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
            found = {f"the model's {name}": tensor.detach() for name, tensor in state.items()}
            found |= {f"the gradient of {name!r}": g for name, g in gmap.gradient().items()}
            found |= {f"the batch's {name}": tensor for name, tensor in batch.items()}
            return {**found, "the continuous input": gmap.input}

        before, facts = {n: t.clone() for n, t in tensors().items()}, _facts(gmap.model)
        yield
        for what, fact in _facts(gmap.model).items():
            self.require(fact == facts[what], f"a defense has no effects, but it changed {what}.")
        for what, tensor in tensors().items():
            self.require(
                same(tensor, before[what]), f"a defense has no effects, but it changed {what}."
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

    def check_noise(self, one: Message, other: Message) -> None:
        """Two messages differ by noise of the variances that they say, if nothing came after it."""
        if one.noise is None or other.noise is None:
            raise AssertionError(f"{self.name}: one message says its noise, and another does not.")
        added, others = one.noise.added or {}, other.noise.added or {}
        for said in (one.noise.variance, added, others):
            for name, variance in said.items():
                self.require(
                    bool((variance >= 0).all()),
                    f"a variance is not below 0, but one of {name!r} is.",
                )
        if not added or not others:  # what came after the noise changed it
            return
        ratios = []
        for name in added:
            both = added[name] + others[name]
            change = (one[name] - other[name]).to(both.dtype)
            self.require(
                self.processed or not change[both == 0].any(),
                f"noise of variance 0 changes nothing, but {name!r} changed.",
            )
            ratios.append((change.square() / both)[both > 0].flatten())
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
        """Whether something comes after the noise, so that what is shared has it no longer as it
        was added.
        """
        last = self.defense
        while isinstance(last, Chain):
            last = last.second
        return not last.facts.adds_gaussian_noise

    def check_memory(self, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
        """A defense that is restored goes on as the one that was saved."""
        for calls in (1, 2):
            saved = self.copy()
            for seed in range(calls):
                self.share(saved, model, batch, seed)
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
                one, two = (self.share(d, model, batch, seed)[0] for d in (saved, restored))
                self.equal(
                    one, two, "`load_state_dict` restores what it remembers, but {} differs then."
                )
            restored.load_state_dict({})
            new, _ = self.share(self.copy(), model, batch, seed=10)
            cleared, _ = self.share(restored, model, batch, seed=10)
            self.equal(new, cleared, "`load_state_dict({{}})` forgets all, but {} differs then.")

    def check_clients(self, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
        """What one client's copy remembers changes nothing of another's."""
        one, two = self.copy(), self.copy()
        alone, _ = self.share(self.copy(), model, batch, seed=11)
        other = {name: _turned(name, tensor) for name, tensor in batch.items()}
        for seed in (12, 13):
            self.share(one, model, other, seed)
        beside, _ = self.share(two, model, batch, seed=11)
        self.equal(
            alone,
            beside,
            "each client has a copy of its own, but another client's messages change {}.",
        )

    def equal(self, one: Message, two: Message, breach: str) -> None:
        for name, tensor in one.items():
            self.require(same(tensor, two[name]), breach.format(repr(name)))


def _turned(name: str, tensor: Tensor) -> Tensor:
    """Another client's batch: the samples in another order, with other content."""
    if name == "labels":
        return tensor.flip(0)
    if tensor.is_floating_point():
        return 1 - tensor
    return tensor.flip(0)


def _facts(model: nn.Module) -> dict[str, Any]:
    return {**model_facts(model), **random_states()}
