"""The server: averages the sites' messages. It has no rows, and no encoder is needed."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from transformers import AutoModelForSequenceClassification

from hf_gradguard.heads.flower import head_arrays, load_head_arrays

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    head = AutoModelForSequenceClassification.from_pretrained(config["head"])
    sites = {"min_available_nodes": config["sites"], "min_train_nodes": config["sites"]}
    strategy = FedAvg(**sites, min_evaluate_nodes=config["sites"])
    result = strategy.start(grid, head_arrays(head), num_rounds=config["num-server-rounds"])
    load_head_arrays(head, result.arrays)
    head.save_pretrained(config["output"])
