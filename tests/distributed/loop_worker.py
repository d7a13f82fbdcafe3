"""README's loop on this rank, and plain loops beside it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import recording
import torch
from examples import example_names
from launcher import begin, finish
from torch import nn

from hf_gradguard import protect

try:  # here, where it is imported for all ranks at once
    from lightning_fabric import Fabric
except ImportError:
    Fabric = None

ROOT = Path(__file__).resolve().parents[2]
ROWS = 12


def lines() -> str:
    """The block of README that has `protect`."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    (found,) = [block for block in blocks if "protect(" in block]
    return found


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
    code = lines().replace("Accelerator()", "Accelerator(cpu=True)").replace("8e-4", "1e-2")
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
        },
    )


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
