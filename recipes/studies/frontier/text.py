r"""Accuracy on SST-2 of each defense at its own best learning rate, and what attackers read of it
at the start, in the middle and at the end of its own training.

    python -m recipes.studies.frontier.run text --model MODEL --data_dir SST2 --models FOLDER \
        --output docs/results/frontier_text

One client of 16 phrases per message, 200 steps, seeds that chose no rate. Accuracy is of the 2,693
sentences of SST-2's dev and SST's test set, compared with the undefended run of the same seed,
sentence by sentence. Attacked are messages of sentences of the dev set, without dropout, labels
and lengths known. Attackers know the defense: TAG weighs coordinates by the noise's covariance, or
matches what a pruning left; span fills in what it pruned. Candidates are 300 sentences, ranked by
likelihood: what is shown is the share of a message's 16 that are told at 1 % false alarms. Behind
error feedback "gathered" knows of how many batches each entry is the sum, and waits for 30 messages
more, made at the same weights. Noise alone is what TAG makes of nothing, at the undefended models.
FOLDER keeps what was trained, 45 MB per stage.
"""

from ..lib.results import Results, chosen, named
from ..lib.text import of_usual_length, sst2
from . import rates
from .attackers import CHANCE, NOISE_ALONE, attacked
from .settings import (
    ALL,
    ATTACKS,
    BATCH,
    CANDIDATES,
    FIRST,
    MORE,
    MORE_SEEDS,
    PASSES,
    QUICK,
    QUICK_ATTACKS,
    QUICK_CANDIDATES,
    QUICK_ROWS,
    ROWS,
    STAGES,
    STEPS,
)
from .shown import ACCURACY, TOLD, Look, cells_of, fitting, lists, picture, table
from .training import TEXTS, Task

TRAINED = TEXTS | {
    "--models": "folder that keeps what was trained",
    "--rates": {"default": "frontier_rates", "help": "results of the part rates, beside OUTPUT"},
}
ARGUMENTS = TRAINED | {"--all": ALL}
LOOK = Look(
    "token_f1", "words that the best attacker finds at any stage (token F1; less is better)", -7
)
LISTS = Look(
    TOLD, "members of messages of 16 that a list tells at any stage, at 1 % false alarms", -7
)


def cells(args) -> dict:
    """All, from the most telling down; without `--all` the first ones, and those that are there."""
    if args.quick:
        passes = [(1, {one: list(STAGES) for one in QUICK_ATTACKS})]
        return fitting(cells_of(QUICK_ROWS, passes, QUICK_ATTACKS, QUICK, None))
    rate_of, sizes = rates_of(args), {"steps": STEPS, "batch": BATCH}
    whole = _with_chance(fitting(cells_of(ROWS, PASSES, ATTACKS, sizes, rate_of)))
    whole |= cells_of(MORE, [(MORE_SEEDS, {})], ATTACKS, sizes, rate_of)
    first = cells_of(FIRST, PASSES[:1], ATTACKS, sizes, rate_of).values()
    return chosen(whole, lambda cell: cell in first, args)


def _with_chance(found: dict) -> dict:
    """After each of TAG on what is undefended, what it makes of noise alone at that model."""
    whole: dict = {}
    for (row, place, seed), cell in found.items():
        whole[row, place, seed] = cell
        if row == "none" and cell.get("attack") == "tag":
            whole[CHANCE, place, seed] = cell | {NOISE_ALONE: True}
    return whole


def rates_of(args) -> dict[str, float]:
    """The rates of rows whose search has ended."""
    there = {"output": args.output.with_name(args.rates), "all": False}
    of_rates = type(args)(**vars(args) | there)
    results, found = Results(of_rates.output), {}
    if not named(of_rates.output, ".json").exists():
        raise SystemExit(f"{results.path} is not there: run the part rates first.")
    for (row, rate), cell in rates.cells(of_rates).items():
        found.setdefault(row, {})[rate] = results.get(cell)
    done = {row: tried for row, tried in found.items() if None not in tried.values()}
    return rates.best(done)


def prepare(args):
    task = Task(args.model, args.data_dir, args.models)
    texts = of_usual_length(sst2(args.data_dir))

    def measure(cell: dict) -> dict:
        if "attack" not in cell:
            return task.learned(cell)
        return attacked(cell, task.stage(cell, cell["stage"]), task.tokenizer, texts, task.later())

    return measure


def report(figures: dict, args) -> None:
    table(figures, ATTACKS, args.output, {})
    lists(figures, ATTACKS, args.output)
    picture(figures, args.output, LOOK)
    several = f", {(QUICK_CANDIDATES if args.quick else CANDIDATES)[1]}, "
    told = {
        row: {place: runs for place, runs in found.items() if place == ACCURACY or several in place}
        for row, found in figures.items()
    }
    picture(told, args.output.with_name(args.output.name + "_lists"), LISTS)
