"""A summary as Markdown."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, Template

from ...gradient_map.domain import IMAGE, TEXT
from ..cells import Audit, write_text
from .headline import headline, worst
from .summary import Point, Summary
from .verdicts import Estimate, Row, base_of, short_labels


def markdown_table(summary: Summary) -> str:
    """Defenses down, attacks across; the main score with its interval. Verdicts above, legend
    below.

    Example:
        >>> from hf_gradguard.audit import audit, summarize
        >>> result = audit(model, tokenizer, samples, "pruning", "span", output="runs/audit")
        >>> "| defense | span |" in markdown_table(summarize(result))
        True
    """
    lines = [f"**{summary.unfinished}**", ""] if summary.unfinished else []
    lines += [headline(summary), ""]
    lines += [f"- **{verdict.defense}**: {verdict.text}" for verdict in summary.verdicts]
    lines += ["", *_scores(summary), "", _legend(summary)]
    if summary.ranked:
        lines += ["", *_ranked(summary)]
    if summary.correlations:
        lines += ["", *_correlations(summary)]
    for heading, several in (
        ("No estimates", summary.silent),
        ("Not applicable", summary.refusals),
        ("Crashed, to be tried again by the same command", summary.crashes),
    ):
        if several:
            lines += ["", f"{heading}:", "", *(f"- {one}" for one in several)]
    return "\n".join(lines) + "\n"


def _scores(summary: Summary) -> list[str]:
    audit, score = summary.audit, summary.terms.score
    header = ["defense", *audit.attacks, "labels found", "relative error", "cosine"]
    header += summary.figures.values()
    lines = [_line(header), _line(["---"] * len(header))]
    for defense, means in summary.shared.items():
        own = {row.attack: row for row in summary.rows if row.defense == defense}
        entries = [
            _entry(own[attack], score, len(audit.messages)) if attack in own else ""
            for attack in audit.attacks
        ]
        entries.append(_labels(summary.labels[defense]))
        lines.append(_line([f"`{defense}`", *entries, *map(show_mean, means.values())]))
    guess = show(summary.chance.scores[score])
    blanks = [""] * (2 + len(summary.figures))
    labels = "–" if summary.chance_labels is None else f"{summary.chance_labels:.2f}"
    guesses = [*[guess] * len(audit.attacks), labels]
    return [*lines, _line(["chance", *guesses, *blanks])]


def _ranked(summary: Summary) -> list[str]:
    header = ["defense", "a list of candidates", "knows the defense", "named", "by chance"]
    header += ["mean rank", "found at 1 % false alarms", "at 0.1 %"]
    lines = [_line(header), _line(["---"] * len(header))]
    for one in summary.ranked:
        named, *shown = (show(one.scores[name]) for name in ("top1", "rank", "tpr_1%", "tpr_0.1%"))
        knows, blind = "yes" if one.knows else "no", f"{one.blind:.2f}"
        lines.append(_line([f"`{one.defense}`", f"{one.candidates}", knows, named, blind, *shown]))
    return lines


def _labels(found: Estimate | None) -> str:
    return "–" if found is None else show(found)


def _entry(row: Row, score: str, messages: int) -> str:
    if not row.scores:
        return row.silence
    part = f" ({row.messages} of {messages})" if row.messages < messages else ""
    return show(row.scores[score]) + part


def _legend(summary: Summary) -> str:
    settings = summary.audit.settings
    return (
        f"{summary.terms.legend}: mean over {summary.samples} samples, with 95 % bootstrap "
        f"intervals over messages of {settings['batch_size']}. Chance: {settings['chance']}. "
        f"{_who_knows(summary)}"
        "Labels found: the share that is read off the last layer's gradient, also where attacks "
        "are granted the labels; chance draws classes at random. "
        "Relative error and cosine: of what was shared, to the true gradient. Estimators predict "
        f"an error of the input, here as means over samples. {' '.join(summary.meanings)}"
    )


def _who_knows(summary: Summary) -> str:
    if not any(base_of(label) != label for label in summary.audit.attacks):
        return ""
    return (
        "An attacker who knows the defense has an entry where that changes what it does: its "
        "settings, or what it is told. "
    )


def _correlations(summary: Summary) -> list[str]:
    scores = list(summary.correlations[0].coefficients)
    lines = [
        _line(["Spearman's correlation with", *scores, "points"]),
        _line(["---"] * (len(scores) + 2)),
    ]
    for found in summary.correlations:
        name = f"{summary.figures[found.figure]}, {found.attack}"
        said = [show_coefficient(found.coefficients[score]) for score in scores]
        lines.append(_line([name, *said, str(found.points)]))
    return lines


def show(value: Estimate) -> str:
    """A mean with its interval."""
    digits = 2 if abs(value.mean) < 10 else 1
    interval = "" if value.low is None else f" [{value.low:.{digits}f}, {value.high:.{digits}f}]"
    return f"{value.mean:.{digits}f}{interval}"


def show_mean(value: float | None) -> str:
    """A mean to three digits; nothing where there is none."""
    if value is None:
        return ""
    return "∞" if math.isinf(value) else f"{value:.3g}"


def show_coefficient(value: float | None) -> str:
    """A correlation to two digits."""
    return "–" if value is None else f"{value:+.2f}"


def _line(entries: Sequence[str]) -> str:
    escaped = (entry.replace("|", "\\|").replace("\n", " ") for entry in entries)
    return f"| {' | '.join(escaped)} |"


STANDINGS = {"open": "Leaks", "reduced": "Leaks less", "chance": "At chance", "unknown": "Unknown"}


def write_report(summary: Summary, folder: str | os.PathLike[str]) -> Path:
    """Write `report.html` and `table.md`, as `audit` does after every message.

    Args:
        summary: Of `summarize`.
        folder: Where to; it has to be there.

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


def html_report(summary: Summary) -> str:
    """The report as one self-contained HTML page."""
    audit = summary.audit
    lines = [(row.defense, row.attack) for row in summary.rows if row.scores]
    text: str = _template().render(
        summary=summary,
        terms=summary.terms,
        settings=audit.settings,
        defenses=audit.defenses,
        attacks=audit.attacks,
        standings=STANDINGS,
        scores=list(summary.chance.scores),
        chart=chart(summary),
        scatters=scatters(summary),
        samples=originals(audit, lines, summary.terms.score),
        headline=headline(summary).replace(" %", "\N{NO-BREAK SPACE}%"),
        worst=_worst(summary),
        lines=lines,
        names=short_labels(list(audit.attacks)),
        show=show,
        show_mean=show_mean,
        show_coefficient=show_coefficient,
    )
    return text


def _worst(summary: Summary) -> dict[str, Any] | None:
    """The worst case as one of the originals, with what it is of."""
    found = worst(summary)
    if found is None:
        return None
    samples = originals(summary.audit, found.shown, summary.terms.score)
    sizes = [len(message["labels"]) for message in summary.audit.messages]
    return samples[sum(sizes[: found.message]) + found.place]


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("hf_gradguard", "audit/report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.jinja")


def chart(summary: Summary) -> dict[str, Any]:
    """Where the bars and whiskers of the chart of main scores go, in percent of its width."""
    terms = summary.terms
    guess = summary.chance.scores[terms.score].mean
    shown = [row.scores[terms.score] for row in summary.rows if row.scores]
    ticks = terms.ticks([guess, *(e.mean if e.high is None else e.high for e in shown)])
    top = ticks[-1][0]

    def x(value: float) -> float:
        return round(100 * min(max(value, 0.0), top) / top, 2)

    names = short_labels(list(summary.audit.attacks))
    groups = []
    for defense in summary.audit.defenses:
        bars = []
        for row in (row for row in summary.rows if row.defense == defense):
            bar: dict[str, Any] = {"attack": names[row.attack], "label": row.silence}
            if row.scores:
                value = row.scores[terms.score]
                bar |= {"end": x(value.mean), "label": _said(summary, value)}
                if value.low is not None and value.high is not None:
                    bar |= {"low": x(value.low), "high": x(value.high)}
            bars.append(bar)
        groups.append({"defense": defense, "bars": bars})
    return {
        "chance": x(guess),
        "chance_label": terms.said(guess),
        "groups": groups,
        "ticks": [(x(tick), label) for tick, label in _few(ticks)],
    }


def _few(ticks: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Of an axis' ticks as many as fit on a narrow page, with both ends."""
    every = math.ceil((len(ticks) - 1) / _TICKS)
    inner = [tick for tick in ticks[::every] if ticks[-1][0] - tick[0] > (every - 1) * ticks[1][0]]
    return [*(tick for tick in inner if tick is not ticks[-1]), ticks[-1]]


def _said(summary: Summary, value: Estimate) -> str:
    said = summary.terms.said(value.mean)
    if value.low is None or value.high is None:
        return said
    return said + summary.terms.interval(value.low, value.high)


def scatters(summary: Summary) -> list[dict[str, Any]]:
    """One plot for every figure and attack: an estimator's figure across, logarithmic, the attack's
    main score up.

    Pixels in a box of 400 by 250. Figures of 0 (nothing was done to the gradient) stand left of the
    axis' break.
    """
    names = short_labels(list(summary.audit.attacks))
    return [
        {
            "title": f"{summary.figures[one.figure]}, {names[one.attack]}",
            "coefficient": show_coefficient(one.coefficients[summary.terms.score]),
            "count": one.points,
            **_plot(summary, one.common),
        }
        for one in summary.correlations
    ]


def _plot(summary: Summary, points: list[Point]) -> dict[str, Any]:
    terms, order = summary.terms, list(summary.audit.defenses)
    positive = [math.log10(point.figure) for point in points if point.figure > 0]
    low, high = (math.floor(min(positive)), math.ceil(max(positive))) if positive else (-1, 0)
    high = max(high, low + 1)
    zeros = len(positive) < len(points)
    left = 92 if zeros else 56
    ticks = terms.ticks(point.scores[terms.score] for point in points)
    top = ticks[-1][0]

    def x(value: float) -> float:
        if value <= 0:
            return 62.0
        return round(left + (388 - left) * (math.log10(value) - low) / (high - low), 1)

    def y(value: float) -> float:
        return round(214 - 200 * min(max(value, 0.0), top) / top, 1)

    powers = range(low, high + 1, math.ceil((high - low) / 5))
    return {
        "left": left,
        "zeros": zeros,
        "across": [(x(10.0**power), power) for power in powers],
        "up": [(y(tick), label) for tick, label in ticks],
        "points": [
            {
                "x": x(point.figure),
                "y": y(point.scores[terms.score]),
                "kind": order.index(point.defense) % KINDS,
                "title": f"{point.defense}: {point.figure:.3g}, "
                f"{terms.said(point.scores[terms.score])}",
            }
            for point in points
        ],
    }


_TICKS = 5
KINDS = 8
"""Marks that the template has: four shapes in eight colors, one for each defense, from the first
again after the last.
"""


def originals(result: Audit, lines: list[tuple[str, str]], score: str) -> list[dict[str, Any]]:
    """One entry for each sample: its original, and for every `(defense, attack)` the first repeat's
    reconstruction.
    """
    cells = {(c["message"], c["defense"], c["attack"]): c for c in result.cells if not c["repeat"]}
    shown = _SHOWN[result.settings["kind"]]
    found: list[dict[str, Any]] = []
    for number, message in enumerate(result.messages):
        several = f" (message {number + 1})" if len(message["labels"]) > 1 else ""
        for place, label in enumerate(message["labels"]):
            entries = []
            for defense, attack in lines:
                cell = cells[number, defense, attack]
                entry: dict[str, Any] = {"defense": defense, "attack": attack}
                if "scores" in cell:
                    entry["score"] = cell["scores"][score][place]
                    entry |= shown(result, message, cell, place)
                elif "crash" in cell:
                    entry |= {"silence": "crashed", "reason": cell["crash"]}
                else:
                    entry |= {"silence": "not applicable", "reason": cell["reason"]}
                entries.append(entry)
            found.append(
                {
                    "title": f"Sample {len(found) + 1}{several}",
                    "label": label,
                    "entries": entries,
                    "image": message["images"][place] if "images" in message else None,
                }
            )
    return found


def _image(
    result: Audit, message: dict[str, Any], cell: dict[str, Any], place: int
) -> dict[str, Any]:
    return {"image": cell["images"][place]}


def _text(
    result: Audit, message: dict[str, Any], cell: dict[str, Any], place: int
) -> dict[str, Any]:
    original, found = message["ids"][place], cell["ids"][place]
    ours, theirs = marks(original, found, result.settings["special_ids"])
    return {
        "original": _words(message["pieces"][place], ours),
        "found": _words(cell["pieces"][place], theirs),
    }


_SHOWN = {TEXT.name: _text, IMAGE.name: _image}


def _words(pieces: list[str], kinds: list[str]) -> list[tuple[str, str, str]]:
    """`(blank before it, text, mark)` for each token; parts of a word that are marked alike are
    one.
    """
    words: list[tuple[str, str, str]] = []
    for piece, kind in zip(pieces, kinds, strict=True):
        text = piece.lstrip()
        if words and piece == text and words[-1][2] == kind:
            blank, before, _ = words[-1]
            words[-1] = (blank, before + text, kind)
        elif text:
            words.append((piece[: len(piece) - len(text)], text, kind))
    return words


def marks(
    original: list[int], found: list[int], special_ids: list[int]
) -> tuple[list[str], list[str]]:
    """How each token of the original was recovered, and what each token of the reconstruction is.

    Args:
        original: Ids of the true text.
        found: Ids of the reconstruction; negative where nothing was found.
        special_ids: Count as no word.

    Returns:
        For either text one mark per token: `"exact"` at the same position, `"elsewhere"` at another
        one, each occurrence once, or `""`. Positions count as `score_text` counts them.
    """
    special = set(special_ids)
    ours, theirs = (
        [i for i, token in enumerate(ids) if token >= 0 and token not in special]
        for ids in (found, original)
    )
    # With equal lengths a special token in the middle is a gap, and not a shift.
    aligned = len(found) == len(original)
    pairs = (
        [(i, i) for i in theirs if i in set(ours)]
        if aligned
        else list(zip(ours, theirs, strict=False))
    )
    found_marks, original_marks = [""] * len(found), [""] * len(original)
    for i, j in pairs:
        if found[i] == original[j]:
            found_marks[i] = original_marks[j] = "exact"
    rest = [
        Counter(ids[i] for i in places if not done[i])
        for ids, places, done in ((found, ours, found_marks), (original, theirs, original_marks))
    ]
    for ids, places, done in ((found, ours, found_marks), (original, theirs, original_marks)):
        left = rest[0] & rest[1]
        for i in places:
            if not done[i] and left[ids[i]]:
                done[i] = "elsewhere"
                left[ids[i]] -= 1
    return original_marks, found_marks
