"""The study of received models, in quick mode."""

from __future__ import annotations


def test_received(cifar10, quick, tmp_path) -> None:
    study = quick("received_malicious", "--cifar10", cifar10, output=tmp_path / "received")
    honest, frozen = study.rows()[6:8]
    *planted, partly, sharpened = study.rows()[:6] + study.rows()[8:]
    assert partly[3] == "0 of 1"  # known to be missed
    planted.append(sharpened)
    assert len(planted) == 9
    assert all(row[3] == "1 of 1" for row in planted)
    assert honest[3:] == ["0 of 1", "reads_all_pixels"]
    assert frozen[3] == "0 of 1"
    study.again()


def test_alarms(quick, tmp_path) -> None:
    study = quick("received_alarms", "--model", "none", output=tmp_path / "alarms")
    assert study.rows() == [["tiny", "4", "4", "0", "–"]]
    study.again()
