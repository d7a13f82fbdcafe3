"""README's figure: what it takes of the published tables."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def overview() -> ModuleType:
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("overview", ROOT / "scripts/overview.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["overview"] = module  # of its dataclasses
    spec.loader.exec_module(module)
    return module


def test_points_are_of_the_strongest_attackers(overview: ModuleType) -> None:
    rows = {row.name: row for row in overview.rows()}
    assert 6 <= len(rows) <= 8
    assert rows["none"].words.mean == rows["none"].members.mean == 1
    noise = rows["noise × 20"]
    # The search by likelihood, and not the 0.06 of the quick attacks.
    assert (noise.words.mean, noise.words.low, noise.words.high) == (0.66, 0.57, 0.75)
    assert (noise.members.mean, noise.lost.mean) == (1.0, 0.025)
    feedback = rows["pruning with feedback"]
    assert (feedback.words.mean, feedback.words.low, feedback.words.high) == (0.14, 0.06, 0.22)
    weak = rows["noise × 5"].words
    assert (weak.mean, weak.low, weak.high) == (0.70, 0.47, 0.93)
    head = rows["head + dp_sgd (proved)"]
    assert head.words is None
    assert (head.members.mean, head.lost.low, head.lost.high) == (0.04, -0.002, 0.018)


def test_the_front_is_what_nothing_beats(overview: ModuleType) -> None:
    points = [(0.0, 2.0), (0.5, 0.4), (0.6, 2.5), (1.0, 0.0), (0.5, 0.9)]
    assert overview.front(points) == [(0.0, 2.0), (0.5, 0.4), (1.0, 0.0)]


def test_the_published_picture_is_of_these_points(overview: ModuleType, tmp_path: Path) -> None:
    overview.draw(tmp_path / "overview.png")
    files = tmp_path / "overview.png", ROOT / "docs/assets/overview.png"
    drawn, published = (np.asarray(Image.open(file).convert("L"), dtype=float) for file in files)
    assert drawn.shape == published.shape
    assert abs(drawn - published).mean() < 1  # fonts may differ, points may not
