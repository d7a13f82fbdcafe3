"""The study of an attacker that learns to invert."""

from __future__ import annotations


def test_learned_inversion(encoder, sst2, quick, tmp_path):
    data = ("--model", encoder, "--data_dir", sst2)
    study = quick("learned_inversion", *data, output=tmp_path / "learned")
    assert [row[0] for row in study.rows()] == ["no message", "none"]
    scores = study.figures["none"]["span"]["token_f1"]
    assert len(scores) == 2
    assert min(scores) > 0.9  # span reads what is undefended
