"""Start a worker script on several ranks, and what such a script needs. Starting costs a second:
put many cases in one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ranks as ranks_module
from entropy import entropy_of

from hf_gradguard import randomness

HERE = Path(__file__).resolve().parent
LIMIT = 150  # seconds; a rank that hangs prints where, and dies
# Imported once, by a process that computes nothing and is forked for every launch
IMPORTED = [
    "accelerate", "datasets", "peft", "scipy.stats", "torch.distributed.fsdp", "helpers",
    "hf_gradguard.training",
]  # fmt: skip


def environment() -> dict[str, str]:
    """One thread a rank, no network, and `tests/`, its workers and `recipes/` importable."""
    places = (HERE, HERE.parent, HERE.parents[1], os.environ.get("PYTHONPATH", ""))
    settings = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(map(str, places)),
    }
    return {**os.environ, **settings}


class Running:
    """`worker` on its ranks, with `folder` and `arguments`. What they print is in `printed`, in
    `folder`. With `alone` none ends another, and `folder` gets what each prints, and its exit
    status.
    """

    def __init__(
        self,
        worker: str,
        folder: Path,
        *arguments: str,
        ranks: int = 2,
        limit: int = LIMIT,
        alone: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.printed = folder / "printed"
        environ = {**environment(), "WORKER_LIMIT": str(limit)}
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        with patch.dict(os.environ, environ):
            forkserver.ensure_running()
        self._process = context.Process(
            target=ranks_module.main,
            args=(ranks, HERE / worker, folder, arguments, environ, self.printed, alone),
        )
        self._process.start()

    def status(self, seconds: float = 0) -> int | None:
        """The exit status, for which it waits so long; `None` while ranks are running."""
        self._process.join(seconds)
        return self._process.exitcode

    def kill(self) -> None:
        """SIGKILL to all ranks at once, and to what waits for them."""
        assert self._process.pid is not None
        with contextlib.suppress(ProcessLookupError):  # it ended by itself
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()


def run(
    worker: str, folder: Path, *arguments: str, ranks: int = 2, limit: int = LIMIT
) -> subprocess.CompletedProcess[str]:
    """Run `worker` on `ranks` ranks to its end. A rank that takes more than `limit` seconds fails
    the caller.
    """
    running = Running(worker, folder, *arguments, ranks=ranks, limit=limit)
    status = running.status(limit + 30)
    if status is None:
        running.kill()
    output = running.printed.read_text()
    if status is None:
        raise AssertionError(f"{worker} did not end within {limit} s:\n{output[-4000:]}")
    return subprocess.CompletedProcess([worker, *arguments], status, output)


def launch(
    worker: str, folder: Path, *arguments: str, ranks: int = 2, limit: int = LIMIT
) -> list[dict[str, Any]]:
    """Run `worker`, which must succeed, and return what each rank wrote with `report`."""
    done = run(worker, folder, *arguments, ranks=ranks, limit=limit)
    assert done.returncode == 0, (
        f"{worker} failed with exit status {done.returncode}:\n{done.stdout[-6000:]}"
    )
    return [json.loads((folder / f"report{rank}.json").read_text()) for rank in range(ranks)]


# For the workers


def begin() -> tuple[Path, list[str]]:
    """Arm the hard time-out, and draw keys from the names of worker and rank, and from how many
    ranks have started in this folder. Returns the folder and the other arguments.
    """
    faulthandler.dump_traceback_later(float(os.environ.get("WORKER_LIMIT", LIMIT)), exit=True)
    folder = Path(sys.argv[1])
    rank = os.environ["RANK"]
    with (folder / f"rank{rank}.starts").open("a") as starts:
        starts.write("started\n")
        randomness.urandom = entropy_of(f"{Path(sys.argv[0]).name} {rank} {starts.tell()}")
    return folder, sys.argv[2:]


def refusal(run: Callable[[], object], kind: type[Exception]) -> str:
    """What an error of this kind says; nothing if there was none."""
    try:
        run()
    except kind as error:
        return str(error)
    return ""


def finish(folder: Path, results: dict[str, Any]) -> None:
    """Hand this rank's results to the test and leave the process group; without that, some runs
    abort at exit.
    """
    from accelerate import PartialState

    (folder / f"report{os.environ['RANK']}.json").write_text(json.dumps(results))
    PartialState(cpu=True).destroy_process_group()
