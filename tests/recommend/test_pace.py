"""A budget of minutes that is kept, by a clock that the tests move."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerControl

from hf_gradguard.audit.client import modality_of
from hf_gradguard.audit.run import make_defenses
from hf_gradguard.audit.settings import AuditSettings
from hf_gradguard.recommend import pace as pace_module
from hf_gradguard.recommend.pace import OutOfTime, Pace, Progress
from hf_gradguard.recommend.trial_settings import TrialSettings
from hf_gradguard.recommend.trials import MOST_RATES, Split, Trials
from hf_gradguard.testing.small import WORDS, small_text_task

TEXTS = [(" ".join(WORDS[i : i + 4]), i % 2) for i in range(40)]
NONE = make_defenses("none")["none"]


class Clock:
    """Seconds that pass as a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(pace_module, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def steps(progress: Progress, clock: Clock, seconds: list[float]) -> int:
    """How many steps of a training are taken, each of so many seconds."""
    control, state = TrainerControl(), SimpleNamespace(max_steps=len(seconds), global_step=0)
    progress.on_train_begin(None, state, control)
    for duration in seconds:
        clock.now += duration
        state.global_step += 1
        progress.on_step_end(None, state, control)
        if control.should_training_stop:
            break
    progress.on_train_end(None, state, control)
    return state.global_step


def test_what_fits_leaves_what_is_reserved(clock: Clock) -> None:
    pace = Pace(minutes=1)
    assert pace.fits(60)
    assert not pace.fits(60.1)
    pace.reserved = 20
    assert pace.fits(40)
    assert not pace.fits(41)
    clock.now += 30
    assert pace.left == 30
    assert not pace.fits(11)
    assert Pace(math.inf).fits(1e9)


def test_a_training_that_gets_slower_is_ended(clock: Clock) -> None:
    pace = Pace(minutes=1)
    quick = Progress(pace, "none", "quick")
    assert steps(quick, clock, [2.0] * 10) == 10
    assert not quick.is_late
    assert pace.step_seconds == pytest.approx(2)
    slow = Progress(pace, "none", "slow")  # 40 seconds are left
    taken = steps(slow, clock, [1.0] * 5 + [8.0] * 15)
    assert slow.is_late
    assert 5 < taken < 9
    assert pace.left > 0


def test_a_slow_defense_makes_no_slow_machine(clock: Clock) -> None:
    pace = Pace(minutes=60)
    pace.measured("none", 0.5)
    pace.compared("sketch", 3.0)
    assert (pace.step_of("none"), pace.step_of("sketch")) == (0.5, 3.0)
    steps(Progress(pace, "sketch", "the machine is twice as slow now"), clock, [6.0] * 5)
    found = [pace.step_of(label) for label in ("none", "sketch", "never measured")]
    assert found == pytest.approx([1.0, 6.0, 1.0])


@pytest.mark.parametrize(("step", "taken"), [(1.0, 4), (4.0, 3), (20.0, 1)])
def test_measuring_a_slow_defense_ends_soon(clock: Clock, step: float, taken: int) -> None:
    pace, progress = Pace(minutes=1), Progress(Pace(1), "sketch", "measuring", longest=10)
    assert steps(progress, clock, [step] * 4) == taken
    assert progress.step_seconds == pytest.approx(step)
    assert (progress.is_late, pace.step_seconds) == (False, 0.0)


def test_every_defense_is_measured(tmp_path: Path) -> None:
    pace, defenses = Pace(math.inf), make_defenses(["none", "pruning"])
    trials_on(tmp_path, pace).measure_speed(defenses)
    assert pace.step_seconds > 0
    assert list(pace.costs) == ["pruning"]
    assert pace.costs["pruning"] > 0


def trials_on(folder: Path, pace: Pace) -> Trials:
    model, _, tokenizer = small_text_task()
    modality = modality_of(model, tokenizer, AuditSettings())
    settings = TrialSettings(steps=3, batch_size=8)
    split = Split.draw(TEXTS, 4, batch_size=8)
    return Trials(model, tokenizer, modality, split, settings, folder, pace)


@pytest.mark.long
def test_no_training_begins_that_does_not_fit(tmp_path: Path, clock: Clock) -> None:
    pace = Pace(minutes=1)
    pace.step_seconds = 30.0
    trials = trials_on(tmp_path, pace)
    with pytest.raises(OutOfTime):
        trials.best("none", NONE)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_the_rates_that_were_tried_count_when_time_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials, tried = trials_on(tmp_path, Pace(math.inf)), list[float]()

    def choosing(label: str, defense: Any, rate: float) -> float:
        tried.append(rate)
        if len(tried) == 3:
            raise OutOfTime
        return rate  # the larger, the better

    monkeypatch.setattr(trials, "choosing", choosing)
    assert trials.best("none", NONE) == 4e-4
    assert tried == [2e-4, 4e-4, 8e-4]


def test_rates_of_an_earlier_run_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials, tried = trials_on(tmp_path, Pace(math.inf)), list[float]()

    def choosing(label: str, defense: Any, rate: float) -> float:
        tried.append(rate)
        trials._cells.once(trials._weights(label, defense, rate).stem, lambda: {})
        return rate  # the larger, the better

    monkeypatch.setattr(trials, "choosing", choosing)
    assert trials.best("none", NONE, most=3) == 8e-4
    assert trials.best("none", NONE, most=1) == 8e-4
    assert tried == 2 * [2e-4, 4e-4, 8e-4]
    assert not trials.has_judged("none", NONE, 8e-4, 0)


@pytest.mark.parametrize(
    ("best", "tried"),
    [(2e-4, {2e-4, 4e-4, 1e-4}), (8e-4, {2e-4, 4e-4, 8e-4, 16e-4}), (1e-9, None)],
)
def test_rates_are_tried_until_both_neighbors_are_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best: float, tried: set[float] | None
) -> None:
    trials, seen = trials_on(tmp_path, Pace(math.inf)), list[float]()

    def choosing(label: str, defense: Any, rate: float) -> float:
        seen.append(rate)
        return -abs(math.log(rate / best))

    monkeypatch.setattr(trials, "choosing", choosing)
    chosen = trials.best("none", NONE)
    assert len(seen) <= MOST_RATES
    if tried is None:  # there is no end
        assert len(seen) == MOST_RATES
    else:
        assert chosen == pytest.approx(best)
        assert sorted(seen) == pytest.approx(sorted(tried))
