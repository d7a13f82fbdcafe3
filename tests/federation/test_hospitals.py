"""The example of three hospitals, as its README has it, in this process."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
import torch
from helpers import save_demo_encoder
from transformers import AutoModelForSequenceClassification

pytest.importorskip("flwr")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "hospitals"


def test_three_sites_get_one_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    try:
        import play

        save_demo_encoder(tmp_path / "encoder")
        output = tmp_path / "runs"
        flags = ["--output", str(output), "--encoder", str(tmp_path / "encoder"), "--rounds", "3"]
        play.main(flags)
    finally:
        for name in [
            name for name in sys.modules if name.partition(".")[0] in ("play", "hospitals")
        ]:
            del sys.modules[name]
    folders = [output / "server", *(output / f"site-{number}" / "my-head" for number in (1, 2, 3))]
    heads = [AutoModelForSequenceClassification.from_pretrained(folder) for folder in folders]
    assert heads[0].head.weight.any()
    assert all(torch.equal(heads[0].head.weight, head.head.weight) for head in heads[1:])
    assert "ε = 2.754" in (folders[1] / "README.md").read_text()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("site ")] == [
        "site 1", "site 2", "site 3",
    ]  # fmt: skip
    rows = [
        set((output / f"site-{n}" / "rows.tsv").read_text().splitlines()[1:]) for n in (1, 2, 3)
    ]
    assert [len(part) for part in rows] == [140, 80, 60]
    assert not rows[0] & rows[1]


def test_the_settings_are_those_that_the_apps_read() -> None:
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    code = "".join(path.read_text() for path in (EXAMPLE / "hospitals").glob("*_app.py"))
    assert all(f'config["{name}"]' in code for name in project["config"])
    for component in project["components"].values():
        module, _, name = component.partition(":")
        assert f"\n{name} = " in (EXAMPLE / f"{module.replace('.', '/')}.py").read_text()
