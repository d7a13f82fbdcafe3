"""Clients in whose batch nothing counts, on one process: noise alone where its scale is stated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_task, pad, ragged_rows
from torch import Tensor
from transformers import TrainerCallback

from hf_gradguard import GradGuardConfig, GradGuardTrainer, GradientMap, chain, make_defense
from hf_gradguard.gradient_map.views import ZeroGradient
from hf_gradguard.leakage import FisherAccountant
from hf_gradguard.randomness import Stream
from hf_gradguard.training.exchange.secure import share_of_noise

SCALE = 50.0  # hides every gradient here
STATED = ["gaussian_noise", "laplace_noise", "optimal_noise", "dp_sgd", "optimal_dp_sgd"]


class Gradients(TrainerCallback):
    def __init__(self) -> None:
        self.steps: list[Tensor] = []

    def on_pre_optimizer_step(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        self.steps.append(torch.cat(grads))


def gradients(
    folder: Path, defense: Any, silent: range, accountant: Any = None, **more: Any
) -> list[Tensor]:
    """What each step's optimizer gets, where the rows of `silent` have no labels."""
    data = ragged_rows(8)
    for row in silent:
        data[row]["labels"] = torch.full_like(data[row]["labels"], -100)
    settings = {"per_device_train_batch_size": 4, "max_steps": 2, **more}
    args = GradGuardConfig(
        str(folder), use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
        learning_rate=0.0, max_grad_norm=0.0, train_sampling_strategy="sequential", **settings,
    )  # fmt: skip
    seen = Gradients()
    GradGuardTrainer(
        make_task("gpt2_lm", dtype=torch.float32)[0], args, defense=defense, accountant=accountant,
        train_dataset=data, data_collator=pad, callbacks=[seen],
    ).train()  # fmt: skip
    return seen.steps


@pytest.mark.parametrize("name", STATED)
def test_an_empty_batch_is_noise_of_the_scale_stated(tmp_path: Path, name: str) -> None:
    """The first batch has no labels, the second one has."""
    defense = make_defense(name, scale=SCALE)
    for step in gradients(tmp_path, defense, range(4)):
        assert float(step.square().mean().sqrt()) == pytest.approx(SCALE, rel=0.1)


@pytest.mark.parametrize("shape", ["public", "past", "own"])
def test_it_has_the_shape_that_is_known(shape: str) -> None:
    """Of earlier batches, random or the client's; of its own it has none, and is uniform."""
    defense: Any = make_defense("optimal_noise", scale=SCALE, shape=shape)
    gmap = GradientMap(*make_task("bert", dtype=torch.float32))
    first = defense(ZeroGradient(gmap.parameters), Stream.from_seeds(1)).noise
    assert all(bool((v == SCALE**2).all()) for v in first.added.values())  # nothing is known yet
    before = defense(gmap, Stream.from_seeds(2)).noise.added
    after = defense(ZeroGradient(gmap.parameters), Stream.from_seeds(3)).noise
    power = sum(float(v.double().sum()) for v in after.added.values())
    assert power / sum(v.numel() for v in after.added.values()) == pytest.approx(SCALE**2)
    assert after.shape_trace == 0
    uniform = all(bool((v == SCALE**2).all()) for v in after.added.values())
    assert uniform == (shape == "own")
    if shape == "public":
        torch.testing.assert_close(dict(after.added), dict(before))


def test_clients_of_a_batch_and_accumulation(tmp_path: Path) -> None:
    """Two of four clients, in both micro-batches of a step: each weighs 1/(4 · 2)."""
    more = {"clients_per_process": 4, "gradient_accumulation_steps": 2, "max_steps": 1}
    counted = gradients(tmp_path, make_defense("gaussian_noise", scale=SCALE), range(0), **more)
    nothing = gradients(tmp_path, make_defense("gaussian_noise", scale=SCALE), range(8), **more)
    expected = SCALE * (8 / 8**2) ** 0.5
    assert float(nothing[0].std()) == pytest.approx(expected, rel=0.1)
    assert float(counted[0].std()) == pytest.approx(expected, rel=0.3)  # weights by tokens


@pytest.mark.parametrize(
    "defense",
    [
        make_defense("none"),
        make_defense("gaussian_noise", relative_scale=2.0),
        make_defense("gaussian_noise", scale=0.0),
        make_defense("pruning"),
        chain(make_defense("pruning"), make_defense("gaussian_noise", scale=1.0)),
    ],
    ids=str,
)
def test_without_a_stated_scale_it_is_zeros(tmp_path: Path, defense: Any) -> None:
    assert not gradients(tmp_path, defense, range(4), max_steps=1)[0].any()


def test_noise_alone_is_of_no_example(tmp_path: Path) -> None:
    accountant = FisherAccountant()
    defense = make_defense("gaussian_noise", scale=SCALE)
    gradients(tmp_path, defense, range(4), accountant)
    assert set(accountant) == {4, 5, 6, 7}


def test_more_clients_than_rows_are_refused_for_a_sum() -> None:
    args = GradGuardConfig(
        "out", use_cpu=True, secure_aggregation=True, noise_for="sum", clients_per_process=4,
        per_device_train_batch_size=3,
    )  # fmt: skip
    with pytest.raises(ValueError, match="clients_per_process=4 of per_device_train_batch_size=3"):
        share_of_noise(make_defense("gaussian_noise", scale=1.0), args, ranks=3)
