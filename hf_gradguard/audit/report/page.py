"""The text of an audit: a headline, a Markdown table, and an HTML page without scripts."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, Template

from ...attacks.likelihood import Distinguishability
from ..cells import Audit, Cell, write_text
from .summary import Membership, Point, Summary
from .verdicts import (
    STANDINGS,
    AttackScores,
    base_of,
    short_labels,
    show,
    show_coefficient,
    show_mean,
)

MARKS = 8
"""The number of marks that the template has: four shapes in eight colors, one for each defense,
from the first again after the last.
"""


def write_report(summary: Summary, folder: str | os.PathLike[str]) -> Path:
    """Write `report.html` and `table.md`, as `audit` does after every message.

    Args:
        summary: The result of `summarize`.
        folder: The folder to write to, which must exist.

    Returns:
        The path of `report.html`.

    Example:
        >>> from hf_gradguard.audit import audit, summarize
        >>> result = audit(model, tokenizer, samples, "pruning", "span", output="runs/audit")
        >>> write_report(summarize(result), "runs/audit").name
        'report.html'
    """
    write_text(Path(folder) / "table.md", markdown_table(summary))
    path = Path(folder) / "report.html"
    write_text(path, html_report(summary))
    return path


# --- the headline


@dataclass(frozen=True)
class WorstSample:
    """The sample that gives away most, by its message and its index there.

    `shown` has the `(defense, attack)` pairs to show: undefended, and under the defense that leaks
    least.
    """

    message: int
    index: int
    shown: list[tuple[str, str]]


def headline(summary: Summary) -> str:
    """Return what a server could recover, under which defense, and at what price."""
    strongest = strongest_attacks(summary)
    if not strongest:
        return "No attack gave anything, so nothing is known of what a server could recover."
    defended = [label for label in strongest if label != "none"]
    undefended, sentences = strongest.get("none"), []
    if undefended is not None and undefended.is_at_chance:
        sentences.append(
            "These attacks are no better than a guess "
            f"({summary.main_score.format(summary.guess)}) even without a defense, so "
            "they prove nothing about reconstruction."
        )
    elif undefended is not None:
        sentences.append(f"Without a defense a server {_recovers(summary, undefended)}.")
    if defended:
        best = _least_leaking(summary, defended, strongest)
        only = "" if len(defended) == 1 else f", the best of {len(defended)} defenses tried,"
        sentences.append(f"Under {best}{only} {_defended(summary, best, strongest)}.")
        sentences.append(_price(summary, best))
    return " ".join(sentences)


def worst_sample(summary: Summary) -> WorstSample | None:
    """Return the sample that gives away most under the defense that leaks least.

    If nothing is defended, it is the undefended sample that gives away most.
    """
    strongest, score = strongest_attacks(summary), summary.main_score.name
    if not strongest:
        return None
    defended = [label for label in strongest if label != "none"]
    best = _least_leaking(summary, defended, strongest) if defended else "none"
    leaks = [
        (value, cell["message"], index)
        for cell in summary.audit.cells
        if (cell["defense"], cell["attack"]) == (best, strongest[best].attack)
        and "scores" in cell
        and not cell["repeat"]
        for index, value in enumerate(cell["scores"][score])
    ]
    if not leaks:
        return None
    # Of equal leaks the first sample, so that the page does not change from run to run.
    _, message, index = max(leaks, key=lambda leak: (leak[0], -leak[1], -leak[2]))
    labels = [label for label in dict.fromkeys(("none", best)) if label in strongest]
    return WorstSample(message, index, [(label, strongest[label].attack) for label in labels])


def strongest_attacks(summary: Summary) -> dict[str, AttackScores]:
    """Return the attack that recovers most, by defense.

    Membership inference reconstructs nothing, so it counts only if no other attack was applicable.
    """
    strongest: dict[str, AttackScores] = {}
    for label in summary.audit.defenses:
        scored = [row for row in summary.rows if row.defense == label and row.scores]
        # Where nothing else was applicable its best candidates are the only text there is.
        if rows := summary.reconstructions(label) or scored:
            strongest[label] = max(rows, key=lambda row: row.scores[summary.main_score.name].mean)
    return strongest


def _least_leaking(
    summary: Summary, labels: Sequence[str], strongest: dict[str, AttackScores]
) -> str:
    """Return the defense that leaks least; membership inference decides between equals."""
    recognized = {item.defense: item.scores["top1"].mean for item in summary.membership}

    def leak(label: str) -> tuple[float, float]:
        recovered = strongest[label].scores[summary.main_score.name].mean
        # Rounded: a difference that no reader sees must not outweigh membership.
        return round(recovered, 2), recognized.get(label, 0.0)

    return min(labels, key=leak)


def _recovers(summary: Summary, row: AttackScores) -> str:
    score = summary.main_score
    if inferred := [item for item in summary.membership if item.attack == row.attack]:
        return next(x for x in inferred if x.defense == row.defense).recognizes(score.sample)
    name = short_labels(list(summary.audit.attacks))[row.attack]
    return f"{score.verb} {score.format_estimate(row.scores[score.name])} {score.amount} ({name})"


def _defended(summary: Summary, label: str, strongest: dict[str, AttackScores]) -> str:
    row, score = strongest[label], summary.main_score
    inferred = [item for item in summary.membership if item.defense == label]
    if any(item.attack == row.attack for item in inferred):
        return f"it {_recovers(summary, row)}"
    verdict = next(verdict for verdict in summary.verdicts if verdict.defense == label)
    if "none" in strongest and strongest["none"].is_at_chance:
        text = f"they reach {score.format_estimate(row.scores[score.name])}"
    else:
        text = f"it {_recovers(summary, row)}; a guess has {score.format(summary.guess)}"
        if verdict.standing == "unknown":
            text += ", and its verdict says why this shows nothing yet"
    most = max(inferred, key=lambda item: item.scores["top1"].mean, default=None)
    return text if most is None else f"{text}. It {most.recognizes(score.sample)}"


def _price(summary: Summary, label: str) -> str:
    reached = summary.audit.settings.get("metrics") or {}
    if label not in reached:
        return "Its price was not measured: give --metrics, or run gradguard recommend."
    if "none" not in reached:
        return f"Training reaches {reached[label]:.3g}."
    return f"Training reaches {reached[label]:.3g} with it, and {reached['none']:.3g} without."


# --- the table


def markdown_table(summary: Summary) -> str:
    """Return a table with a row for each defense, a column for each attack, and the main scores.

    Verdicts stand above it, and the legend below.

    Example:
        >>> from hf_gradguard.audit import audit, summarize
        >>> result = audit(model, tokenizer, samples, "pruning", "span", output="runs/audit")
        >>> "| defense | span |" in markdown_table(summarize(result))
        True
    """
    lines = [f"**{summary.unfinished}**", ""] if summary.unfinished else []
    lines += [headline(summary), ""]
    lines += [f"- **{verdict.defense}**: {verdict.text}" for verdict in summary.verdicts]
    lines += ["", *_score_lines(summary), "", *_legend(summary)]
    if summary.membership:
        header = ["membership inference", "candidates", "knows the defense", "recognized"]
        header += ["by chance", "mean rank", "TPR at 1 % FPR", "TPR at 0.1 % FPR"]
        lines += ["", *_table(header, [_membership_entries(item) for item in summary.membership])]
    for heading, reasons in (
        ("No estimates", summary.silent),
        ("Not applicable", summary.refusals),
        ("Crashed, to be tried again by the same command", summary.crashes),
    ):
        if reasons:
            lines += ["", f"{heading}:", "", *(f"- {reason}" for reason in reasons)]
    return "\n".join(lines) + "\n"


def _score_lines(summary: Summary) -> list[str]:
    audit, score = summary.audit, summary.main_score.name
    pairs = f"{summary.main_score.unit_of_change}s distinguished"
    header = ["defense", *audit.attacks, pairs, "labels recovered", "relative error", "cosine"]
    header += summary.estimator_titles.values()
    rows = []
    for defense, means in summary.shared.items():
        by_attack = {row.attack: row for row in summary.rows if row.defense == defense}
        entries = [
            by_attack[attack].entry(score, len(audit.messages)) if attack in by_attack else ""
            for attack in audit.attacks
        ]
        labels = summary.labels[defense]
        entries.append(show_pairs(summary.distinguishability[defense]))
        entries.append("–" if labels is None else show(labels))
        rows.append([f"`{defense}`", *entries, *map(show_mean, means.values())])
    guess = show(summary.chance.scores[score])
    labels_guess = "–" if summary.chance_labels is None else f"{summary.chance_labels:.2f}"
    blanks = [""] * (2 + len(summary.estimator_titles))
    rows.append(["chance", *[guess] * len(audit.attacks), "0.50", labels_guess, *blanks])
    return _table(header, rows)


def _membership_entries(item: Membership) -> list[str]:
    recognized, *rates = (show(item.scores[n]) for n in ("top1", "rank", "tpr_1%", "tpr_0.1%"))
    knows = "yes" if item.knows_defense else "no"
    return [
        f"`{item.defense}`", str(item.candidates), knows, recognized, f"{item.chance:.2f}", *rates,
    ]  # fmt: skip


def _legend(summary: Summary) -> Iterator[str]:
    """Yield what each column of the table means, an item of a list for each."""
    settings = summary.audit.settings
    yield (
        f"- Each attack: {summary.main_score.legend}, the mean over {summary.samples} samples, "
        f"with 95 % bootstrap intervals over messages of {settings['batch_size']}."
    )
    yield f"- Chance: {settings['chance']}."
    if any(base_of(label) != label for label in summary.audit.attacks):
        yield (
            "- An attacker that knows the defense has an entry where that changes its settings or "
            "its observation."
        )
    if pairs := pairs_legend(summary):
        yield f"- {pairs.strip()}"
    yield (
        "- Labels recovered: the fraction that is read off the last layer's gradient, also where "
        "attacks are granted the labels; chance draws classes at random."
    )
    yield "- Relative error and cosine compare what was shared with the true gradient."
    yield f"- {summary.estimators_note}"
    yield from (f"- {meaning}" for meaning in summary.estimator_meanings)


def show_pairs(pairs: Distinguishability | None) -> str:
    """Return the fraction of pairs distinguished correctly, with its exact interval."""
    if pairs is None:
        return "–"
    low, high = pairs.interval
    return f"{pairs.rate:.2f} [{low:.2f}, {high:.2f}]"


def pairs_legend(summary: Summary) -> str:
    """Return the legend of the pairs below a table, with the spread that decides them."""
    known = {label: p for label, p in summary.distinguishability.items() if p is not None}
    if not known:
        return ""
    unit = summary.main_score.unit_of_change
    changes = sorted(pairs.relative_change for pairs in known.values())
    dials = ", ".join(
        f"{label} {show_mean(pairs.direction_ratio)}" for label, pairs in known.items()
    )
    return (
        f"{unit.capitalize()}s distinguished: the fraction of pairs that differ in one {unit} for "
        "which the likelihood names the true one, with an exact 95 % interval. Only at chance "
        f"(0.50) may a defense be said to hide {unit}s. Such a change moves a gradient by "
        f"{changes[0]:.0%} to {changes[-1]:.0%} of its norm (medians). A gradient stands out of "
        "the change that its defense made, along its own direction, by a factor of "
        f"√d‖g‖/‖shared - g‖: {dials}. "
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = []
    for entries in (header, ["---"] * len(header), *rows):
        escaped = (entry.replace("|", "\\|").replace("\n", " ") for entry in entries)
        lines.append(f"| {' | '.join(escaped)} |")
    return lines


# --- the page


def html_report(summary: Summary) -> str:
    """Return the report as one self-contained HTML page."""
    audit, score = summary.audit, summary.main_score.name
    pairs = [(row.defense, row.attack) for row in summary.rows if row.scores]
    worst = worst_sample(summary)
    page: str = template("audit/report", "report.html.jinja").render(
        summary=summary, main_score=summary.main_score, settings=audit.settings,
        defenses=audit.defenses, attacks=audit.attacks, standings=STANDINGS,
        names=short_labels(list(audit.attacks)), scores=list(summary.chance.scores), pairs=pairs,
        headline=headline(summary).replace(" %", "\N{NO-BREAK SPACE}%"),
        worst=worst and originals(audit, worst.shown, score, worst)[0],
        chart=chart(summary), scatters=scatters(summary), samples=originals(audit, pairs, score),
        show=show, show_mean=show_mean, show_coefficient=show_coefficient, show_pairs=show_pairs,
        pairs_legend=pairs_legend(summary),
    )  # fmt: skip
    return page


@cache
def template(folder: str, name: str) -> Template:
    """Return a page's template, from a folder of this package."""
    environment = Environment(
        loader=PackageLoader("hf_gradguard", folder),
        autoescape=True, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template(name)


def chart(summary: Summary) -> dict[str, Any]:
    """Return the chart's axis: its ticks, and where a main score is, in percent of its width."""
    score, rows = summary.main_score, [row for row in summary.rows if row.scores]
    guess, shown = summary.guess, [row.scores[score.name] for row in rows]
    ticks = score.ticks([guess, *(e.mean if e.high is None else e.high for e in shown)])
    end = ticks[-1][0]

    def x(value: float) -> float:
        return round(100 * min(max(value, 0.0), end) / end, 2)

    return {"x": x, "guess": guess, "ticks": [(x(tick), label) for tick, label in ticks]}


def scatters(summary: Summary) -> list[dict[str, Any]]:
    """Return one plot for every estimator and attack, in pixels of a box of 400 by 250.

    The estimate is on the horizontal axis, logarithmic, and the attack's main score on the vertical
    one. Estimates of 0 (nothing was done to the gradient) stand left of the axis' break.
    """
    names = short_labels(list(summary.audit.attacks))
    return [
        {
            "title": f"{summary.estimator_titles[correlation.estimator]}, "
            f"{names[correlation.attack]}",
            "coefficient": show_coefficient(correlation.coefficients[summary.main_score.name]),
            "count": len(correlation.points),
            **_plot(summary, correlation.points),
        }
        for correlation in summary.correlations
    ]


def _plot(summary: Summary, points: list[Point]) -> dict[str, Any]:
    score, order = summary.main_score, list(summary.audit.defenses)
    positive = [math.log10(point.estimate) for point in points if point.estimate > 0]
    low, high = (math.floor(min(positive)), math.ceil(max(positive))) if positive else (-1, 0)
    # At least one decade, so that equal points do not lie on the frame.
    high = max(high, low + 1)
    has_zeros = len(positive) < len(points)
    axis_start = 92 if has_zeros else 56
    ticks = score.ticks(point.scores[score.name] for point in points)
    end = ticks[-1][0]

    def x(value: float) -> float:
        if value <= 0:
            return 62.0
        return round(axis_start + (388 - axis_start) * (math.log10(value) - low) / (high - low), 1)

    def y(value: float) -> float:
        return round(214 - 200 * min(max(value, 0.0), end) / end, 1)

    powers = range(low, high + 1, math.ceil((high - low) / 5))
    return {
        "axis_start": axis_start,
        "zeros": has_zeros,
        "across": [(x(10.0**power), power) for power in powers],
        "up": [(y(tick), label) for tick, label in ticks],
        "points": [
            {
                "x": x(point.estimate),
                "y": y(value := point.scores[score.name]),
                "kind": order.index(point.defense) % MARKS,
                "title": f"{point.defense}: {point.estimate:.3g}, {score.format(value)}",
            }
            for point in points
        ],
    }


def originals(
    result: Audit, pairs: list[tuple[str, str]], score: str, only: WorstSample | None = None
) -> list[dict[str, Any]]:
    """Return each sample with the first repeat's reconstruction for every `(defense, attack)`.

    All samples are returned, or only that one.
    """
    cells = {(c["message"], c["defense"], c["attack"]): c for c in result.cells if not c["repeat"]}
    special_ids, samples, number = result.settings.get("special_ids", ()), [], 0
    for at_message, message in enumerate(result.messages):
        in_message = f" (message {at_message + 1})" if len(message["labels"]) > 1 else ""
        for index, label in enumerate(message["labels"]):
            number += 1
            if only is not None and (only.message, only.index) != (at_message, index):
                continue
            samples.append(
                {
                    "title": f"Sample {number}{in_message}",
                    "label": label,
                    "image": message["images"][index] if "images" in message else None,
                    "entries": [
                        {"defense": defense, "attack": attack}
                        | _reconstruction(
                            message, cells[at_message, defense, attack], index, score, special_ids
                        )
                        for defense, attack in pairs
                    ],
                }
            )
    return samples


def _reconstruction(
    message: dict[str, Any], cell: Cell, index: int, score: str, special_ids: Sequence[int]
) -> dict[str, Any]:
    if "crash" in cell:
        return {"silence": "crashed", "reason": cell["crash"]}
    if "reason" in cell:
        return {"silence": "not applicable", "reason": cell["reason"]}
    shown: dict[str, Any] = {"score": cell["scores"][score][index]}
    if "images" in cell:
        return shown | {"image": cell["images"][index]}
    original_marks, recovered_marks = marks(message["ids"][index], cell["ids"][index], special_ids)
    return shown | {
        "original": _words(message["pieces"][index], original_marks),
        "recovered": _words(cell["pieces"][index], recovered_marks),
    }


def _words(pieces: list[str], piece_marks: list[str]) -> list[tuple[str, str, str]]:
    """Return `(blank before it, text, mark)` for each token.

    Pieces of a word that are marked the same are one.
    """
    words: list[tuple[str, str, str]] = []
    for piece, mark in zip(pieces, piece_marks, strict=True):
        text = piece.lstrip()
        if words and piece == text and words[-1][2] == mark:
            blank, start, _ = words[-1]
            words[-1] = (blank, start + text, mark)
        elif text:
            words.append((piece[: len(piece) - len(text)], text, mark))
    return words


def marks(
    original: list[int], recovered: list[int], special_ids: Sequence[int]
) -> tuple[list[str], list[str]]:
    """Return how each token of the original was recovered, and what each recovered token is.

    Args:
        original: Ids of the true text.
        recovered: Ids of the reconstruction; negative where nothing was recovered.
        special_ids: Ids that count as no word.

    Returns:
        For either text one mark per token: `"exact"` at the same position, `"elsewhere"` at another
            one, each occurrence once, or `""`. Positions count as `score_text` counts them.
    """
    special = set(special_ids)
    places, true_places = (
        [i for i, token in enumerate(ids) if token >= 0 and token not in special]
        for ids in (recovered, original)
    )
    # With equal lengths a special token in the middle is a gap, and not a shift.
    if len(recovered) == len(original):
        pairs = [(i, i) for i in true_places if i in set(places)]
    else:
        pairs = list(zip(places, true_places, strict=False))
    recovered_marks, original_marks = [""] * len(recovered), [""] * len(original)
    for i, j in pairs:
        if recovered[i] == original[j]:
            recovered_marks[i] = original_marks[j] = "exact"
    sides = [(recovered, places, recovered_marks), (original, true_places, original_marks)]
    missing = [Counter(ids[i] for i in side if not done[i]) for ids, side, done in sides]
    # What is exact is taken; of the rest each occurrence counts once, wherever it is.
    for ids, side, done in sides:
        common = missing[0] & missing[1]
        for i in side:
            if not done[i] and common[ids[i]]:
                done[i] = "elsewhere"
                common[ids[i]] -= 1
    return original_marks, recovered_marks
