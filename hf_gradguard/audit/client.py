"""One client of an audit: its batch, protected, measured and attacked."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..attacks.candidates.attack import Candidates, Ranked
from ..attacks.labels import recover_labels
from ..attacks.observation import Observation
from ..gradient_map import GradientMap
from ..randomness import Stream
from ..registry import ESTIMATORS

if TYPE_CHECKING:
    from ..attacks import Attack, Reconstruction
    from ..defenses import Defense, Message
    from ..leakage.estimators import Estimator
    from .adaptive import Attacker
    from .cells import Cell
    from .modality import Images, Texts

logger = logging.get_logger(__name__)

_DROPOUT, _DEFENSE, _ATTACK, _PROBES = 0, 1, 2, 4  # streams of random numbers


class Client:
    """One client's batch, with its gradient map, made when it is first needed and the same for
    every defense.

    Args:
        model: The model, in the mode in which the client runs it.
        batch: The client's batch.
        share_embeddings: Whether the token embeddings' gradient is shared.
        seeds: Of all that is random here: the same for every defense and every attack.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: dict[str, Tensor],
        share_embeddings: bool,
        seeds: tuple[int, ...],
    ) -> None:
        self.model, self.batch, self.seeds = model, batch, seeds
        self.share_embeddings = share_embeddings
        self._estimators: dict[str, Estimator] = {}

    def generator(self, stream: int) -> Stream:
        """A fresh one, the same at every call."""
        return Stream.from_seeds(*self.seeds, stream)

    @cached_property
    def gmap(self) -> GradientMap:
        with _reproducible(self.model, self.generator(_DROPOUT)):
            return GradientMap(self.model, self.batch, share_input_embeddings=self.share_embeddings)

    def estimator(self, name: str) -> Estimator:
        """One for all defenses: it keeps what does not depend on them."""
        if name not in self._estimators:
            self._estimators[name] = ESTIMATORS[name](self.gmap)
        return self._estimators[name]


class Upload:
    """What one defense shares of one client's batch, computed when it is first needed.

    Args:
        client: The client.
        defense: Its defense.
    """

    def __init__(self, client: Client, defense: Defense) -> None:
        self.client, self.defense = client, defense

    @cached_property
    def message(self) -> Message:
        # Every message is a first one: nothing is kept from those before.
        self.defense.load_state_dict({})
        return self.defense(self.client.gmap, self.client.generator(_DEFENSE))

    def described(self) -> Cell:
        """How far what is shared is from the gradient, or why nothing is."""

        gradient = self.client.gmap.gradient()

        def describe() -> Cell:
            started = time.perf_counter()
            shared = dict(self.message)
            seconds = time.perf_counter() - started
            size, shared_size = (math.sqrt(_inner(one, one)) for one in (gradient, shared))
            change = {name: shared[name] - g for name, g in gradient.items()}
            sizes = size * shared_size
            return {
                "relative_error": math.sqrt(_inner(change, change)) / size if size else None,
                "cosine": _inner(gradient, shared) / sizes if sizes else None,
                "seconds": seconds,
            }

        return _outcome(describe, ValueError, FloatingPointError)

    def estimated(self, name: str) -> Cell:
        """What an estimator says of it, `None` for infinity, or why it says nothing."""

        def estimate() -> Cell:
            estimator = self.client.estimator(name)
            errors = estimator(self.message, self.client.generator(_PROBES)).tolist()
            return {"values": [value if math.isfinite(value) else None for value in errors]}

        return {"estimator": name, **_outcome(estimate, ValueError, ArithmeticError)}

    def labelled(self, modality: Texts | Images) -> Cell:
        """The labels that are read off it, whether or not attacks are granted them; or why none
        are.
        """

        def read() -> Cell:
            observed = modality.observed(self.client.batch)
            seen = Observation(model=self.client.model, gradient=self.message, **observed)
            return {"labels": recover_labels(seen).tolist()}

        return _outcome(read, ValueError, FloatingPointError)

    def attacked(self, attacker: Attacker, modality: Texts | Images, labels_known: bool) -> Cell:
        """Scores and reconstruction, or why the attack is not applicable."""
        batch, attack = self.client.batch, attacker.attack
        labels = batch["labels"].clone() if labels_known else None

        def reconstruct() -> Cell:
            seen = Observation(
                model=self.client.model,
                gradient=self.message,
                labels=labels,
                **self._granted(attacker.grants),
                **modality.observed(batch),
            )
            found = attack(seen, self.client.generator(_ATTACK))
            try:
                scored = modality.score(found, batch)
            except ValueError as error:
                raise ValueError(f"What the attack returned cannot be scored. {error}") from error
            knows = attacker.knows and ("law" not in attacker.grants or seen.law is not None)
            listed = _listed(found, attack, modality, batch)
            recovered = None if found.labels is None or labels_known else found.labels.tolist()
            return {
                **scored,
                **listed,
                "knows": knows,
                "labels": recovered,
                "objective": _finite(found.objective),
                "seconds": _finite(found.seconds),
            }

        return _outcome(reconstruct, ValueError, FloatingPointError)

    def _granted(self, grants: frozenset[str]) -> dict[str, Any]:
        """What of the defense the attacker is told, if there is any: Σ of Gaussian noise, and how
        messages come from gradients.
        """
        found: dict[str, Any] = {}
        noise = self.message.noise
        added = None if noise is None or "noise_variance" not in grants else noise.added
        if added is not None and any(bool(tensor.any()) for tensor in added.values()):
            found["noise_variance"] = added
        if "law" in grants:
            found["law"] = self.defense.law(self.message)
        return found


def _listed(
    found: Reconstruction, attack: Attack, modality: Texts | Images, batch: dict[str, Tensor]
) -> Cell:
    """Of a ranking of candidates their scores, and which of them were in the message."""
    if not isinstance(found, Ranked) or not isinstance(attack, Candidates) or attack.places:
        return {}
    members = modality.among(attack.candidates, batch)
    return {"ranked": {"scores": found.scores.tolist(), "members": members}}


def _outcome(make: Callable[[], Cell], *refusals: type[Exception]) -> Cell:
    """What was made; or the reason that a refusal gives, which is final; or a crash, which may not
    happen again.
    """
    try:
        return make()
    except refusals as error:
        return {"reason": str(error)}
    except Exception as error:
        logger.warning(f"{type(error).__name__} in an audit, which goes on.", exc_info=True)
        return {"crash": f"{type(error).__name__}: {error}"}


@contextmanager
def _reproducible(model: nn.Module, stream: Stream) -> Iterator[None]:
    """Draws of dropout that the stream determines, and buffers (batch statistics) put back
    afterwards.
    """
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    devices = {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
    seed = int.from_bytes(stream.bytes(8), "little") >> 1
    with torch.random.fork_rng(devices=sorted(devices)):
        torch.manual_seed(seed)
        try:
            yield
        finally:
            for name, tensor in model.named_buffers():
                # .data: to the graph of the pass just made, nothing has changed
                tensor.data.copy_(buffers[name])


def _inner(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return sum(float((one[name].double() * other[name].double()).sum()) for name in one)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
