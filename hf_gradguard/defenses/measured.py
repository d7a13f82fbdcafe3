"""Figures of what our own attacks recovered behind a defense, for the log and the model card.

They are of the ends of trainings: MiniLM on SST-2 and a small convolutional network on CIFAR-10.
They bound what attackers find from below, there, and say nothing of other models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .base import Defense


class Recovered(NamedTuple):
    """The figures of what was recovered at one strength; `None` where that was not measured.

    Args:
        words: The fraction of a single sentence's words, by the attack span.
        text_members: The fraction of the members of messages of 16 sentences that a candidate-set
            attacker finds, TPR at 1 % FPR.
        decibels: The PSNR of Inverting Gradients' image. Undefended 30, a gray image 12.
        image_members: The same as `text_members`, for images.
        searched_words: The same as `words`, by `likelihood_search`, at the start of training, of 20
            sentences; behind noise of 5× the gradient, of five.
    """

    words: float | None = None
    text_members: float | None = None
    decibels: float | None = None
    image_members: float | None = None
    searched_words: float | None = None

    def of(self, kind: str | None) -> Recovered:
        """Return the entries of one modality, `"text"` or `"image"`; `None` returns all."""
        if kind == "text":
            return self._replace(decibels=None, image_members=None)
        if kind == "image":
            return Recovered(decibels=self.decibels, image_members=self.image_members)
        return self

    def __str__(self) -> str:
        texts = (
            "the attack span found {:.0%} of a sentence's words",
            "a candidate-set attacker {:.0%} of the sentences in a message of 16",
            "Inverting Gradients found an image at {:g} dB (gray: 12)",
            "a candidate-set attacker {:.0%} of the images in a message of 16",
            "a search by likelihood {:.0%} of single sentences' words",
        )
        figures = zip(texts, self, strict=True)
        return ", ".join(text.format(figure) for text, figure in figures if figure is not None)


Rows = Mapping[float, Recovered]

UNDEFENDED = Recovered(1.0, 1.0, 30.0, 1.0)

_FIGURES: dict[str, Any] = json.loads(
    (Path(__file__).parent / "measured.json").read_text(encoding="utf-8")
)
"""Of docs/results/*.json, written by `python recipes/figures.py`."""


def _rows(family: str, sign: int = 1, weakest: float | None = 0.0) -> dict[float, Recovered]:
    """Return what was recovered behind a family of defenses, by strength.

    It grows with `sign`.
    """
    undefended = {} if weakest is None else {weakest: UNDEFENDED}
    measured = _FIGURES["strengths"][family]
    return undefended | {sign * float(key): Recovered(*found) for key, found in measured.items()}


UNIFORM_NOISE = _rows("uniform_noise")  # by relative_scale
OPTIMAL_NOISE, OWN_SHAPE = _rows("optimal_noise"), _rows("own_shape")
PRUNING, PRUNING_FED_BACK = _rows("pruning"), _rows("pruning_fed_back")  # by ratio
OPTIMAL_PRUNING = _rows("optimal_pruning")
OPTIMAL_PRUNING_FED_BACK = _rows("optimal_pruning_fed_back")
OPTIMAL_PRUNING_OF_EIGHT = _rows("optimal_pruning_of_eight")  # min_batches=8
BITS = _rows("bits", -1, -32.0)  # by -bits, as more of them protect less
SKETCH = _rows("sketch", -1, None)  # by -samples

_SENTENCES: dict[str, str] = _FIGURES["said"]
_SHAPE = "the noise's own shape named the message's sentence (docs/findings/shapes.md)"
_NOTHING = "nothing was measured at this strength: run `gradguard audit`"
_UNPROTECTED = "every word and image came back (docs/findings/attacks_text.md)"
_LAYER = (
    "an attacker who leaves the defended layer out found {soteria_words} of a sentence's words and "
    "more (docs/findings/attacks_text.md)"
).format_map(_SENTENCES)
_NOT_TRAINED = (
    "of samples=16, at the start, span found no word of 10 sentences that were sent alone, and "
    "{refiner_members} of them were found among 200 (docs/findings/membership.md). No training was "
    "attacked yet. Of random samples that stay (gradient_sketch) of the same number: "
).format_map(_SENTENCES)
_WEIGHTED = (
    "of α = 0.6, span found {weighted_words} of a sentence's words, and a candidate-set attacker "
    "{weighted_members} of the sentences in a message of 16 (docs/findings/text.md); of α = 0.5 "
    "images came back at {weighted_image} dB (docs/findings/refiner.md)"
).format_map(_SENTENCES)
_PUBLISHED_PRUNING = (
    "what is left is exact: attackers who know the defense found {published_pruning_words} of a "
    "sentence's words at a ratio of 0.9 (docs/findings/attacks_text.md), and all sentences in a "
    "message (docs/findings/text.md)"
).format_map(_SENTENCES)
_PROVED = "every row's share is bounded by proof (docs/differential_privacy.md)"


def recovered_behind(defense: Defense, kind: str | None = None) -> str:
    """Return a sentence on what our attacks recovered behind a defense at its strength.

    If its strength was not measured, it is of the next weaker one that was. The sentence names the
    page that has conditions and intervals. It is empty for a defense of another package.

    Args:
        defense: The defense with its settings.
        kind: `"text"` or `"image"`, for what concerns these alone.

    Example:
        >>> print(recovered_behind(make_defense("gaussian_noise", relative_scale=1.0)))
        at relative_scale=1, the attack span found 76% of a sentence's words, ...
    """
    settings: Any = defense
    name = defense.name.removesuffix("_published")
    if name == "none":
        return _UNPROTECTED
    if name == "soteria":
        return _LAYER
    if name == "dp_sgd" and settings.per_sample:
        return _PROVED
    if name == "refiner" and settings.objective == "weighted":
        return _WEIGHTED
    if name == "refiner":
        return _NOT_TRAINED + _at(SKETCH, "samples", -settings.samples, kind)
    if defense.name == "optimal_pruning_published":
        return _PUBLISHED_PRUNING
    if name in ("gradient_sketch", "quantization", "pruning", "optimal_pruning"):
        return _of_selection(name, settings, kind)
    if name in ("gaussian_noise", "laplace_noise", "optimal_noise", "dp_sgd", "optimal_dp_sgd"):
        return _of_noise(name, settings, kind)
    return ""


def _of_noise(name: str, settings: Any, kind: str | None) -> str:
    if settings.relative_scale is None:
        return _NOTHING
    rows: Rows = UNIFORM_NOISE
    if name.startswith("optimal"):
        rows = OWN_SHAPE if settings.shape == "own" else OPTIMAL_NOISE
    outcome = _at(rows, "relative_scale", settings.relative_scale, kind)
    if name in ("laplace_noise", "dp_sgd"):  # clipping by norm keeps the direction
        outcome = f"of Gaussian noise of equal power: {outcome}"
    return f"{outcome}; {_SHAPE}" if rows is OWN_SHAPE else outcome


def _of_selection(name: str, settings: Any, kind: str | None) -> str:
    if name == "quantization":
        if settings.sign_only or settings.error_feedback:
            return _NOTHING
        return _at(BITS, "bits", -settings.bits, kind)
    if name == "gradient_sketch":
        return _at(SKETCH, "samples", -(settings.samples or 4), kind)
    if settings.ratio is None:
        return _NOTHING
    rows: Rows = PRUNING if name == "pruning" else OPTIMAL_PRUNING
    if settings.error_feedback:
        rows = PRUNING_FED_BACK
        if name == "optimal_pruning":
            many = settings.min_batches >= 8
            rows = OPTIMAL_PRUNING_OF_EIGHT if many else OPTIMAL_PRUNING_FED_BACK
    return _at(rows, "ratio", settings.ratio, kind)


def _at(rows: Rows, setting: str, strength: float, kind: str | None) -> str:
    """The strongest row that is no stronger."""
    weaker = [measured for measured in rows if measured <= strength]
    if not weaker:
        return _NOTHING
    concerned = str(rows[max(weaker)].of(kind))
    if not concerned:
        return _NOTHING
    page = "images.md" if kind == "image" else "text.md"
    return f"at {setting}={abs(max(weaker)):g}, {concerned} (docs/findings/{page})"
