"""What tests share with the examples in docstrings, which are tests too.

It lies here and not in the package, so that nothing of the tests is installed with it.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random

# Before anything imports huggingface_hub: neither a test nor an example may reach a network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from transformers.utils import logging

from hf_gradguard import randomness, registry

# What wraps another library is collected where that is installed.
_FLOWER = ["hf_gradguard/federation/flower.py", "tests/federation/secagg_driver.py"]
collect_ignore = [] if find_spec("flwr") else _FLOWER


@pytest.fixture(autouse=True)
def _fresh_process_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test starts from the same global random state and the same names of defenses and
    attacks, and warnings given once are given again.
    """
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    logging.warning_once.cache_clear()
    for names in vars(registry).values():
        if isinstance(names, registry.Registry):
            monkeypatch.setattr(names, "_added", dict(names._added))


@pytest.fixture(autouse=True)
def _same_entropy_every_time(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What protects is drawn from the operating system's entropy. In a test it comes from the
    test's name instead: all keys differ, but are the same in every run, so that a statistical test
    fails or passes for good. Other processes than the test's own keep the real entropy.
    """
    process, count = os.getpid(), itertools.count()

    def named(size: int) -> bytes:
        if os.getpid() != process:
            return os.urandom(size)
        name = f"{request.node.nodeid} {next(count)}"
        return hashlib.shake_256(name.encode()).digest(size)

    monkeypatch.setattr(randomness, "urandom", named)


@pytest.fixture(autouse=True)
def _names_of_examples(
    request: pytest.FixtureRequest,
    doctest_namespace: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    _fresh_process_state: None,
) -> None:
    """What an example in a docstring may use without making it; each gets its own, in a temporary
    folder.
    """
    if isinstance(request.node, pytest.DoctestItem):
        from examples import example_names

        folder = request.getfixturevalue("tmp_path")
        monkeypatch.chdir(folder)
        doctest_namespace.update(example_names(), tmp_path=folder)
