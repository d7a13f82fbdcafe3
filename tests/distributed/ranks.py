"""Runs a worker on several ranks, forked from one process that has imported everything and computed
nothing: a launch costs one import, not one a rank and torchrun's.

Usage: ranks.py RANKS WORKER FOLDER ARGUMENTS ...

As with torchrun, a rank that fails ends the others, and the launch fails. With ALONE in the
environment none ends another, and FOLDER gets what each one prints, and its exit status.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys
from pathlib import Path

ALONE = "ALONE" in os.environ


def wait(ranks: dict[int, str], folder: Path) -> int:
    """Waits for all ranks. The exit status: whether one failed."""
    failed = False
    while ranks:
        pid, status = os.wait()
        rank = ranks.pop(pid)
        if ALONE:
            (folder / f"status{rank}").write_text(str(os.waitstatus_to_exitcode(status)))
        elif status and not failed:
            for other in ranks:
                os.kill(other, signal.SIGTERM)
        failed |= bool(status)
    return int(failed)


def main() -> int:
    size = sys.argv.pop(1)
    del sys.argv[0]  # the worker's own
    worker = importlib.import_module(Path(sys.argv[0]).stem)
    # every Trainer collects garbage several times; what was imported is none, and takes long to
    # search
    gc.freeze()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ |= {
        "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }  # fmt: skip
    ranks, folder = {}, Path(sys.argv[1])
    for rank in map(str, range(int(size))):
        pid = os.fork()
        if not pid:
            os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
            if ALONE:
                output = os.open(folder / f"output{rank}", os.O_WRONLY | os.O_CREAT)
                os.dup2(output, 1)
                os.dup2(output, 2)
            worker.main()
            return 0
        ranks[pid] = rank
    return wait(ranks, folder)


if __name__ == "__main__":
    sys.exit(main())
