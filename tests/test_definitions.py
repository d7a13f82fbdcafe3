"""The comparison of two commits' public names says what became of each."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BEFORE = """
def stays(x): return x
def moves(x): return x
def takes(x, old=1): return x
def was_called_so(numbers):
    total = sum(number * number for number in numbers)
    return total / len(numbers) if numbers else float("nan") + total * total
def _private(x): return x
class Settings:
    rate: float = 0.1
    def gone(self): return self.rate
class Gone:
    def member(self): return 1
"""
AFTER = """
def stays(x): return x + 1
def takes(x, new=1): return x
def is_called_so(numbers):
    total = sum(number * number for number in numbers)
    return total / len(numbers) if numbers else float("nan") + total * total
class Settings:
    rate: float = 0.2
class New:
    def member(self): return 1
"""


def definitions() -> Any:
    spec = importlib.util.spec_from_file_location("definitions", ROOT / "scripts/definitions.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_became_of_each_name() -> None:
    script = definitions()
    old = script.definitions(ast.parse(BEFORE).body, "p.first")
    new = script.definitions(ast.parse(AFTER).body, "p.first")
    new |= script.definitions(ast.parse("def moves(x): return x").body, "p.second")
    assert sorted(script.compare(old, new)) == [
        ("changed", "p.first.Settings.rate", ": float = 0.1 -> : float = 0.2"),
        ("changed", "p.first.takes", "(x, old=1) -> (x, new=1)"),
        ("gone", "p.first.Gone", ""),
        ("gone", "p.first.Settings.gone", ""),
        ("moved", "p.first.moves", "p.second.moves"),
        ("new", "p.first.New", "()"),
        ("renamed", "p.first.was_called_so", "p.first.is_called_so"),
    ]


def test_the_working_tree_is_read() -> None:
    script = definitions()
    surface = script.surface(None)
    assert surface["hf_gradguard.training.config.GradGuardConfig.noise_seed"].signature
    assert not any("._" in name for name in surface)
