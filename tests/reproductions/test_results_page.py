"""docs/results.md: its tables are the scripts' own, its commands exist, and `recipes/results.py`
runs them.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "results.md"
SHARED = {
    "every_defense.py",
    "federation.py",
    "lenet.py",
    "measuring.py",
    "reporting.py",
    "sentences.py",
}


def results(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["results.py", *map(str, arguments)])
    runpy.run_path(str(ROOT / "recipes" / "results.py"), run_name="__main__")


def test_tables_are_those_of_the_files():
    filled = runpy.run_path(str(ROOT / "recipes" / "results.py"))["filled"]
    page = PAGE.read_text(encoding="utf-8")
    assert filled(PAGE) == page
    assert page.count("<!-- results/") == page.count("<!-- / -->") > 10


def test_every_script_and_picture_is_on_the_page():
    page = PAGE.read_text(encoding="utf-8")
    scripts = {
        path.name
        for folder in ("reproductions", "benchmarks")
        for path in (ROOT / "recipes" / folder).glob("*.py")
    }
    named = {
        Path(name).name
        for name in re.findall(r"recipes/(?:reproductions|benchmarks)/\w+\.py", page)
    }
    assert named == scripts - SHARED
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", page):
        assert (PAGE.parent / picture).exists(), picture
    headings = {
        re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in page.splitlines()
        if line.startswith("#")
    }
    assert set(re.findall(r"\]\(#(.*?)\)", page)) <= headings


def test_commands_run_and_tables_follow(tmp_path, monkeypatch, capfd):
    (tmp_path / "docs" / "results").mkdir(parents=True)
    page, table = tmp_path / "docs" / "results.md", tmp_path / "docs" / "results" / "one.md"
    page.write_text(
        "# Page\n\n```bash\necho '| a |' > docs/results/one.md\n```\n\n```bash\necho "
        "$NOT_SET_ANYWHERE two\n```\n\n<!-- results/one.md -->\n| old |\n<!-- / -->\nEnd.\n"
    )
    monkeypatch.delenv("NOT_SET_ANYWHERE", raising=False)
    results(monkeypatch, "one.md", "--page", page)
    assert page.read_text().endswith("<!-- results/one.md -->\n| a |\n<!-- / -->\nEnd.\n")
    with pytest.raises(SystemExit, match="Set NOT_SET_ANYWHERE"):
        results(monkeypatch, "--page", page)
    table.write_text("| b |\n")
    results(monkeypatch, "--tables", "--page", page)
    assert "| b |" in page.read_text()
    monkeypatch.setenv("NOT_SET_ANYWHERE", "1")
    results(monkeypatch, "two", "--page", page)
    assert "1 two" in capfd.readouterr().out
