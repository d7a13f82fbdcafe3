"""Protection of what a Flower `ClientApp` sends. It needs `pip install 'hf-gradguard[flower]'`.

    app = ClientApp(mods=[gradguard_mod])

With this mod every update is protected, as the run's config says under `gradguard.` (see
`GuardSettings`). With secure aggregation, use `mods=[secaggplus_mod, gradguard_mod]`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from ..gradient_map import Tensors
from .guard import Guard, GuardSettings, position_in, tied_names
from .lookup_tables import PREFIX, listed
from .packing import is_packed, unpack_update

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord
except ImportError as error:
    raise ImportError(
        "hf_gradguard.federation.flower needs Flower: pip install 'hf-gradguard[flower]'"
    ) from error

logger = logging.get_logger(__name__)

STATE, SHARED = f"{PREFIX}state", f"{PREFIX}shared"
_OLDER = "fitres."  # begins names of records of Flower's older clients and secure aggregation
_STATUS = ".status"  # older clients' record "fitres.status" holds a code and a word


class ClientGuard(Guard):
    """The guard of a Flower node, with the run's settings and its state in `context.state`.

    `gradguard_mod` makes one by itself. A `ClientApp` makes one if its defense needs the data: it
    calls `guard.defense` where the data is, and returns `guard.arrays(...)`.

    Args:
        context: The context of the node.

    Raises:
        ValueError: If the run's config has an unknown entry under `gradguard.`, or if the state
            folder and the context hold two different courses of correlated noise.

    Example:
        >>> guard = ClientGuard(context)
        >>> guard.settings.defense
        'gaussian_noise'
    """

    def __init__(self, context: Context) -> None:
        super().__init__(GuardSettings.parse(context.run_config))
        self._context = context
        self._load()

    def arrays(self, received: ArrayRecord, update: Mapping[str, Tensor]) -> ArrayRecord:
        """Return the record of an update that `guard.defense` protected, which the mod lets pass.

        Args:
            received: The weights that came with the message.
            update: The update as `protect_update` returned it, for all names or for some.

        Raises:
            ValueError: If a name or a shape was not received.
        """
        received_tensors = tensors_of(received)
        for name, tensor in update.items():
            if name not in received_tensors or tensor.shape != received_tensors[name].shape:
                raise ValueError(f"{name!r} was not received in shape {tuple(tensor.shape)}.")
        # `protect_update` names a tensor once, and a record has all its names.
        aliases = tied_names(received_tensors, received_tensors).items()
        update = {a: update[name] for a, name in aliases if name in update} | dict(update)
        answer = record_of(self.sent(received_tensors, update))
        self._context.state[SHARED] = ConfigRecord({"sha256": digest(answer)})
        self.save()
        return answer

    def save(self) -> None:
        """Store the defense's state in `context.state`, and in the folder if one is set."""
        self._context.state[STATE] = record_of(self.remembered())
        self._context.state[f"{STATE}.of"] = ConfigRecord(dict(self.kind))
        if self.settings.state_folder:
            self.save_state(self.settings.state_folder, self._client)

    @property
    def _client(self) -> str:
        return f"node-{self._context.node_id}"

    def _load(self) -> None:
        records, folder = self._context.state, self.settings.state_folder
        if STATE in records and dict(records[f"{STATE}.of"]) != self.kind:
            logger.warning("The defense is another one now: what the last remembered is gone.")
            return
        stored = self.stored(folder, self._client) if folder else None
        if STATE in records:
            stored = later_state(tensors_of(records[STATE]), stored, folder)
        if stored is not None:
            self.defense.load_state_dict(stored)


def later_state(in_context: Tensors, in_folder: Tensors | None, folder: str) -> Tensors:
    """Return the later one of two stored states of a node.

    With correlated noise the folder is ahead after a context was restored. The messages between
    have been sent, and later noise cancels theirs. Any other defense goes on from its context.

    Raises:
        ValueError: If the states are of two courses of correlated noise. These are two transcripts,
            and ε would count only one.
    """
    if in_folder is None or not position_in(in_context):
        return in_context
    ahead = position_in(in_folder) - position_in(in_context)
    if ahead > 0:
        logger.warning(_AHEAD.format(folder, ahead))
        return in_folder
    if ahead == 0 and any(not torch.equal(in_context[n], in_folder[n]) for n in in_context):
        raise ValueError(_PARTED.format(folder, position_in(in_context)))
    return in_context


_AHEAD = (
    "{} holds {} message(s) of this node that its context does not know, as after a context was "
    "restored. They have left, so the state of the folder is gone on with."
)
_PARTED = (
    "Nothing was sent: {} and the node's context both hold {} messages with correlated noise, and "
    "not the same ones. Both have left, and adding to one would leave the other out of ε. Delete "
    "the state whose messages nobody received, or begin a new run, whose ε adds up with both."
)


def gradguard_mod(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Protect what a Flower client app returns, before anything is sent (a client mod).

    Give it as the last mod, nearest to the app, so that all other mods see protected updates only.
    It is on without any settings (Gaussian noise as large as the update), and only
    `gradguard.defense = "none"` turns it off. An answer must be one record of weights that were
    trained from those received, with single numbers beside it. Any other answer is refused: the app
    fails, and nothing is sent.

    Args:
        message: The message that the node got.
        context: The context of the node.
        call_next: The function that runs the app.

    Raises:
        ValueError: If the answer is another one, or the run's config is wrong.
        FloatingPointError: If a number in the answer is not finite.
        RuntimeError: If the defense needs the data, and the app did not protect its update; or if
            the app fails. The node's own log says why, and the server is not told.

    Example:
        >>> from flwr.clientapp import ClientApp
        >>> app = ClientApp(mods=[gradguard_mod])
    """
    guard = ClientGuard(context)
    received = arrays_in(message)
    digests = {name: digest(record) for name, record in received.items()}
    reply = _answer(call_next, message, context, guard.settings)
    ticket = context.state.pop(SHARED, None)
    if reply.has_error() or not guard.settings.on:
        return reply
    guard = ClientGuard(context)  # the app's own guard may have saved meanwhile
    _check_others(reply, guard.settings)
    answered = arrays_in(reply)
    if not message.metadata.message_type.startswith("train"):
        if answered:
            raise ValueError(
                f"Nothing was sent: an answer to {message.metadata.message_type!r} holds arrays "
                f"({next(iter(answered))!r}), which are no update."
            )
        return reply
    if len(received) != 1 or len(answered) != 1:
        raise ValueError(
            f"Nothing was sent: {len(received)} records of arrays were received and "
            f"{len(answered)} were to be sent, where one of each is a difference of weights."
        )
    (key, record), (received_key, start) = *answered.items(), *received.items()
    if guard.settings.packed and key.startswith(_OLDER):
        raise ValueError(
            f"Nothing was sent: {PREFIX}packed is for servers that unpack, and neither secure "
            "aggregation nor Flower's older clients do. Leave it out."
        )
    if ticket is not None and ticket["sha256"] == digest(record):
        return reply
    if digest(start) != digests[received_key]:
        raise ValueError(
            "Nothing was sent: the app wrote to the weights that it received, so that what it "
            "changed is not known. Train a copy."
        )
    reply.content[key] = record_of(guard.protect(tensors_of(start), tensors_of(record)))
    guard.save()
    return reply


def _answer(
    call_next: Callable[[Message, Context], Message],
    message: Message,
    context: Context,
    settings: GuardSettings,
) -> Message:
    """Return the app's answer, or an error that says nothing.

    Raises:
        RuntimeError: If the app fails: Flower sends an error's text to the server, and one of the
            app's may quote a row.
    """
    try:
        return call_next(message, context)
    except Exception as error:
        if not settings.on:
            raise
        logger.error(f"Nothing was sent, since the app failed: {error}", exc_info=error)
    raise RuntimeError("Nothing was sent, since the app failed. This node's own log says why.")


class MergeByName:
    """A mixin for strategies whose clients leave names out, or pack what they send.

    With `gradguard.withheld = "left out"`, names that nobody sends keep their values. With
    `gradguard.packed = true`, what is packed is unpacked. Put it before a strategy of Flower's.

    Example:
        >>> from flwr.serverapp.strategy import FedAvg
        >>> class Merging(MergeByName, FedAvg):
        ...     pass
        >>> strategy = Merging(fraction_evaluate=0.0)
    """

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any
    ) -> Iterable[Message]:
        """Return the strategy's messages, and remember the weights that they send."""
        self._all_arrays = arrays
        messages: Iterable[Message] = super().configure_train(  # type: ignore[misc]
            server_round, arrays, config, grid
        )
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the strategy's result, with the names that were left out.

        Raises:
            ValueError: If clients sent a name that they did not get, or packed a tensor wrongly.
            FloatingPointError: If a packed tensor is not finite.
        """
        replies = list(replies)
        for reply in replies:
            if not reply.has_error():
                unpack_reply(reply, tensors_of(self._all_arrays))
        arrays, metrics = super().aggregate_train(server_round, replies)  # type: ignore[misc]
        if arrays is None:
            return arrays, metrics
        if unknown := [name for name in arrays if name not in self._all_arrays]:
            raise ValueError(f"Clients sent {unknown[0]!r}, which they did not get.")
        merged = {name: arrays.get(name, array) for name, array in self._all_arrays.items()}
        return ArrayRecord(merged), metrics


def unpack_reply(reply: Message, received: Mapping[str, Tensor]) -> None:
    """Replace packed arrays of a reply by those that its client would have sent without packing.

    Args:
        reply: The reply of a client.
        received: The weights that the client got.

    Raises:
        ValueError: If the client packed a tensor wrongly, or one that it did not get.
        FloatingPointError: If an entry is not finite.

    Example:
        >>> from flwr.app import RecordDict
        >>> from hf_gradguard.federation.packing import pack
        >>> packed = record_of({"w": pack(torch.zeros(9))})
        >>> reply = Message(RecordDict({"arrays": packed}), reply_to=train_message)
        >>> unpack_reply(reply, received={"w": torch.zeros(9)})
        >>> len(tensors_of(reply.content["arrays"])["w"])
        9
    """
    for key, record in arrays_in(reply).items():
        tensors = tensors_of(record)
        if not any(map(is_packed, tensors.values())):
            continue
        try:
            reply.content[key] = record_of(unpack_update(tensors, received))
        except (ValueError, FloatingPointError) as error:
            error.add_note(f"Node {reply.metadata.src_node_id} sent it.")
            raise


def arrays_in(message: Message) -> dict[str, ArrayRecord]:
    """Return the records of arrays in a message, by name.

    Example:
        >>> list(arrays_in(train_message))
        ['arrays']
    """
    return dict(message.content.array_records)


def tensors_of(record: ArrayRecord) -> dict[str, Tensor]:
    """Return the arrays of a record as tensors with memory of their own.

    Example:
        >>> record = ArrayRecord({"w": Array(torch.ones(2).numpy())})
        >>> tensors_of(record)
        {'w': tensor([1., 1.])}
    """
    return {name: torch.from_numpy(array.numpy().copy()) for name, array in record.items()}


def record_of(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Return tensors as a record of arrays.

    Example:
        >>> list(record_of({"w": torch.ones(2)}))
        ['w']
    """
    return ArrayRecord({name: Array(tensor.cpu().numpy()) for name, tensor in tensors.items()})


def digest(record: ArrayRecord) -> bytes:
    """Return the SHA-256 of names and arrays.

    Example:
        >>> digest(record_of({"w": torch.ones(2)})) == digest(record_of({"w": torch.zeros(2)}))
        False
    """
    total = hashlib.sha256()
    for name, array in record.items():
        # Each field has its own digest, since fields of other lengths could join to the same text.
        for text in (name, array.dtype, str(tuple(array.shape)), array.stype):
            total.update(hashlib.sha256(text.encode()).digest())
        total.update(hashlib.sha256(array.data).digest())
    return total.digest()


def _check_others(reply: Message, settings: GuardSettings) -> None:
    """Refuse records beside arrays, except single numbers and those that the run's config names.

    Raises:
        ValueError: If there is another record.
    """
    allowed = listed(settings.allow)
    for key, record in reply.content.items():
        if key in allowed or isinstance(record, ArrayRecord):
            continue
        for name, value in record.items():
            if not isinstance(value, int | float) and not key.endswith(_STATUS):
                raise ValueError(
                    f"Nothing was sent: {key!r} holds {name!r}, a {type(value).__name__}. Single "
                    f"numbers may be sent beside an update; for more, name {key!r} in "
                    f"{PREFIX}allow."
                )


__all__ = ["ClientGuard", "MergeByName", "gradguard_mod", "unpack_reply"]
