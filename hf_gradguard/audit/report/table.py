"""A summary as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .headline import headline
from .summary import Summary
from .verdicts import Estimate, Row, base_of


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
