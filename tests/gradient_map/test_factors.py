"""Linear layers' gradients in factors, against the same gradients written out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import TASKS, make_task, torch_rng
from torch import Tensor, nn

from hf_gradguard import GradientMap
from hf_gradguard.attacks.matching.objectives import (
    TagDistance,
    cosine_distance,
    squared_distance,
)
from hf_gradguard.gradient_map.vectorized import Factors, linear_layers

OBJECTIVES = [squared_distance, cosine_distance, TagDistance(0.1)]
NAMES = ["squared", "cosine", "tag"]


def dense(gradient: Any) -> dict[str, Tensor]:
    return {name: g.dense() if isinstance(g, Factors) else g for name, g in gradient.items()}


def in_full(objective: Any) -> Any:
    """The objective in plain tensor operations, of gradients written out."""

    def value(gradient: Any, shared: dict[str, Tensor]) -> Tensor:
        assert not any(isinstance(g, Factors) for g in gradient.values())
        return objective(gradient, shared)

    return value


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("count", [1, 3])
def test_factors_are_the_gradient(task: str, count: int) -> None:
    model, batch = make_task(task, dropout=0.2)
    model.train()
    gmap = GradientMap(model, batch)
    xs = gmap.input + 0.1 * torch.randn(
        count, *gmap.input.shape, generator=torch_rng(), dtype=torch.float64
    )
    extras = {
        n: torch.randn(count, *p.shape, generator=torch_rng(), dtype=torch.float64)
        for n, p in gmap.parameters.items()
    }
    kinds: set[type] = set()

    def value(gradient: Any, extras: dict[str, Tensor]) -> Tensor:
        kinds.update(type(g) for g in gradient.values())
        return torch.stack(
            [(g - extras[name]).square().sum() for name, g in dense(gradient).items()]
        ).sum()

    expected = gmap.slopes_at(value, xs, extras)
    assert Factors not in kinds
    found = gmap.slopes_at(value, xs, extras, factored=True)
    assert Factors in kinds
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("task", "count", "cached"),
    [
        *((task, count, 2**18) for task in ("bert", "gpt2", "vit") for count in (1, 3)),
        ("bert", 3, 1), ("bert", 3, 100),
    ],
)  # fmt: skip
@pytest.mark.parametrize("objective", OBJECTIVES, ids=NAMES)
def test_objectives_are_the_same_in_factors(
    task: str, count: int, objective: Any, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_gradguard.attacks.matching.objectives._CACHED", cached)
    gmap = GradientMap(*make_task(task))
    xs = gmap.input + 0.1 * torch.randn(
        count, *gmap.input.shape, generator=torch_rng(), dtype=torch.float64
    )
    extras = {
        n: torch.randn(count, *p.shape, generator=torch_rng(), dtype=torch.float64)
        for n, p in gmap.parameters.items()
    }
    expected = gmap.slopes_at(in_full(objective), xs, extras)
    torch.testing.assert_close(gmap.slopes_at(objective, xs, extras, factored=True), expected)


def test_squared_norm_is_that_of_the_matrix() -> None:
    factors = Factors(
        torch.randn(4, 5, generator=torch_rng()), torch.randn(4, 7, generator=torch_rng())
    )
    torch.testing.assert_close(factors.squared_norm(), factors.dense().square().sum())
    torch.testing.assert_close((factors * torch.tensor(3.0)).dense(), 3 * factors.dense())


class Twice(nn.Module):
    """One linear layer run twice, one whose weight another module holds too, and one that only
    lends its weight.
    """

    def __init__(self) -> None:
        super().__init__()
        self.repeated, self.tied, self.other, self.lent = (nn.Linear(4, 4) for _ in range(4))
        self.other.weight = self.tied.weight
        self.config = None

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Any:
        hidden = self.repeated(torch.tanh(self.repeated(pixel_values.flatten(1))))
        hidden = torch.tanh(self.other(torch.tanh(self.tied(hidden))))
        logits = nn.functional.linear(hidden, self.lent.weight)
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels), get=None)


@pytest.mark.parametrize("count", [1, 2])
def test_weights_that_are_used_in_other_ways(count: int) -> None:
    torch.manual_seed(0)
    model = Twice().double()
    batch = {
        "pixel_values": torch.rand(2, 1, 2, 2, dtype=torch.float64),
        "labels": torch.tensor([1, 3]),
    }
    gmap = GradientMap(model, batch, loss_fn=lambda model, batch: model(**batch).loss)
    assert set(linear_layers(model, gmap.parameters)) == {"repeated.weight", "lent.weight"}
    xs = torch.rand(count, *gmap.input.shape, generator=torch_rng(), dtype=torch.float64)
    extras = {
        name: torch.zeros(count, *p.shape, dtype=torch.float64)
        for name, p in gmap.parameters.items()
    }
    kinds: dict[str, type] = {}

    def value(gradient: Any, extras: dict[str, Tensor]) -> Tensor:
        kinds.update({name: type(g) for name, g in gradient.items()})
        return torch.stack(
            [(g - extras[name]).square().sum() for name, g in dense(gradient).items()]
        ).sum()

    found = gmap.slopes_at(value, xs, extras, factored=True)
    assert [name for name, kind in kinds.items() if kind is Factors] == ["repeated.weight"]
    torch.testing.assert_close(found, gmap.slopes_at(value, xs, extras))
