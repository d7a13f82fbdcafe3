"""Trains one run that is killed (SIGKILL, all ranks) again and again, and the same run left alone.

Usage: kill_worker.py FOLDER RANKS INSIDE OUTSIDE SEED STEPS

Processes are forked from one that has imported everything and computed nothing, so a launch costs
as much as the training. A rank tells when a save or a step begins and ends; the parent waits for
one of them, and a random while more.
"""

from __future__ import annotations

import gc
import json
import os
import random
import select
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from helpers import make_task
from safetensors.torch import load_file
from transformers import TrainerCallback

from hf_gradguard import GradGuardConfig, GradGuardTrainer
from hf_gradguard.training.checkpoints.complete import missing_from

LIMIT = 120


class Tell(TrainerCallback):
    """One byte for each event, by rank 0."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        os.write(self.pipe, b"t")

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        os.write(self.pipe, b"e")


class Telling(GradGuardTrainer):
    """Says when it begins to save."""

    pipe: int

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        os.write(self.pipe, b"s")
        super().save_model(*args, **kwargs)


def train(folder: Path, steps: int, pipe: int) -> None:
    model, batch = make_task("bert", dtype=torch.float32, batch_size=20, dropout=0.1)
    data = [{key: value[k] for key, value in batch.items()} for k in range(20)]
    args = GradGuardConfig(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=2, use_cpu=True,
        learning_rate=1e-2, gradient_accumulation_steps=2, report_to="none", disable_tqdm=True,
        logging_steps=10, save_steps=1, save_total_limit=2, defense="optimal_noise",
        defense_kwargs={"num_probes": 1, "refresh_every": 4}, clients_per_process=2, noise_seed=3,
        eval_strategy="steps", eval_steps=1, load_best_model_at_end=True,
    )  # fmt: skip
    Telling.pipe = pipe
    trainer = Telling(
        model, args, train_dataset=data, eval_dataset=data[:4], callbacks=[Tell(pipe)]
    )
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == steps


def start(folder: Path, ranks: int, steps: int) -> tuple[list[int], int]:
    """Forks the ranks. Returns their process ids, and where rank 0 tells."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    heard, told = os.pipe()
    other = os.open(os.devnull, os.O_WRONLY)
    found = []
    for rank in range(ranks):
        pid = os.fork()
        if not pid:
            if ranks > 1:
                os.environ |= {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                }  # fmt: skip
            try:
                train(folder, steps, other if rank else told)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        found.append(pid)
    os.close(told)
    os.close(other)
    return found, heard


def hear(pipe: int, byte: bytes, count: int) -> bool:
    """Waits for the so-many-th event of a kind; false if the run is over before."""
    while count:
        assert select.select([pipe], [], [], LIMIT)[0], "a run hangs"
        heard = os.read(pipe, 1)
        if not heard:
            return False
        count -= heard == byte
    return True


def end(pids: list[int], pipe: int, kill: bool) -> list[int]:
    """Exit statuses, after a kill or at the end."""
    if kill:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    os.close(pipe)
    return statuses


def main() -> None:
    folder = Path(sys.argv[1])
    ranks, inside, outside, seed, length = map(int, sys.argv[2:])
    draw = random.Random(seed)
    gc.freeze()  # what was imported is no garbage: see ranks.py
    pids, pipe = start(folder / "alone", ranks, length)
    durations: dict[bytes, float] = {}
    for first, last in ((b"s", b"e"), (b"t", b"s")):  # of a save, and of a step
        hear(pipe, first, 1)
        begun = time.monotonic()
        hear(pipe, last, 1)
        durations[first] = time.monotonic() - begun
    assert not any(end(pids, pipe, kill=False))

    left, half, refused, steps, trial = {b"s": inside, b"t": outside}, 0, 0, [], 0
    while any(left.values()):
        trial += 1
        kind = draw.choice([kind for kind, count in left.items() if count])
        pids, pipe = start(folder / "killed", ranks, length)
        if hear(pipe, kind, draw.choice([1, 1, 2])):
            time.sleep(draw.uniform(0, durations[kind]))
            statuses = end(pids, pipe, kill=True)
        else:
            statuses = end(pids, pipe, kill=False)
        refused += sum(os.WIFEXITED(status) and os.WEXITSTATUS(status) for status in statuses)
        left[kind] -= 1
        states = {
            int(path.name.split("-")[1]): missing_from(path)
            for path in (folder / "killed").glob("checkpoint-*")
        }
        half += bool(states and states[max(states)])
        steps.append(max((step for step, lacks in states.items() if not lacks), default=0))
    pids, pipe = start(folder / "killed", ranks, length)
    statuses = end(pids, pipe, kill=False)
    # the two newest of both runs: the last, and the best
    weights = {}
    for run in ("alone", "killed"):
        (path,) = (folder / run).glob(f"checkpoint-{length}")
        weights[run] = load_file(path / "model.safetensors")
    differing = [
        name
        for name, tensor in weights["alone"].items()
        if not torch.equal(tensor, weights["killed"][name])
    ]
    report = {
        "refused": refused,
        "last": statuses,
        "half written": half,
        "complete": steps,
        "differing": differing,
        "tensors": len(weights["alone"]),
    }
    (folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
