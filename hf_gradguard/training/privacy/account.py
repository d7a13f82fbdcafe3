"""The account of what left a rank, on disk before it leaves.

A run that is killed forgets what it shared after its last checkpoint. So each message is written to
the output folder, and flushed to the disk, before it is exchanged; a run that resumes counts it.

Of (ε, δ) a record holds public figures: noise multiplier, sampling rate, number of messages. Of the
Fisher information it holds dFIL by row, and of correlated noise the key of a message's own noise,
which are private. So the file is its owner's alone, and is never pushed.

An account is complete only where it is known that nobody else goes on with its run. So each record
says on which machine and in which file it was written, and when. A file that was copied or restored
is another one, or was changed after its last record was written: `is_untouched` tells. A run that
goes on in another folder says so in the account that it comes from.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import secrets
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock
from transformers.utils import logging

logger = logging.get_logger(__name__)

NAME = "gradguard_account_rank{}.jsonl"
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


class AccountFile:
    """The file of one rank's records, each line under a checksum that covers all lines before it.

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
        self._path, self._name = Path(folder) / NAME.format(rank), NAME.format(rank)
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
