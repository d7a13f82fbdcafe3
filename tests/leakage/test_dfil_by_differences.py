"""dFIL by differences of passes, against dense Jacobians."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from helpers import flat, make_task, rng, small_convolution
from leakage_helpers import dense_case, uneven_variance
from torch import Tensor, nn

from hf_gradguard import GradientMap
from hf_gradguard.gradient_map import by_differences
from hf_gradguard.leakage import dfil


def slow(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.slow)


def draws(gmap: GradientMap, variance: object, seeds: int = 200) -> tuple[Tensor, Tensor]:
    seen = by_differences(gmap)
    assert seen is not None
    found = [dfil(seen, variance, 3, rng(seed)) for seed in range(seeds)]
    return tuple(torch.stack(part) for part in zip(*found, strict=True))  # type: ignore[return-value]


def assert_mean(values: Tensor, exact: Tensor) -> None:
    """Within 4 standard errors, and the half per cent of differences."""
    error = values.std(0) / math.sqrt(len(values))
    assert ((values.mean(0) - exact).abs() <= 4 * error + 0.005 * exact).all()


@pytest.mark.long
@pytest.mark.parametrize("name", ["convolution", *(slow(name) for name in ("bert", "gpt2", "vit"))])
def test_it_is_the_dense_jacobians(name: str) -> None:
    """200 seeds, another variance for every coordinate, no layer left out."""
    gmap, jacobian = dense_case(name)
    squares = (jacobian.square() / flat(uneven_variance(gmap))).sum(1).view(gmap.input.shape)
    seen = present(gmap)
    exact = (squares * seen).flatten(1).sum(1) / seen.flatten(1).sum(1)
    values, errors = draws(gmap, uneven_variance(gmap))
    assert_mean(values, exact)
    # The spread of 200 values has an error of 5 %, that of three probes' errors more. Those are of
    # normal probes; signs' own are smaller where single parameters say much, as in a small model.
    calibrated = errors.square().mean(0).sqrt() / values.std(0)
    assert ((calibrated > 0.7) & (calibrated < 2.5)).all()


def present(gmap: GradientMap) -> Tensor:
    mask = gmap.domain.present(gmap.batch)
    return torch.ones_like(gmap.input) if mask is None else mask[..., None].expand_as(gmap.input)


@pytest.mark.long
def test_noise_between_very_different_sizes() -> None:
    """A thousandth of the coordinates have a thousandth of the others' deviation: most of what is
    said is said there.
    """
    gmap, jacobian = dense_case("bert")
    generator = torch.Generator().manual_seed(0)
    variance = {
        n: torch.where(torch.rand(p.shape, generator=generator) < 1e-3, 1e-6, 1.0).double()
        for n, p in gmap.parameters.items()
    }
    squares = (jacobian.square() / flat(variance)).sum(1).view(gmap.input.shape) * present(gmap)
    exact = squares.flatten(1).sum(1) / present(gmap).flatten(1).sum(1)
    assert_mean(draws(gmap, variance, 50)[0], exact)


@pytest.mark.long
def test_in_float32_and_with_dropout() -> None:
    """Against the exact figure of the same masks, in the unit that models train in."""
    model, batch = make_task("bert", dtype=torch.float32, dropout=0.2)
    model.train()
    gmap = GradientMap(model, batch)
    state = torch.get_rng_state()
    values, _ = draws(gmap, 1.0, 50)
    assert torch.equal(torch.get_rng_state(), state)
    assert_mean(values, dfil(gmap, 1.0, None).value)


@pytest.mark.long
def test_coupled_samples_have_what_the_dense_jacobian_says() -> None:
    gmap = GradientMap(*small_convolution(4, batch_norm=True))
    assert_mean(draws(gmap, 0.01)[0], dfil(gmap, 0.01, None).value)


class Kinked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 6), nn.Linear(6, 3)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        entered = self.first(pixel_values.flatten(1))
        hidden = entered - entered.median(1, keepdim=True).values  # its derivative jumps
        return {"loss": nn.functional.cross_entropy(self.last(hidden), labels)}


def kinked() -> GradientMap:
    torch.manual_seed(0)
    pixels = torch.randn(2, 3, 2, 2, generator=torch.Generator().manual_seed(1)).double()
    return GradientMap(Kinked().double(), {"pixel_values": pixels, "labels": torch.arange(2)})


def half() -> GradientMap:
    return GradientMap(*make_task("bert", dtype=torch.bfloat16))


@pytest.mark.parametrize("make", [kinked, half])
def test_where_differences_cannot_be_had(make: Callable[[], GradientMap]) -> None:
    assert by_differences(make()) is None
    assert torch.isfinite(dfil(make(), 1.0, 3).value).all()


@pytest.mark.long
def test_a_sample_is_not_charged_for_another() -> None:
    """Two samples of very different sensitivities: each has its own, to 4 standard errors."""
    model, batch = small_convolution()
    batch["pixel_values"] = batch["pixel_values"] * torch.tensor([1.0, 10.0]).double().view(
        2, 1, 1, 1
    )
    gmap = GradientMap(model, batch)
    exact = dfil(gmap, 1.0, None).value
    assert exact.max() > 3 * exact.min()
    assert_mean(draws(gmap, 1.0)[0], exact)
