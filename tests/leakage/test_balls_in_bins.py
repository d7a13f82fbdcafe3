"""Rows at secret places: against quadrature, closed forms, another library's accountant, and an
attack on what `dp_sgd` shares.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers import make_task
from scipy.optimize import brentq
from scipy.stats import norm

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.defenses.correlated import (
    Banded,
    CorrelatedNoise,
    make_factor,
    sensitivity,
    square_root,
)
from hf_gradguard.defenses.dp import DPSGD
from hf_gradguard.leakage import (
    balls_in_bins_epsilon,
    balls_in_bins_noise_multiplier,
    balls_in_bins_power,
    gaussian_epsilon,
    membership_power,
)
from hf_gradguard.leakage.balls_in_bins import _SHIFTS, _Pair
from hf_gradguard.leakage.differential_privacy import of_rounded_sums
from hf_gradguard.randomness import Stream

ONE = torch.tensor([1.0])


@pytest.mark.parametrize("sigma", [0.5, 1.5, 3.0])
def test_one_message_has_no_secret(sigma: float) -> None:
    exact = gaussian_epsilon(sigma, 1e-5)
    assert exact <= balls_in_bins_epsilon(ONE, sigma, 1, 1e-5) <= 1.01 * exact
    power = membership_power(sigma)
    assert power <= balls_in_bins_power(ONE, sigma, 1) <= 1.2 * power


def test_hardly_any_noise_has_no_small_epsilon() -> None:
    assert gaussian_epsilon(0.04, 1e-5) > 200
    assert balls_in_bins_epsilon(ONE, 0.04, 1, 1e-5) == math.inf


def quadrature(means: np.ndarray, delta: float) -> float:
    """ε of two messages by sums on a grid of both, the larger of two directions."""
    axis = np.arange(-9, 12, 0.01)
    first, second = np.meshgrid(axis, axis, indexing="ij")
    without = norm.pdf(first) * norm.pdf(second)
    with_row = np.mean(
        [norm.pdf(first - mean[0]) * norm.pdf(second - mean[1]) for mean in means], axis=0
    )

    def beyond(epsilon: float, p: np.ndarray, q: np.ndarray) -> float:
        return float(np.maximum(p - math.exp(epsilon) * q, 0).sum() * 1e-4) - delta

    return max(
        brentq(beyond, 0, 20, args=pair) for pair in ((with_row, without), (without, with_row))
    )


@pytest.mark.parametrize("column", [[1.0, 0.0], [1.0, 0.5], [1.0, 1.0]])
@pytest.mark.parametrize(("sigma", "bins"), [(0.8, 2), (1.5, 2), (0.8, 3), (1.0, 1)])
def test_two_messages_by_quadrature(column: list[float], sigma: float, bins: int) -> None:
    c = torch.tensor(column)
    means = np.array([column, [0.0, 1.0], [0.0, 0.0]])[:bins]
    if bins == 1:  # a row is in both
        means = means + np.array([[0.0, 1.0]])
    scale = sensitivity(c, 2 if bins == 1 else 1)
    for delta in (1e-2, 1e-5):
        exact = quadrature(means / (of_rounded_sums(sigma) * scale), delta)
        assert exact * 0.999 <= balls_in_bins_epsilon(c, sigma, bins, delta) <= exact * 1.02 + 0.01


def test_losses_are_those_of_dense_means() -> None:
    column, bins, sigma = square_root(11), 4, 0.7
    dense = torch.zeros(bins, 11, dtype=torch.float64)
    for place in range(bins):
        for start in range(place, 11, bins):
            dense[place, start:] += column[: 11 - start]
    dense /= of_rounded_sums(sigma) * sensitivity(column, 3, bins)
    pair = _Pair(column, sigma, bins, None)
    messages = torch.randn(50, 11)
    expected = (messages.double() @ dense.T - dense.square().sum(1) / 2).logsumexp(1)
    actual = pair._log_mean(pair._exponents(messages) - pair._squares / 2)
    torch.testing.assert_close(actual.double(), expected - math.log(bins), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(pair._means(torch.arange(bins)).double(), dense, atol=1e-6, rtol=0)


def test_places_of_no_message_count() -> None:
    """A row in one of four places, two of which are shared."""
    column, sigma = square_root(2), 0.8
    whole, partly = (balls_in_bins_epsilon(column, sigma, bins, 1e-3) for bins in (2, 4))
    assert partly < whole
    assert _Pair(column, sigma, 4, None)._squares[2:].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("kind", "bins", "sigma", "expected"),
    [
        ("square_root", 60, 0.8, (0.559, 1.4303, 2.076)),
        ("square_root", 20, 0.8, (1.0794, 2.2109, 3.0372)),
        ("blt", 20, 1.5, (0.2782, 0.9068, 1.3453)),
    ],
)
def test_another_library_agrees(
    kind: str, bins: int, sigma: float, expected: tuple[float, ...]
) -> None:
    """Opake 0.16.1's Monte Carlo of the same pair (`bnb_mc_pld`, 3 million draws), 60 messages."""
    passes = 60 // bins
    column = square_root(60)
    if kind == "blt":
        column = make_factor("blt", 60, passes, bins).column(60)
    ours = [balls_in_bins_epsilon(column, sigma, bins, delta) for delta in (1e-1, 1e-2, 1e-3)]
    assert ours == pytest.approx(expected, rel=0.015)


@pytest.mark.long
@pytest.mark.parametrize(("bins", "sigma", "exact"), [(100, 1.0, 0.6234), (1000, 0.6, 1.3900)])
def test_independent_noise_is_random_allocation(bins: int, sigma: float, exact: float) -> None:
    """Exact by privacy loss distributions (Feldman and Shenfeld, 2026; Opake 0.16.1)."""
    column = torch.zeros(bins)
    column[0] = 1
    assert balls_in_bins_epsilon(column, sigma, bins, 1e-5) == pytest.approx(exact, rel=0.015)


def test_shifted_draws_estimate_what_plain_ones_do() -> None:
    pair = _Pair(square_root(40), 0.8, 40, None)
    for draw in (pair.with_row, pair.without_row):
        plain, shifted = draw(400_000), draw(50_000, _SHIFTS)
        for epsilon in (0.0, 0.5, 1.0):
            means = []
            for losses, weights in (plain, shifted):
                beyond = weights * -torch.expm1((epsilon - losses).clamp(max=0))
                means.append((float(beyond.mean()), float(beyond.std()) / len(beyond) ** 0.5))
            (first, error), (second, other) = means
            assert abs(first - second) < 5 * math.hypot(error, other)
        assert float(shifted.weights.max()) <= len(_SHIFTS) * 1.001


def test_rows_that_point_elsewhere_tell_less() -> None:
    """The pair dominates rows whose gradients differ from place to place."""
    generator = torch.Generator().manual_seed(0)
    column, sigma, width, draws = square_root(4), 0.6, 3, 200_000
    aligned = balls_in_bins_epsilon(column, sigma, 4, 1e-2)
    dense = torch.zeros(4, 4)
    for place in range(4):
        dense[place, place:] = column[: 4 - place]
    dense /= sigma * sensitivity(column)
    for _ in range(5):
        rows = torch.nn.functional.normalize(torch.randn(4, width, generator=generator))
        means = (dense[..., None] * rows[:, None]).flatten(1)
        places = torch.randint(4, (draws,), generator=generator)
        messages = means[places] + torch.randn(draws, 4 * width, generator=generator)
        losses = (messages @ means.T - means.square().sum(1) / 2).logsumexp(1) - math.log(4)
        beyond = -torch.expm1((aligned - losses).clamp(max=0))
        assert float(beyond.mean()) < 1e-2


def shared_messages(factor: Banded, sigma: float, places: np.ndarray) -> np.ndarray:
    """What `dp_sgd`'s noise makes of one row of one number a client, `(clients, T)`."""
    messages = len(factor.bands)
    noise = []
    strength = sensitivity(factor.column(messages))
    correlated = CorrelatedNoise(factor, messages)
    for _ in range(messages):
        message_noise, correlated = correlated.draw(len(places), "cpu", Stream())
        noise.append(message_noise.numpy() * sigma * strength)
    sums = np.stack(noise, 1)
    members = places >= 0
    sums[members, places[members]] += 1
    return sums


@pytest.mark.statistics
@pytest.mark.parametrize("sigma", [0.5, 1.0])
def test_the_best_attack_finds_as_many_as_said(sigma: float) -> None:
    """Likelihood ratios of all messages, by whoever knows the factor and not the places."""
    messages, clients = 12, 20_000
    factor = Banded(tuple(square_root(messages).tolist()))
    places = np.random.default_rng(0).integers(messages, size=clients)
    places[clients // 2 :] = -1
    shared = shared_messages(factor, sigma, places)
    dense = np.array([[factor.bands[t - i] if t >= i else 0 for i in range(messages)]
                      for t in range(messages)])  # fmt: skip
    deviation = sigma * float(np.linalg.norm(dense[:, 0]))
    seen = shared @ dense.T / deviation  # white again
    exponents = seen @ dense / deviation - np.square(dense / deviation).sum(0) / 2
    ratios = np.log(np.exp(exponents).mean(1))
    members, others = ratios[: clients // 2], ratios[clients // 2 :]
    found = float((members > np.quantile(others, 0.99)).mean())
    bound = balls_in_bins_power(factor.column(messages), sigma, messages)
    # two standard deviations of threshold and share, beside the bound's own slack
    assert 0.75 * bound < found < bound + 2 * math.sqrt(2 * bound / (clients / 2))
    known = float(norm.cdf(norm.ppf(0.01) + 1 / sigma))
    assert found < known


def test_calibration_keeps_its_target() -> None:
    column = square_root(30)
    sigma = balls_in_bins_noise_multiplier(2.0, 1e-5, column, 30)
    assert 1.9 < balls_in_bins_epsilon(column, sigma, 30, 1e-5) <= 2
    assert gaussian_epsilon(sigma, 1e-5) > 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"column": torch.tensor([1.0, -0.5])}, "never rise"),
        ({"column": torch.tensor([1.0, 1.5])}, "never rise"),
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"bins": 0}, "bins"),
        ({"delta": 1.0}, "delta"),
    ],
)
def test_arguments_are_checked(settings: dict[str, Any], words: str) -> None:
    usual: dict[str, Any] = {"column": ONE, "noise_multiplier": 1.0, "bins": 1, "delta": 1e-5}
    with pytest.raises(ValueError, match=words):
        balls_in_bins_epsilon(**(usual | settings))


def test_too_few_draws_are_refused() -> None:
    with pytest.raises(ArithmeticError, match="more of them"):
        balls_in_bins_epsilon(square_root(500), 0.7, 500, 1e-9, draws=20)
    with pytest.raises(ValueError, match="too few"):
        balls_in_bins_power(ONE, 1.0, 1, false_alarms=0.99, draws=100)


def test_only_a_trainer_places_rows() -> None:
    settings: dict[str, Any] = {
        "per_sample": True,
        "correlated": True,
        "noise_multiplier": 1.0,
    }
    defense = make_defense("dp_sgd", sampling="balls_in_bins", messages=4, **settings)
    assert isinstance(defense, DPSGD)
    with pytest.raises(ValueError, match="needs a Trainer"):
        defense(GradientMap(*make_task("bert")))
    with pytest.raises(ValueError, match="sampling must be"):
        make_defense("dp_sgd", sampling="poisson", **settings)
    with pytest.raises(ValueError, match="per_sample=True"):
        make_defense("dp_sgd", sampling="balls_in_bins", correlated=True, scale=1.0)
    with pytest.raises(ValueError, match="correlated=True"):
        make_defense("dp_sgd", sampling="balls_in_bins", per_sample=True, noise_multiplier=1.0)
