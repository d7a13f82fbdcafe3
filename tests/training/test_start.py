"""Every rank starts from rank 0's weights, and says so where they are others than its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_gradguard.training import start as starting


def start(monkeypatch: pytest.MonkeyPatch, received: float | None) -> nn.Module:
    """A rank that gets `received` in its first weight from rank 0; `None`: what it has."""
    model = nn.Linear(3, 2)

    def broadcast(tensors: list[Tensor]) -> None:
        if received is not None:
            tensors[0][0, 0] = received

    monkeypatch.setattr(starting, "broadcast", broadcast)
    args: Any = SimpleNamespace(world_size=3, device="cpu", process_index=0)
    starting.StartAlike().on_train_begin(args, model=model)
    return model


def test_planted_weights_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = start(monkeypatch, 7.0)
    assert float(model.weight[0, 0]) == 7  # type: ignore[index, arg-type]
    assert "1 of 2 tensors differ" in caplog.text


def test_equal_weights_are_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start(monkeypatch, None)
    assert not caplog.records


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool])
def test_tensors_of_every_type_are_compared(dtype: torch.dtype) -> None:
    one = torch.tensor([0, 1, 1]).to(dtype)
    assert starting._digest(one) == starting._digest(one.clone())
    assert starting._digest(one) != starting._digest(one.flip(0))
    assert starting._digest(torch.zeros((), dtype=dtype)) != b""
