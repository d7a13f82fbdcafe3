"""The server: averages what clients send, and tests it."""

import json
import time
from pathlib import Path

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg as LegacyFedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from hf_gradguard.federation.flower import MergeByName, record_of

from .client_app import load
from .task import Task

app = ServerApp()


class Merging(MergeByName, FedAvg):
    """FedAvg for clients that leave out what they withhold."""


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    task = Task(config)
    model = task.model()
    figures: list[dict] = []
    started = time.perf_counter()

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round % config["test-every"] and server_round != config["rounds"]:
            return None
        load(model, arrays)
        found = {"round": server_round, "accuracy": task.accuracy(model)}
        figures.append(found | {"seconds": round(time.perf_counter() - started, 2)})
        print(f"round {server_round}: accuracy {found['accuracy']:.3f}", flush=True)
        if config["output"]:
            Path(config["output"]).write_text(json.dumps(figures) + "\n", encoding="utf-8")
        return MetricRecord({"accuracy": found["accuracy"]})

    weights = {name: p.detach() for name, p in model.named_parameters()}
    if config["secure-aggregation"]:
        secure(grid, context, list(weights.values()), evaluate)
        return
    strategy = Merging(fraction_evaluate=0.0)
    strategy.start(grid, record_of(weights), num_rounds=config["rounds"], evaluate_fn=evaluate)


def secure(grid: Grid, context: Context, weights: list, evaluate) -> None:
    """With SecAgg+ the server sees the sum of protected updates, and none of them."""
    arrays = [weight.numpy() for weight in weights]

    def test(server_round: int, found: list, _config: dict) -> tuple[float, dict] | None:
        metrics = evaluate(server_round, ArrayRecord(numpy_ndarrays=found))
        return None if metrics is None else (0.0, dict(metrics))

    strategy = LegacyFedAvg(
        fraction_evaluate=0.0, min_fit_clients=3, min_available_clients=3, evaluate_fn=test,
        initial_parameters=ndarrays_to_parameters(arrays),
    )  # fmt: skip
    legacy = LegacyContext(
        context, config=ServerConfig(num_rounds=context.run_config["rounds"]), strategy=strategy
    )
    # Weights of a pretrained model reach beyond ±8, and what is beyond is cut off.
    workflow = SecAggPlusWorkflow(1.0, 0.6, max_weight=4.0, clipping_range=32.0)
    DefaultWorkflow(fit_workflow=workflow)(grid, legacy)
