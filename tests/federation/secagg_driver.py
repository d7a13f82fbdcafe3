"""Flower's SecAgg+ workflow with three clients in one process: nothing listens on a port."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.compat.common.recorddict_compat import parameters_to_arrayrecord
from flwr.server import LegacyContext, ServerConfig, SimpleClientManager
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.strategy import FedAvg
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key

NODES = (1, 2, 3)
START = np.linspace(-0.5, 0.5, 60, dtype=np.float32).reshape(6, 10)


def trained(node: int) -> np.ndarray:
    """What a node's training makes of the start."""
    return START + np.float32(0.05) * np.cos(np.arange(60, dtype=np.float32) * node).reshape(6, 10)


def client_app(mod: Any, seen: dict[int, np.ndarray]) -> ClientApp:
    """An app with SecAgg+, the mod after it, and between the two one that looks."""

    def look(message: Message, context: Context, call_next: Any) -> Message:
        reply = call_next(message, context)
        record = reply.content.array_records["fitres.parameters"]
        seen[context.node_id] = record["0"].numpy()
        return reply

    app = ClientApp(mods=[secaggplus_mod, look, mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        content = RecordDict({
            "fitres.parameters": parameters_to_arrayrecord(
                ndarrays_to_parameters([trained(context.node_id)]), True
            ),
            "fitres.num_examples": MetricRecord({"num_examples": 10}),
            "fitres.metrics": ConfigRecord({}),
            "fitres.status": ConfigRecord({"code": 0, "message": "Success"}),
        })  # fmt: skip
        return Message(content, reply_to=message)

    return app


class InProcessGrid:
    """Hands messages to the app, each node with a context of its own."""

    def __init__(self, app: ClientApp, config: dict[str, Any]) -> None:
        self.app = app
        self.contexts = {node: Context(1, node, {}, RecordDict(), dict(config)) for node in NODES}

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        found = []
        for message in messages:
            node = message.metadata.dst_node_id
            own = copy.deepcopy(message)  # as if it came over a wire
            found.append(self.app(own, self.contexts[node]))
        return found


def run_secagg(mod: Any, config: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One round: the mean that nobody protected, the one that the server unmasked, and the mean of
    what the mod let through.
    """
    seen: dict[int, np.ndarray] = {}
    grid: Any = InProcessGrid(client_app(mod, seen), config)
    manager = SimpleClientManager()
    for node in NODES:
        manager.register(GridClientProxy(node, grid, SimpleNamespace(run_id=1)))  # type: ignore[arg-type]
    strategy = FedAvg(fraction_fit=1.0, min_fit_clients=3, min_available_clients=3)
    context = LegacyContext(
        Context(1, 0, {}, RecordDict(), {}),
        config=ServerConfig(num_rounds=1),
        strategy=strategy,
        client_manager=manager,
    )
    context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: 1})
    context.state.array_records[MAIN_PARAMS_RECORD] = parameters_to_arrayrecord(
        ndarrays_to_parameters([START]), True
    )
    SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2, clipping_range=2.0)(grid, context)
    found = context.state.array_records[MAIN_PARAMS_RECORD]["0"].numpy()
    plain = np.mean([trained(node) for node in NODES], axis=0)
    return plain, found, np.mean(list(seen.values()), axis=0)
