"""Factors of the prefix sum, against dense matrices, every participation pattern, published
figures, and drawn noise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hf_gradguard.defenses import correlated
from hf_gradguard.defenses.correlated import (
    Banded,
    Buffered,
    Factor,
    final_error,
    invert_series,
    make_factor,
    prefix_error,
    sensitivity,
    square_root,
)

KINDS = ("blt", "banded", "square_root")
FALLING = "blt of a falling rate"


def factor_of(kind: str, *plan: int, bands: int | None = None) -> Factor:
    if kind == FALLING:
        return make_factor("blt", *plan, falling_rate=True)
    return make_factor(kind, *plan, bands=bands)  # type: ignore[arg-type]


def dense(column: Tensor) -> Tensor:
    """By its definition: entry (i, j) is c_{i-j}."""
    size = len(column)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    for row, place in itertools.product(range(size), range(size)):
        if row >= place:
            matrix[row, place] = column[row - place]
    return matrix


def patterns(messages: int, participations: int, separation: int) -> Iterator[tuple[int, ...]]:
    for count in range(1, participations + 1):
        for places in itertools.combinations(range(messages), count):
            if all(later - place >= separation for place, later in itertools.pairwise(places)):
                yield places


@pytest.mark.parametrize("kind", [*KINDS, FALLING])
@pytest.mark.parametrize("messages", [1, 2, 5, 8, 12])
def test_sensitivity_is_the_worst_pattern(kind: str, messages: int) -> None:
    for participations, separation in [(1, 1), (2, 1), (2, 3), (3, 2), (3, 4), (12, 1)]:
        factor = factor_of(kind, messages, participations, separation)
        column = factor.column(messages)
        matrix = dense(column)
        products = matrix.T @ matrix
        assert bool((products >= 0).all())  # so that vectors which agree are the worst
        worst = max(
            float(products[list(places)][:, list(places)].sum())
            for places in patterns(messages, participations, separation)
        )
        assert sensitivity(column, participations, separation) == pytest.approx(math.sqrt(worst))


def test_vectors_that_disagree_move_less() -> None:
    """The bound is of rows' parts of any direction."""
    generator = torch.Generator().manual_seed(1)
    column = make_factor("blt", 12, 3, 4).column(12)
    bound = sensitivity(column, 3, 4)
    for places in patterns(12, 3, 4):
        moved = torch.zeros(12, 5, dtype=torch.float64)
        moved[list(places)] = torch.nn.functional.normalize(
            torch.randn(len(places), 5, generator=generator, dtype=torch.float64), dim=1
        )
        assert float((dense(column) @ moved).norm()) <= bound


def test_a_column_that_rises_is_refused() -> None:
    for column in ([1.0, 0.5, 0.6], [1.0, -0.1]):
        with pytest.raises(ValueError, match="column"):
            sensitivity(torch.tensor(column))


@pytest.mark.parametrize("kind", [*KINDS, FALLING])
@pytest.mark.parametrize("messages", [1, 2, 7, 40, 300])
def test_streamed_noise_is_the_dense_inverse(kind: str, messages: int) -> None:
    factor = factor_of(kind, messages, bands=6)
    fresh = torch.randn(messages, 3, generator=torch.Generator().manual_seed(0)).double()
    memory = torch.zeros(factor.memory, 3, dtype=torch.float64)
    streamed = []
    for row in fresh:
        noise, memory = factor.correlate(row, memory)
        streamed.append(noise)
    expected = torch.linalg.solve_triangular(dense(factor.column(messages)), fresh, upper=False)
    torch.testing.assert_close(torch.stack(streamed), expected, rtol=1e-9, atol=1e-10)


def test_series_are_inverted() -> None:
    for messages in (1, 2, 3, 65, 1000):
        column = square_root(messages)
        inverse = invert_series(column)
        j = torch.arange(1, messages, dtype=torch.float64)  # of √(1 - x)
        expected = torch.cat([torch.ones(1).double(), ((2 * j - 3) / (2 * j)).cumprod(0)])
        torch.testing.assert_close(inverse, expected, rtol=1e-9, atol=1e-12)


def test_published_square_root() -> None:
    """binom(2j, j)/4^j; twice convolved it is the prefix sum. Its error is the squared norm of its
    column, between the bounds of Fichtenberger, Henzinger and Upadhyay (2023), which grow as
    ln(T)/π.
    """
    assert square_root(6).tolist() == [math.comb(2 * j, j) / 4**j for j in range(6)]
    matrix = dense(square_root(30))
    torch.testing.assert_close(matrix @ matrix, torch.ones(30, 30).double().tril())
    for messages in (8, 200, 1600, 4096):
        factor = make_factor("square_root", messages)
        column = factor.column(messages)
        error = float(prefix_error(factor, messages)[-1]) * sensitivity(column)
        assert error == pytest.approx(float(column.square().sum()))
        logarithm = math.log(messages) / math.pi
        assert 1 + logarithm < error < 1 + (math.log(4 * messages / 5) + 0.5772157) / math.pi + 0.1


@pytest.mark.long
def test_spread_of_the_error_by_kind() -> None:
    """Five buffers come within a thousandth of the optimum; independent noise has √T."""
    for messages in (200, 1600, 4096):
        errors = {}
        for kind in KINDS:
            factor = make_factor(kind, messages, bands=64)  # type: ignore[arg-type]
            error = float(prefix_error(factor, messages).max())
            errors[kind] = error * sensitivity(factor.column(messages))
        assert errors["square_root"] <= errors["blt"] < 1.002 * errors["square_root"]
        assert errors["square_root"] < errors["banded"] < math.sqrt(messages) / 2


def test_rows_in_several_messages_cost_less_than_in_independent_noise() -> None:
    for participations, separation in [(2, 100), (6, 50)]:
        messages = participations * separation
        for kind in ("blt", "banded"):
            factor = make_factor(kind, messages, participations, separation)
            column = factor.column(messages)
            error = float(prefix_error(factor, messages).max())
            error *= sensitivity(column, participations, separation)
            assert error < math.sqrt(participations * messages) / 4
        # bands no wider than the separation add up as strangers do: √k
        assert sensitivity(column, participations, separation) == pytest.approx(
            math.sqrt(participations) * float(column.norm())
        )


@pytest.mark.parametrize("messages", [1, 2, 12, 90])
def test_last_weights_after_a_falling_rate(messages: int) -> None:
    """By its definition, and no less than the noise of one message, which is weighted by 1."""
    rates = 1 - torch.arange(messages, dtype=torch.float64) / messages
    for factor in (factor_of(FALLING, messages), make_factor("square_root", messages)):
        column = factor.column(messages)
        error = final_error(factor, messages)
        assert error == pytest.approx(float((rates @ torch.linalg.inv(dense(column))).norm()))
        assert error * sensitivity(column) >= 1


def power(exponent: float, messages: int) -> Banded:
    """A to that power."""
    j = torch.arange(1, messages, dtype=torch.float64)
    return Banded((1.0, *((j - 1 + exponent) / j).cumprod(0).tolist()))


@pytest.mark.parametrize("messages", [200, 1600])
def test_a_falling_rate_leaves_less_noise(messages: int) -> None:
    """Five buffers trade noise in the last weights for noise on the way, as well as the best power
    of A does, and better than A^½, by a sixth to a quarter for a sixth more on the way.
    """

    def errors(factor: Factor) -> tuple[float, float]:
        strength = sensitivity(factor.column(messages))
        last = float(prefix_error(factor, messages)[-1])
        return strength * final_error(factor, messages), strength * last

    def squares(factor: Factor) -> float:
        final, last = errors(factor)
        return final**2 + 0.05 * last**2

    fitted, usual = factor_of(FALLING, messages), make_factor("blt", messages)
    best = min(squares(power(exponent / 100, messages)) for exponent in (55, 58, 61, 64))
    assert squares(fitted) < 1.002 * best < squares(usual)
    assert 0.7 < errors(fitted)[0] / errors(usual)[0] < 0.83
    assert 1 < errors(fitted)[1] / errors(usual)[1] < 1.17


@pytest.mark.parametrize("kind", [*KINDS, FALLING])
def test_sums_have_the_law_that_is_stated(kind: str) -> None:
    messages, draws = 60, 20_000
    factor = factor_of(kind, messages, bands=8)
    generator = torch.Generator().manual_seed(3)
    memory = torch.zeros(factor.memory, draws, dtype=torch.float64)
    total = torch.zeros(draws, dtype=torch.float64)
    weights = torch.zeros_like(total)
    measured = []
    for message in range(messages):
        fresh = torch.randn(draws, generator=generator, dtype=torch.float64)
        noise, memory = factor.correlate(fresh, memory)
        total += noise
        weights += (1 - message / messages) * noise
        measured.append(float(total.square().mean().sqrt()))
    stated = prefix_error(factor, messages)
    ratio = torch.tensor(measured).double() / stated
    assert float((ratio - 1).abs().max()) < 5 / math.sqrt(2 * draws)
    stated_last = final_error(factor, messages)
    assert float(weights.std()) == pytest.approx(stated_last, rel=5 / math.sqrt(2 * draws))


def test_settings_are_checked() -> None:
    for settings in (
        {"kind": "blt", "messages": 0}, {"kind": "banded", "messages": 5},
        {"kind": "fourier", "messages": 5}, {"kind": "blt", "messages": 5, "participations": 0},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"messages|bands|factorization|participations"):
            make_factor(**settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bands"):
        Banded((0.5, 0.5))
    for decays, weights in [((1.0,), (0.1,)), ((0.5,), (-0.1,)), ((0.5, 0.9), (0.3, 0.1))]:
        with pytest.raises(ValueError, match="decays"):
            Buffered(decays, weights)


def strategy(decays: list[float], weights: list[float], messages: int) -> Tensor:
    """c of a BLT in the parameters of Dvijotham et al.: c_t = Σ_i ω_i θ_i^(t-1)."""
    rates, scales = torch.tensor([decays, weights], dtype=torch.float64)
    powers = rates[:, None] ** torch.arange(messages - 1)
    return torch.cat([torch.ones(1, dtype=torch.float64), scales @ powers])


def test_sensitivity_of_a_published_blt() -> None:
    """Google's confidential-federated-compute states zCDP of 3.17226586 for this one, 100 messages,
    two participations 50 apart and σ = 1 (accounting_test.py, test_zcdp_for_blt): half the square.
    """
    column = strategy(
        [0.9999999999921251, 0.9944453083640997, 0.8985923474607591, 0.4912001418098778],
        [0.0070314825502323835, 0.10613806907600574, 0.1898159060327625, 0.1966594748073734],
        messages=100,
    )
    assert sensitivity(column, 2, 50) ** 2 / 2 == pytest.approx(3.17226586, abs=1e-8)


@pytest.mark.long
@pytest.mark.parametrize("messages", [100, 1_000, 10_000, 100_000])
def test_fitted_buffers_are_as_good_as_published_ones(messages: int) -> None:
    """jax_privacy holds its own three to five buffers to 1.03 of Mathias' bound 1 + ln(T)/π
    (buffered_toeplitz_test.py, test_optimize_single_participation_near_optimal).
    """
    factor = make_factor("blt", messages)
    noise = float(prefix_error(factor, messages)[-1]) * sensitivity(factor.column(messages))
    assert noise < 1.03 * (1 + math.log(messages) / math.pi)


@pytest.mark.long
def test_two_buffers_are_the_published_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """jax_privacy's best two buffers for 100 000 messages (test_optimize_single_participation_
    golden) have C⁻¹ of the same series, up to the four digits that are kept.
    """
    monkeypatch.setattr(correlated, "BUFFERS", 2)
    correlated._fitted.cache_clear()
    messages = 100_000
    fitted = make_factor("blt", messages)
    correlated._fitted.cache_clear()
    published = strategy([0.9999528892, 0.9857068667], [0.0122853238, 0.1878393665], messages)
    assert isinstance(fitted, Buffered)
    assert sorted(fitted.decays) == pytest.approx([0.78640, 0.99913], abs=1e-5)
    error = invert_series(published).cumsum(0).norm() * published.norm()
    noise = float(prefix_error(fitted, messages)[-1]) * sensitivity(fitted.column(messages))
    assert noise == pytest.approx(float(error), rel=1e-3)
    torch.testing.assert_close(fitted.column(messages), published, rtol=1e-2, atol=1e-4)
