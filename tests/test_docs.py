"""The Python in documents runs: all blocks of a page, one after the other, in one namespace.

A block that cannot run says so in a comment above it, with the reason:

    <!-- not run: needs the Hub -->
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from examples import example_names

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("model_cards/*/README.md")])
BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+) -->\n+)?^```python\n(?P<code>.*?)^```$", re.M | re.S
)


def blocks(text: str) -> list[tuple[int, str, str | None]]:
    """Line, code and the reason not to run it, of every Python block of a page."""
    return [
        (text.count("\n", 0, found.start("code")), found["code"], found["reason"])
        for found in BLOCK.finditer(text)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = example_names() | {"__name__": page.stem}
    for line, code, reason in blocks(page.read_text(encoding="utf-8")):
        # Empty lines before it, so that errors name the line of the page.
        compiled = compile("\n" * line + code, str(page), "exec")
        if reason is None:
            exec(compiled, names)


def test_blocks_are_found() -> None:
    skipped = "<!-- not run: needs the Hub -->\n```python\nb\n```\n"
    page = f"```python\na = 1\n```\n\n{skipped}```bash\nc\n```"
    assert blocks(page) == [(1, "a = 1\n", None), (6, "b\n", "needs the Hub")]
    assert any(blocks(page.read_text(encoding="utf-8")) for page in PAGES)
