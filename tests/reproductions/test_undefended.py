"""Attacks on undefended gradients, in quick mode on generated data."""

from __future__ import annotations

import json
from pathlib import Path


def figures_of(output: Path) -> dict:
    return json.loads(Path(f"{output}.json").read_text())["figures"]


def test_images(cifar10, mnist, quick, tmp_path):
    output = tmp_path / "images"
    quick("undefended.py", "images", "--cifar10", cifar10, "--mnist", mnist, "--output", output)
    figures = figures_of(output)
    attacks = ("dlg", "idlg", "inverting_gradients", "inverting_gradients, as published")
    assert list(figures) == [
        f"{data}, {attack}" for data in ("cifar10", "mnist") for attack in attacks
    ]
    assert all(
        found["labels right"] == 1 for found in figures.values()
    )  # batch 1: the sign of the last bias says it
    rows = Path(f"{output}.md").read_text().splitlines()[2:]
    mean, low, high = figures["mnist, idlg"]["psnr"]
    assert f"| mnist, idlg | {mean:.3g} [{low:.3g}, {high:.3g}] |" in rows[5]


def test_text(encoder, sst2, quick, tmp_path):
    output = tmp_path / "text"
    quick("undefended.py", "text", "--model", encoder, "--data_dir", sst2, "--output", output)
    (found,) = figures_of(output).values()
    assert found["labels right"] == 1
    assert found["token_f1"][0] == sum(found["token_f1 of each"]) / 2
