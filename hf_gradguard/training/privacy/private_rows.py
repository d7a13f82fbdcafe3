"""The rows of a training behind a proof: how they are drawn, and what they have spent so far.

Every client has rows of its own, that no other client has, and draws each of them for each batch
with probability q, independently. So a row changes messages of one client only, by the clipping
bound each. Which rows were drawn nobody else knows. Noise is calibrated to the whole training.

A run that is killed forgets what it shared after its last checkpoint. So each message is written to
the output folder, and flushed to the disk, before it is exchanged; a run that resumes counts it. An
account is complete only where it is known that nobody else goes on with its run. So each record
says on which machine and in which file it was written, and when. A file that was copied or restored
is another one, or was changed after its last record was written: `is_untouched` tells. A run that
goes on in another folder says so in the account that it comes from.

A row at which something fails adds nothing, and stops nothing. A training that ended in an error at
the first message that holds a row would tell that the row is there, and ε counts no such message.
So the row's term is zero, which is within its bound, and only its own process is told.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather
from filelock import FileLock
from torch import nn
from transformers import TrainerCallback, TrainingArguments
from transformers.utils import logging

from ...defenses.dp import DPSGD, PrivacyPlan
from ...gradient_map.domain import check_batch, count_rows
from ...gradient_map.layers import ROW_ROUNDING
from ...gradient_map.parameters import cache_of
from ...gradient_map.per_sample.clipping import rows_of
from ...gradient_map.replay import ModuleState
from ...gradient_map.types import LossFunction
from ...leakage import PrivacyAccount, dp_sgd_noise_multiplier
from ...leakage.differential_privacy import protection_note
from ..clients.batches import CLIENT, DUMMY, ROW, SHARE, PoissonSampler, RowSampler, SampledRow
from ..clients.partition import Rows
from ..config import setting
from ..exchange.start import check_agreed
from ..message import Client, ClientBatch
from .proofs import NO_EPSILON, has_known_seed

logger = logging.get_logger(__name__)


class PrivateRows(TrainerCallback):
    """The rows of a Trainer with `dp_sgd(per_sample=True)`.

    As a callback it calibrates noise when a training begins.

    Args:
        defense: The defense that was asked for.
        args: The training arguments.
        rows: The number of rows of the data set.
        rank: The number of this rank.
        ranks: The number of ranks.
        clients: The function that returns this rank's clients, whose defenses are calibrated.
        account: The account of what was shared so far of this data.
        account_file: The file where each message is written down before it is shared.

    Attributes:
        neighbors: What data sets that ε compares differ in, of a row.
        rows_of_clients: The rows of all clients, on all ranks.
        is_noise_known: The function that says whether any noise follows a seed: then no ε is
            stated.

    Raises:
        ValueError: If a client would have no rows.
    """

    neighbors = "added or removed"

    def __init__(
        self, defense: DPSGD, args: TrainingArguments, rows: int, rank: int, ranks: int,
        clients: Callable[[], Sequence[Client]], account: PrivacyAccount | None = None,
        account_file: AccountFile | None = None,
    ) -> None:  # fmt: skip
        self.defense, self._args, self._rank, self._ranks = defense, args, rank, ranks
        self._seed: int | None = setting(args, "noise_seed")
        hosted = setting(args, "clients_per_process")
        count = ranks * hosted
        if rows < count:
            raise ValueError(f"{rows} rows of train_dataset are too few for {count} clients.")
        self.rows_of_clients: list[Rows] = [
            np.arange(client, rows, count) for client in range(count)
        ]
        self.batch_size = args.per_device_train_batch_size / hosted
        self._rates = [
            min(1.0, self.batch_size / len(client_rows)) for client_rows in self.rows_of_clients
        ]
        self.rate = max(self._rates)
        self._clients = clients
        self.noise_multiplier = defense.noise_multiplier or defense.client_noise_multiplier
        self._account, self._account_file = account or PrivacyAccount(), account_file
        self._uncounted = Counter[tuple[float, float]]()  # messages since the account was read
        self.is_noise_known: Callable[[], bool] = lambda: has_known_seed(args)

    def sampler(self) -> RowSampler:
        """Return the sampler of an epoch: as many batches as would go through all rows once."""
        rounds = math.ceil(min(map(len, self.rows_of_clients)) / self.batch_size)
        return PoissonSampler(
            self.rows_of_clients, self._rates, self._rank, self._ranks, rounds, self._seed
        )

    def on_train_begin(
        self, args: TrainingArguments, state: Any, *_: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        """Find the noise for the messages that are to come, when their number is known."""
        cache_of(model).is_underway = state.global_step > 0
        messages = (state.max_steps - state.global_step) * args.gradient_accumulation_steps
        if args.world_size > 1:  # a rank with fewer rows than others draws each more often
            rates = torch.tensor([self.rate], dtype=torch.float64, device=args.device)
            self.rate = float(gather(rates).max())
            self._count_as_others(args.device)
        rounding = self._rounding(args, model)
        if self.defense.noise_multiplier is not None:  # a row moves a sum by more than C then
            self.noise_multiplier = self.defense.noise_multiplier / (1 + rounding)
        if self.defense.target_epsilon is not None:
            assert self.defense.delta is not None  # it was checked with it
            target = self.defense.target_epsilon, self.defense.delta
            if not self._keeps(messages, *target):
                self.noise_multiplier = dp_sgd_noise_multiplier(
                    *target, self.rate, messages, self.account
                )
        multiplier = self.noise_multiplier
        assert multiplier is not None
        if args.world_size > 1:
            hosted = len(self.rows_of_clients) // self._ranks
            agreed = {"the noise multiplier (rows, steps)": multiplier}
            check_agreed(agreed | {"clients_per_process": hosted}, args.device)
        own_multiplier = multiplier * (1 + rounding) / self._messages_of_sum(args)
        own_multiplier *= 1 + rounding_of_rows(self.batch_size)
        self._rounding(args, model)  # refuses noise, known only now, that is too fine
        self._tell_origin(multiplier, self.rate, messages)
        self._plan(PrivacyPlan(own_multiplier, self.batch_size))
        if self._rank == 0:
            self._announce(messages, multiplier)

    def _plan(self, plan: PrivacyPlan) -> None:
        """Give all clients of this rank the mechanism of the plan."""
        for client in self._clients():
            assert isinstance(client.defense, DPSGD)  # private_rows_of saw to it
            client.defense = client.defense.planned(plan)

    def _messages_of_sum(self, args: TrainingArguments) -> float:
        """Return √n of the n messages that share their noise, if noise is stated for their sum.

        A rank's own messages do not count, since it can subtract them from the sum.
        """
        if setting(args, "noise_for") != "sum":
            return 1.0
        return math.sqrt(len(self.rows_of_clients) - len(self.rows_of_clients) // self._ranks)

    def _rounding(self, args: TrainingArguments, model: nn.Module) -> float:
        """Return how much further than C a row moves a sum of rounded messages, relative to C.

        Ranks round messages before they add them up. A message by itself is rounded after its
        noise, which costs nothing.
        """
        if setting(args, "noise_for") != "sum":
            return 0.0
        from ..exchange.secure import rounding_of_sum

        clients = len(self.rows_of_clients) / self._ranks * args.gradient_accumulation_steps
        unit = self.defense.clip / (self.batch_size * clients)  # C in what a rank sends
        least = self.defense.noise_multiplier or self.noise_multiplier or math.inf
        deviation = least * unit / self._messages_of_sum(args)
        return rounding_of_sum(args, model, self._ranks, deviation) / unit

    def _count_as_others(self, device: torch.device) -> None:
        """Count the messages that any rank has counted.

        All ranks share equally many, but a kill may leave one of them with a record more. The
        account follows from settings alone, so ranks may see each other's.
        """
        rows = self.account.state_dict()["messages"]
        length = int(gather(torch.tensor([len(rows)], device=device)).max())
        padded = torch.zeros(length, 3, dtype=torch.float64)
        padded[: len(rows)] = rows
        everyone = gather(padded.to(device)).cpu() if length else padded
        self.account.load_state_dict({"messages": everyone[everyone[:, 0] > 0]})

    def _keeps(self, messages: int, target: float, delta: float) -> bool:
        """Whether a training that goes on keeps its target with the noise that it had."""
        if not self.account.messages:
            return False
        multiplier, rate = list(self.account.messages)[-1]
        if rate != self.rate or self._epsilon_with(multiplier, rate, messages, delta) > target:
            return False
        self.noise_multiplier = multiplier
        return True

    def _epsilon_with(self, multiplier: float, rate: float, messages: int, delta: float) -> float:
        """ε of what was shared so far and of so many messages more."""
        planned = PrivacyAccount(self.account.messages)
        planned.add(multiplier, rate, messages)
        return planned.epsilon(delta)

    def _announce(self, messages: int, multiplier: float) -> None:
        least, most = min(map(len, self.rows_of_clients)), max(map(len, self.rows_of_clients))
        rows = f"{least}" if least == most else f"{least} to {most}"
        text = "dp_sgd with per_sample=True protects one row of the training data"
        if self.is_noise_known():
            text = f"{NO_EPSILON} It would be of one row of the training data"
        elif (delta := self.defense.delta) is not None:
            epsilon = self._epsilon_with(multiplier, self.rate, messages, delta)
            text = (
                f"ε = {epsilon:.4g} at δ = {delta:g} in the end, for one row of the training data, "
                f"{self.neighbors}{protection_note(epsilon)}"
            )
            if delta * most >= 1:
                text += f" (δ is no less than one over {most} rows: it would let a row be shown)"
        logger.warning(
            f"{text}: its gradients in all messages, and not logged losses, evaluation, or other "
            f"rows of the same person. Each of {len(self.rows_of_clients)} clients draws each of "
            f"its {rows} rows with probability {self.rate:.4g} for each of {messages} messages; "
            f"noise multiplier {multiplier:.4g}."
        )

    def count(self, turns: list[ClientBatch]) -> list[ClientBatch]:
        """Count a message of each of a step's clients, and return them without dummy rows."""
        assert self.noise_multiplier is not None
        figures = {"noise_multiplier": self.noise_multiplier, "sampling_rate": self.rate}
        self._write({"messages": 1, **figures})
        return [without_dummy(turn) for turn in turns]

    @property
    def account(self) -> PrivacyAccount:
        """The account of what was shared so far of this data, composed when it is read."""
        for (multiplier, rate), messages in self._uncounted.items():
            self._account.add(multiplier, rate, messages)
        self._uncounted.clear()
        return self._account

    def _write(self, record: Mapping[str, Any]) -> None:
        """Write down a message before it leaves, and count it, and what went on elsewhere."""
        elsewhere = [] if self._account_file is None else self._account_file.write(record)
        for message in (*elsewhere, record):
            self._uncounted[message[_FIGURES[0]], message[_FIGURES[1]]] += message[_FIGURES[2]]

    def _tell_origin(self, *figures: float) -> None:
        """Tell the account that a checkpoint is from what this run is to share."""
        if self._account_file is not None:
            self._account_file.tell_origin(dict(zip(_FIGURES, figures, strict=True)))

    def saved_transcript(self) -> dict[str, Any] | None:
        """Return what a checkpoint has to remember of correlated noise; see `CorrelatedRows`."""
        return None

    def resume(
        self, saved: Mapping[str, Any] | None, records: Iterable[Mapping[str, Any]], is_only: bool
    ) -> None:
        """Load what a checkpoint has of it, and what left since.

        Args:
            saved: What `saved_transcript` returned.
            records: The records of what left beyond the checkpoint.
            is_only: Whether nobody else goes on with the run.
        """
        if not is_only:
            logger.warning(ELSEWHERE)

    def describe_sampling(self) -> str:
        """Describe for the card how rows came into messages, and their noise."""
        noise, rates = (
            ", ".join(dict.fromkeys(f"{value:.4g}" for value in values))
            for values in zip(*self.account.messages, strict=True)
        )
        return (
            f"Each row's gradient was clipped, and rows were drawn by Poisson sampling (rate "
            f"{rates}): {sum(self.account.messages.values())} messages of each client, noise "
            f"multiplier {noise}."
        )

    @property
    def epsilon(self) -> float | None:
        """The ε of what was shared so far, if a δ is set and nobody knows the noise."""
        if self.defense.delta is None or self.is_noise_known():
            return None
        return self.account.epsilon(self.defense.delta)

    def metrics(self) -> dict[str, float]:
        """Return ε for the log."""
        return {} if self.epsilon is None else {"defense/epsilon": self.epsilon}


def rounding_of_rows(batch_size: float) -> float:
    """Bound how much further than C a row moves a sum of rows that each float32 rounds.

    The bound is relative to C. Noise is larger by as much.

    A row adds what it adds whatever stands beside it, but for the last bits: kernels, and the order
    in which rows are summed up, are chosen by how many there are. Of rows that are drawn one by one
    more than are counted here come with a probability below 1e-15.

    Args:
        batch_size: The mean number of rows of a message.

    Example:
        >>> round(rounding_of_rows(1000), 4)
        0.0099
    """
    return ROW_ROUNDING * (batch_size + 8 * math.sqrt(batch_size) + 40)


def without_dummy(turn: ClientBatch) -> ClientBatch:
    """Return a client's batch, without its rows if the only one stands there for its shapes.

    Its message is noise alone then.
    """
    is_dummy = turn.rows is not None and bool((turn.rows == DUMMY).any())
    return turn._replace(rows=turn.rows[:0]) if is_dummy else turn  # type: ignore[index]


def resume_epsilon(
    account: PrivacyAccount,
    saved: Sequence[Sequence[float]],
    records: Iterable[Mapping[str, Any]],
) -> None:
    """Count what a checkpoint has, and what left after it.

    What the account has counted beyond that stays.

    Args:
        account: The account of this process.
        saved: The (noise multiplier, sampling rate, messages) of the checkpoint.
        records: The records of what left.

    Example:
        >>> account = PrivacyAccount()
        >>> record = {"noise_multiplier": 1.0, "sampling_rate": 0.1, "messages": 1}
        >>> resume_epsilon(account, [[1.0, 0.1, 4]], [record])
        >>> account.messages
        {(1.0, 0.1): 5}
    """
    resumed = PrivacyAccount()
    for multiplier, rate, messages in saved:
        resumed.add(multiplier, rate, int(messages))
    for record in records:
        if "noise_multiplier" in record:
            resumed.add(*(record[name] for name in _FIGURES))
    account.load_state_dict(resumed.state_dict())


class AttemptsPassingRows:
    """An attempt with a client's rows, and with those that pass if it fails for others.

    A client without such a row has another row of the data, for its shapes, and shares noise alone.

    Args:
        trainer: The Trainer, which has other rows.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._spare: dict[str, Any] | None = None

    def __call__(
        self, attempt: Callable[..., Any], module: nn.Module, client: ClientBatch,
        loss_fn: LossFunction, *arguments: Any,
    ) -> Any:  # fmt: skip
        """Call a function with all rows, or with those for which the loss can be computed.

        Args:
            attempt: The function to call, with all other arguments.
            module: The bare model.
            client: The client, with its rows.
            loss_fn: The client's mean loss, `(model, batch) -> loss`.
            *arguments: Further arguments.

        Raises:
            Exception: If an error is raised for every row, or for no row by itself. It is the error
                that was raised for all rows.
        """
        try:
            self._check(module, client.batch)
            outcome = attempt(module, client, loss_fn, *arguments)
        except Exception:
            state = ModuleState(module)
            passing_client = self._passing(module, client, loss_fn)
            state.restore()
            if passing_client is None:
                raise
            client = passing_client
            outcome = attempt(module, client, loss_fn, *arguments)
        if arguments:  # else the model may not have run
            self._spare = rows_of(client.batch, [0], count_rows(client.batch))
        return outcome

    def _check(self, module: nn.Module, batch: dict[str, Any]) -> None:
        check_batch(module, batch, self._trainer.asks_for_input)

    def _evaluate(self, module: nn.Module, batch: dict[str, Any], loss_fn: LossFunction) -> None:
        self._check(module, batch)
        loss = loss_fn(module, batch)
        if loss.requires_grad:
            parameters = [p for p in module.parameters() if p.requires_grad]
            torch.autograd.grad(loss, parameters, allow_unused=True)

    def _passing(
        self, module: nn.Module, client: ClientBatch, loss_fn: LossFunction
    ) -> ClientBatch | None:
        """Return the client with only the rows that pass by themselves.

        It is `None` if that changes nothing, or if no row is known that passes.
        """
        count = count_rows(client.batch)

        def evaluate(row: int) -> None:
            self._evaluate(module, rows_of(client.batch, [row], count), loss_fn)

        rows = passing(list(range(count)), evaluate)
        if len(rows) == count:
            return None
        places = torch.tensor(rows, dtype=torch.int64)
        numbers = places if client.rows is None else client.rows[places.to(client.rows.device)]
        if rows and not client.is_empty:
            return client._replace(batch=rows_of(client.batch, rows, count), rows=numbers)
        if self._spare is None:
            self._spare = self._other_batch(module, loss_fn)
        if self._spare is None:
            return None
        return client._replace(batch=self._spare, rows=numbers[:0])

    def _other_batch(self, module: nn.Module, loss_fn: LossFunction) -> dict[str, Any] | None:
        """Return another row of the data that passes, if one of the first does."""
        loader = self._trainer.get_train_dataloader()

        def batch_of(row: int) -> dict[str, Any]:
            places = loader.dataset.__getitems__([SampledRow(row, 0, 1.0)])
            batch = self._trainer._prepare_inputs(loader.collate_fn(places))
            return {n: entry for n, entry in batch.items() if n not in (CLIENT, SHARE, ROW)}

        def attempt(row: int) -> None:
            self._evaluate(module, batch_of(row), loss_fn)

        for row in range(min(len(loader.dataset), TRIED)):
            if passing([row], attempt):
                return batch_of(row)
        return None


def log_failure(error: Exception) -> None:
    """Tell this process, once for each kind of error, that a row was left out.

    The error's text is left out, since it may hold the row.

    Example:
        >>> log_failure(IndexError("Target 9 is out of bounds."))
    """
    logger.warning_once(_FAILED.format(type(error).__name__))


def passing(rows: list[Any], attempt: Callable[[Any], object]) -> list[Any]:
    """Return those of some rows for which an attempt does not fail.

    Example:
        >>> passing([1, 0, 2], lambda row: 1 / row)
        [1, 2]
    """
    passed = []
    for row in rows:
        try:
            attempt(row)
        except Exception as error:
            log_failure(error)
        else:
            passed.append(row)
    return passed


class AccountFile:
    """The file of one rank's records, each line under a checksum that covers all lines before it.

    Of (ε, δ) a record holds public figures: noise multiplier, sampling rate, number of messages. Of
    the Fisher information it holds dFIL by row, and of correlated noise the key of a message's own
    noise, which are private. So the file is its owner's alone, and is never pushed.

    Args:
        folder: The run's output folder.
        rank: The rank whose messages are recorded.

    Attributes:
        run: The name of the run that a record counts for. A run that is resumed keeps its name.

    Example:
        >>> account = AccountFile(tmp_path, rank=0)
        >>> account.write({"noise_multiplier": 1.0, "sampling_rate": 0.1, "messages": 1})
        []
        >>> after_kill = AccountFile(tmp_path, rank=0)
        >>> after_kill.run = account.run
        >>> [record["messages"] for record in after_kill.records([tmp_path], counted={})]
        [1]
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int) -> None:
        self.run, self._attempt = secrets.token_hex(8), secrets.token_hex(4)
        self._path, self._name = Path(folder) / ACCOUNT_NAME.format(rank), ACCOUNT_NAME.format(rank)
        self._counted: dict[str, int] = {}  # by attempt; of this run, in this file
        self._digest, self._end = "", (-1, -1)  # of the file as this object left it
        self._skew = 0.0  # of a file server's clock
        self._origin: Path | None = None
        self._began_at: str | None = None  # the account of the checkpoint that this attempt is from

    @property
    def counted(self) -> dict[str, int]:
        """Return how many records of each attempt at this run the accounts hold."""
        return dict(self._counted)

    @property
    def has_written(self) -> bool:
        """Whether this process shared anything under the run's name."""
        return bool(self._counted.get(self._attempt))

    def write_to(self, folder: str | os.PathLike[str]) -> None:
        """Write what follows to another output folder."""
        if Path(folder) != self._path.parent:
            self._path, self._attempt = Path(folder) / self._name, secrets.token_hex(4)
            self._counted, self._began_at = {}, None

    def write(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Write down that a message is about to leave, and return once the disk has it.

        Other runs may have begun at this run's checkpoints since.

        Returns:
            The records of those other runs.

        Raises:
            OSError: If the record cannot be written. Then the message must stay.
            ValueError: If the file was changed since.
            RuntimeError: If another process continues the run.
        """
        number = self._counted.get(self._attempt, 0)
        about = {"run": self.run, "attempt": self._attempt, "number": number}
        origin = {} if self._began_at is None else {"origin": self._began_at}
        branches = self._append(self._path, about | dict(record) | origin)
        self._counted[self._attempt] = number + 1
        return branches

    def come_from(self, folder: str | os.PathLike[str]) -> None:
        """Note that the run comes from a checkpoint in that output folder."""
        self._origin = Path(folder) / self._name

    def tell_origin(self, figures: Mapping[str, Any]) -> None:
        """Write to the accounts that the run comes from that it continues elsewhere.

        The record says that messages of these figures are to be shared. Nothing is written if the
        run comes from this account.
        """
        account_path, origin = self._path.resolve(), self._origin and self._origin.resolve()
        self._origin = None
        if origin is None or origin == account_path or not origin.is_file():
            return
        about = {"run": self.run, "attempt": self._attempt, "number": 0, "messages": 0}
        about |= dict(figures) | {"branch": str(account_path)}
        self._began_at = str(origin)
        for account in self._ancestors(origin):
            try:
                self._append(account, dict(about))
            except OSError as error:
                logger.warning(_UNTOLD.format(account, error.strerror))

    def _ancestors(self, origin: Path) -> list[Path]:
        """The account of a checkpoint, and those of the checkpoints that its run began at."""
        ancestors = [origin]
        for account in ancestors:
            earlier = {Path(r["origin"]) for r in self._of_run(account) if "origin" in r}
            ancestors += sorted(
                p for p in earlier - {*ancestors, self._path.resolve()} if p.is_file()
            )
        return ancestors

    def is_untouched(self, transcript: str | None = None) -> bool:
        """Return whether the file is where this run wrote it last, and as it was then.

        Then it was not copied or restored, and is on the same machine.

        Args:
            transcript: A transcript whose records alone are looked at; there has to be one. What
                was written after a copy was made says nothing of who continues what was copied.
        """
        records, _, _ = _read_records(self._path)
        written = [record for record in records if record["run"] == self.run]
        written = (
            written[-1:] if transcript is None else [r for r in written if _is_of(r, transcript)]
        )
        if not written or "time" not in records[-1]:
            return False
        state = self._path.stat()
        is_here = all(record.get("place") == _place(state) for record in written)
        return is_here and (os.name == "nt" or abs(state.st_ctime - records[-1]["time"]) <= CLOCK)

    def records(
        self, folders: Iterable[str | os.PathLike[str]], counted: Mapping[str, int]
    ) -> list[dict[str, Any]]:
        """Return what this run shared beyond the records that a checkpoint counted, oldest first.

        All of it counts as counted from then on.

        Args:
            folders: The output folders that the run may have written to.
            counted: The counts in the checkpoint.

        Raises:
            ValueError: If a file was changed, or lacks records that the checkpoint counted.
        """
        beyond, present = [], dict.fromkeys(counted, 0)
        attempts = {record["attempt"] for record in self._of_run(self._path)}
        account_path = self._path.resolve()
        for path in dict.fromkeys((Path(folder) / self._name).resolve() for folder in folders):
            for record in self._of_run(path):
                attempt, number = record["attempt"], record["number"] + 1
                # A branch that this folder began is counted by its own records, while it has them.
                if record.get("branch") == str(account_path) and attempt in attempts:
                    continue
                present[attempt] = max(present.get(attempt, 0), number)
                if number > counted.get(attempt, 0):
                    beyond.append(record)
                if path == account_path:
                    self._counted[attempt] = present[attempt]
        if any(present[attempt] < number for attempt, number in counted.items()):
            raise ValueError(_EMPTIED.format(self._name))
        if beyond:
            logger.warning(_BEYOND.format(len(beyond)))
        return beyond

    def _of_run(self, path: Path) -> list[dict[str, Any]]:
        """This run's records in an account."""
        return [record for record in _read_records(path)[0] if record["run"] == self.run]

    def go_on_with(self, run: str) -> None:
        """Take another run's name, so that what follows counts as its own.

        Raises:
            ValueError: If this process has shared messages under another name.
        """
        if self.has_written and run != self.run:
            raise ValueError(_OTHER_RUN)
        if run != self.run:
            self.run, self._counted = run, {}

    def last_run(self) -> str | None:
        """Return the name of the run that wrote to the output folder last, or `None`."""
        records, _, _ = _read_records(self._path)
        return records[-1]["run"] if records else None

    def _append(self, path: Path, record: dict[str, Any]) -> list[dict[str, Any]]:
        """Add a record to an account. Returns branches of this run that it has met there."""
        is_new, is_own = not path.is_file(), path == self._path
        branches: list[dict[str, Any]] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        # Between two processes nobody is to write where the other one has read.
        with FileLock(f"{path}.lock", mode=0o600):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                state = os.fstat(descriptor)
                digest = self._digest
                if not is_own or (state.st_ino, state.st_size) != self._end:  # first, or another's
                    records, digest, size = _read_records(path)
                    if is_own:
                        branches = self._met(records)
                    os.ftruncate(descriptor, size)  # a line that a kill cut off: it never left
                record |= {"place": _place(state), "time": round(time.time() + self._skew, 3)}
                line, digest = _sealed(json.dumps(record), digest)
                os.write(descriptor, line)
                os.fsync(descriptor)
                state = os.fstat(descriptor)  # a file server says when it wrote only now
                if abs(late := state.st_ctime - record["time"]) > CLOCK:
                    self._skew += late
                if is_own:
                    self._digest, self._end = digest, (state.st_ino, state.st_size)
            finally:
                os.close(descriptor)
        if is_new:
            _sync_folder(path.parent)
        return branches

    def _met(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What others have written to the own file since."""
        if not self._counted and (runs := {r["run"] for r in records} - {self.run}):
            logger.warning(_OTHER_RUNS.format(self._path, len(records), len(runs)))
        branches = []
        for record in records:
            attempt, number = record["attempt"], record["number"] + 1
            if record["run"] != self.run or number <= self._counted.get(attempt, 0):
                continue
            if "branch" not in record:
                raise RuntimeError(_TAKEN.format(self._path))
            self._counted[attempt] = number
            logger.warning(_BRANCHED.format(Path(record["branch"]).parent))
            branches.append(record)
        return branches


def _is_of(record: Mapping[str, Any], transcript: str) -> bool:
    return bool(record.get("transcript") == transcript)


def _place(state: os.stat_result) -> str:
    """Names a file on a machine."""
    machine = platform.node()
    with contextlib.suppress(OSError):
        machine += Path("/etc/machine-id").read_text()
    return hashlib.sha256(f"{machine} {state.st_ino}".encode()).hexdigest()[:16]


def _sealed(content: str, digest: str) -> tuple[bytes, str]:
    """A line, and the checksum that it ends with."""
    digest = hashlib.sha256(f"{digest}{content}".encode()).hexdigest()[:32]
    return f"{content}\t{digest}\n".encode(), digest


def _read_records(path: Path) -> tuple[list[dict[str, Any]], str, int]:
    """The records of a file, the checksum of the last one, and where it ends."""
    records: list[dict[str, Any]] = []
    digest, end = "", 0
    content = path.read_bytes() if path.is_file() else b""
    for number, line in enumerate(content.splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break  # cut off by a kill before the message left
        text, _, _ = line.decode(errors="replace").rstrip("\n").rpartition("\t")
        sealed, digest = _sealed(text, digest)
        if sealed != line:
            raise ValueError(_CHANGED.format(path, number))
        records.append(json.loads(text))
        end += len(line)
    return records, digest, end


def _sync_folder(folder: Path) -> None:
    """A new file's name is on the disk only when its folder is. Windows opens no folder."""
    with contextlib.suppress(PermissionError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


ELSEWHERE = (
    "The account of this run is not where the run wrote it: it goes on in another folder or on "
    "another machine, or its files were copied or restored. What was shared from the same "
    "checkpoint after that and is not in the accounts here adds to ε, and cannot be counted."
)
_FIGURES = ("noise_multiplier", "sampling_rate", "messages")
TRIED = 16
"""Other rows, before what fails is taken for the doing of the model."""
_FAILED = (
    "{} at a row of the training data, which adds nothing to its messages: a training that stopped "
    "would tell that the row is there. Only this process is told. Look for labels out of range, "
    "cut-off files and empty texts."
)
ACCOUNT_NAME = "gradguard_account_rank{}.jsonl"
CLOCK = 0.05
"""Seconds between a record's time and the file's change, at most: more of them, and somebody else
has changed it since.
"""
_EMPTIED = (
    "{} beside the checkpoint holds fewer messages of this run than the checkpoint counted: it was "
    "removed, emptied or swapped, so what left after the checkpoint cannot be counted. Copy it "
    "back from the output folder that the run wrote to; or begin a new run."
)
_BEYOND = "{} message(s) left after the checkpoint, before the run ended: the account counts them."
_OTHER_RUNS = (
    "{} holds {} message(s) of {} earlier run(s), which this run's account leaves out. What they "
    "told of the same data adds up: to count it, resume."
)
_OTHER_RUN = (
    "This Trainer has shared messages of a run of its own, which the account of the checkpoint's "
    "run would leave out. Make a new Trainer to resume the other run."
)
_TAKEN = (
    "{}: another process has shared messages of this run since. This one stops before its message "
    "leaves, which the other's account would leave out. Resume one of them: it counts both."
)
_BRANCHED = (
    "A run that began at a checkpoint of this one is trained elsewhere ({}). What both tell of the "
    "data adds up, so its messages, as many as it planned, count here too."
)
_UNTOLD = (
    "{} cannot be written ({}), so whoever goes on with the run there does not learn of this one, "
    "which begins at its checkpoint: what both tell of the data adds up."
)
_CHANGED = (
    "{}, line {}: its checksum is another, so what left this rank cannot be counted. Copy the file "
    "back from where it was saved; or begin a new run in another output_dir."
)
