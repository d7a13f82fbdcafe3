"""Figures on disk, cell by cell: each stands beside the settings that it depends on, and is found
by these alone. A new row adds cells and leaves the others as they are.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .device import card

PUBLISHED = Path(__file__).resolve().parents[3] / "docs" / "results"
Place = tuple[str, ...]  # where a table shows a cell: ("pruning ratio=0.9", "tag, adaptive")


def named(output: Path, ending: str) -> Path:
    """OUTPUT with an ending; names may hold dots."""
    return output.with_name(output.name + ending)


class Results(Mapping):
    """Figures by settings, in OUTPUT.json: a list of `{"settings": ..., "figures": ...}`, with the
    `"device"` that computed them where that is no CPU.

    Data and networks that a command names are not among the settings: keep to one OUTPUT for each.
    """

    def __init__(self, output: Path) -> None:
        self.path = named(output, ".json")
        stored = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else []
        self._cells = {_key(cell["settings"]): cell for cell in stored}

    def __getitem__(self, settings: dict) -> Any:
        return self._cells[_key(settings)]["figures"]

    def __iter__(self) -> Iterator[dict]:
        return (cell["settings"] for cell in self._cells.values())

    def __len__(self) -> int:
        return len(self._cells)

    def add(self, settings: dict, figures: Any) -> None:
        """Writes the file anew, with this cell. An interrupt does not cost what was there."""
        cell = {"settings": settings, "figures": figures} | card()
        self._cells[_key(settings)] = json.loads(json.dumps(cell))
        cells = [
            ",\n ".join(f"{_line(name)}: {_line(entry)}" for name, entry in cell.items())
            for cell in self._cells.values()
        ]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside = named(self.path, ".new")
        aside.write_text("[\n{" + "},\n{".join(cells) + "}\n]\n", encoding="utf-8")
        os.replace(aside, self.path)


def _key(settings: dict) -> str:
    return json.dumps(settings, sort_keys=True)


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def nested(cells: dict[Place, dict], results: Results) -> dict:
    """The figures of all cells that are there, as `{"row": {"column": figures}}`."""
    tree: dict = {}
    for place, settings in cells.items():
        if settings in results:
            branch = tree
            for name in place[:-1]:
                branch = branch.setdefault(name, {})
            branch[place[-1]] = results[settings]
    return tree
