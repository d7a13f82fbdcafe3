"""Sections of a page, as links name them."""

from __future__ import annotations

import re
from pathlib import Path


def headings(page: Path) -> set[str]:
    return {
        re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.startswith("#")
    }
