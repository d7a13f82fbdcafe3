"""What a server reconstructs of a sentence, from the gradient that a client shares of it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from hf_gradguard.audit import audit, summarize
from hf_gradguard.demo import DIRECTIONS, guess_sentence, packaged_encoder, sentences
from hf_gradguard.heads import PrivateHead, private_head
from hf_gradguard.models import classifier_head, load_model

PRICES: dict[str, list[float]] = json.loads(
    Path(__file__).with_name("prices.json").read_text(encoding="utf-8")
)
"""By label of a defense, the points of accuracy that MiniLM loses on SST-2 with the 95 % interval:
docs/findings/text.md.
"""

AT_PLACE, ELSEWHERE, WRONG = "at its place", "elsewhere in the sentence", "not in the sentence"

PAIRS, LONGEST = 2, 200
LISTED = sentences("dev")[:19]
"""Sentences among which a server looks for the one that is shared, behind a head by proof."""

Words = list[tuple[str, str | None]]


@dataclass(frozen=True)
class Leak:
    """What was reconstructed of one sentence.

    Args:
        words: By label of a defense, each reconstructed word and whether it is right.
        recovered: By label, the share of the sentence's words (token F1) that were reconstructed.
        distinguished: By label, of how many pairs of sentences that differ in one word the message
            tells which one it is of, and the number of pairs.
        guess: The listed sentence that a server takes it for, behind a head by proof.
    """

    words: dict[str, Words]
    recovered: dict[str, float]
    distinguished: dict[str, tuple[float, int]]
    guess: str


def choices() -> dict[str, list[str]]:
    """Each defense with the strengths that have a price, in their order."""
    by_name: dict[str, list[str]] = {}
    for label in sorted(PRICES, key=lambda label: float(label.partition("=")[2])):
        name, _, strength = label.partition(":")
        by_name.setdefault(name, []).append(strength)
    return by_name


def price(label: str) -> str:
    """What a defense costs, in a sentence."""
    lost, low, high = PRICES[label]
    return (
        f"{lost:.1f} points of accuracy, 95 % interval [{low:.1f}, {high:.1f}] "
        "(MiniLM on SST-2, 83.6 % unprotected)"
    )


@cache
def encoder() -> tuple[torch.nn.Module, Any]:
    """MiniLM with a new head for two classes, and its tokenizer."""
    torch.manual_seed(0)
    return load_model(packaged_encoder(), "text-classification", classifier_head(["bad", "good"]))


@cache
def head() -> PrivateHead:
    """A head on MiniLM that is not trained yet, with directions of public sentences."""
    name = packaged_encoder()
    return private_head(name, [text for text, _ in sentences("train")], 2, directions=DIRECTIONS)


def reconstruct(sentence: str, defense: str, label: int = 1) -> Leak:
    """Attack the gradient of one sentence, unprotected and behind a defense.

    Args:
        sentence: Of at most 200 characters.
        defense: `"name:setting=value"`, as for `gradguard audit`.
        label: Its class, 0 or 1, which the server is told.

    Raises:
        ValueError: If there is no sentence, or it is too long.

    Example:
        >>> leak = reconstruct("the pizza was tasty.", "gaussian_noise:relative_scale=20")
        >>> leak.recovered["none"]
        1.0
    """
    sentence = sentence.strip()
    if not 1 <= len(sentence) <= LONGEST:
        raise ValueError(f"Write a sentence of 1 to {LONGEST} characters.")
    model, tokenizer = encoder()
    with tempfile.TemporaryDirectory() as folder:
        result = audit(
            model, tokenizer, [(sentence, label)], defense, "span", word_pairs=PAIRS,
            estimators="none", output=folder,
        )  # fmt: skip
    summary = summarize(result)
    (sent,) = result.messages[0]["ids"]
    words, recovered = dict[str, Words](), dict[str, float]()
    for cell in result.cells:  # of attackers that know the defense and that do not, the better one
        if "scores" not in cell:
            raise ValueError(cell.get("reason") or cell["crash"])
        name, (f1,) = cell["defense"], cell["scores"]["token_f1"]
        if f1 >= recovered.get(name, 0.0):
            words[name], recovered[name] = list(_judged(tokenizer, cell["ids"][0], sent)), f1
    pairs = {name: found for name, found in summary.distinguishability.items() if found}
    distinguished = {name: (found.correct, found.pairs) for name, found in pairs.items()}
    guess = guess_sentence(head(), (sentence, label), [*LISTED, (sentence, label)])
    return Leak(words, recovered, distinguished, guess)


def _judged(tokenizer: Any, ids: list[int], sent: list[int]) -> Iterator[tuple[str, str | None]]:
    """Each token but the special ones, with what the reconstruction got right of it."""
    for place, token in enumerate(ids):
        if token in tokenizer.all_special_ids:
            continue
        is_at_place = place < len(sent) and sent[place] == token
        verdict = AT_PLACE if is_at_place else ELSEWHERE if token in sent else WRONG
        yield tokenizer.convert_ids_to_tokens(token).removeprefix("##"), verdict
