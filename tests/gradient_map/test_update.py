"""The change of weights of local training, against plain loops and dense Jacobians."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import (
    LABELS,
    VOCABULARY,
    flat,
    make_task,
    reference_gradient,
    reference_input,
    rng,
    split_like,
    torch_rng,
)
from torch import Tensor

from hf_gradguard.gradient_map import GradientMap, UpdateMap
from hf_gradguard.gradient_map.local_training.batches import Pieces
from hf_gradguard.gradient_map.local_training.optimizers import make_optimizer
from hf_gradguard.gradient_map.local_training.update import MeanGradientMap
from hf_gradguard.gradient_map.sensitivity import TOLERANCE, plan_of

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("sgd", {}),
    "momentum": ("sgd", {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.2}),
    "nesterov": ("sgd", {"momentum": 0.8, "nesterov": True}),
    "adamw": ("adamw", {"weight_decay": 0.1, "eps": 1e-6}),
}
TORCH = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


def batches(count: int, name: str = "bert") -> list[dict[str, Tensor]]:
    """Of different content, and of different lengths where they are texts."""
    made = []
    for number in range(count):
        _, batch = make_task(name)
        generator = torch.Generator().manual_seed(number)
        if "input_ids" in batch:
            length = 5 - number % 2
            ids = torch.randint(1, VOCABULARY, (2, length), generator=generator)
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        else:
            batch["pixel_values"] = torch.rand(
                batch["pixel_values"].shape, generator=generator, dtype=torch.float64
            )
        batch["labels"] = torch.randint(LABELS, (2,), generator=generator)
        made.append(batch)
    return made


def plain_loop(
    model: torch.nn.Module,
    order: list[dict[str, Tensor]],
    optimizer: str,
    settings: dict[str, Any],
    rates: list[float],
    names: Any,
) -> dict[str, Tensor]:
    """Ordinary training with an optimizer of torch; returns what it changed."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trained = dict(model.named_parameters())
    steps = TORCH[optimizer]([trained[name] for name in names], lr=rates[0], **settings)
    for batch, rate in zip(order, rates, strict=True):
        steps.param_groups[0]["lr"] = rate
        steps.zero_grad()
        model(**batch).loss.backward()
        steps.step()
    return {name: trained[name].detach() - before[name] for name in names}


@pytest.mark.parametrize("name", ["bert", "gpt2_lm", "bert_lora", "vit"])
def test_one_step_is_the_gradient(name: str) -> None:
    model, batch = make_task(name)
    gradient = GradientMap(model, batch).gradient()
    update = UpdateMap(model, [batch], learning_rate=0.3).update()
    assert update.keys() == gradient.keys()
    for key, g in gradient.items():
        torch.testing.assert_close(update[key], -0.3 * g)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["bert", "vit"])
def test_four_steps_are_a_plain_loop(name: str, optimizer: str) -> None:
    model, _ = make_task(name)
    kind, settings = OPTIMIZERS[optimizer]
    one, two, three = batches(3, name)
    order, rates = [one, two, three, one], [0.1, 0.2, 0.05, 0.1]
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    found = UpdateMap(
        model, order, learning_rate=rates, optimizer=kind, optimizer_kwargs=settings
    ).update()
    for key, p in model.named_parameters():
        assert torch.equal(p, before[key])
        assert p.grad is None
    expected = plain_loop(model, order, kind, settings, rates, found)
    assert all(flat(some).norm() > 0.01 for some in (expected, found))
    for key, change in expected.items():
        torch.testing.assert_close(found[key], change, rtol=1e-9, atol=1e-11)


def test_dropout_and_statistics_are_those_of_a_plain_loop() -> None:
    """Also the state of the global generator afterwards, and once more at every later call."""
    model, batch = make_task("bert", dropout=0.3)
    model.train()
    torch.manual_seed(3)
    gmap = UpdateMap(model, [batch] * 3, learning_rate=0.1)
    after = torch.get_rng_state()
    again = gmap.gradient_at(gmap.input)
    torch.manual_seed(3)
    expected = plain_loop(model, [batch] * 3, "sgd", {}, [0.1] * 3, gmap.update())
    assert torch.equal(after, torch.get_rng_state())
    for key, change in expected.items():
        torch.testing.assert_close(gmap.update()[key], change, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(again[key], change, rtol=1e-9, atol=1e-12)


def test_shared_embeddings_are_trained_and_the_input_moves_along() -> None:
    model, batch = make_task("bert")
    gmap = UpdateMap(model, [batch] * 3, learning_rate=0.5, share_input_embeddings=True)
    name = "bert.embeddings.word_embeddings.weight"
    again = gmap.gradient_at(gmap.input, create_graph=True)
    expected = plain_loop(model, [batch] * 3, "sgd", {}, [0.5] * 3, gmap.update())
    assert expected[name].any()
    for key, change in expected.items():
        torch.testing.assert_close(gmap.update()[key], change, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(again[key].detach(), change, rtol=1e-9, atol=1e-12)


def reference_update(
    order: list[dict[str, Tensor]], x: Tensor, optimizer: str, settings: dict[str, Any]
) -> Tensor:
    """Three steps written out again, through `inputs_embeds`, with torch's own optimizers in their
    differentiable form for SGD.
    """
    model, _ = make_task("bert", attn_implementation="eager")
    parts, rows = [], 0
    for batch in order[:2]:  # the third step is on the first batch again
        length = batch["input_ids"].shape[1]
        parts.append(x[rows : rows + 2, :length])
        rows += 2
    parts.append(parts[0])
    start = {n: p for n, p in model.named_parameters() if "word_embeddings" not in n}
    weights = {n: p.detach().clone().requires_grad_() for n, p in start.items()}
    first = weights
    velocity: dict[str, Tensor] = {}
    mean = {n: torch.zeros_like(w) for n, w in weights.items()}
    square = {n: torch.zeros_like(w) for n, w in weights.items()}
    for number, (batch, part) in enumerate(zip(order, parts, strict=True), 1):
        entries = {k: v for k, v in batch.items() if k != "input_ids"} | {"inputs_embeds": part}
        loss = torch.func.functional_call(model, weights, (), entries).loss
        slopes = torch.autograd.grad(
            loss, list(weights.values()), create_graph=True, materialize_grads=True
        )
        g = dict(zip(weights, slopes, strict=True))
        if optimizer == "sgd":
            mu = settings.get("momentum", 0.0)
            velocity = {n: mu * velocity[n] + g[n] if velocity else g[n] for n in g}
            weights = {n: weights[n] - 0.1 * velocity[n] for n in g}
        else:
            mean = {n: 0.9 * mean[n] + 0.1 * g[n] for n in g}
            square = {n: 0.999 * square[n] + 0.001 * g[n] ** 2 for n in g}
            weights = {
                n: weights[n] - 0.1 * (mean[n] / (1 - 0.9**number))
                / ((square[n] / (1 - 0.999**number) + 1e-30).sqrt() + settings["eps"])
                for n in g
            }  # fmt: skip
    return torch.cat([(weights[n] - first[n]).reshape(-1) for n in first])


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [("sgd", {"momentum": 0.5}), ("adamw", {"eps": 1e-2, "weight_decay": 0.0})],
)
def test_derivatives_are_those_of_the_dense_jacobian(
    optimizer: str, settings: dict[str, Any]
) -> None:
    model, _ = make_task("bert")
    one, two = batches(2)
    order = [one, two, one]
    gmap = UpdateMap(
        model, order, learning_rate=0.1, optimizer=optimizer, optimizer_kwargs=settings
    )
    x = gmap.input
    assert x.shape == (4, 5, 8)
    some = slice(0, None, 13)  # entries of the update, of every parameter
    dense = torch.autograd.functional.jacobian(
        lambda x: reference_update(order, x, optimizer, settings)[some], x, vectorize=True
    ).flatten(1)
    torch.testing.assert_close(
        flat(gmap.update()), reference_update(order, x, optimizer, settings).detach()
    )
    chosen = torch.zeros_like(flat(gmap.update()))
    chosen[some] = torch.randn(len(dense), generator=torch_rng(), dtype=x.dtype)
    product = (dense.T @ chosen[some]).view_as(x)
    delta = split_like(chosen, gmap.gradient())
    torch.testing.assert_close(gmap.vjp(delta), product, rtol=1e-6, atol=1e-9)
    assert not product[2:, 4].any()  # the second batch is shorter: that is padding
    v = torch.randn(x.shape, generator=torch_rng(), dtype=x.dtype)
    torch.testing.assert_close(flat(gmap.jvp(v))[some], dense @ v.flatten(), rtol=1e-6, atol=1e-9)
    drawn = rng()
    probes = torch.stack([drawn.normal((1, *x.shape), dtype=x.dtype).flatten() for _ in range(2)])
    squares = (probes @ dense.T).square().mean(0)
    found = flat(gmap.squared_sensitivity(2, rng(), method="exact"))
    torch.testing.assert_close(found[some], squares, rtol=1e-6, atol=1e-12)


def test_differences_are_the_derivatives() -> None:
    """The same probes by differences and by derivatives, in float32 and with a small rate."""
    model, _ = make_task("bert", dtype=torch.float32)
    one, two = batches(2)
    gmap = UpdateMap(model, [one, two, one], learning_rate=1e-3)
    plan = plan_of(gmap)
    assert not plan.split_layers
    assert plan.error < TOLERANCE
    near = flat(gmap.squared_sensitivity(3, rng(), method="difference"))
    exact = flat(gmap.squared_sensitivity(3, rng(), method="exact"))
    assert (near - exact).norm() < 0.02 * exact.norm()


def test_slopes_at_go_through_the_steps() -> None:
    model, _ = make_task("bert")
    order = batches(2)
    gmap = MeanGradientMap(model, order, learning_rate=0.1)
    v = torch.randn(gmap.input.shape, generator=torch_rng(), dtype=torch.float64)
    x = gmap.input + 0.3 * v.roll(1, 2)
    wanted = gmap.gradient()
    target = {"w": wanted["classifier.weight"][None]}

    def distance(gradient: Any, extras: Any) -> Tensor:
        return (gradient["classifier.weight"] - extras["w"]).square().sum()

    values, slopes, _ = gmap.slopes_at(distance, x[None], target)
    ends = [
        float(distance(gmap.gradient_at(x + h * v), {"w": target["w"][0]})) for h in (1e-4, -1e-4)
    ]
    assert abs(float((slopes[0] * v).sum()) - (ends[0] - ends[1]) / 2e-4) < 1e-5 * abs(ends[0])
    assert abs(float(values[0]) - sum(ends) / 2) < 1e-4 * ends[0]


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov"])
def test_mean_gradient_of_a_constant_gradient_is_that_gradient(optimizer: str) -> None:
    """What SGD adds up is told apart from its weight decay."""
    kind, settings = OPTIMIZERS[optimizer]
    made = make_optimizer(kind, settings | {"weight_decay": 0.2})
    weight = torch.nn.Parameter(torch.tensor([2.0, -1.0], dtype=torch.float64))
    steps = torch.optim.SGD([weight], lr=0.1, **(settings | {"weight_decay": 0.2}))
    g = torch.tensor([0.3, -0.7], dtype=torch.float64)
    start = weight.detach().clone()
    for _ in range(5):
        weight.grad = g.clone()
        steps.step()
    from hf_gradguard.gradient_map.local_training.update import mean_gradient

    found = mean_gradient(made, [0.1] * 5, {"w": start}, {"w": weight.detach() - start})
    torch.testing.assert_close(found["w"], g)


def test_pieces_come_apart_as_they_were() -> None:
    made = batches(3)
    pieces = Pieces(made)
    whole = pieces.joined()
    assert whole["input_ids"].shape == (6, 5)
    assert whole["attention_mask"].tolist()[2] == [1, 1, 1, 1, 0]
    for one, other in zip(made, pieces.split(whole), strict=True):
        for key, value in one.items():
            assert torch.equal(value, other[key])


def test_refusals_say_why() -> None:
    model, batch = make_task("bert")
    for settings, words in (
        ({"learning_rate": 0.0}, "above 0"),
        ({"learning_rate": [0.1]}, "one for each of 2"),
        ({"learning_rate": 0.1, "optimizer": "lion"}, "sgd and adamw"),
        ({"learning_rate": 0.1, "optimizer_kwargs": {"lr": 1}}, "It has: momentum"),
        ({"learning_rate": 0.1, "optimizer_kwargs": {"momentum": 1.0}}, "below 1"),
    ):
        with pytest.raises(ValueError, match=words):
            UpdateMap(model, [batch, batch], **settings)
    with pytest.raises(ValueError, match="at least one batch"):
        UpdateMap(model, [], learning_rate=0.1)
    short = {"input_ids": batch["input_ids"][:, :3], "labels": batch["labels"]}
    bare = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
    with pytest.raises(ValueError, match="attention_mask"):
        UpdateMap(model, [bare, short], learning_rate=0.1)
    with pytest.raises(ValueError, match="not in all"):
        UpdateMap(model, [batch, short], learning_rate=0.1)


def test_reference_agrees_with_the_other_one() -> None:
    """One step of the loop above is the reference that all maps are held against."""
    model, batch = make_task("bert", attn_implementation="eager")
    x = reference_input("bert", model, batch)
    expected = flat(reference_gradient("bert", model, batch, x))
    gmap = UpdateMap(model, [batch], learning_rate=1.0)
    torch.testing.assert_close(flat(gmap.gradient()), -expected)
