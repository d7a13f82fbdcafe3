"""The studies of updates, in quick mode."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import numpy as np
import pytest


def test_images(cifar10, quick, tmp_path):
    study = quick("updates_images", "--cifar10", cifar10, output=tmp_path / "images")
    assert len(study.figures) == 2
    for row in study.figures.values():
        assert set(row) == {"through the steps", "every step on all images", "as one gradient"}
        assert all(0 < one["psnr"][0] < 60 for one in row.values())
    assert study.rows()[0][0] == "one gradient of two"


@pytest.mark.skipif(find_spec("flwr") is None, reason="needs flwr")
def test_rounds(encoder, sst2, quick, tmp_path, monkeypatch):
    draws = np.random.default_rng(0)
    pixels = draws.integers(0, 256, (640, 32, 32, 3), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", x=pixels, y=draws.integers(0, 10, 640))
    monkeypatch.setattr(sys, "path", list(sys.path))
    data = ("--cifar10", tmp_path / "images.npz", "--model", encoder, "--data_dir", sst2)
    study = quick("updates_rounds", *data, output=tmp_path / "rounds")
    assert {task: len(rows) for task, rows in study.figures.items()} == {"cifar10": 8, "sst2": 3}
    for rows in study.figures.values():
        for runs in rows.values():
            (run,) = runs.values()
            assert len(run["accuracy"]) == 2  # before and after one round
            assert run["seconds"] > 0
    assert len(study.rows()) == 11
