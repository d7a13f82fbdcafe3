"""A state machine of kills, resumes, copies, backups and folders.

No noise is shared twice, and each run's ε is no less than that of all messages that its folder has
seen, computed from what was drawn.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from branching import DELTA, ROWS, SIGMA, STEPS, Stop, trainer
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from torch import Tensor

from hf_gradguard.defenses import correlated
from hf_gradguard.defenses.correlated import Buffered
from hf_gradguard.leakage import gaussian_epsilon
from hf_gradguard.training.privacy.correlated_rows import CorrelatedRows

SHOWN, DRAWS = 4, 400  # entries of a noise by which it is known; draws of all runs together


class Shared:
    """What left in all runs: rows of each message, and its noise as a sum of draws."""

    def __init__(self) -> None:
        self.draws: list[tuple[float, ...]] = []
        self.sums: dict[tuple[float, ...], Tensor] = {}  # of draws, by what a memory holds
        self.latest = torch.zeros(DRAWS)  # the last noise, as a sum of draws
        self.messages: list[tuple[list[int], Tensor]] = []
        self.rows: list[int] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        add, count, correlate = (
            correlated.add_on_grid, CorrelatedRows.count, Buffered.correlate
        )  # fmt: skip

        def correlated_draw(factor: Any, white: Tensor, memory: Tensor) -> Any:
            noise, after = correlate(factor, white, memory)
            unit = torch.zeros(DRAWS, dtype=torch.float64)
            if white.any():
                draw = key(white)
                if draw not in self.draws:
                    self.draws.append(draw)
                unit[self.draws.index(draw)] = 1
            empty = torch.zeros(len(memory), DRAWS, dtype=torch.float64)
            sums = self.sums[key(memory.T)] if memory.any() else empty
            self.latest, self.sums[key(after.T)] = correlate(factor, unit, sums)
            return noise, after

        def counted(rows: Any, batches: Any) -> Any:
            self.rows = [row for batch in batches for row in batch.rows.tolist()]
            return count(rows, batches)

        def added(values: Any, noise: Tensor, *rest: Any) -> Any:
            self.messages.append((self.rows, self.latest))
            return add(values, noise, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(correlated, "add_on_grid", added)
            patch.setattr(CorrelatedRows, "count", counted)
            patch.setattr(Buffered, "correlate", correlated_draw)
            yield

    sensitivity = 1.0

    def epsilon(self, seen: set[int]) -> float:
        """ε of a row in some messages, each of which it moves by C, whatever their noises have in
        common.
        """
        chosen = sorted(seen)
        if not chosen:
            return 0.0
        noise = torch.stack([self.messages[number][1] for number in chosen])
        covariance = noise @ noise.T
        worst = 0.0
        for row in range(ROWS):
            moved = torch.tensor([float(row in self.messages[n][0]) for n in chosen]).double()
            if moved.any():
                worst = max(worst, float(moved @ torch.linalg.solve(covariance, moved)))
        return gaussian_epsilon(SIGMA * Shared.sensitivity / worst**0.5, DELTA)


def key(numbers: Tensor) -> tuple[float, ...]:
    return tuple(numbers.flatten()[: 4 * SHOWN].tolist())


class Branches(RuleBasedStateMachine):
    """One run, and whatever becomes of its folder."""

    def __init__(self) -> None:
        super().__init__()
        self.home, self.shared = Path(tempfile.mkdtemp()), Shared()
        self.folders: dict[str, set[int]] = {}  # which messages a folder's account has seen
        self.reported: dict[str, float] = {}
        self.backup: tuple[str, set[int]] | None = None
        self.count = 0

    def teardown(self) -> None:
        shutil.rmtree(self.home)
        for draw in self.shared.draws:
            assert self.shared.draws.count(draw) == 1
        used = [tuple(noise.tolist()) for _, noise in self.shared.messages]
        assert len(set(used)) == len(used)
        # each draw is in one message alone for the first time: none leaves under two
        newest = [max(k for k, weight in enumerate(n) if weight) for n in used]
        assert len(set(newest)) == len(newest)

    def new_folder(self) -> str:
        self.count += 1
        return f"run{self.count}"

    def checkpoints(self, folder: str) -> list[Path]:
        found = (self.home / folder).glob("checkpoint-*/gradguard_complete.json")
        return sorted(path.parent for path in found)

    def train(self, folder: str, steps: int, checkpoint: Path | None) -> None:
        run, before = trainer(self.home / folder), len(self.shared.messages)
        start = 0 if checkpoint is None else int(checkpoint.name.split("-")[1])
        run.add_callback(Stop(start + steps))
        from_account = set(self.folders.get(folder, set()))
        if checkpoint is not None:
            from_account |= self.folders[checkpoint.parent.name]
        try:
            with self.shared.recording(), contextlib.suppress(KeyboardInterrupt):
                run.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        except ValueError as refusal:  # all planned messages have left
            if "leaves no step to go on with" not in str(refusal):
                raise
        left = set(range(before, len(self.shared.messages)))
        self.folders[folder] = from_account | left
        if not left:
            return
        found = run.private_rows.epsilon
        assert found >= self.shared.epsilon(self.folders[folder]) * (1 - 1e-3)
        assert found >= self.reported.get(folder, 0.0) * (1 - 1e-9)  # it never falls
        self.reported[folder] = found

    @precondition(lambda self: not self.folders)
    @rule(steps=st.integers(3, STEPS))
    def start(self, steps: int) -> None:
        probe = correlated.CorrelatedNoise(correlated_factor(), STEPS)
        Shared.sensitivity = probe.sensitivity(1, None)
        self.train(self.new_folder(), steps, None)

    @precondition(lambda self: self.folders)
    @rule(choose=st.randoms(use_true_random=False), steps=st.integers(1, 4), here=st.booleans())
    def resume(self, choose: Any, steps: int, here: bool) -> None:
        folder = choose.choice(sorted(self.folders))
        if found := self.checkpoints(folder):
            checkpoint = choose.choice(found)
            self.train(folder if here else self.new_folder(), steps, checkpoint)

    @precondition(lambda self: self.folders)
    @rule(choose=st.randoms(use_true_random=False))
    def copy(self, choose: Any) -> None:
        folder, other = choose.choice(sorted(self.folders)), self.new_folder()
        shutil.copytree(self.home / folder, self.home / other)
        self.folders[other] = set(self.folders[folder])

    @precondition(lambda self: self.folders)
    @rule(choose=st.randoms(use_true_random=False))
    def back_up(self, choose: Any) -> None:
        folder = choose.choice(sorted(self.folders))
        shutil.rmtree(self.home / "backup", ignore_errors=True)
        shutil.copytree(self.home / folder, self.home / "backup")
        self.backup = folder, set(self.folders[folder])

    @precondition(lambda self: self.backup)
    @rule(in_place=st.booleans())
    def restore(self, in_place: bool) -> None:
        assert self.backup is not None
        folder, seen = self.backup
        if not in_place:
            shutil.rmtree(self.home / folder, ignore_errors=True)
        shutil.copytree(self.home / "backup", self.home / folder, dirs_exist_ok=True)
        self.folders[folder] = set(seen)
        self.reported.pop(folder, None)


def correlated_factor() -> Any:
    from hf_gradguard.defenses.correlated import make_factor

    return make_factor("blt", STEPS, falling_rate=True)


TestBranches = pytest.mark.long(Branches.TestCase)
TestBranches.settings = settings(
    max_examples=8, stateful_step_count=7, deadline=None, derandomize=True,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
