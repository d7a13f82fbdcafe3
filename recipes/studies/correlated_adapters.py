"""What a whole model and adapters learn on SST-2 behind the correlated noise that heads and bodies
have: the same messages of 16, the same bound.
"""

from typing import Any

from peft import LoraConfig, TaskType, get_peft_model
from torch import nn

from hf_gradguard import GradGuardConfig, GradGuardTrainer
from hf_gradguard.leakage import gaussian_epsilon

from ..study import Study
from . import frontier_clients as clients
from . import frontier_tables as tables
from .frontier_rows import BATCH, DELTA, RATES_SEED
from .lib.results import Results
from .lib.tables import write_table

GRID = tuple(0.00625 * 2**power for power in range(10))
LORA, WHOLE = "LoRA of rank 8, and a head", "the whole model"
STRENGTH = {"per_sample": True, "correlated": True, "clip": 1.0, "noise_multiplier": 1.5}
MESSAGES = {LORA: 1590, WHOLE: 200}


class AdaptersTask(clients.TextTask):
    """Trainings by SGD, whose weights add messages up as the proof assumes."""

    def train(self, cell: dict, keep: bool = False) -> nn.Module:
        model = self.start(cell["seed"])
        if cell["way"] == LORA:
            lora = LoraConfig(
                task_type=TaskType.SEQ_CLS, r=8, lora_alpha=16, target_modules=["query", "value"]
            )
            model = get_peft_model(model, lora)
        trainer = self.trainer(model, self.rows_to_learn(), cell)
        trainer.train()
        return trainer.model

    def learned(self, cell: dict) -> dict:
        metrics = super().learned(cell)
        if "epsilon" in metrics:  # a sentence is in one message, known to the attacker
            metrics["epsilon"] = gaussian_epsilon(cell["strength"]["noise_multiplier"], DELTA)
        return metrics

    def trainer(self, model: nn.Module, rows: Any, cell: dict) -> GradGuardTrainer:
        args = GradGuardConfig(
            self._scratch.name, defense=cell["defense"], defense_kwargs=cell["strength"],
            learning_rate=cell["learning_rate"], max_steps=cell["steps"], optim="sgd",
            lr_scheduler_type="linear", max_grad_norm=0.0, seed=cell["seed"],
            per_device_train_batch_size=cell["batch"], noise_seed=cell["seed"],
            save_strategy="no", logging_steps=cell["steps"], report_to="none", disable_tqdm=True,
        )  # fmt: skip
        return GradGuardTrainer(
            model, args, train_dataset=rows, processing_class=self.processing_class
        )


class CorrelatedAdapters(Study):
    """Accuracy on SST-2 of an encoder whose weights, or adapters, are trained behind correlated
    noise.

    Conditions and figures: docs/findings/correlated_heads.md.
    """

    ARGUMENTS: dict[str, Any] = clients.TEXT_FLAGS

    def cells(self) -> dict:
        """Rates first, then what takes the best of them."""
        cells: dict = {}
        for way, messages in list(MESSAGES.items())[: 1 if self.quick else None]:
            steps = 2 if self.quick else messages
            place = f"{way}, {steps:,} messages"
            common = {
                "way": way, "defense": "dp_sgd", "strength": STRENGTH, "steps": steps,
                "batch": BATCH,
            }  # fmt: skip
            of_rates, rates = common | {"seed": RATES_SEED}, GRID[:1]
            if not self.quick:
                rates = clients.rates_so_far(Results(self.output), of_rates, GRID[3:6], GRID)
            search = clients.cells_by_rate(of_rates, rates)
            cells |= {(place, tables.RATES, tried): cell for tried, cell in search.items()}
            rate = GRID[0]
            if not self.quick:
                rate = clients.chosen_rate(Results(self.output), search)
            if rate is not None:
                chosen = common | {"learning_rate": rate, "seed": 0}
                cells[place, tables.ACCURACY, "0"] = chosen
        return cells

    def load(self) -> None:
        self.task = AdaptersTask(self.args.model, self.args.data_dir)

    def measure(self, cell: dict) -> dict:
        return self.task.trained(cell)

    def report(self, metrics: dict) -> None:
        tried, rows = tables.pop_rates(metrics), []
        for place, cells in metrics.items():
            runs = cells.get(tables.ACCURACY, {})
            rows.append([place, tried[place], tables.accuracy_text(runs)])
        write_table(self.output, ["", "rates (held out)", "accuracy"], rows)
