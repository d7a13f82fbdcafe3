"""Gradients of another type than the model's: averages in half precision, or in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import make_task, torch_rng
from test_attacks import text_task
from test_recover_labels import batches, model

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation, make_attack, recover_labels

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])


def of_type(seen: Observation, dtype: torch.dtype) -> Observation:
    return replace(seen, gradient={name: g.to(dtype) for name, g in seen.gradient.items()})


@pytest.mark.long
@DTYPES
@pytest.mark.parametrize("name", ["dlg", "inverting_gradients", "lamp", "tag"])
def test_matching_compares_in_the_models_type(name: str, dtype: torch.dtype) -> None:
    network, batch, tokenizer = text_task()
    network = network.float()
    gradient = GradientMap(network, batch).gradient()
    seen = Observation(network, gradient, tuple(batch["input_ids"].shape), tokenizer=tokenizer)
    other, attack = of_type(seen, dtype), make_attack(name, steps=2)
    expected, found = (attack(each, torch_rng()) for each in (seen, other))
    assert found.input is not None
    assert found.input.dtype == torch.float32
    assert found.history[0] == pytest.approx(expected.history[0], rel=0.01)
    variance = {name: torch.full_like(g, 1e-6) for name, g in other.gradient.items()}
    known = attack(replace(other, noise_variance=variance), torch_rng())
    assert known.history[0] == pytest.approx(expected.history[0], rel=0.01)


@DTYPES
@pytest.mark.parametrize("half", [False, True], ids=["float32 model", "bfloat16 model"])
def test_labels_of_a_batch(dtype: torch.dtype, half: bool) -> None:
    network, batch = model(), batches(8)[0]
    gradient = GradientMap(network, batch, second_order=False).gradient()
    seen = of_type(Observation(network, gradient, (8, 3, 32, 32)), dtype)
    if half:
        network.bfloat16()
    assert recover_labels(seen).tolist() == sorted(batch["labels"].tolist())


@DTYPES
@pytest.mark.parametrize("part", ["weight", "bias"])
def test_labels_off_a_part_of_the_last_layer(dtype: torch.dtype, part: str) -> None:
    network, batch = make_task("bert", dtype=torch.float32, batch_size=1)
    gradient = GradientMap(network, batch).gradient()
    gradient = {name: g for name, g in gradient.items() if name != f"classifier.{part}"}
    seen = of_type(Observation(network, gradient, tuple(batch["input_ids"].shape)), dtype)
    assert recover_labels(seen).tolist() == batch["labels"].tolist()
