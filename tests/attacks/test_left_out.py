"""Candidates behind error feedback: what earlier messages left out is in a message too."""

from __future__ import annotations

import numpy as np
import torch
from helpers import torch_rng

from hf_gradguard.attacks.candidates.linear import _BESIDE, Filtered, MatchedFilter


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
