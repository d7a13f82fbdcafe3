"""Start a worker script on several ranks, and what such a script needs. Starting costs seconds: put
many cases in one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from entropy import entropy_of

from hf_gradguard import randomness

HERE = Path(__file__).resolve().parent
LIMIT = 150  # seconds; a rank that hangs prints where, and dies


def command(worker: str, folder: Path, *arguments: str, ranks: int = 2) -> list[str]:
    """The torchrun command for `worker`, which gets `folder` and `arguments`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
    return [*launch, "--master_port", str(port), str(HERE / worker), str(folder), *arguments]


def environment() -> dict[str, str]:
    """One thread a rank, no network, and `tests/` importable."""
    path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
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
        kill(process, folder)
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


def kill(process: subprocess.Popen[str], folder: Path) -> None:
    """SIGKILL torchrun and every rank at once. Ranks live in process groups of their own, which
    they wrote down.
    """
    groups = [int(path.read_text()) for path in folder.glob("rank*.pid")]
    for group in [process.pid, *groups]:
        with contextlib.suppress(ProcessLookupError):  # it ended by itself
            os.killpg(group, signal.SIGKILL)


# For the workers


def begin() -> tuple[Path, list[str]]:
    """Arm the hard time-out, write down this rank's process group, and draw keys from the names
    of worker and rank, and from how many ranks have started in this folder. Returns the folder and
    the other arguments.

    Call it after the imports.
    """
    faulthandler.dump_traceback_later(float(os.environ.get("WORKER_LIMIT", LIMIT)), exit=True)
    # every Trainer collects garbage several times; what was imported is none, and takes long to
    # search
    gc.freeze()
    folder = Path(sys.argv[1])
    rank = os.environ["RANK"]
    (folder / f"rank{rank}.pid").write_text(str(os.getpgrp()))
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
