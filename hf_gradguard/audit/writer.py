"""What there is of an audit, written as it goes on."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

from .cells import write_json
from .report.html import write_report
from .report.summary import summarize
from .result import Audit


class Writer:
    """Writes what there is of an audit after every message, as long as that takes at most a tenth
    of the time.
    """

    def __init__(self, result: Audit, folder: Path) -> None:
        self.result, self.folder = result, folder
        self.started, self.spent, self.pending = time.monotonic(), 0.0, False

    def add(self, new: bool) -> None:
        """A message was added to the result; `new` if its cells had not been there before."""
        self.pending |= new
        if 10 * self.spent <= time.monotonic() - self.started:
            self.flush()

    def flush(self) -> None:
        """Write what has not been written."""
        if self.pending:
            self.write()

    def write(self) -> None:
        """Write audit.json, table.md and report.html."""
        before = time.monotonic()
        write_json(self.folder / "audit.json", asdict(self.result))
        write_report(summarize(self.result), self.folder)
        self.spent += time.monotonic() - before
        self.pending = False
