r"""Twenty rounds of a federation of four clients in Flower: accuracy and time behind each defense.

    python -m recipes.studies.updates.run rounds --cifar10 CIFAR10.npz --model MODEL \
        --data_dir SST2 --output docs/results/updates_rounds

The app of examples/flower in one process: Flower's server, strategy (FedAvg), mod and messages.
Every round each client trains for four steps of AdamW: a convolutional network from its start on
CIFAR-10 (3,500 images, 32 a step, rate 2e-3), or MiniLM with a new head on SST-2 (4 sentences a
step, rate 2e-4, token embeddings withheld). Accuracy of 500 held-out rows after the last round,
with 95 % intervals over five seeds (Student's t) for CIFAR-10; SST-2 has one seed, where 500 rows
alone give ± 0.03. Processor seconds that a client's round takes with its defense, the mean over all
rounds, clients and seeds.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch

from ..lib.tables import interval, write_table
from .settings import QUICK_ROUNDS, ROUNDS, SEEDS, TASKS, TRAINED

ARGUMENTS = {
    "--cifar10": "npz with x (N, 32, 32, 3) and y",
    "--model": "an encoder",
    "--data_dir": "folder with train.tsv and dev.tsv",
}
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "flower"


def cells(args) -> dict:
    found = {}
    for task, common in TASKS.items():
        for row, defense in TRAINED[task].items():
            for seed in range(1 if args.quick else SEEDS[task]):
                rounds = QUICK_ROUNDS if args.quick else ROUNDS
                found[task, row, str(seed)] = common | defense | {"seed": seed, "rounds": rounds}
    return found


def prepare(args):
    sys.path.insert(0, str(EXAMPLE))
    torch.set_num_threads(1)
    data = {"cifar10": args.cifar10, "sst2": args.data_dir}
    return lambda cell: measure(cell | {"data": str(data[cell["task"]]), "model": str(args.model)})


def measure(config: dict) -> dict:
    from gradguard_flower.local import configuration, run

    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "figures.json"
        known = {key: value for key, value in config.items() if key != "quick"}
        grid = run(configuration(**known, output=str(output)))
        figures = json.loads(output.read_text())
    seconds = [one for context in grid.contexts.values() for one in context.state["times"]["all"]]
    return {
        "accuracy": [one["accuracy"] for one in figures],
        "seconds": round(statistics.mean(seconds), 3),
    }


def report(figures: dict, args) -> None:
    rows = []
    for task, found in figures.items():
        for row, runs in found.items():
            last = interval([run["accuracy"][-1] for run in runs.values()])
            seconds = statistics.mean(run["seconds"] for run in runs.values())
            rows.append([task, row, last, f"{seconds:.2f}"])
    header = ["", "defense", "accuracy after the last round", "processor seconds a client's round"]
    write_table(args.output, header, rows)
