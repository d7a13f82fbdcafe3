"""README's loop on this rank, and plain loops beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import recording
import torch
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from accelerate import Accelerator
from examples import example_names
from launcher import begin, finish, refusal
from torch import nn
from torch.distributed import all_gather
from torch.utils.data import DataLoader, IterableDataset

from hf_gradguard import GradGuardConfig, GradGuardTrainer, protect
from hf_gradguard.gradient_map.exchanges import no_exchange
from hf_gradguard.testing.small import small_image_task, small_text_task

try:  # here, where it is imported for all ranks at once
    from lightning_fabric import Fabric
except ImportError:
    Fabric = None

ROOT = Path(__file__).resolve().parents[2]
ROWS = 12
# A loop without a Trainer, in which `protect` stands where `backward` was.
LOOP = """\
import torch
from accelerate import Accelerator
from transformers import DataCollatorWithPadding
from hf_gradguard import make_defense, protect

accelerator, collate = Accelerator(), DataCollatorWithPadding(tokenizer)
noise = make_defense("gaussian_noise", relative_scale=20.0)
optimizer = torch.optim.AdamW(model.parameters(), lr=8e-4)  # four times the best one without noise
loader = torch.utils.data.DataLoader(train_dataset, batch_size=8, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    loss = protect(model, batch, noise, accelerator)  # no backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def run(code: str) -> dict[str, torch.Tensor]:
    """The weights after a loop, on rows of which each rank gets half."""
    names = example_names()
    rows = names["train_dataset"] * (ROWS // 2)
    names |= {"train_dataset": [{**row, "labels": k % 2} for k, row in enumerate(rows)]}
    torch.manual_seed(0)
    exec(code, names)
    module: Any = names["model"]
    inner: nn.Module = getattr(module, "module", module)
    return {name: p.detach().clone() for name, p in inner.named_parameters()}


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def main() -> None:
    folder, _ = begin()
    group = recording.initialize()
    code = LOOP.replace("Accelerator()", "Accelerator(cpu=True)").replace("8e-4", "1e-2")
    code = code.replace("batch_size=8", "batch_size=2")
    assert code.count("\n") == 14
    protected = "protect(model, batch, noise, accelerator)"
    made = 'make_defense("gaussian_noise", relative_scale=20.0)'
    assert protected in code
    assert made in code
    plain = code.replace(protected, "model(**batch).loss; accelerator.backward(loss)")
    none = run(code.replace(made, 'make_defense("none")'))
    stock = run("model.get_input_embeddings().requires_grad_(False)\n" + plain)
    group.on = True
    noisy = run(code)
    group.on = False
    finish(
        folder,
        {
            "plain": difference(none, stock),
            "moved": difference(none, run("pass")),
            "noisy": difference(noisy, none),
            "checksum": [float(tensor.double().sum()) for tensor in noisy.values()],
            "sizes": [len(tensor) for name, tensor in group.sent if name == "allreduce"],
            "fabric": by_fabric(),
            "evaluated": evaluated(group),
            "dispatched": dispatched(group, folder / "out"),
            "exchanging": exchanging(group, folder / "out"),
            "ways": ways_to_exchange(),
        },
    )


class Endless(IterableDataset):
    """Rows of this rank's own."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for number in range(64):
            row = torch.arange(4, 10) + number % 8
            yield {
                "input_ids": row,
                "attention_mask": row.sign(),
                "labels": torch.tensor(number % 3),
            }


class OwnLoader(GradGuardTrainer):
    """Its loader is no business of the Trainer's."""

    def get_train_dataloader(self) -> DataLoader:
        return self.accelerator.prepare(DataLoader(Endless(), batch_size=4))


def dispatched(group: recording.Recorder, folder: Path) -> dict[str, Any]:
    """How loops over loaders that send batches end, and what was sent."""
    accelerator, (model, batch, _) = Accelerator(cpu=True), small_text_task()
    group.sent, group.on = [], True
    accelerator.prepare(DataLoader(Endless(), batch_size=4))
    found = {
        "loop": refusal(
            lambda: protect(model, batch, "gaussian_noise", accelerator), NotImplementedError
        )
    }
    args = GradGuardConfig(str(folder), max_steps=1, use_cpu=True, report_to="none")
    found["trainer"] = refusal(
        OwnLoader(model, args, defense="gaussian_noise").train, NotImplementedError
    )
    group.on = False
    return found | {"sent": sum(t.dtype == torch.int64 and len(t) >= 24 for _, t in group.sent)}


def evaluated(group: recording.Recorder) -> list[str]:
    """What an evaluation sends after a protected step of a model with batch statistics."""
    accelerator, (model, batch, _) = Accelerator(cpu=True), small_image_task()
    assert any(isinstance(part, nn.BatchNorm2d) for part in model.modules())
    wrapped = accelerator.prepare(model.train())
    assert isinstance(wrapped, nn.parallel.DistributedDataParallel)
    protect(wrapped, batch, "gaussian_noise", accelerator)
    group.sent, group.on = [], True
    with torch.no_grad():
        wrapped.eval()(**batch)
    group.on = False
    return [kind for kind, _ in group.sent]


class Counting(nn.Module):
    """Its loss is a mean over all ranks' objects, as those of detection are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 2)
        # The recorder is written in Python, which torch calls without an operation of its own.
        self.group = torch.distributed.new_group(backend="gloo")

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        count = (labels > 0).sum().float()
        torch.distributed.all_reduce(count, group=self.group)
        logits = self.linear(pixel_values.flatten(1))
        return {"loss": nn.functional.cross_entropy(logits, labels, reduction="sum") / count}


class Plain(nn.Module):
    """Exchanges nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 2)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(pixel_values.flatten(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Gathering(GradGuardTrainer):
    """Its loss asks the accelerator for all ranks' outputs."""

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        self.accelerator.gather(outputs["logits"].detach())
        return outputs["loss"]


def exchanging(group: recording.Recorder, folder: Path) -> dict[str, Any]:
    """How training a model ends that exchanges in its loss, and what was sent."""
    accelerator, model = Accelerator(cpu=True), Counting()
    batch = {"pixel_values": torch.rand(4, 3, 2, 2), "labels": torch.tensor([0, 1, 1, 0])}
    rows = [{name: value[i] for name, value in batch.items()} for i in range(4)]
    group.sent, group.on = [], True
    found = {
        "loop": refusal(
            lambda: protect(model, batch, "gaussian_noise", accelerator), NotImplementedError
        )
    }
    loops = len(group.sent)
    args = GradGuardConfig(str(folder), max_steps=1, use_cpu=True, report_to="none")
    trainer = GradGuardTrainer(model, args, defense="gaussian_noise", train_dataset=rows)
    found["trainer"] = refusal(trainer.train, NotImplementedError)
    trainer = Gathering(Plain(), args, defense="gaussian_noise", train_dataset=rows)
    found["gather"] = refusal(trainer.train, NotImplementedError)
    group.on = False
    floats = [t for _, t in group.sent if t.is_floating_point() and len(t) == 1]
    return found | {"sent": loops + len(floats)}


def ways_to_exchange() -> dict[str, bool]:
    """Which ways of exchanging are refused in a loss, and whether another thread may go on."""
    tensor, model = torch.ones(1), Counting()
    halves, group = [torch.ones(1), torch.ones(1)], model.group
    ways: dict[str, Callable[[], Any]] = {
        "imported": lambda: all_gather(halves, tensor, group=group),
        "object": lambda: torch.distributed.all_gather_object([None, None], "a", group=group),
        "functional": lambda: functional.all_reduce(tensor, "sum", group),
        "differentiable": lambda: differentiable.all_reduce(
            tensor.clone().requires_grad_(), group=group
        ),
        "group": lambda: group.allreduce([tensor]).wait(),
    }
    refused = {}
    for name, exchange in ways.items():
        with no_exchange(model):
            refused[name] = bool(refusal(exchange, NotImplementedError))
    with no_exchange(model):
        torch.distributed.barrier()
        other = Thread(target=torch.distributed.all_reduce, args=[tensor])
        other.start()
        other.join()
    return refused | {"thread": tensor.item() == torch.distributed.get_world_size()}


def by_fabric() -> list[float] | None:
    """How far the gradient that Fabric leaves is from the ranks' mean, and its size."""
    if Fabric is None:
        return None
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2)
    fabric.launch()
    names = example_names()
    rank = torch.distributed.get_rank()
    batch = {key: value[rank : rank + 1] for key, value in names["batch"].items()}
    own = protect_alone(batch)
    for tensor in own.values():
        torch.distributed.all_reduce(tensor)
    model = fabric.setup(names["model"])
    protect(model, batch, "none", fabric)
    found = {name: p.grad for name, p in model.module.named_parameters() if p.grad is not None}
    assert found.keys() == own.keys()
    return [
        max(float((found[name] - own[name] / 2).abs().max()) for name in own),
        max(float(tensor.abs().max()) for tensor in own.values()),
    ]


def protect_alone(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's own gradient."""
    model = example_names()["model"]
    protect(model, batch, "none")
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


if __name__ == "__main__":
    main()
