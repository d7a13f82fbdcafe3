r"""Whose list has only some of a message's sentences: are those told?

    python -m recipes.studies.frontier.run partly --model MODEL --data_dir SST2 --models FOLDER \
        --output docs/results/frontier_partly

The encoder at the end of its training, as the part text trained it (FOLDER keeps it, or it is
trained anew), and three messages of 16 sentences of the dev set. The list has 300 sentences, labels
known: of each message all 16, eight, or two, none of the others, and sentences that are in no
message. Shown is the share of the listed members that are told at 1 % false alarms, and the median
rank. A minute of one core a cell, and three for a training.
"""

from statistics import median

from ..lib.tables import write_table
from ..lib.text import of_usual_length, sst2
from . import text
from .attackers import observed, told
from .client import row_of
from .lists import at_the_end
from .shown import read
from .training import Task

ARGUMENTS = text.TRAINED
ROWS: list[tuple[str, dict]] = [
    ("none", {}),
    ("gaussian_noise", {"relative_scale": 20.0}),
    ("pruning", {"ratio": 0.99}),
    ("optimal_pruning", {"ratio": 0.99, "error_feedback": True}),
]
LISTED = (16, 8, 2)  # of each message


def cells(args) -> dict:
    common = at_the_end(args.quick)
    rows, some = (ROWS[:1], (4, 2)) if args.quick else (ROWS, LISTED)
    rates = {} if args.quick else text.rates_of(args)
    return {
        (row_of(*row), str(listed)): common
        | {"defense": row[0], "strength": row[1], "members": listed}
        | {"learning_rate": rates.get(row_of(*row), 2e-4)}
        for listed in some
        for row in rows
    }


def prepare(args):
    task = Task(args.model, args.data_dir, args.models)
    texts = of_usual_length(sst2(args.data_dir))

    def measure(cell: dict) -> dict:
        size, known = cell["size"], cell["members"]
        seen = observed(cell, task.stage(cell, cell["stage"]), task.tokenizer, texts)
        starts = range(0, size * len(seen), size)
        members = [one for start in starts for one in texts[start : start + known]]
        listed = (members + texts[size * len(seen) :])[: cell["settings"]["listed"]]
        candidates = [one["sentence"] for one in listed], [one["label"] for one in listed]
        return told(cell | {"size": known}, *candidates, seen)

    return measure


def report(figures: dict, args) -> None:
    rows = [
        [f"`{row}`", *(f"{read({'0': one})}, {median(one['rank']):g}"
                       for one in found.values())]
        for row, found in figures.items()
    ]  # fmt: skip
    header = [f"{n} on the list" for n in next(iter(figures.values()))]
    write_table(args.output, ["told, rank", *header], rows)
