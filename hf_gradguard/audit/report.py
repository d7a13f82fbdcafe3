"""An audit as one HTML file to look at: no script, nothing from elsewhere."""

from __future__ import annotations

import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from .cells import write_text
from .estimators import FIGURES
from .run import Audit
from .table import (
    Estimate,
    Row,
    chance_row,
    correlations,
    estimator_refusals,
    figure_mean,
    markdown_table,
    points,
    refusals,
    rows,
    shared_mean,
    short_labels,
    show,
    show_coefficient,
    verdicts,
)

STANDINGS = {"open": "Leaks", "reduced": "Leaks less", "chance": "At chance", "unknown": "Unknown"}


def write_report(result: Audit, folder: str | os.PathLike[str]) -> Path:
    """Write `report.html` and `table.md`.

    Args:
        result: Of `audit`.
        folder: Where to; it has to be there.

    Returns:
        The path of `report.html`.
    """
    write_text(Path(folder) / "table.md", markdown_table(result))
    path = Path(folder) / "report.html"
    write_text(path, html_report(result))
    return path


def html_report(result: Audit) -> str:
    """The report as one self-contained HTML page."""
    environment = Environment(
        loader=PackageLoader("hf_gradguard", "audit"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    table = rows(result)
    lines = [(row.defense, row.attack) for row in table if row.scores]
    text: str = environment.get_template("report.html.jinja").render(
        settings=result.settings,
        plural="texts" if result.settings["kind"] == "text" else "images",
        threat_model=threat_model(result.settings),
        verdicts=verdicts(result),
        standings=STANDINGS,
        chart=chart(result, table),
        table=table,
        chance=chance_row(result),
        scores=list(result.chance[0]),
        show=show,
        shared=[
            (
                label,
                [shared_mean(result, label, figure) for figure in ("relative_error", "cosine")]
                + [figure_mean(result, label, figure) for figure in FIGURES],
            )
            for label in result.defenses
        ],
        figure_names=FIGURES,
        correlations=correlations(result),
        show_coefficient=show_coefficient,
        scatters=scatters(result),
        estimator_refusals=estimator_refusals(result),
        samples=_samples(result, lines),
        lines=lines,
        defenses=result.defenses,
        attacks=result.attacks,
        names=short_labels(list(result.attacks)),
        refusals=refusals(result),
    )
    return text


def threat_model(settings: dict[str, Any]) -> list[str]:
    """What the attacker sees and knows, a sentence each."""
    text = settings["kind"] == "text"
    one, many = ("text", "texts") if text else ("image", "images")
    size = settings["batch_size"]
    sentences = [
        "The server knows the model and follows the protocol. It sees the gradient of "
        f"{f'one {one}' if size == 1 else f'{size} {many}'} at a time, as the defense lets it "
        "through, and tries to read the data back out of it."
    ]
    if text and settings["share_input_embeddings"]:
        sentences.append("The token embeddings' gradient is shared too. It names the words.")
    elif text:
        sentences.append("The token embeddings' gradient, which would name the words, is withheld.")
    sentences.append(
        "It knows the labels."
        if settings["labels_known"]
        else "It does not know the labels: attacks have to recover them."
    )
    if text and settings["lengths_known"]:
        sentences.append("It knows how many tokens each text has.")
    elif text:
        sentences.append(
            f"It does not know how long the texts are: all are padded to {settings['max_length']} "
            "tokens."
        )
    sentences.append(
        "It knows the covariance of the noise that a defense adds."
        if settings["noise_known"]
        else "It does not know how a defense's noise was shaped."
    )
    sentences.append(
        "The model ran in training mode: dropout draws hide something from the attacker."
        if settings["training_mode"]
        else "The model ran in eval mode, without dropout: the attacker's best case."
    )
    sentences.append(
        "Every message is attacked by itself. A server that sees the same data again knows more."
    )
    return sentences


def marks(
    original: list[int], found: list[int], special_ids: list[int]
) -> tuple[list[str], list[str]]:
    """How each token of the original was recovered, and what each token of the reconstruction is.

    Args:
        original: Ids of the true text.
        found: Ids of the reconstruction; negative where nothing was found.
        special_ids: Count as no word.

    Returns:
        For either text one mark a token: `"exact"` at the same position, `"elsewhere"` at another
        one, each occurrence once, or `""`. Positions count as `score_text` counts them.
    """
    special = set(special_ids)
    ours, theirs = (
        [i for i, token in enumerate(ids) if token >= 0 and token not in special]
        for ids in (found, original)
    )
    aligned = len(found) == len(
        original
    )  # then a special token in the middle is a gap and not a shift
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


def chart(result: Audit, table: list[Row]) -> dict[str, Any]:
    """Where the bars, whiskers and labels of the chart of main scores go, in pixels."""
    score = result.settings["main_score"]
    guess = chance_row(result).scores[score].mean
    left, width, line = 190, 430, 22
    highest = [
        e.mean if e.high is None else e.high for row in table if (e := row.scores.get(score))
    ]
    top = 1.0 if score == "token_f1" else 10 * math.ceil(max([30.0, guess, *highest]) / 10)

    def x(value: float) -> float:
        return round(left + width * min(max(value, 0.0), top) / top, 1)

    names = short_labels(list(result.attacks))
    groups, y = [], 44
    for defense in result.defenses:
        bars = []
        for row in (row for row in table if row.defense == defense):
            y += line
            bars.append(
                {"y": y, "attack": names[row.attack], **_bar(row.scores.get(score), score, x)}
            )
        groups.append({"y": y - line * len(bars), "defense": defense, "bars": bars})
        y += line + 8
    ticks = (
        [top * k / 4 for k in range(5)]
        if score == "token_f1"
        else [float(t) for t in range(0, int(top) + 1, 10)]
    )
    return {
        "left": left,
        "height": y,
        "bottom": y - line,
        "chance": x(guess),
        "chance_label": _percent(Estimate(guess), score),
        "groups": groups,
        "ticks": [
            (x(tick), f"{100 * tick:.0f} %" if score == "token_f1" else f"{tick:.0f} dB")
            for tick in ticks
        ],
    }


def _bar(value: Estimate | None, score: str, x: Any) -> dict[str, Any]:
    if value is None:
        return {"label": "not applicable"}
    bar = {"end": x(value.mean), "label": _percent(value, score)}
    return bar if value.low is None else bar | {"low": x(value.low), "high": x(value.high)}


def _percent(value: Estimate, score: str) -> str:
    if score != "token_f1":
        return f"{show(value)} dB"
    interval = (
        ""
        if value.low is None or value.high is None
        else f" [{100 * value.low:.0f}, {100 * value.high:.0f}]"
    )
    return f"{100 * value.mean:.0f} %{interval}"


def scatters(result: Audit) -> list[dict[str, Any]]:
    """One plot for every figure and attack: an estimator's figure across, logarithmic, the attack's
    main score up.

    Pixels in a box of 400 by 250. Figures of 0 (nothing was done to the gradient) stand left of the
    axis' break.
    """
    score = result.settings["main_score"]
    names, order = short_labels(list(result.attacks)), list(result.defenses)
    plots = []
    for correlation in correlations(result):
        found = points(result, correlation.figure, correlation.attack)
        positive = [math.log10(point.figure) for point in found if point.figure > 0]
        low, high = (math.floor(min(positive)), math.ceil(max(positive))) if positive else (-1, 0)
        high = max(high, low + 1)
        zeros = len(positive) < len(found)
        left = 92 if zeros else 56
        top = (
            1.0
            if score == "token_f1"
            else 10 * math.ceil(max([30.0, *(p.scores[score] for p in found)]) / 10)
        )
        step = math.ceil((high - low) / 5)

        def x(value: float, left: int = left, low: int = low, high: int = high) -> float:
            return (
                round(left + (388 - left) * (math.log10(value) - low) / (high - low), 1)
                if value > 0
                else 62.0
            )

        def y(value: float, top: float = top) -> float:
            return round(214 - 200 * min(max(value, 0.0), top) / top, 1)

        ticks = (
            [top * k / 4 for k in range(5)]
            if score == "token_f1"
            else [10.0 * k for k in range(int(top) // 10 + 1)]
        )
        plots.append(
            {
                "title": f"{FIGURES[correlation.figure]}, {names[correlation.attack]}",
                "coefficient": show_coefficient(correlation.coefficients[score]),
                "count": correlation.points,
                "left": left,
                "zeros": zeros,
                "across": [(x(10.0**power), power) for power in range(low, high + 1, step)],
                "up": [
                    (y(tick), f"{100 * tick:.0f} %" if score == "token_f1" else f"{tick:.0f} dB")
                    for tick in ticks
                ],
                "points": [
                    {
                        "x": x(point.figure),
                        "y": y(point.scores[score]),
                        "kind": order.index(point.defense) % KINDS,
                        "title": f"{point.defense}: {point.figure:.3g}, {_percent(Estimate(point.scores[score]), score)}",
                    }
                    for point in found
                ],
            }
        )
    return plots


KINDS = 8
"""Marks that the template has: four shapes in eight colors, one a defense, from the first again
after the last.
"""


def _samples(result: Audit, lines: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """One entry a sample: its original, and for every `(defense, attack)` the first repeat's
    reconstruction.
    """
    found = {(c["message"], c["defense"], c["attack"]): c for c in result.cells if c["repeat"] == 0}
    score = result.settings["main_score"]
    samples: list[dict[str, Any]] = []
    for number, message in enumerate(result.messages):
        for place, label in enumerate(message["labels"]):
            entries = []
            for defense, attack in lines:
                cell = found[number, defense, attack]
                entry: dict[str, Any] = {
                    "defense": defense,
                    "attack": attack,
                    "reason": cell.get("reason"),
                }
                if "scores" in cell:
                    entry |= {
                        "score": cell["scores"][score][place],
                        **_shown(result, message, cell, place),
                    }
                entries.append(entry)
            title = f"Sample {len(samples) + 1}" + (
                f" (message {number + 1})" if len(message["labels"]) > 1 else ""
            )
            samples.append(
                {
                    "title": title,
                    "label": label,
                    "entries": entries,
                    "image": message["images"][place] if "images" in message else None,
                }
            )
    return samples


def _shown(
    result: Audit, message: dict[str, Any], cell: dict[str, Any], place: int
) -> dict[str, Any]:
    if result.settings["kind"] == "image":
        return {"image": cell["images"][place]}
    original, found = message["ids"][place], cell["ids"][place]
    ours, theirs = marks(original, found, result.settings["special_ids"])
    return {
        "original": _words(message["pieces"][place], ours),
        "found": _words(cell["pieces"][place], theirs),
    }


def _words(pieces: list[str], kinds: list[str]) -> list[tuple[str, str, str]]:
    """`(blank before it, text, mark)` a token; the parts of a word that are marked alike are
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
