"""One row more moves a clipped sum by its own clipped gradient, in every arithmetic: by C, and what
noise is made larger for.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import make_task
from torch import Tensor, nn

from hf_gradguard.gradient_map import GradientMap
from hf_gradguard.gradient_map.layers import (
    ROW_ROUNDING,
    Contribution,
    LayerContribution,
    Listener,
    TableContribution,
    WrittenContribution,
    layers_of,
)
from hf_gradguard.gradient_map.parameters import cache_of
from hf_gradguard.gradient_map.per_sample import clipping
from hf_gradguard.gradient_map.per_sample.clipping import SampleMap, clipped_sum
from hf_gradguard.training.privacy.private_rows import rounding_of_rows

CLIP, WIDTH = 1.0, 8
SIZES = [1, 2, 3, 7, 15, 16, 31, 63, 100, 127, 255, 511, 1020]


class Head(nn.Module):
    """A head of zeros on given features: rows that are alike all point in one direction, where
    what is rounded adds up the most.
    """

    def __init__(self, dtype: torch.dtype, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 2, dtype=dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.dtype, self.autocast = dtype, autocast

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Any:
        with torch.autocast("cpu", self.autocast, enabled=self.autocast is not None):
            logits = self.head(pixel_values.flatten(1).to(self.dtype))
            return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels))


def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    total: Tensor = model(**batch).loss
    return total


def clipped(model: nn.Module, batch: dict[str, Tensor], clip: float = CLIP) -> Tensor:
    gmap = GradientMap(model, batch, loss_fn=loss, second_order=False, needs_input=False)
    return torch.cat([t.flatten().double() for t in clipped_sum(gmap, clip).total.values()])


ARITHMETICS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "float32": (torch.float32, None),
    "bfloat16 autocast": (torch.float32, torch.bfloat16),
    "float16 autocast": (torch.float32, torch.float16),
    "bfloat16 weights": (torch.bfloat16, None),
    "float16 weights": (torch.float16, None),
}


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("length", [0.8, 0.99, 1.3])
def test_one_row_more_moves_the_sum_by_no_more_than_is_counted(
    arithmetic: str, length: float
) -> None:
    """By 5.6 C under autocast where slopes of the mean were rounded, and multiplied afterwards."""
    model = Head(*ARITHMETICS[arithmetic])
    row = torch.randn(1, WIDTH, 1, 1, generator=torch.Generator().manual_seed(1))
    row *= (2 * length**2 - 1) ** 0.5 / row.norm()  # slopes of one half, two classes, a bias
    for size in SIZES:
        before, after = (
            clipped(model, {"pixel_values": row.expand(count, -1, -1, -1),
                            "labels": torch.ones(count, dtype=torch.long)})
            for count in (size, size + 1)
        )  # fmt: skip
        moved = float((after - before).norm()) / CLIP
        assert moved <= 1 + rounding_of_rows(size), (size, moved)


BIASED = 1.3287200927734375
"""Whose multiples, up to 384 times, float32 rounds in one direction more often than in another."""


@pytest.mark.parametrize("size", [15, 31, 64, 95, 383, 384, 767, 768, 1019, 1020])
def test_a_sum_is_not_cut_otherwise_for_one_row_more(size: int) -> None:
    """Kernels cut a sum of 385 rows in two, and rows that are alike err alike: by 0.002 C."""
    model = Head(torch.float32, None)
    row = torch.full((1, WIDTH, 1, 1), 2 * BIASED)
    clip = BIASED * (2 * (WIDTH + 1 / (2 * BIASED) ** 2)) ** 0.5
    before, after = (
        clipped(model, {"pixel_values": row.expand(count, -1, -1, -1),
                        "labels": torch.ones(count, dtype=torch.long)}, clip)
        for count in (size, size + 1)
    )  # fmt: skip
    moved = float((after - before).norm()) / clip
    assert abs(moved - 1) <= 16 * 2.0**-24 * (size + 1)


def contribution_of(kind: str, rows: int) -> Contribution:
    """Of rows that each add `BIASED` to some parameters."""
    flat = torch.full((rows, 1, 3), BIASED)
    if kind == "table":
        ids = torch.zeros(rows, 1, dtype=torch.long)
        return TableContribution("weight", torch.zeros(2, 3), ids, flat)
    if kind == "written":
        return WrittenContribution(lambda: ({"weight": some} for some in flat.split(3)))
    module: Any = {
        "linear": nn.Linear(2, 3),
        "norm": nn.LayerNorm(3),
        "conv": nn.Conv2d(2, 3, 1),
    }[kind]
    layer = layers_of(module, dict(module.named_parameters()))[""]
    features = flat / BIASED if kind == "norm" else torch.ones(rows, 1, 2)
    if kind == "conv":
        flat, features = flat.mT[..., None], features.mT[..., None]
    return LayerContribution(layer, [(flat, features)])


@pytest.mark.parametrize("kind", ["linear", "norm", "conv", "table", "written"])
def test_rows_are_added_up_to_a_few_roundings_a_row(kind: str) -> None:
    """Of all kinds of parameters, however many rows there are."""
    for rows in (1, 31, 64, 65, 384, 1021):
        factors = torch.ones(rows, dtype=torch.float64)
        for name, total in contribution_of(kind, rows).weighted_sum(factors).items():
            added = total[:1] if kind == "table" else total
            off = (added.double() / BIASED - rows).abs().max()
            assert total.dtype == torch.float32
            assert float(off) <= 16 * 2.0**-24 * rows, (name, rows)


def task(dtype: torch.dtype, name: str = "bert") -> tuple[nn.Module, dict[str, Tensor]]:
    model, batch = make_task(name, batch_size=6, dtype=torch.float32)
    if "attention_mask" in batch:
        for row, length in enumerate([3, 5, 4, 2, 5, 3]):
            batch["attention_mask"][row, length:] = 0
        batch["input_ids"] *= batch["attention_mask"]  # as a tokenizer pads
        model.config.pad_token_id = 0
    batch = {n: e.to(dtype) if e.is_floating_point() else e for n, e in batch.items()}
    return model.to(dtype), batch


@pytest.mark.parametrize("name", ["bert", "llama", "vit"])
def test_a_row_adds_the_same_whatever_stands_beside_it(name: str) -> None:
    """In half precision: whether others are there, how many, and how long they are."""
    model, batch = task(torch.bfloat16, name)
    clipped(model, batch)  # tries the model out
    alone = [clipped(model, {n: e[[row]] for n, e in batch.items()}) for row in range(6)]
    for rows in itertools.chain(itertools.combinations(range(6), 2), [(1, 2, 3), tuple(range(6))]):
        total = clipped(model, {n: e[list(rows)] for n, e in batch.items()})
        expected = torch.stack([alone[row] for row in rows]).sum(0)
        # sums are rounded to float32 here; one bit of a bfloat16 is 2^-9
        assert float((total - expected).norm()) <= 1e-6 * float(expected.norm())


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Which rows were differentiated by themselves."""
    rows: list[int] = []
    row_gradient = clipping._row_gradient

    def counted(gmap: GradientMap, row: int, samples: int) -> Any:
        rows.append(row)
        return row_gradient(gmap, row, samples)

    monkeypatch.setattr(clipping, "_row_gradient", counted)
    return rows


@pytest.mark.parametrize("setting", ["weights", "autocast", "matmul", "backend"])
def test_half_precision_is_found(setting: str, passes: list[int]) -> None:
    """Wherever it is asked for, rows are differentiated one by one."""
    model, batch = task(torch.bfloat16 if setting == "weights" else torch.float32)
    gmap = GradientMap(model, batch, second_order=False)
    inside = torch.autocast("cpu", torch.bfloat16, enabled=setting == "autocast")
    try:
        if setting == "matmul":
            torch.set_float32_matmul_precision("medium")
        if setting == "backend":
            torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        with inside:
            clipped_sum(gmap, CLIP)
        assert passes == list(range(6))
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"
        torch.backends.cuda.matmul.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")


class RoundedSlope(torch.autograd.Function):
    """Computes in half precision on the way back alone."""

    @staticmethod
    def forward(ctx: Any, entries: Tensor) -> Tensor:
        return entries.clone()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        return slopes[0].bfloat16().float()


def test_half_precision_of_slopes_is_found() -> None:
    class WithRoundedSlopes(Head):
        def forward(self, pixel_values: Tensor, labels: Tensor) -> Any:
            return super().forward(RoundedSlope.apply(pixel_values * self.head.weight[0]), labels)

    model = WithRoundedSlopes(torch.float32, None)
    nn.init.ones_(model.head.weight)
    clipped(model, {"pixel_values": torch.rand(4, WIDTH), "labels": torch.zeros(4).long()})
    (plan,) = cache_of(model).sample_plans.values()
    assert "half precision" in plan.reason


def test_half_precision_that_begins_later_is_found() -> None:
    """A model that was tried out in float32 is not taken for one afterwards."""
    model, batch = task(torch.float32)
    clipped_sum(GradientMap(model, batch, second_order=False), CLIP)
    model.bfloat16()
    gmap = SampleMap(model, batch, second_order=False, needs_input=False)
    assert gmap.contributions is None
    total = clipped_sum(gmap, CLIP).total
    alone = [
        clipped_sum(GradientMap(model, {n: e[[row]] for n, e in batch.items()},
                                second_order=False), CLIP).total
        for row in range(6)
    ]  # fmt: skip
    for name, tensor in total.items():
        expected = torch.stack([one[name].double() for one in alone]).sum(0)
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-5, atol=1e-9)


def test_slopes_are_those_of_the_sum() -> None:
    """To the bit, for as many rows as one likes: none is divided by their number."""
    model = Head(torch.float32, None)
    rows = torch.randn(64, WIDTH, 1, 1, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(64) % 2
    found = []
    for count in (40, 41, 47, 55, 61, 64):
        batch = {"pixel_values": rows[:count], "labels": labels[:count]}
        listener = Listener(model, dict(model.named_parameters()), batch, count)
        with listener.listening():
            mean = loss(model, batch)
        ((slopes, _),) = listener.contributions(mean, float(count))["head"].rows  # type: ignore[attr-defined]
        found.append(slopes[:40])
    assert all(torch.equal(slopes, found[0]) for slopes in found)
    assert not torch.equal(found[0], torch.zeros_like(found[0]))


class Sharp(nn.Module):
    """Layers whose products of large numbers nearly cancel, so that last bits decide."""

    def __init__(self, sharpness: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(64, 32), nn.Linear(32, 3)
        rows = torch.randn(6, 64, dtype=torch.float64)
        weight = self.body.weight.detach().double()
        seen = rows @ weight.T @ weight.T.pinverse()
        self.rows = (sharpness * (rows - seen) + seen).float()

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.body(pixel_values.flatten(1)).tanh())
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels))


@pytest.mark.parametrize(("sharpness", "is_apart"), [(1.0, True), (1000.0, False)])
def test_a_model_that_makes_much_of_last_bits_takes_a_pass_a_row(
    sharpness: float, is_apart: bool, passes: list[int]
) -> None:
    """There a row's gradient follows from how many rows stand beside it, by 0.1 % and more."""
    model = Sharp(sharpness)
    batch = {"pixel_values": model.rows[..., None, None], "labels": torch.arange(6) % 3}
    total = clipped(model, batch)
    assert passes == ([] if is_apart else list(range(6)))
    alone = [clipped(model, {n: e[[row]] for n, e in batch.items()}) for row in range(6)]
    assert float((total - torch.stack(alone).sum(0)).norm()) <= ROW_ROUNDING * 6 * CLIP


def test_what_a_model_may_make_of_last_bits_follows_the_clipping_bound() -> None:
    """A row that is learned has a gradient of rounding alone. It is far below the bound."""
    model = Head(torch.float32, None)
    nn.init.constant_(model.head.weight, 4.0)
    model.head.weight.data[0] *= -1
    rows = torch.rand(6, WIDTH, 1, 1, generator=torch.Generator().manual_seed(0)) * 0.1 + 0.18
    batch = {"pixel_values": rows, "labels": torch.ones(6, dtype=torch.long)}
    clipped(model, batch)
    (plan,) = cache_of(model).sample_plans.values()
    assert not plan.reason


def test_rows_that_coarse_products_round_are_not_taken_for_coupled() -> None:
    """A batch's gradient is off the mean of its rows' by more than float32 would be."""
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, 2, 1)
    body = [first, nn.GroupNorm(4, 16), nn.ReLU(), second, nn.GroupNorm(4, 16), nn.ReLU()]
    model = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2))

    def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch["pixel_values"]), batch["labels"])

    batch = {"pixel_values": torch.randn(4, 3, 8, 8), "labels": torch.ones(4, dtype=torch.long)}
    gmap = GradientMap(model, batch, loss_fn=loss_of, second_order=False, needs_input=False)
    try:
        torch.set_float32_matmul_precision("medium")
        total, norms = clipped_sum(gmap, CLIP)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"
        torch.backends.cuda.matmul.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")
    assert len(norms) == 4
    assert all(bool(tensor.isfinite().all()) for tensor in total.values())


@pytest.mark.parametrize(("kind", "tokens"), [("linear", 64), ("linear", 1024), ("norm", 64),
                                              ("conv", 1024), ("table", 64)])  # fmt: skip
def test_a_row_whose_tokens_cancel_adds_no_more_than_its_norm(kind: str, tokens: int) -> None:
    """What is left of such a gradient is rounding, and another one in each order of the sum."""
    draws = torch.Generator().manual_seed(0)
    slopes = torch.randn(16, tokens, 8, generator=draws)
    for _ in range(3):
        slopes = (slopes.double() - slopes.double().mean(1, keepdim=True)).float()
    features = torch.randn(16, 1, 8, generator=draws).expand(-1, tokens, -1).contiguous()
    if kind == "table":
        ids = torch.zeros(16, tokens, dtype=torch.long)
        contribution: Contribution = TableContribution("weight", torch.zeros(2, 8), ids, slopes)
    else:
        module: Any = {
            "linear": nn.Linear(8, 8), "norm": nn.LayerNorm(8), "conv": nn.Conv2d(8, 8, 1)
        }[kind]  # fmt: skip
        if kind == "conv":
            slopes, features = (
                entry.mT.reshape(16, 8, 32, tokens // 32) for entry in (slopes, features)
            )
        layer = layers_of(module, dict(module.named_parameters()))[""]
        contribution = LayerContribution(layer, [(slopes, features)])
    norms = contribution.squared_norms().sqrt()
    for row in range(16):
        factors = torch.zeros(16, dtype=torch.float64)
        factors[row] = 1 / norms[row]
        added = torch.cat(
            [tensor.flatten() for tensor in contribution.weighted_sum(factors).values()]
        )
        assert float(added.double().norm()) <= 1 + ROW_ROUNDING
