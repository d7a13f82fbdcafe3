"""dFIL by differences of passes, against dense Jacobians."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from helpers import flat, make_task, rng, small_convolution
from leakage_helpers import dense_case, dense_convolution, linear_map, uneven_variance
from torch import Tensor, nn

from hf_gradguard import GradientMap
from hf_gradguard.gradient_map.per_sample import layers_of
from hf_gradguard.gradient_map.sensitivity import plan_of
from hf_gradguard.leakage import dfil, ghost_dfil


def slow(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.slow)


def draws(gmap: GradientMap, variance: object, seeds: int = 200) -> tuple[Tensor, Tensor]:
    found = [ghost_dfil(gmap, variance, 3, rng(seed)) for seed in range(seeds)]
    assert None not in found
    return tuple(torch.stack(part) for part in zip(*found, strict=True))  # type: ignore[return-value]


def assert_mean(values: Tensor, exact: Tensor) -> None:
    """Within 4 standard errors, and the half per cent of differences."""
    error = values.std(0) / math.sqrt(len(values))
    assert ((values.mean(0) - exact).abs() <= 4 * error + 0.005 * exact).all()


def all_apart(gmap: GradientMap) -> set[str]:
    """The parameters of layers that know their samples apart."""
    layers = layers_of(gmap.model, gmap.parameters)
    split = plan_of(gmap).split
    named = (n for k in split for n in (layers[k].weight, layers[k].bias))
    return {name for name in named if name is not None}


def only(gmap: GradientMap, names: set[str], variance: dict[str, Tensor]) -> dict[str, Tensor]:
    """Infinite variance elsewhere: nothing else is shared."""
    return {n: v if n in names else torch.full_like(v, math.inf) for n, v in variance.items()}


@pytest.mark.parametrize("name", ["convolution", *(slow(name) for name in ("bert", "gpt2"))])
def test_ghosts_agree_with_exact_dfil(name: str) -> None:
    """200 seeds, another variance for every coordinate, on parameters that know samples apart."""
    gmap, _ = dense_case(name)
    variance = only(gmap, all_apart(gmap), uneven_variance(gmap))
    exact = dfil(gmap, variance, None).value
    values, errors = draws(gmap, variance)
    assert_mean(values, exact)
    # Calibrated: the spread of 200 values has an error of 5 %, that of three probes' errors more.
    calibrated = errors.square().mean(0).sqrt() / values.std(0)
    assert ((calibrated > 0.7) & (calibrated < 1.4)).all()


@pytest.mark.parametrize("name", ["bert", *(slow(name) for name in ("gpt2", "vit"))])
def test_parameters_whose_samples_are_not_known_count_in_full(name: str) -> None:
    """Never too little: a sample's figure is its own of what is known apart, and all samples' of
    the rest.
    """
    gmap, jacobian = dense_case(name)
    precision = 1 / flat(uneven_variance(gmap))
    apart = all_apart(gmap)
    known = torch.cat([torch.full((g.numel(),), n in apart) for n, g in gmap.gradient().items()])
    assert 0.5 < known.double().mean() < 1
    squares = jacobian.square() * precision
    own = torch.stack([rows[:, known].sum() for rows in squares.chunk(2)])
    counts = torch.tensor([part.sum() for part in present(gmap)])
    expected = (own + squares[:, ~known].sum()) / counts
    exact = dfil(gmap, uneven_variance(gmap), None).value
    assert (expected >= exact).all()
    values, _ = draws(gmap, uneven_variance(gmap), 100)
    assert_mean(values, expected)


def present(gmap: GradientMap) -> Tensor:
    mask = gmap.domain.present(gmap.batch)
    return torch.ones_like(gmap.input) if mask is None else mask[..., None].expand_as(gmap.input)


@pytest.mark.parametrize("name", ["convolution", "bert", "gpt2"])
def test_one_number_is_the_same_written_out_or_not(name: str) -> None:
    """Factors' products for one variance, gradients of samples for many: the same probes."""
    gmap, _ = dense_case(name)
    written = {n: torch.full(p.shape, 0.01).double() for n, p in gmap.parameters.items()}
    one, other = (ghost_dfil(gmap, variance, 5, rng()) for variance in (0.01, written))
    torch.testing.assert_close(one.value, other.value, rtol=1e-6, atol=0)  # float32 variances
    torch.testing.assert_close(one.standard_error, other.standard_error, rtol=1e-5, atol=0)


def test_in_float32_and_with_dropout() -> None:
    """Against the exact figure of the same masks, in the unit that models train in."""
    model, batch = make_task("bert", dtype=torch.float32, dropout=0.2)
    model.train()
    gmap = GradientMap(model, batch)
    variance = only(
        gmap, all_apart(gmap), {n: torch.ones_like(p) for n, p in gmap.parameters.items()}
    )
    state = torch.get_rng_state()
    values, _ = draws(gmap, variance, 100)
    assert torch.equal(torch.get_rng_state(), state)
    assert_mean(values, dfil(gmap, variance, None).value)


class Kinked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 6), nn.Linear(6, 3)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = torch.relu(self.first(pixel_values.flatten(1)))
        return {"loss": nn.functional.cross_entropy(self.last(hidden), labels)}


def kinked() -> GradientMap:
    torch.manual_seed(0)
    pixels = torch.randn(2, 3, 2, 2, generator=torch.Generator().manual_seed(1)).double()
    return GradientMap(Kinked().double(), {"pixel_values": pixels, "labels": torch.arange(2)})


def coupled() -> GradientMap:
    return GradientMap(*small_convolution(4, batch_norm=True))


def half() -> GradientMap:
    return GradientMap(*make_task("bert", dtype=torch.bfloat16))


def without_layers() -> GradientMap:
    return linear_map(torch.eye(4, dtype=torch.float64), batch_size=2)


@pytest.mark.parametrize("make", [kinked, coupled, half, without_layers])
def test_where_ghosts_cannot_be_had(make: Callable[[], GradientMap]) -> None:
    assert ghost_dfil(make(), 1.0) is None
    assert torch.isfinite(dfil(make(), 1.0, 3).value).all()


def test_bare_coordinates_are_left_to_dfil() -> None:
    gmap, _ = dense_case("convolution")
    bare = uneven_variance(gmap)
    bare["head.bias"][1] = 0
    assert ghost_dfil(gmap, bare) is None
    assert ghost_dfil(gmap, 0.0) is None
    assert torch.isinf(dfil(gmap, bare, 3).value).all()


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


def test_refusals() -> None:
    gmap, _ = dense_case("convolution")
    with pytest.raises(ValueError, match="num_probes must be a whole number of at least 1"):
        ghost_dfil(gmap, 1.0, 0)
    with pytest.raises(ValueError, match="every shared parameter and no other"):
        ghost_dfil(gmap, {"head.bias": torch.ones(3)})
    assert torch.isinf(ghost_dfil(gmap, 1.0, 1).standard_error).all()
    assert dense_convolution().shape[0] == gmap.input.numel()
