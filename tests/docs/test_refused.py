"""The page of what is refused has every rule, as it is said, without a value to fill in."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from hf_gradguard.training.refusals import RULES

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_lists_every_rule() -> None:
    spec = importlib.util.spec_from_file_location("refused", ROOT / "docs/refused.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.page()
    rows = re.findall(r"^\| `([\w-]+)` \| (.+) \| (.+) \|$", page, re.M)
    assert [name for name, _, _ in rows] == [rule.name for rule in RULES]
    assert not re.search(r"\{\w+[}:!]", page)
    reasons = {name: reason for name, reason, _ in rows}
    assert reasons["data-parallel"].startswith("DataParallel (… GPUs in one process)")
