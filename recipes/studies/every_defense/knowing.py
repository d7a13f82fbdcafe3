r"""Does it matter that an attacker knows the defense?

    python -m recipes.studies.every_defense.run knowing --output docs/results/knowing

Of each defense and attack the strength at which knowing the defense changes most of what is read:
in token F1 and PSNR, of the parts `text` and `images`, and in the share of messages of one sentence
that a list of candidates names. It matters, or does harm, where both 95 % intervals lie apart;
elsewhere it cannot be told. Takes seconds.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from ..candidates import text as candidates
from ..lib.results import Results, nested
from ..lib.tables import bracketed, write_table
from . import images, text
from .attackers import column

PUBLISHED = Path(__file__).resolve().parents[3] / "docs" / "results"
PARTS = {"text_defenses": text, "image_defenses": images, "candidates": candidates}
ARGUMENTS = {
    f"--{name}": {"type": Path, "default": PUBLISHED / name, "help": f"OUTPUT of {part.__name__}"}
    for name, part in PARTS.items()
}
SCORES = {"text_defenses": ("token_f1", ".2f"), "image_defenses": ("psnr", ".1f")}
Figures = list[float]  # mean, and the ends of its interval


def cells(args) -> dict:
    return {}


def report(figures: dict, args) -> None:
    found: dict = {}
    for defense, attack, strength, without, knowing, form in pairs(args):
        change = abs(knowing[0] - without[0])
        row = (change, strength, without, knowing, form)
        found[defense, attack] = max(found.get((defense, attack), row), row)
    rows = [
        [f"`{defense}`", attack, f"`{strength}`" if strength else "",
         bracketed(without, form), bracketed(knowing, form), verdict(without, knowing)]
        for (defense, attack), (_, strength, without, knowing, form) in sorted(found.items())
    ]  # fmt: skip
    header = ["defense", "attack", "strength", "who does not know", "who knows", "knowing"]
    write_table(args.output, header, rows)


def pairs(args) -> Iterator[tuple[str, str, str, Figures, Figures, str]]:
    """Defense, attack and strength, what is read by who does not know and by who does."""
    for name, (score, form) in SCORES.items():
        for row, cell in published(args, name).items():
            defense, _, strength = row.partition(" ")
            for attack in cell:
                known = cell.get(column(attack, True))
                if known and defense not in ("none", "chance"):
                    kind = f"{attack}, {'images' if score == 'psnr' else 'text'}"
                    yield defense, kind, strength, cell[attack][score], known[score], form
    for defense, states in published(args, "candidates").items():
        for state, sizes in states.items():
            found = sizes.get("1", {})
            for key in found:
                strength, _, who = key.partition("|")
                other = found.get(f"{strength}|does not")
                if who == "knows" and other and defense != "none":
                    kind = f"candidates, text, {state} model"
                    yield defense, kind, strength, other["top1"], found[key]["top1"], ".2f"


def published(args, name: str) -> dict:
    """The figures of a part, as far as they are there."""
    whole = argparse.Namespace(quick=False, all=True)
    return nested(PARTS[name].cells(whole), Results(getattr(args, name)))


def verdict(without: Figures, knowing: Figures) -> str:
    if knowing[1] > without[2]:
        return "matters"
    return "does harm" if knowing[2] < without[1] else "cannot tell"
