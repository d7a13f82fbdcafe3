"""Noise: strength, distribution, and the theorem against dense Jacobians."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import (
    dense_reference,
    exact_map,
    flat,
    make_task,
    rng,
    small_convolution,
    standard_deviations,
    torch_rng,
)
from torch import Tensor

from hf_gradguard import GradientMap, make_defense

MODELS = ("bert", "gpt2", "vit")

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gaussian": ("gaussian_noise", {}),
    "laplace": ("laplace_noise", {}),
    "optimal": ("optimal_noise", {"shape": "own"}),
    "optimal_layer": ("optimal_noise", {"shape": "own", "granularity": "layer"}),
    "dp_sgd": ("dp_sgd", {"clip": 0.3}),
    "dp_sgd_coordinate": ("dp_sgd", {"clip": 0.02, "clip_by": "coordinate"}),
    "optimal_dp_sgd": ("optimal_dp_sgd", {"shape": "own", "clip": 0.02}),
    "optimal_dp_sgd_layer": (
        "optimal_dp_sgd",
        {"shape": "own", "clip": 0.02, "granularity": "layer"},
    ),
}


def make(kind: str, **settings: Any) -> Any:
    name, own = KINDS[kind]
    return make_defense(name, **own, **settings)


def clipped_gradient(kind: str, gmap: GradientMap) -> Tensor:
    """What noise is added to, computed here anew."""
    gradient = flat(gmap.gradient())
    clip = KINDS[kind][1].get("clip")
    if clip is None:
        return gradient
    if kind == "dp_sgd":
        return gradient * min(1, clip / gradient.norm())
    return gradient.clamp(-clip, clip)


# -------------------------------------------------------------------------------------------------
# strength


# Every kind, and optimal noise on every model: uniform noise is the same on all.
EACH = [*((kind, "bert") for kind in KINDS), ("optimal", "gpt2"), ("optimal_layer", "vit")]


@pytest.mark.parametrize(("kind", "name"), EACH)
def test_scale_is_the_root_mean_square_of_the_standard_deviations(kind: str, name: str) -> None:
    """Exactly, whatever the shape: equal `scale` means equal noise power."""
    std = flat(standard_deviations(make(kind, scale=0.25), exact_map(name)))
    assert math.isclose(std.square().mean(), 0.25**2, rel_tol=1e-12)
    assert (std >= 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_relative_scale_is_in_units_of_the_gradient(kind: str) -> None:
    """Of the gradient that the noise is added to, after clipping."""
    gmap = exact_map("bert")
    std = flat(standard_deviations(make(kind, relative_scale=3, strength="own"), gmap))
    assert math.isclose(
        std.square().mean(), 9 * clipped_gradient(kind, gmap).square().mean(), rel_tol=1e-12
    )


@pytest.mark.parametrize(("kind", "name"), EACH)
def test_utility_budget_is_met(kind: str, name: str) -> None:
    """U₂ = -Σ g_i² Σ_ii = -C."""
    gmap = exact_map(name)
    std = flat(standard_deviations(make(kind, utility_budget=0.7, strength="own"), gmap))
    assert math.isclose((clipped_gradient(kind, gmap) * std).square().sum(), 0.7, rel_tol=1e-12)


@pytest.mark.parametrize("kind", ["gaussian", "laplace", "dp_sgd", "dp_sgd_coordinate"])
def test_uniform_noise_is_uniform(kind: str) -> None:
    std = flat(standard_deviations(make(kind, scale=0.25), exact_map("bert")))
    torch.testing.assert_close(std, torch.full_like(std, 0.25), rtol=1e-12, atol=0)


def test_optimal_noise_follows_its_formula() -> None:
    """std_i² = λ s_i/|g_i| with the guards |g_i| ≥ 1e-8 and s_i/|g_i| ≤ 1e6 before anything is
    scaled.
    """
    gmap = exact_map("bert")
    gradient = {n: g.clone() for n, g in gmap.gradient().items()}
    squares = {n: s.clone() for n, s in gmap.squared_sensitivity().items()}
    weight = "classifier.weight"
    gradient[weight][0, :4] = torch.tensor([0.0, 1e-9, -1e-9, 1e-4], dtype=torch.float64)
    squares[weight][0, :5] = torch.tensor([1e-12, 1e-12, 1.0, 1e6, 0.0], dtype=torch.float64)
    gmap._gradient = gradient
    gmap.squared_sensitivity = lambda *_, **__: squares
    std = standard_deviations(make("optimal", scale=1), gmap)

    s, g = flat(squares).sqrt(), flat(gradient).abs()
    ratio = torch.where(g > 1e-8, s / g, s / 1e-8)
    ratio = ratio.where(ratio < 1e6, 1e6)
    torch.testing.assert_close(flat(std), (ratio / ratio.mean()).sqrt(), rtol=1e-9, atol=1e-12)
    variance = std[weight][0].square() * ratio.mean()
    torch.testing.assert_close(
        variance[:4], torch.tensor([100.0, 100.0, 1e6, 1e6]).double(), rtol=1e-9, atol=0
    )
    assert std[weight][0, 4] == 0  # says nothing about the input


def test_layer_noise_follows_its_formula() -> None:
    gmap = exact_map("bert")
    std = standard_deviations(make("optimal_layer", scale=1), gmap)
    squares, gradient = gmap.squared_sensitivity(), gmap.gradient()
    ratio = {n: squares[n].sum().sqrt() / max(gradient[n].norm(), 1e-8) for n in gradient}
    power = sum(ratio[n] * g.numel() for n, g in gradient.items()) / len(flat(gradient))
    for n in gradient:
        torch.testing.assert_close(
            std[n], (ratio[n] / power).sqrt().expand_as(std[n]), rtol=1e-9, atol=1e-12
        )


# ---------------------------------------------------------------------------------------------
# distribution


@pytest.mark.long
@pytest.mark.statistics
@pytest.mark.parametrize(
    "kind", ["gaussian", "laplace", "optimal", "optimal_layer", "dp_sgd", "optimal_dp_sgd"]
)
def test_variance_over_many_draws(kind: str) -> None:
    """End to end, n = 2,000 draws on one estimate of the sensitivities: each coordinate's mean and
    variance, and the variance of all.

    The sample variance has relative standard error sqrt((κ - 1)/n), κ = 3 or, for Laplace, 6.
    Within 5 of them.
    """
    gmap, generator, n = GradientMap(*small_convolution()), rng(), 2000
    squares = gmap.squared_sensitivity(10, generator)
    gmap.squared_sensitivity = lambda *_, **__: squares
    defense = make(kind, scale=0.25)
    expected = flat(standard_deviations(defense, gmap)).square()
    if kind == "optimal":  # what is expected must itself be right
        ratio = flat(squares).sqrt() / flat(gmap.gradient()).abs().clamp(min=1e-8)
        torch.testing.assert_close(expected, 0.25**2 * ratio / ratio.mean(), rtol=1e-9, atol=1e-12)
    draws = torch.stack([flat(defense(gmap, generator)) for _ in range(n)]) - clipped_gradient(
        kind, gmap
    )
    noisy = expected > 0
    assert noisy.sum() > 20
    assert draws[:, ~noisy].abs().max() < 1e-15 if (~noisy).any() else True
    variance, expected = draws[:, noisy].var(0), expected[noisy]
    kurtosis = 6 if kind == "laplace" else 3
    error = 5 * ((kurtosis - 1) / n) ** 0.5
    assert ((variance / expected - 1).abs() < error).all()
    assert abs(float((variance / expected).mean()) - 1) < error / len(expected) ** 0.5
    assert (draws[:, noisy].mean(0).abs() < 5 * (expected / n).sqrt()).all()
    # No two coordinates share their noise: neighbors' correlation has standard error 1/sqrt(n).
    standard = draws[:, noisy] / expected.sqrt()
    assert (standard[:, 1:] * standard[:, :-1]).mean(0).abs().max() < 5 * n**-0.5


@pytest.mark.statistics
@pytest.mark.parametrize(
    ("kind", "fourth_moment", "eighth_moment"),
    [("gaussian", 3, 105), ("laplace", 6, 2520), ("optimal", 3, 105), ("dp_sgd", 3, 105)],
)
def test_fourth_moment_tells_laplace_from_gaussian(
    kind: str, fourth_moment: float, eighth_moment: float
) -> None:
    """E z⁴ of standardized noise from n draws, standard error sqrt((E z⁸ - (E z⁴)²)/n). Within 5 of
    them.
    """
    gmap, generator = exact_map("bert"), rng()
    defense = make(kind, scale=0.25)
    std = flat(standard_deviations(defense, gmap))
    base = clipped_gradient(kind, gmap)
    z = torch.cat([((flat(defense(gmap, generator)) - base) / std)[std > 1e-6] for _ in range(150)])
    error = 5 * ((eighth_moment - fourth_moment**2) / len(z)) ** 0.5
    assert error < 0.7  # so that 3 and 6 are told apart
    assert abs(z.pow(4).mean() - fourth_moment) < error


# ---------------------------------------------------------------------------------------------- the
# theorem


def untouched(gmap: GradientMap) -> tuple[Tensor, Tensor, Tensor]:
    """s, |g| and the mask of the coordinates that no guard touches.

    Attention's key biases cancel in the softmax, so theirs is a zero up to rounding: those are
    guarded.
    """
    s, g = flat(gmap.squared_sensitivity()).sqrt(), flat(gmap.gradient()).abs()
    free = (g > 1e-8) & (s < 1e6 * g) & (s > 0)
    assert free.double().mean() > 0.95
    return s, g, free


def information(s: Tensor, variance: Tensor) -> Tensor:
    """Tr J_F = Σ s_i²/Σ_ii."""
    return (s.square() / variance).sum(-1)


def at_utility(variance: Tensor, g: Tensor, utility: Tensor) -> Tensor:
    """`variance` times the factor with which Σ g_i² Σ_ii is `utility`."""
    return variance * (utility / (g.square() * variance).sum(-1, keepdim=True))


@pytest.mark.parametrize(
    "strength",
    [
        {"scale": 0.25},
        {"relative_scale": 1.0, "strength": "own"},
        {"utility_budget": 0.7, "strength": "own"},
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_optimal_noise_attains_the_least_information_at_its_utility(
    name: str, strength: dict[str, float]
) -> None:
    """Cauchy-Schwarz: Tr J_F · |U₂| ≥ (Σ s_i|g_i|)², with equality for Σ_ii ∝ s_i/|g_i|."""
    gmap = exact_map(name)
    s, g, free = untouched(gmap)
    variance = flat(standard_deviations(make("optimal", **strength), gmap)).square()[free]
    s, g = s[free], g[free]
    utility = (g.square() * variance).sum()
    least = (s * g).sum().square() / utility
    attained = information(s, variance)
    assert math.isclose(attained, least, rel_tol=1e-6)

    uniform = at_utility(torch.ones_like(g), g, utility)
    assert information(s, uniform) > 1.2 * attained
    printed = at_utility(s.square() / g, g, utility)  # Algorithm 1, which has s_i²
    assert information(s, printed) > 1.2 * attained
    for spread in (0.05, 0.3, 1.0, 3.0):  # random Σ, from near the optimum to anywhere
        factors = (spread * torch.randn(100, len(g), generator=torch_rng(), dtype=g.dtype)).exp()
        for start in (variance, torch.ones_like(g)):
            other = at_utility(start * factors, g, utility)
            assert (information(s, other) > attained).all()


@pytest.mark.parametrize("name", MODELS)
def test_the_dense_fisher_information_is_less_than_uniform_noises(name: str) -> None:
    """The same with the matrix itself: Tr(J Σ⁻¹ Jᵀ) of the two defenses at one utility budget."""
    _, jacobian = dense_reference(name)
    gmap = exact_map(name)
    _, _, free = untouched(gmap)
    traces = []
    for kind in ("optimal", "gaussian"):
        std = flat(standard_deviations(make(kind, utility_budget=0.7, strength="own"), gmap))
        traces.append((jacobian[:, free] / std[free]).square().sum())
    assert traces[0] < traces[1] / 1.2


@pytest.mark.parametrize("name", MODELS)
def test_layer_noise_is_the_best_with_one_variance_a_tensor(name: str) -> None:
    """The same bound with each tensor's norms S_l and G_l in place of s_i and |g_i|."""
    gmap = exact_map(name)
    squares, gradient = gmap.squared_sensitivity(), gmap.gradient()
    std = standard_deviations(make("optimal_layer", scale=0.25), gmap)
    free = [n for n, g in gradient.items() if g.norm() > 1e-8]
    assert len(free) >= len(gradient) - 2  # the two layers' key biases
    for n in gradient:
        torch.testing.assert_close(std[n], std[n].flatten()[0].expand_as(std[n]), rtol=1e-6, atol=0)
    s = torch.stack([squares[n].sum().sqrt() for n in free])
    g = torch.stack([gradient[n].norm() for n in free])
    variance = torch.stack([std[n].flatten()[0].square() for n in free])
    utility = (g.square() * variance).sum()
    attained = information(s, variance)
    assert math.isclose(attained, (s * g).sum().square() / utility, rel_tol=1e-6)
    assert information(s, at_utility(torch.ones_like(g), g, utility)) > 1.02 * attained
    for spread in (0.05, 0.3, 1.0, 3.0):
        factors = (spread * torch.randn(100, len(g), generator=torch_rng(), dtype=g.dtype)).exp()
        assert (information(s, at_utility(variance * factors, g, utility)) > attained).all()
    # One variance a tensor is a restriction: it cannot beat one a parameter.
    fine = flat(standard_deviations(make("optimal", scale=0.25), gmap)).square()
    every_s, every_g, mask = untouched(gmap)
    fine, every_s, every_g = fine[mask], every_s[mask], every_g[mask]
    coarse = flat(std).square()[mask]
    fine = at_utility(fine, every_g, (every_g.square() * coarse).sum())
    assert information(every_s, fine) < information(every_s, coarse)


# -------------------------------------------------------------------------------------------------
# clipping


@pytest.mark.parametrize("clip", [0.1, 1.0, 100.0])
def test_dp_sgd_clips_the_norm(clip: float) -> None:
    gmap = GradientMap(*make_task("bert"))
    gradient = flat(gmap.gradient())
    assert 1.0 < gradient.norm() < 100.0
    shared = flat(make_defense("dp_sgd", clip=clip, scale=0)(gmap, rng()))
    if clip > gradient.norm():
        assert torch.equal(shared, gradient)
    else:
        assert math.isclose(shared.norm(), clip, rel_tol=1e-12)
        torch.testing.assert_close(
            shared / clip, gradient / gradient.norm(), rtol=1e-12, atol=1e-15
        )


@pytest.mark.parametrize("name", ["dp_sgd", "optimal_dp_sgd"])
def test_coordinates_are_clipped(name: str) -> None:
    gmap = GradientMap(*make_task("bert"))
    settings = {"clip_by": "coordinate"} if name == "dp_sgd" else {}
    gradient = flat(gmap.gradient())
    shared = flat(make_defense(name, clip=0.05, scale=0, **settings)(gmap, rng()))
    assert 50 < (gradient.abs() > 0.05).sum() < len(gradient) - 50
    assert torch.equal(shared, gradient.clamp(-0.05, 0.05))


@pytest.mark.parametrize("granularity", ["parameter", "layer"])
def test_optimal_dp_sgd_adds_noise_within_the_bound_only(granularity: str) -> None:
    gmap = GradientMap(*make_task("bert"))
    shared = flat(
        make_defense("optimal_dp_sgd", clip=0.05, scale=0.1, granularity=granularity, shape="own")(
            gmap, rng()
        )
    )
    gradient = flat(gmap.gradient())
    clipped = gradient.abs() >= 0.05
    assert torch.equal(shared[clipped], 0.05 * gradient[clipped].sign())
    assert (shared[~clipped] != gradient[~clipped]).double().mean() > 0.9


@pytest.mark.parametrize("name", MODELS)
def test_optimal_dp_sgd_is_optimal_within_the_bound(name: str) -> None:
    """The theorem among the coordinates that are not clipped. The clipped ones do not depend on the
    input.
    """
    gmap = exact_map(name)
    s, g, free = untouched(gmap)
    clip = float(g.median())
    free = free & (g < clip)
    variance = flat(
        standard_deviations(
            make_defense("optimal_dp_sgd", clip=clip, scale=0.25, shape="own"), gmap
        )
    ).square()
    assert not variance[g >= clip].any()
    s, g, variance = s[free], g[free], variance[free]
    least = (s * g).sum().square() / (g.square() * variance).sum()
    assert math.isclose(information(s, variance), least, rel_tol=1e-6)


@pytest.mark.parametrize("shape", ["public", "own"])
def test_optimal_dp_sgd_without_anything_clipped_is_optimal_noise(shape: str) -> None:
    gmap = GradientMap(*make_task("bert"))
    one, two = (
        make_defense(name, scale=0.1, shape=shape, **settings)(gmap, rng())
        for name, settings in (("optimal_dp_sgd", {"clip": 1e9}), ("optimal_noise", {}))
    )
    assert torch.equal(flat(one), flat(two))


def test_everything_clipped_gets_no_noise_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    gmap = exact_map("bert")
    # Some coordinates are zero or a rounding error, by which CPU: none may have the sign 0.
    gmap._gradient = {n: 1.0 - 2.0 * (g < 0).to(g.dtype) for n, g in gmap.gradient().items()}
    caplog.clear()
    shared = make_defense("optimal_dp_sgd", clip=0.5, scale=1, shape="own")(gmap, rng())
    assert torch.equal(flat(shared), 0.5 * flat(gmap.gradient()))
    assert any("optimal_dp_sgd added no noise" in record.getMessage() for record in caplog.records)
