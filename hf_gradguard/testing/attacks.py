"""The contract of attacks, as a check that anybody can run on an attack of theirs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor

from ..attacks import Attack, Observation, Reconstruction, make_attack
from ..gradient_map.domain import DOMAINS
from ..gradient_map.inputs import PixelSpace
from .facts import model_facts, random_states, same
from .observations import other_cases, small_observation


def check_attack(attack: Attack | str, **observations: Observation) -> None:
    """Check that an attack keeps the contract of attacks.

    Runs it a dozen times on small observations of the domains that it declares, so give it settings
    that make it quick. An attack:

    - is a dataclass of its settings, with a name and the domains that it works on;
    - returns a `Reconstruction` with token ids of a text and pixels of an image, of the right
      shapes and ranges;
    - raises `ValueError` with a reason where it cannot work (another domain, labels, mask,
      tokenizer or tensors that were not granted, tensors of zeros), and nothing else;
    - leaves the model as it found it, and writes to nothing in the observation;
    - draws from the generator that it is given, and never from the process's;
    - gives the same result for the same seed, whatever it attacked in between.

    A gradient of nothing but zeros never reaches an attack: an `Observation` refuses it.

    Args:
        attack: An attack, or the name of one, which then runs with its default settings.
        **observations: By domain (`text`, `image`), for an attack on models of a certain kind: one
            with everything granted, in place of the small one.

    Raises:
        AssertionError: For the first breach, with the name of the attack and what the contract
            says.

    Example:
        >>> from hf_gradguard.attacks import make_attack
        >>> check_attack(make_attack("tag", steps=2))
    """
    if isinstance(attack, str):
        attack = make_attack(attack)
    contract = _Contract(attack)
    contract.check_declaration()
    for domain in DOMAINS:
        seen = observations.get(domain) or small_observation(domain)
        if domain in attack.domains:
            contract.check_domain(seen)
        else:
            contract.check_refusal(seen)


@dataclass
class _Contract:
    attack: Attack
    reason: str = ""  # of the last refusal

    @property
    def name(self) -> str:
        return getattr(self.attack, "name", None) or type(self.attack).__name__

    def require(self, kept: bool, breach: str) -> None:
        if not kept:
            raise AssertionError(f"{self.name}: {breach}")

    def check_declaration(self) -> None:
        attack: Any = self.attack
        self.require(isinstance(attack, Attack), "an attack is a subclass of `Attack`.")
        self.require(
            isinstance(getattr(attack, "name", None), str) and bool(attack.name),
            "an attack has a `name`.",
        )
        self.require(is_dataclass(attack), "an attack is a dataclass of its settings.")
        self.require(
            isinstance(attack.domains, tuple) and set() < set(attack.domains) <= set(DOMAINS),
            f"`domains` is a tuple of what an attack works on, of {', '.join(DOMAINS)}, but is "
            f"{attack.domains!r}.",
        )

    def check_refusal(self, seen: Observation) -> None:
        """Of a domain that the attack does not declare."""
        self.require(
            self.run(seen, "another domain's input") is None,
            f"an attack raises ValueError for a domain that it does not declare, but it took "
            f"{seen.domain.content}.",
        )

    def check_domain(self, seen: Observation) -> None:
        first = self.run(seen, "an observation with everything granted")
        if first is None:
            raise AssertionError(
                f"{self.name}: an attack works on a domain that it declares, but it refused "
                f"{seen.domain.content} with everything granted: {self.reason}"
            )
        for case, other in other_cases(seen):
            self.run(other, case)
        self.run(seen, "no generator given", generator=None)
        again = self.run(seen, "the first observation once more")
        difference = None if again is None else _difference(first, again)
        self.require(
            again is not None and difference is None,
            "one seed gives one result, whatever was attacked in between, but "
            f"{'it refused' if again is None else f'`{difference}` differs'} the second time.",
        )

    def run(
        self, seen: Observation, case: str, generator: torch.Generator | int | None = 3
    ) -> Reconstruction | None:
        """One attack with everything around it watched; `None` if it refused."""
        if isinstance(generator, int):
            generator = torch.Generator().manual_seed(generator)
        with self._unchanged(seen, case):
            try:
                found = self.attack(seen, generator)
            except ValueError as error:
                self.reason = str(error)
                self.require(
                    bool(self.reason.strip()), f"a refusal says why, but that of {case} does not."
                )
                return None
            except Exception as error:
                raise AssertionError(
                    f"{self.name}: an attack that cannot work raises ValueError with the reason, "
                    f"but on {case} it raised {type(error).__name__}: {error}"
                ) from error
        self._check_result(seen, found, case)
        return found

    @contextmanager
    def _unchanged(self, seen: Observation, case: str) -> Iterator[None]:
        def facts() -> dict[str, Any]:
            return {**model_facts(seen.model), **_observed(seen), **random_states()}

        before = facts()
        tensors = {name: tensor.clone() for name, tensor in _tensors(seen).items()}
        yield
        after = facts()
        for what in before:
            self.require(
                before[what] == after.get(what),
                f"an attack leaves everything as it found it, but on {case} it changed {what}.",
            )
        for name, tensor in _tensors(seen).items():
            self.require(
                same(tensor, tensors[name]),
                f"an attack leaves everything as it found it, but on {case} it changed {name}.",
            )

    def _check_result(self, seen: Observation, found: Any, case: str) -> None:
        on = f"but on {case}"
        self.require(
            isinstance(found, Reconstruction),
            f"an attack returns a Reconstruction, {on} it returned {type(found).__name__}.",
        )
        self.require(
            isinstance(found.objective, float),
            f"`objective` is a float, {on} it is {type(found.objective).__name__}.",
        )
        _CHECKS[seen.domain.name](self, seen, found, on)
        if found.labels is not None:
            self._check_labels(seen, found.labels, on)

    def _check_labels(self, seen: Observation, labels: Any, on: str) -> None:
        config: Any = seen.model.config
        classes = config.num_labels
        self.require(
            isinstance(labels, Tensor) and labels.shape == (seen.batch_size,),
            f"`labels` has shape (B,), {on} it is {_shape(labels)}.",
        )
        self.require(
            not labels.is_floating_point()
            and 0 <= int(labels.min()) <= int(labels.max()) < classes,
            f"`labels` are class ids from 0 to {classes - 1}, {on} they are {labels.tolist()}.",
        )
        self.require(
            seen.labels is None or torch.equal(labels.cpu(), seen.labels.cpu()),
            f"`labels` that were granted are returned as they are, {on} they are not.",
        )

    def check_text(self, seen: Observation, found: Reconstruction, on: str) -> None:
        """What is found of a text."""
        rows, size = found.token_ids, len(_embedding(seen))
        self.require(
            isinstance(rows, list) and len(rows) == seen.batch_size,
            f"`token_ids` is one list per sample, {on} it is {_shape(rows)}.",
        )
        most = int(seen.tokens.sum())
        for row in rows or []:
            self.require(
                isinstance(row, list) and all(type(token) is int for token in row),
                f"`token_ids` are lists of whole numbers, {on} one is {row!r}.",
            )
            self.require(
                len(row) <= most,
                f"`token_ids` has no more tokens than the batch ({most}), {on} {len(row)}.",
            )
            self.require(
                all(-1 <= token < size for token in row),
                f"`token_ids` are below the vocabulary's {size}, or -1 where nothing was found, "
                f"{on} they are {row}.",
            )
        self._check_strings(seen, found.text, on)
        if found.input is not None:
            self._check_input(found.input, (*seen.input_shape, _embedding(seen).shape[1]), on)

    def _check_strings(self, seen: Observation, strings: Any, on: str) -> None:
        if seen.tokenizer is None:
            self.require(strings is None, f"`text` is None without a tokenizer, {on} it is not.")
            return
        self.require(
            isinstance(strings, list)
            and len(strings) == seen.batch_size
            and all(isinstance(text, str) for text in strings),
            f"`text` is one string a sample where there is a tokenizer, {on} it is {strings!r}.",
        )

    def check_image(self, seen: Observation, found: Reconstruction, on: str) -> None:
        """What is found of an image."""
        x = found.input
        if x is None:
            raise AssertionError(f"{self.name}: `input` is what an image is, {on} it is None.")
        self._check_input(x, seen.input_shape, on)
        space = PixelSpace(x, seen.image_mean, seen.image_std)
        slack = 1e-5 * float((space.high - space.low).max())
        self.require(
            bool((x >= space.low - slack).all() and (x <= space.high + slack).all()),
            f"`input` lies within the range of pixels, {on} it goes from {float(x.min()):.4g} to "
            f"{float(x.max()):.4g}.",
        )

    def _check_input(self, x: Any, shape: tuple[int, ...], on: str) -> None:
        self.require(
            isinstance(x, Tensor) and x.shape == shape,
            f"`input` has shape {shape}, {on} it is {_shape(x)}.",
        )
        self.require(not x.requires_grad, f"`input` is detached, {on} it requires a gradient.")
        self.require(
            x.is_floating_point() and bool(torch.isfinite(x).all()),
            f"`input` is finite, {on} it is not.",
        )


_CHECKS = {"text": _Contract.check_text, "image": _Contract.check_image}


def _tensors(seen: Observation) -> dict[str, Tensor]:
    """All that an attack could write to, by what it is called."""
    state = seen.model.state_dict(keep_vars=True)
    given = {f"the gradient of {name}": g for name, g in seen.gradient.items()}
    noise = seen.noise_variance if isinstance(seen.noise_variance, dict) else {}
    given |= {f"the noise variance of {name}": tensor for name, tensor in noise.items()}
    for name, tensor in (("labels", seen.labels), ("attention_mask", seen.attention_mask)):
        if tensor is not None:
            given[f"the observation's {name}"] = tensor
    return {f"the model's {name}": tensor.detach() for name, tensor in state.items()} | given


def _observed(seen: Observation) -> dict[str, Any]:
    """Which tensors there are, and how often each was written to."""
    tensors = _tensors(seen).items()
    return {"the names in the gradient": list(seen.gradient)} | {
        name: (tensor.data_ptr(), tensor._version) for name, tensor in tensors
    }


def _difference(one: Reconstruction, other: Reconstruction) -> str | None:
    """The part in which two reconstructions differ; the time that they took may."""
    for part in ("input", "labels"):
        a, b = getattr(one, part), getattr(other, part)
        if (a is None) != (b is None) or (a is not None and not same(a, b)):
            return part
    for part in ("token_ids", "text", "history"):
        if getattr(one, part) != getattr(other, part):
            return part
    both = math.isnan(one.objective) and math.isnan(other.objective)
    return None if both or one.objective == other.objective else "objective"


def _embedding(seen: Observation) -> Tensor:
    weight: Tensor = seen.domain.embedding(seen.model).weight  # type: ignore[assignment, union-attr]
    return weight


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__
