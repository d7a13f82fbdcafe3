"""Tests of documents, which `make docs-test` runs and `make test` leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for test in items:
        if test.path.is_relative_to(HERE):
            test.add_marker(pytest.mark.docs)
