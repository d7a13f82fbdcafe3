"""What all tests share, beside the `conftest.py` above. Tiny models and batches are in
`helpers.py`: `from helpers import make_task`.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
import torch

from hf_gradguard.attacks.matching.problem import OPTIMIZERS
from hf_gradguard.audit.settings import AuditSettings
from hf_gradguard.leakage.fisher import DFILBound


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real data sets. Mark tests that use it `@pytest.mark.needs_data`."""
    if "GRADGUARD_DATA" not in os.environ:
        pytest.skip("no real data sets: set GRADGUARD_DATA to the folder that holds them")
    folder = Path(os.environ["GRADGUARD_DATA"])
    if not folder.is_dir():
        raise FileNotFoundError(f"GRADGUARD_DATA names no folder: {folder}")
    return folder


@pytest.fixture
def few_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of L-BFGS evaluates twice, and not twenty times: for tests of what is around it."""
    few = functools.partial(
        torch.optim.LBFGS, max_iter=2, history_size=100, line_search_fn="strong_wolfe"
    )
    monkeypatch.setitem(OPTIMIZERS, "lbfgs", lambda leaves, rate: few(leaves, lr=rate))


@pytest.fixture
def few_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An audit's dFIL takes two probes, and not fifty, and one pair of words a message is told
    apart, and not eight: for tests that look at neither.
    """
    monkeypatch.setattr(DFILBound, "probes", 2)
    monkeypatch.setitem(AuditSettings.__init__.__kwdefaults__, "word_pairs", 1)
