"""What a study is, and the command line of all studies.

    python -m recipes NAME --help
    python -m recipes labels --data MNIST.npz --output docs/results/labels

It computes the cells that OUTPUT.json lacks, one after the other. Then it writes OUTPUT.md (the
table) and, if the study draws, OUTPUT.png. Stop it when you like: run again, it goes on.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from transformers.utils import logging

from hf_gradguard.models import check_name

from .studies.lib.results import PUBLISHED, Place, Results, nested


class Study:
    """One published table. The docstring is the claim, and how it is measured.

    Args:
        args: The command line's.
    """

    ALL: Any = {"--all": {"action": "store_true", "help": "all cells, not only the published"}}
    ARGUMENTS: dict[str, Any] = {}
    """What the computation reads, as `{"--flag": help}`. Optional arguments are
    `{"--flag": {keyword of add_argument: value}}`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.quick, self.output = args, args.quick, args.output

    def cells(self) -> dict[Place, dict]:
        """All settings, by their place in the tables."""
        return {}

    def load(self) -> None:
        """Loads what `measure` needs. Called only where a cell is missing."""

    def measure(self, cell: dict) -> Any:
        """The metrics of one cell, from its settings alone."""
        raise NotImplementedError

    def report(self, metrics: dict) -> None:
        """Writes tables and pictures, of metrics nested by place."""
        raise NotImplementedError

    @classmethod
    def parse(cls, argv: Sequence[str] | None = None) -> Self:
        """The study with the command line's arguments."""
        parser = command_line(cls.__doc__)
        for flag, options in cls.ARGUMENTS.items():
            parser.add_argument(
                flag, **({"help": options} if isinstance(options, str) else options)
            )
        return cls(parser.parse_args(argv))

    def marked_cells(self) -> dict[Place, dict]:
        """The cells. Those of quick runs are never taken for those of full ones."""
        mark = {"quick": True} if self.quick else {}
        return {place: settings | mark for place, settings in self.cells().items()}

    def run(self) -> None:
        """Computes what is missing, and reports."""
        results, cells = Results(self.output), self.marked_cells()
        missing = [settings for settings in cells.values() if settings not in results]
        if missing and self.args.tables:
            sys.exit(
                f"{results.path} lacks {len(missing)} of {len(cells)} cells: leave out --tables."
            )
        if missing:
            self._check_arguments(len(missing))
            self.load()
        while missing:
            for settings in logging.tqdm(missing, desc="cells"):
                if settings not in results:  # two places may show the same cell
                    results.add(settings, self.measure(settings))
            cells = self.marked_cells()  # metrics may ask for more
            missing = [settings for settings in cells.values() if settings not in results]
        self.report(nested(cells, results))

    def _check_arguments(self, count: int) -> None:
        values = {flag: getattr(self.args, flag.lstrip("-")) for flag in self.ARGUMENTS}
        needed = [flag for flag, options in self.ARGUMENTS.items() if isinstance(options, str)]
        if absent := [flag for flag in needed if values[flag] is None]:
            sys.exit(f"{count} cells are to be computed: give {', '.join(absent)}.")
        for flag in ("--model", "--tokenizer"):
            if values.get(flag) is not None:
                check_name(values[flag])

    def published(self, cells: dict[Place, dict]) -> dict[Place, dict]:
        """With `--all` all cells. Without, those that are there, and those that are published under
        this name. What follows from a search for learning rates is asked for at another rate too.
        """
        if self.quick or self.args.all:
            return cells
        results, stored = Results(self.output), Results(PUBLISHED / self.output.name)
        asked = {_without_rate(settings) for settings in stored}
        asked -= {_without_rate(cell) for cell in cells.values() if cell in stored}
        return {
            place: cell
            for place, cell in cells.items()
            if cell in results or cell in stored or _without_rate(cell) in asked
        }


def _without_rate(settings: dict) -> str:
    return json.dumps(settings | {"learning_rate": None}, sort_keys=True)


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """What every study and benchmark takes."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, help="where results go, without an ending")
    add("--quick", action="store_true", help="seconds, to see that it runs; metrics mean nothing")
    add("--tables", action="store_true", help="compute nothing: table and picture of what is there")
    return parser
