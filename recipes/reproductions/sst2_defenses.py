"""Accuracy of each defense on SST-2, two ranks, matched strength; and, separately, what a step
costs.

    python recipes/reproductions/sst2_defenses.py --model MODEL --data_dir SST2 \
        --output docs/results/sst2
    python recipes/reproductions/sst2_defenses.py --model MODEL --data_dir SST2 --seconds \
        --output docs/results/sst2_seconds

Runs recipes/sst2.py once a row and keeps each run's metrics. Seconds mean something on a machine
that does nothing else.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

from reporting import Results, parser_of, write_table

RECIPE = Path(__file__).resolve().parents[1] / "sst2.py"
OPTIMAL = {"num_probes": 10, "refresh_every": 10}
NETWORK = {"evaluation_network": "text-evaluation-network-minilm-l6"}
ROWS = {
    "none": ("none", {}),
    "gaussian_noise-1": ("gaussian_noise", {"relative_scale": 1.0}),
    "optimal_noise-1": ("optimal_noise", {"relative_scale": 1.0, **OPTIMAL}),
    "gaussian_noise-5": ("gaussian_noise", {"relative_scale": 5.0}),
    "optimal_noise-5": ("optimal_noise", {"relative_scale": 5.0, **OPTIMAL}),
    "pruning-0.9": ("pruning", {"ratio": 0.9}),
    "optimal_pruning-0.9": ("optimal_pruning", {"ratio": 0.9, **OPTIMAL}),
    "pruning-0.99": ("pruning", {"ratio": 0.99}),
    "optimal_pruning-0.99": ("optimal_pruning", {"ratio": 0.99, **OPTIMAL}),
    "refiner": ("refiner", NETWORK),
    "refiner-slow": ("refiner", {"learning_rate": 0.001, "iterations": 4, **NETWORK}),
    "paper: pruning": ("pruning", {"ratio": 0.2}),  # Refiner paper, Table 13
    "paper: gaussian_noise": ("gaussian_noise", {"scale": 0.001}),
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", required=True, help="a text encoder")
    parser.add_argument("--data_dir", required=True, help="folder with train.tsv and dev.tsv")
    parser.add_argument("--seconds", action="store_true", help="20 steps a row, for their time")
    args = parser.parse_args()
    rows = {
        row: one
        for row, one in ROWS.items()
        if not (args.seconds and row.startswith(("refiner", "paper")))
    }
    plan = {"rows": rows, "steps": 20 if args.seconds else 300, "seed": 0}
    if args.quick:
        plan |= {"rows": {row: ROWS[row] for row in ("none", "pruning-0.9")}, "steps": 2}
    results = Results(args.output, plan)
    for row in plan["rows"]:
        results.get((row,), run, args, *ROWS[row], plan["steps"], plan["seed"])
    header = (
        ["s/step", "in plain steps"]
        if args.seconds
        else ["accuracy on dev", "relative error", "cosine"]
    )
    write_table(args.output, ["defense", "strength", *header], table(results.figures, args.seconds))


def run(args: argparse.Namespace, name: str, settings: dict, steps: int, seed: int) -> dict:
    flags = ["--defense", name, "--defense_kwargs", json.dumps(settings), "--seed", str(seed)]
    flags += ["--max_steps", str(steps), "--learning_rate", "5e-5", "--warmup_steps", "0.1"]
    flags += ["--per_device_train_batch_size", "16", "--num_ranks", "2", "--use_cpu"]
    flags += ["--logging_steps", str(min(50, steps))]
    launch = [
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    ]
    launch += [
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
        "--num_cpu_threads_per_process",
        "1",
    ]
    with tempfile.TemporaryDirectory() as folder:
        paths = [
            "--model_name_or_path",
            args.model,
            "--data_dir",
            args.data_dir,
            "--output_dir",
            folder,
        ]
        subprocess.run([sys.executable, *launch, str(RECIPE), *flags, *paths], check=True)
        report = json.loads(Path(folder, "metrics.json").read_text(encoding="utf-8"))
    shown = " ".join(f"'{flag}'" if "{" in flag else flag for flag in flags)
    places = "--model_name_or_path $MODEL --data_dir $SST2"
    report["command"] = f"accelerate launch {' '.join(launch[2:])} recipes/sst2.py {shown} {places}"
    return report


def table(figures: dict, seconds: bool) -> list[list[str]]:
    """Accuracies with the 95 % binomial interval over the sentences, or seconds a step."""
    rows = []
    for row, one in figures.items():
        name, settings = ROWS[row]
        strength = ", ".join(
            f"{key}={value}" for key, value in settings.items() if key not in OPTIMAL | NETWORK
        )
        cells = [f"`{name}`", f"`{strength}`" if strength else "defaults" if settings else ""]
        if seconds:
            step = one["seconds_per_step"]
            cells += [f"{step:.2f}", f"{step / figures['none']['seconds_per_step']:.2f}"]
        else:
            accuracy, n = one["accuracy"], one["eval_sentences"]
            cells.append(f"{accuracy:.3f} ± {1.96 * math.sqrt(accuracy * (1 - accuracy) / n):.3f}")
            exact = {
                "defense/relative_error": 0.0,
                "defense/cosine": 1.0,
            }  # of what no defense shares
            cells += [
                f"{value if one[key] is None else one[key]:.2f}" for key, value in exact.items()
            ]
        rows.append(cells)
    return rows


if __name__ == "__main__":
    main()
