"""One client of an audit: its batch is protected by a defense, measured and attacked."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import cached_property, partial
from itertools import count, cycle, islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..attacks.base import Observation
from ..attacks.candidates.membership import Candidates, Ranked
from ..attacks.label_recovery import recover_labels
from ..attacks.likelihood import distinguish
from ..attacks.local_training import LocalTraining
from ..defenses.base import Message, Noise
from ..defenses.noise import STRENGTH_KEY
from ..gradient_map import GradientMap, UpdateMap
from ..gradient_map.domain import TEXT, count_rows, domain_of_model
from ..gradient_map.local_training.update import mean_gradient
from ..gradient_map.replay import draws_kept
from ..randomness import Stream
from ..registry import ESTIMATORS
from .image_samples import Images
from .text_samples import Texts

if TYPE_CHECKING:
    from ..attacks import Attack, Reconstruction
    from ..defenses import Defense
    from ..gradient_map.types import LossFunction
    from ..leakage import Estimator
    from .cells import Cell
    from .settings import AuditSettings

logger = logging.get_logger(__name__)

Modality = Texts | Images
"""The handling of texts or of images in an audit."""

_DROPOUT, DEFENSE, _ATTACK, _PROBES, _PAIRS = 0, 1, 2, 4, 6  # streams of random numbers
_BOUNDS = ("clip_norm", "clip_coordinate")  # settings of attacks in the message's unit


def modality_of(model: nn.Module, processing_class: Any, settings: AuditSettings) -> Modality:
    """Return how inputs of a model become a batch, are scored, and are shown.

    Raises:
        ValueError: If a model of texts comes without a tokenizer.
    """
    kind = Texts if domain_of_model(model) is TEXT else Images
    return kind(model, processing_class, settings)


@dataclass(frozen=True)
class Shared:
    """The settings of what a client differentiates, and what of it is shared.

    Args:
        input_embeddings: Whether the token embeddings' gradient is shared.
        withhold: Patterns of parameters that are not shared.
        loss_fn: The client's loss. Default: the model's own.
        micro_batches: The number of parts of a client's batch, which are protected one by one. The
            client averages their messages.
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
    """An attack under one defense, with the settings that an attacker would choose.

    Args:
        attack: The attack with its settings.
        grants: Fields of the observation that it is granted beyond the threat model's.
        knows_defense: Whether it uses all that can be known of the defense, or there is nothing to
            know.
    """

    attack: Attack
    grants: frozenset[str]
    knows_defense: bool


class Client:
    """One client's batch, with its gradient map, which is the same for every defense.

    The map is made when it is first needed.

    Args:
        model: The model, in the mode in which the client runs it.
        batch: The client's batch.
        shared: What of its gradient is shared.
        seeds: The seeds of all that is random here: the same for every defense and every attack.
    """

    def __init__(
        self, model: nn.Module, batch: dict[str, Tensor], shared: Shared, seeds: tuple[int, ...]
    ) -> None:
        self.model, self.batch, self.shared, self.seeds = model, batch, shared, seeds
        self._estimators: dict[str, Estimator] = {}

    def generator(self, stream: int) -> Stream:
        """Return a new stream, which draws the same numbers at every call."""
        return Stream.from_seeds(*self.seeds, stream)

    @cached_property
    def gmap(self) -> GradientMap:
        """The gradient map of the whole batch."""
        return self._map(self.batch)

    @cached_property
    def micro_maps(self) -> list[GradientMap]:
        """The gradient maps of the micro-batches."""
        count, rows = self.shared.micro_batches, count_rows(self.batch)
        if count == 1:
            # The same map, so that estimators and defenses share its cache.
            return [self.gmap]
        size = rows // count
        return [
            self._map({name: t[start : start + size] for name, t in self.batch.items()}, start)
            for start in range(0, rows, size)
        ]

    def _map(self, batch: dict[str, Tensor], start: int = 0) -> GradientMap:
        # Each micro-batch has dropout of its own.
        stream = Stream.from_seeds(*self.seeds, _DROPOUT, *([start] if start else []))
        local, sharing = self.shared.local, {
            "loss_fn": self.shared.loss_fn,
            "share_input_embeddings": self.shared.input_embeddings,
            "withhold": self.shared.withhold,
        }  # fmt: skip
        with _reproducible(self.model, stream):
            if local is None:
                return GradientMap(self.model, batch, **sharing)  # type: ignore[arg-type]
            return UpdateMap(
                self.model, local.batches(batch), learning_rate=local.rates,
                optimizer=local.optimizer, **sharing,  # type: ignore[arg-type]
            )  # fmt: skip

    def gradient(self) -> dict[str, Tensor]:
        """Return the gradient that would be shared without a defense."""
        return mean_of([gmap.gradient() for gmap in self.micro_maps])

    def estimator(self, name: str) -> Estimator:
        """Return an estimator for all defenses, which computes common terms once."""
        if name not in self._estimators:
            self._estimators[name] = ESTIMATORS[name](self.gmap)
        return self._estimators[name]


class Upload:
    """The message that one defense makes of one client's batch, computed when it is first needed.

    Args:
        client: The client.
        defense: The defense.
        state: The defense's state after the client's earlier messages.
        other_clients: Clients with other batches. If a defense's first messages are empty and it
            remembers nothing, theirs come first.
    """

    def __init__(
        self,
        client: Client,
        defense: Defense,
        state: Mapping[str, Any] | None = None,
        other_clients: Sequence[Client] = (),
    ) -> None:
        self.client, self.defense, self.state = client, defense, dict(state or {})
        self._other_clients = other_clients
        warmup = -(-defense.facts.warmup_messages // client.shared.micro_batches)
        self._has_begun = any(not key.endswith(STRENGTH_KEY) for key in self.state)
        self.warmup_clients = list(islice(cycle(other_clients), 0 if self._has_begun else warmup))

    @cached_property
    def message(self) -> Message:
        """The message that the server receives.

        Raises:
            ValueError: If the defense's first messages are empty, and no others come before.
        """
        warmup = self.defense.facts.warmup_messages
        if warmup and not (self._has_begun or self.warmup_clients):
            raise ValueError(
                f"The first {warmup} messages of {self.defense.name} are empty. Audit several "
                "messages, so that others come before each, or a trainer that has trained."
            )
        # No audited message knows of another one.
        state = self.defense.unflatten(self.state)
        # The last message is the audited one; those before it fill what the defense remembers.
        for client in [*self.warmup_clients, self.client]:
            stream, messages = client.generator(DEFENSE), []
            for gmap in client.micro_maps:
                message, state = self.defense.apply(gmap, state, stream)
                messages.append(message)
        return average_of(messages)

    def distance(self) -> Cell:
        """Return how far the message is from the gradient, or why there is none."""
        gradient = self.client.gradient()

        def measure() -> Cell:  # a defense may refuse; that no gradient can be taken ends the audit
            started = time.perf_counter()
            shared = dict(self.message)
            seconds = time.perf_counter() - started
            # A zero gradient has no direction and no relative error.
            norm, shared_norm = (math.sqrt(_inner(g, g)) for g in (gradient, shared))
            change = {name: shared[name] - g for name, g in gradient.items()}
            norms = norm * shared_norm
            return {
                "relative_error": math.sqrt(_inner(change, change)) / norm if norm else None,
                "cosine": _inner(gradient, shared) / norms if norms else None,
                "seconds": seconds,
            }

        return _outcome(measure, ValueError, FloatingPointError)

    def estimate(self, name: str) -> Cell:
        """Return an estimator's figures for the message, `None` for infinity, or a reason."""

        def estimate() -> Cell:
            estimator = self.client.estimator(name)
            errors = estimator(self.message, self.client.generator(_PROBES)).tolist()
            return {"values": [_finite(error) for error in errors]}

        return {"estimator": name, **_outcome(estimate, ValueError, ArithmeticError)}

    def recover_labels(self, modality: Modality) -> Cell:
        """Return the labels that are recovered from the message, or why none are.

        It does not matter whether attacks are granted them.
        """

        def recover() -> Cell:
            observation = self._observed(**modality.observed(self.client.batch))
            return {"labels": recover_labels(observation).tolist()}

        return _outcome(recover, ValueError, FloatingPointError)

    def distinguish(self, modality: Modality, pairs: int, adaptive: bool) -> Cell:
        """Return pairs that differ in one word, each with its own message, or a reason."""
        numbers = count()

        def send(batch: dict[str, Tensor]) -> Observation:
            seeds = (*self.client.seeds, _PAIRS, next(numbers))
            client = Client(self.client.model, batch, self.client.shared, seeds)
            upload = Upload(client, self.defense, self.state, self._other_clients)
            granted = upload._granted(frozenset({"mechanism"} if adaptive else ()))
            return upload._observed(**granted, **modality.observed(batch))

        def measure() -> Cell:
            stream, tokenizer = self.client.generator(_PAIRS), getattr(modality, "tokenizer", None)
            found = distinguish(self.client.batch, tokenizer, send, pairs, stream)
            return {"pairs": [[*astuple(p)[:2], _finite(p.direction_ratio)] for p in found]}

        return _outcome(measure, ValueError, FloatingPointError)

    def attack(self, attacker: Attacker, modality: Modality) -> Cell:
        """Return the scores and the reconstruction of an attack, or why it is not applicable."""

        def attack() -> Cell:
            observation = self.observation(attacker, modality)
            reconstruction = attacker.attack(observation, self.client.generator(_ATTACK))
            return self.score(observation, reconstruction, attacker, modality)

        return _outcome(attack, ValueError, FloatingPointError)

    def observation(self, attacker: Attacker, modality: Modality) -> Observation:
        """Return what an attacker sees of the message, and knows of it."""
        batch, granted = self.client.batch, self._granted(attacker.grants)
        return self._observed(labels=modality.granted(batch), **granted, **modality.observed(batch))

    def _observed(self, **knowledge: Any) -> Observation:
        return observe(self.client.shared.local, self.client.model, self.message, **knowledge)

    def score(
        self, observation: Observation, reconstruction: Reconstruction, attacker: Attacker,
        modality: Modality,
    ) -> Cell:  # fmt: skip
        """Return the scores of a reconstruction, compared with the batch that it is of.

        Raises:
            ValueError: If the attack returned what cannot be scored; the message names it.
        """
        batch = self.client.batch
        try:
            scored = modality.score(reconstruction, batch)
        except ValueError as error:
            # An attack of another package may return anything, so the attack is named as the cause.
            raise ValueError(f"What the attack returned cannot be scored. {error}") from error
        knows_defense = attacker.knows_defense
        if "mechanism" in attacker.grants:  # not every defense can state one
            known = (observation.mechanism, observation.noise_variance)
            knows_defense &= any(grant is not None for grant in known)
        return {
            **scored,
            **_membership(reconstruction, attacker.attack, modality, batch),
            "knows_defense": knows_defense,
            **({} if reconstruction.complete else {"complete": False}),
            "objective": _finite(reconstruction.objective),
            "seconds": _finite(reconstruction.seconds),
        }

    def _granted(self, grants: frozenset[str]) -> dict[str, Any]:
        """Return what an attacker is granted of the defense.

        It may be Σ of Gaussian noise, and how messages come from gradients.
        """
        granted: dict[str, Any] = {}
        noise, is_mean = self.message.noise, self.client.shared.micro_batches > 1
        # No mechanism describes a mean of messages, but for its noise.
        needs_variance = "noise_variance" in grants or (is_mean and "mechanism" in grants)
        added = None if noise is None or not needs_variance else noise.added
        if added is not None and any(bool(tensor.any()) for tensor in added.values()):
            granted["noise_variance"] = added
        if "mechanism" in grants and not is_mean:
            granted["mechanism"] = self.defense.mechanism(self.message)
        return granted


def attack_together(
    uploads: Sequence[Upload], attackers: Sequence[Attacker], modality: Modality
) -> list[Cell]:
    """Attack several uploads of one client by membership inference with one list of candidates.

    The result equals that of `attack` for each upload, but candidates' gradients are computed once.
    Uploads that cannot be attacked together are attacked one by one.
    """
    attack: Any = attackers[0].attack
    pairs = list(zip(uploads, attackers, strict=True))
    try:
        observations = [upload.observation(attacker, modality) for upload, attacker in pairs]
        # One client's uploads have one seed, so that this equals attacking them one by one.
        rankings = attack.reconstruct_many(observations, uploads[0].client.generator(_ATTACK))
    except Exception:  # each gives its own reason
        return [upload.attack(attacker, modality) for upload, attacker in pairs]
    return [
        _outcome(partial(upload.score, observation, ranking, attacker, modality), ValueError)
        for (upload, attacker), observation, ranking in zip(
            pairs, observations, rankings, strict=True
        )
    ]


def _membership(
    reconstruction: Reconstruction, attack: Attack, modality: Modality, batch: dict[str, Tensor]
) -> Cell:
    """Return the scores of a ranking of candidates, and which of them were in the message."""
    if not isinstance(reconstruction, Ranked) or not isinstance(attack, Candidates):
        return {}
    if attack.places:  # words at a place of one text
        return {}
    # Excluded candidates score -inf.
    ranked = (reconstruction.scores > -torch.inf).nonzero().flatten().tolist()
    # Scores alone are stored: candidates themselves would be the private data many times over.
    members = modality.members_among([attack.candidates[index] for index in ranked], batch)
    return {"membership": {"scores": reconstruction.scores[ranked].tolist(), "members": members}}


def _outcome(make: Callable[[], Cell], *refusals: type[Exception]) -> Cell:
    """Return what `make` returns, the reason of a refusal, or a crash.

    A refusal is final; a crash may not happen again.
    """
    try:
        return make()
    except refusals as error:
        return {"reason": str(error)}
    except Exception as error:
        logger.warning(f"{type(error).__name__} in an audit, which continues.", exc_info=True)
        return {"crash": f"{type(error).__name__}: {error}"}


@contextmanager
def _reproducible(model: nn.Module, stream: Stream) -> Iterator[None]:
    """Let the stream determine dropout inside the context, and restore buffers afterwards."""
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    # torch.manual_seed takes 63 bits.
    seed = int.from_bytes(stream.bytes(8), "little") >> 1
    with draws_kept(model):
        torch.manual_seed(seed)
        try:
            yield
        finally:
            for name, tensor in model.named_buffers():
                # .data: to the graph of the pass just made, nothing has changed
                tensor.data.copy_(buffers[name])


def _inner(x: Mapping[str, Tensor], y: Mapping[str, Tensor]) -> float:
    return sum(float((x[name].double() * y[name].double()).sum()) for name in x)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# --- means of micro-batches


def mean_of(gradients: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of gradients, name by name.

    Example:
        >>> mean_of([{"w": torch.ones(2)}, {"w": torch.zeros(2)}])["w"].tolist()
        [0.5, 0.5]
    """
    if len(gradients) == 1:
        return dict(gradients[0])
    return {name: torch.stack([g[name] for g in gradients]).mean(0) for name in gradients[0]}


def average_of(messages: Sequence[Message]) -> Message:
    """Return the mean of messages that were protected one by one, each with noise of its own."""
    if len(messages) == 1:
        return messages[0]
    # Noise is known of a mean only if it is known of each part.
    noises = [message.noise for message in messages if message.noise is not None]
    noise = None
    if len(noises) == len(messages):
        added = [noise.added for noise in noises if noise.added is not None]
        variance = _of_mean([noise.variance for noise in noises])
        plain = all(noise.plain for noise in noises)
        mean_added = _of_mean(added) if len(added) == len(noises) else None
        noise = Noise(variance=variance, added=mean_added, plain=plain)
    has_residual = any(message.has_residual for message in messages)
    return Message(mean_of(messages), noise=noise, has_residual=has_residual)


def _of_mean(variances: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    # The variance of a mean of n independent noises is their mean variance over n.
    return {name: tensor / len(variances) for name, tensor in mean_of(variances).items()}


# --- clients that send the change of their weights


def training_of(settings: AuditSettings) -> LocalTraining | None:
    """Return how clients train before they send, or `None` if they send gradients.

    The attacker knows it, and the order of the batches.

    Raises:
        ValueError: If the optimizer is unknown.

    Example:
        >>> from hf_gradguard.audit import AuditSettings
        >>> training_of(AuditSettings(local_steps=4, learning_rate=0.1)).rates
        (0.1, 0.1, 0.1, 0.1)
        >>> training_of(AuditSettings()) is None
        True
    """
    if settings.learning_rate is None:
        return None
    # Weight decay is known and takes nothing from the message: transformers' default is none.
    return LocalTraining.from_settings(
        float(settings.learning_rate), settings.local_steps, settings.batch_size,
        settings.optimizer, {"weight_decay": 0.0},
    )  # fmt: skip


def observe(
    local: LocalTraining | None, model: nn.Module, message: Mapping[str, Tensor], **knowledge: Any
) -> Observation:
    """Return what a server sees of a message: a gradient, or an update and how it was trained.

    Args:
        local: The client's training, if the message is an update.
        model: The model as it was sent to the client.
        message: The message that the client sent back.
        **knowledge: Fields of `Observation`; noise and mechanism are those of the message.

    Example:
        >>> observation = observe(None, model, shared, input_shape=(2, 8))
        >>> observation.local is None, observation.gradient.keys() == shared.keys()
        (True, True)
    """
    if local is None:
        return Observation(model=model, gradient=message, **knowledge)
    weights = {name: p.detach() for name, p in model.named_parameters() if name in message}
    # Attacks match gradients: dividing by what the optimizer multiplied leaves their mean.
    gradient = mean_gradient(local.optimizer, local.rates, weights, dict(message))
    return Observation(model=model, gradient=gradient, local=local, **local.scale_grants(knowledge))


def in_gradient_unit(local: LocalTraining | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert attack settings from the message's unit to that of the observed gradient.

    A defense names bounds in its message's unit.

    Example:
        >>> from hf_gradguard.audit import AuditSettings
        >>> local = training_of(AuditSettings(local_steps=2, learning_rate=0.5))
        >>> in_gradient_unit(local, {"clip_norm": 3.0, "complete": True})
        {'clip_norm': 3.0, 'complete': True}
    """
    if local is None:
        return dict(settings)
    # An update is the mean gradient times the steps' factors, and so is a bound on it.
    total = local.optimizer.linear(list(local.rates))[1]
    return {
        name: value / total if name in _BOUNDS and value is not None else value
        for name, value in settings.items()
    }
