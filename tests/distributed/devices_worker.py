"""A client whose model is on two devices, in a loop; with four ranks also two such clients, in a
Trainer. On GPUs, or on the CPU as if there were some.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from helpers import flat, make_task, token_batch
from launcher import begin, finish
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import TrainingArguments

from hf_gradguard import GradGuardConfig, GradGuardTrainer, GradientMap, make_defense, protect
from hf_gradguard.randomness import Stream

DEVICES, ROWS, STEPS = 2, 4, 3  # rows of a client's batch
PRUNING, NOISE = {"ratio": 0.5}, {"relative_scale": 2.0, "strength": "own"}


def rows_of(batch: dict[str, Tensor], part: int, size: int) -> dict[str, Tensor]:
    return {key: tensor[part * size :][:size] for key, tensor in batch.items()}


def protected(model: nn.Module, batch: dict[str, Tensor], mesh: DeviceMesh, defense: Any) -> Tensor:
    """The client's whole message, of this device's rows and its neighbor's."""
    model.zero_grad()
    rows = rows_of(batch, mesh["shards"].get_local_rank(), ROWS // DEVICES)
    protect(model, rows, defense, clients=mesh["clients"])
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for gradient in grads.values():
        assert gradient.to_local().device.type == mesh.device_type
        assert gradient.dtype == torch.float64
    return flat({name: gradient.full_tensor() for name, gradient in grads.items()})


def loop(device: str) -> dict[str, float]:
    """How far messages are from those of a client with one device, and the size of noise."""
    mesh = init_device_mesh(device, (1, DEVICES), mesh_dim_names=("clients", "shards"))
    whole = make_task("bert")[0].to(device)
    batch = {key: tensor.to(device) for key, tensor in token_batch(ROWS, 5).items()}
    gmap = GradientMap(whole, batch, second_order=False)
    gradient = flat(gmap.gradient())
    pruned = flat(make_defense("pruning", **PRUNING)(gmap, generator=Stream.from_seeds(0)))
    cut = make_task("bert")[0].to(device)
    for layer in cut.bert.encoder.layer:
        fully_shard(layer, mesh=mesh["shards"])
    fully_shard(cut, mesh=mesh["shards"])
    noisy = protected(cut, batch, mesh, make_defense("gaussian_noise", **NOISE))
    return {
        "none": float((protected(cut, batch, mesh, "none") - gradient).abs().max()),
        "pruning": float(
            (protected(cut, batch, mesh, make_defense("pruning", **PRUNING)) - pruned).abs().max()
        ),
        "noise": float((noisy - gradient).norm() / gradient.norm()),
    }


def arguments(kind: type[TrainingArguments], folder: Path, batch_size: int, **own: Any) -> Any:
    return kind(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=batch_size,
        learning_rate=1e-2, report_to="none", disable_tqdm=True, save_strategy="no",
        train_sampling_strategy="sequential", average_tokens_across_devices=False, **own,
    )  # fmt: skip


def samples(count: int) -> list[dict[str, Tensor]]:
    batch = token_batch(count, 5)
    return [{key: value[index] for key, value in batch.items()} for index in range(count)]


def train(device: str, folder: Path) -> None:
    """The weights go to a file."""
    sizes = ParallelismConfig(dp_replicate_size=2, dp_shard_size=DEVICES)
    own = {"fsdp": True, "parallelism_config": sizes, "use_cpu": device == "cpu"}
    own |= {"defense": "none", "share_input_embeddings": True}
    args = arguments(GradGuardConfig, folder, ROWS // DEVICES, **own)
    trainer = GradGuardTrainer(make_task("bert")[0], args, train_dataset=samples(2 * ROWS * STEPS))
    trainer.train()
    state = trainer.accelerator.get_state_dict(trainer.model)
    if trainer.is_world_process_zero():
        save_file({n: t.cpu().contiguous() for n, t in state.items()}, folder / "w.safetensors")


def main() -> None:
    folder, (device,) = begin()
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    results = {}
    if int(os.environ["WORLD_SIZE"]) == DEVICES:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        results = loop(device)
    else:
        train(device, folder)
    finish(folder, results)
