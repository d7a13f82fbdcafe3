"""What all tests share. Tiny models and batches are in `helpers.py`:
`from helpers import make_task`.
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = (
    "1"  # before anything imports huggingface_hub: no test may reach a network
)

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


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real data sets. Mark tests that use it `@pytest.mark.needs_data`."""
    if "GRADGUARD_DATA" not in os.environ:
        pytest.skip("no real data sets: set GRADGUARD_DATA to the folder that holds them")
    folder = Path(os.environ["GRADGUARD_DATA"])
    if not folder.is_dir():
        raise FileNotFoundError(f"GRADGUARD_DATA names no folder: {folder}")
    return folder
