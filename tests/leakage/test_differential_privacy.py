"""ε against dp-accounting's own accountants, published values and closed forms."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from hf_gradguard.leakage import (
    PrivacyAccount,
    dp_sgd_epsilon,
    dp_sgd_noise_multiplier,
    gaussian_epsilon,
    membership_power,
)
from hf_gradguard.leakage.differential_privacy import (
    NO_PROTECTION,
    TOLERANCE,
    least_noise,
    of_rounded_sums,
    protection_note,
)


def composed(accountant: dp_accounting.PrivacyAccountant, *runs: tuple[float, float, int]) -> float:
    for multiplier, rate, messages in runs:
        event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(multiplier))
        accountant.compose(event, messages)
    return float(accountant.get_epsilon(1e-5))


@pytest.mark.long
def test_epsilon_is_that_of_dp_accounting() -> None:
    """Its finer discretization gives a little less; Rényi accounting gives more."""
    run = (1.0, 0.01, 500)
    found = dp_sgd_epsilon(*run, delta=1e-5)
    exact = composed(PLDAccountant(), run)
    assert exact <= found <= exact * 1.001
    assert found < composed(RdpAccountant(), run)


@pytest.mark.parametrize(
    ("multiplier", "epochs", "published"), [(1.3, 15, 1.19), (1.1, 60, 3.01), (0.7, 45, 7.10)]
)
def test_published_values(multiplier: float, epochs: int, published: float) -> None:
    """The MNIST tutorial of TensorFlow Privacy: batches of 256 of 60,000, δ = 1e-5. It says ε by
    Rényi accounting with the classical conversion (Mironov, 2017); privacy loss distributions give
    less for the same run.
    """
    run = (multiplier, 256 / 60_000, epochs * 60_000 // 256)
    accountant = RdpAccountant([1 + k / 10 for k in range(1, 100)] + list(range(11, 64)))
    composed(accountant, run)
    classical = min(
        rdp + math.log(1e5) / (order - 1)
        for order, rdp in zip(accountant._orders, accountant.rdp, strict=True)
    )
    assert classical == pytest.approx(published, rel=0.01)
    found = dp_sgd_epsilon(*run, delta=1e-5)
    assert 0.6 * classical < found < classical


def test_without_sampling_it_is_the_gaussian_mechanism() -> None:
    """T messages with noise σ are one with noise σ/√T."""
    found = dp_sgd_epsilon(4.0, 1.0, 9, delta=1e-5)
    assert found == pytest.approx(gaussian_epsilon(4.0 / 3, 1e-5), rel=2e-3)
    assert found >= gaussian_epsilon(4.0 / 3, 1e-5)


@pytest.mark.long
def test_runs_with_different_noise_compose() -> None:
    account = PrivacyAccount({(1.0, 0.05): 20})
    account.add(2.0, 0.05, 30)
    exact = composed(PLDAccountant(), (1.0, 0.05, 20), (2.0, 0.05, 30))
    assert exact <= account.epsilon(1e-5) <= exact * 1.002


def test_more_messages_cost_more_and_none_cost_nothing() -> None:
    account = PrivacyAccount()
    assert account.epsilon(1e-5) == 0
    spent = []
    for _ in range(3):
        account.add(1.0, 0.1)
        spent.append(account.epsilon(1e-5))
    assert 0 < spent[0] < spent[1] < spent[2]


@pytest.mark.long
@pytest.mark.parametrize(("target", "rate", "messages"), [(4.0, 0.1, 60), (1.0, 0.05, 40)])
def test_calibration_is_the_inverse(target: float, rate: float, messages: int) -> None:
    multiplier = dp_sgd_noise_multiplier(target, 1e-5, rate, messages)
    assert dp_sgd_epsilon(multiplier, rate, messages, 1e-5) <= target
    assert dp_sgd_epsilon(multiplier * 0.995, rate, messages, 1e-5) > target


@pytest.mark.long
def test_calibration_counts_what_was_shared() -> None:
    account = PrivacyAccount({(1.0, 0.1): 20})
    multiplier = dp_sgd_noise_multiplier(4.0, 1e-5, 0.1, 20, account)
    account.add(multiplier, 0.1, 20)
    assert 3.9 < account.epsilon(1e-5) <= 4
    with pytest.raises(ValueError, match="is spent"):
        dp_sgd_noise_multiplier(2.0, 1e-5, 0.1, 20, account)


@pytest.mark.parametrize(("left", "is_spent"), [(0.005, True), (0.02, False)])
def test_the_last_hundredth_of_a_target_is_spent(left: float, is_spent: bool) -> None:
    """Noise for it grows without bounds: 2 % of ε = 2 left take more than twice the noise of all of
    it for as many messages, and half a percent would take four times.
    """
    account = PrivacyAccount({(4.0, 1.0): 4})
    target = account.epsilon(1e-5) / (1 - left)
    if is_spent:
        with pytest.raises(ValueError, match="is spent"):
            dp_sgd_noise_multiplier(target, 1e-5, 1.0, 4, account)
    else:
        multiplier = dp_sgd_noise_multiplier(target, 1e-5, 1.0, 4, account)
        assert multiplier > 2 * 4.0
        account.add(multiplier, 1.0, 4)
        assert account.epsilon(1e-5) <= target


@pytest.mark.parametrize("target", [0.3, 1.0, 2.0, 5.0, 9.0])
def test_calibrated_noise_is_the_least_to_a_thousandth(target: float) -> None:
    """More noise than that would cost accuracy for nothing; less would break the target."""
    multiplier = dp_sgd_noise_multiplier(target, 1e-5, 1.0, 10)
    assert dp_sgd_epsilon(multiplier, 1.0, 10, 1e-5) <= target
    assert dp_sgd_epsilon(multiplier / 1.0015, 1.0, 10, 1e-5) > target


@pytest.mark.parametrize("power", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("start", [1e-3, 1.0, 300.0])
def test_the_least_noise_of_a_known_curve(power: float, start: float) -> None:
    """Of ε = σ^-p the least σ is target^(-1/p)."""
    found = least_noise(lambda sigma: sigma**-power, 0.7, start, TOLERANCE)
    least = 0.7 ** (-1 / power)
    assert least <= found <= least * 1.001
    assert found**-power >= 0.7 * 0.995


def test_an_epsilon_is_called_no_protection_where_what_is_said_of_it_begins_to_hold() -> None:
    """The text says what share of members a test finds at 1 % false alarms: 1 - 0.99 e^-ε at most.
    At the threshold that is true, and at one less it is not.
    """
    assert protection_note(NO_PROTECTION) == ""
    text = protection_note(NO_PROTECTION * 1.0001)
    assert f"above {NO_PROTECTION:g}" in text
    share = float(text.partition("find ")[2].partition(" %")[0]) / 100
    assert "at 1 % FPR" in text.replace("\n", " ")
    assert 1 - 0.99 * math.exp(-(NO_PROTECTION - 1)) < share <= 1 - 0.99 * math.exp(-NO_PROTECTION)


def test_what_was_counted_is_restored_and_never_forgotten() -> None:
    saved = PrivacyAccount({(1.0, 0.1): 5})
    account = PrivacyAccount({(1.0, 0.1): 8, (2.0, 0.1): 1})
    account.load_state_dict(saved.state_dict())
    assert account.messages == {(1.0, 0.1): 8, (2.0, 0.1): 1}
    fresh = PrivacyAccount()
    fresh.load_state_dict(account.state_dict())
    assert fresh.messages == account.messages


@pytest.mark.parametrize(
    ("multiplier", "rate", "messages", "delta"),
    [(0.0, 0.1, 1, 1e-5), (1.0, 0.0, 1, 1e-5), (1.0, 1.1, 1, 1e-5), (1.0, 0.1, -1, 1e-5),
     (1.0, 0.1, 1, 0.0), (1.0, 0.1, 1, 1.0), (math.inf, 0.1, 1, 1e-5)],
)  # fmt: skip
def test_values_out_of_range(multiplier: float, rate: float, messages: int, delta: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        dp_sgd_epsilon(multiplier, rate, messages, delta)
    with pytest.raises(ValueError, match="target_epsilon"):
        dp_sgd_noise_multiplier(0.0, 1e-5, 0.1, 1)


@pytest.mark.parametrize(("sigma", "delta"), [(1.5, 1e-3), (0.7, 1e-5), (4.0, 1e-2)])
def test_power_is_the_other_side_of_epsilon(sigma: float, delta: float) -> None:
    """δ at ε is the most by which power exceeds e^ε times the false alarms (Wasserman and Zhou,
    2010), over all of these.
    """
    epsilon = gaussian_epsilon(of_rounded_sums(sigma), delta)
    # About the test at which both densities differ by e^ε.
    edges = np.linspace(epsilon * sigma + 0.5 / sigma - 2, epsilon * sigma + 0.5 / sigma + 2, 4001)
    alarms = [0.5 * math.erfc(edge / math.sqrt(2)) for edge in edges]
    excess = [membership_power(sigma, alarm) - math.exp(epsilon) * alarm for alarm in alarms]
    assert max(excess) == pytest.approx(delta, rel=1e-4)


def test_power_is_that_of_the_best_test() -> None:
    """Likelihood ratios of messages with a member of norm C and without; several add up."""
    rng, draws, sigma = np.random.default_rng(0), 200_000, 1.5
    for messages in (1, 4):
        without = rng.normal(size=(draws, messages)).sum(1)
        member = (1 / sigma + rng.normal(size=(draws, messages))).sum(1)
        found = float((member > np.quantile(without, 0.99)).mean())
        wanted = membership_power(sigma, 0.01, messages)
        assert found == pytest.approx(wanted, abs=5 * math.sqrt(wanted / draws) + 0.001)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((0.0,), "noise_multiplier must be above 0"),
        ((1.0, 1.0), "false_alarms must be between 0 and 1"),
        ((1.0, 0.01, 0), "messages must be at least 1"),
    ],
)
def test_power_out_of_range(settings: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        membership_power(*settings)
