"""Every figure of a log, by name: what others see at once, after 50 messages, or as a mean of them;
which callbacks are a rank's own console; and what a card says of data.
"""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerCallback, trainer_callback
from transformers.integrations import integration_utils

from hf_gradguard.training.logs import PooledLogs, _is_console, pooled_logs, without_rows
from hf_gradguard.training.metrics import PrivateMetrics, without_private_metrics

OF_NO_BATCH = ["step", "epoch", "learning_rate", "grad_norm", "train_runtime",
               "train_samples_per_second", "train_steps_per_second"]  # fmt: skip
OF_GRADIENTS = ["defense/cosine", "leakage/i2f_lower_bound"]  # metrics.py rounds or withholds them
COUNTERS = ["total_flos", "num_input_tokens_seen", "num_tokens", "train_tokens_per_second",
            "train_tokens_per_second_per_gpu"]  # fmt: skip
OF_BATCHES = ["loss", "entropy", "mean_token_accuracy", "rewards/chosen", "logps/rejected",
              "margin", "a_newer_figure"]  # fmt: skip


@pytest.mark.parametrize("name", OF_NO_BATCH + OF_GRADIENTS)
def test_what_is_of_no_batch_is_shown_at_once(name: str) -> None:
    entry = {"loss": 2.0, "step": 7} | {name: 7}
    assert PooledLogs(1).add(entry)[name] == 7


@pytest.mark.parametrize("name", OF_BATCHES)
def test_what_is_of_batches_is_a_mean_of_fifty_messages(name: str) -> None:
    logs = PooledLogs(1)
    figures = {step: 0.01 * step for step in (20, 49, 50, 99, 100)}
    shown = {step: logs.add({"loss": 1.0, "step": step, name: v}) for step, v in figures.items()}
    assert [step for step, public in shown.items() if name in public] == [50, 100]
    assert shown[50][name] == pytest.approx((20 * 0.2 + 29 * 0.49 + 0.5) / 50, rel=1e-3)
    assert shown[100][name] == pytest.approx((49 * 0.99 + 1.0) / 50, rel=1e-3)


@pytest.mark.parametrize("name", COUNTERS)
def test_counters_are_shown_as_they_are_after_fifty_messages(name: str) -> None:
    """They are sums since the beginning: neither means, nor so often that a difference is one
    batch's.
    """
    logs, steps = PooledLogs(1), (20, 49, 50, 80, 99, 100)
    shown = {step: logs.add({"loss": 1.0, "step": step, name: 8 * step}) for step in steps}
    assert {s: public[name] for s, public in shown.items() if name in public} == {50: 400, 100: 800}


def test_leakage_alone_makes_an_entry_of_training() -> None:
    (entry,) = pooled_logs([{"leakage/dfil_bound": 0.1, "margin": 0.5, "step": 3}], 1)
    assert entry == {"leakage/dfil_bound": 0.1, "step": 3}


# Consoles

CONSOLES = {"PrinterCallback", "ProgressCallback", "NotebookProgressCallback",
            "RichProgressCallback"}  # fmt: skip
MODULES = ["transformers.trainer_callback", "transformers.integrations.integration_utils",
           "transformers.utils.notebook", "trl.trainer.callbacks"]  # fmt: skip


def callbacks() -> dict[str, type]:
    kinds: dict[str, type] = {}
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:  # of a library that is not installed
            continue
        kinds |= {
            kind.__name__: kind for kind in vars(module).values()
            if inspect.isclass(kind) and issubclass(kind, TrainerCallback)
        }  # fmt: skip
    return kinds


@pytest.mark.parametrize(("name", "kind"), callbacks().items())
def test_what_shows_single_losses_is_a_console(name: str, kind: type) -> None:
    silent = type(name, (kind,), {"__del__": lambda self: None})  # which wants what __init__ made
    assert _is_console(silent.__new__(silent)) == (name in CONSOLES)


@pytest.mark.parametrize("name", sorted(CONSOLES))
def test_consoles_are_known_by_name(name: str) -> None:
    """Also where the library that has it is not installed."""
    assert _is_console(type(name, (TrainerCallback,), {})())
    assert _is_console(type("Own", (type(name, (TrainerCallback,), {}),), {})())


def test_trackers_are_among_what_is_looked_at() -> None:
    assert len(callbacks()) > len(integration_utils.INTEGRATION_TO_CALLBACK)
    assert trackers_and_flow() <= callbacks().keys()


def trackers_and_flow() -> set[str]:
    kinds = {kind.__name__ for kind in integration_utils.INTEGRATION_TO_CALLBACK.values()}
    return kinds | {trainer_callback.DefaultFlowCallback.__name__}


# Cards

SHOWN_OF_DATA = ["name", "id", "revision", "split", "size", "columns", "loss"]
OF_ROWS = ["stats", "stats_table", "examples", "examples_table", "_example_columns", "newer"]


@pytest.mark.parametrize("data", ["train_datasets", "eval_datasets"])
def test_a_card_says_nothing_of_rows(data: str) -> None:
    card: Any = SimpleNamespace(train_datasets=[], eval_datasets=[])
    setattr(card, data, [dict.fromkeys(SHOWN_OF_DATA + OF_ROWS, "secret")])
    without_rows(card, widget=[], examples=None)
    assert getattr(card, data) == [dict.fromkeys(SHOWN_OF_DATA, "secret")]


# Metrics of true gradients

OF_NO_GRADIENT = ["defense/seconds", "defense/noise_scale", "defense/client_noise_multiplier",
                  "defense/epsilon", "defense/epsilon_secret_positions"]  # fmt: skip
OF_ONE = ["defense/relative_error", "defense/cosine", "defense/left_out", "leakage/dfil_bound",
          "defense/newer"]  # fmt: skip


@pytest.mark.parametrize("name", OF_NO_GRADIENT + OF_ONE)
def test_what_is_of_no_gradient_is_logged_and_saved(name: str, tmp_path: Path) -> None:
    """At the first message, to all digits. All else waits for 50, or stays out."""
    is_public, figure = name in OF_NO_GRADIENT, 0.123456
    assert (name in PrivateMetrics().means({name: figure}, messages=1)) == is_public
    means = PrivateMetrics()
    means.means({name: figure}, messages=49)
    assert means.means({name: figure}, messages=50)[name] == (figure if is_public else 0.12)
    state = tmp_path / "trainer_state.json"
    entry = {"step": 1, "learning_rate": 0.1, name: figure}
    state.write_text(json.dumps({"log_history": [entry], "total_flos": 1.0}))
    without_private_metrics(state, messages_per_step=1)
    (saved,) = json.loads(state.read_text())["log_history"]
    assert (name in saved) == is_public


@pytest.mark.parametrize("name", ["total_flos", "num_input_tokens_seen"])
def test_a_saved_state_counts_as_its_log_does(name: str, tmp_path: Path) -> None:
    """To the last 50 messages that are shown: what came since is of few batches."""
    state = tmp_path / "trainer_state.json"
    log = [{"loss": 1.0, "step": step, name: 8 * step} for step in (49, 50, 70)]
    state.write_text(json.dumps({"log_history": log, name: 560}))
    without_private_metrics(state, messages_per_step=1)
    assert json.loads(state.read_text())[name] == 400
