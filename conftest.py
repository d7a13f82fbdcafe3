"""What tests share with the examples in docstrings, which are tests too.

It lies here and not in the package, so that nothing of the tests is installed with it.
"""

from __future__ import annotations

import gc
import os
import random
from collections import defaultdict

# Before anything imports huggingface_hub: neither a test nor an example may reach a network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from entropy import entropy_of
from transformers.utils import logging

from hf_gradguard import randomness, registry

# What wraps another library is collected where that is installed.
_WRAPPING = {
    "flwr": [
        "hf_gradguard/federation/flower.py", "hf_gradguard/heads/flower.py",
        "hf_gradguard/testing/flower.py", "tests/federation/secagg_driver.py",
    ],
    "numba": ["hf_gradguard/randomness_kernel.py"],
    "nvflare": ["hf_gradguard/federation/flare.py", "tests/federation/flare_trainer.py"],
}  # fmt: skip
_DOCUMENTS = [Path(__file__).parent / "tests" / folder for folder in ("docs", "studies")]
collect_ignore = [
    file for library, files in _WRAPPING.items() if not find_spec(library) for file in files
]


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "of every parametrized test run at most so many cases, spread over all of them"
    parser.addoption("--cases", type=int, metavar="N", help=help)


@pytest.hookimpl(tryfirst=True)  # markers are there before `-m` looks for them
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of documents, of examples in docstrings, and of the studies that make figures are
    `make docs-test`'s. With `--cases` some cases are left out, the same ones every time.
    """
    for test in items:
        is_example = isinstance(test, pytest.DoctestItem)
        if is_example or any(test.path.is_relative_to(folder) for folder in _DOCUMENTS):
            test.add_marker(pytest.mark.docs)
    if (count := config.getoption("cases")) is not None:
        cases = defaultdict(list)
        for test in items:
            cases[test.nodeid.partition("[")[0]].append(test)
        chosen = {test for tests in cases.values() for test in _spread(tests, count)}
        config.hook.pytest_deselected(items=[test for test in items if test not in chosen])
        items[:] = [test for test in items if test in chosen]


def _spread(tests: list[pytest.Item], count: int) -> list[pytest.Item]:
    """At most `count` of them, at equal distances."""
    return [tests[place * len(tests) // count] for place in range(min(count, len(tests)))]


@pytest.fixture(scope="module", autouse=True)
def _imports_are_no_garbage() -> None:
    """Every Trainer collects garbage several times, and to search all that was imported takes most
    of a second. Each module freezes what the one before it imported.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fresh_process_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test starts from the same global random state and the same names of defenses and
    attacks, and warnings given once are given again.
    """
    torch.default_generator.manual_seed(0)  # all others at once take a millisecond
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
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
    """Keys come from the test's name, so that a statistical test fails or passes for good."""
    monkeypatch.setattr(randomness, "urandom", entropy_of(request.node.nodeid))


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
        source = "".join(example.source for example in request.node.dtest.examples)
        doctest_namespace.clear()
        doctest_namespace.update(example_names(source), tmp_path=folder)
