"""The summary of an audit for a terminal: the answer, a narrow table, and what its columns mean."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from .page import headline, show_pairs, strongest_attacks
from .summary import Summary
from .verdicts import short_labels


def terminal_summary(summary: Summary, folder: str | os.PathLike[str]) -> str:
    """Return what `gradguard audit` prints: one row for each defense, and where the rest is.

    Args:
        summary: The result of `summarize`.
        folder: The folder with the audit's files.

    Example:
        >>> from hf_gradguard.audit import audit, summarize
        >>> result = audit(model, tokenizer, samples, "pruning", "span", output="runs/audit")
        >>> print(terminal_summary(summarize(result), "runs/audit").splitlines()[2])
        defense        words recovered    by    words distinguished
    """
    score, recognized = summary.main_score, dict[str, str]()
    for item in sorted(summary.membership, key=lambda item: item.scores["top1"].mean):
        recognized[item.defense] = score.format_estimate(item.scores["top1"])
    distinguished = {label: p for label, p in summary.distinguishability.items() if p is not None}
    recovered = f"{score.unit_of_change}s recovered" if score.unit == "%" else score.legend
    header = ["defense", recovered, "by"]
    header += [f"{score.sample}s recognized"] * bool(recognized)
    header += [f"{score.unit_of_change}s distinguished"] * bool(distinguished)
    strongest = strongest_attacks(summary)
    attacks, rows = short_labels(list(summary.audit.attacks)), []
    for label in summary.audit.defenses:
        row = strongest.get(label)
        entries = ["–", "–"]
        if row is not None:
            entries = [score.format_estimate(row.scores[score.name]), attacks[row.attack]]
        if recognized:
            entries.append(recognized.get(label, "–"))
        if distinguished:
            entries.append(show_pairs(summary.distinguishability[label]))
        rows.append([label, *entries])
    guess = ["chance", score.format(summary.guess), ""]
    guess += [f"{100 * summary.membership[0].chance:.0f} %"] if recognized else []
    guess += ["0.50"] * bool(distinguished)
    paragraphs = [headline(summary), aligned([header, *rows, guess]), "\n".join(_notes(summary))]
    if summary.unfinished:
        paragraphs.insert(0, summary.unfinished)
    report = Path(folder) / "report.html"
    paragraphs.append(f"{report} (holds the private samples: take care where it goes)")
    return "\n\n".join(paragraphs)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return a table in columns of equal width, with a rule below the first row.

    Example:
        >>> print(aligned([["defense", "words"], ["none", "100 %"]]))
        defense  words
        -------  -----
        none     100 %
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(entry.ljust(width) for entry, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _notes(summary: Summary) -> Iterator[str]:
    """Yield one line for each thing that the table's reader has to know."""
    batch_size = summary.audit.settings["batch_size"]
    yield f"{summary.samples} {summary.main_score.sample}s in messages of {batch_size}; brackets:"
    yield "95 % intervals."
    for count, what in (
        (len(summary.refusals), "do not apply here"),
        (len(summary.crashes), "crashed; the same command tries them again"),
    ):
        if count:
            yield f"{count} of the attacks {what}: table.md says why."
    yield "table.md explains each column and adds estimators, labels and membership inference."
