"""Federations of small clients in Flower's own simulation engine, each with a few rows of features
on which it trains a head. It needs `pip install 'hf-gradguard[simulation]'`.

    python -m recipes.studies.lib.simulated_clients FEDERATION.json RESULT.safetensors

A run has a process of its own, so that its peak memory is its own. Messages, nodes, secure
aggregation and its masks are Flower's; what a client sends went through `gradguard_mod`.
"""

import contextlib
import functools
import json
import math
import os
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.common import FitIns, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common.recorddict_compat import parameters_to_arrayrecord
from flwr.server import LegacyContext, ServerConfig, SimpleClientManager
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.strategy import FedAvg as LegacyFedAvg
from flwr.server.superlink.linkstate import InMemoryLinkState
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg
from flwr.simulation import run_simulation
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from safetensors.torch import save_file
from torch import Tensor

from hf_gradguard import make_defense
from hf_gradguard.federation.flower import gradguard_mod, record_of, tensors_of
from hf_gradguard.gradient_map.views import PrecomputedGradient
from hf_gradguard.heads import PrivateHeadConfig, PrivateHeadForSequenceClassification

NAMES = ("0", "1")  # of the head's weight and bias, or of its weight alone: as older clients count
ACTORS = 4  # processes that run clients; each has one in hand
UNAVAILABLE = 3  # Flower's code of a node that does not answer


@dataclass(frozen=True)
class Federation:
    """One training.

    Args:
        folder: Where `write_rows` wrote the clients' rows.
        clients: Nodes of the simulation. Client k has part k of the rows, or k modulo the parts.
        asked: Clients of a round. None is asked again before all were.
        rounds: Rounds.
        protection: `"none"`; `"server"`: clients clip, and the server adds noise to the sum;
            `"server, correlated"`: the same, by noise that cancels in the weights; `"shares"`: each
            client adds its share of the sum's noise; `"alone"`: each client adds all of it;
            `"flower"`: clients clip by Flower's mod, and its strategy adds noise.
        secure: Whether sums are Flower's SecAgg+.
        shares: Of a client's keys, for its neighbors in SecAgg+; 0: all clients of a round are.
        clip: Of a client's whole update.
        noise_multiplier: Of the sum's noise, in clips.
        server_rate: What the mean update is multiplied by in the first round; it falls to zero.
        local_steps: Of a client in a round, each on all of its rows.
        local_rate: Of these steps.
        dropout: The probability that a client that was asked does not answer.
        dropout_stage: Of SecAgg+, in which clients drop out.
        least: Of those asked, the part that has to answer: noise of shares is planned for so many.
        by_node: Whether the engine finds a node's messages by the node: as it is released, it goes
            through all messages for each node.
        count_bytes: Whether the first round's messages are counted, which takes time.
    """

    folder: str
    clients: int
    asked: int
    rounds: int
    protection: str = "none"
    secure: bool = False
    shares: int = 0
    clip: float = 1.0
    noise_multiplier: float = 0.0
    server_rate: float = 1.0
    local_steps: int = 5
    local_rate: float = 5.0
    dropout: float = 0.1
    dropout_stage: str = Stage.COLLECT_MASKED_VECTORS
    least: float = 0.8
    by_node: bool = False
    count_bytes: bool = True

    @property
    def fewest(self) -> int:
        """Answers without which a round is given up."""
        return math.ceil(self.least * self.asked)

    @property
    def settings(self) -> dict[str, Any]:
        """A client's, under `gradguard.` of a run's configuration."""
        if self.protection == "flower":
            return {"gradguard.defense": "none"}
        config: dict[str, Any] = {"gradguard.sends": "difference", "gradguard.defense": "none"}
        if self.protection == "none":
            return config
        noise = self.noise_multiplier * self.clip
        share = {"shares": noise / math.sqrt(self.fewest), "alone": noise}
        return config | {
            "gradguard.defense": "dp_sgd", "gradguard.dp_sgd.clip": self.clip,
            "gradguard.dp_sgd.scale": share.get(self.protection, 0.0),
        }  # fmt: skip

    @property
    def value_range(self) -> float:
        """Of an entry of what a client sends, for SecAgg+: its clip, and eight deviations."""
        return self.clip + 8 * float(self.settings.get("gradguard.dp_sgd.scale", 1.0))


def write_rows(folder: Path, features: Tensor, labels: Tensor, parts: list[list[int]]) -> None:
    """Writes rows client by client, which all processes map and none loads."""
    folder.mkdir(parents=True, exist_ok=True)
    order = torch.tensor([row for part in parts for row in part])
    np.save(folder / "features.npy", features[order].numpy())
    np.save(folder / "labels.npy", labels[order].numpy())
    np.save(folder / "starts.npy", np.cumsum([0, *map(len, parts)]))


@functools.cache
def _rows(folder: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    path = Path(folder)
    features = np.load(path / "features.npy", mmap_mode="r")
    return features, np.load(path / "labels.npy"), np.load(path / "starts.npy")


def rows_of_client(folder: str, client: int) -> tuple[Tensor, Tensor]:
    """Features and labels of one client."""
    features, labels, starts = _rows(folder)
    part = client % (len(starts) - 1)
    here = slice(starts[part], starts[part + 1])
    return torch.from_numpy(features[here].copy()), torch.from_numpy(labels[here].copy())


@functools.cache
def _head(width: int) -> PrivateHeadForSequenceClassification:
    torch.set_num_threads(1)
    config = PrivateHeadConfig(directions=width - 1, num_labels=2)
    return PrivateHeadForSequenceClassification(config)


def local_update(federation: Federation, client: int, start: Mapping[str, Tensor]) -> dict:
    """What a client's rows change of the head's weights."""
    features, labels = rows_of_client(federation.folder, client)
    head = _head(features.shape[1])
    parameters = [p for p in head.parameters() if p.requires_grad]
    tensors = list(start.values())
    with torch.no_grad():
        for parameter, tensor in zip(parameters, tensors, strict=True):
            parameter.copy_(tensor)
    optimizer = torch.optim.SGD(parameters, federation.local_rate)
    for _ in range(federation.local_steps):
        optimizer.zero_grad()
        head(features=features, labels=labels).loss.backward()
        optimizer.step()
    return {
        name: (parameter.detach() - tensor).clone()
        for (name, tensor), parameter in zip(start.items(), parameters, strict=True)
    }


def start_of(federation: Federation) -> dict[str, Tensor]:
    """Weights at zero, by the names that updates have."""
    head = _head(_rows(federation.folder)[0].shape[1])
    parameters = [p for p in head.parameters() if p.requires_grad]
    return dict(zip(NAMES, (torch.zeros_like(p) for p in parameters), strict=False))


def client_app(federations: Sequence[Federation]) -> ClientApp:
    """A client, which trains, protects and masks, or does not answer; of whichever training a
    message is.
    """

    def federation_of(message: Message) -> Federation:
        return federations[int(message.metadata.group_id)]

    def drop(message: Message, context: Context, call_next: Any) -> Message:
        federation, records = federation_of(message), message.content.config_records
        stage = records[RECORD_KEY_CONFIGS].get(Key.STAGE) if RECORD_KEY_CONFIGS in records else ""
        is_here = not federation.secure or stage == federation.dropout_stage
        if is_here and random.random() < federation.dropout:
            return Message(Error(UNAVAILABLE, "gone"), reply_to=message)
        return call_next(message, context)

    def configured(message: Message, context: Context, call_next: Any) -> Message:
        # The engine has a run's configuration from a folder, and refuses that it changes.
        own = Context(
            context.run_id, context.node_id, context.node_config, context.state,
            run_config=federation_of(message).settings,
        )  # fmt: skip
        return call_next(message, own)

    def of_flower(message: Message, context: Context, call_next: Any) -> Message:
        federation = federation_of(message)
        if federation.secure:
            return secaggplus_mod(message, context, call_next)
        if federation.protection == "flower":
            return fixedclipping_mod(message, context, call_next)
        return call_next(message, context)

    app = ClientApp(mods=[drop, of_flower, configured, gradguard_mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        federation = federation_of(message)
        (received,) = message.content.array_records.values()
        client = int(context.node_config["partition-id"])
        start = tensors_of(received)
        change = local_update(federation, client, start)
        if federation.protection == "flower":
            change = {name: start[name] + tensor for name, tensor in change.items()}
        update = record_of(change)
        if not federation.secure:
            content = {"arrays": update, "metrics": MetricRecord({"num-examples": 1})}
            return Message(RecordDict(content), reply_to=message)
        older = {
            "fitres.parameters": update,
            "fitres.num_examples": MetricRecord({"num_examples": 1}),
            "fitres.metrics": ConfigRecord({}),
            "fitres.status": ConfigRecord({"code": 0, "message": "Success"}),
        }
        return Message(RecordDict(older), reply_to=message)

    return app


class Server:
    """What the server keeps: whom it asks, the weights, its noise, and what is measured.

    Args:
        federation: The training.
    """

    def __init__(self, federation: Federation) -> None:
        self.federation, self.weights = federation, start_of(federation)
        self.seconds: list[float] = []
        self.processor_seconds: list[float] = []
        self.answers: list[int] = []
        self.used: list[bool] = []
        self.traffic: dict[str, list[int]] = defaultdict(list)
        self._defense, self._noise_state = self._noise(), {}
        self._not_asked: list[int] = []

    def _noise(self) -> Any:
        federation = self.federation
        if not federation.protection.startswith("server"):
            return None
        # A sum of so many clipped updates is never clipped again.
        strength = {
            "clip": federation.clip * federation.asked,
            "scale": federation.noise_multiplier * federation.clip,
        }
        if federation.protection.endswith("correlated"):
            strength |= {
                "correlated": True, "messages": federation.rounds, "falling_rate": True,
            }  # fmt: skip
        return make_defense("dp_sgd", **strength)

    def draw(self, nodes: Iterable[int]) -> list[int]:
        """The nodes of the next round, of those that were not asked before."""
        if len(self._not_asked) < self.federation.asked:
            self._not_asked = list(nodes)
            random.SystemRandom().shuffle(self._not_asked)
        self._began = [time.perf_counter(), processor_seconds()]
        if self.federation.protection == "flower":  # whose strategy draws itself
            return []
        return [self._not_asked.pop() for _ in range(self.federation.asked)]

    def spent_on_counts(self, clock: float, processor: float) -> None:
        """Leaves out of the round's time what passed since then."""
        self._began[0] += time.perf_counter() - clock
        self._began[1] += processor_seconds() - processor

    def step(self, total: Mapping[str, Tensor] | None, answers: int) -> None:
        """Moves the weights by a round's sum. With too few answers nothing of it is used."""
        federation, done = self.federation, len(self.answers)
        self.answers.append(answers)
        if total is not None:
            self.used.append(answers >= federation.fewest)
        if total is not None and self.used[-1]:
            size = answers
            if federation.protection != "none":  # a number that no client's absence changes
                size = (1 - federation.dropout) * federation.asked
            if self._defense is not None:
                gmap = PrecomputedGradient(dict(total))
                total, self._noise_state = self._defense.apply(gmap, self._noise_state)
            rate = federation.server_rate * (1 - done / federation.rounds) / size
            self.weights = {n: w + rate * total[n] for n, w in self.weights.items()}
        self.seconds.append(time.perf_counter() - self._began[0])
        self.processor_seconds.append(processor_seconds() - self._began[1])

    @property
    def figures(self) -> dict[str, Any]:
        """What was measured. Sizes are the least and the largest of a message."""
        return {
            "seconds": [round(seconds, 3) for seconds in self.seconds],
            "processor_seconds": [round(seconds, 2) for seconds in self.processor_seconds],
            "answers": self.answers, "used": self.used,
            "messages": {way: len(sizes) for way, sizes in self.traffic.items()},
            "bytes": {way: sum(sizes) for way, sizes in self.traffic.items()},
            "sizes": {way: [min(of), max(of)] for way, of in self.traffic.items() if of},
        }  # fmt: skip

    @property
    def counts(self) -> bool:
        """Whether this round's messages are counted."""
        return self.federation.count_bytes and not self.answers


class CountedGrid(Grid):
    """A grid that counts bytes of messages as they would be on a wire.

    Args:
        grid: The engine's.
        server: Keeps the counts.
        number: Of the training, which all messages have.
    """

    def __init__(self, grid: Grid, server: Server, number: int) -> None:
        self._grid, self._server, self._number = grid, server, number

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        messages = list(messages)
        for message in messages:
            message.metadata.group_id = str(self._number)
        self._count("down", messages)
        replies = list(self._grid.send_and_receive(messages, timeout=timeout))
        self._count("up", [reply for reply in replies if not reply.has_error()])
        return replies

    def _count(self, way: str, messages: list[Message]) -> None:
        if self._server.counts:
            began = time.perf_counter(), processor_seconds()
            self._server.traffic[way] += map(bytes_of, messages)
            self._server.spent_on_counts(*began)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def set_run(self, run: Any) -> None:
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        return self._grid.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        return self._grid.create_message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        return self._grid.get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._grid.pull_messages(message_ids)


def bytes_of(message: Message) -> int:
    """Of all objects that Flower makes of a message for a wire."""
    return sum(len(part.deflate()) for part in get_all_nested_objects(message).values())


class EachOnce(FedAvg):
    """Flower's averaging, by a server that asks each client once and divides as `Server` does."""

    def __init__(self, server: Server) -> None:
        super().__init__(fraction_train=1.0, fraction_evaluate=0.0)
        self._server = server

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        record = RecordDict({"arrays": record_of(self._server.weights), "config": config})
        return self._construct_messages(record, self._server.draw(grid.get_node_ids()), "train")

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        valid = [reply for reply in replies if not reply.has_error()]
        arrays, _ = super().aggregate_train(server_round, valid)
        mean = None if arrays is None else tensors_of(arrays)
        self._server.step(times(mean, len(valid)), len(valid))
        return record_of(self._server.weights), None


class Flowers(DifferentialPrivacyClientSideFixedClipping):
    """Flower's own client-level privacy, which is only watched.

    Args:
        server: What is measured.
    """

    def __init__(self, server: Server) -> None:
        federation = server.federation
        part = federation.asked / federation.clients
        averaging = FedAvg(fraction_train=part, fraction_evaluate=0.0)
        super().__init__(averaging, federation.noise_multiplier, federation.clip, federation.asked)
        self._server = server

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._server.draw([])
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        arrays, metrics = super().aggregate_train(server_round, replies)
        self._server.used.append(arrays is not None)
        if arrays is not None:
            self._server.weights = tensors_of(arrays)
        self._server.step(None, sum(not reply.has_error() for reply in replies))
        return arrays, metrics


class EachOnceSecurely(LegacyFedAvg):
    """The same for SecAgg+, whose server has the mean alone."""

    def __init__(self, server: Server, nodes: list[int]) -> None:
        super().__init__()
        self._server, self._nodes = server, nodes
        self.has_a_mean = False

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> list:
        self.has_a_mean = False
        proxies = client_manager.all()
        asked = self._server.draw(self._nodes)
        return [(proxies[str(node)], FitIns(parameters, {})) for node in asked]

    def aggregate_fit(self, server_round: int, results: list, failures: list) -> tuple:
        self.has_a_mean = True
        arrays = parameters_to_ndarrays(results[0][1].parameters)
        tensors = (torch.from_numpy(array).float() for array in arrays)
        mean = dict(zip(NAMES, tensors, strict=False))
        self._server.step(times(mean, len(results)), len(results))
        return None, {}


def times(tensors: Mapping[str, Tensor] | None, count: int) -> dict[str, Tensor] | None:
    return None if tensors is None else {name: count * t for name, t in tensors.items()}


def server_app(servers: Sequence[Server]) -> ServerApp:
    """The server of trainings, one after the other."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        clients = servers[0].federation.clients
        while len(nodes := sorted(grid.get_node_ids())) < clients:
            time.sleep(0.1)  # they register after the server begins
        for number, server in enumerate(servers):
            counted, federation = CountedGrid(grid, server, number), server.federation
            if federation.secure:
                _train_securely(server, counted, context, nodes)
                continue
            strategy = Flowers if federation.protection == "flower" else EachOnce
            start = record_of(server.weights)
            strategy(server).start(counted, start, num_rounds=federation.rounds)

    return app


def _train_securely(server: Server, grid: Grid, context: Context, nodes: list[int]) -> None:
    federation, manager = server.federation, SimpleClientManager()
    for node in nodes:
        run = SimpleNamespace(run_id=context.run_id)
        manager.register(GridClientProxy(node, grid, run))  # type: ignore[arg-type]
    averaging = EachOnceSecurely(server, nodes)
    legacy = LegacyContext(
        context, ServerConfig(federation.rounds), averaging, client_manager=manager
    )
    shares, threshold = federation.shares or 1.0, federation.fewest
    if federation.shares:  # of so many neighbors, more than half
        threshold = federation.shares // 2 + 1
    workflow = SecAggPlusWorkflow(
        num_shares=shares, reconstruction_threshold=threshold, max_weight=1.0,
        clipping_range=federation.value_range,
    )  # fmt: skip
    for number in range(1, federation.rounds + 1):
        arrays = [tensor.numpy() for tensor in server.weights.values()]
        parameters = parameters_to_arrayrecord(ndarrays_to_parameters(arrays), True)
        legacy.state.array_records[MAIN_PARAMS_RECORD] = parameters
        current = ConfigRecord({WorkflowKey.CURRENT_ROUND: number})
        legacy.state.config_records[MAIN_CONFIGS_RECORD] = current
        workflow(grid, legacy)
        if not averaging.has_a_mean:
            server.used.append(False)
            server.step(None, 0)


@contextlib.contextmanager
def messages_by_node() -> Iterator[None]:
    """Lets the engine find a node's messages by the node. As it is released, it goes through all
    messages that were not answered yet for each node, ten times a second.
    """
    store, get = InMemoryLinkState.store_message_ins, InMemoryLinkState.get_message_ins
    waiting: dict[int, list[str]] = defaultdict(list)

    def storing(state: Any, message: Message) -> str | None:
        found = store(state, message)
        if found is not None:
            waiting[message.metadata.dst_node_id].append(found)
        return found

    def getting(state: Any, node_id: int, limit: int | None, **of: Any) -> list[Message]:
        if not waiting.get(node_id):
            return []
        everything, here = state.message_ins_store, waiting.pop(node_id)
        with state.lock:
            state.message_ins_store = {id: everything[id] for id in here if id in everything}
            try:
                found = get(state, node_id, limit, **of)
            finally:
                state.message_ins_store = everything
        waiting[node_id] = [id for id in here if everything[id] not in found]
        return found

    InMemoryLinkState.store_message_ins = storing
    InMemoryLinkState.get_message_ins = getting
    try:
        yield
    finally:
        InMemoryLinkState.store_message_ins, InMemoryLinkState.get_message_ins = store, get


class PeakMemory(threading.Thread):
    """The most memory that this process and those below it had together, pages that several share
    counted once.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.highest, self.own, self._over = 0, 0, threading.Event()

    def run(self) -> None:
        while not self._over.wait(1.0):
            self._look()

    def stop(self) -> None:
        self._look()
        self._over.set()

    @property
    def figures(self) -> dict[str, int]:
        """Bytes at the peak, of all processes and of the server's alone."""
        return {"peak_memory": self.highest, "peak_memory_of_server": self.own}

    def _look(self) -> None:
        sizes = {process: _proportional(process) for process in _family(os.getpid())}
        self.highest = max(self.highest, sum(sizes.values()))
        self.own = max(self.own, sizes[os.getpid()])


def processor_seconds() -> float:
    """Of this process and those below it so far."""
    ticks = 0
    for process in _family(os.getpid()):
        with contextlib.suppress(OSError):
            after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            ticks += int(after_name[11]) + int(after_name[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _family(root: int) -> list[int]:
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            after_name = entry.read_text().rpartition(")")[2].split()
            children[int(after_name[1])].append(int(entry.parent.name))
    found = [root]
    for process in found:
        found += children[process]
    return found


def _proportional(process: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return 1024 * int(line.split()[1])
    return 0


def train(federations: Sequence[Federation]) -> list[tuple[dict[str, Tensor], dict[str, Any]]]:
    """Trains one after the other, by the same nodes of one simulation.

    Returns:
        Of each the weights at the end, and what was measured.
    """
    servers, memory = [Server(federation) for federation in federations], PeakMemory()
    memory.start()
    _start_ray()
    engine = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    with messages_by_node() if federations[0].by_node else contextlib.nullcontext():
        run_simulation(
            server_app(servers), client_app(federations), federations[0].clients,
            backend_config=engine,
        )  # fmt: skip
    memory.stop()
    return [(server.weights, server.figures | memory.figures) for server in servers]


def _start_ray(tries: int = 5) -> None:
    """Starts what the engine runs clients in; Ray gives up after 30 seconds."""
    for left in reversed(range(tries)):
        try:
            ray.init(
                num_cpus=ACTORS, object_store_memory=2**28, log_to_driver=False,
                include_dashboard=False,
            )  # fmt: skip
            return
        except Exception:  # Ray raises no other
            if not left:
                raise
            ray.shutdown()


def main(settings: str, result: str) -> None:
    """Trains as a file of settings says, and writes weights, with what was measured beside them."""
    of_all = json.loads(Path(settings).read_text())
    trained = train([Federation(**of_one) for of_one in of_all])
    tensors = {
        f"{number}.{name}": tensor
        for number, (weights, _) in enumerate(trained)
        for name, tensor in weights.items()
    }
    save_file(tensors, result, metadata={"figures": json.dumps([of for _, of in trained])})


if __name__ == "__main__":
    # Under its own name: the engine's other processes look there for what they are handed.
    from recipes.studies.lib import simulated_clients

    simulated_clients.main(*sys.argv[1:])
