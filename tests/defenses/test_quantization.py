"""Quantization: levels, endpoints, rounding."""

from __future__ import annotations

import pytest
import torch
from helpers import exact_map, flat, make_task, rng
from torch import Tensor

from hf_gradguard import GradientMap, make_defense


@pytest.fixture
def gmap() -> GradientMap:
    return GradientMap(*make_task("bert"))


def step_of(gradient: Tensor, bits: int) -> float:
    return float(gradient.max() - gradient.min()) / (2**bits - 1)


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("bits", [1, 2, 3, 8])
def test_levels(gmap: GradientMap, bits: int, stochastic: bool) -> None:
    """At most 2^bits values a tensor, equally spaced from its smallest to its largest entry, which
    are kept.
    """
    shared = make_defense("quantization", bits=bits, stochastic=stochastic)(gmap, rng())
    for name, g in gmap.gradient().items():
        y, step = shared[name], step_of(g, bits)
        assert len(y.unique()) <= 2**bits
        assert y.min() == g.min()
        assert y.flatten()[g.argmin()] == g.min()
        assert torch.isclose(y.flatten()[g.argmax()], g.max(), rtol=1e-14)  # min + range, rounded
        levels = (y - g.min()) / step
        torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-9)
        error = (y - g).abs().max()
        assert error <= step * (1 + 1e-9) if stochastic else error <= step / 2 * (1 + 1e-9)
    most = max(len(y.unique()) for y in shared.values())
    assert most == 2**bits if bits < 8 else most > 50  # no tensor here has 256 entries


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_levels_in_lower_precision(dtype: torch.dtype) -> None:
    gmap = GradientMap(*make_task("bert", dtype=dtype))
    shared = make_defense("quantization", bits=3)(gmap, rng())
    for name, g in gmap.gradient().items():
        assert len(shared[name].unique()) <= 8
        assert shared[name].min() == g.min()
        assert shared[name].max() == g.max()


def test_one_bit_keeps_smallest_and_largest(gmap: GradientMap) -> None:
    shared = make_defense("quantization", bits=1)(gmap, rng())
    for name, g in gmap.gradient().items():
        middle = (g.min() + g.max()) / 2
        torch.testing.assert_close(
            shared[name], torch.where(g > middle, g.max(), g.min()), rtol=1e-14, atol=0
        )


@pytest.mark.parametrize("stochastic", [False, True])
def test_thirty_two_bits(gmap: GradientMap, stochastic: bool) -> None:
    """A step of 2⁻³² of the range, so nothing overflows and the error is below it, but not zero."""
    shared = make_defense("quantization", bits=32, stochastic=stochastic)(gmap, rng())
    for name, g in gmap.gradient().items():
        error = (shared[name] - g).abs().max()
        assert error <= (1 if stochastic else 0.5) * step_of(g, 32) * (1 + 1e-6)
    assert not torch.equal(flat(shared), flat(gmap.gradient()))


def test_nearest_rounding_draws_nothing(gmap: GradientMap) -> None:
    generator = rng()
    make_defense("quantization", bits=2)(gmap, generator)
    assert generator.bytes(8) == rng().bytes(8)


@pytest.mark.statistics
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_stochastic_rounding_is_unbiased(bits: int) -> None:
    """Of n draws: a coordinate at fraction f between two levels has variance step² f(1-f).

    Each coordinate with n f(1-f) > 25, where the binomial is close to normal, within 5.5 standard
    errors (one in 2·10⁷); and each tensor's sum of errors over all coordinates within 5.
    """
    gmap, generator, n = exact_map("bert"), rng(), 1000
    defense = make_defense("quantization", bits=bits, stochastic=True)
    names = [
        "bert.pooler.dense.weight",
        "classifier.weight",
        "bert.encoder.layer.0.output.dense.weight",
    ]
    gmap._gradient = {name: gmap.gradient()[name] for name in names}
    draws = [defense(gmap, generator) for _ in range(n)]
    tested = 0
    for name in names:
        g = gmap.gradient()[name]
        step = step_of(g, bits)
        errors = torch.stack([draw[name] - g for draw in draws])
        fraction = ((g - g.min()) / step) % 1
        variance = step**2 * fraction * (1 - fraction)
        normal = n * fraction * (1 - fraction) > 25
        tested += int(normal.sum())
        assert (errors.mean(0).abs()[normal] < 5.5 * (variance[normal] / n).sqrt()).all()
        assert abs(errors.sum()) < 5 * (n * variance.sum()).sqrt()
        relative = errors.var(0)[normal] / variance[normal]
        assert 0.9 < relative.mean() < 1.1  # it does round at random, by as much as that takes
    assert tested > 100


def test_constant_and_single_entries(gmap: GradientMap) -> None:
    gradient = gmap.gradient()
    gradient["classifier.weight"].fill_(0.3)
    gradient["classifier.bias"].zero_()
    for settings in ({"bits": 1}, {"bits": 32}, {"bits": 2, "stochastic": True}):
        shared = make_defense("quantization", **settings)(gmap, rng())
        assert torch.equal(shared["classifier.weight"], gradient["classifier.weight"])
        assert torch.equal(shared["classifier.bias"], gradient["classifier.bias"])
    gmap._gradient = {"one": torch.tensor([-0.7], dtype=torch.float64)}
    assert make_defense("quantization", bits=1)(gmap, rng())["one"].tolist() == [-0.7]


def test_sign_only(gmap: GradientMap) -> None:
    gradient = gmap.gradient()
    gradient["classifier.weight"][0, :2] = 0
    shared = make_defense("quantization", sign_only=True)(gmap, rng())
    for name, g in gradient.items():
        torch.testing.assert_close(shared[name], g.sign() * g.abs().mean(), rtol=1e-12, atol=0)
    assert shared["classifier.weight"][0, :2].tolist() == [0, 0]
    assert len(shared["classifier.bias"].abs().unique()) == 1
