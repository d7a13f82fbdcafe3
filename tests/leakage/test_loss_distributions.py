"""ε over the whole range of noise, sampling rates and numbers of messages, against dp-accounting's
own accountants and closed forms.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, norm

from hf_gradguard.leakage import (
    PrivacyAccount,
    balls_in_bins_epsilon,
    balls_in_bins_noise_multiplier,
    balls_in_bins_power,
    dp_sgd_epsilon,
    dp_sgd_noise_multiplier,
    gaussian_epsilon,
    membership_power,
    subsampling_factor,
)
from hf_gradguard.leakage.differential_privacy import of_rounded_sums, protection_note

pytestmark = pytest.mark.timeout(120)

ACCURACY = 0.01
"""Of ε, relative to it; upward."""


def accountant_epsilon(
    accountant: dp_accounting.PrivacyAccountant, run: tuple[float, float, int], delta: float
) -> float:
    multiplier, rate, messages = run
    noise = dp_accounting.GaussianDpEvent(of_rounded_sums(multiplier))
    event = noise if rate == 1 else dp_accounting.PoissonSampledDpEvent(rate, noise)
    return float(accountant.compose(event, messages).get_epsilon(delta))


def optimistic_epsilon(run: tuple[float, float, int], delta: float, interval: float) -> float:
    """A lower bound: losses are rounded down."""
    multiplier, rate, messages = run
    losses = from_gaussian_mechanism(
        of_rounded_sums(multiplier), pessimistic_estimate=False,
        value_discretization_interval=interval, sampling_prob=rate, use_connect_dots=False,
    )  # fmt: skip
    return float(losses.self_compose(messages).get_epsilon_for_delta(delta))


def epsilon_of_known_places(run: tuple[float, float, int], delta: float) -> float:
    """Of an attacker that is told which messages hold the row: so many Gaussian mechanisms."""
    multiplier, rate, messages = run
    held = np.arange(messages + 1)
    chances, distances = (
        binom.pmf(held, messages, rate),
        np.sqrt(held) / of_rounded_sums(multiplier),
    )
    held, chances, distances = held[1:], chances[1:], distances[1:]

    def is_within(epsilon: float) -> bool:
        with np.errstate(over="ignore", invalid="ignore"):
            far = norm.logcdf(-distances / 2 - epsilon / distances) + epsilon
        found = norm.cdf(distances / 2 - epsilon / distances) - np.exp(np.minimum(far, 0))
        return float(chances @ np.maximum(found, 0)) <= delta

    low, high = 0.0, 2 * float(distances[-1]) ** 2 + 100 * float(distances[-1])
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if is_within(middle) else (middle, high)
    return high


def check_against_losses(run: tuple[float, float, int], delta: float) -> None:
    found = dp_sgd_epsilon(*run, delta)
    assert found <= (1 + ACCURACY) * accountant_epsilon(PLDAccountant(), run, delta)
    least = optimistic_epsilon(run, delta, interval=1e-3)
    assert found >= least or least == math.inf  # which it says where e^-loss is 0 in floats
    assert found <= accountant_epsilon(RdpAccountant(), run, delta)


@pytest.mark.parametrize(
    ("run", "delta"),
    [((0.3, 0.01, 100), 1e-5), ((1.0, 0.2, 30), 1e-10), ((2.0, 0.001, 10_000), 1e-6),
     ((10.0, 0.1, 100), 0.1), ((0.8, 0.9, 3), 1e-12)],
)  # fmt: skip
def test_epsilon_is_within_a_hundredth(run: tuple[float, float, int], delta: float) -> None:
    check_against_losses(run, delta)


GRID = itertools.product([0.3, 0.7, 1.5, 4.0, 30.0], [1e-5, 1e-3, 0.05, 0.7], [1, 100, 20_000])


@pytest.mark.slow
@pytest.mark.timeout(900)  # dp-accounting's own grids
@pytest.mark.parametrize("delta", [1e-10, 1e-3])
@pytest.mark.parametrize("run", GRID)
def test_epsilon_is_within_a_hundredth_everywhere(
    run: tuple[float, float, int], delta: float
) -> None:
    check_against_losses(run, delta)


@pytest.mark.parametrize("sigma", [1e-6, 1e-4, 0.02, 0.5, 7.0, 1e3, 1e6])
@pytest.mark.parametrize(("messages", "delta"), [(1, 1e-12), (30, 1e-5), (100_000, 0.5)])
def test_rows_in_all_messages_are_a_gaussian_mechanism(
    sigma: float, messages: int, delta: float
) -> None:
    found = dp_sgd_epsilon(sigma, 1.0, messages, delta)
    exact = dp_accounting.get_epsilon_gaussian(of_rounded_sums(sigma) / math.sqrt(messages), delta)
    assert found == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize(
    ("sigma", "rate", "messages", "delta"),
    [(1e-6, 0.01, 1_000, 1e-5), (1e-4, 0.3, 50, 1e-10), (1e-3, 1e-4, 2_000, 1e-6),
     (0.005, 0.5, 400, 0.1), (1e-6, 0.9, 1, 0.01)],
)  # fmt: skip
def test_hardly_any_noise_tells_how_often_a_row_was_there(
    sigma: float, rate: float, messages: int, delta: float
) -> None:
    """Secret places help by log 1/q for each of these messages, which is next to nothing."""
    run = (sigma, rate, messages)
    found, known = dp_sgd_epsilon(*run, delta), epsilon_of_known_places(run, delta)
    assert (1 - 3 * sigma**2 * math.log(1 / rate)) * known * (1 - 1e-3) <= found
    assert found <= known * (1 + 2e-3)
    assert found <= accountant_epsilon(RdpAccountant(), run, delta)


@pytest.mark.parametrize(
    ("sigma", "rate", "messages"), [(100.0, 0.01, 1_000), (1e3, 0.1, 2_000), (1e6, 0.5, 300)]
)
def test_a_tiny_epsilon_has_a_finer_grid(sigma: float, rate: float, messages: int) -> None:
    run, delta = (sigma, rate, messages), 1e-7
    found = dp_sgd_epsilon(*run, delta)
    assert 0 < found < 0.02
    losses = PLDAccountant(value_discretization_interval=found / 2_000)
    assert found == pytest.approx(accountant_epsilon(losses, run, delta), rel=ACCURACY)


def test_messages_of_very_different_noise_compose() -> None:
    """One row in the clear, in a thousandth of all cases, adds its probability to δ."""
    careful = {(1.0, 0.01): 2_000, (3.0, 1.0): 4}
    account = PrivacyAccount({**careful, (1e-6, 1e-3): 1})
    plain = PrivacyAccount(careful)
    assert account.epsilon(1e-5) > 4e11  # that message was sampled in more than δ of all cases
    assert plain.epsilon(2e-3) <= account.epsilon(2e-3) <= plain.epsilon(1e-3) * (1 + ACCURACY)


def test_delta_may_be_far_below_rounding() -> None:
    """A Fourier transform has no digits there, but under a tilt."""
    run = (1.0, 0.05, 200)
    found = [dp_sgd_epsilon(*run, 10.0**-power) for power in (5, 10, 20, 40, 80)]
    assert found == sorted(found)
    orders = [1 + k / 10 for k in range(1, 400)]
    for epsilon, power in zip(found, (5, 10, 20, 40, 80), strict=True):
        renyi = accountant_epsilon(RdpAccountant(orders), run, 10.0**-power)
        assert 0.8 * renyi < epsilon < renyi


strengths = st.floats(-3, 2).map(lambda power: 10.0**power)
rates = st.floats(-4, 0).map(lambda power: 10.0**power)


@settings(max_examples=30, deadline=None)
@given(
    sigma=strengths, rate=rates, messages=st.integers(1, 2_000),
    delta=st.floats(-10, -1).map(lambda power: 10.0**power), factor=st.floats(1, 3),
)  # fmt: skip
def test_more_of_anything_tells_more(
    sigma: float, rate: float, messages: int, delta: float, factor: float
) -> None:
    """Up to what a grid adds."""
    epsilon = dp_sgd_epsilon(sigma, rate, messages, delta)
    least = epsilon / (1 + ACCURACY)
    assert dp_sgd_epsilon(sigma / factor, rate, messages, delta) >= least
    assert dp_sgd_epsilon(sigma, min(1.0, rate * factor), messages, delta) >= least
    assert dp_sgd_epsilon(sigma, rate, math.ceil(messages * factor), delta) >= least
    assert dp_sgd_epsilon(sigma, rate, messages, delta / factor) >= least
    assert epsilon <= dp_sgd_epsilon(sigma, 1.0, messages, delta) * (1 + 1e-9)


@settings(max_examples=10, deadline=None)
@given(steps=st.lists(st.tuples(strengths, rates, st.integers(1, 50)), min_size=2, max_size=6))
def test_an_account_never_falls(steps: list[tuple[float, float, int]]) -> None:
    account, before = PrivacyAccount(), 0.0
    for step in steps:
        account.add(*step)
        assert account.epsilon(1e-5) >= before
        before = account.epsilon(1e-5)
        account.add(*step[:2])
        assert account.epsilon(1e-5) >= before
        before = account.epsilon(1e-5)


@pytest.mark.parametrize("target", [1e-3, 0.1, 20.0, 30.0, 1e4])
@pytest.mark.parametrize(("rate", "messages"), [(0.01, 20), (0.4, 2), (1.0, 1)])
def test_a_target_is_spent(target: float, rate: float, messages: int) -> None:
    sigma = dp_sgd_noise_multiplier(target, 1e-5, rate, messages)
    assert (1 - ACCURACY) * target <= dp_sgd_epsilon(sigma, rate, messages, 1e-5) <= target


@pytest.mark.long
@pytest.mark.parametrize("target", [1e-2, 1.0, 15.0, 300.0, 1e4])
@pytest.mark.parametrize(
    ("rate", "messages", "delta"), [(1e-3, 50_000, 1e-6), (0.2, 1_000, 1e-12), (0.9, 7, 0.01)]
)
def test_a_target_is_spent_by_many_messages(
    target: float, rate: float, messages: int, delta: float
) -> None:
    sigma = dp_sgd_noise_multiplier(target, delta, rate, messages)
    assert (1 - ACCURACY) * target <= dp_sgd_epsilon(sigma, rate, messages, delta) <= target


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((1e-3, 1e-10, 1.0, 100_000), "is out of reach.*has ε = .*fewer messages"),
     ((5.0, 1e-2, 1e-3, 3), "asks for no noise.*delta below"),
     ((1e300, 1e-5, 1.0, 1), "asks for no noise")],
)  # fmt: skip
def test_a_target_that_cannot_be_spent_is_refused(
    arguments: tuple[float, float, float, int], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        dp_sgd_noise_multiplier(*arguments)


@pytest.mark.parametrize("sigma", [1e-320, 1e-200, 1e-6, 1e6, 1e300])
@pytest.mark.parametrize("rate", [1e-6, 0.5, 1.0])
@pytest.mark.parametrize(("messages", "delta"), [(1, 1e-12), (100_000, 1e-5), (100_000, 1e-310)])
def test_the_utmost_has_an_answer(sigma: float, rate: float, messages: int, delta: float) -> None:
    epsilon = dp_sgd_epsilon(sigma, rate, messages, delta)
    assert epsilon >= 0
    assert epsilon > 1e6 or sigma > 1 or rate * messages < 1


@pytest.mark.parametrize("sigma", [1e-300, 1e-20, 1e-6, 1e-3])
def test_hardly_any_noise_hides_nothing(sigma: float) -> None:
    """Of single messages, at known and at secret places."""
    assert membership_power(sigma) == 1.0
    assert subsampling_factor(0.01, sigma, 1e-5) == 1.0
    exact = 1 / (2 * sigma) / sigma
    assert gaussian_epsilon(sigma, 1e-5) == pytest.approx(exact + norm.isf(1e-5) / sigma, rel=1e-4)
    column = torch.tensor([1.0, 0.5, 0.25])
    assert balls_in_bins_epsilon(column, sigma, 3, 1e-5, draws=2_000) == math.inf
    assert balls_in_bins_power(column, sigma, 3, draws=2_000) > 0.99


@pytest.mark.parametrize("sigma", [1e3, 1e6])
def test_much_noise_at_secret_places_tells_next_to_nothing(sigma: float) -> None:
    column = torch.tensor([1.0, 0.5, 0.25])
    assert balls_in_bins_epsilon(column, sigma, 3, 1e-3, draws=20_000) < 1e-3
    assert balls_in_bins_power(column, sigma, 3) < 0.015


@pytest.mark.parametrize(
    "call",
    [lambda: membership_power(math.inf), lambda: dp_sgd_epsilon(math.inf, 0.5, 1, 1e-5),
     lambda: balls_in_bins_epsilon(torch.tensor([1.0]), math.inf, 1, 1e-5)],
)  # fmt: skip
def test_noise_without_end_is_refused(call: Callable[[], float]) -> None:
    with pytest.raises(ValueError, match="above 0 and finite"):
        call()


def test_draws_tell_no_large_epsilon_apart() -> None:
    with pytest.raises(ValueError, match=r"at most 200.*dp_sgd_noise_multiplier"):
        balls_in_bins_noise_multiplier(300.0, 1e-5, torch.tensor([1.0, 0.5]), bins=2)


def test_no_protection_is_said_in_words() -> None:
    assert [bool(protection_note(epsilon)) for epsilon in (8.0, 10.0, 10.1, math.inf)] == [
        False, False, True, True,
    ]  # fmt: skip
    # What (ε, δ) allows: of nonmembers, 1 % are taken for members, and of members all but
    # e^-ε (1 - δ - 1 %) are.
    assert 1 - math.exp(-10.0) * 0.99 > 0.9999
    assert "99.99 % of the members at 1 % FPR" in protection_note(10.1)
