"""The same results on a GPU as on a CPU, and nothing that wanders back to the CPU. Skipped without
one.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import SmallNetwork, flat, make_task, word_tokenizer
from torch import Tensor, nn

from hf_gradguard import GradGuardConfig, GradGuardTrainer, GradientMap, make_defense
from hf_gradguard.attacks import Observation, average, make_attack, recover_labels
from hf_gradguard.leakage import (
    dfil,
    inversion_influence_lower_bound,
    largest_eigenvalue,
    make_estimator,
)
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
    "dp_sgd of each sample": {"per_sample": True, "clip": 1.0, "noise_multiplier": 1.0},
    "optimal_noise of its own": {"relative_scale": 1.0, "shape": "own"},
    "pruning with feedback": {"ratio": 0.5, "error_feedback": True, "min_batches": 1},
    "optimal_dp_sgd": {"relative_scale": 1.0},
    "pruning": {"ratio": 0.5},
    "optimal_pruning": {"ratio": 0.5},
    "quantization": {"bits": 4, "stochastic": True},
    "soteria": {"ratio": 0.5},
    "gradient_sketch": {},
    "refiner": {},
    "refiner_published": {"iterations": 2},
}
PUBLISHED = "refiner_published"
TASKS = ["bert", "gpt2_lm", "vit"]
TOKENIZER = word_tokenizer([f"w{i}" for i in range(20)])
TEXTS = [[4, 9, 13, 7, 21], [22, 5, 17], [6, 6, 11, 19], [8, 20, 15, 10, 12]]


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
    settings = SETTINGS[name] | ({"evaluation_network": network} if name == PUBLISHED else {})
    gmap = GradientMap(model, batch)
    shared = make_defense(name.split()[0], **settings)(gmap, generator=Stream.from_seeds(0))
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
        {"evaluation_network": SmallNetwork("text", 8)} if name == PUBLISHED else {}
    )
    before = flat({n: p.detach().clone() for n, p in model.named_parameters()})
    trainer = GradGuardTrainer(
        model,
        GradGuardConfig(
            output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, report_to=[]
        ),
        defense=make_defense(name.split()[0], **settings),
        train_dataset=rows,
    )
    trainer.train()
    after = flat({n: p.detach() for n, p in trainer.model.named_parameters()})
    assert torch.isfinite(after).all()
    assert not torch.equal(before, after.cpu())


def observed(device: str, defense: str = "none", count: int = 1, **settings: Any) -> Observation:
    """A message of `count` rows of a tiny BERT, with labels and the mechanism of its defense."""
    model, batch = make_task("bert", dtype=torch.float64)
    rows = {key: tensor[:count].to(device) for key, tensor in batch.items()}
    protect = make_defense(defense, **settings)
    message = protect(GradientMap(model.to(device), rows), generator=Stream.from_seeds(0))
    return Observation(
        model, dict(message), tuple(rows["input_ids"].shape), labels=rows["labels"],
        attention_mask=rows["attention_mask"], tokenizer=TOKENIZER,
        mechanism=protect.mechanism(message),
    )  # fmt: skip


LAWS: dict[str, dict[str, Any]] = {
    "none": {},
    "gaussian_noise": {"relative_scale": 1.0},
    "laplace_noise": {"relative_scale": 1.0},
    "optimal_noise": {"relative_scale": 1.0},
    "dp_sgd": {"per_sample": True, "clip": 1.0, "noise_multiplier": 0.1},
    "pruning": {"ratio": 0.5},
    "optimal_pruning": {"ratio": 0.5, "error_feedback": True, "min_batches": 1},
    "quantization": {"bits": 2},
}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", LAWS)
def test_candidates_are_ranked_as_on_the_cpu(name: str, count: int) -> None:
    """Of one and the same message."""
    seen = observed("cpu", name, count, **LAWS[name])
    attack = make_attack("candidates", candidates=TEXTS, labels=[0, 1, 2, 0])
    here = attack(seen)
    there = attack(everywhere(seen))
    torch.testing.assert_close(there.scores.cpu(), here.scores, rtol=1e-6, atol=1e-6)
    assert torch.equal(there.ranking.cpu(), here.ranking)


def everywhere(seen: Observation) -> Observation:
    """The same, there."""
    moved = {
        field.name: there(getattr(seen, field.name))
        for field in dataclasses.fields(seen)
        if field.name != "mechanism"
    }
    mechanism = seen.mechanism
    if mechanism is not None:
        moved["mechanism"] = dataclasses.replace(
            mechanism,
            **{f.name: there(getattr(mechanism, f.name)) for f in dataclasses.fields(mechanism)},
        )
    return Observation(**moved)


def there(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(DEVICE)
    if isinstance(value, nn.Module):
        return copy.deepcopy(value).to(DEVICE)
    if isinstance(value, Mapping):
        return {key: there(one) for key, one in value.items()}
    return value


@pytest.mark.parametrize("name", ["span", "embedding_rows", "analytic"])
def test_closed_form_attacks_read_the_same(name: str) -> None:
    model, batch = make_task("vit" if name == "analytic" else "bert")
    rows = {key: tensor[:1] for key, tensor in batch.items()}
    gmap = GradientMap(model, rows, share_input_embeddings=name == "embedding_rows")
    shape = tuple(rows["pixel_values" if name == "analytic" else "input_ids"].shape)
    seen = Observation(model, gmap.gradient(), shape, tokenizer=TOKENIZER)
    here, away = make_attack(name)(seen), make_attack(name)(everywhere(seen))
    assert here.token_ids == away.token_ids
    if here.input is not None:
        assert away.input is not None
        assert away.input.device.type == DEVICE
        torch.testing.assert_close(away.input.cpu(), here.input, rtol=1e-5, atol=1e-5)


def test_labels_and_averages_are_those_of_the_cpu() -> None:
    seen = observed("cpu", count=2)
    assert torch.equal(recover_labels(everywhere(seen)).cpu(), recover_labels(seen))
    several = [observed("cpu", "gaussian_noise", relative_scale=0.1 * (1 + k)) for k in range(3)]
    here, away = average(several), average([everywhere(one) for one in several])
    torch.testing.assert_close(flat(dict(away.gradient)).cpu(), flat(dict(here.gradient)))


@pytest.mark.parametrize("name", ["i2f_lower_bound", "dfil_bound", "bayesian_bound", "label_bound"])
def test_named_estimators_are_those_of_the_cpu(name: str) -> None:
    found = []
    for gmap in (GradientMap(*make_task("bert")), GradientMap(*on_device(*make_task("bert")))):
        message = make_defense("gaussian_noise")(gmap, generator=Stream.from_seeds(0))
        estimator = make_estimator(name, gmap)
        found.append(estimator(message, Stream.from_seeds(1)).cpu())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("defense", ["none", "gaussian_noise", "pruning", "quantization", "dp_sgd"])
@pytest.mark.parametrize("how", [{"fp16": True}, {"torch_compile": True}], ids=["fp16", "compiled"])
def test_engines_train_as_they_do_without(
    defense: str, how: dict[str, Any], tmp_path: Path
) -> None:
    """As closely as rounding lets: fp16 has eleven bits, and compiled kernels add up otherwise."""
    trained = []
    for engine in ({}, how):
        model, batch = make_task("bert", dtype=torch.float32)
        rows = [{key: tensor[k % 2] for key, tensor in batch.items()} for k in range(6)]
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        args = GradGuardConfig(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, report_to=[],
            learning_rate=1e-3, optim="sgd", noise_seed=1, defense=defense, save_strategy="no",
            defense_kwargs={"clip": 0.1, "scale": 0.01} if defense == "dp_sgd" else {}, **engine,
        )  # fmt: skip
        trainer = GradGuardTrainer(model, args, train_dataset=rows)
        trainer.train()
        if engine == {"fp16": True}:
            assert trainer.accelerator.scaler.get_scale() <= 65536
        trained.append(flat({n: p.detach().cpu() for n, p in trainer.model.named_parameters()}))
    assert torch.isfinite(trained[1]).all()
    assert (trained[1] - trained[0]).norm() < 0.01 * trained[0].norm()


STEP_RATIOS = {"none": 1.5, "gaussian_noise": 5.0, "optimal_noise": 5.0, "pruning": 5.0}


@pytest.mark.parametrize("defense", STEP_RATIOS)
def test_a_step_costs_little_more_than_stock_s(defense: str) -> None:
    """Of a six-layer BERT, AdamW included. What ran on the CPU would take tens of times as long."""
    model, _ = make_task("bert", dtype=torch.float32)
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12}
    config = type(model.config)(vocab_size=1000, intermediate_size=1536, num_labels=2, **sizes)
    torch.manual_seed(0)
    model = type(model)(config).to(DEVICE).train()
    ids = torch.randint(1000, (16, 64), device=DEVICE)
    batch = {"input_ids": ids, "labels": torch.arange(16, device=DEVICE) % 2}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    made, stream = make_defense(defense), Stream()

    def step(protects: bool) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        if protects:
            gmap = GradientMap(model, batch, second_order=False)
            for name, tensor in made(gmap, generator=stream).items():
                gmap.parameters[name].grad = tensor
        else:
            model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    for protects in (True, False) * 3:  # trials, and the first averages
        step(protects)
    ratios = [step(True) / step(False) for _ in range(21)]
    assert sorted(ratios)[10] < STEP_RATIOS[defense]
