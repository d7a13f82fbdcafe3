"""The same results on a GPU as on a CPU, and nothing that wanders back to the CPU. Skipped without
one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import SmallNetwork, flat, make_task
from torch import Tensor, nn

from hf_gradguard import GradGuardConfig, GradGuardTrainer, GradientMap, make_defense
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.leakage import dfil, inversion_influence_lower_bound, largest_eigenvalue
from hf_gradguard.randomness import Stream

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "gaussian_noise": {"relative_scale": 1.0},
    "laplace_noise": {"relative_scale": 1.0},
    "optimal_noise": {"relative_scale": 1.0},
    "dp_sgd": {"relative_scale": 1.0},
    "optimal_dp_sgd": {"relative_scale": 1.0},
    "pruning": {"ratio": 0.5},
    "optimal_pruning": {"ratio": 0.5},
    "quantization": {"bits": 4, "stochastic": True},
    "soteria": {"ratio": 0.5},
    "refiner": {"objective": "weighted", "iterations": 2},
}
TASKS = ["bert", "gpt2_lm", "vit"]


def on_device(model: nn.Module, batch: dict[str, Tensor]) -> tuple[nn.Module, dict[str, Tensor]]:
    return model.to(DEVICE), {key: tensor.to(DEVICE) for key, tensor in batch.items()}


@pytest.mark.parametrize("task", TASKS)
def test_jacobian_products_are_those_of_the_cpu(task: str) -> None:
    here, there = GradientMap(*make_task(task)), GradientMap(*on_device(*make_task(task)))
    delta = {name: torch.ones_like(p) for name, p in here.parameters.items()}
    v = torch.ones_like(here.input)
    torch.testing.assert_close(flat(there.gradient()).cpu(), flat(here.gradient()))
    torch.testing.assert_close(
        there.jvp(v.to(DEVICE))[task_name(there)].cpu(), here.jvp(v)[task_name(here)]
    )
    torch.testing.assert_close(
        there.vjp({n: d.to(DEVICE) for n, d in delta.items()}).cpu(), here.vjp(delta)
    )


def task_name(gmap: GradientMap) -> str:
    return next(name for name in gmap.parameters if name.endswith("weight"))


@pytest.mark.parametrize("factored", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_several_inputs_at_once(count: int, factored: bool) -> None:
    from hf_gradguard.attacks.matching.objectives import TagDistance

    found = []
    for gmap in (GradientMap(*make_task("bert")), GradientMap(*on_device(*make_task("bert")))):
        xs = torch.stack([gmap.input * (1 + 0.1 * k) for k in range(count)])
        extras = {name: torch.zeros(count, *p.shape).to(p) for name, p in gmap.parameters.items()}
        values, slopes, _ = gmap.slopes_at(TagDistance(0.1), xs, extras, factored=factored)
        found.append((values.cpu(), slopes.cpu()))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("task", ["bert", "vit"])
@pytest.mark.parametrize("name", SETTINGS)
def test_defenses_stay_on_the_device(name: str, task: str) -> None:
    model, batch = on_device(*make_task(task, dtype=torch.float32))
    network = SmallNetwork("image" if task == "vit" else "text", 3 if task == "vit" else 8)
    settings = SETTINGS[name] | ({"evaluation_network": network} if name == "refiner" else {})
    gmap = GradientMap(model, batch)
    shared = make_defense(name, **settings)(gmap, generator=Stream.from_seeds(0))
    assert all(tensor.device.type == DEVICE for tensor in shared.values())
    assert all(torch.isfinite(tensor).all() for tensor in shared.values())
    assert (name == "none") == all(torch.equal(shared[n], g) for n, g in gmap.gradient().items())


def test_estimators_are_those_of_the_cpu() -> None:
    found = []
    for gmap in (GradientMap(*make_task("bert")), GradientMap(*on_device(*make_task("bert")))):
        noise = {name: torch.ones_like(g) for name, g in gmap.gradient().items()}
        generator = Stream.from_seeds(0)
        assert dfil(gmap, 1.0, num_probes=4, generator=generator).value.device == gmap.input.device
        found.append(
            [float(largest_eigenvalue(gmap)), float(inversion_influence_lower_bound(gmap, noise))]
        )
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.parametrize("attack", ["tag", "inverting_gradients", "lamp"])
def test_attacks_run_there(attack: str) -> None:
    model, batch = on_device(*make_task("bert", dtype=torch.float32))
    batch = {key: tensor[:1] for key, tensor in batch.items()}
    gmap = GradientMap(model, batch)
    seen = Observation(
        model, gmap.gradient(), input_shape=tuple(batch["input_ids"].shape), labels=batch["labels"]
    )
    result = make_attack(attack, steps=3)(seen, torch.Generator(DEVICE).manual_seed(0))
    assert result.input is not None
    assert result.input.device.type == DEVICE


@pytest.mark.parametrize("name", SETTINGS)
def test_trainer_takes_steps(name: str, tmp_path: Path) -> None:
    model, batch = make_task("bert", dtype=torch.float32)
    rows = [{key: tensor[row] for key, tensor in batch.items()} for row in (0, 1, 0, 1)]
    settings = SETTINGS[name] | (
        {"evaluation_network": SmallNetwork("text", 8)} if name == "refiner" else {}
    )
    before = flat({n: p.detach().clone() for n, p in model.named_parameters()})
    trainer = GradGuardTrainer(
        model,
        GradGuardConfig(
            output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, report_to=[]
        ),
        defense=make_defense(name, **settings),
        train_dataset=rows,
    )
    trainer.train()
    after = flat({n: p.detach() for n, p in trainer.model.named_parameters()})
    assert torch.isfinite(after).all()
    assert not torch.equal(before, after.cpu())
