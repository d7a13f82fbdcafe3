"""Theorems of two papers, each against a small case that is computed without the package.

Guo et al., "Bounding Training Data Reconstruction in Private (Deep) Learning" (2022), by integrals
over fine grids: one number z in [0, M] is released with noise. Zhang et al., "Understanding Deep
Gradient Leakage via Inversion Influence Functions" (2023), by dense Jacobians of small maps in
float64. docs/coverage.md cites these tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from helpers import torch_rng
from leakage_helpers import perturbation
from torch import Tensor

from hf_gradguard import GradientMap
from hf_gradguard.leakage import (
    largest_eigenvalue,
    mse_bound_from_dfil,
    mse_bound_from_rdp,
    mse_bound_of_biased,
)
from recipes.small_networks import LeakageLeNetConfig, LeakageLeNetForImageClassification

SIGMA, WIDTH = 0.7, 1.5
Y = torch.linspace(-9, 11, 20_001, dtype=torch.float64)
STEP = float(Y[1] - Y[0])
PLACES = torch.linspace(0, WIDTH, 31, dtype=torch.float64).tolist()


def normal(y: Tensor, mean: Tensor | float, std: float = SIGMA) -> Tensor:
    return torch.exp(-(((y - mean) / std) ** 2) / 2) / (std * math.sqrt(2 * math.pi))


def posterior_mean(y: Tensor) -> Tensor:
    """Of a z that is equally likely anywhere in its range: the best attacker on average."""
    z = torch.linspace(0, WIDTH, 301, dtype=torch.float64)
    weights = normal(y[:, None], z)
    return (weights * z).sum(1) / weights.sum(1)


ATTACKERS: dict[str, Callable[[Tensor], Tensor]] = {
    "unbiased": lambda y: y,
    "shrunk": lambda y: 0.6 * y,
    "clipped": lambda y: y.clamp(0, WIDTH),
    "posterior": posterior_mean,
}


class Attacked:
    """An attacker's mean, its slope, and the variance, at any z."""

    def __init__(self, name: str) -> None:
        self._guess = ATTACKERS[name](Y)

    def mean(self, z: float) -> float:
        return float((normal(Y, z) * self._guess).sum()) * STEP

    def slope(self, z: float) -> float:
        return float((normal(Y, z) * (Y - z) * self._guess).sum()) * STEP / SIGMA**2

    def variance(self, z: float) -> float:
        return float((normal(Y, z) * (self._guess - self.mean(z)).square()).sum()) * STEP


def chi_squared(one: float, other: float) -> float:
    p, q = normal(Y, one), normal(Y, other)
    inside = q > 1e-290
    return float((p[inside] / q[inside] - 1).square() @ q[inside]) * STEP


@pytest.mark.parametrize("name", ATTACKERS)
def test_bounds_of_biased_attackers(name: str) -> None:
    """Guo et al., Theorems A.1, A.2, 1 and 2, with γ the least |μ'| in the range, as printed."""
    attacked, epsilon = Attacked(name), WIDTH**2 / SIGMA**2
    gamma = min(abs(attacked.slope(z)) for z in PLACES)
    assert gamma > 0.05  # so that Theorem 1 says something
    for z in PLACES[::6]:
        variance, slope = attacked.variance(z), attacked.slope(z)
        for shift in (-1.0, -0.3, 0.1, 0.5):
            moved = (attacked.mean(z + shift) - attacked.mean(z)) ** 2
            assert variance >= moved / chi_squared(z + shift, z) * (1 - 1e-6)
        assert variance >= slope**2 * mse_bound_from_dfil(1 / SIGMA**2) * (1 - 1e-6)
        assert variance >= gamma**2 * mse_bound_from_rdp(epsilon, WIDTH)
        if name in ("unbiased", "shrunk"):  # linear attackers reach Theorem 2
            assert variance == pytest.approx(slope**2 * SIGMA**2)


@pytest.mark.parametrize("name", ATTACKERS)
def test_the_error_of_a_biased_attacker_is_above_its_bound(name: str) -> None:
    """Variance and bias together, by integrals; linear attackers reach it."""
    attacked = Attacked(name)
    for z in PLACES[::5]:
        squared_bias = (attacked.mean(z) - z) ** 2
        error = attacked.variance(z) + squared_bias
        bound = mse_bound_of_biased(1 / SIGMA**2, attacked.slope(z) - 1, squared_bias)
        assert error >= bound * (1 - 1e-6)
        if name in ("unbiased", "shrunk"):
            assert error == pytest.approx(bound)


@pytest.mark.parametrize("ridge", [0.0, 0.3, 5.0])
def test_ridge_regression_is_above_its_bound(ridge: float) -> None:
    """Of a linear map by dense matrices: x̂ = (J J^T + ρ I)^-1 J y, whose error is known."""
    draw = torch_rng(1)
    for spread in (0.0, 1.0):
        jacobian = torch.linalg.qr(torch.randn(9, 5, generator=draw).double())[0].T
        jacobian = torch.diag(1 + spread * torch.rand(5, generator=draw).double()) @ jacobian
        x = torch.randn(5, generator=draw).double()
        information = jacobian @ jacobian.T / SIGMA**2
        inverse = torch.linalg.inv(jacobian @ jacobian.T + ridge * torch.eye(5).double())
        attacker = inverse @ jacobian
        slope = attacker @ jacobian.T - torch.eye(5).double()
        squared_bias = float((slope @ x).square().mean())
        error = float(SIGMA**2 * attacker.square().sum() / 5) + squared_bias
        bound = mse_bound_of_biased(
            float(information.trace()) / 5, float(slope.trace()) / 5, squared_bias
        )
        assert error >= bound * (1 - 1e-9)
        if not spread:  # all directions are seen alike
            assert error == pytest.approx(bound)


def test_how_tight_the_bound_from_rdp_is() -> None:
    """Guo et al., Section 4: a quarter of the error of the best attacker for a small range, and
    nothing for a large one.
    """
    ratios = [mse_bound_from_rdp((m / SIGMA) ** 2, m) / SIGMA**2 for m in (1e-3, 0.7, 2.1, 7.0)]
    assert ratios[0] == pytest.approx(1 / 4, rel=1e-5)
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[-1] < 1e-40


def test_information_is_the_limit_of_the_divergence() -> None:
    """Guo et al., Section 5, which leaves out that χ² is divided by Δ²: without that it is 0."""
    for shift in (1e-1, 1e-2, 1e-3):
        assert chi_squared(0.5, 0.5 + shift) / shift**2 == pytest.approx(
            1 / SIGMA**2, rel=2 * shift**2 / SIGMA**2 + 1e-6
        )
    assert chi_squared(0.5, 0.501) < 1e-5


def information(density: Callable[[float], Tensor], z: float, cell: float) -> float:
    """4 ∫ (∂√p/∂z)², by central differences."""
    step = 1e-4
    slope = (density(z + step).sqrt() - density(z - step).sqrt()) / (2 * step)
    return 4 * float(slope.square().sum()) * cell


def test_information_of_adaptive_steps_adds_up() -> None:
    """Guo et al., Theorem 3: the second step's gradient, sin(z y₁), depends on what the first
    released. A model that is made of both, y₁ + y₂, says less.
    """
    z, y = 0.8, torch.linspace(-6, 7, 1301, dtype=torch.float64)
    cell = float(y[1] - y[0])

    def both(at: float) -> Tensor:
        return normal(y, at)[:, None] * normal(y, torch.sin(at * y)[:, None])

    def model(at: float) -> Tensor:
        mean = y + torch.sin(at * y)
        return (normal(y, at)[:, None] * normal(y, mean[:, None])).sum(0) * cell

    slopes = (y * torch.cos(z * y)).square()
    steps = (1 + float(normal(y, z) @ slopes) * cell) / SIGMA**2
    assert information(both, z, cell**2) == pytest.approx(steps, rel=1e-4)
    assert 0 < information(model, z, cell) < 0.9 * steps


@pytest.mark.parametrize("q", [0.01, 0.2, 0.9])
@pytest.mark.parametrize("scale", [0.2, 1.0, 5.0])
def test_information_of_a_secret_batch(q: float, scale: float) -> None:
    """Guo et al., Theorem 4, for a mechanism that is ε-private without a δ: Laplace noise, z is in
    the batch with probability q. Eq. 2 bounds by q times the batch's information, Eq. 3 by κ q.
    """
    y = torch.linspace(-40 * scale, 1 + 40 * scale, 400_001, dtype=torch.float64)
    cell = float(y[1] - y[0])
    inside, outside = (torch.exp(-(y - z).abs() / scale) / (2 * scale) for z in (1.0, 0.0))
    found = float((q * inside / scale).square() @ (1 / (q * inside + (1 - q) * outside))) * cell
    whole = q / scale**2
    kappa = q / (q + (1 - q) * math.exp(-1 / scale))
    assert found <= kappa * whole * (1 + 1e-3)
    assert kappa < 1  # so Eq. 3 is the sharper one
    assert found >= q * whole * (1 - 1e-3)


# ------------------------------------------------------------------------- inversion influence


class Map:
    """g(x) = Ax + B sin(Cx), from 3 inputs to 8 parameters: the gradient of L = θᵀg(x)."""

    def __init__(self, seed: int) -> None:
        draw = torch_rng(seed)
        self.a, self.b, self.c, self.x = (
            torch.randn(size, generator=draw, dtype=torch.float64)
            for size in ((8, 3), (8, 5), (5, 3), (3,))
        )
        norms = [float(torch.linalg.matrix_norm(one, 2)) for one in (self.a, self.b, self.c)]
        self.slope = norms[0] + norms[1] * norms[2]  # a Lipschitz constant of g
        self.curvature = norms[1] * norms[2] ** 2  # and one of its Jacobian

    def __call__(self, x: Tensor) -> Tensor:
        return self.a @ x + self.b @ torch.sin(self.c @ x)

    def jacobian(self, x: Tensor) -> Tensor:
        """As printed, inputs × parameters."""
        return (self.a + self.b @ (torch.cos(self.c @ x)[:, None] * self.c)).T

    def invert(self, shared: Tensor, start: Tensor) -> Tensor:
        """A stationary point of ‖g(x) - shared‖², by Levenberg's steps."""
        x, damping, unit = start, 1e-3, torch.eye(3, dtype=torch.float64)
        for _ in range(500):
            jacobian, rest = self.jacobian(x), self(x) - shared
            slope = jacobian @ rest
            if float(slope.norm()) < 1e-12 * float(jacobian.norm()):
                break
            step = torch.linalg.solve(jacobian @ jacobian.T + damping * unit, slope)
            better = float((self(x - step) - shared).norm()) < float(rest.norm())
            x, damping = (x - step, damping / 5) if better else (x, damping * 3)
        return x


def noise(seed: int) -> Tensor:
    return torch.randn(8, generator=torch_rng(1000 + seed), dtype=torch.float64)


def test_influence_is_the_error_to_first_order() -> None:
    """Zhang et al., Eq. 4: ‖x̂ - x‖ over ‖(JJᵀ)⁻¹Jδ‖ goes to 1 as δ does to 0."""
    for seed in range(20):
        g = Map(seed)
        jacobian = g.jacobian(g.x)
        for size in (1e-3, 1e-5):
            delta = size * noise(seed)
            error = float((g.invert(g(g.x) + delta, g.x) - g.x).norm())
            influence = torch.linalg.solve(jacobian @ jacobian.T, jacobian @ delta).norm()
            assert error / float(influence) == pytest.approx(1, abs=100 * size)


@pytest.mark.long
@pytest.mark.statistics
def test_bound_on_errors_of_any_size() -> None:
    """Zhang et al., Theorem 3.1, whose proof takes it that an input has the perturbed gradient:
    there it holds. Noise gives gradients that none has. For these the same proof gives the bound
    with ‖g(x̂) - g₀ - δ‖ in place of 2‖g₀ + δ‖.
    """
    for seed in range(100):
        g = Map(seed)
        start, jacobian = g(g.x), g.jacobian(g.x)
        norm = float(torch.linalg.matrix_norm(jacobian, 2))
        other = g.x + 10 ** (seed / 50 - 1) * noise(seed)[:3]
        delta = g(other) - start
        printed = float((jacobian @ delta).norm()) / (
            g.slope * norm + 2 * g.curvature * float((start + delta).norm())
        )
        assert printed <= float((other - g.x).norm())
        delta = 10 ** (seed / 25 - 2) * noise(seed)
        found = g.invert(start + delta, g.x)
        rest = float((g(found) - start - delta).norm())
        bound = float((jacobian @ delta).norm()) / (g.slope * norm + g.curvature * rest)
        assert bound <= float((found - g.x).norm()) * (1 + 1e-9)


def test_where_the_printed_bound_fails() -> None:
    """g(x) = (x, √(1 + x²)), δ = -g(x₀): g₀ + δ = 0 is the gradient of no input. The nearest is
    x = 0 alone, JJᵀ ≥ 1, and both Lipschitz constants exist: √2, and 1 as |∂²√(1 + x²)| ≤ 1.
    """
    x = 0.1
    slope = x / math.sqrt(1 + x**2)
    product = abs(x + slope * math.sqrt(1 + x**2))  # |Jδ|
    printed = product / (math.sqrt(2) * math.hypot(1, slope) + 2 * 1 * 0)
    assert printed > 1.4 * x  # the error is x


@pytest.mark.parametrize(("size", "channels"), [(28, 1), (32, 3)])
def test_lenets_constants_are_not_small(size: int, channels: int) -> None:
    """Zhang et al., Appendix H.1, has μ_L = 0.5 to 0.7 and μ_J = 4e-13 at most, for weights in
    [-0.5, 0.5]. One direction of the parameters bounds both from below.
    """
    draw = torch_rng()
    config = LeakageLeNetConfig(image_size=size, num_channels=channels, num_labels=10)
    model = LeakageLeNetForImageClassification(config).double().eval()
    for weight in model.parameters():
        torch.nn.init.uniform_(weight, -0.5, 0.5, generator=draw)
    images = torch.nn.functional.interpolate(
        torch.rand(2, channels, 4, 4, generator=draw, dtype=torch.float64), size=(size, size)
    )
    one, other = (
        GradientMap(model, {"pixel_values": image[None], "labels": torch.tensor([3])})
        for image in images
    )
    assert math.sqrt(largest_eigenvalue(one)) > 2
    along = perturbation(one)
    length = math.sqrt(sum(float(part.square().sum()) for part in along.values()))
    differs = float((one.vjp(along) - other.vjp(along)).norm()) / length
    assert differs / float((images[0] - images[1]).norm()) > 1e-3
