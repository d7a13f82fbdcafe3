"""Clients in simulation on this rank: whose messages it sent, and the gradient of every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from helpers import image_batch, small_convolution
from launcher import begin, finish
from torch import Tensor
from transformers import TrainerCallback

from hf_gradguard import GradGuardConfig, GradGuardTrainer, GradientMap
from hf_gradguard.defenses import Message
from hf_gradguard.defenses.noise import GaussianNoise
from hf_gradguard.randomness import Stream

SETTINGS: dict[str, Any] = {
    "num_clients": 6, "clients_per_process": 2, "partition": "dirichlet", "dirichlet_alpha": 2.0,
    "data_seed": 1, "gradient_accumulation_steps": 2, "max_steps": 3,
    "per_device_train_batch_size": 8,
}  # fmt: skip


def samples() -> list[dict[str, Tensor]]:
    batch = image_batch(60)
    return [{"pixel_values": x.float(), "labels": y} for x, y in zip(*batch.values(), strict=True)]


class Watched(GaussianNoise):
    """No noise, and a note of who asked for it and the rows."""

    messages: list[tuple[int, list[float]]] = []

    def protect(self, gmap: GradientMap, generator: Stream) -> Message:
        number = self.state["number"].number
        self.messages.append((number, gmap.input.flatten(1).sum(1).tolist()))
        return super().protect(gmap, generator)


class Number(NamedTuple):
    """Of a client, as its defense remembers it."""

    number: int

    def tensors(self) -> dict[str, Tensor]:
        return {}


class Gradients(TrainerCallback):
    steps: list[list[float]] = []

    def on_pre_optimizer_step(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        self.steps.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).tolist()
        )


def main() -> None:
    folder, _ = begin()
    args = GradGuardConfig(
        output_dir=str(Path(folder) / "out"), learning_rate=0.0, max_grad_norm=0.0, use_cpu=True,
        report_to="none", disable_tqdm=True, save_strategy="no", **SETTINGS,
    )  # fmt: skip
    model, _ = small_convolution(dtype=torch.float32)
    trainer = GradGuardTrainer(
        model, args, defense=Watched(scale=0.0), train_dataset=samples(), callbacks=[Gradients()]
    )
    for number, client in enumerate(trainer._clients):
        client.state = {"number": Number(number)}
    trainer.train()
    messages = Watched.messages
    parts = [part.tolist() for part in trainer._rows_of_clients]
    finish(folder, {"messages": messages, "steps": Gradients.steps, "parts": parts})


if __name__ == "__main__":
    main()
