"""What all tests share, beside the `conftest.py` above. Tiny models and batches are in
`helpers.py`: `from helpers import make_task`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real data sets. Mark tests that use it `@pytest.mark.needs_data`."""
    if "GRADGUARD_DATA" not in os.environ:
        pytest.skip("no real data sets: set GRADGUARD_DATA to the folder that holds them")
    folder = Path(os.environ["GRADGUARD_DATA"])
    if not folder.is_dir():
        raise FileNotFoundError(f"GRADGUARD_DATA names no folder: {folder}")
    return folder
