"""Studies of noise's shape, in quick mode."""

from __future__ import annotations

import pytest


def test_quality(encoder, sst2, cifar10, quick, tmp_path):
    data = ("--model", encoder, "--data_dir", sst2, "--cifar10", cifar10)
    study = quick("shapes", "quality", *data, output=tmp_path / "quality")
    for cell in study.figures.values() if isinstance(study.figures, dict) else ():
        _check(cell)
    assert (tmp_path / "quality.md").exists()


def _check(found: dict) -> None:
    """No shape is better than the optimum, and uniform noise's dFIL is its own."""
    if "uniform" not in found:
        for inner in found.values():
            _check(inner)
        return
    for row, figures in found.items():
        # what is compared with is itself an estimate, of few probes here
        assert all(ratio > 0.3 for ratio in figures["ratios"]), row
    assert found["uniform"]["dfils"] == pytest.approx([1.0] * len(found["uniform"]["dfils"]))


def test_naming(encoder, sst2, quick, tmp_path):
    data = ("--model", encoder, "--data_dir", sst2)
    study = quick("shapes", "naming", *data, output=tmp_path / "naming")
    own = study.figures["optimal_noise, own"]["this message"]
    assert own["relative_scale=100"] == [True]  # of three candidates
    assert set(study.figures["optimal_noise, past"]) == {"this message", "the message before"}
