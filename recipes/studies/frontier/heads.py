r"""Accuracy on SST-2 where nothing but a linear head is shared, each sample clipped, and what
attackers read of it at the start, in the middle and at the end of training.

    python -m recipes.studies.frontier.run heads --model MODEL --data_dir SST2 \
        --public WIKITEXT --models FOLDER --output docs/results/frontier_heads

The head takes the mean of the last states of an encoder that stays as it is, 770 shared numbers, or
the means of its last four layers' states, 3,074 numbers; the part text shares 11 million. (Four
layers one after the other: Devlin et al., 2019, Table 7, on features of a BERT that stays as it
is.) `dp_sgd` clips each phrase's gradient to norm 1 and adds noise of 1.5 or 2 times that to their
sum. By the lemma of Neyman and Pearson nobody, whatever he knows, then tells more than Φ(Φ⁻¹(0.01)
+ 1/1.5) = 4.8 % of a message's members at 1 % false alarms, or 3.4 %. Whitened are embeddings by
the mean and the covariance of 5,000 sentences of WikiText-2's training part, which are nobody's
secret, half shrunk to a multiple of one: then noise that is the same in every direction is no
larger beside what varies little.

Rows differ in layers, in whitening, in how long training is, and in the phrases of a message. Rates
are searched for as in the part rates, on held-out phrases by a seed that is not used again.
Accuracy is of the 2,693 sentences of SST-2's dev and SST's test set, compared with the undefended
head of the same embeddings, length and seed, sentence by sentence; ε is of all messages of a
training, for one phrase more or less. Attacked are sentences of the dev set, labels known;
candidates are 300, ranked by likelihood. Noise alone is what the same attacker makes of nothing, at
the undefended models. FOLDER keeps embeddings and what was trained. Embeddings take ten minutes of
one core, a training one to five, TAG two a sentence.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

from ..lib.results import Results
from ..lib.tables import interval, write_table
from ..lib.text import of_usual_length, sst2
from . import rates
from .attackers import CHANCE, NOISE_ALONE, attacked
from .head_training import HeadTask
from .settings import (
    CANDIDATES,
    HEAD_ATTACKS,
    HEAD_GRID,
    HEAD_RATE,
    HEAD_ROWS,
    QUICK_HEAD,
    QUICK_HEADS,
    RATES_SEED,
    SPREAD,
    UNLABELED,
    HeadRow,
)
from .shown import ACCURACY, PROOF, asked, lost, proofs, read
from .training import TEXTS

ARGUMENTS = TEXTS | {
    "--public": "a public text, WikiText-2's training part, a paragraph a line",
    "--models": "folder that keeps embeddings and what was trained",
}
PLAIN, RATES = "`none`", "learning rate"
_SAID = {1: "last layer", 4: "last four layers"}


class Heads(NamedTuple):
    """What is trained, and attacked.

    Args:
        rows: Trainings.
        attacks: How many messages, settings and stages of each.
        said: Names embeddings, by a cell.
        guesses: Of which attackers is shown what they make of noise alone.
    """

    rows: list[HeadRow]
    attacks: dict[tuple[str, int], tuple[int, dict, list[str]]]
    said: Callable[[dict], str]
    guesses: str


def cells(args) -> dict:
    heads = ([QUICK_HEAD], QUICK_HEADS) if args.quick else (HEAD_ROWS, HEAD_ATTACKS)
    return cells_for(args, Heads(*heads, _said, "tag"))


def cells_for(args, heads: Heads) -> dict:
    """Rates first, then what takes the best of them."""
    results, found = Results(args.output), {}
    for row in heads.rows:
        cell = {"steps": row.steps, "batch": row.batch}
        if row.layers > 1:
            cell["layers"] = row.layers
        if row.whitened:
            cell["whitened"] = True
        shape = f"{heads.said(cell)}, {row.steps:,} messages of {row.batch:,}"
        defended = {f"{PLAIN}, {shape}": {"defense": "none", "strength": {}}}
        for multiplier in row.multipliers:
            strength = {"per_sample": True, "clip": 1.0, "noise_multiplier": multiplier}
            defended[f"`dp_sgd` {multiplier:g}, {shape}"] = {
                "defense": "dp_sgd", "strength": strength,
            }  # fmt: skip
        for name, defense in defended.items():
            search = _search(results, defense | cell, args.quick)
            found |= {(name, RATES, rate): one for rate, one in search.items()}
            rate = HEAD_RATE if args.quick else rates.chosen(results, search)
            if rate is not None:
                trained = defense | cell | {"learning_rate": rate}
                found |= _trained(name, trained, row, heads, args.quick)
    # The slow ones come last.
    return dict(sorted(found.items(), key=lambda one: one[1].get("attack") == "tag"))


def _search(results: Results, cell: dict, quick: bool) -> dict[str, dict]:
    """Cells of a row's rates, so far."""
    common, middle = cell | {"seed": RATES_SEED}, HEAD_GRID.index(HEAD_RATE)
    start = HEAD_GRID[middle - SPREAD : middle + SPREAD + 1]
    tried = start[:1] if quick else rates.searched(results, common, start, HEAD_GRID)
    return rates.by_rate(common, tried)


def _trained(name: str, cell: dict, row: HeadRow, heads: Heads, quick: bool) -> dict:
    """Seeds, and attacks on some of them."""
    seeds = range(1 if quick else row.seeds)
    found = {(name, ACCURACY, str(seed)): cell | {"seed": seed} for seed in seeds}
    for attack, (count, settings, stages) in heads.attacks.items():
        kind, size = attack
        if kind not in row.by:
            continue
        attacked_seeds = seeds[: row.attacked if attack in (CANDIDATES, UNLABELED) else 1]
        for seed, stage in itertools.product(attacked_seeds, stages):
            place, own = f"{kind}, {size}, {stage}", asked(attack, count, settings, stage)
            found[name, place, str(seed)] = one = cell | own | {"seed": seed}
            if cell["defense"] == "none" and kind == heads.guesses and seed == 0:
                found[f"{CHANCE}, {heads.said(cell)}", place, "0"] = one | {NOISE_ALONE: True}
    return found


def _layers(cell: dict) -> int:
    return cell.get("layers", 1)


def _said(cell: dict) -> str:
    return _SAID[_layers(cell)] + (" whitened" if "whitened" in cell else "")


def prepare(args):
    texts = of_usual_length(sst2(args.data_dir))

    @functools.cache
    def task_of(layers: int, whitened: bool) -> HeadTask:
        public = args.public if whitened else None
        return HeadTask(args.model, args.data_dir, args.models, layers, public)

    def measure(cell: dict) -> dict:
        task = task_of(_layers(cell), "whitened" in cell)
        if "attack" not in cell:
            return task.trained(cell)
        return attacked(cell, task.stage(cell, cell["stage"]), task.tokenizer, texts)

    return measure


def report(figures: dict, args) -> None:
    places = dict.fromkeys(place for found in figures.values() for place in found)
    columns = [place for place in places if place not in (RATES, ACCURACY)]
    rows, epsilons = [], proofs(figures)
    for row, found in figures.items():
        runs = found.get(ACCURACY, {})
        plain = figures.get(f"{PLAIN}, {row.partition(', ')[2]}", {}).get(ACCURACY, {})
        tried = found.get(RATES, {})
        shown = [row, f"{rates.best({row: tried})[row]:g}" if tried else ""]
        shown += [interval([run["accuracy"] for run in runs.values()]) if runs else ""]
        shown += [lost(runs, plain), epsilons.get(row, "")]
        rows.append(shown + [read(found.get(column, {})) for column in columns])
    header = ["", "rate", "accuracy", "less than none", PROOF, *columns]
    write_table(args.output, header, rows)
