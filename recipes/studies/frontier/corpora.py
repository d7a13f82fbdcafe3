r"""Do settings that were found on SST-2 hide sentences of another kind?

    python -m recipes.studies.frontier.run corpora --model MODEL --data_dir SST2 \
        --text WIKITEXT --models FOLDER --output docs/results/frontier_corpora

The encoder at the start, in the middle and at the end of its training on SST-2, as the part text
trained it (FOLDER keeps it, or it is trained anew), and messages of sentences that are none of
SST-2's: those of 8 to 20 words of WikiText-2's test part without unknown words, labels 0 and 1 in
turn. Attacks as in the part text: span on single ones, and 300 candidates of the same text at the
end. Two minutes of one core a row, and three for a training.
"""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from ..lib.tables import write_table
from ..lib.text import of_usual_length
from . import text
from .attackers import attacked
from .settings import ATTACKS, BATCH, CANDIDATES, QUICK, QUICK_ATTACKS, SPAN, STAGES, STEPS
from .shown import ACCURACY, cells_of, fitting, read
from .training import Task

ARGUMENTS = text.TRAINED | {"--text": "WikiText-2's test part, a paragraph a line"}
CORPUS = "WikiText-2"
ROWS: list[tuple[str, dict]] = [
    ("none", {}),
    *((name, {"relative_scale": 20.0}) for name in ("gaussian_noise", "optimal_noise")),
    *(("refiner", {"samples": count}) for count in (4, 16)),
    ("refiner", {"samples": 4, "min_batches": 8}),
]
ASKED = {SPAN: list(STAGES), CANDIDATES: ["end"]}


def cells(args) -> dict:
    if args.quick:
        asked = {one: ["end"] for one in QUICK_ATTACKS}
        found = fitting(cells_of(ROWS[:1], [(1, asked)], QUICK_ATTACKS, QUICK, None))
    else:
        sizes = {"steps": STEPS, "batch": BATCH}
        found = cells_of(ROWS, [(1, ASKED)], ATTACKS, sizes, text.rates_of(args))
    return {
        place: cell | {"corpus": CORPUS} for place, cell in found.items() if place[1] != ACCURACY
    }


def sentences(path: str | Path) -> Iterator[str]:
    """Those of a tokenized text, without titles and unknown words."""
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        if not line.strip().startswith("="):
            for sentence in re.split(r"(?<= [.?!]) ", line.strip()):
                if sentence and "<unk>" not in sentence:
                    yield sentence


def usual_sentences(path: str | Path) -> list[str]:
    """Those of usual length."""
    return [row["sentence"] for row in of_usual_length({"sentence": s} for s in sentences(path))]


def prepare(args):
    task = Task(args.model, args.data_dir, args.models)
    labels = itertools.cycle((0, 1))
    texts = [
        {"sentence": one, "label": label}
        for one, label in zip(usual_sentences(args.text), labels, strict=False)
    ]

    def measure(cell: dict) -> dict:
        return attacked(cell, task.stage(cell, cell["stage"]), task.tokenizer, texts)

    return measure


def report(figures: dict, args) -> None:
    places = list(dict.fromkeys(place for found in figures.values() for place in found))
    rows = [
        [f"`{row}`", *(read(found.get(place, {})) for place in places)]
        for row, found in figures.items()
    ]
    write_table(args.output, ["", *places], rows)
