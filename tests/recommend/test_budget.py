"""Rounds of attacks within a budget of minutes, by a clock that only trainings and attacks move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hf_gradguard.audit.cells import Audit
from hf_gradguard.audit.report.summary import Summary, summarize
from hf_gradguard.audit.run import make_defenses
from hf_gradguard.recommend import pace as pace_module
from hf_gradguard.recommend import recommendation as run_module
from hf_gradguard.recommend.evidence import Outcome, Proof, highest_leak
from hf_gradguard.recommend.explanation import messages_of
from hf_gradguard.recommend.intervals import accuracy_over_seeds, lost_over_seeds
from hf_gradguard.recommend.outcomes import outcome_of
from hf_gradguard.recommend.pace import OutOfTime, Pace
from hf_gradguard.recommend.recommendation import _Comparison
from hf_gradguard.recommend.trial_settings import TrialSettings

SPECS = ["none", "gaussian_noise", "pruning", "gradient_sketch"]
MESSAGES = 8  # of a round
STAGES = "start", "end"
Speed = Callable[[float], float]  # how many times as slow the machine is, by the time that passed


def summary_of(defenses: list[str], leaks: list[float], planned: int = MESSAGES) -> Summary:
    """Of an audit in which one attack recovered so much of each message."""
    settings = {
        "kind": "text", "main_score": "token_f1", "chance": "others", "estimators": {},
        "messages": planned, "repeats": 1, "classes": 2,
    }  # fmt: skip
    places = [{"message": number, "repeat": 0, "defense": label}
              for number in range(len(leaks)) for label in defenses]  # fmt: skip
    return summarize(
        Audit(
            settings=settings, defenses={label: {} for label in defenses}, attacks={"span": {}},
            messages=[{"labels": [0]} for _ in leaks],
            chance=[{"token_f1": [0.05]} for _ in leaks],
            shared=[{**place, "relative_error": 1.0, "cosine": 0.0} for place in places],
            cells=[
                {**place, "attack": "span", "scores": {"token_f1": [leaks[place["message"]]]}}
                for place in places
            ],
        )
    )  # fmt: skip


class Heads:
    """Trains heads in name only: in so many seconds with the features, then in one."""

    def __init__(self, machine: Machine, seconds: float, count: int) -> None:
        self._machine, self._seconds = machine, seconds
        self.encoders = {f"head on {number}": str(number) for number in range(count)}
        self.seeds = set[tuple[str, int]]()

    def judging(self, label: str, seed: int) -> list[float]:
        if (label, seed) not in self.seeds:
            seconds = 1.0 if label in dict(self.seeds) else self._seconds
            if not self._machine.pace.fits(seconds):
                raise OutOfTime
            self._machine.spend(seconds)
        self.seeds.add((label, seed))
        return ([1.0] * 4 + [0.0]) * 40

    def outcome_of(self, label: str, accuracies: Any, plain: Any) -> Outcome:
        proof = Proof(1.5, 2.7, 1e-5, self.encoders[label], 1600)
        lost = lost_over_seeds(plain, accuracies)
        return Outcome(
            label, 10.0, accuracy_over_seeds(accuracies), lost, None, proof=proof,
            accuracy_by_sample=dict(enumerate(np.mean(accuracies, axis=0).tolist())),
            trainings=[0.8] * len(accuracies),
        )  # fmt: skip


class Machine:
    """Trains and attacks in name only, and takes its time."""

    model = None

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, minutes: float, step: float, message: float,
        slower: Speed = lambda passed: 1.0, costs: Mapping[str, float] | None = None,
        head: float = 1.0, heads: int = 0,
    ) -> None:  # fmt: skip
        self.passed, self.step, self.message, self.slower = 0.0, step, message, slower
        self.costs = costs or {}  # how many times as long a step takes, by defense
        clock = SimpleNamespace(monotonic=lambda: self.passed)
        for module in (pace_module, run_module):
            monkeypatch.setattr(module, "time", clock)
        self.pace, self.settings = Pace(minutes), TrialSettings(budget_minutes=minutes)
        self.rounds = dict[str, int]()  # messages that were attacked, by name
        self.final_seeds = [1, 2, 3]
        self.stored = set[Any]()
        self.heads = Heads(self, head, heads)

    def spend(self, seconds: float) -> None:
        self.passed += seconds * self.slower(self.passed)

    def untrained(self) -> list[float]:
        self.spend(5)
        return [0.0, 1.0] * 100

    def seconds(self, label: str) -> float:
        return self.step * self.costs.get(label, 1.0)

    def measure_speed(self, defenses: Mapping[str, Any]) -> None:
        for label in defenses:
            self.spend(4 * self.seconds(label))
            record = self.pace.measured if label == "none" else self.pace.compared
            record(label, self.seconds(label) * self.slower(self.passed))

    def train(self, label: str, *training: Any) -> None:
        training = (label, *training)
        if training in self.stored:
            return
        if not self.pace.fits(self.settings.steps * self.pace.step_of(label)):
            raise OutOfTime
        for done in range(self.settings.steps):
            self.spend(self.seconds(label))
            self.pace.measured(label, self.seconds(label) * self.slower(self.passed))
            remaining = (self.settings.steps - done - 1) * self.pace.step_of(label)
            if not self.pace.fits(remaining):
                raise OutOfTime
        self.stored.add(training)

    def best(self, label: str, defense: Any, most: int) -> float:
        self.train(label, 1)
        for rate in range(2, most + 1):
            try:
                self.train(label, rate)
            except OutOfTime:
                break
        return 1.0

    def judging(self, label: str, defense: Any, rate: float, seed: Any = None) -> list[float]:
        if seed is not None:
            self.train(label, rate, seed)
        self.spend(2)
        return ([1.0] * 9 + [0.0]) * 20

    def has_judged(self, label: str, defense: Any, rate: float, seed: int) -> bool:
        return (label, rate, seed) in self.stored

    def is_trained(self, label: str, defense: Any) -> bool:
        return (label, 1) in self.stored

    def guarantee_of(self, defense: Any) -> None:
        return None

    def trained(self, *training: Any) -> None:
        return None

    def drop(self, *training: Any) -> None:
        return None

    def attack_undefended(self, defense: Any, seconds: float) -> Summary:
        return self.attack({"none": defense}, "undefended", seconds=seconds)

    def attack(
        self, defenses: dict[str, Any], name: str, model: None = None, half: int = 0,
        seconds: float = 0.0,
    ) -> Summary:  # fmt: skip
        began, longest, count = self.passed, 0.0, 0
        while count < MESSAGES:
            before, is_new = self.passed, count >= self.rounds.get(name, 0)
            if is_new and count >= 2 and self.passed - began + longest >= seconds:
                break
            if is_new:  # else an earlier run did
                self.spend(self.message * len(defenses))
            longest, count = max(longest, self.passed - before), count + 1
        self.rounds[name] = count
        return summary_of(list(defenses), [float("none" in defenses)] * count)

    missing_heads = ""

    def compare(self) -> tuple[list[Outcome], str]:
        defenses: Any = make_defenses(SPECS)
        doubles: Any = self
        heads: Any = self.heads
        comparison = _Comparison(defenses, doubles, doubles, heads, self.settings, self.pace)
        judged = comparison.run()[1]
        self.missing_heads = comparison.missing_heads_words()
        return judged, comparison.limits_words()


@pytest.mark.parametrize("step", [0.05, 0.4, 1.0])
@pytest.mark.parametrize("message", [0.5, 9.0, 20.0])
@pytest.mark.parametrize(
    "slower",
    [lambda passed: 1.0, lambda passed: 1 + 2 * (passed > 200), lambda passed: 1 + passed / 400],
    ids=["even", "suddenly", "slowly"],
)
def test_the_budget_is_kept_however_slow_the_machine_gets(
    monkeypatch: pytest.MonkeyPatch, step: float, message: float, slower: Speed
) -> None:
    machine = Machine(monkeypatch, 15, step, message, slower)
    if step * slower(900) < 2:
        assert len(machine.compare()[0]) >= 2
    else:  # two trainings and their attacks may not fit
        with suppress(ValueError):
            machine.compare()
    # Past it by the rest of a message or a training's evaluation, and no more.
    assert machine.passed <= 15 * 60 + message * slower(machine.passed) + 20


def test_where_time_is_enough_every_message_is_attacked(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 60, step=0.1, message=2.0)
    judged, limits = machine.compare()
    assert {"undefended", "start1", "end0", "end1", "start2", "final_start"} <= set(machine.rounds)
    assert set(machine.rounds.values()) == {MESSAGES}
    assert limits == ""
    assert [len(one.leak_by_message) for one in judged] == [8, 16, 16, 16]
    assert [len(one.trainings) for one in judged] == [3] * 4


def test_where_time_is_short_two_are_compared_on_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 4, step=0.4, message=9.0)
    judged, limits = machine.compare()
    assert [one.defense for one in judged] == SPECS[:2]
    assert 2 <= min(machine.rounds.values()) < MESSAGES
    assert "Not tried, for lack of time (--budget_minutes): pruning, gradient_sketch." in limits
    assert "Time ended some attacks on none, gaussian_noise before all 8 messages" in limits
    assert machine.passed < 4 * 60 + 20


def test_behind_a_slow_defense_others_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its speed is its own: it stands neither for the machine's nor for that of other defenses."""
    machine = Machine(monkeypatch, 15, step=0.2, message=2.0, costs={"pruning": 8.0})
    judged, limits = machine.compare()
    assert [one.defense for one in judged] == ["none", "gaussian_noise", "pruning"]
    assert ("gradient_sketch", 1) in machine.stored
    assert limits.startswith("Trained on one seed alone, so not judged: gradient_sketch.")
    assert machine.passed < 15 * 60 + 20


def test_time_that_is_short_is_for_finalists_that_qualify(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one of three can be attacked further, it is the one within the budget; and if none is
    trained once more, the others are judged by their first trial.
    """
    machine = Machine(monkeypatch, 15, step=0.1, message=2.0)
    judge = _Comparison.judge

    def judge_at_the_end(self: _Comparison, plain: Outcome, last: list[Outcome]) -> list[Outcome]:
        assert [outcome.defense for outcome in last] == SPECS[1:]
        dear = [replace(o, lost=replace(o.lost, mean=0.045, low=0.01)) for o in last[:2]]
        self._pace._end = machine.passed + 40.0
        return judge(self, plain, [*dear, last[2]])

    monkeypatch.setattr(_Comparison, "judge", judge_at_the_end)
    judged, limits = machine.compare()
    assert [one.defense for one in judged] == SPECS
    assert [len(one.trainings) for one in judged] == [1] * 4
    attacked = [len(one.leak_by_message) for one in judged]
    assert attacked[3] > MESSAGES
    assert attacked[:3] == [MESSAGES] * 3
    assert "not judged" not in limits


def test_heads_are_trained_first_and_on_every_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch, 60, step=0.1, message=2.0, head=20.0, heads=2)
    judged, limits = machine.compare()
    assert [one.defense for one in judged] == ["none", "head on 0", "head on 1", *SPECS[1:]]
    assert [len(one.trainings) for one in judged] == [3, 4, 4, 3, 3, 3]
    assert machine.missing_heads == ""
    assert machine.heads.seeds == {(f"head on {n}", seed) for n in (0, 1) for seed in range(4)}
    assert limits == ""


def test_a_head_is_there_where_time_is_too_short_for_defenses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the second one, as of the defenses, is said that there was no time."""
    machine = Machine(monkeypatch, 4, step=0.6, message=9.0, head=25.0, heads=2)
    judged, limits = machine.compare()
    assert [one.defense for one in judged] == ["none", "head on 0", "head on 1"]
    assert "Not tried, for lack of time (--budget_minutes): gaussian_noise, pruning" in limits
    assert machine.passed < 4 * 60 + 20
    assert all(len(one.trainings) == 4 for one in judged[1:])
    slow = Machine(monkeypatch, 15, step=0.1, message=2.0, head=1000.0, heads=1)
    judged, limits = slow.compare()
    assert [one.defense for one in judged][:2] == SPECS[:2]
    assert "Not tried, for lack of time (--budget_minutes): head on 0" in limits


def test_an_encoder_that_no_head_can_be_on_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others are tried all the same."""
    machine = Machine(monkeypatch, 60, step=0.1, message=2.0, heads=2)
    judging = machine.heads.judging

    def refused(label: str, seed: int) -> list[float]:
        if label == "head on 0":
            raise ValueError("The encoder gives the same samples other features each time.")
        return judging(label, seed)

    monkeypatch.setattr(machine.heads, "judging", refused)
    judged, limits = machine.compare()
    assert [one.defense for one in judged] == ["none", "head on 1", *SPECS[1:]]
    assert limits == (
        "Not tried: head on 0. The encoder gives the same samples other features each time."
    )


def test_a_head_leaves_time_for_an_undefended_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """A price takes both: what a head takes is not taken from it."""
    machine = Machine(monkeypatch, 4, step=0.4, message=4.0, head=90.0, heads=2)
    judged, limits = machine.compare()
    assert [one.defense for one in judged] == ["none", "head on 0", "gaussian_noise"]
    assert "Not tried, for lack of time (--budget_minutes): head on 1, pruning, gradient_" in limits
    assert machine.missing_heads == (
        "There was no time for a head on 1, by proof: run the same command again, which tries it "
        "first, and takes the rest from what it stored."
    )


def test_beside_heads_no_defense_is_begun_that_cannot_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even attacked: what time is left is for more undefended trainings, or nobody's."""
    machine = Machine(monkeypatch, 4, step=1.0, message=4.0, head=40.0, heads=1)
    judged, limits = machine.compare()
    assert [one.defense for one in judged] == ["none", "head on 0"]
    assert set(machine.rounds) == {"undefended", "end0"}
    assert "--budget_minutes): gaussian_noise, pruning, gradient_sketch." in limits


def test_heads_are_stored_where_no_undefended_training_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next run takes no time for them."""
    machine = Machine(monkeypatch, 4, step=3.0, message=4.0, head=40.0, heads=1)
    with pytest.raises(ValueError, match=r"Stored, .*: head on 0 \(80 % \[\d+, \d+\]\)\. The same"):
        machine.compare()
    assert machine.heads.seeds == {("head on 0", seed) for seed in range(4)}
    machine.pace = Pace(7)
    machine.pace.step_seconds = 3.0
    assert [one.defense for one in machine.compare()[0]] == ["none", "head on 0"]


def test_a_head_that_had_no_time_has_it_in_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The undefended training is there by then, and no time is kept for it."""
    machine = Machine(monkeypatch, 5, step=1.0, message=4.0, head=200.0, heads=1)
    with suppress(ValueError):
        machine.compare()
    assert ("none", 1) in machine.stored
    assert not machine.heads.seeds
    machine.pace = Pace(5)
    machine.pace.step_seconds = 1.0
    assert [one.defense for one in machine.compare()[0]] == ["none", "head on 0"]


def test_a_budget_too_small_goes_on_from_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run stores a piece at least, so that a few of them come to a comparison."""
    machine = Machine(monkeypatch, 2, step=0.8, message=9.0)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"run it again, or allow more \(a training takes about"
        ):
            machine.compare()
        machine.pace = Pace(2)
        machine.pace.step_seconds = 0.8
    assert {"undefended", "end0", "start1"} == set(machine.rounds)
    judged, _ = machine.compare()
    assert [one.defense for one in judged] == SPECS[:2]


def test_messages_keep_their_places_where_a_round_was_ended() -> None:
    """Three of eight at the end, of the first half: the second half begins with the ninth."""
    first = {"start": summary_of(["a"], [0.1] * 8), "end": summary_of(["a"], [0.2] * 3)}
    second = {"start": summary_of(["a"], [0.1] * 8), "end": summary_of(["a"], [0.2])}
    (found,) = outcome_of("a", 1e-3, [[1.0, 0.0]], [[1.0, 1.0]], [first, second])
    assert (found.stage, found.leak.mean) == ("end", pytest.approx(0.2))
    assert sorted(found.leak_by_message) == [0, 1, 2, 8]
    assert sorted(found.leak_elsewhere) == list(range(16))
    assert messages_of(found) == "4 messages at the end, 16 at the start"


def test_few_messages_at_one_end_of_training_widen_the_interval() -> None:
    """What two messages do not show may yet be, however many were attacked at the other end."""
    score = summary_of(["a"], [0.1] * 8).main_score

    def upper(at_the_end: int) -> float:
        stages = {
            "start": summary_of(["a"], [0.1] * 8),
            "end": summary_of(["a"], [0.0] * at_the_end),
        }
        (found,) = outcome_of("a", 1e-3, [[1.0, 0.0]], [[1.0, 1.0]], [stages])
        assert found.stage == "start"
        return highest_leak(found, score)

    assert upper(8) == pytest.approx(1 - 0.05 ** (1 / 8))
    assert upper(2) == pytest.approx(1 - 0.05 ** (1 / 2))
