"""Two clients of two devices each, beside two clients that hold whole models."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import recording
import torch
import torch.distributed as dist
from helpers import make_task, token_batch
from launcher import begin, finish
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from hf_gradguard import protect
from hf_gradguard.defenses import Defense, make_defense

CLIENTS, SHARDS = 2, 2
STEPS = 3
Task = Callable[[], nn.Module]


class NamedRecorder(recording.Recorder):
    """As a dimension of a mesh."""

    def _set_group_name(self, name: str) -> None:
        self.own_name = name

    def _set_group_desc(self, name: str) -> None:
        self.own_desc = name

    group_name = property(lambda self: self.own_name)
    group_desc = property(lambda self: self.own_desc)


def _recorder(options: Any, _: Any) -> NamedRecorder:
    group = NamedRecorder(
        options.store, options.group_rank, options.group_size, options.timeout
    )
    group._set_group_name(options.group_id)
    return group


def make_mesh() -> DeviceMesh:
    """Whatever leaves a client is recorded: its dimension of the mesh, and the group of all."""
    dist.Backend.register_backend("recorder", _recorder, extended_api=True, devices=["cpu"])
    dist.init_process_group("recorder", timeout=timedelta(seconds=60))
    return init_device_mesh(
        "cpu",
        (CLIENTS, SHARDS),
        mesh_dim_names=("clients", "shards"),
        backend_override={"shards": "gloo"},
    )


def full() -> nn.Module:
    return make_task("bert")[0]


def rows(client: int, device: int | None = None) -> dict[str, Tensor]:
    """A client's batch, or a device's half of it."""
    batch = token_batch(4 * CLIENTS, 5)
    first = 4 * client + (2 * device if device else 0)
    some = slice(first, first + (4 if device is None else 2))
    return {key: value[some] for key, value in batch.items()}


def shard(model: nn.Module, mesh: DeviceMesh, **settings: Any) -> nn.Module:
    """Each layer of an encoder, and what is left."""
    for module in model.modules():
        if type(module).__name__ == "BertLayer":
            fully_shard(module, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)
    return model


def whole(tensor: Any) -> Tensor:
    found = tensor.detach()
    return found.full_tensor() if hasattr(found, "full_tensor") else found.clone()


def main() -> None:
    folder, _ = begin()
    mesh = make_mesh()
    rank = dist.get_rank()
    client, device = rank // SHARDS, rank % SHARDS
    sharded = shard(full(), mesh["shards"])
    for name in ["none", "pruning", "quantization"]:
        one, two = full(), shard(full(), mesh["shards"])
        o1, o2 = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (one, two))
        for _ in range(STEPS):
            protect(one, rows(client), name, clients=mesh["clients"])
            protect(two, rows(client, device), name, clients=mesh["clients"])
            if rank == 0:
                pass
            w = {n: whole(p.grad) for n, p in two.named_parameters() if p.grad is not None}
            v = {n: p.grad for n, p in one.named_parameters() if p.grad is not None}
            assert w.keys() == v.keys()
            print(rank, name, max(float((w[n] - v[n]).abs().max()) for n in w), all(bool(((w[n]!=0)==(v[n]!=0)).all()) for n in w))
            o1.step(), o2.step()
            o1.zero_grad(), o2.zero_grad()
    finish(folder, {})


if __name__ == "__main__":
    main()
