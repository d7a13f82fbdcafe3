"""Every figure of a log, by name: what others see at once, after 50 messages, or as a mean of them;
which callbacks are a rank's own console; and what a card says of data.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from transformers import TrainerCallback, trainer_callback
from transformers.integrations import integration_utils

from hf_gradguard.training import logs
from hf_gradguard.training.logs import (
    LEAST_MESSAGES,
    MESSAGES,
    PUBLISHED,
    LogPolicy,
    PooledLogs,
    PrivateMetrics,
    is_console,
    uploads_console,
    without_rows,
)

OF_NO_BATCH = ["step", "epoch", "learning_rate", "grad_norm", "train_runtime",
               "train_samples_per_second", "train_steps_per_second"]  # fmt: skip
OF_GRADIENTS = [
    "defense/cosine",
    "leakage/i2f_lower_bound",
]  # PrivateMetrics rounds or withholds them
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
    entry = PooledLogs(1).add({"leakage/dfil_bound": 0.1, "margin": 0.5, "step": 3})
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
    assert is_console(silent.__new__(silent)) == (name in CONSOLES)


@pytest.mark.parametrize("name", sorted(CONSOLES))
def test_consoles_are_known_by_name(name: str) -> None:
    """Also where the library that has it is not installed."""
    assert is_console(type(name, (TrainerCallback,), {})())
    assert is_console(type("Own", (type(name, (TrainerCallback,), {}),), {})())


def test_trackers_are_among_what_is_looked_at() -> None:
    assert len(callbacks()) > len(integration_utils.INTEGRATION_TO_CALLBACK)
    assert trackers_and_flow() <= callbacks().keys()


def test_no_figure_that_claims_a_proof_is_logged_where_the_noise_is_known() -> None:
    """Every name of a log by which somebody reads an ε off, whichever the code has: ε itself, and
    the multiplier of noise, from which it is computed.
    """
    source = Path(logs.__file__).parent
    text = "\n".join(path.read_text("utf-8") for path in source.rglob("*.py"))
    claims = set(re.findall(r'"(defense/\w*(?:epsilon|multiplier)\w*)"', text))
    assert len(claims) > 2
    figures = dict.fromkeys(claims, 1.0) | {"defense/noise_scale": 1.0}
    known, secret = (
        LogPolicy(1, is_noise_known=known).measured(figures) for known in (True, False)
    )
    assert known == {"defense/noise_scale": 1.0}
    assert secret == figures


@pytest.mark.parametrize("name", sorted(kind for kind in callbacks() if kind.endswith("Callback")))
def test_trackers_that_upload_what_is_printed_are_known(name: str) -> None:
    """Of Transformers' own integrations, these five capture the console of a run by themselves, as
    their documentation says; the others send what is logged.
    """
    capture = {"Wandb", "Comet", "ClearML", "Neptune", "SwanLab"}
    uploads = name.removesuffix("Callback") in capture
    assert bool(uploads_console([type(name, (TrainerCallback,), {})()])) == uploads


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
def test_what_is_of_no_gradient_is_logged_and_saved(name: str) -> None:
    """At the first message, to all digits. All else waits for 50, or stays out."""
    is_public, figure = name in OF_NO_GRADIENT, 0.123456
    assert (name in PrivateMetrics().means({name: figure}, messages=1)) == is_public
    means = PrivateMetrics()
    means.means({name: figure}, messages=49)
    assert means.means({name: figure}, messages=50)[name] == (figure if is_public else 0.12)
    entry = {"step": 1, "learning_rate": 0.1, name: figure}
    state = LogPolicy(messages_per_step=1).public_state({"log_history": [entry], "total_flos": 1.0})
    (saved,) = state["log_history"]
    assert (name in saved) == is_public


@pytest.mark.parametrize("name", ["total_flos", "num_input_tokens_seen"])
def test_a_saved_state_counts_as_its_log_does(name: str) -> None:
    """To the last 50 messages that are shown: what came since is of few batches."""
    log = [{"loss": 1.0, "step": step, name: 8 * step} for step in (49, 50, 70)]
    state = LogPolicy(messages_per_step=1).public_state({"log_history": log, name: 560})
    assert state[name] == 400


# Windows. Each entry of a history is of messages of its own, and has figures that are means of
# them. A public figure's weights say how far it follows each entry's. Whoever has all public
# figures has all their sums and differences, too: none may be of fewer than 50 messages.


class Logged(NamedTuple):
    """An entry of a history.

    Args:
        messages: How many were shared since the entry before it.
        entry: Whether it has a loss, and a figure beside the loss; else leakage alone is logged.
        writes: Whether a file is written after it.
    """

    messages: int
    entry: str
    writes: bool


Runs = some.lists(
    some.builds(
        Logged, some.integers(0, 60), some.sampled_from(["loss", "figure", "leakage"]),
        some.booleans(),
    ),
    min_size=1, max_size=12,
)  # fmt: skip


def history_of(run: list[Logged], follows: int | None) -> list[dict[str, Any]]:
    """A history of messages whose figures are 1 if they came with one entry, and else 0."""
    history: list[dict[str, Any]] = []
    total = since = ones = 0
    for place, (messages, kind, _) in enumerate(run):
        total, since = total + messages, since + messages
        ones += messages * (place == follows)
        entry: dict[str, Any] = {"step": total, MESSAGES: messages, "total_flos": 8 * total}
        history.append(entry)
        if kind == "leakage":
            entry["leakage/dfil_mean"] = 1.0
            continue
        figure = ones / max(since, 1)
        entry |= {"loss": figure} | ({"entropy": figure} if kind == "figure" else {})
        since = ones = 0
    mean = 0.0 if follows is None else run[follows].messages / max(total, 1)
    return [*history, {"train_loss": mean, "step": total, MESSAGES: 0, "train_runtime": 1.0}]


def public_figures(run: list[Logged], follows: int | None, name: str) -> list[float]:
    """All that leaves under a name: what a tracker is handed, what files hold that are written on
    the way, and the summary.
    """
    policy, history = LogPolicy(messages_per_step=1), history_of(run, follows)
    windows = PooledLogs(1)
    seen = [windows.add(entry) for entry in history]
    for place, logged in enumerate(run):
        if logged.writes or place == len(run) - 1:
            seen += policy.public_state({"log_history": history[: place + 1]})["log_history"]
    seen += policy.public_state({"log_history": history})["log_history"]
    seen.append(policy.public_summary(history[-1], history))
    names = {"loss", "train_loss"} if name == "loss" else {name}
    return [entry[n] for entry in seen for n in sorted(names) if n in entry]


def fewest_messages(weights: np.ndarray, counts: np.ndarray) -> int:
    """Of how few messages a sum or a difference of figures is, of which each row has the weights.
    Rows are reduced, so that each is free of as many entries as may be. Figures are rounded to four
    digits, and weigh an entry by 1/720 at least.
    """
    rows, start = weights.astype(float).copy(), 0
    for column in range(rows.shape[1]):
        sizes = np.abs(rows[start:, column])
        if not len(sizes) or sizes.max() < 5e-4:
            continue
        pivot = start + int(sizes.argmax())
        rows[[start, pivot]] = rows[[pivot, start]]
        rows[start] /= rows[start, column]
        for other in range(len(rows)):
            if other != start:
                rows[other] -= rows[other, column] * rows[start]
        start += 1
    supports = [np.abs(row) > 1e-3 for row in (*weights, *rows[:start])]
    return min((int(counts[support].sum()) for support in supports), default=LEAST_MESSAGES)


@given(Runs)
@pytest.mark.parametrize("name", ["loss", "entropy"])
def test_nothing_that_leaves_is_of_fewer_than_fifty_messages(name: str, run: list[Logged]) -> None:
    without = public_figures(run, None, name)
    assert not any(without)
    follows = [public_figures(run, place, name) for place in range(len(run))]
    if without:
        weights = np.array(follows).T
        counts = np.array([logged.messages for logged in run])
        assert fewest_messages(weights, counts) >= LEAST_MESSAGES


@given(Runs)
def test_counters_that_leave_are_fifty_messages_apart(run: list[Logged]) -> None:
    history = history_of(run, None)
    shown = [e["total_flos"] for e in PooledLogs(1).add_all(history) if "total_flos" in e]
    state = LogPolicy(1).public_state({"log_history": history})
    assert state["total_flos"] == (shown[-1] if shown else 0)
    apart = np.diff([0, *shown])
    assert (apart >= 8 * LEAST_MESSAGES).all()


@given(
    some.lists(
        some.tuples(some.integers(0, 60), some.integers(0, 60), some.booleans()), max_size=15
    )
)
def test_metrics_that_leave_are_of_fifty_messages_that_were_measured(
    run: list[tuple[int, int, bool]],
) -> None:
    """However few of a run's messages are measured, and however often it is logged."""
    private, total, pooled = PrivateMetrics(), 0, {"defense/cosine": 0, "leakage/dfil_mean": 0}
    for messages, measured, has_leakage in run:
        total += messages
        metrics, counts = {"defense/cosine": 0.123456}, {"defense/cosine": messages}
        if has_leakage and (measured := min(measured, messages)):
            metrics |= {"leakage/dfil_mean": 0.123456}
            counts |= {"leakage/dfil_mean": measured}
        for name in metrics:
            pooled[name] += counts[name]
        shown = private.means(metrics, total, counts)
        for name, value in shown.items():
            assert value == 0.12
            assert pooled[name] >= LEAST_MESSAGES
            pooled[name] = 0


@pytest.mark.parametrize("published", [True, False])
def test_metrics_of_a_history_leave_if_they_were_published(published: bool) -> None:
    """As after `private_metrics="log"` was set for a run that is resumed: what stands in its
    history is of single messages.
    """
    entry = {"loss": 1.0, "step": 50, "defense/cosine": 0.123456, "defense/seconds": 1.0}
    history = [entry | ({PUBLISHED: True} if published else {})]
    policy = LogPolicy(messages_per_step=1, publishes_metrics=True)
    for (shown,) in (
        policy.public_history(history),
        policy.public_state({"log_history": history})["log_history"],
    ):
        assert ("defense/cosine" in shown) == published
        assert "defense/seconds" in shown
        assert PUBLISHED not in shown
