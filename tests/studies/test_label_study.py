"""The study of labels, in quick mode on generated images."""

from __future__ import annotations


def test_labels(mnist, quick, tmp_path) -> None:
    study = quick("labels", "--data", mnist, output=tmp_path / "labels")
    for classes in ("2", "20"):
        figures = study.figures[classes]
        assert len(figures) == 6
        for run in figures["unprotected"].values():
            assert run["before"] == run["after"] == 1.0
        for runs in figures.values():
            assert all(0 <= value <= 1 for run in runs.values() for value in run.values())
    rows = study.rows()
    assert [row[0] for row in rows] == ["2"] * 6 + ["20"] * 6
    assert rows[1][4:6] == ["0.982", "0.500"]  # 1 / (1 + e⁻⁴)
    assert rows[10][4:6] == ["0.055", "0.050"]  # 1 / (1 + 19 e^-0.1)
    study.again()
