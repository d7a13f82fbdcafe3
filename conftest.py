"""What tests share with the examples in docstrings, which are tests too.

It lies here and not in the package, so that nothing of the tests is installed with it.
"""

from __future__ import annotations

import os

# Before anything imports huggingface_hub: neither a test nor an example may reach a network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from typing import Any

import pytest
import torch
from transformers.utils import logging


@pytest.fixture(autouse=True)
def _fresh_process_state() -> None:
    """Every test starts from the same global random state, and warnings given once are given
    again.
    """
    torch.manual_seed(0)
    logging.warning_once.cache_clear()


@pytest.fixture(autouse=True)
def _names_of_examples(
    request: pytest.FixtureRequest,
    doctest_namespace: dict[str, Any],
    _fresh_process_state: None,
) -> None:
    """What an example in a docstring may use without making it; each gets its own, in a temporary
    folder.
    """
    if isinstance(request.node, pytest.DoctestItem):
        from examples import example_names

        folder = request.getfixturevalue("tmp_path")
        request.getfixturevalue("monkeypatch").chdir(folder)
        doctest_namespace.update(example_names(), tmp_path=folder)
