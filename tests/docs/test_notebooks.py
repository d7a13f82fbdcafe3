"""Notebooks run from their first cell to their last, and hold no outputs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hf_gradguard import demo
from tests.helpers import save_demo_encoder

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples").rglob("*.ipynb"))
pytestmark = pytest.mark.docs


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.name)
def test_a_notebook_runs(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a tiny encoder of the demo's words in the place of MiniLM."""
    encoder = save_demo_encoder(tmp_path / "encoder")
    monkeypatch.setattr(demo, "packaged_encoder", lambda: str(encoder))
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(file.read_text(encoding="utf-8"))
    namespace: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
            exec(compile("".join(cell["source"]), str(file), "exec"), namespace)
    said = capsys.readouterr().out
    text = demo.sentences("train")[0][0]
    tokens = " ".join(re.findall(r"\w+|[^\w\s]", text))
    assert f"sent: {text}" in said
    assert f"none, span: {tokens}" in said
    assert re.search(r"none: distinguished 4 of 4", said)
    shares = re.findall(r"(none|gaussian\S+|head by proof): (\d+)% of 120", said)
    assert len(shares) == 3


def test_there_is_one() -> None:
    assert [file.name for file in NOTEBOOKS] == ["gradient_leak.ipynb"]
