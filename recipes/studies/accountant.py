"""Does the accountant answer as dp-accounting does, and how soon?"""

import itertools
import math
import time

import dp_accounting
import numpy as np
from dp_accounting.pld import PLDAccountant
from scipy.stats import norm

from hf_gradguard.leakage import dp_sgd_epsilon
from hf_gradguard.leakage.differential_privacy import of_rounded_sums

from ..study import Study
from .lib.tables import write_table

DELTA = 1e-5
MULTIPLIERS = (1e-6, 1e-3, 0.02, 0.3, 0.7, 1.5, 4.0, 30.0, 1e3, 1e6)
RATES = (1e-4, 1e-2, 0.2, 1.0)
MESSAGES = (1, 100, 10_000)
LEAST_COMPARED = 0.3
"""σ below which dp-accounting asks for gigabytes, or for minutes, where rows are drawn."""


class Accountant(Study):
    """ε of dp_sgd at δ = 1e-5 over noise multipliers, sampling rates and numbers of messages, with
    the seconds of the answer.

    Beside it stand dp-accounting's: its own Gaussian mechanism where each row is in all messages,
    else its privacy loss distributions. They are rounded up on a grid of 1e-4, which small ε are
    lost in. Where rows are drawn, losses are composed once more by quadrature and one Fourier
    transform, without bounds on what is cut off.
    """

    def cells(self) -> dict:
        multipliers = (0.02, 1.5) if self.quick else MULTIPLIERS
        rates = (0.2, 1.0) if self.quick else RATES
        return {
            (f"{multiplier:g}", f"{rate:g}, {messages:,}"): {
                "noise_multiplier": multiplier, "rate": rate, "messages": messages,
            }
            for multiplier, rate, messages in itertools.product(
                multipliers, rates, MESSAGES[: 2 if self.quick else None]
            )
        }  # fmt: skip

    def measure(self, cell: dict) -> dict:
        run = cell["noise_multiplier"], cell["rate"], cell["messages"]
        began = time.perf_counter()
        epsilon = dp_sgd_epsilon(*run, DELTA)
        seconds = time.perf_counter() - began
        found = {"epsilon": epsilon, "seconds": round(seconds, 3)}
        return found | {name: e for name, e in _others(*run).items() if math.isfinite(e)}

    def report(self, metrics: dict) -> None:
        columns = list(next(iter(metrics.values())))
        header = [
            "σ; ε, over dp-accounting's, over quadrature's, seconds; by rate and messages",
            *columns,
        ]
        rows = [
            [multiplier, *(_text(cells[column]) for column in columns)]
            for multiplier, cells in metrics.items()
        ]
        write_table(self.output, header, rows)


def _others(multiplier: float, rate: float, messages: int) -> dict[str, float]:
    """Return ε as dp-accounting has it, as far as it answers, and by quadrature."""
    counted = of_rounded_sums(multiplier)
    if rate == 1:
        exact = dp_accounting.get_epsilon_gaussian(counted / math.sqrt(messages), DELTA)
        return {"dp_accounting": float(exact), "direct": float(exact)}
    if multiplier < LEAST_COMPARED:
        return {}
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(counted))
    return {
        "dp_accounting": float(PLDAccountant().compose(event, messages).get_epsilon(DELTA)),
        "direct": direct_epsilon(counted, rate, messages),
    }


def direct_epsilon(multiplier: float, rate: float, messages: int, delta: float = DELTA) -> float:
    """Return ε of the sampled Gaussian mechanism by quadrature of one message's privacy loss and a
    Fourier transform of its distribution: the larger one of a row that is removed or added.

    Args:
        multiplier: σ.
        rate: q, below 1.
        messages: T.
        delta: δ.
    """
    places = np.linspace(-12 * multiplier, 1 + 12 * multiplier, 400_001)
    with_row = (2 * places - 1) / (2 * multiplier**2)
    losses = np.logaddexp(math.log1p(-rate), math.log(rate) + with_row)
    absent, present = (norm.pdf(places, mean, multiplier) for mean in (0, 1))
    removed = (1 - rate) * absent + rate * present
    return max(_composed(losses, removed, messages, delta),
               _composed(-losses, absent, messages, delta))  # fmt: skip


def _composed(losses: np.ndarray, density: np.ndarray, messages: int, delta: float) -> float:
    """Return ε of T independent losses of a density. Each loss is shared by its neighbors on a grid
    such that the mean stays.
    """
    weights = density / density.sum()
    mean = weights @ losses
    deviation = math.sqrt(weights @ (losses - mean) ** 2)
    points = 2**21
    step = max(deviation / 200, 4 * float(np.ptp(losses)) / points)
    least = math.floor(losses.min() / step) - 1
    upper = losses / step - least
    cell = np.floor(upper).astype(int)
    share = upper - cell
    chances = np.bincount(cell, weights * (1 - share), points)
    chances += np.bincount(cell + 1, weights * share, points)
    sums = np.fft.irfft(np.fft.rfft(chances) ** messages, points)
    # the transform is periodic: sums lie around their mean
    first = round(messages * mean / step) - messages * least - points // 2
    places = np.arange(points) + first
    values = (places + messages * least) * step
    sums = np.maximum(sums[places % points], 0)

    def delta_of(epsilon: float) -> float:
        above = slice(int(np.searchsorted(values, epsilon)), None)
        return float(sums[above] @ -np.expm1(epsilon - values[above]))

    low, high = 0.0, max(float(values[-1]), 0.0)
    if delta_of(low) <= delta:
        return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle) > delta else (low, middle)
    return high


def _text(cell: dict) -> str:
    ratios = [
        f"{cell['epsilon'] / cell[other]:.4f}" if cell.get(other) else "-"
        for other in ("dp_accounting", "direct")
    ]
    return f"{cell['epsilon']:.4g}; {', '.join(ratios)}; {cell['seconds']:.1f} s"
