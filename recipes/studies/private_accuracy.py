"""What does differential privacy cost, and is it what others compute?"""

import time
from collections.abc import Iterator

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig, TaskType, get_peft_model
from torch import nn
from transformers import DataCollatorWithPadding, get_linear_schedule_with_warmup, set_seed

from hf_gradguard.leakage import dp_sgd_epsilon

from ..study import Study
from .frontier_clients import TextTask
from .lib.results import Results, nested
from .lib.tables import interval, write_table
from .lib.text import TEXT_FLAGS
from .rate_search import best_rates

LENGTH, CLIP, DELTA = 16, 1.0, 1e-5
RATES, RATES_SEED, PLAIN_RATE, EPSILONS = (4e-3, 1e-2, 2.5e-2), 100, 2e-3, (8.0, 3.0)
OURS, OPACUS, PLAIN = "dp_sgd", "Opacus", "no privacy"


class Accuracy(Study):
    """Accuracy on SST-2 with (ε, δ)-differential privacy for every phrase, beside Opacus.

    Conditions and figures: docs/findings/dp.md.
    """

    ARGUMENTS = TEXT_FLAGS

    def cells(self) -> dict:
        """Rates first; the rest takes the best of them."""
        sizes = {"steps": 2, "batch": 4} if self.quick else {"steps": 100, "batch": 64}
        common = {**sizes, "length": LENGTH, "clip": CLIP, "delta": DELTA}

        def cell(trainer: str, epsilon: float | None, rate: float, seed: int) -> dict:
            return common | {
                "who": trainer,
                "epsilon": epsilon,
                "learning_rate": rate,
                "seed": seed,
            }

        rates = {
            ("rates", f"{rate:g}"): cell(OURS, EPSILONS[0], rate, RATES_SEED)
            for rate in RATES[: 1 if self.quick else None]
        }
        results, rate = Results(self.output), RATES[0]
        if not self.quick:
            if any(tried not in results for tried in rates.values()):
                return rates
            rate = best_rates(nested(rates, results))["rates"]
        private_rows = [(trainer, epsilon) for epsilon in EPSILONS for trainer in (OURS, OPACUS)]
        return rates | {
            (f"{trainer}, ε = {epsilon:g}" if epsilon else trainer, str(seed)): cell(
                trainer, epsilon, rate if epsilon else PLAIN_RATE, seed
            )
            for seed in range(1 if self.quick else 3)
            for trainer, epsilon in [
                (PLAIN, None),
                *(private_rows[:1] if self.quick else private_rows),
            ]
        }

    def load(self) -> None:
        self.task = TextTask(self.args.model, self.args.data_dir)
        rows = self.task.rows_to_learn()
        columns = [name for name in rows.column_names if name != "label"]
        self.rows = rows.map(lambda row: {name: row[name][:LENGTH] for name in columns})

    def measure(self, cell: dict) -> dict:
        lora = LoraConfig(
            task_type=TaskType.SEQ_CLS, r=8, lora_alpha=16, target_modules=["query", "value"]
        )
        model, task = get_peft_model(self.task.start(cell["seed"]), lora), self.task
        train = by_opacus if cell["who"] == OPACUS else by_trainer
        start = time.process_time()
        epsilon = train(cell, task, self.rows, model)
        seconds = time.process_time() - start
        accuracies = {
            name: round(float(task.right(model, rows).mean()), 4)
            for name, rows in (("accuracy", task.test_rows), ("held_out", task.held_out()))
        }
        return accuracies | {"epsilon": epsilon, "cpu_seconds": round(seconds, 1)}

    def report(self, metrics: dict) -> None:
        rates, rows = metrics.pop("rates"), []
        for row, runs in metrics.items():
            spent = [run["epsilon"] for run in runs.values() if run["epsilon"]]
            accuracy, seconds = (
                [run[name] for run in runs.values()] for name in ("accuracy", "cpu_seconds")
            )
            epsilon = f"{max(spent):.2f}" if spent else ""
            rows.append([row, interval(accuracy), epsilon, interval(seconds, 0)])
        write_table(self.output, ["", "accuracy", "ε spent", "processor seconds"], rows)
        tried = ", ".join(f"{rate}: {cell['held_out']:.3f}" for rate, cell in rates.items())
        chosen = best_rates({OURS: rates})[OURS]
        print(f"\nRates on held-out phrases: {tried}; chosen {chosen:g}.")


def by_trainer(cell: dict, task: TextTask, rows: Dataset, model: nn.Module) -> float | None:
    """ε as the Trainer counts it, of a run whose noise nobody could draw again."""
    private = {
        "per_sample": True, "clip": cell["clip"], "delta": cell["delta"],
        "target_epsilon": cell["epsilon"],
    }  # fmt: skip
    defense, strength = ("dp_sgd", private) if cell["epsilon"] else ("none", {})
    trainer = task.trainer(model, rows, cell | {"defense": defense, "strength": strength})
    trainer.train()
    rows = trainer.private_rows
    return None if rows is None else round(rows.account.epsilon(cell["delta"]), 3)


def by_opacus(cell: dict, task: TextTask, rows: Dataset, model: nn.Module) -> float:
    """Opacus' engine with the same steps; σ is its own accountant's."""
    from opacus import GradSampleModule
    from opacus.accountants.utils import get_noise_multiplier
    from opacus.optimizers import DPOptimizer

    set_seed(cell["seed"])
    chance, trained = cell["batch"] / len(rows), [p for p in model.parameters() if p.requires_grad]
    sigma = get_noise_multiplier(
        target_epsilon=cell["epsilon"], target_delta=cell["delta"], sample_rate=chance,
        steps=cell["steps"], accountant="prv",
    )  # fmt: skip
    sampled = GradSampleModule(model.train(), loss_reduction="mean")
    optimizer = DPOptimizer(
        torch.optim.AdamW(trained, lr=cell["learning_rate"], weight_decay=0.0),
        noise_multiplier=sigma, max_grad_norm=cell["clip"], expected_batch_size=cell["batch"],
    )  # fmt: skip
    schedule = get_linear_schedule_with_warmup(
        optimizer.original_optimizer, cell["steps"] // 10, cell["steps"]
    )
    for batch in poisson(rows, chance, cell, DataCollatorWithPadding(task.tokenizer)):
        labels = batch.pop("labels")
        nn.functional.cross_entropy(sampled(**batch).logits, labels).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    sampled.to_standard_module()
    return round(dp_sgd_epsilon(sigma, chance, cell["steps"], cell["delta"]), 3)


def poisson(rows: Dataset, chance: float, cell: dict, collate) -> Iterator[dict]:
    draws = np.random.default_rng(cell["seed"])
    for _ in range(cell["steps"]):
        chosen = np.flatnonzero(draws.random(len(rows)) < chance)
        yield dict(collate([rows[int(row)] for row in chosen]))
