"""A process group that does what gloo does and keeps a copy of every tensor that leaves this rank.

It stands below everything that communicates: `torch.distributed`, accelerate, and DDP's reducer in
C++.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Of each collective, where among its arguments the tensors that leave the rank are.
SENT = {
    "allreduce": 0, "allreduce_coalesced": 0, "reduce": 0, "broadcast": 0, "send": 0,
    "allgather": 1, "allgather_coalesced": 1, "_allgather_base": 1,
    "allgather_into_tensor_coalesced": 1, "all_gather_single": 1, "gather": 1, "scatter": 1,
    "reduce_scatter": 1, "_reduce_scatter_base": 1, "reduce_scatter_single": 1, "alltoall": 1,
    "alltoall_base": 1, "all_to_all_single": 1,
}  # fmt: skip


class Recorder(dist.ProcessGroup):
    """Delegates to gloo and appends `(collective, tensor)` to `sent` while `on`, and what comes of
    it to `received`.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.sent: list[tuple[str, Tensor]] = []
        self.received: list[tuple[str, Tensor]] = []
        self.on = False
        self.journal: Path | None = (
            None  # where it also writes when each collective starts and ends, for ranks that die
        )

    def getBackendName(self) -> str:
        return "recorder"

    def write(self, line: str) -> None:
        if self.on and self.journal is not None:
            with self.journal.open("a") as file:
                print(line, file=file)

    def barrier(self, *args: Any, **kwargs: Any) -> Any:
        return self.gloo.barrier(*args, **kwargs)

    def recv(self, *args: Any) -> Any:
        return self.gloo.recv(*args)


def _recorded(name: str, position: int) -> Any:
    def collective(self: Recorder, *args: Any) -> Any:
        root = (
            getattr(args[-1], "rootRank", self.rank())
            if name in ("broadcast", "scatter")
            else self.rank()
        )
        if self.on and root == self.rank():
            tensors = [tensor.detach().clone().flatten() for tensor in _tensors(args[position])]
            self.sent += [(name, tensor) for tensor in tensors]
            self.write(f"starts {name} {' '.join(str(len(tensor)) for tensor in tensors)}")
        work = getattr(self.gloo, name)(*args)
        work.wait()
        if self.on and args:
            self.received += [
                (name, tensor.detach().clone().flatten()) for tensor in _tensors(args[0])
            ]
        self.write(f"ends {name}")
        return work

    return collective


def _tensors(argument: Any) -> list[Tensor]:
    if isinstance(argument, Tensor):
        return [argument]
    return [tensor for part in argument for tensor in _tensors(part)]


for _name, _position in SENT.items():
    setattr(Recorder, _name, _recorded(_name, _position))


def initialize(timeout: float = 60) -> Recorder:
    """Make a recorder the default group. The Trainer takes a group that exists already as it is."""
    dist.Backend.register_backend("recorder", Recorder, devices=["cpu"])
    dist.init_process_group("recorder", timeout=timedelta(seconds=timeout))
    group = dist.group.WORLD
    assert isinstance(group, Recorder)
    check = torch.ones(1)
    dist.all_reduce(check)
    assert float(check) == dist.get_world_size()
    return group
