r"""What pruning, Gaussian noise and Refiner hide of a model that is fine-tuned already, and what
they cost it: Refiner paper (2025), Table 13, at its operating point.

    python -m recipes.studies.refiner.run fine_tuned --model MODEL --data_dir SST2 --models FOLDER \
        --output docs/results/refiner_fine_tuned

The encoder is fine-tuned on one half of SST-2, 1,000 messages of 32 phrases without a defense. From
there one client goes on with phrases of the other half, 100 messages of 16 at the Trainer's 5e-5,
under each of the paper's settings (`--all`: three seeds, and all attacks). Accuracy is of 2,693
sentences, compared with the undefended run of the same seed, sentence by sentence. Attacked is the
fine-tuned model as in the part text: the first 10 sentences of the dev set that have 14 tokens, one
per message, labels, lengths and the defense known, 500 evaluations; and by span. Token F1 (in
brackets that with the other sentences), and by how much more is read than behind Refiner, sentence
by sentence. FOLDER keeps what was trained. Refiner takes half an hour a training, a cell of the
slower attacks ten minutes.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from hf_gradguard import GradGuardTrainer, GradientMap, make_defense
from hf_gradguard.gradient_map import Tensors

from ..frontier.attackers import OWN, attacked
from ..frontier.client import Stage
from ..frontier.settings import QUICK
from ..frontier.shown import ACCURACY, asked, lost, read
from ..frontier.training import TEXTS, Task
from ..lib.defenses import as_published
from ..lib.intervals import student
from ..lib.results import chosen
from ..lib.tables import interval, write_table
from ..lib.text import NETWORK, batches_of_one, sst2
from .settings import (
    FINE_TUNED,
    FINE_TUNED_SEEDS,
    FINE_TUNED_SIZES,
    PAPER_TEXT,
    QUICK_STEPS,
    TEXT,
    TEXT_ATTACKS,
)
from .text import LENGTH, QUICK_SAMPLES, SAMPLES

ARGUMENTS = TEXTS | {
    "--evaluation_network": NETWORK,
    "--models": "folder that keeps what was trained",
    "--all": {"action": "store_true", "help": "three seeds, and the slower attacks"},
}
ROWS = [row for row in TEXT if row == "none" or row.startswith("paper: ")]
SIZE, START, REFINER = "gradient", "as it starts", "paper: refiner"
SPAN = "span"
ATTACKS: dict[str, dict] = {
    SPAN: {},
    "tag": TEXT_ATTACKS["tag"],
    "inverting_gradients_published": TEXT_ATTACKS["inverting_gradients"],
}


def cells(args) -> dict:
    """The fine-tuned model first, then what is read of it, then trainings that go on from it."""
    first = _first(args)
    sizes = FINE_TUNED_SIZES | (QUICK if args.quick else {})
    samples, fast = (QUICK_SAMPLES, QUICK_STEPS) if args.quick else (SAMPLES, {})
    found: dict = {(START, ACCURACY, "0"): first, (START, SIZE, "0"): first | {SIZE: samples}}
    published = {
        row: {"defense": name, "strength": as_published(name, how), "start": first}
        for row, (name, how) in TEXT.items()
        if row in ROWS
    }
    for attack, settings in ATTACKS.items():
        own = asked((attack, 1), samples, settings | (fast if settings else {}), "start")
        found |= {(row, attack, "0"): one | {"seed": 0} | own for row, one in published.items()}
    for seed in range(1 if args.quick else FINE_TUNED_SEEDS):
        trained = {row: one | {"seed": seed} | sizes for row, one in published.items()}
        found |= {(row, ACCURACY, str(seed)): cell for row, cell in trained.items()}
    if args.quick:
        return found
    return chosen(found, lambda cell: cell["seed"] == 0 and cell.get("attack", SPAN) == SPAN, args)


def _first(args) -> dict:
    """The training that others go on from."""
    return FINE_TUNED | (QUICK if args.quick else {})


def prepare(args):
    half = Half(args.model, args.data_dir, Path(args.models, "fine_tuned"))
    task = FineTuned(half, _first(args), args.evaluation_network)

    def long(row: dict) -> bool:
        return len(task.tokenizer(row["sentence"])["input_ids"]) == LENGTH

    texts = list(filter(long, sst2(args.data_dir)))

    def measure(cell: dict) -> dict:
        if SIZE in cell:
            model = task.start(cell["seed"]).eval()
            batches = batches_of_one(task.tokenizer, texts[: cell[SIZE]])
            return size([GradientMap(model, batch).gradient() for batch in batches])
        if "attack" in cell:
            model = task.start(cell["seed"]).eval()
            defense = make_defense(cell["defense"], **task.strength(cell))
            defense.prepare(model, task.tokenizer)
            return attacked(cell, Stage(model, defense), task.tokenizer, texts)
        return (task if "start" in cell else half).learned(cell)

    return measure


def size(gradients: list[Tensors]) -> dict:
    """‖g‖ of each, and of how many entries."""
    every = [torch.cat([part.flatten() for part in g.values()]) for g in gradients]
    return {"norm": [round(float(g.norm()), 5) for g in every], "entries": len(every[0])}


class Half(Task):
    """Learns one half of the phrases."""

    def rows_to_learn(self) -> Dataset:
        rows = super().rows_to_learn()
        return rows.select(range(len(rows) // 2))


class FineTuned(Task):
    """Starts from what learned one half, and learns the other."""

    def __init__(self, half: Half, first: dict, network: str) -> None:
        super().__init__(half.name, half._data_dir, half.folder)
        self._half, self._first, self._network = half, first, network

    def start(self, seed: int) -> torch.nn.Module:
        model = self._half.stage(self._first, "end").model
        torch.manual_seed(seed)
        return model

    def rows_to_learn(self) -> Dataset:
        rows = super().rows_to_learn()
        return rows.select(range(len(rows) // 2, len(rows)))

    def strength(self, cell: dict) -> dict:
        """With the evaluation network."""
        own = {"evaluation_network": self._network} if cell["defense"] == "refiner" else {}
        return cell["strength"] | own

    def trainer(self, model: torch.nn.Module, rows: Any, cell: dict) -> GradGuardTrainer:
        return super().trainer(model, rows, cell | {"strength": self.strength(cell)})


def report(figures: dict, args) -> None:
    plain, table = figures["none"].get(ACCURACY, {}), []
    for row, found in figures.items():
        runs = found.get(ACCURACY, {})
        shown = [row, interval([run["accuracy"] for run in runs.values()]) if runs else ""]
        shown.append(lost(runs, plain) if row != START else "")
        for attack in ATTACKS:
            shown.append(read(found.get(attack, {})))
            pair = [figures.get(one, {}).get(attack, {}).get("0") for one in (row, REFINER)]
            more = all(pair) and row != REFINER
            mine, theirs = (one[OWN] for one in pair) if more else ([], [])
            shown.append(student(np.subtract(mine, theirs).tolist()).said(2) if more else "")
        table.append([*shown, PAPER_TEXT.get(row, "")])
    header = ["", "accuracy", "less than none"]
    for attack in ATTACKS:
        header += [attack, "more than behind Refiner"]
    write_table(args.output, [*header, "paper: accuracy, F1 (TAG); accuracy, F1 (IG)"], table)
