"""Does the accountant answer as dp-accounting does, and how soon?"""

import itertools
import math
import time

import dp_accounting
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

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
    else its privacy loss distributions, rounded up, and rounded down for a bound from below.
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
        header = ["σ; ε, over dp-accounting's (seconds), by rate and messages", *columns]
        rows = [
            [multiplier, *(_text(cells[column]) for column in columns)]
            for multiplier, cells in metrics.items()
        ]
        write_table(self.output, header, rows)


def _others(multiplier: float, rate: float, messages: int) -> dict[str, float]:
    """Return ε as dp-accounting has it, as far as it answers, and a lower bound of its."""
    counted = of_rounded_sums(multiplier)
    if rate == 1:
        exact = dp_accounting.get_epsilon_gaussian(counted / math.sqrt(messages), DELTA)
        return {"dp_accounting": float(exact), "at_least": float(exact)}
    if multiplier < LEAST_COMPARED:
        return {}
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(counted))
    losses = from_gaussian_mechanism(
        counted, pessimistic_estimate=False, value_discretization_interval=1e-4,
        sampling_prob=rate, use_connect_dots=False,
    )  # fmt: skip
    return {
        "dp_accounting": float(PLDAccountant().compose(event, messages).get_epsilon(DELTA)),
        "at_least": float(losses.self_compose(messages).get_epsilon_for_delta(DELTA)),
    }


def _text(cell: dict) -> str:
    ratio = ""
    if cell.get("dp_accounting"):
        ratio = f", {cell['epsilon'] / cell['dp_accounting']:.4f}"
    return f"{cell['epsilon']:.4g}{ratio} ({cell['seconds']:.1f} s)"
