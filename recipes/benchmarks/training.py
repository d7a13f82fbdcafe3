"""Tokens a second of a training as `recipes/sst2.py` runs it: with the stock Trainer, with DP-SGD
by Opacus, which takes every phrase's own gradient, and with each defense.

All train the same model on the same phrases, 16 at a time, AdamW included; rows take turns, the
stock Trainer around each. Tokens without padding, over seconds of one thread's processor time,
after 8 steps in which models are tried out and all messages compared with their gradients; one of
the ten that count feeds averages. Opacus takes no positions that rows share, so there embeddings
are frozen. Soteria is left out, which takes a pass for each of a layer's neurons, and so is
Refiner, which goes on from a sketch: `refiner_speed` has the published one.

Opacus is no dependency: `pip install --no-deps opacus opt-einsum` into an environment of your own;
`--without_opacus` leaves its row out.
"""

import argparse
import importlib.util
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence

import torch
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from hf_gradguard import GradGuardConfig, GradGuardTrainer
from recipes.studies.lib.device import DEVICE
from recipes.studies.lib.text import sst2

from .measuring import RATIO, cells, row_title, seconds_now, spread

ARGUMENTS: dict[str, dict] = {
    "data_dir": {"help": "folder of train.tsv"},
    "without_opacus": {"action": "store_true", "help": "leave its row out"},
    "rows": {"nargs": "+", "metavar": "ROW", "help": "defenses' rows; default: all"},
}
BATCH, LENGTH, WARMUP, STEPS, ROUNDS = 16, 64, 8, 10, 2
STOCK, OPACUS = "stock Trainer", "Opacus, DP-SGD"
PRIVATE = {"per_sample": True, "clip": 1.0, "noise_multiplier": 1.0}
DEFENSES: list[tuple[str, dict]] = [
    ("none", {}),
    ("gaussian_noise", {}),
    ("laplace_noise", {}),
    ("optimal_noise", {}),
    ("dp_sgd", {}),
    ("dp_sgd", PRIVATE),
    ("pruning", {"ratio": 0.9}),
    ("optimal_pruning", {"ratio": 0.9}),
    ("quantization", {"bits": 4}),
    ("gradient_sketch", {}),
]

Run = Callable[[], float]  # tokens a second


class Clock(TrainerCallback):
    """When each step ended, and how many tokens each batch had."""

    def __init__(self, collate: Callable) -> None:
        self.collate, self.ends, self.tokens = collate, list[float](), list[int]()

    def __call__(self, rows: list) -> dict:
        batch = self.collate(rows)
        self.tokens.append(int(batch["attention_mask"].sum()))
        return batch

    def on_step_end(self, *_args, **_kwargs) -> None:
        self.ends.append(seconds_now())

    def rate(self, warmup: int) -> float:
        """Of the steps after the first ones."""
        count = len(self.ends)
        return sum(self.tokens[warmup:count]) / (self.ends[-1] - self.ends[warmup - 1])


def measure(args: argparse.Namespace) -> dict:
    if args.data_dir is None:
        sys.exit("Give --data_dir, a folder of train.tsv.")
    if not args.without_opacus and importlib.util.find_spec("opacus") is None:
        sys.exit(
            "Opacus is not installed, and a row is its own: pip install --no-deps opacus "
            "opt-einsum, into an environment of your own, or leave it out with --without_opacus."
        )
    torch.set_num_threads(1)
    warmup, steps, rounds = (1, 2, 1) if args.quick else (WARMUP, STEPS, ROUNDS)
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    rows = sst2(args.data_dir, "train").take(4 * BATCH if args.quick else 4096)
    rows = rows.map(
        lambda row: tokenizer(row["sentence"], truncation=True, max_length=LENGTH),
        remove_columns=["sentence"],
    )

    def clock() -> Clock:
        return Clock(DataCollatorWithPadding(tokenizer))

    def stock() -> float:
        return trained(Trainer, TrainingArguments, args.model, rows, clock(), warmup, steps, {})

    def protected(name: str, settings: dict) -> Run:
        settings_of_defense = {"defense": name, "defense_kwargs": settings}
        kinds = GradGuardTrainer, GradGuardConfig
        return lambda: trained(
            *kinds, args.model, rows, clock(), warmup, steps, settings_of_defense
        )

    runs: dict[str, Run] = {
        row_title(name, settings): protected(name, settings)
        for name, settings in (DEFENSES[:2] if args.quick else DEFENSES)
        if args.rows is None or row_title(name, settings) in args.rows
    }
    if not args.without_opacus:
        runs = {OPACUS: lambda: by_opacus(args.model, rows, clock(), warmup, steps)} | runs
    rates: dict[str, list[float]] = {name: [] for name in runs}
    shares: dict[str, list[float]] = {name: [] for name in runs}
    plain = [stock()]
    for _ in range(rounds):
        for name, run in runs.items():
            rates[name].append(run())
            plain.append(stock())
            shares[name].append((plain[-2] + plain[-1]) / 2 / rates[name][-1])
            print(f"{name}: {shares[name][-1]:.2f} stock steps", flush=True)
    return {
        "threads": 1,
        "batch": BATCH,
        "tokens a second": {
            name: round(statistics.median(values), 1)
            for name, values in ({STOCK: plain} | rates).items()
        },
        "in stock steps": {name: spread(values) for name, values in shares.items()},
    }


def model_of(name: str) -> nn.Module:
    set_seed(0)
    return AutoModelForSequenceClassification.from_pretrained(
        name, num_labels=2, trust_remote_code=False
    ).to(DEVICE)


def trained(
    kind: type,
    config: type,
    name: str,
    rows: Dataset,
    clock: Clock,
    warmup: int,
    steps: int,
    defense: dict,
) -> float:
    """By a Trainer, with the recipe's settings."""
    with tempfile.TemporaryDirectory() as folder:
        settings = config(
            output_dir=folder, per_device_train_batch_size=BATCH, learning_rate=2e-5,
            max_steps=warmup + steps, save_strategy="no", report_to=[], disable_tqdm=True,
            use_cpu=DEVICE == "cpu", **defense,
        )  # fmt: skip
        trainer = kind(
            model=model_of(name), args=settings, train_dataset=rows, data_collator=clock,
            callbacks=[clock],
        )  # fmt: skip
        trainer.train()
    return clock.rate(warmup)


def by_opacus(name: str, rows: Dataset, clock: Clock, warmup: int, steps: int) -> float:
    """Gradients of every phrase, clipped to 1, noise of multiplier 1."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    model = model_of(name)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_("embeddings" not in parameter_name)
    sampled = GradSampleModule(model.train(), loss_reduction="mean")
    optimizer = DPOptimizer(
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-5),
        noise_multiplier=PRIVATE["noise_multiplier"], max_grad_norm=PRIVATE["clip"],
        expected_batch_size=BATCH,
    )  # fmt: skip
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(
        rows, BATCH, shuffle=True, generator=order, collate_fn=clock, drop_last=True
    )
    for _, batch in zip(range(warmup + steps), loader, strict=False):
        batch = batch.to(DEVICE)
        labels = batch.pop("labels")
        nn.functional.cross_entropy(sampled(**batch).logits, labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.on_step_end()
    return clock.rate(warmup)


def table(report: dict) -> tuple[Sequence[str], list]:
    rates = report["tokens a second"]
    rows = [[STOCK, f"{rates[STOCK]:.0f}", "1", ""]]
    for name, ratio in report["in stock steps"].items():
        rows.append([name, f"{rates[name]:.0f}", *cells(ratio)])
    return ["", "tokens a second", f"time of a token over stock's, {RATIO[0]}", RATIO[1]], rows
