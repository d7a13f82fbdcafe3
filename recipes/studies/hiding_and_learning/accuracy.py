r"""Accuracy of each defense on SST-2, two ranks, matched strength; or what a step costs.

    python -m recipes.studies.hiding_and_learning.run accuracy --model MODEL --data_dir SST2 \
        --output docs/results/sst2
    python -m recipes.studies.hiding_and_learning.run accuracy --model MODEL --data_dir SST2 \
        --seconds --output docs/results/sst2_seconds

Runs recipes/sst2.py once per row and keeps each run's metrics. Seconds mean something on a machine
that does nothing else. About six hours of two cores for all rows, most of them Refiner's; with
`--seconds` five minutes.
"""

import json
import math
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from ..lib.defenses import as_published
from ..lib.tables import write_table
from .settings import ACCURACY, NETWORK, OPTIMAL, QUICK, STEPS, UNTIMED

ARGUMENTS = {
    "--model": "a text encoder",
    "--data_dir": "folder with train.tsv and dev.tsv",
    "--seconds": {"action": "store_true", "help": "20 steps a row, for their time"},
}
RECIPE = Path(__file__).resolve().parents[2] / "sst2.py"
LAUNCH = shlex.split(
    "accelerate launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no "
    "--dynamo_backend no --num_cpu_threads_per_process 1"
)
FLAGS = shlex.split(
    "--learning_rate 5e-5 --warmup_steps 0.1 --per_device_train_batch_size 16 --num_ranks 2 "
    "--use_cpu --scale_learning_rate False"
)
EXACT = {"defense/relative_error": 0.0, "defense/cosine": 1.0}  # of what no defense shares


def rows(kind: str) -> dict:
    """The cells of `accuracy`, `seconds` or `quick` runs."""
    left_out = {"accuracy": (), "seconds": UNTIMED, "quick": set(ACCURACY) - set(QUICK)}[kind]
    return {
        (row,): {"defense": name, "settings": settings, "steps": STEPS[kind], "seed": 0}
        for row, (name, settings) in ACCURACY.items()
        if row not in left_out
    }


def cells(args) -> dict:
    return rows("quick" if args.quick else "seconds" if args.seconds else "accuracy")


def prepare(args):
    def measure(cell: dict) -> dict:
        settings = json.dumps(as_published(cell["defense"], cell["settings"]))
        steps = cell["steps"]
        flags = ["--defense", cell["defense"], "--defense_kwargs", settings]
        flags += ["--seed", str(cell["seed"]), "--max_steps", str(steps), *FLAGS]
        flags += ["--logging_steps", str(min(50, steps))]
        run = [sys.executable, "-m", "accelerate.commands.launch", *LAUNCH[2:], str(RECIPE), *flags]
        places = ["--model_name_or_path", args.model, "--data_dir", args.data_dir]
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([*run, *places, "--output_dir", folder], check=True)
            found = json.loads(Path(folder, "metrics.json").read_text(encoding="utf-8"))
        shown = shlex.join([*LAUNCH, "recipes/sst2.py", *flags])
        return found | {"command": f"{shown} --model_name_or_path $MODEL --data_dir $SST2"}

    return measure


def half(found: dict) -> float:
    """Of the 95 % binomial interval over the sentences."""
    accuracy = found["accuracy"]
    return 1.96 * math.sqrt(accuracy * (1 - accuracy) / found["eval_sentences"])


def report(figures: dict, args) -> None:
    """Accuracies with their intervals, or seconds per step."""
    table = []
    for row, one in figures.items():
        name, settings = ACCURACY[row]
        said = {key: value for key, value in settings.items() if key not in OPTIMAL | NETWORK}
        strength = ", ".join(f"{key}={value}" for key, value in said.items())
        shown = [f"`{name}`", f"`{strength}`" if strength else "defaults" if settings else ""]
        if args.seconds:
            step, plain = one["seconds_per_step"], figures["none"]["seconds_per_step"]
            shown += [f"{step:.2f}", f"{step / plain:.2f}"]
        else:
            shown.append(f"{one['accuracy']:.3f} ± {half(one):.3f}")
            values = [exact if one[key] is None else one[key] for key, exact in EXACT.items()]
            shown += [f"{value:.2f}" for value in values]
        table.append(shown)
    header = ["accuracy on dev", "relative error", "cosine"]
    if args.seconds:
        header = ["s/step", "in plain steps"]
    write_table(args.output, ["defense", "strength", *header], table)
