r"""Refiner of 4 and 16 texts, and what each part of it gives: one is left out, or done otherwise.

    python -m recipes.studies.refiner.run parts --model MODEL --data_dir SST2 --models FOLDER \
        --output docs/results/refiner_parts

One client of 16 phrases of SST-2 a message, 200 steps of AdamW, MiniLM, one seed (`--all`: three,
and more rows). Each row has its own learning rate, of two: that of better accuracy on 500 held-out
phrases, by a seed that is not used again. Accuracy is of 2,693 sentences, compared with the
undefended run of the same seed sentence by sentence. Sums: the cosine of what was shared in a
training with the gradients there, each added up, one seed. At the end of its own training each is
attacked as on the frontier: span has 8 messages of one sentence, and a list three of 16. Who knows
all words of a sentence but the one in its middle has 300 for that place (first rows; five minutes
each). FOLDER keeps what was trained, 45 MB per stage. Three to six minutes of one core a training.
"""

from typing import Any

import torch
from torch.nn.functional import cosine_similarity

from hf_gradguard import GradGuardTrainer, GradientMap
from hf_gradguard.defenses import Defense, Message
from hf_gradguard.randomness import Stream

from ..frontier import rates
from ..frontier.attackers import attacked
from ..frontier.settings import (
    ATTACKS,
    BATCH,
    CANDIDATES,
    QUICK,
    QUICK_ATTACKS,
    QUICK_CANDIDATES,
    RATES_SEED,
    SPAN,
    WORD,
)
from ..frontier.shown import ACCURACY, asked, lost, read
from ..frontier.training import TEXTS, Task
from ..lib.results import Results, chosen
from ..lib.tables import interval, write_table
from ..lib.text import of_usual_length, sst2
from .federation import flat
from .settings import (
    FIRST_PARTS,
    OF_WORDS,
    PARTS,
    PARTS_SEEDS,
    QUICK_PARTS,
    QUICK_WORDS,
    WORDS,
)

ARGUMENTS = TEXTS | {
    "--models": "folder that keeps what was trained",
    "--all": {"action": "store_true", "help": "all rows, three seeds"},
}
RATES = "learning rate"


def cells(args) -> dict:
    """Rates first. Then every row's first seed, what is read of it, and further seeds. Without
    `--all` one seed of the first rows, and what is there.
    """
    results, found = Results(args.output), {}
    attacks = QUICK_ATTACKS | QUICK_WORDS if args.quick else ATTACKS | WORDS
    best = {}
    for row in QUICK_PARTS if args.quick else PARTS:
        defense, strength, tried, steps = PARTS[row]
        cell = {"defense": defense, "strength": strength, "batch": BATCH, "steps": steps}
        if args.quick:
            cell |= QUICK
        one_alone = args.quick or len(tried) == 1
        search = rates.by_rate(cell | {"seed": RATES_SEED}, () if one_alone else tried)
        found |= {(row, RATES, rate): one for rate, one in search.items()}
        rate = tried[0] if one_alone else rates.chosen(results, search)
        if rate is not None:
            best[row] = cell | {"learning_rate": rate}
    listed = QUICK_CANDIDATES if args.quick else CANDIDATES
    rows_of = {SPAN: list(PARTS), listed: list(PARTS), WORD: list(PARTS)[:OF_WORDS]}
    for seed in range(1 if args.quick else PARTS_SEEDS):
        trained = {row: cell | {"seed": seed} for row, cell in best.items()}
        found |= {(row, ACCURACY, str(seed)): cell for row, cell in trained.items()}
        for attack, rows in rows_of.items() if seed == 0 else ():
            (name, size), own = attack, asked(attack, *attacks[attack], "end")
            of = [row for row in trained if row in rows]
            found |= {(row, f"{name}, {size}", "0"): trained[row] | own for row in of}
    if args.quick:
        return found
    most_telling = list(PARTS)[:FIRST_PARTS]
    first = [
        cell
        for (row, *_), cell in found.items()
        if row in most_telling and cell["seed"] in (0, RATES_SEED)
    ]
    return chosen(found, lambda cell: cell in first, args)


def prepare(args):
    task = SummedTask(args.model, args.data_dir, args.models)
    texts = of_usual_length(sst2(args.data_dir))

    def measure(cell: dict) -> dict:
        if "attack" in cell:
            return attacked(cell, task.stage(cell, cell["stage"]), task.tokenizer, texts)
        if cell["seed"] == RATES_SEED:
            return task.on_held_out(cell)
        found = task.learned(cell)
        return found if cell["seed"] else found | {"cosine_of_sums": round(task.sums.cosine, 4)}

    return measure


class Sums:
    """What one client shared in a training, and its gradients, each added up."""

    def __init__(self) -> None:
        self.shared, self.gradient = torch.zeros(()), torch.zeros(())

    def watch(self, defense: Defense) -> None:
        protect = defense.protect

        def noted(gmap: GradientMap, generator: Stream) -> Message:
            message = protect(gmap, generator)
            self.shared = self.shared + flat(message)
            self.gradient = self.gradient + flat(gmap.undefended.gradient())
            return message

        defense.protect = noted  # type: ignore[method-assign]

    @property
    def cosine(self) -> float:
        # In float32 sums of ten million squares are off in the third digit.
        return float(cosine_similarity(self.shared.double(), self.gradient.double(), dim=0))


class SummedTask(Task):
    """The frontier's, with the sums of the last training."""

    def trainer(self, model: torch.nn.Module, rows: Any, cell: dict) -> GradGuardTrainer:
        trainer, self.sums = super().trainer(model, rows, cell), Sums()
        self.sums.watch(trainer._clients[0])
        return trainer


def report(figures: dict, args) -> None:
    places = dict.fromkeys(place for found in figures.values() for place in found)
    columns = [place for place in places if place not in (RATES, ACCURACY)]
    rows = []
    for row, found in figures.items():
        runs, tried = found.get(ACCURACY, {}), found.get(RATES, {})
        shown = [row, f"{rates.best({row: tried})[row]:g}" if tried else ""]
        shown += [interval([run["accuracy"] for run in runs.values()]) if runs else ""]
        shown += [lost(runs, figures.get(_plain(row), {}).get(ACCURACY, {}))]
        sums = [run["cosine_of_sums"] for run in runs.values() if "cosine_of_sums" in run]
        shown += [interval(sums, 2) if sums else ""]
        rows.append(shown + [read(found.get(column, {})) for column in columns])
    header = ["", "rate", "accuracy", "less than none", "cosine of sums", *columns]
    write_table(args.output, header, rows)


def _plain(row: str) -> str:
    """The undefended row of as many messages."""
    steps = PARTS[row].steps
    return next(name for name, one in PARTS.items() if (one.defense, one.steps) == ("none", steps))
