"""The study of received models, in quick mode."""

from __future__ import annotations


def test_received(cifar10, quick, tmp_path) -> None:
    study = quick("received", "malicious", "--cifar10", cifar10, output=tmp_path / "received")
    assert len(study.rows()) == 6
    for row in study.rows()[:-1]:
        assert row[3] == "1 of 1"
    assert study.rows()[-1][3:] == ["0 of 1", "reads_all_pixels"]
    study.again()


def test_alarms(quick, tmp_path) -> None:
    study = quick("received", "alarms", "--model", "none", output=tmp_path / "alarms")
    assert study.rows() == [["tiny", "4", "4", "0", "–"]]
    study.again()
