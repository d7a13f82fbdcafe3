"""The one sentence that a reader came for, and the reconstruction that speaks for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .summary import Summary
from .verdicts import Row, short_labels


@dataclass(frozen=True)
class Worst:
    """The sample that gives away most.

    Args:
        message: Which message it is in.
        place: Its place there.
        shown: `(defense, attack)` of the reconstructions to show: undefended, and under the defense
            that leaks least.
    """

    message: int
    place: int
    shown: list[tuple[str, str]]


def headline(summary: Summary) -> str:
    """What a server could read, under which defense, and at what price.

    Example:
        >>> from hf_gradguard.audit import audit, summarize
        >>> result = audit(model, tokenizer, samples, "pruning", "span", output="runs/audit")
        >>> headline(summarize(result)).startswith("Without a defense a server recovers")
        True
    """
    best = _strongest(summary)
    defended = [name for name in summary.audit.defenses if name != "none" and name in best]
    if not best:
        return "No attack gave anything, so nothing is known of what a server could read."
    parts, guess = [], summary.terms.said(summary.chance.scores[summary.terms.score].mean)
    if "none" in best and _fails(best["none"]):
        parts.append(
            f"These attacks are no better than a guess ({guess}) even without a defense, so of "
            "reading they prove nothing"
        )
    elif "none" in best:
        parts.append(f"Without a defense a server {_reads(summary, best['none'])}")
    if defended:
        name = _least(summary, defended, best)
        only = "" if len(defended) == 1 else f", the best of {len(defended)} defenses tried,"
        link = "; under " if parts else "Under "
        parts.append(f"{link}{name}{only} {_under(summary, name, best[name])}")
        parts.append(f", {_price(summary, name)}")
    return "".join(parts) + "."


def worst(summary: Summary) -> Worst | None:
    """The sample of which the defense that leaks least gives away most; undefended ones where
    nothing is defended.
    """
    best, score = _strongest(summary), summary.terms.score
    if not best:
        return None
    defended = [name for name in best if name != "none"]
    speaks = _least(summary, defended, best) if defended else "none"
    found = [
        (value, cell["message"], place)
        for cell in summary.audit.cells
        if (cell["defense"], cell["attack"]) == (speaks, best[speaks].attack)
        and "scores" in cell
        and not cell["repeat"]
        for place, value in enumerate(cell["scores"][score])
    ]
    if not found:
        return None
    _, message, place = max(found, key=lambda one: (one[0], -one[1], -one[2]))
    shown = [(name, best[name].attack) for name in dict.fromkeys(("none", speaks)) if name in best]
    return Worst(message, place, shown)


def _strongest(summary: Summary) -> dict[str, Row]:
    """By defense, the attack that reads most. Who has a list reads nothing: they are told apart,
    but where nobody else was applicable.
    """
    listed = {one.attack for one in summary.ranked}
    found: dict[str, Row] = {}
    for name in summary.audit.defenses:
        rows = [row for row in summary.rows if row.defense == name and row.scores]
        readers = [row for row in rows if row.attack not in listed] or rows
        if readers:
            found[name] = max(readers, key=lambda row: row.scores[summary.terms.score].mean)
    return found


def _least(summary: Summary, names: Sequence[str], best: Mapping[str, Row]) -> str:
    """The defense that leaves least, by the names of a list where attacks read alike."""
    named = {one.defense: one.scores["top1"].mean for one in summary.ranked}

    def leaves(name: str) -> tuple[float, float]:
        return round(best[name].scores[summary.terms.score].mean, 2), named.get(name, 0.0)

    return min(names, key=leaves)


def _fails(row: Row) -> bool:
    """Whether an attack reads no better than a guess, where there are enough messages to say so."""
    over = row.over_chance
    return over is not None and over.low is not None and not row.beats_chance


def _reads(summary: Summary, row: Row) -> str:
    terms = summary.terms
    return (
        f"{terms.verb} {terms.said(row.scores[terms.score].mean)} {terms.amount} "
        f"({_called(summary, row)})"
    )


def _under(summary: Summary, name: str, row: Row) -> str:
    verdict = next(one for one in summary.verdicts if one.defense == name)
    terms = summary.terms
    guess = terms.said(summary.chance.scores[terms.score].mean)
    said = f"it {_reads(summary, row)}, where a guess has {guess}"
    undefended = _strongest(summary).get("none")
    if undefended is not None and _fails(undefended):
        said = f"they reach {terms.said(row.scores[terms.score].mean)}"
    elif verdict.standing == "unknown":
        said += ", though these attackers prove nothing"
    listed = [one for one in summary.ranked if one.defense == name]
    if listed and not any(one.attack == row.attack for one in listed):
        most = max(listed, key=lambda one: one.scores["top1"].mean)
        said += (
            f", and an attacker with a list of {most.candidates} names "
            f"{100 * most.scores['top1'].mean:.0f} % of the {terms.many} ("
            f"{100 * most.blind:.0f} % by chance)"
        )
    return said


def _called(summary: Summary, row: Row) -> str:
    return short_labels(list(summary.audit.attacks))[row.attack]


def _price(summary: Summary, name: str) -> str:
    price = summary.audit.settings.get("metrics") or {}
    if name in price and "none" in price:
        return (
            f"at the price of {price[name]:.3g} in training, where undefended reaches "
            f"{price['none']:.3g}"
        )
    if name in price:
        return f"and training reaches {price[name]:.3g}"
    return "at a price that was not measured (give metrics, or run gradguard recommend)"
