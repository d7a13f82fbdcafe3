"""Runs a worker on several ranks, forked from one process that has imported everything and computed
nothing: a launch costs no import.

As with torchrun, a rank that fails ends the others, and the launch fails.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path


def main(
    size: int,
    worker: Path,
    folder: Path,
    arguments: Sequence[str],
    environ: dict[str, str],
    printed: Path,
    alone: bool,
) -> None:
    """Exits with whether a rank failed."""
    os.setsid()
    _print_to(printed)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = [str(worker), str(folder), *map(str, arguments)]
    module = importlib.import_module(worker.stem)
    # every Trainer collects garbage several times; what was imported is none, and takes long to
    # search
    gc.freeze()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ |= {
        "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }  # fmt: skip
    ranks = {}
    for rank in map(str, range(size)):
        pid = os.fork()
        if not pid:
            os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
            if alone:
                _print_to(folder / f"output{rank}")
            module.main()
            return
        ranks[pid] = rank
    sys.exit(_wait(ranks, folder, alone))


def _wait(ranks: dict[int, str], folder: Path, alone: bool) -> int:
    """Waits for all ranks. The exit status: whether one failed."""
    failed = False
    while ranks:
        pid, status = os.wait()
        rank = ranks.pop(pid)
        if alone:
            (folder / f"status{rank}").write_text(str(os.waitstatus_to_exitcode(status)))
        elif status and not failed:
            for other in ranks:
                os.kill(other, signal.SIGTERM)
        failed |= bool(status)
    return int(failed)


def _print_to(path: Path) -> None:
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
