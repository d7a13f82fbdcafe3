r"""Which of 1,000 sentences are in a message, and what who has no list finds in it.

    python -m recipes.studies.candidates.run thousand --model MODEL --data_dir SST2 \
        --output docs/results/candidates_thousand

The models of the part `text`, and other sentences, of the training set too. Three messages of one
sentence, one of 4 and one of 16; candidates' labels are known. Everybody knows the defense, where
there is something to know: who has the list ranks it by likelihood, span fills in what was pruned,
TAG weighs coordinates by the noise's covariance or matches only what was left, LAMP likewise.
Searches see the messages of one sentence, with its label and length. An hour and a half of one
core; `--all` asks for every defense, which takes twice that, and for searches at the initial model.
"""

from collections.abc import Mapping

from ..lib.results import chosen
from ..lib.tables import bracketed, write_table
from .settings import (
    PLAN,
    QUICK,
    SEARCHED,
    SEARCHES,
    STATES,
    THOUSAND,
    THOUSAND_FIRST,
    THOUSAND_MESSAGES,
)
from .task import POOL, Task, measured, said, searched

ARGUMENTS = {
    "--model": "a text encoder and its tokenizer",
    "--data_dir": "folder of train.tsv",
    "--all": {"action": "store_true", "help": "all defenses and searches"},
}


def cells(args) -> dict:
    """From the most telling down; without `--all` the first ones, and those that are there."""
    return chosen(
        _listed(args) | _searches(args),
        lambda cell: cell["defense"] in THOUSAND_FIRST and "attack" not in cell,
        args,
    )


def _plan(args) -> dict:
    return QUICK if args.quick else PLAN | {"candidates": POOL}


def _listed(args) -> dict:
    """One cell for all strengths, which share the candidates' gradients."""
    sizes = {1: 1} if args.quick else THOUSAND_MESSAGES
    return {
        (state, defense, f"list, {size}"): {
            "defense": defense,
            "strengths": THOUSAND[defense],
            "state": state,
            "size": size,
            "messages": messages,
            "informed": True,
            **_plan(args),
        }
        for names in (THOUSAND_FIRST, [one for one in THOUSAND if one not in THOUSAND_FIRST])
        for size, messages in sizes.items()
        for state in reversed(STATES)
        for defense in names
    }


def _searches(args) -> dict:
    return {
        (state, defense, f"{attack} {said(strength)}"): {
            "defense": defense,
            "strength": strength,
            "attack": attack,
            "settings": settings | ({"steps": 1} if args.quick and settings else {}),
            "state": state,
            "size": 1,
            "messages": 1 if args.quick else SEARCHED,
            **_plan(args),
        }
        for state in reversed(STATES)
        for attack, settings in SEARCHES.items()
        for defense in (THOUSAND_FIRST[:2] if args.quick else THOUSAND)
        for strength in THOUSAND[defense]
    }


def prepare(args):
    task = Task(args)
    rows = task.kept if args.quick else task.thousand()

    def measure(cell: dict) -> dict:
        return (searched if "attack" in cell else measured)(task, cell, rows)

    return measure


def report(figures: dict, args) -> None:
    """A table for each state of the model."""
    sizes = sorted(THOUSAND_MESSAGES)
    header = ["defense", "strength", *(f"list, message of {size}" for size in sizes), *SEARCHES]
    for state, defenses in figures.items():
        rows = []
        for defense, found in defenses.items():
            for strength in map(said, THOUSAND[defense]):
                row = [f"`{defense}`", f"`{strength}`" if strength else ""]
                row += [_told(found.get(f"list, {size}", {}), strength) for size in sizes]
                row += [_read(found.get(f"{attack} {strength}")) for attack in SEARCHES]
                rows.append(row)
        write_table(args.output.with_name(f"{args.output.name}_{state}"), header, rows)


def _told(found: Mapping[str, dict], strength: str) -> str:
    """Named, mean rank, and found at 1 % and 0.1 % false alarms."""
    one = found.get(f"{strength}|knows") or found.get(f"{strength}|does not")
    if not one:
        return ""
    shares = (f"{100 * one[name][0]:.0f}" for name in ("top1", "tpr_1%", "tpr_0.1%"))
    named, one_percent, tenth = shares
    return f"{named} %, {one['rank'][0]:.1f}, {one_percent} %, {tenth} %"


def _read(one: Mapping[str, list[float]] | None) -> str:
    return bracketed(one["token_f1"], ".2f") if one else ""
