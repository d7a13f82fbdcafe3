"""The page of what is supported, which is made by trying it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from hf_gradguard.registry import DEFENSES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def rows() -> dict[str, list[str]]:
    """The cells of both tables by their row's name."""
    spec = importlib.util.spec_from_file_location("support", ROOT / "docs/support.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    lines = [line[2:-2].split(" | ") for line in module.page().splitlines() if line[:2] == "| "]
    return {name: cells for name, *cells in lines}


def test_every_defense_has_a_row_and_every_task_a_cell(rows: dict[str, list[str]]) -> None:
    names = {name for name in DEFENSES if not name.endswith("_published")}
    assert {f"`{name}`" for name in names} <= rows.keys()
    assert {len(cells) for cells in rows.values()} == {8}
    said = {cell for name, cells in rows.items() if "`" in name for cell in cells}
    assert said == {"trains", "**proved**", "refused"}


def test_what_is_known_to_be_refused_and_proved(rows: dict[str, list[str]]) -> None:
    texts, *_, images = rows["defense"]
    assert (texts, images) == ("text, one class", "image, one class")
    assert set(rows["`dp_sgd` with `per_sample=True`"]) == {"**proved**"}
    assert set(rows["`gaussian_noise`"]) == {"trains"}
    # Soteria weighs one vector a sample, and words have one each.
    assert rows["`soteria`"] == ["trains"] * 3 + ["refused"] * 4 + ["trains"]
    heads = rows["[`private_head`](head.md)"]
    assert heads == ["**proved**"] * 4 + ["refused"] * 3 + ["**proved**"]
    command = rows["[`gradguard train --head`](train.md#a-head-by-proof)"]
    assert command == ["**proved**", *["refused"] * 6, "**proved**"]
    assert rows["[`gradguard recommend`](choose.md): heads"] == command
