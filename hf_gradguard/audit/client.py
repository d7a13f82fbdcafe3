"""One client of an audit: its batch, protected, measured and attacked."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..attacks.base import Observation
from ..attacks.candidates.attack import Candidates, Ranked
from ..attacks.labels import recover_labels
from ..attacks.local_training import LocalTraining
from ..defenses.message import Message, Noise
from ..gradient_map import GradientMap, UpdateMap
from ..gradient_map.domain import IMAGE, TEXT, count_rows, domain_of_model
from ..gradient_map.local_training.update import mean_gradient
from ..gradient_map.replay import draws_kept
from ..randomness import Stream
from ..registry import ESTIMATORS
from .images import Images
from .settings import AuditSettings
from .texts import Texts

if TYPE_CHECKING:
    from ..attacks import Attack, Reconstruction
    from ..defenses import Defense
    from ..gradient_map.types import LossFunction
    from ..leakage.estimators import Estimator
    from .cells import Cell


logger = logging.get_logger(__name__)

_DROPOUT, _DEFENSE, _ATTACK, _PROBES = 0, 1, 2, 4  # streams of random numbers


@dataclass(frozen=True)
class Shared:
    """What a client differentiates, and what of it is shared.

    Args:
        input_embeddings: Whether the token embeddings' gradient is.
        withhold: Patterns of parameters that are not.
        loss_fn: The client's loss. Default: the model's own.
        micro_batches: Parts of a client's batch, protected one by one. The client averages what is
            shared of them.
        local: How the client trains on its batch before it sends the change of its weights. `None`:
            it sends the gradient.
    """

    input_embeddings: bool = False
    withhold: Sequence[str] = ()
    loss_fn: LossFunction | None = None
    micro_batches: int = 1
    local: LocalTraining | None = None


@dataclass(frozen=True)
class Attacker:
    """An attack under one defense, as somebody would set it.

    Args:
        attack: The attack with its settings.
        grants: Fields of the observation that it is granted beyond the threat model's.
        knows: Whether it does what there is to do about the defense, or there is nothing.
    """

    attack: Attack
    grants: frozenset[str]
    knows: bool


class Client:
    """One client's batch, with its gradient map, made when it is first needed and the same for
    every defense.

    Args:
        model: The model, in the mode in which the client runs it.
        batch: The client's batch.
        shared: What of its gradient is shared.
        seeds: Of all that is random here: the same for every defense and every attack.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: dict[str, Tensor],
        shared: Shared,
        seeds: tuple[int, ...],
    ) -> None:
        self.model, self.batch, self.seeds = model, batch, seeds
        self.shared = shared
        self._estimators: dict[str, Estimator] = {}

    def generator(self, stream: int) -> Stream:
        """A fresh one, the same at every call."""
        return Stream.from_seeds(*self.seeds, stream)

    @cached_property
    def gmap(self) -> GradientMap:
        return self._map(self.batch)

    @cached_property
    def parts(self) -> list[GradientMap]:
        """One map for each micro-batch."""
        count, rows = self.shared.micro_batches, count_rows(self.batch)
        if count == 1:
            return [self.gmap]
        size = rows // count
        return [
            self._map({name: t[at : at + size] for name, t in self.batch.items()}, at)
            for at in range(0, rows, size)
        ]

    def _map(self, batch: dict[str, Tensor], place: int = 0) -> GradientMap:
        stream = Stream.from_seeds(*self.seeds, _DROPOUT, *([place] if place else []))
        with _reproducible(self.model, stream):
            what: dict[str, Any] = {
                "loss_fn": self.shared.loss_fn,
                "share_input_embeddings": self.shared.input_embeddings,
                "withhold": self.shared.withhold,
            }
            local = self.shared.local
            if local is None:
                return GradientMap(self.model, batch, **what)
            return UpdateMap(
                self.model,
                local.batches(batch),
                learning_rate=local.rates,
                optimizer=local.optimizer,
                **what,
            )

    def gradient(self) -> dict[str, Tensor]:
        """What would be shared without a defense."""
        return mean_of([part.gradient() for part in self.parts])

    def estimator(self, name: str) -> Estimator:
        """One for all defenses: it keeps what does not depend on them."""
        if name not in self._estimators:
            self._estimators[name] = ESTIMATORS[name](self.gmap)
        return self._estimators[name]


def beside(clients: Sequence[Client]) -> list[tuple[Client, list[Client]]]:
    """Each of them, and the others, those after it first."""
    return [(one, [*clients[at + 1 :], *clients[:at]]) for at, one in enumerate(clients)]


class Upload:
    """What one defense shares of one client's batch, computed when it is first needed.

    Args:
        client: The client.
        defense: Its defense.
        state: What the defense remembers of the client's messages before.
        others: Clients with other batches. Where a defense's first messages are empty and it
            remembers nothing, theirs come before.
    """

    def __init__(
        self,
        client: Client,
        defense: Defense,
        state: Mapping[str, Any] | None = None,
        others: Sequence[Client] = (),
    ) -> None:
        self.client, self.defense, self.state = client, defense, dict(state or {})
        held = 0 if self.state else -(-defense.facts.warmup_messages // client.shared.micro_batches)
        self.before = list(islice(cycle(others), held))

    @cached_property
    def message(self) -> Message:
        warmup = self.defense.facts.warmup_messages
        if warmup and not (self.state or self.before):
            raise ValueError(
                f"The first {warmup} messages of {self.defense.name} are empty. Audit "
                "several messages, so that others come before each, or a trainer that has trained."
            )
        # No audited message knows of another one.
        self.defense.load_state_dict(copy.deepcopy(self.state))
        for client in [*self.before, self.client]:
            stream = client.generator(_DEFENSE)
            messages = [self.defense(part, stream) for part in client.parts]
        return average_of(messages)

    def described(self) -> Cell:
        """How far what is shared is from the gradient, or why nothing is."""

        gradient = self.client.gradient()

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

    def labeled(self, modality: Modality) -> Cell:
        """The labels that are read off it, whether or not attacks are granted them; or why none
        are.
        """

        def read() -> Cell:
            observed = modality.observed(self.client.batch)
            seen = observation(
                self.client.shared.local, self.client.model, self.message, **observed
            )
            return {"labels": recover_labels(seen).tolist()}

        return _outcome(read, ValueError, FloatingPointError)

    def attacked(self, attacker: Attacker, modality: Modality) -> Cell:
        """Scores and reconstruction, or why the attack is not applicable."""

        def reconstruct() -> Cell:
            seen = self._seen(attacker, modality)
            found = attacker.attack(seen, self.client.generator(_ATTACK))
            return self._told(seen, found, attacker, modality)

        return _outcome(reconstruct, ValueError, FloatingPointError)

    def _seen(self, attacker: Attacker, modality: Modality) -> Observation:
        batch = self.client.batch
        return observation(
            self.client.shared.local,
            self.client.model,
            self.message,
            labels=modality.granted(batch),
            **self._granted(attacker.grants),
            **modality.observed(batch),
        )

    def _told(
        self, seen: Observation, found: Reconstruction, attacker: Attacker, modality: Modality
    ) -> Cell:
        batch = self.client.batch
        try:
            scored = modality.score(found, batch)
        except ValueError as error:
            raise ValueError(f"What the attack returned cannot be scored. {error}") from error
        told = seen.mechanism is not None or seen.noise_variance is not None
        knows = attacker.knows and ("mechanism" not in attacker.grants or told)
        listed = _listed(found, attacker.attack, modality, batch)
        own = None if seen.labels is not None else found.labels
        return {
            **scored,
            **listed,
            "knows": knows,
            "labels": None if own is None else own.tolist(),
            "objective": _finite(found.objective),
            "seconds": _finite(found.seconds),
        }

    def _granted(self, grants: frozenset[str]) -> dict[str, Any]:
        """What of the defense the attacker is told, if there is any: Σ of Gaussian noise, and how
        messages come from gradients.
        """
        found: dict[str, Any] = {}
        noise = self.message.noise
        several = self.client.shared.micro_batches > 1
        wanted = "noise_variance" in grants or (several and "mechanism" in grants)
        added = None if noise is None or not wanted else noise.added
        if added is not None and any(bool(tensor.any()) for tensor in added.values()):
            found["noise_variance"] = added
        if "mechanism" in grants and not several:
            found["mechanism"] = self.defense.mechanism(self.message)
        return found


def ranked_together(
    uploads: Sequence[Upload], attackers: Sequence[Attacker], modality: Modality
) -> list[Cell]:
    """What `attacked` gives of each upload of one client, all of them with one list, whose
    gradients are computed once. Those that cannot be attacked together are by themselves.
    """
    attack: Any = attackers[0].attack
    pairs = list(zip(uploads, attackers, strict=True))
    try:
        seen = [upload._seen(attacker, modality) for upload, attacker in pairs]
        found = attack.together(seen, uploads[0].client.generator(_ATTACK))
    except Exception:  # each says its own
        return [upload.attacked(attacker, modality) for upload, attacker in pairs]
    return [
        _outcome(partial(upload._told, one, result, attacker, modality), ValueError)
        for (upload, attacker), one, result in zip(pairs, seen, found, strict=True)
    ]


def _listed(
    found: Reconstruction, attack: Attack, modality: Modality, batch: dict[str, Tensor]
) -> Cell:
    """Of a ranking of candidates their scores, and which of them were in the message."""
    if not isinstance(found, Ranked) or not isinstance(attack, Candidates) or attack.places:
        return {}
    ranked = (found.scores > -torch.inf).nonzero().flatten().tolist()  # what is passed over is not
    members = modality.among([attack.candidates[place] for place in ranked], batch)
    return {"ranked": {"scores": found.scores[ranked].tolist(), "members": members}}


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
    seed = int.from_bytes(stream.bytes(8), "little") >> 1
    with draws_kept(model):
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


def mean_of(several: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Name by name.

    Example:
        >>> mean_of([{"w": torch.ones(2)}, {"w": torch.zeros(2)}])["w"].tolist()
        [0.5, 0.5]
    """
    if len(several) == 1:
        return dict(several[0])
    return {name: torch.stack([one[name] for one in several]).mean(0) for name in several[0]}


def average_of(messages: Sequence[Message]) -> Message:
    """The mean of several messages that were protected one by one, each with noise of its own."""
    if len(messages) == 1:
        return messages[0]
    noises = [message.noise for message in messages]
    noise = None
    if all(one is not None for one in noises):
        known = [one for one in noises if one is not None]
        added = [one.added for one in known if one.added is not None]
        noise = Noise(
            variance=_of_mean([one.variance for one in known]),
            added=_of_mean(added) if len(added) == len(known) else None,
            plain=all(one.plain for one in known),
        )
    has_residual = any(message.has_residual for message in messages)
    return Message(mean_of(messages), noise=noise, has_residual=has_residual)


def _of_mean(variances: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor / len(variances) for name, tensor in mean_of(variances).items()}


_BOUNDS = ("clip_norm", "clip_coordinate")  # settings of attacks in the message's unit


def training_of(terms: AuditSettings) -> LocalTraining | None:
    """How clients train before they send; `None` if they send gradients. The attacker knows it, and
    in which order the batches come.

    Raises:
        ValueError: If the learning rate is no number above 0, or the optimizer is unknown.

    Example:
        >>> training_of(AuditSettings(local_steps=4, learning_rate=0.1)).rates
        (0.1, 0.1, 0.1, 0.1)
        >>> training_of(AuditSettings()) is None
        True
    """
    if not terms.local_steps:
        return None
    # Weight decay is known and takes nothing from the message: transformers' default is none.
    settings = {"weight_decay": 0.0}
    rate = float(terms.learning_rate or 0.0)
    return LocalTraining.of(rate, terms.local_steps, terms.batch_size, terms.optimizer, settings)


def observation(
    local: LocalTraining | None, model: nn.Module, message: Mapping[str, Tensor], **grants: Any
) -> Observation:
    """What a server sees of a message: a gradient, or an update and how it was trained.

    Args:
        local: The client's training, if it is an update.
        model: As it was sent to the client.
        message: What came back.
        **grants: As for `Observation`; noise and mechanism are those of the message.

    Example:
        >>> seen = observation(None, model, shared, input_shape=(2, 8))
        >>> seen.local is None, seen.gradient.keys() == shared.keys()
        (True, True)
    """
    if local is None:
        return Observation(model=model, gradient=message, **grants)
    weights = {name: p.detach() for name, p in model.named_parameters() if name in message}
    gradient = mean_gradient(local.optimizer, local.rates, weights, dict(message))
    return Observation(model=model, gradient=gradient, local=local, **local.behind(grants))


def in_unit_of_gradients(
    local: LocalTraining | None, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Settings of attacks that a defense names in its message's unit, in that of the observation's
    gradient.

    Example:
        >>> local = training_of(AuditSettings(local_steps=2, learning_rate=0.5))
        >>> in_unit_of_gradients(local, {"clip_norm": 3.0, "complete": True})
        {'clip_norm': 3.0, 'complete': True}
    """
    if local is None:
        return dict(settings)
    total = local.optimizer.linear(list(local.rates))[1]
    return {
        name: value / total if name in _BOUNDS and value is not None else value
        for name, value in settings.items()
    }


Modality = Texts | Images


def modality_of(model: nn.Module, processing_class: Any, settings: AuditSettings) -> Texts | Images:
    """What the inputs of a model ask for.

    Raises:
        ValueError: If a model of texts comes without a tokenizer.
    """
    return MODALITIES[domain_of_model(model).name](model, processing_class, settings)


MODALITIES: dict[str, type[Texts] | type[Images]] = {TEXT.name: Texts, IMAGE.name: Images}
"""By a domain's name."""
