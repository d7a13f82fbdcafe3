"""`torch_compile` in a protected training: what asks for the gradient alone runs compiled, with the
weights of a training that does not; what asks for more is refused by name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import make_task, refuses
from torch import Tensor
from torch._dynamo import OptimizedModule
from torch._dynamo.utils import counters
from transformers import Trainer, TrainingArguments

from hf_gradguard import GradGuardConfig, GradGuardTrainer

COMMON: dict[str, Any] = {
    "max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "use_cpu": True,
    "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Arguments set environment variables that later accelerators read."""
    with mock.patch.dict(os.environ):
        yield
    torch._dynamo.reset()


def trained(
    folder: Path, kind: type[Trainer], backend: str | None = None, dropout: bool = True, **own: Any
) -> tuple[dict[str, Tensor], Trainer]:
    """Weights after three steps, and their Trainer."""
    torch._dynamo.reset()
    counters.clear()
    os.environ.pop("ACCELERATE_DYNAMO_BACKEND", None)
    model, batch = make_task("bert", dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1 * dropout
    rows = [{name: entry[k % 2] for name, entry in batch.items()} for k in range(12)]
    config = TrainingArguments if kind is Trainer else GradGuardConfig
    compiled = {} if backend is None else {"torch_compile_backend": backend}
    args = config(str(folder), **COMMON, **compiled, **own)
    trainer = kind(model, args, train_dataset=rows)
    trainer.train()
    assert (counters["stats"]["unique_graphs"] > 0) == (backend is not None)
    return {name: p.detach().clone() for name, p in model.named_parameters()}, trainer


def largest(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    return max(float((one[name] - two[name]).abs().max()) for name in two)


@pytest.mark.long
def test_without_a_defense_it_is_the_stock_compiled_training(tmp_path: Path) -> None:
    stock, _ = trained(tmp_path, Trainer, "aot_eager", dropout=False)
    own = {"defense": "none", "share_input_embeddings": True}
    ours, trainer = trained(tmp_path, GradGuardTrainer, "aot_eager", dropout=False, **own)
    assert largest(ours, stock) == 0
    assert isinstance(trainer.model_wrapped, OptimizedModule)
    assert not any("_orig_mod" in name for name in trainer.shared_names)  # the plain model's


@pytest.mark.long
@pytest.mark.parametrize(
    ("defense", "settings"),
    [
        ("gaussian_noise", {}),
        pytest.param("pruning", {"ratio": 0.9, "error_feedback": True}, marks=pytest.mark.slow),
        pytest.param("quantization", {"bits": 4}, marks=pytest.mark.slow),
        pytest.param("laplace_noise", {"scale": 0.01}, marks=pytest.mark.slow),
        pytest.param("dp_sgd", {"clip": 0.1, "scale": 0.01}, marks=pytest.mark.slow),
    ],
)
def test_weights_are_those_of_the_plain_training(
    tmp_path: Path, defense: str, settings: dict[str, Any]
) -> None:
    """Under one seed: the same dropout, noise and rounding. The table of words is withheld, though
    compiled code runs no hooks.
    """
    own = {"defense": defense, "defense_kwargs": settings, "noise_seed": 3}
    start = make_task("bert", dtype=torch.float32)[0].state_dict()
    plain, _ = trained(tmp_path, GradGuardTrainer, **own)
    compiled, _ = trained(tmp_path, GradGuardTrainer, "aot_eager", **own)
    assert largest(compiled, plain) < 1e-6
    assert largest(compiled, {n: start[n] for n in compiled}) > 1e-3
    table = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(compiled[table], start[table])


@pytest.mark.long
def test_messages_that_are_measured_run_as_they_are(tmp_path: Path) -> None:
    """They differentiate twice."""
    own = {"defense": "gaussian_noise", "defense_kwargs": {"scale": 0.01}, "noise_seed": 3}
    own |= {"leakage_logging_steps": 2, "logging_steps": 1}
    plain, _ = trained(tmp_path, GradGuardTrainer, **own)
    compiled, _ = trained(tmp_path, GradGuardTrainer, "aot_eager", **own)
    assert largest(compiled, plain) < 1e-6


@pytest.mark.parametrize(
    ("defense", "settings"),
    [
        ("optimal_noise", {}),
        ("optimal_pruning", {}),
        ("soteria", {}),
        ("refiner", {}),
        ("dp_sgd", {"clip": 1.0, "noise_multiplier": 1.0, "per_sample": True}),
    ],
)
def test_what_asks_for_more_is_refused_by_name(
    tmp_path: Path, defense: str, settings: dict[str, Any]
) -> None:
    own = {"defense": defense, "defense_kwargs": settings}
    with refuses("compiled-defense"):
        trained(tmp_path, GradGuardTrainer, "aot_eager", **own)


@pytest.mark.slow
def test_inductor_is_as_close_as_stock(tmp_path: Path) -> None:
    """Its rounding differs: as much as between the stock Trainer's two."""
    pair = [trained(tmp_path, Trainer, backend, dropout=False)[0] for backend in (None, "inductor")]
    own = {"defense": "none", "share_input_embeddings": True}
    ours = [
        trained(tmp_path, GradGuardTrainer, backend, dropout=False, **own)[0]
        for backend in (None, "inductor")
    ]
    assert largest(ours[1], pair[1]) == 0
    assert largest(*ours) <= largest(*pair)
