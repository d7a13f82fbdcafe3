"""Originals beside their reconstructions, with the words that were recovered marked."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..gradient_map.domain import IMAGE, TEXT
from .result import Audit


def samples(result: Audit, lines: list[tuple[str, str]], score: str) -> list[dict[str, Any]]:
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
