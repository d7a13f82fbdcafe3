"""What each defense leaves to the span attack on text, and what it costs in accuracy on SST-2."""

import json
import math
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2ForSequenceClassification, set_seed

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation
from hf_gradguard.attacks.span.span import Span
from hf_gradguard.metrics.scores import match
from hf_gradguard.randomness import Stream

from ..study import Study
from .lib.defenses import as_published, published
from .lib.results import PUBLISHED, Results, named, nested
from .lib.tables import plt, save, write_table
from .lib.text import (
    NETWORK,
    TEXT_FLAGS,
    batch_of,
    load_classifier,
    load_tokenizer,
    of_usual_length,
    sst2,
)

# What noise is a share of, and how large
MATRIX_RMS, GRADIENT_RMS = "each matrix's own RMS", "the whole gradient's RMS"
NOISE = [0.0, 0.015, 0.05, 0.15, 0.5, 1.5]
STRENGTHS = {
    "gaussian_noise": ("relative_scale", [0.01, 0.1, 1.0]),
    "optimal_noise": ("relative_scale", [0.01, 0.1, 1.0]),
    "pruning": ("ratio", [0.5, 0.9, 0.99]),
    "optimal_pruning": ("ratio", [0.5, 0.9, 0.99]),
    "refiner": ("iterations", [1, 10, 30]),
}
DEFENSES = {
    f"{name} {key}={v}": {"defense": [name, {key: v}]}
    for name, (key, values) in STRENGTHS.items()
    for v in values
}
SINGLE = {
    "model": "MiniLM", "size": 1, "batches": 10, "noise": None, "defense": ["none", {}],
    "attack": {},
}  # fmt: skip
SPAN = {
    "MiniLM, batch 1": SINGLE | {"batches": 20},
    "MiniLM, batch 2": SINGLE | {"size": 2, "batches": 5},
    "MiniLM, batch 4": SINGLE | {"size": 4, "batches": 5},
    "MiniLM, batch 8": SINGLE | {"size": 8, "batches": 5},
    "MiniLM, batch 16": SINGLE | {"size": 16, "batches": 3},
    "GPT-2 of 2 layers, batch 4": SINGLE | {"model": "GPT-2", "size": 4, "batches": 5},
    **{
        f"{v:.1%} of {unit}": SINGLE | {"noise": [v, unit]}
        for v in NOISE
        for unit in (MATRIX_RMS, GRADIENT_RMS)
    },
    **{
        f"{v:.1%} of {MATRIX_RMS}, threshold 0.01": SINGLE
        | {"noise": [v, MATRIX_RMS], "attack": {"threshold": 0.01}}
        for v in NOISE
    },
    **{label: SINGLE | row for label, row in DEFENSES.items()},
    **{
        f"{label}, completed": SINGLE | row | {"attack": {"complete": True}}
        for label, row in DEFENSES.items()
        if "pruning" in label
    },
}
QUICK_SPAN = (
    "MiniLM, batch 1", "MiniLM, batch 2", "GPT-2 of 2 layers, batch 4",
    *(f"{v} of {unit}" for v in ("0.0%", "150.0%") for unit in (MATRIX_RMS, GRADIENT_RMS)),
    f"1.5% of {MATRIX_RMS}, threshold 0.01", "gaussian_noise relative_scale=0.1",
    "optimal_noise relative_scale=0.1", "pruning ratio=0.99", "pruning ratio=0.9",
    "pruning ratio=0.9, completed", "optimal_pruning ratio=0.5, completed", "refiner iterations=1",
)  # fmt: skip


class SpanAttack(Study):
    """What the span attack recovers from MiniLM's and GPT-2's gradients: undefended, under noise,
    and behind defenses.

    Conditions and figures: docs/findings/attacks_text.md.
    """

    ARGUMENTS = TEXT_FLAGS | {"--evaluation_network": NETWORK}

    def cells(self) -> dict:
        if self.quick:
            return {(name,): SPAN[name] | {"batches": 1} for name in QUICK_SPAN}
        return {(name,): row for name, row in SPAN.items()}

    def load(self) -> None:
        set_seed(0)
        self.tokenizer = load_tokenizer(self.args.model)
        bert = load_classifier(self.args.model, num_labels=2)
        sizes = {"n_layer": 2, "n_embd": 96 if self.quick else 768}
        config = GPT2Config(
            **sizes, vocab_size=len(self.tokenizer), pad_token_id=self.tokenizer.pad_token_id,
            num_labels=2,
        )  # fmt: skip
        self.models = {"MiniLM": bert, "GPT-2": GPT2ForSequenceClassification(config).eval()}
        self.texts = of_usual_length(sst2(self.args.data_dir))

    def measure(self, cell: dict) -> dict:
        """Sums over batches, the slowest batch's seconds, and the share found with a bootstrap
        interval over batches.
        """
        kind, strength = cell["defense"]
        defense = published(kind, self.args.evaluation_network, **strength)
        model = self.models[cell["model"]]
        if kind == "refiner":
            defense.prepare(model, self.tokenizer)
        scores, seconds, size = [], [], cell["size"]
        for index in range(cell["batches"]):
            texts = self.texts[index * size : (index + 1) * size]
            batch = batch_of(self.tokenizer, texts)
            batch.pop("token_type_ids", None)
            gmap, generator = GradientMap(model, batch), Stream.from_seeds(index)
            if cell["noise"]:
                shared = noisy(gmap.gradient(), *cell["noise"], generator)
            else:
                shared = defense(gmap, generator)
            observation = Observation(
                model, shared, tuple(batch["input_ids"].shape), tokenizer=self.tokenizer,
                attention_mask=batch["attention_mask"],
            )  # fmt: skip
            start = time.perf_counter()
            token_ids = span_token_ids(observation, cell["attack"])
            seconds.append(math.ceil(10 * (time.perf_counter() - start)) / 10)
            scores.append(score(token_ids, batch))
        total, share = total_and_share(scores)
        share, low, high = (round(value, 4) for value in share)
        return total | {"seconds": max(seconds), "interval": [low, high], "share": share}

    def report(self, metrics: dict) -> None:
        write_span_tables(self.output, metrics)


def span_token_ids(observation: Observation, settings: dict) -> list[list[int]]:
    """Only those that an attacker knows beforehand where pruning left nothing to attack."""
    try:
        return Span(**settings)(observation).token_ids
    except ValueError as error:
        if "nothing to search" not in str(error):
            raise
        pairs = zip(observation.known_ids(), observation.tokens, strict=True)
        return [ids[present].tolist() for ids, present in pairs]


def noisy(gradient: dict, level: float, unit: str, generator: Stream) -> dict[str, torch.Tensor]:
    gradient_rms = torch.cat([g.flatten() for g in gradient.values()]).square().mean().sqrt()
    scale = {
        name: level * (g.square().mean().sqrt() if unit == MATRIX_RMS else gradient_rms)
        for name, g in gradient.items()
    }
    return {name: g + scale[name] * generator.normal(g.shape) for name, g in gradient.items()}


def score(recovered: list[list[int]], batch: dict) -> dict[str, int]:
    """Distinct tokens found at their position, and tokens in their sentence and position."""
    pairs = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    truth = [ids[mask.bool()].tolist() for ids, mask in pairs]
    places = [{text[t] for text in truth if len(text) > t} for t in range(max(map(len, truth)))]
    hits = [
        len(place & {ids[t] for ids in recovered if len(ids) > t}) for t, place in enumerate(places)
    ]
    same = [
        [sum(a == b for a, b in zip(ids, text, strict=False)) for text in truth]
        for ids in recovered
    ]
    order = match(np.array(same))
    return {
        "hits": sum(hits), "distinct": sum(map(len, places)),
        "together": sum(same[i][j] for i, j in enumerate(order)), "tokens": sum(map(len, truth)),
        "exact": sum(recovered[i] == truth[j] for i, j in enumerate(order)), "texts": len(truth),
    }  # fmt: skip


def total_and_share(scores: Sequence[dict[str, int]]) -> tuple[dict[str, int], list[float]]:
    """Sums of scores, and the share of tokens found with its 95 % bootstrap interval."""
    total = {key: sum(batch[key] for batch in scores) for key in scores[0]}
    draws = random.Random(0)
    samples = [draws.choices(scores, k=len(scores)) for _ in range(1000)]
    shares = sorted(sum(b["hits"] for b in s) / sum(b["distinct"] for b in s) for s in samples)
    return total, [total["hits"] / total["distinct"], shares[25], shares[974]]


def write_span_tables(output: Path, metrics: dict) -> None:
    """OUTPUT.md, OUTPUT_noise.md and OUTPUT_defenses.md; a dash where a row is missing."""

    def share(row: str) -> str:
        if row not in metrics:
            return "–"
        low, high = metrics[row]["interval"]
        return f"{100 * metrics[row]['share']:.0f} % [{100 * low:.0f}, {100 * high:.0f}]"

    def exact(row: str) -> str:
        return f"{metrics[row]['exact']} of {metrics[row]['texts']}" if row in metrics else "–"

    rows: list = []
    for row, cell in metrics.items():
        if "batch" in row:
            sentence = f"{100 * cell['together'] / cell['tokens']:.0f} % of {cell['tokens']}"
            distinct = f"{share(row)} of {cell['distinct']}"
            rows.append((row, distinct, sentence, exact(row), cell["seconds"]))
    header = ["undefended", "distinct tokens found", "tokens in their sentence",
              "sentences exact", "seconds, slowest batch"]  # fmt: skip
    write_table(output, header, rows)
    columns = [f"of {MATRIX_RMS}", f"of {MATRIX_RMS}, threshold 0.01", f"of {GRADIENT_RMS}"]
    rows = [
        (f"{100 * level:g} %", *(share(f"{level:.1%} {column}") for column in columns))
        for level in NOISE
    ]
    header = ["noise", f"share {columns[0]}", "the same, fixed threshold 0.01"]
    write_table(named(output, "_noise"), [*header, f"share {columns[2]}"], rows)
    rows = []
    for row in DEFENSES:
        name, strength = row.split()
        completed = share(f"{row}, completed") if "pruning" in name else ""
        rows.append((f"`{name}`", f"`{strength}`", share(row), exact(row), completed))
    header = ["defense", "strength", "tokens found", "sentences exact",
              "tokens found, pruned entries filled in"]  # fmt: skip
    write_table(named(output, "_defenses"), header, rows)


OPTIMAL = {"num_probes": 10, "refresh_every": 10}
NETWORK_SETTING = {"evaluation_network": "text-evaluation-network-minilm-l6"}
ACCURACY: dict[str, tuple[str, dict]] = {
    "none": ("none", {}),
    "gaussian_noise-1": ("gaussian_noise", {"relative_scale": 1.0}),
    "optimal_noise-1": ("optimal_noise", {"relative_scale": 1.0, **OPTIMAL}),
    "gaussian_noise-5": ("gaussian_noise", {"relative_scale": 5.0}),
    "optimal_noise-5": ("optimal_noise", {"relative_scale": 5.0, **OPTIMAL}),
    "pruning-0.9": ("pruning", {"ratio": 0.9}),
    "optimal_pruning-0.9": ("optimal_pruning", {"ratio": 0.9, **OPTIMAL}),
    "pruning-0.99": ("pruning", {"ratio": 0.99}),
    "optimal_pruning-0.99": ("optimal_pruning", {"ratio": 0.99, **OPTIMAL}),
    "refiner": ("refiner", NETWORK_SETTING),
    "refiner-slow": ("refiner", {"learning_rate": 0.001, "iterations": 4, **NETWORK_SETTING}),
    "paper: pruning": ("pruning", {"ratio": 0.2}),  # Refiner paper, Table 13
    "paper: gaussian_noise": ("gaussian_noise", {"scale": 0.001}),
}
UNTIMED = ("refiner", "refiner-slow", "paper: pruning", "paper: gaussian_noise")
QUICK = ("none", "pruning-0.9")
STEPS = {"accuracy": 300, "seconds": 20, "quick": 2}
RECIPE = Path(__file__).resolve().parents[1] / "sst2.py"
LAUNCH = shlex.split(
    "accelerate launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no "
    "--dynamo_backend no --num_cpu_threads_per_process 1"
)
FLAGS = shlex.split(
    "--learning_rate 5e-5 --warmup_steps 0.1 --per_device_train_batch_size 16 --num_ranks 2 "
    "--use_cpu"
)
UNDEFENDED = {"defense/relative_error": 0.0, "defense/cosine": 1.0}  # metrics of no defense


def accuracy_cells(kind: str) -> dict:
    """The cells of `accuracy`, `seconds` or `quick` runs."""
    omitted = {"accuracy": (), "seconds": UNTIMED, "quick": set(ACCURACY) - set(QUICK)}[kind]
    return {
        (row,): {"defense": name, "settings": settings, "steps": STEPS[kind], "seed": 0}
        for row, (name, settings) in ACCURACY.items()
        if row not in omitted
    }


class Accuracy(Study):
    """Accuracy of each defense on SST-2, two ranks, matched strength.

    Runs recipes/sst2.py once per row and keeps each run's metrics.
    """

    ARGUMENTS = TEXT_FLAGS
    KIND = "accuracy"

    def cells(self) -> dict:
        return accuracy_cells("quick" if self.quick else self.KIND)

    def measure(self, cell: dict) -> dict:
        settings = json.dumps(as_published(cell["defense"], cell["settings"]))
        steps = cell["steps"]
        flags = ["--defense", cell["defense"], "--defense_kwargs", settings]
        flags += ["--seed", str(cell["seed"]), "--max_steps", str(steps), *FLAGS]
        flags += ["--logging_steps", str(min(50, steps))]
        run = [sys.executable, "-m", "accelerate.commands.launch", *LAUNCH[2:], str(RECIPE), *flags]
        data = ["--model", self.args.model, "--dataset", self.args.data_dir]
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([*run, *data, "--output_dir", folder], check=True)
            metrics = json.loads(Path(folder, "metrics.json").read_text(encoding="utf-8"))
        shown = shlex.join([*LAUNCH, "recipes/sst2.py", *flags])
        return metrics | {"command": f"{shown} --model $MODEL --dataset $SST2"}

    def report(self, metrics: dict) -> None:
        rows = []
        for row, run in metrics.items():
            name, settings = ACCURACY[row]
            shown = {key: v for key, v in settings.items() if key not in OPTIMAL | NETWORK_SETTING}
            strength = ", ".join(f"{key}={value}" for key, value in shown.items())
            strength = f"`{strength}`" if strength else "defaults" if settings else ""
            rows.append([f"`{name}`", strength, *self.columns(run, metrics["none"])])
        write_table(self.output, ["defense", "strength", *self.header], rows)

    header = ("accuracy on dev", "relative error", "cosine")

    def columns(self, run: dict, _plain: dict) -> list[str]:
        values = [none if run[key] is None else run[key] for key, none in UNDEFENDED.items()]
        accuracy = f"{run['accuracy']:.3f} ± {half_interval(run):.3f}"
        return [accuracy, *(f"{value:.2f}" for value in values)]


def half_interval(run: dict) -> float:
    """Of the 95 % binomial interval over the sentences."""
    accuracy = run["accuracy"]
    return 1.96 * math.sqrt(accuracy * (1 - accuracy) / run["eval_sentences"])


class Seconds(Accuracy):
    """What a step costs: 20 steps of each row of `sst2`, on a machine that does nothing else."""

    KIND, header = "seconds", ("s/step", "in plain steps")

    def columns(self, run: dict, plain: dict) -> list[str]:
        step = run["seconds_per_step"]
        return [f"{step:.2f}", f"{step / plain['seconds_per_step']:.2f}"]


# A row of SPAN, and the row of ACCURACY with the same defense at the same strength
PAIRS = {
    "MiniLM, batch 1": "none",
    "gaussian_noise relative_scale=1.0": "gaussian_noise-1",
    "optimal_noise relative_scale=1.0": "optimal_noise-1",
    "pruning ratio=0.9": "pruning-0.9",
    "pruning ratio=0.99": "pruning-0.99",
    "optimal_pruning ratio=0.9": "optimal_pruning-0.9",
    "optimal_pruning ratio=0.99": "optimal_pruning-0.99",
    "refiner iterations=10": "refiner",
}


class PrivacyAndUtility(Study):
    """One picture: what each defense leaves to the span attack, and what it costs in accuracy.

    Conditions and figures: docs/findings/attacks_text.md.
    """

    ARGUMENTS = {
        "--tokens": {"type": Path, "default": PUBLISHED / "span_attack"},
        "--accuracies": {"type": Path, "default": PUBLISHED / "sst2"},
    }

    def report(self, metrics: dict) -> None:
        span_cells = {(name,): row for name, row in SPAN.items()}
        tokens = nested(span_cells, Results(self.args.tokens))
        runs = nested(accuracy_cells("accuracy"), Results(self.args.accuracies))
        rows, (figure, axes) = [], plt.subplots(figsize=(7.5, 4.8), layout="constrained")
        pairs = [pair for pair in PAIRS.items() if pair[0] in tokens and pair[1] in runs]
        for number, (row, trained) in enumerate(pairs):
            # An attacker who knows of a pruning fills it in; take the better of both.
            cells_of_row = [tokens[name] for name in (row, f"{row}, completed") if name in tokens]
            best = max(cells_of_row, key=lambda cell: cell["share"])
            share, (low, high) = best["share"], best["interval"]
            accuracy, half = runs[trained]["accuracy"], half_interval(runs[trained])
            name = "none" if trained == "none" else row
            shown = f"{share:.0%} [{low:.0%}, {high:.0%}]"
            rows.append([f"`{name}`", shown, f"{accuracy:.3f} ± {half:.3f}"])
            error = [[100 * (share - low)], [100 * (high - share)]]
            style = {"color": f"C{number}", "label": name}
            axes.errorbar(100 * share, 100 * accuracy, 100 * half, error, "o", **style)
        header = ["defense", "tokens that span recovers from a sentence", "accuracy on SST-2"]
        write_table(self.output, header, rows)
        axes.set(
            xlabel="tokens that span recovers from a single sentence, in % (left: private)",
            ylabel="accuracy on SST-2 in % (up: useful)",
            xlim=(-3, 103),
        )
        axes.legend(fontsize=8)
        save(figure, self.output)
