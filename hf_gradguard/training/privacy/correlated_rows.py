"""Rows of `dp_sgd` with correlated noise: each is in as many messages as was promised.

A private order, or private draws, decide on its places, and a checkpoint remembers them.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather
from torch import nn
from transformers import TrainingArguments
from transformers.utils import logging

from ...defenses.dp import PrivacyPlan
from ...gradient_map.parameters import cache_of
from ...leakage import dp_sgd_noise_multiplier
from ...leakage.differential_privacy import protection_note
from ...randomness import KEY_BYTES, Stream
from ..clients.batches import DUMMY, FixedOrderSampler, SampledRow
from ..exchange.start import check_agreed
from ..message import ClientBatch
from ..refusals import refusal
from .private_rows import PrivateRows, rounding_of_rows, without_dummy
from .proofs import NO_EPSILON
from .schedules import falls_to_zero, follows_evaluation
from .secret_positions import SecretPositions, positions_unknown

logger = logging.get_logger(__name__)


@dataclass
class NoisePlan:
    """A plan of messages whose noise belongs together, and how far it has come.

    Args:
        name: The name in the account.
        messages: The number T of messages for which it was planned.
        noise_multiplier: The multiplier σ.
        order_key: The private key of the rows' order, in hexadecimal digits.
        position: The number of messages that were shared.
        settings: The settings under which they were shared, and all of it has to be.
        is_counted: Whether the account has it.
        lost: The number of messages that left before a kill, without the steps that they were for.
    """

    name: str
    messages: int
    noise_multiplier: float
    order_key: str
    position: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    is_counted: bool = False
    lost: int = 0


class CorrelatedRows(PrivateRows):
    """The rows of a Trainer with `dp_sgd(correlated=True)`.

    It clips rows or, without `per_sample`, the gradient of a batch as a whole.

    A pass goes through all rows in one order, B rows a message, and leaves out what is no full
    message. Later passes keep the order, so that a row's messages are a whole pass apart. ε is of
    data sets of which one has a row whose gradient counts as zero, for whoever knows the order and
    sees all messages: nothing is gained by sampling. With `sampling="balls_in_bins"` each row is
    put into one message of a pass by a draw of its own, B rows a message on average, and a second ε
    is for whoever does not know the draws. With `noise_for="sum"` it is for whoever sees
    all sums of the clients' messages, and has one rank's noise: noises of the others add up to one
    of the same factor.

    Each message's noise has a key of its own, which the account has before the message leaves. A
    run that is resumed draws the noise again that it does not remember, for what follows to cancel
    it. Where somebody else may go on from the same checkpoint, a new transcript begins there: its
    rows are in both, so both count.

    Args:
        *args: The arguments of `PrivateRows`.
        **kwargs: The keyword arguments of `PrivateRows`.

    Raises:
        ValueError: If a client has fewer rows than a message, or a part of a row a message.
        NotImplementedError: If arguments would put rows into other messages than promised.
    """

    neighbors = "whose gradient counts or is zero"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        arguments = self._args
        if arguments.ignore_data_skip:
            raise refusal("correlated-from-first-rows")
        if self.batch_size != int(self.batch_size):
            raise ValueError(
                f"per_device_train_batch_size={arguments.per_device_train_batch_size} rows cannot "
                "be shared equally by the rank's clients, each of whose messages has a fixed "
                "number of rows. Take a multiple of clients_per_process."
            )
        size, accumulation = int(self.batch_size), arguments.gradient_accumulation_steps
        rounds = min(map(len, self.rows_of_clients)) // size
        self._rounds = rounds - rounds % accumulation  # no step with fewer messages than others
        if not self._rounds:
            raise ValueError(
                f"per_device_train_batch_size={arguments.per_device_train_batch_size} with "
                f"gradient_accumulation_steps={accumulation} takes more rows a step than "
                f"a client has ({min(map(len, self.rows_of_clients))})."
            )
        if not self.defense.per_sample:
            self.neighbors = "and all that is in its messages, whatever they are replaced by"
        self.rate = 1.0  # of the account: whoever attacks knows in which messages a row is
        self._transcript: NoisePlan | None = None
        self._saved_position: int | None = None
        self._is_branch = False
        self._keys: dict[int, bytes] = {}
        self._orders: dict[int, list[np.ndarray]] = {}
        self._shift = 0
        self._sampling = self.defense.sampling or "shuffle"
        self._least_rounds = self._rounds  # of all ranks

    def sampler(self) -> FixedOrderSampler:
        return FixedOrderSampler(self._batch_at, self._rank, self._ranks, self._rounds)

    def on_train_begin(
        self, args: TrainingArguments, state: Any, *_: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        """Plan the noise for the messages that are to come, or continue a plan.

        Raises:
            ValueError: If a row would be in more messages than was promised, or more messages are
                asked for than the noise was planned for.
        """
        cache_of(model).is_underway = state.global_step > 0
        schedule = kwargs.get("lr_scheduler")
        check_is_linear(kwargs.get("optimizer"), args, schedule)
        accumulation = args.gradient_accumulation_steps
        messages = (state.max_steps - state.global_step) * accumulation
        is_resumed, saved = self._saved_position is not None, self._saved_position or 0
        if args.world_size > 1:  # before anything is decided by what was spent
            self._count_as_others(args.device)
        self._saved_position = None  # a second training of this process is a new transcript
        if not is_resumed:
            self._check_promise(messages)
            self._transcript, self._keys = self._new_plan(messages), {}
        plan = self._transcript
        assert plan is not None
        is_branch = torch.tensor([is_resumed and self._is_branch], device=args.device)
        if args.world_size > 1:
            is_branch = gather(is_branch)
        if bool(is_branch.any()):
            self._branch_off(plan, saved)
        if messages > plan.messages - saved + plan.lost:
            raise ValueError(
                f"max_steps asks for {messages} more messages, where the noise of this run was "
                f"planned for {plan.messages} in all, {saved} of them shared. Keep max_steps as it "
                "was, or begin a new run, whose ε adds up with this one's."
            )
        if args.world_size > 1:  # a kill may leave one rank with a message more
            position = torch.tensor([plan.position], device=args.device)
            plan.position = int(gather(position).max())
            rounds = torch.tensor([self._rounds], device=args.device)
            self._least_rounds = int(gather(rounds).min())
            agreed = {
                "the messages planned": plan.messages, "σ": plan.noise_multiplier,
                "sampling": self._sampling,
                "whether rates fall": falls_to_zero(schedule, state.max_steps),
            }  # fmt: skip
            check_agreed(agreed | {"clients_per_process": len(self._clients())}, args.device)
        if lost := plan.position - saved if is_resumed else 0:
            plan.lost += lost
            logger.warning(_LOST.format(lost, -(-lost // accumulation)))
        if plan.messages - plan.position < accumulation:
            raise ValueError(_ALL_SHARED.format(plan.position, plan.messages))
        self._shift = plan.position - state.global_step * accumulation
        self.noise_multiplier, self._orders = plan.noise_multiplier, {}
        # A row is in one of the sums, and moves it by the clip and what ranks round.
        rounding = self._rounding(args, model)
        own_multiplier = plan.noise_multiplier * (1 + rounding) / self._messages_of_sum(args)
        own_multiplier *= 1 + rounding_of_rows(self.batch_size)
        separation = self._rounds if plan.messages > self._rounds else None
        is_falling = falls_to_zero(schedule, state.max_steps)
        self._plan(
            PrivacyPlan(own_multiplier, self.batch_size, plan.messages, separation, is_falling)
        )
        self._tell_origin(plan.noise_multiplier, 1.0, 1)
        if self._rank == 0:
            self._announce(plan.messages, plan.noise_multiplier)

    def _branch_off(self, plan: NoisePlan, position: int) -> None:
        """Let a transcript of its own begin at a checkpoint, from which others may go on.

        Raises:
            ValueError: If both spend more than was asked for.
        """
        plan.name, plan.position, plan.is_counted = secrets.token_hex(4), position, False
        self._keys, self._is_branch = {}, False
        if (target := self.defense.target_epsilon) is None or self.defense.delta is None:
            return
        spent = self._epsilon_with(plan.noise_multiplier, 1.0, 1, self.defense.delta)
        if spent > target * (1 + TOLERANCE):
            raise ValueError(
                f"target_epsilon={target:g} would be exceeded: the run to resume may be gone on "
                f"with elsewhere, and both together have ε = {spent:.4g}. Resume where it was "
                "trained, set a larger one, or begin a new run."
            )

    def _check_promise(self, messages: int) -> None:
        promised = self.defense.participations or 1
        separation = self.defense.min_separation or 1
        passes = math.ceil(messages / self._rounds)
        if passes > promised:
            raise ValueError(
                f"{messages} messages of {int(self.batch_size)} rows take each row up to {passes} "
                f"times, and dp_sgd has participations={promised}: σ would mean less than it says. "
                f"Set participations={passes}, or max_steps to "
                f"{self._rounds * promised // self._args.gradient_accumulation_steps} at most."
            )
        if passes > 1 and separation > self._rounds:
            raise ValueError(
                f"min_separation={separation} of dp_sgd is more than the {self._rounds} messages "
                "of a pass over the data, which lie between a row's messages. Leave it out."
            )

    def _new_plan(self, messages: int) -> NoisePlan:
        multiplier = self._requested_multiplier
        if multiplier is None:
            assert self.defense.target_epsilon is not None  # one of both was asked for
            assert self.defense.delta is not None
            target = self.defense.target_epsilon, self.defense.delta
            multiplier = dp_sgd_noise_multiplier(*target, 1.0, 1, self.account)
        stream = Stream()
        if self._seed is not None:
            stream = Stream.from_seeds(self._seed, self._rank, 0, 3)
        key = stream.bytes(KEY_BYTES).hex()
        return NoisePlan(secrets.token_hex(4), messages, multiplier, key, 0, self._settings())

    def _settings(self) -> dict[str, Any]:
        """What decides in which messages a row is, and how much noise it has there."""
        defense = self.defense
        return {
            "sampling": self._sampling, "participations": defense.participations,
            "min_separation": defense.min_separation, "factorization": defense.factorization,
            "bands": defense.bands, "rows of a message": int(self.batch_size),
            "messages of a pass": self._rounds,
        }  # fmt: skip

    @property
    def _requested_multiplier(self) -> float | None:
        """σ, or scale/(2C) of a batch that is clipped as a whole; `None` with `target_epsilon`."""
        return self.defense.noise_multiplier or self.defense.client_noise_multiplier

    def _order(self, client: int) -> list[np.ndarray]:
        """A client's rows: those of each message of a pass."""
        if client not in self._orders:
            assert self._transcript is not None
            key = bytes.fromhex(self._transcript.order_key)
            stream = Stream(key)
            for _ in range(client // self._ranks + 1):  # each client of this rank has its own
                child = stream.spawn()
            rows = self.rows_of_clients[client]
            draws = child.uniform((len(rows),), dtype=torch.float64).numpy()
            order, size = draws.argsort(), int(self.batch_size)
            ends = np.arange(1, self._rounds + 1) * size
            if self._sampling == "balls_in_bins":
                places = (draws * self._rounds).astype(int)
                ends = np.bincount(places, minlength=self._rounds).cumsum()
            self._orders[client] = np.split(rows[order], ends)[: self._rounds]
        return self._orders[client]

    def _batch_at(self, place: int) -> list[SampledRow]:
        clients, share = range(self._rank, len(self.rows_of_clients), self._ranks), 1.0
        share /= len(self.rows_of_clients)
        message = (place + self._shift) % self._rounds
        return [
            SampledRow(row, client, share)
            for client in clients
            for row in self._order(client)[message].tolist() or [DUMMY]
        ]

    def count(self, turns: list[ClientBatch]) -> list[ClientBatch]:
        """Count the next message of each of a step's clients, and return them with its noise's key.

        Raises:
            RuntimeError: If their rows are others than this message's, or all messages are shared.
        """
        plan, clients = self._transcript, list(self._clients())
        assert plan is not None
        if plan.position >= plan.messages:
            raise RuntimeError(
                f"All {plan.messages} messages that the noise was planned for are shared."
            )
        hosted = [next(n for n, c in enumerate(clients) if c is turn.client) for turn in turns]
        for number, turn in zip(hosted, turns, strict=True):
            placed = self._order(self._rank + number * self._ranks)[plan.position % self._rounds]
            rows = [] if turn.rows is None else [r for r in turn.rows.tolist() if r != DUMMY]
            # some may be missing, at which reading or collating failed
            if turn.rows is None or collections.Counter(rows) - collections.Counter(
                placed.tolist()
            ):
                raise RuntimeError(
                    "A batch holds other rows than dp_sgd with correlated=True placed in message "
                    f"{plan.position}, so nothing was shared: a row could be in more messages than "
                    "promised. Leave the Trainer's data loader and its order as they are."
                )
        # a transcript is one Gaussian mechanism, which its first message enters
        figures = {
            "noise_multiplier": plan.noise_multiplier, "sampling_rate": 1.0,
            "messages": int(not plan.is_counted),
        }  # fmt: skip
        key = self._new_key(plan.position)
        place = {"transcript": plan.name, "position": plan.position, "key": key.hex()}
        self._write(figures | place)
        plan.is_counted, self._keys[plan.position] = True, key
        keyed = []
        for number, turn in zip(hosted, turns, strict=True):
            keys, client = functools.partial(self._key_of, number), turn.client
            defense: Any = client.defense
            client.state = defense.at_message(client.state, plan.position, keys)
            keyed.append(turn._replace(noise_key=keys(plan.position)))
        plan.position += 1
        return [without_dummy(turn) for turn in keyed]

    def _new_key(self, position: int) -> bytes:
        """Draws the key of a message's noise: that of a `noise_seed` if there is one."""
        if self._seed is None:
            return Stream().bytes(KEY_BYTES)
        return Stream.from_seeds(self._seed, self._rank, position, 4).bytes(KEY_BYTES)

    def _key_of(self, client: int, position: int) -> bytes | None:
        """Gives the key of one of this rank's clients, if the message is known."""
        key = self._keys.get(position)
        return None if key is None else hashlib.sha256(key + client.to_bytes(8)).digest()

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop where what is planned is shared, which after a kill is before the last step."""
        plan = self._transcript
        if plan is not None and plan.messages - plan.position < args.gradient_accumulation_steps:
            control.should_training_stop = True

    def saved_transcript(self) -> dict[str, Any] | None:
        return None if self._transcript is None else asdict(self._transcript)

    def resume(
        self, saved: Mapping[str, Any] | None, records: Iterable[Mapping[str, Any]], is_only: bool
    ) -> None:
        """Continue a checkpoint's transcript after the messages that left since.

        Raises:
            ValueError: If σ is another now.
        """
        if saved is None:
            return
        plan = NoisePlan(**saved)
        requested = self._requested_multiplier
        if requested is not None and requested != plan.noise_multiplier:
            raise ValueError(
                f"noise_multiplier is {requested:g}, and the noise of the run to resume was "
                f"planned with {plan.noise_multiplier:g}. Set it as it was, or begin a new run."
            )
        for name, now in self._settings().items():
            if name in plan.settings and plan.settings[name] != now:
                raise ValueError(
                    f"{name}: {now!r} now, and {plan.settings[name]!r} in the run to resume, whose "
                    "rows would be in other messages or behind other noise. Set it as it was, or "
                    "begin a new run."
                )
        super().resume(saved, records, is_only)
        self._saved_position, self._is_branch = plan.position, not is_only
        plan.is_counted |= plan.position > 0  # an older version did not say
        self._keys = {}  # those of an earlier training of this process are of other noise
        for record in records:
            if record.get("transcript") != plan.name:
                continue
            plan.position = max(plan.position, record["position"] + 1)
            if "key" in record:
                self._keys[record["position"]] = bytes.fromhex(record["key"])
            else:  # an older version's: its noise cannot be canceled
                self._is_branch = True
        self._transcript = plan

    def describe_sampling(self) -> str:
        plan = self._transcript
        assert plan is not None
        passes = math.ceil(plan.messages / self._rounds)
        often = "one message" if passes == 1 else f"up to {passes} messages"
        clipped = "Each row's gradient" if self.defense.per_sample else "Each message as a whole"
        order = self._of_secret_positions() or "nothing is gained by sampling."
        return (
            f"{clipped} was clipped, and each row was in {often} at most: "
            f"{plan.position} messages of each client, with correlated noise "
            f"(`{self.defense.factorization or 'blt'}`, multiplier {plan.noise_multiplier:.4g} for "
            f"all of them together). ε takes the order of rows for known; {order}"
        )

    def _of_secret_positions(self) -> str:
        """What holds for another attacker; nothing where positions are no secret."""
        figures = self.secret_positions()
        if figures is None:
            return ""
        bound = f"at most {figures.power:.2%} of the members found at 1 % FPR"
        if figures.epsilon is not None:
            bound = f"ε = {figures.epsilon:.4g} at δ = {self.defense.delta:g}, and {bound}"
        return (
            "an attacker that asks about a single message knows where to look. Messages of rows "
            "were drawn in secret (balls in bins). For an attacker that asks whether a row is in "
            f"any message, and does not know in which: {bound}, of this training alone (Monte "
            "Carlo, upper ends at 99.9 %)."
        )

    def secret_positions(self) -> SecretPositions | None:
        """Return what a training tells an attacker that does not know in which messages a row is.

        It asks whether a row is in any message. The result is `None` where it can find out: in an
        order, with one message a pass, or with a `noise_seed` that it may know.
        """
        plan = self._transcript
        if plan is None or self._sampling != "balls_in_bins":
            return None
        bins = min(self._least_rounds, plan.messages)  # places that are not shared hide nobody
        if bins == 1 or self.is_noise_known():
            return None
        client = next(iter(self._clients()))
        defense: Any = client.defense
        noise = defense.noise_at(client.state, plan.position)
        strength = noise.sensitivity(defense.participations or 1, defense.min_separation)
        return positions_unknown(
            noise.factor, plan.messages, plan.noise_multiplier, bins, strength, self.defense.delta
        )

    def metrics(self) -> dict[str, float]:
        is_all = sum(self.account.messages.values()) <= 1  # this training's, and no other's
        figures = self.secret_positions() if is_all and self._rank == 0 else None
        if figures is None or figures.epsilon is None:
            return super().metrics()
        return super().metrics() | {"defense/epsilon_secret_positions": figures.epsilon}

    def _announce(self, messages: int, multiplier: float) -> None:
        text = "dp_sgd with correlated=True protects one row of the training data"
        if self.is_noise_known():
            text = f"{NO_EPSILON} It would be of one row of the training data"
        elif (delta := self.defense.delta) is not None:
            epsilon = self._epsilon_with(multiplier, 1.0, int(self._transcript_is_new), delta)
            text = (
                f"ε = {epsilon:.4g} at δ = {delta:g} for one row of the training data, "
                f"{self.neighbors}{protection_note(epsilon)}"
            )
        passes = math.ceil(messages / self._rounds)
        secret = self._of_secret_positions()
        logger.warning(
            f"{text}: its gradients in all messages, and not logged losses, evaluation, or other "
            f"rows of the same person. Each row is in {passes} of {messages} messages of "
            f"{int(self.batch_size)}{' on average' if secret else ''} at most; noise multiplier "
            f"{multiplier:.4g} for all of them together, whoever knows which messages those are."
            f"{secret and ' ' + secret[0].upper() + secret[1:]}"
        )

    @property
    def _transcript_is_new(self) -> bool:
        return self._transcript is None or not self._transcript.is_counted


def check_is_linear(optimizer: Any, args: TrainingArguments, schedule: Any = None) -> None:
    """Refuse what does not add messages up, with the way out.

    Raises:
        NotImplementedError: If the optimizer is no SGD, or the schedule follows evaluation.

    Example:
        >>> check_is_linear(torch.optim.Adam(model.parameters()), TrainingArguments("out"))
        Traceback (most recent call last):
        hf_gradguard.training.refusals.UnsupportedError: ... dp_sgd with correlated=True and ...
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
    if not isinstance(optimizer, torch.optim.SGD):
        raise refusal("correlated-optimizer", kind=type(optimizer).__name__)
    if follows_evaluation(schedule):
        raise refusal("correlated-schedule", kind=type(schedule).__name__)
    if args.max_grad_norm:
        logger.warning_once(
            f"max_grad_norm={args.max_grad_norm:g} scales each step by the norm of its noise, "
            "which leaves less of it to cancel: with dp_sgd and correlated=True set "
            "max_grad_norm=0."
        )


TOLERANCE = 1e-3
"""By how much more than a target is no more than rounding."""
_ALL_SHARED = (
    "{} of the {} messages that the noise was planned for were shared before the run ended, which "
    "leaves no step to go on with. Take the model of the last checkpoint, or begin a new run, "
    "whose ε adds up with this one's."
)
_LOST = (
    "{} message(s) left after the checkpoint, before the run ended. Their rows are in no further "
    "message, and no other message has their noise, so this training ends {} step(s) early."
)
