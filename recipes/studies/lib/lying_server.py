"""Flower's SecAgg+ where a client drops out, and where the server lies: it asks for the shares of a
client's seed, as of one that answered, and for those of its key, as of one that dropped out. It
needs `hf-gradguard[flower]`.

Bonawitz et al. (2017) let clients tell each other, signed, who answered, so that nobody hands out
both. Flower's mod does not, and hands out both in one message.
"""

import copy
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import bytes_to_ndarray, ndarrays_to_parameters
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.common.secure_aggregation.ndarrays_arithmetic import (
    factor_extract,
    parameters_addition,
    parameters_mod,
    parameters_subtraction,
)
from flwr.common.secure_aggregation.quantization import dequantize
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.compat.common.recorddict_compat import parameters_to_arrayrecord
from flwr.server import LegacyContext, ServerConfig, SimpleClientManager
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.strategy import FedAvg
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key
from flwr.supercore.task_identity import TaskIdentity

RANGE = 4.0


class _Process:
    """A grid whose nodes are all in this process.

    Args:
        updates: What each node sends, by its number.
        gone: The stage in which the first node drops out.
    """

    def __init__(self, updates: dict[int, np.ndarray], gone: str = "") -> None:
        self.app, self.updates, self.gone = ClientApp(mods=[secaggplus_mod]), updates, gone
        self.errors: list[str] = []
        self.contexts = {node: Context(1, node, {}, RecordDict(), {}) for node in updates}
        self.replies: list[Message] = []

        @self.app.train()
        def train(message: Message, context: Context) -> Message:
            parameters = ndarrays_to_parameters([self.updates[context.node_id]])
            content = {
                "fitres.parameters": parameters_to_arrayrecord(parameters, True),
                "fitres.num_examples": MetricRecord({"num_examples": 1}),
                "fitres.metrics": ConfigRecord({}),
                "fitres.status": ConfigRecord({"code": 0, "message": "Success"}),
            }
            return Message(RecordDict(content), reply_to=message)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        self.replies = [self._reply(copy.deepcopy(message)) for message in messages]
        return self.replies

    def _reply(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        stage = message.content.config_records[RECORD_KEY_CONFIGS][Key.STAGE]
        if node == min(self.updates) and stage == self.gone:
            return Message(Error(3, "gone"), reply_to=message)
        try:
            return self.app(message, self.contexts[node])
        except Exception as error:  # as the engine: the server is told
            self.errors.append(type(error).__name__)
            return Message(Error(1, str(error)), reply_to=message)


class Lying(SecAggPlusWorkflow):
    """Flower's workflow, which unmasks one client's update in place of the sum.

    Args:
        victim: The client's node.
        settings: Of the workflow.
    """

    def __init__(self, victim: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.victim = victim

    def collect_masked_vectors_stage(self, grid: Any, context: LegacyContext, state: Any) -> bool:
        is_enough = super().collect_masked_vectors_stage(grid, context, state)
        (reply,) = (r for r in grid.replies if r.metadata.src_node_id == self.victim)
        masked = reply.content.config_records[RECORD_KEY_CONFIGS][Key.MASKED_PARAMETERS]
        self.masked = [bytes_to_ndarray(array) for array in masked]
        return is_enough

    def unmask_stage(self, grid: Any, context: LegacyContext, state: Any) -> bool:
        def asking(node: int) -> Message:
            answered = list(state.nid_to_neighbours[node] & state.active_node_ids)
            asked = {
                Key.STAGE: Stage.UNMASK, Key.ACTIVE_NODE_ID_LIST: answered,
                Key.DEAD_NODE_ID_LIST: [self.victim],
            }  # fmt: skip
            content = RecordDict({RECORD_KEY_CONFIGS: ConfigRecord(asked)})
            return Message(content, dst_node_id=node, message_type="train")

        seeds, keys = [], []
        for reply in grid.send_and_receive([asking(node) for node in state.active_node_ids]):
            told = reply.content.config_records[RECORD_KEY_CONFIGS]
            shares = [
                share
                for node, share in zip(told[Key.NODE_ID_LIST], told[Key.SHARE_LIST], strict=True)
                if node == self.victim
            ]
            seeds.append(shares[0])
            keys.append(shares[1])
        self.update = self._unmasked(combine_shares(seeds), combine_shares(keys), state)
        return True

    def _unmasked(self, seed: bytes, key: bytes, state: Any) -> np.ndarray:
        shapes = [array.shape for array in self.masked]
        values = parameters_subtraction(self.masked, pseudo_rand_gen(seed, state.mod_range, shapes))
        for node in state.nid_to_neighbours[self.victim] - {self.victim}:
            public_key = bytes_to_public_key(state.nid_to_publickeys[node][0])
            shared = generate_shared_key(bytes_to_private_key(key), public_key)
            mask = pseudo_rand_gen(shared, state.mod_range, shapes)
            undo = parameters_subtraction if self.victim > node else parameters_addition
            values = undo(values, mask)
        _, values = factor_extract(parameters_mod(values, state.mod_range))
        (update,) = dequantize(values, state.clipping_range, state.quantization_range)
        return update


def unmasked_update(updates: Sequence[np.ndarray], victim: int) -> np.ndarray:
    """One client's update, as such a server gets it from a round of SecAgg+.

    Args:
        updates: Of all clients.
        victim: Which one it is after.
    """
    workflow = Lying(victim + 1, **_settings(updates))
    _run(workflow, _Process(dict(enumerate(updates, start=1))))
    return workflow.update


def mean_without_one(
    updates: Sequence[np.ndarray], stage: str
) -> tuple[np.ndarray | None, list[str]]:
    """What the server gets if the first client drops out in a stage, and what others fail with.

    Args:
        updates: Of all clients.
        stage: Of SecAgg+, or `""`: nobody drops out.
    """
    grid = _Process(dict(enumerate(updates, start=1)), stage)
    context = _run(SecAggPlusWorkflow(**_settings(updates)), grid)
    if not context.strategy.counts:
        return None, grid.errors
    return context.state.array_records[MAIN_PARAMS_RECORD]["0"].numpy(), grid.errors


class _Counting(FedAvg):
    counts = False

    def aggregate_fit(self, *of: Any) -> Any:
        self.counts = True
        return super().aggregate_fit(*of)


def _settings(updates: Sequence[np.ndarray]) -> dict[str, Any]:
    return {
        "num_shares": 1.0, "reconstruction_threshold": len(updates) - 1, "max_weight": 1.0,
        "clipping_range": RANGE,
    }  # fmt: skip


def _run(workflow: SecAggPlusWorkflow, grid: Any) -> LegacyContext:
    """One round."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    manager = SimpleClientManager()
    for node in grid.updates:
        manager.register(GridClientProxy(node, grid, SimpleNamespace(run_id=1)))  # type: ignore[arg-type]
    count = len(grid.updates)
    strategy = _Counting(
        fraction_fit=1.0, min_fit_clients=count, min_evaluate_clients=count,
        min_available_clients=count,
    )  # fmt: skip
    context = LegacyContext(
        Context(1, 0, {}, RecordDict(), {}), ServerConfig(1), strategy, client_manager=manager
    )
    current = ConfigRecord({WorkflowKey.CURRENT_ROUND: 1})
    context.state.config_records[MAIN_CONFIGS_RECORD] = current
    zeros = np.zeros_like(next(iter(grid.updates.values())))
    start = parameters_to_arrayrecord(ndarrays_to_parameters([zeros]), True)
    context.state.array_records[MAIN_PARAMS_RECORD] = start
    workflow(grid, context)
    return context
