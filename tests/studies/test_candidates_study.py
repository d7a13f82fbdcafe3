"""The study of candidates, in quick mode."""

from __future__ import annotations


def test_text(encoder, sst2, quick, tmp_path):
    data = ("--model", encoder, "--data_dir", sst2)
    study = quick("candidates", "text", *data, output=tmp_path / "candidates")
    found = {name: states["initial"]["1"] for name, states in study.figures.items()}
    assert found["none"]["|knows"]["top1"][0] == 1  # of six candidates
    assert found["quantization"]["bits=2|knows"]["rank"][0] == 1
    assert set(found) == {"none", "gaussian_noise", "optimal_noise", "pruning", "quantization"}
    assert all(1 <= one["rank"][0] <= 6 for rows in found.values() for one in rows.values())
    table = (tmp_path / "candidates.md").read_text()
    assert "| initial model, messages of 1 |" in table
