"""A client that trains a private head with others, whichever framework sends its messages.

In a round it gets the head's weights, and returns them moved by one message: the clipped gradients
of rows that are in no other message, with noise that cancels over its messages. It sends nothing
else. The mean of all clients' answers is the step of a Trainer whose ranks are these clients.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from transformers.utils import logging

from ..data.private import make_private_folder, write_private
from ..defenses import Defense, make_defense
from ..gradient_map import Tensors
from ..gradient_map.domain import IGNORED
from ..leakage import PrivacyAccount, dp_sgd_noise_multiplier
from ..leakage.differential_privacy import protection_note
from ..randomness import KEY_BYTES, Stream
from ..training.privacy.private_rows import rounding_of_rows
from .arguments import CLIP, DELTA, NOISE_MULTIPLIER, default_learning_rate
from .head import PrivateHead
from .rows import column_of, digest_of, names_of

logger = logging.get_logger(__name__)

_PREFIX, _PRIVATE_NAMES = "head_client/", ("order_key", "rows", "settings")
MOST_WEIGHT = 500.0
"""The largest norm of a class's weights. At default rates they stay below 120, most of it noise.

Far above, rounding would decide which rows fail, and whoever sent the weights would see a failure.
"""
_CHANGED = (
    "The {} are others than those of the messages that this client sent, so a row could be in a "
    "second one. Put them back, or begin a new training with a new state, whose ε adds up."
)


class HeadClient:
    """One client of a federation that trains a private head: its rows, and what it has sent.

    Each row is in one message, which is drawn by a private key. All messages together are one
    Gaussian mechanism for each row, whatever weights the client is sent, in whatever order.

    Args:
        head: The head that all clients begin with: load the folder that one of them, or the server,
            saved. Nothing in it depends on private rows.
        rows: This client's rows of texts, pairs or images and labels, as `head.prepare_dataset`
            takes them.
        messages: The number T of rounds in which the client trains at most. All clients need the
            same number. A message has about one T-th of a client's rows.
        noise_multiplier: σ of all messages together, 1.5 by default. 0 trains without a defense.
        target_epsilon: ε that the training may spend, in place of σ.
        delta: δ. Default: 1e-5, or a tenth of one over the rows.
        clip: The norm that each row's gradient is clipped to.
        learning_rate: The rate of SGD at the first message, of a message's mean gradient. It falls
            to zero. Default: `heads.default_learning_rate`.
        state_folder: A private folder that remembers what was sent, so that a restart neither sends
            a row twice nor forgets which noise to cancel.
        name: The client's name, which begins its file's name in that folder.

    Attributes:
        noise_multiplier: σ.
        position: The number of messages that were sent.

    Raises:
        ValueError: If there are fewer rows than messages, a label is no class of the head, or the
            folder holds the messages of other rows or settings.

    Example:
        >>> from hf_gradguard.heads import HeadClient, private_head
        >>> head = private_head(model, public_texts, num_labels=2, processing_class=tokenizer)
        >>> rows = [{"text": text, "label": place % 2} for place, text in enumerate(texts)]
        >>> client = HeadClient(head, rows, messages=2)
        >>> answer = client.train({client.weights_name: torch.zeros(2, 16)})
        >>> answer[client.weights_name].shape, round(client.epsilon, 2)
        (torch.Size([2, 16]), 2.75)
    """

    def __init__(
        self,
        head: PrivateHead,
        rows: Any,
        messages: int,
        *,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        delta: float | None = None,
        clip: float = CLIP,
        learning_rate: float | None = None,
        state_folder: str | Path | None = None,
        name: str = "client",
    ) -> None:
        if head.head.weight.dtype != torch.float32:
            raise ValueError("The head must be in float32, in which noise is not rounded off.")
        self.head, self.messages, self.position = head, messages, 0
        self._rows = head.prepare_dataset(rows)
        count = len(self._rows)
        if not 1 <= messages <= count:
            raise ValueError(
                f"{count} rows are in {messages} messages at one message a row: messages must be "
                "at least 1, and at most the number of rows. Train in fewer rounds."
            )
        _check_labels(head, self._rows)
        self.delta = min(DELTA, 0.1 / count) if delta is None else delta
        if target_epsilon is not None and noise_multiplier is not None:
            raise ValueError("Give noise_multiplier or target_epsilon, not both.")
        if target_epsilon is not None:
            noise_multiplier = dp_sgd_noise_multiplier(target_epsilon, self.delta, 1.0, 1)
        elif noise_multiplier is None:
            noise_multiplier = NOISE_MULTIPLIER
        self.noise_multiplier = noise_multiplier
        size = count / messages
        self.learning_rate = (
            default_learning_rate(size, noise_multiplier, clip)
            if learning_rate is None
            else learning_rate
        )
        self._defense = _defense(noise_multiplier, clip, size, messages)
        self._fingerprints = {
            "rows": digest_of(head, rows),
            "settings": _digest(f"{messages} {sorted(self._defense.settings().items())}".encode()),
        }
        self._order_key = secrets.token_bytes(KEY_BYTES)
        self._file: Path | None = None
        if state_folder is not None:
            self._file = Path(state_folder) / f"{name}-{weights_name(head)[-16:]}.safetensors"
            if self._file.exists():
                self.load_state_dict(_stored(self._file))

    @property
    def weights_name(self) -> str:
        """The name under which the head's weights are sent; see the function `weights_name`."""
        return weights_name(self.head)

    @property
    def epsilon(self) -> float | None:
        """The ε of all messages together, of which the first spends it; `None` without noise.

        It follows from settings alone, so it may be told to anybody.
        """
        if not self.noise_multiplier:
            return None
        return PrivacyAccount({(self.noise_multiplier, 1.0): 1}).epsilon(self.delta)

    def train(self, received: Mapping[str, Tensor], generator: Stream | None = None) -> Tensors:
        """Return the head's weights, moved by this client's next message.

        The message counts from here on, whether it arrives or not.

        Args:
            received: The weights that the client got, under `weights_name`, and nothing else.
            generator: The source of noise. Default: a new one, with a key from the system.

        Raises:
            ValueError: If other weights were received, or weights of another head.
            RuntimeError: If all messages were sent.
        """
        weights = check_received(self.head, received).to(self.head.head.weight)
        if self.position >= self.messages:
            raise RuntimeError(
                f"All {self.messages} messages of this client were sent, and each of its rows was "
                "in one of them. A new training is a new HeadClient, and its ε adds up with this "
                "one's."
            )
        if not self.position:
            logger.warning_once(self.describe())
        with torch.no_grad():
            self.head.head.weight.copy_(weights)
        rows = [self._rows[int(place)] for place in self.order()[self.position]]
        batch = {name: entries.to(weights.device) for name, entries in self._collated(rows).items()}
        gmap = self._defense.gradient_map(self.head, batch)
        message, state = self._defense.apply(gmap, self._defense.state, generator)
        (gradient,) = message.values()
        rate = self.learning_rate * (1 - self.position / self.messages)
        if not self.noise_multiplier:  # a mean of the rows that there are; dp_sgd's is of a sum
            rate *= len(rows) * self.messages / len(self._rows)
        self._defense.state, self.position = state, self.position + 1
        if self._file is not None:  # before anything leaves
            make_private_folder(self._file.parent)
            write_private(self._file, save(self.state_dict()))
        return {self.weights_name: (weights - rate * gradient).cpu()}

    def _collated(self, rows: list[Any]) -> dict[str, Tensor]:
        batch: dict[str, Tensor] = self.head.data_collator(rows)
        return batch

    def order(self) -> list[np.ndarray]:
        """Return the rows of each message: every row is in one of them."""
        draws = Stream(self._order_key).uniform((len(self._rows),), dtype=torch.float64)
        return np.array_split(draws.numpy().argsort(), self.messages)

    def describe(self) -> str:
        """Return what is promised, in a sentence for this client's own log."""
        if self.epsilon is None:
            return "noise_multiplier=0: messages are sent without protection."
        return (
            f"ε = {self.epsilon:.4g} at δ = {self.delta:g} for each of this client's rows, whose "
            f"gradient counts or is zero{protection_note(self.epsilon)}: in all {self.messages} "
            "messages together, for whoever sees them, knows in which one a row is, and chose the "
            f"weights that were sent. Noise multiplier {self.noise_multiplier:.4g}. Another "
            "training on these rows adds to it."
        )

    def state_dict(self) -> Tensors:
        """Return what a client must remember, and nobody else may know, as tensors."""
        entries = {"order_key": self._order_key, **self._fingerprints}
        stored = {
            name: torch.frombuffer(bytearray(entry), dtype=torch.uint8)
            for name, entry in entries.items()
        }
        stored["position"] = torch.tensor([self.position])
        of_defense = {name: tensor.cpu() for name, tensor in self._defense.state_dict().items()}
        return {f"{_PREFIX}{name}": tensor for name, tensor in stored.items()} | of_defense

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned.

        Raises:
            ValueError: If it is of other rows or settings: a row could be in a second message.
        """
        remaining = dict(state)
        stored = {name: remaining.pop(f"{_PREFIX}{name}") for name in (*_PRIVATE_NAMES, "position")}
        for name, expected in self._fingerprints.items():
            if stored[name].numpy().tobytes() != expected:
                raise ValueError(_CHANGED.format(name))
        self._order_key = stored["order_key"].numpy().tobytes()
        self.position = int(stored["position"])
        self._defense.load_state_dict(remaining)


def _stored(file: Path) -> Tensors:
    try:
        return load(file.read_bytes())
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged: restore it from a backup.") from error


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def weights_name(head: PrivateHead) -> str:
    """Return the name under which a head's weights are sent: it says what they are weights of.

    It ends in a hash of directions, encoder's name, labels and task. So clients whose heads differ
    cannot mix them up.

    Args:
        head: The head.

    Example:
        >>> from hf_gradguard.heads import private_head
        >>> head = private_head(torch.nn.Identity(), torch.eye(9), num_labels=2)
        >>> weights_name(head).partition("@")[0]
        'head.weight'
    """
    config, total = head.config, hashlib.sha256()
    for tensor in (head.directions.weight, head.directions.bias):
        values = tensor.detach().cpu().contiguous()
        total.update(f"{tuple(values.shape)} {values.dtype}".encode())
        total.update(values.numpy().tobytes())
    settings = (
        config.task, config.problem_type, config.pairs, config.encoder, config.encoder_revision,
        config.constant, config.max_length, config.label_center, config.label_scale,
        sorted(config.id2label.items()),
    )  # fmt: skip
    total.update(repr(settings).encode())
    return f"head.weight@{total.hexdigest()[:16]}"


def check_received(head: PrivateHead, received: Mapping[str, Tensor]) -> Tensor:
    """Return the weights that were received, if they are this head's.

    Args:
        head: The head.
        received: Tensors by name.

    Raises:
        ValueError: If they are not.
    """
    name, shape = weights_name(head), head.head.weight.shape
    if list(received) != [name]:
        raise ValueError(
            f"Weights of {name!r} were expected, and {sorted(received)} received: whoever sent "
            "them has other directions, labels or another encoder. Let all load the head that one "
            "of them saved."
        )
    weights = received[name]
    if weights.shape != shape or weights.dtype != torch.float32:
        raise ValueError(
            f"{name!r} was received as {weights.dtype} of shape {tuple(weights.shape)}, and not as "
            f"torch.float32 of {tuple(shape)}."
        )
    if not torch.isfinite(weights).all():
        raise ValueError(f"{name!r} was received with entries that are not finite.")
    if float(weights.double().norm(dim=1).max()) > MOST_WEIGHT:
        raise ValueError(
            f"{name!r} was received with a norm above {MOST_WEIGHT:g}, at which scores are rounded "
            "so much that a row's share could not be told. Nothing was looked at or sent. If "
            "training leads there, lower learning_rate."
        )
    return weights


def _defense(noise_multiplier: float, clip: float, size: float, messages: int) -> Defense:
    """Return the mechanism of a client's messages, each of about `size` rows."""
    if not noise_multiplier:
        return make_defense("none")
    # As for a Trainer, noise covers what float32 rounds in a sum of rows.
    return make_defense(
        "dp_sgd", per_sample=True, correlated=True, clip=clip, messages=messages,
        noise_multiplier=noise_multiplier * (1 + rounding_of_rows(size)),
        expected_batch_size=size, participations=1, falling_rate=True,
    )  # fmt: skip


def _check_labels(head: PrivateHead, rows: Any) -> None:
    """Refuse labels at which training would stop at one message, which would tell of its rows.

    Raises:
        ValueError: If there are none, or one is no class of the head. It does not say which.
    """
    if "labels" not in names_of(rows):
        raise ValueError("The rows have no labels: name their column 'label'.")
    if head.config.problem_type != "single_label_classification":
        return
    allowed = {*range(head.config.num_labels), IGNORED}
    for labels in column_of(rows, "labels"):
        if not allowed.issuperset(labels if isinstance(labels, list) else [int(labels)]):
            raise ValueError("A label is no class of the head.")
