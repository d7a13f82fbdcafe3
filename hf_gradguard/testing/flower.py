"""A federation of Flower apps in one process, for tests and to try out an app."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

try:
    from flwr.app import Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.supercore.task_identity import TaskIdentity
except ImportError as error:
    raise ImportError(
        "hf_gradguard.testing.flower needs Flower: pip install 'hf-gradguard[flower]'"
    ) from error


class InProcessGrid(Grid):
    """A grid whose nodes take turns in this process: Flower's own messages, without its engine.

    Args:
        app: The clients' app.
        config: The run's configuration.
        nodes: The configuration of each node.

    Attributes:
        contexts: The context of each node, by its number.

    Example:
        >>> grid = InProcessGrid(ClientApp(), {"rounds": 3}, nodes=[{"data": "a.tsv"}] * 2)
        >>> grid.get_node_ids()
        [1, 2]
    """

    def __init__(
        self, app: ClientApp, config: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]
    ) -> None:
        self.app = app
        self.contexts = {
            number: Context(
                run_id=1, node_id=number, node_config=dict(node), state=RecordDict(),
                run_config=dict(config),
            )
            for number, node in enumerate(nodes, 1)
        }  # fmt: skip

    def set_run(self, run: Any) -> None:
        """Do nothing: there is one run."""

    @property
    def run(self) -> Any:
        """The run, of which its number is asked."""
        return SimpleNamespace(run_id=1)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        return Message(*args, **kwargs)

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError("Every message is answered at once: use send_and_receive.")

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError("Every message is answered at once: use send_and_receive.")

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        replies = []
        for message in messages:
            context = self.contexts[message.metadata.dst_node_id]
            received = copy.deepcopy(message)  # as if it came over a wire
            replies.append(copy.deepcopy(self.app(received, context)))
        return replies


def run_in_process(
    client_app: ClientApp,
    server_app: ServerApp,
    nodes: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any] | None = None,
) -> InProcessGrid:
    """Run two apps of Flower in this process, and return the grid as it is afterwards.

    Args:
        client_app: The clients' app.
        server_app: The server's app.
        nodes: The configuration of each node, as `flower-supernode --node-config` gives it.
        config: The run's configuration.

    Example:
        >>> server = ServerApp()
        >>> @server.main()
        ... def main(grid, context):
        ...     print(len(list(grid.get_node_ids())), context.run_config)
        >>> _ = run_in_process(ClientApp(), server, [{}, {}, {}], {"rounds": 3})
        3 {'rounds': 3}
    """
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 0
    grid = InProcessGrid(client_app, config or {}, nodes)
    context = Context(
        run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=dict(config or {})
    )
    server_app(grid, context)
    return grid


__all__ = ["InProcessGrid", "run_in_process"]
