"""The contract of attacks, as a check that anybody can run on their own attack."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..attacks import Attack, Observation, Reconstruction, make_attack
from ..gradient_map import GradientMap
from ..gradient_map.domain import DOMAINS
from ..gradient_map.inputs import PixelSpace
from .facts import model_facts, random_states, same
from .small import SMALL_TASKS


def check_attack(attack: Attack | str, **observations: Observation) -> None:
    """Check that an attack keeps the contract of attacks.

    It runs the attack a dozen times on small observations of the domains that it declares, so give
    it settings that make it quick. An attack:

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
        **observations: Observations by domain (`text`, `image`), with everything granted, for an
            attack on models of a certain kind. Default: small ones.

    Raises:
        AssertionError: If the contract is broken. The message names the attack, and what the
            contract says.

    Example:
        >>> from hf_gradguard.attacks import make_attack
        >>> check_attack(make_attack("tag", steps=2))
    """
    if isinstance(attack, str):
        attack = make_attack(attack)
    contract = _Contract(attack)
    contract.check_declaration()
    for domain in DOMAINS:
        observation = observations.get(domain) or small_observation(domain)
        if domain in attack.domains:
            contract.check_domain(observation)
        else:
            contract.check_refusal(observation)


@dataclass
class _Contract:
    attack: Attack
    reason: str = ""  # of the last refusal

    @property
    def name(self) -> str:
        return getattr(self.attack, "name", None) or type(self.attack).__name__

    def require(self, is_kept: bool, breach: str) -> None:
        if not is_kept:
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

    def check_refusal(self, observation: Observation) -> None:
        """Require an error for a domain that the attack does not declare."""
        self.require(
            self.run(observation, "another domain's input") is None,
            f"an attack raises ValueError for a domain that it does not declare, but it took "
            f"{observation.domain.content}.",
        )

    def check_domain(self, observation: Observation) -> None:
        reconstruction = self.run(observation, "an observation with everything granted")
        if reconstruction is None:
            raise AssertionError(
                f"{self.name}: an attack works on a domain that it declares, but it refused "
                f"{observation.domain.content} with everything granted: {self.reason}"
            )
        for case, other_observation in other_cases(observation):
            self.run(other_observation, case)
        self.run(observation, "no generator given", generator=None)
        repetition = self.run(observation, "the first observation once more")
        difference = None if repetition is None else _difference(reconstruction, repetition)
        self.require(
            repetition is not None and difference is None,
            "one seed gives one result, whatever was attacked in between, but "
            f"{'it refused' if repetition is None else f'`{difference}` differs'} the second time.",
        )

    def run(
        self, observation: Observation, case: str, generator: torch.Generator | int | None = 3
    ) -> Reconstruction | None:
        """Run the attack once under watch, and return its result, or `None` if it refused."""
        if isinstance(generator, int):
            generator = torch.Generator().manual_seed(generator)
        with self._unchanged(observation, case):
            try:
                reconstruction = self.attack(observation, generator)
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
        self._check_result(observation, reconstruction, case)
        return reconstruction

    @contextmanager
    def _unchanged(self, observation: Observation, case: str) -> Iterator[None]:
        def facts() -> dict[str, Any]:
            return {**model_facts(observation.model), **_observed(observation), **random_states()}

        facts_before = facts()
        tensors = {name: tensor.clone() for name, tensor in _tensors(observation).items()}
        yield
        facts_after = facts()
        for fact in facts_before:
            self.require(
                facts_before[fact] == facts_after.get(fact),
                f"an attack leaves everything as it found it, but on {case} it changed {fact}.",
            )
        for name, tensor in _tensors(observation).items():
            self.require(
                same(tensor, tensors[name]),
                f"an attack leaves everything as it found it, but on {case} it changed {name}.",
            )

    def _check_result(self, observation: Observation, reconstruction: Any, case: str) -> None:
        on = f"but on {case}"
        self.require(
            isinstance(reconstruction, Reconstruction),
            f"an attack returns a Reconstruction, {on} it returned a "
            f"{type(reconstruction).__name__}.",
        )
        self.require(
            isinstance(reconstruction.objective, float),
            f"`objective` is a float, {on} it is {type(reconstruction.objective).__name__}.",
        )
        _CHECKS[observation.domain.name](self, observation, reconstruction, on)
        if reconstruction.labels is not None:
            self._check_labels(observation, reconstruction.labels, on)

    def _check_labels(self, observation: Observation, labels: Any, on: str) -> None:
        config: Any = observation.model.config
        classes = config.num_labels
        self.require(
            isinstance(labels, Tensor) and labels.shape == (observation.batch_size,),
            f"`labels` has shape (B,), {on} it is {_shape(labels)}.",
        )
        self.require(
            not labels.is_floating_point()
            and 0 <= int(labels.min()) <= int(labels.max()) < classes,
            f"`labels` are class ids from 0 to {classes - 1}, {on} they are {labels.tolist()}.",
        )
        self.require(
            observation.labels is None or torch.equal(labels.cpu(), observation.labels.cpu()),
            f"`labels` that were granted are returned as they are, {on} they are not.",
        )

    def check_text(self, observation: Observation, reconstruction: Reconstruction, on: str) -> None:
        """Check the reconstruction of texts."""
        rows, size = reconstruction.token_ids, len(_embedding(observation))
        self.require(
            isinstance(rows, list) and len(rows) == observation.batch_size,
            f"`token_ids` is one list per sample, {on} it is {_shape(rows)}.",
        )
        most = int(observation.tokens.sum())
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
        self._check_strings(observation, reconstruction.text, on)
        if reconstruction.input is not None:
            self._check_input(
                reconstruction.input,
                (*observation.input_shape, _embedding(observation).shape[1]),
                on,
            )

    def _check_strings(self, observation: Observation, strings: Any, on: str) -> None:
        if observation.tokenizer is None:
            self.require(strings is None, f"`text` is None without a tokenizer, {on} it is not.")
            return
        self.require(
            isinstance(strings, list)
            and len(strings) == observation.batch_size
            and all(isinstance(text, str) for text in strings),
            f"`text` is one string a sample where there is a tokenizer, {on} it is {strings!r}.",
        )

    def check_image(
        self, observation: Observation, reconstruction: Reconstruction, on: str
    ) -> None:
        """Check the reconstruction of images."""
        x = reconstruction.input
        if x is None:
            raise AssertionError(f"{self.name}: `input` is what an image is, {on} it is None.")
        self._check_input(x, observation.input_shape, on)
        space = PixelSpace(x, observation.image_mean, observation.image_std)
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


def _tensors(observation: Observation) -> dict[str, Tensor]:
    """Return all tensors that an attack could write to, by a name for each."""
    state = observation.model.state_dict(keep_vars=True)
    granted = {f"the gradient of {name}": g for name, g in observation.gradient.items()}
    noise = observation.noise_variance if isinstance(observation.noise_variance, dict) else {}
    granted |= {f"the noise variance of {name}": tensor for name, tensor in noise.items()}
    for name, tensor in (
        ("labels", observation.labels),
        ("attention_mask", observation.attention_mask),
    ):
        if tensor is not None:
            granted[f"the observation's {name}"] = tensor
    return {f"the model's {name}": tensor.detach() for name, tensor in state.items()} | granted


def _observed(observation: Observation) -> dict[str, Any]:
    """Return which tensors there are, and how often each was written to."""
    tensors = _tensors(observation).items()
    return {"the names in the gradient": list(observation.gradient)} | {
        name: (tensor.data_ptr(), tensor._version) for name, tensor in tensors
    }


def _difference(first_result: Reconstruction, second_result: Reconstruction) -> str | None:
    """Return the field in which two reconstructions differ, or `None`; their times may differ."""
    for attribute in ("input", "labels"):
        first_tensor, second_tensor = (
            getattr(first_result, attribute),
            getattr(second_result, attribute),
        )
        if (first_tensor is None) != (second_tensor is None) or (
            first_tensor is not None and not same(first_tensor, second_tensor)
        ):
            return attribute
    for attribute in ("token_ids", "text", "history"):
        if getattr(first_result, attribute) != getattr(second_result, attribute):
            return attribute
    are_both_nan = math.isnan(first_result.objective) and math.isnan(second_result.objective)
    return (
        None if are_both_nan or first_result.objective == second_result.objective else "objective"
    )


def _embedding(observation: Observation) -> Tensor:
    weight: Tensor = observation.domain.embedding(observation.model).weight  # type: ignore[assignment, union-attr]
    return weight


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__


def small_observation(domain: str, **changes: Any) -> Observation:
    """Return an observation of a small model's gradient, with everything granted.

    Args:
        domain: `"text"` or `"image"`.
        **changes: Fields of the `Observation` to replace.

    Example:
        >>> small_observation("image", labels=None).input_shape
        (2, 3, 16, 16)
    """
    model, batch, tokenizer = SMALL_TASKS[domain]()
    with torch.random.fork_rng(devices=[]):  # dropout draws from the process's generator
        gradient = GradientMap(
            model, batch, share_input_embeddings=True, second_order=False
        ).gradient()
    shape = tuple(DOMAINS[domain].main_input(batch).shape)
    observation = Observation(
        model=model,
        gradient=gradient,
        input_shape=shape,
        labels=batch["labels"],
        attention_mask=batch.get("attention_mask"),
        tokenizer=tokenizer,
    )
    return replace(observation, **changes)


def other_cases(observation: Observation) -> list[tuple[str, Observation]]:
    """Return other observations with their names, which grant less or say more.

    Example:
        >>> [name for name, _ in other_cases(small_observation("image"))][:2]
        ['an observation without labels', 'one whose noise is known']
    """
    noise = {name: torch.full_like(g, 1e-6) for name, g in observation.gradient.items()}
    shared_alone = next(
        name
        for name in reversed(list(observation.gradient))
        if observation.gradient[name].dim() == 1
    )
    zeros = {
        n: g if n == shared_alone else torch.zeros_like(g) for n, g in observation.gradient.items()
    }
    return [
        ("an observation without labels", replace(observation, labels=None)),
        ("one whose noise is known", replace(observation, noise_variance=noise)),
        (f"a gradient of zeros but for {shared_alone}", replace(observation, gradient=zeros)),
        (
            f"a gradient of {shared_alone} alone",
            replace(observation, gradient={shared_alone: observation.gradient[shared_alone]}),
        ),
        *_CASES[observation.domain.name](observation),
    ]


def _text_cases(observation: Observation) -> list[tuple[str, Observation]]:
    embeddings = {id(p) for p in observation.model.get_input_embeddings().parameters()}  # type: ignore[operator]
    names = {name for name, p in observation.model.named_parameters() if id(p) in embeddings}
    withheld = {name: g for name, g in observation.gradient.items() if name not in names}
    return [
        ("a text without its mask", replace(observation, attention_mask=None)),
        ("a text without a tokenizer", replace(observation, tokenizer=None)),
        ("a text whose embeddings are withheld", replace(observation, gradient=withheld)),
    ]


def _image_cases(observation: Observation) -> list[tuple[str, Observation]]:
    channels = observation.input_shape[1]
    scaled = replace(observation, image_mean=[0.5] * channels, image_std=[0.25] * channels)
    return [("images that were normalized", scaled)]


_CASES = {"text": _text_cases, "image": _image_cases}
