"""Pruning: exact counts, and the least leakage at a given utility against dense Jacobians."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
import torch
from helpers import exact_map, flat, rng, split_like, torch_rng
from torch import Tensor

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.defenses.pruning import largest

MODELS = ("bert", "gpt2", "vit")
NAMES = ("pruning", "optimal_pruning")


def map_with(gradient: Tensor, sensitivity: Tensor | None = None) -> GradientMap:
    """A map with a gradient and sensitivities of one's own choice, in two tensors."""
    gmap = exact_map("bert")
    like = {"first": torch.zeros(3, 2), "second": torch.zeros(len(gradient) - 6)}
    gmap.parameters = {n: torch.nn.Parameter(t) for n, t in like.items()}
    gmap._gradient = split_like(gradient, like)
    squares = split_like(
        (torch.ones_like(gradient) if sensitivity is None else sensitivity).square(), like
    )
    gmap.squared_sensitivity = lambda *_, **__: squares
    return gmap


def pruned(name: str, gmap: GradientMap, **settings: Any) -> Tensor:
    """What is shared; of optimal pruning as it was published."""
    own = {"shape": "own", "num_probes": 10} if name == "optimal_pruning" else {}
    return flat(make_defense(name, **own, **settings)(gmap, rng()))


def ratios(gmap: GradientMap) -> Tensor:
    """s_i/|g_i|, infinite where g_i = 0."""
    s, g = flat(gmap.squared_sensitivity()).sqrt(), flat(gmap.gradient()).abs()
    return torch.where(g > 0, s / g, torch.inf)


# -------------------------------------------------------------------------------------------- ratio


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("ratio", [0.001, 0.1, 0.29, 0.5, 0.9, 0.999])
def test_exactly_the_share_is_zeroed(name: str, model: str, ratio: float) -> None:
    gmap = exact_map(model)
    gradient = flat(gmap.gradient())
    zeros = int((gradient == 0).sum())  # position embeddings beyond the batch's length
    assert zeros < 0.05 * len(gradient)
    shared = pruned(name, gmap, ratio=ratio)
    kept = shared != 0
    assert (~kept).sum() == max(int(Decimal(str(ratio)) * len(gradient)), zeros)
    assert torch.equal(shared[kept], gradient[kept])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [10, 100, 1000])
def test_decimal_ratios(name: str, size: int) -> None:
    """0.29 · 100 is 28.999… in binary. Compared with exact fractions, for all ratios of two
    digits.
    """
    gmap = map_with(torch.linspace(1, 2, size, dtype=torch.float64))
    for percent in range(100):
        shared = pruned(name, gmap, ratio=percent / 100)
        assert (shared == 0).sum() == Fraction(percent, 100) * size // 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ratio", [0.9999999999999999, 1 - 2**-53])
def test_ratio_just_below_one_keeps_one(name: str, ratio: float) -> None:
    assert ratio < 1
    gradient = torch.linspace(1, 2, 50, dtype=torch.float64)
    shared = pruned(name, map_with(gradient), ratio=ratio)
    assert shared.count_nonzero() == 1
    assert shared[-1] == 2  # the largest |g| and the smallest s/|g|


@pytest.mark.parametrize("name", NAMES)
def test_ties_are_broken_by_position(name: str) -> None:
    gradient = torch.full((40,), -3.0, dtype=torch.float64)
    shared = pruned(name, map_with(gradient), ratio=0.3)
    assert not shared[:12].any()
    assert (shared[12:] == -3).all()


@pytest.mark.parametrize("name", NAMES)
def test_ties_beside_others(name: str) -> None:
    """Three smaller than the tie and some of the tie's: the first ones."""
    gradient = torch.full((20,), 5.0, dtype=torch.float64)
    gradient[[4, 11, 19]] = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    gradient[[0, 7]] = -9
    shared = pruned(name, map_with(gradient), ratio=0.35)
    assert (shared == 0).nonzero().flatten().tolist() == [1, 2, 3, 4, 5, 11, 19]


@pytest.mark.parametrize("name", NAMES)
def test_zeros_go_first(name: str) -> None:
    """Also where they leak nothing: pruning them changes nothing."""
    gradient = torch.linspace(1, 2, 20, dtype=torch.float64)
    gradient[5:9] = 0
    sensitivity = torch.ones_like(gradient)
    sensitivity[5:7] = 0
    shared = pruned(name, map_with(gradient, sensitivity), ratio=0.2)
    assert torch.equal(shared, gradient)
    assert (pruned(name, map_with(gradient, sensitivity), ratio=0.25) == 0).sum() == 5


def test_pruning_keeps_the_largest() -> None:
    gmap = exact_map("bert")
    gradient = flat(gmap.gradient())
    shared = pruned("pruning", gmap, ratio=0.7)
    kept = shared != 0
    assert gradient[kept].abs().min() > gradient[~kept].abs().max()


def test_optimal_pruning_prunes_the_largest_ratio() -> None:
    gmap = exact_map("bert")
    k = ratios(gmap)
    kept = pruned("optimal_pruning", gmap, ratio=0.7) != 0
    assert k[kept].max() < k[~kept].min()


def test_layers_go_as_a_whole() -> None:
    """All coordinates of a tensor rank alike, so at most one tensor is pruned in part, from its
    beginning.
    """
    gmap = exact_map("bert")
    squares, gradient = gmap.squared_sensitivity(), gmap.gradient()
    shared = make_defense("optimal_pruning", ratio=0.7, granularity="layer", shape="own")(
        gmap, rng()
    )
    k = {n: float(squares[n].sum().sqrt() / gradient[n].norm()) for n in gradient}
    whole = {n for n, t in shared.items() if not t.any()}
    kept = {n for n, t in shared.items() if torch.equal(t, gradient[n])}
    partial = set(shared) - whole - kept
    assert len(partial) <= 1
    assert len(whole) > 3
    assert len(kept) > 3
    assert min(k[n] for n in whole) > max(k[n] for n in kept)
    for n in partial:
        count = int((shared[n] == 0).sum())
        assert gradient[n].all()
        assert not shared[n].flatten()[:count].any()
    assert (flat(shared) == 0).sum() == int(Decimal("0.7") * len(flat(gradient)))


# --------------------------------------------------------------------------------- the selection,
# against a sort


def selected(worth: Tensor, wanted: float, weight: Tensor) -> Tensor:
    """What `largest` returns, from a stable sort: the last ones first among equals."""
    order = worth.flip(0).argsort(descending=True, stable=True)
    before = weight.flip(0)[order].cumsum(0) - weight.flip(0)[order]
    mask = torch.zeros(len(worth), dtype=torch.bool)
    mask[(len(worth) - 1 - order)[before < wanted]] = True
    return mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["spread", "close", "ties", "zeros and infinities"])
def test_selection_equals_a_sorts(dtype: torch.dtype, kind: str) -> None:
    worth = {
        "spread": torch.randn(5000, generator=torch_rng(), dtype=dtype).mul(20).exp(),
        "close": 1 + 1e-6 * torch.rand(5000, generator=torch_rng(), dtype=dtype),
        "ties": torch.randint(0, 7, (5000,), generator=torch_rng()).to(dtype),
        "zeros and infinities": torch.randint(-1, 4, (5000,), generator=torch_rng())
        .to(dtype)
        .clamp(min=0)
        .reciprocal(),
    }[kind]
    weight = torch.randint(
        0, 9, (5000,), generator=torch_rng(6)
    ).double()  # whole numbers, so that sums are exact
    for amount in (1, 2, 17, 2500, 4999, 5000):
        assert torch.equal(largest(worth, amount), selected(worth, amount, torch.ones(5000)))
        share = amount / 5000
        assert torch.equal(
            largest(worth, share, weight), selected(worth, share * float(weight.sum()), weight)
        )


# --------------------------------------------------------------------------------------------------
# utility


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("utility", [1e-6, 0.1, 0.5, 0.9, 0.999])
def test_utility_is_reached_by_the_shortest_prefix(name: str, model: str, utility: float) -> None:
    gmap = exact_map(model)
    gradient = flat(gmap.gradient())
    rank = -gradient.abs() if name == "pruning" else ratios(gmap)
    shared = pruned(name, gmap, utility=utility)
    kept = shared != 0
    assert torch.equal(shared[kept], gradient[kept])
    assert rank[kept].max() < rank[~kept].min()
    wanted = utility * gradient.square().sum()
    assert gradient[kept].square().sum() >= wanted * (1 - 1e-12)  # sums in another order
    last = rank.masked_fill(~kept, -torch.inf).argmax()
    assert gradient[kept].square().sum() - gradient[last].square() < wanted


@pytest.mark.parametrize("name", NAMES)
def test_utility_of_one_keeps_the_norm(name: str) -> None:
    gmap = exact_map("bert")
    gradient = flat(gmap.gradient())
    shared = pruned(name, gmap, utility=1)
    torch.testing.assert_close(shared, gradient, rtol=0, atol=1e-8 * float(gradient.norm()))
    assert (shared != 0).double().mean() > 0.9  # all but zeros up to rounding


# ---------------------------------------------------------------------------------------------- the
# theorem


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("settings", [{"ratio": 0.3}, {"ratio": 0.9}, {"utility": 0.5}])
def test_no_set_of_equal_utility_leaks_less(model: str, settings: dict[str, float]) -> None:
    """Among 1,000 random sets, each grown until its Σ g² is at least as large as that of what is
    shared.

    They are prefixes of orders between the optimal one, disturbed ever more, and one at random.
    """
    gmap = exact_map(model)
    g, s = flat(gmap.gradient()).double(), flat(gmap.squared_sensitivity()).sqrt()
    kept = pruned("optimal_pruning", gmap, **settings) != 0
    utility, leakage = g[kept].square().sum(), s[kept].square().sum()
    order_of = ratios(gmap).log()
    backward = order_of.argsort(descending=True)  # the first version keeps the largest ratios
    reached = g.square()[backward].cumsum(0) >= utility
    assert s.square()[backward].cumsum(0)[reached][0] > 1.1 * leakage
    for disturbance in (0.01, 0.1, 0.5, 2.0, 1e6):
        noise = torch.randn(200, len(g), generator=torch_rng(), dtype=g.dtype)
        order = (order_of + disturbance * noise).argsort(1)
        reached = g.square()[order].cumsum(1) >= utility
        assert reached[:, -1].all()
        first = reached.int().argmax(1, keepdim=True)
        leaks = s.square()[order].cumsum(1).gather(1, first)
        assert (leaks >= leakage * (1 - 1e-12)).all()  # equal where the set is the same
        assert disturbance < 0.1 or (leaks > leakage).all()


@pytest.mark.parametrize("model", MODELS)
def test_optimal_pruning_leaks_less_than_pruning_at_the_same_utility(model: str) -> None:
    gmap = exact_map(model)
    g, s = flat(gmap.gradient()), flat(gmap.squared_sensitivity()).sqrt()
    small = pruned("pruning", gmap, ratio=0.8) != 0
    utility = float(g[small].square().sum() / g.square().sum())
    optimal = pruned("optimal_pruning", gmap, utility=utility) != 0
    assert s[optimal].square().sum() < s[small].square().sum()
