"""How many messages a rank has shared, and how: what its model card is written from."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from ..data.private import write_private


class SharedMessages:
    """Counts a rank's messages by what the card says of them.

    There is one for each client and micro-batch, also where nothing counted in a batch or a limit
    kept a message back, which others see as zeros. So counts follow from steps and settings alone,
    and say nothing of the data.

    Args:
        how: Says how a message would be shared now, by names: `defense`, its `settings`, and more.

    Attributes:
        complete: Whether all are counted: not after a checkpoint that holds no count.

    Example:
        >>> shared = SharedMessages(lambda: {"defense": "pruning"})
        >>> shared.add(2)
        >>> shared.total, dict(shared.by("defense"))
        (2, {'pruning': 2})
    """

    def __init__(self, how: Callable[[], Mapping[str, str]]) -> None:
        self._how = how
        self._counts = Counter[str]()
        self.complete = True

    def add(self, messages: int) -> None:
        """So many were shared as messages are now."""
        self._counts[json.dumps(self._how())] += messages

    @property
    def total(self) -> int:
        """How many there are."""
        return self._counts.total()

    def by(self, name: str) -> Counter[str]:
        """How many there are for each of a name's values. Before the first, none for today's."""
        found = Counter[str]()
        for how, count in (self._counts or {json.dumps(self._how()): 0}).items():
            found[json.loads(how).get(name, "")] += count
        return found

    def save(self, folder: str, rank: int) -> None:
        """Write them to a checkpoint, to a file that only its owner can read."""
        state = {"complete": self.complete, "messages": self._counts}
        write_private(_file(folder, rank), json.dumps(state, indent=1).encode())

    def load(self, folder: str, rank: int) -> None:
        """Take in what a checkpoint has. What was counted beyond that stays: it was shared, too.

        Raises:
            ValueError: If the file is damaged.
        """
        file = _file(folder, rank)
        if not file.is_file():
            self.complete = False
            return
        try:
            state = json.loads(file.read_text())
        except ValueError as error:
            raise ValueError(
                f"{file} is cut off or was changed ({error}). Resume from an earlier checkpoint."
            ) from error
        self.complete = self.complete and state["complete"]
        self._counts = Counter[str](state["messages"]) | self._counts


def _file(folder: str, rank: int) -> Path:
    return Path(folder) / f"gradguard_messages_rank{rank}.json"
