"""Candidates behind error feedback: what earlier messages left out is in a message too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import make_task, torch_rng

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.attacks.candidates.linear import _BESIDE, Filtered, MatchedFilter
from hf_gradguard.audit.means import average_of
from hf_gradguard.randomness import Stream


def test_a_regression_by_hand() -> None:
    """Against the t-statistics of a ridge regression that numpy solves."""
    rng = np.random.default_rng(0)
    h, y = rng.normal(size=(7, 30)), rng.normal(size=30)
    told = Filtered({"w": torch.tensor(y).float()}, {"w": torch.zeros(30)}, 3, None)
    found = MatchedFilter([told], None, 7, torch_rng())
    found.add(range(7), {"w": torch.tensor(h).float()})
    got = found.regressed(0, torch.full((7,), 1 / 7).double())
    gram = h @ h.T
    inverse = np.linalg.inv(gram + _BESIDE * gram.diagonal().mean() * np.eye(7))
    share = (inverse @ gram).diagonal()
    wanted = (inverse @ h @ y) / np.sqrt(inverse.diagonal() * share)
    ratio = got.numpy() / wanted
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-4)
    assert ratio[0] > 0


@pytest.mark.parametrize("name", ["pruning", "refiner"])
def test_members_are_found_beside_what_was_left_out(name: str) -> None:
    """Where little was left out, they come before most others."""
    model, _ = make_task("bert", dtype=torch.float32)
    settings: dict[str, Any] = {"ratio": 0.8} if name == "pruning" else {"samples": 12}
    defense = make_defense(name, error_feedback=True, **settings)
    drawn = torch_rng(3)
    words = [torch.randint(4, 24, (5,), generator=drawn).tolist() for _ in range(40)]

    def message(rows: list[list[int]], number: int) -> tuple[Any, Observation]:
        batch = {"input_ids": torch.tensor(rows), "labels": torch.tensor([1, 0, 1, 2])}
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        made = defense(GradientMap(model, batch), Stream.from_seeds(number))
        law = defense.law(made)
        return made, Observation(model, dict(made), (4, 5), labels=batch["labels"], law=law)

    message(words[36:], 0)
    made, seen = message(words[:4], 1)
    assert made.carries
    assert seen.law is not None
    assert seen.law.left_out
    assert (seen.law.fitted is not None) == (name == "refiner")
    scores = make_attack("candidates", candidates=words[:36])(seen, torch_rng()).scores
    before = [int((scores[4:] > scores[at]).sum()) for at in range(4)]
    assert sum(before) / 4 < 8, before  # 16 by chance


def test_a_mean_of_messages_carries_what_they_carry() -> None:
    """An accumulated message has what its first part left out in its later parts."""
    gmap, streams = GradientMap(*make_task("bert")), [Stream.from_seeds(n) for n in range(2)]
    defense = make_defense("pruning", ratio=0.9, error_feedback=True)
    mean = average_of([defense(gmap, stream) for stream in streams])
    assert mean.carries
    law = defense.law(mean)
    assert law is not None
    assert law.left_out
    plain = make_defense("pruning", ratio=0.9)
    assert not average_of([plain(gmap, stream) for stream in streams]).carries
