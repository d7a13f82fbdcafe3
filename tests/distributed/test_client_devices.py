"""A client on two devices: on GPUs where they are, on CPUs by the same code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from devices_worker import DEVICES, ROWS, STEPS, arguments, samples
from helpers import make_task
from launcher import launch
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

pytestmark = pytest.mark.distributed


def on_gpus(count: int) -> Any:
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= count
    skip = pytest.mark.skipif(not enough, reason=f"needs {count} CUDA devices")
    return pytest.param("cuda", marks=[pytest.mark.gpu, skip])


@pytest.mark.parametrize("device", ["cpu", on_gpus(DEVICES)])
def test_a_client_on_two_devices_shares_its_message(device: str, tmp_path: Path) -> None:
    """That of one device, and noise of the whole gradient's size: by a device's part alone it would
    be smaller by √2.
    """
    for found in launch("devices_worker.py", tmp_path, device, ranks=DEVICES):
        assert found["none"] < 1e-12
        assert found["pruning"] < 1e-12
        assert found["noise"] == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize("device", ["cpu", on_gpus(2 * DEVICES)])
def test_two_such_clients_train_as_one_stock_process(device: str, tmp_path: Path) -> None:
    launch("devices_worker.py", tmp_path, device, ranks=2 * DEVICES)
    own = {"use_cpu": device == "cpu"}
    args = arguments(TrainingArguments, tmp_path / "stock", 2 * ROWS, **own)
    trainer = Trainer(make_task("bert")[0], args, train_dataset=samples(2 * ROWS * STEPS))
    trainer.args._n_gpu = min(trainer.args.n_gpu, 1)  # one device, whatever there is
    trainer.train()
    weights = load_file(tmp_path / "w.safetensors")
    start = make_task("bert")[0].state_dict()
    stock = {name: p.detach().cpu() for name, p in trainer.model.state_dict().items()}
    assert max(float((weights[name] - stock[name]).abs().max()) for name in weights) < 1e-9
    assert max(float((weights[name] - start[name]).abs().max()) for name in weights) > 1e-3
