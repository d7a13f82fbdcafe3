"""Accuracy and cost of each defence on SST-2, two ranks, matched strength.

    python recipes/reproductions/sst2_defenses.py --model MODEL --data_dir SST2 --output docs/results/sst2

Runs recipes/sst2.py once a row and seed, keeps each run's metrics as OUTPUT/NAME.json (runs whose file exists are not run
again), and prints the table. For seconds a step, run it with `--steps 20` on a machine that does nothing else.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

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
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a text encoder")
    parser.add_argument("--data_dir", required=True, help="folder with train.tsv and dev.tsv")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        for row in args.rows:
            path = args.output / f"{row}-seed{seed}.json"
            if not path.exists():
                path.write_text(json.dumps(run(args, row, seed), indent=2) + "\n")
    print(table(args.output))


def run(args: argparse.Namespace, row: str, seed: int) -> dict:
    name, settings = ROWS[row]
    flags = ["--defense", name, "--defense_kwargs", json.dumps(settings), "--seed", str(seed)]
    flags += ["--max_steps", str(args.steps), "--learning_rate", "5e-5", "--warmup_steps", "0.1"]
    flags += [
        "--per_device_train_batch_size",
        "16",
        "--num_ranks",
        "2",
        "--use_cpu",
        "--logging_steps",
        str(min(50, args.steps)),
    ]
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--num_cpu_threads_per_process", "1"]
    with tempfile.TemporaryDirectory() as folder:
        paths = ["--model_name_or_path", args.model, "--data_dir", args.data_dir, "--output_dir", folder]
        subprocess.run([sys.executable, *launch, "recipes/sst2.py", *flags, *paths], check=True)
        report = json.loads(Path(folder, "metrics.json").read_text())
    shown = " ".join(f"'{flag}'" if "{" in flag else flag for flag in flags)
    places = "--model_name_or_path $MODEL --data_dir $SST2"
    report["command"] = f"accelerate launch {' '.join(launch[2:])} recipes/sst2.py {shown} {places}"
    return report


def table(folder: Path) -> str:
    lines = [
        "| defence | settings | accuracy on dev | range over seeds | relative error | cosine | s/step | defence s/message |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        runs = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{row}-seed*.json"))]
        if not runs:
            continue
        shown = {
            k: v
            for k, v in ROWS[row][1].items()
            if k in ("relative_scale", "ratio", "utility", "learning_rate", "iterations")
        }
        accuracy = statistics.mean(run["accuracy"] for run in runs)
        n = sum(run["eval_sentences"] for run in runs) / len(runs)
        cells = [
            ROWS[row][0],
            ", ".join(f"{k}={v}" for k, v in shown.items()) or "-",
            f"{accuracy:.3f} ± {1.96 * math.sqrt(accuracy * (1 - accuracy) / n):.3f}",
            f"{min(r['accuracy'] for r in runs):.3f} to {max(r['accuracy'] for r in runs):.3f} ({len(runs)})",
            *(
                _mean([r[key] for r in runs])
                for key in ("defense/relative_error", "defense/cosine", "seconds_per_step", "defense/seconds")
            ),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _mean(values: list) -> str:
    return "-" if None in values else f"{statistics.mean(values):.3f}"


if __name__ == "__main__":
    main()
