"""Theorems of two papers, each against a small case that is computed without the package, or with
its evaluation network alone.

Chen, Gürsoy and Lei, "Optimal Defenses Against Data Reconstruction Attacks" (2024, 2025), and
"Refiner" (2025). docs/coverage.md cites these tests; test_noise.py and test_pruning.py have what
the package's own defenses attain.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import torch_rng
from scipy.optimize import linprog
from scipy.stats import chi2
from torch.nn.functional import avg_pool2d, interpolate

from hf_gradguard.networks import load_network


@pytest.mark.parametrize("cost", ["s²", "s|g|"])
def test_the_best_pruning_is_by_the_ratio_with_one_entry_in_part(cost: str) -> None:
    """Chen et al., Theorem 3.6 and Remark 3.7: the least leakage at Σ g² kept ≥ C, by linear
    programming over the probability with which each entry is kept. It keeps the smallest s²/g²
    whole, the next with some probability, and no other. s|g| is what an entry leaks that has
    optimal noise: the order is the same (as said after Eq. 11).
    """
    draw = np.random.default_rng(0)
    parts = 0
    for _ in range(20):
        s, g = np.exp(draw.normal(size=(2, 12)))
        leaks = s**2 if cost == "s²" else s * g
        budget = draw.uniform(0.1, 0.9) * (g**2).sum()
        found = linprog(leaks, A_ub=-(g**2)[None], b_ub=[-budget], bounds=(0, 1)).x
        kept = found[np.argsort(s / g)]
        assert (np.diff(kept) <= 1e-9).all()
        between = (kept > 1e-9) & (kept < 1 - 1e-9)
        assert between.sum() <= 1
        parts += between.sum()
    assert parts == 20  # so Remark 3.7 is the rule and no exception


def test_norms_from_random_directions() -> None:
    """Chen et al., Lemma 3.8: k squared products with normal vectors are s²/k χ²_k on average, and
    miss s² by more than ε s² with a probability of at most 2/(kε²).
    """
    for k in (1, 2, 10, 100, 10_000):
        for epsilon in (0.01, 0.1, 0.45, 1.0, 3.0):
            misses = chi2.sf(k * (1 + epsilon), k) + chi2.cdf(k * max(1 - epsilon, 0), k)
            assert misses <= 2 / (k * epsilon**2)
    gradient = torch.randn(7, generator=torch_rng(), dtype=torch.float64)
    products = torch.randn(4000, 10, 7, generator=torch_rng(1), dtype=torch.float64) @ gradient
    errors = products.square().mean(1) / gradient.square().sum() - 1
    expected = chi2.sf(15, 10) + chi2.cdf(5, 10)
    assert float((errors.abs() > 0.5).double().mean()) == pytest.approx(expected, abs=0.02)


# ------------------------------------------------------------------------------------------ Refiner


def test_a_biased_gradient_does_not_converge() -> None:
    """Refiner, Theorem 1, bounds the loss above its minimum by (2κ/(γ + N)) (…), which vanishes as
    N grows. Here its four assumptions hold: one client, one sample x, loss ½(θ - x)², so that
    L = u = κ = 1, γ = 8, σ = Γ = 0. The robust data is x + ε, whose gradient is ε away. Gradient
    descent at the theorem's rate ends at x + ε, with a loss of ε²/2 above the minimum at any N.
    """
    x, epsilon, theta = 0.0, 0.5, 0.0
    largest = 0.0
    broken = []
    for step in range(2000):
        shared = theta - (x + epsilon)
        largest = max(largest, abs(theta - x), abs(shared))
        theta -= 2 / (8 + step) * shared
        n = step + 1
        bound = 2 / (8 + n) * (epsilon**2 + 4 * (epsilon**2 + largest**2) + 0)  # starts at θ*
        if (theta - x) ** 2 / 2 > bound:
            broken.append(n)
    assert largest <= 2 * epsilon  # G is bounded
    assert (theta - x) ** 2 / 2 == pytest.approx(epsilon**2 / 2, rel=1e-3)
    assert broken == list(range(broken[0], 2001))
    assert broken[0] < 200


def test_squared_distances_are_no_distances() -> None:
    """Refiner, Eq. 8: ‖x̂ - x‖² ≥ ‖x* - x‖² - σ, with σ ≥ ‖x̂ - x*‖². In the middle between x* and x
    an attacker is nearer. Without the squares (Eq. 7) it is the triangle inequality.
    """
    x, robust, read = 0.0, 1.0, 0.5
    sigma = (read - robust) ** 2
    assert (read - x) ** 2 < (robust - x) ** 2 - sigma
    assert abs(read - x) >= abs(robust - x) - math.sqrt(sigma)
    # with the means of its Appendix K: 0.0839 between x* and x, at most 0.00053 between x̂ and x*
    assert (math.sqrt(0.0839) - math.sqrt(0.00053)) ** 2 < 0.86 * (0.0839 - 0.00053)


def test_an_attacker_may_smooth_what_it_recovers() -> None:
    """Refiner, Eq. 9: D(x̂) ≥ D(x*) - σ, by which what is recovered has as much noise as the robust
    data, but for an attack's own error σ, of which the paper finds 0.003 to 0.007. An attacker that
    has recovered robust data exactly, and smooths it, has far less noise, and is nearer to the
    data.
    """
    network = load_network("image-evaluation-network-32")
    coarse = torch.rand(16, 3, 4, 4, generator=torch_rng())
    images = interpolate(coarse, size=32, mode="bilinear", align_corners=True)
    robust = (images + torch.rand(images.shape, generator=torch_rng(1))) / 2
    smoothed = avg_pool2d(robust, 3, stride=1, padding=1, count_include_pad=False)
    with torch.no_grad():
        noise, left, own = (network.noise_ratio(x) for x in (robust, smoothed, images))
    assert (own < noise - 0.2).all()
    assert (left < noise - 0.25).all()
    errors = [(x - images).square().flatten(1).mean(1) for x in (smoothed, robust)]
    assert (errors[0] < errors[1]).all()


def test_the_evaluation_networks_loss_is_a_divergence() -> None:
    """Refiner, Appendix C: ½ max_D (E_p ln(1 - D) + E_q ln D) + ln 2 is the divergence of Jensen
    and Shannon, at D = q/(p + q).
    """
    draw = torch_rng()
    for _ in range(20):
        p, q = torch.rand(2, 9, generator=draw, dtype=torch.float64).softmax(1)
        mean = (p + q) / 2
        divergence = ((p * (p / mean).log()).sum() + (q * (q / mean).log()).sum()) / 2

        def value(d: torch.Tensor, p: torch.Tensor = p, q: torch.Tensor = q) -> torch.Tensor:
            return ((p * (1 - d).log()).sum(-1) + (q * d.log()).sum(-1)) / 2 + math.log(2)

        torch.testing.assert_close(value(q / (p + q)), divergence)
        others = torch.rand(200, 9, generator=draw, dtype=torch.float64)
        assert (value(others) <= divergence).all()
