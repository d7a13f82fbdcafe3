"""Start a worker script on several ranks, and what such a script needs. Starting costs seconds: put
many cases in one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from entropy import entropy_of

from hf_gradguard import randomness

HERE = Path(__file__).resolve().parent
LIMIT = 150  # seconds; a rank that hangs prints where, and dies


def command(worker: str, folder: Path, *arguments: str, ranks: int = 2) -> list[str]:
    """Starts `worker` on its ranks, with `folder` and `arguments`."""
    launch = [sys.executable, str(HERE / "ranks.py"), str(ranks)]
    return [*launch, str(HERE / worker), str(folder), *arguments]


def environment() -> dict[str, str]:
    """One thread a rank, no network, and `tests/` and `recipes/` importable."""
    tests = HERE.parent
    path = os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])
    settings = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": path,
    }
    return {**os.environ, **settings}


def run(
    worker: str, folder: Path, *arguments: str, ranks: int = 2, limit: int = LIMIT
) -> subprocess.CompletedProcess[str]:
    """Run `worker` on `ranks` ranks to its end. A rank that takes more than `limit` seconds fails
    the caller.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environ = {**environment(), "WORKER_LIMIT": str(limit)}
    process = subprocess.Popen(
        command(worker, folder, *arguments, ranks=ranks),
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit + 30)
    except subprocess.TimeoutExpired:
        kill(process)
        output, _ = process.communicate()
        raise AssertionError(f"{worker} did not end within {limit} s:\n{output[-4000:]}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def launch(
    worker: str, folder: Path, *arguments: str, ranks: int = 2, limit: int = LIMIT
) -> list[dict[str, Any]]:
    """Run `worker`, which must succeed, and return what each rank wrote with `report`."""
    done = run(worker, folder, *arguments, ranks=ranks, limit=limit)
    assert done.returncode == 0, (
        f"{worker} failed with exit status {done.returncode}:\n{done.stdout[-6000:]}"
    )
    return [json.loads((folder / f"report{rank}.json").read_text()) for rank in range(ranks)]


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL all ranks at once, and what waits for them."""
    with contextlib.suppress(ProcessLookupError):  # it ended by itself
        os.killpg(process.pid, signal.SIGKILL)


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


def finish(folder: Path, results: dict[str, Any]) -> None:
    """Hand this rank's results to the test and leave the process group; without that, some runs
    abort at exit.
    """
    from accelerate import PartialState

    (folder / f"report{os.environ['RANK']}.json").write_text(json.dumps(results))
    PartialState(cpu=True).destroy_process_group()
