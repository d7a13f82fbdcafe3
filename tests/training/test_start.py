"""Every rank starts from rank 0's weights, and says so where they are others than its own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import make_task
from torch import Tensor, nn
from transformers.utils import logging

from hf_gradguard import GradGuardConfig, GradGuardTrainer, make_defense
from hf_gradguard.training.exchange import start as starting
from hf_gradguard.training.exchange.start import (
    ALONE,
    BATCHES,
    OPTIMIZER,
    ROWS,
    STEPS,
    SUMMED,
    agreed_upon,
)


def start(monkeypatch: pytest.MonkeyPatch, received: float | None) -> nn.Module:
    """A rank that gets `received` in its first weight from rank 0; `None`: what it has."""
    model = nn.Linear(3, 2)

    def broadcast(tensor: Tensor) -> None:
        if received is not None and tensor.ndim == 2:
            tensor[0, 0] = received

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


# What has to be alike


def differ(one: dict[str, Any], two: dict[str, Any]) -> set[str]:
    """The names of what `agreed_upon` says otherwise of two ranks' settings."""
    model = nn.Linear(3, 2)
    found = [agreed_upon(GradGuardConfig("out", use_cpu=True, **own), model) for own in (one, two)]
    return {name for name in found[0] if found[0][name] != found[1][name]}


@pytest.mark.parametrize(
    ("one", "two", "names"),
    [
        ({"learning_rate": 1e-3}, {"learning_rate": 1e-1}, {"learning_rate"}),
        ({"max_grad_norm": 1.0}, {"max_grad_norm": 0.0}, {"max_grad_norm"}),
        ({"warmup_steps": 3}, {}, {"warmup_steps"}),
        ({"logging_steps": 1}, {"logging_steps": 3}, {"logging_steps"}),
        ({"logging_strategy": "no", "logging_steps": 1}, {"logging_strategy": "no"}, set()),
        ({"eval_strategy": "steps", "eval_steps": 2}, {}, {"eval_strategy", "eval_steps",
         "eval_delay", "per_device_eval_batch_size"}),
        ({"save_steps": 7}, {"save_steps": 8}, {"save_steps"}),
        ({"average_tokens_across_devices": False}, {}, {"average_tokens_across_devices"}),
        ({"clients_per_process": 2}, {"clients_per_process": 4}, set()),
        ({"clients_per_process": 2, "num_clients": 8}, {"clients_per_process": 4, "num_clients": 8},
         {"clients_per_process"}),
        ({"per_device_train_batch_size": 2, "output_dir": "a"} | {"seed": 3}, {}, set()),
        ({"num_clients": 8, "seed": 3}, {"num_clients": 8}, {"data_seed"}),
    ],
)  # fmt: skip
def test_settings_that_have_to_be_alike(
    one: dict[str, Any], two: dict[str, Any], names: set[str]
) -> None:
    settings = [{key: v for key, v in own.items() if key != "output_dir"} for own in (one, two)]
    assert differ(*settings) == names


@pytest.mark.parametrize("count", [2, 4])
def test_messages_of_a_sum_are_counted_alike(count: int) -> None:
    summed = {"secure_aggregation": True, "noise_for": "sum"}
    own = {"clients_per_process": count}
    assert differ(summed, summed | own) == {"clients_per_process"}


def test_lengths_count_where_an_exchange_follows_them() -> None:
    model, state, data = nn.Linear(3, 2), SimpleNamespace(max_steps=12), [0] * 5
    found = {}
    for name, more in {
        "epochs": {}, "max_steps": {"max_steps": 12},
        "logged": {"max_steps": 12, "logging_strategy": "epoch"},
        "evaluated": {"max_steps": 12, "eval_strategy": "steps", "eval_steps": 3},
        "tokens": {"include_num_input_tokens_seen": "all", "gradient_accumulation_steps": 2},
    }.items():  # fmt: skip
        args = GradGuardConfig("out", use_cpu=True, **more)
        each = agreed_upon(args, model, state, None, data, {"a": data, "b": [0]})
        found[name] = each[STEPS], each[BATCHES], each[ROWS]
    lengths = [("a", 5), ("b", 1)]
    assert found == {
        "epochs": (12, None, None), "max_steps": (None, None, None), "logged": (None, 5, None),
        "evaluated": (None, None, lengths), "tokens": (12, 5, None),
    }  # fmt: skip


def test_optimizers_count_by_their_settings_and_not_by_their_weights() -> None:
    args, found = GradGuardConfig("out", use_cpu=True), []
    for rate in (0.1, torch.tensor(0.1), 0.2):
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        found.append(repr(agreed_upon(args, model, None, optimizer)[OPTIMIZER]))
    again = torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1)
    assert repr(agreed_upon(args, nn.Linear(3, 2), None, again)[OPTIMIZER]) == found[0]
    assert len(set(found)) == 3


# Noise of a sum


@pytest.mark.parametrize(
    ("defense", "other"),
    [
        (("gaussian_noise", {"scale": 0.1}), ("gaussian_noise", {"scale": 0.2})),
        (("gaussian_noise", {"scale": 0.1}), ("optimal_noise", {"scale": 0.1})),
        (("dp_sgd", {"scale": 0.1, "clip": 1.0}), ("dp_sgd", {"scale": 0.1, "clip": 2.0})),
        (
            ("dp_sgd", {"per_sample": True, "noise_multiplier": 1.0, "clip": 1.0}),
            ("dp_sgd", {"per_sample": True, "noise_multiplier": 1.0, "clip": 9.0}),
        ),
    ],
)
def test_ranks_compare_what_they_add_up(defense: Any, other: Any) -> None:
    """A rank that adds less noise than the sum is to have takes it from all others. Messages that
    stand alone may differ.
    """
    model = nn.Linear(3, 2)
    for noise_for in ("sum", "message"):
        args = GradGuardConfig("out", use_cpu=True, secure_aggregation=True, noise_for=noise_for)
        one, two = (
            agreed_upon(args, model, defense=make_defense(name, **settings))
            for name, settings in (defense, other)
        )
        differing = {name for name in one if one[name] != two[name]}
        assert differing == ({SUMMED} if noise_for == "sum" else set())


def test_ranks_that_add_up_other_noise_do_not_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another rank sends differs in that entry alone."""
    args = GradGuardConfig("out", use_cpu=True, secure_aggregation=True, noise_for="sum")
    monkeypatch.setattr(type(args), "world_size", 3)
    model = nn.Linear(3, 2)
    others = agreed_upon(args, model, defense=make_defense("gaussian_noise", scale=0.2))
    sent = torch.frombuffer(
        bytearray(b"".join(map(starting._hashed, others.values()))), dtype=torch.int64
    )
    monkeypatch.setattr(starting, "gather", lambda own: torch.cat([own, sent, own]))
    monkeypatch.setattr(starting, "broadcast", lambda tensors: tensors)
    own = make_defense("gaussian_noise", scale=0.1)
    callback = starting.StartAlike(lambda: None, lambda: own)
    with pytest.raises(ValueError, match=r"Ranks differ in the defense.*noise_for='sum'"):
        callback.on_train_begin(args, model=model)


def test_one_process_is_told_that_it_is_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """When it trains, and not before: what simulates a client of many takes the callback away."""
    model, batch = make_task("bert", dtype=torch.float32)
    rows = [{name: entry[0] for name, entry in batch.items()}] * 2
    logging.warning_once.cache_clear()
    for simulates in (True, False):
        args = GradGuardConfig(str(tmp_path), max_steps=1, use_cpu=True, report_to=[])
        trainer = GradGuardTrainer(model, args, defense="pruning", train_dataset=rows)
        if simulates:
            trainer.is_trial = True
        trainer.train()
        assert (ALONE in caplog.text) == (not simulates)
