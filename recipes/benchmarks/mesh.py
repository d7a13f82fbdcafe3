"""Memory of a rank where a client is on two devices, beside a rank that holds the whole model: at
rest, and at the peak of a protected step, in MiB.

Two clients, four ranks of this machine. The embeddings, each layer and what is left are units of
`fully_shard`. At rest are weights and AdamW's two moments, as they are after a step; the peak is of
`protect` alone, or of a plain backward pass, the gradient that it leaves included. A batch is one
sentence a device, so that activations do not hide the rest.
"""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_gradguard import make_defense, protect

from .measuring import bytes_of, classifier, on_ranks, peak, random_batch

CLIENTS, SHARDS, LENGTH = 2, 2, 16
DEFENSES = ("none", "gaussian_noise", "optimal_noise", "pruning", "quantization")


def measure(args) -> dict:
    defenses = DEFENSES[:2] if args.quick else DEFENSES
    return on_ranks(CLIENTS * SHARDS, _memories, args.model, defenses)


def _memories(_rank: int, name: str, defenses: tuple[str, ...]) -> dict:
    mesh = init_device_mesh("cpu", (CLIENTS, SHARDS), mesh_dim_names=("clients", "shards"))
    memory = {}
    for kind in ("whole", "sharded"):
        model = classifier(name)
        if kind == "sharded":
            for unit in (model.base_model.embeddings, *model.base_model.encoder.layer):
                fully_shard(unit, mesh=mesh["shards"])
            fully_shard(model, mesh=mesh["shards"])
        memory[kind] = _memory(model, mesh, defenses)
    return memory


def _memory(model, mesh, defenses: tuple[str, ...]) -> dict:
    batch, optimizer = random_batch(model, 1, LENGTH), torch.optim.AdamW(model.parameters())
    protect(model, batch, "none", clients=mesh["clients"])
    optimizer.step()
    moments = [v for state in optimizer.state.values() for v in state.values() if v.dim()]
    bytes_by_row = {"weights": _size(model.parameters()), "moments": _size(moments)}
    for _ in range(2):  # the first one warms up
        optimizer.zero_grad()
        used = peak(lambda: model(**batch).loss.backward())
    bytes_by_row["plain backward"] = used
    for name in defenses:
        defense = make_defense(name)
        for measured in (False, True):  # trials, and the first averages, come first
            optimizer.zero_grad()
            used = peak(lambda d=defense: protect(model, batch, d, clients=mesh["clients"]))
            if measured:
                bytes_by_row[f"protect, {name}"] = used
    return {row: round(used / 2**20, 3) for row, used in bytes_by_row.items()}


def _size(tensors) -> int:
    local_tensors = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return bytes_of(local_tensors)


def table(report: dict) -> tuple[list[str], list]:
    unsharded, sharded = report["whole"], report["sharded"]
    rows = [(row, f"{unsharded[row]:.1f}", f"{sharded[row]:.1f}") for row in unsharded]
    return ["MiB", "a rank with the whole model", "one of two devices"], rows
