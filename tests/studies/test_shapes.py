"""Studies of noise's shape, in quick mode."""

from __future__ import annotations

import pytest
import torch

from recipes.studies.shapes_adam import adam_shapes, scaled


def test_quality(encoder, sst2, cifar10, quick, tmp_path):
    data = ("--model", encoder, "--data_dir", sst2, "--cifar10", cifar10)
    study = quick("shapes_quality", *data, output=tmp_path / "quality")
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
    study = quick("shapes_naming", *data, output=tmp_path / "naming")
    own = study.figures["optimal_noise, own"]["this message"]
    assert own["relative_scale=100"] == [True]  # of three candidates
    assert set(study.figures["optimal_noise, past"]) == {"this message", "the message before"}


def test_adam(encoder, sst2, quick, tmp_path):
    data = ("--model", encoder, "--data_dir", sst2)
    study = quick("shapes_adam", *data, output=tmp_path / "adam")
    for rows in study.figures["0"]["0"].values():
        assert rows["uniform"]["information"] == 1


def test_adams_optimum_is_one():
    """At equal progress no other variance gives away less: neither another shape of the study, nor
    the optimum with some of its entries changed.
    """
    draw = torch.Generator().manual_seed(0)
    s, p = (torch.rand(200, generator=draw).double() ** 3 + 1e-3 for _ in range(2))
    found = {"p": p, "mean": p}  # the share of the mean is the same everywhere
    shapes = adam_shapes(s, p, prior=0.0)
    best = scaled(shapes["Adam's optimum"], found, share=0.2)
    least = float((s / best).sum())
    others = [scaled(shape, found, 0.2) for name, shape in shapes.items() if "Adam's" not in name]
    for _ in range(50):
        bent = best * (0.3 * torch.randn(200, generator=draw).double()).exp()
        others.append(
            scaled(lambda factor, bent=bent: bent * float(torch.tensor(factor).exp()), found, 0.2)
        )
    for other in others:
        progress = float((p / (p + other).sqrt()).sum() / p.sqrt().sum())
        assert progress == pytest.approx(0.2, rel=1e-6)
        assert float((s / other).sum()) > least
