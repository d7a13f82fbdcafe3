"""The app in one process, without a simulation engine: Flower's own server, strategies, mods and
messages, with clients that take turns.

    python -m gradguard_flower.local rounds=3 task=cifar10 data=/data/cifar10.npz \
        gradguard.defense=pruning gradguard.pruning.ratio=0.9
"""

import copy
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


class InProcessGrid(Grid):
    """Hands each message to the app, every node with a context of its own.

    Args:
        app: The clients'.
        config: The run's configuration.
        clients: How many nodes.
    """

    def __init__(self, app: ClientApp, config: dict[str, Any], clients: int) -> None:
        self.app = app
        self.contexts = {
            node + 1: Context(
                run_id=1,
                node_id=node + 1,
                node_config={"partition-id": node, "num-partitions": clients},
                state=RecordDict(),
                run_config=dict(config),
            )
            for node in range(clients)
        }

    def set_run(self, run: Any) -> None:
        """There is one."""

    @property
    def run(self) -> Any:
        """The run, of which its number is asked."""
        return SimpleNamespace(run_id=1)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        return Message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError("Every message is answered at once: use send_and_receive.")

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError("Every message is answered at once: use send_and_receive.")

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        found = []
        for message in messages:
            node = message.metadata.dst_node_id
            own = copy.deepcopy(message)  # as if it came over a wire
            found.append(copy.deepcopy(self.app(own, self.contexts[node])))
        return found


def configuration(**changes: Any) -> dict[str, Any]:
    """What pyproject.toml says, flat as Flower has it, with changes."""
    flat: dict[str, Any] = {}

    def flatten(table: dict[str, Any], prefix: str) -> None:
        for key, value in table.items():
            if isinstance(value, dict):
                flatten(value, f"{prefix}{key}.")
            else:
                flat[prefix + key] = value

    flatten(tomllib.loads(PROJECT.read_text())["tool"]["flwr"]["app"]["config"], "")
    return flat | changes


def run(config: dict[str, Any], clients: int = 4) -> InProcessGrid:
    """Train, and return the nodes as they are afterwards."""
    from . import client_app, server_app

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 0
    grid = InProcessGrid(client_app.app, config, clients)
    context = Context(
        run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=dict(config)
    )
    server_app.app(grid, context)
    return grid


def main(arguments: list[str]) -> None:
    changes: dict[str, Any] = {}
    for argument in arguments:
        key, _, value = argument.partition("=")
        try:
            changes[key] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            changes[key] = value
    run(configuration(**changes))


if __name__ == "__main__":
    main(sys.argv[1:])
