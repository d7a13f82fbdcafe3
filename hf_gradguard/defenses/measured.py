"""What our own attacks recovered behind a defense at its strength, for the log and the model card.

Figures are of the ends of trainings: MiniLM on SST-2 and a small convolutional network on CIFAR-10.
They bound what attackers find from below, there, and say nothing of other models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .base import Defense


class Recovered(NamedTuple):
    """What was recovered at one strength; `None` where that was not measured.

    Args:
        words: Share of a single sentence's words, by the attack span.
        text_members: Share of the members of messages of 16 sentences that a candidate-set attacker
            finds, TPR at 1 % FPR.
        decibels: PSNR of Inverting Gradients' image. Undefended 30, a gray image 12.
        image_members: As `text_members`, of images.
        searched_words: As `words`, by `likelihood_search`, at the start of training, of 20
            sentences; behind noise of five times of five.
    """

    words: float | None = None
    text_members: float | None = None
    decibels: float | None = None
    image_members: float | None = None
    searched_words: float | None = None

    def of(self, kind: str | None) -> Recovered:
        """What concerns texts alone, or images (`"text"`, `"image"`)."""
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
UNIFORM_NOISE = {  # by relative_scale
    0.0: UNDEFENDED,
    1.0: Recovered(0.76, 0.64, 20.0, 1.0),
    5.0: Recovered(0.50, 0.79, 14.4, 0.95, 0.70),
    10.0: Recovered(0.21, 0.79),
    20.0: Recovered(0.00, 0.81, 12.1, 0.40, 0.66),
    50.0: Recovered(0.00, 0.74),
    100.0: Recovered(0.00, 0.71, 12.1, 0.08),
}
OPTIMAL_NOISE = {
    0.0: UNDEFENDED,
    1.0: Recovered(0.85, 0.82, 20.4, 1.0),
    5.0: Recovered(0.50, 0.77, 14.3, 0.97),
    10.0: Recovered(0.31, 0.81),
    20.0: Recovered(0.00, 0.81, 12.2, 0.54),
    50.0: Recovered(0.00, 0.80),
    100.0: Recovered(0.00, 0.69, 12.1, 0.06),
}
OWN_SHAPE = {0.0: UNDEFENDED, 5.0: Recovered(0.45, 0.72), 20.0: Recovered(0.03, 0.77)}
PRUNING = {  # by ratio
    0.0: UNDEFENDED,
    0.5: Recovered(0.99, 1.0, 27.3, 1.0),
    0.9: Recovered(0.91, 1.0, 23.5, 1.0),
    0.99: Recovered(0.48, 1.0, 15.8, 1.0),
    0.999: Recovered(0.07, 1.0, 12.4, 0.74),
}
PRUNING_FED_BACK = {
    0.0: UNDEFENDED,
    0.99: Recovered(0.26, 0.56, 16.0, 0.47),
    0.999: Recovered(0.13, 0.56),
}
OPTIMAL_PRUNING = {
    0.0: UNDEFENDED,
    0.5: Recovered(0.66, 1.0, 31.9, 1.0),
    0.9: Recovered(0.04, 1.0, 22.8, 1.0),
    0.99: Recovered(0.00, 1.0, 12.7, 1.0),
}
OPTIMAL_PRUNING_FED_BACK = {
    0.0: UNDEFENDED,
    0.9: Recovered(0.16, 0.27, 15.6, 0.47),
    0.95: Recovered(0.16, 0.12, 13.6, 0.25),
    0.97: Recovered(0.14, 0.03),
    0.99: Recovered(0.10, 0.02, 12.1, 0.03),
}
OPTIMAL_PRUNING_OF_EIGHT = {  # min_batches=8
    0.0: UNDEFENDED,
    0.9: Recovered(0.16, 0.29, 14.7, 0.62),
    0.95: Recovered(0.08, 0.10),
    0.97: Recovered(0.08, 0.06),
    0.99: Recovered(0.13, 0.00, 12.1, 0.04),
}
BITS = {  # by -bits, as more of them protect less
    -32.0: UNDEFENDED,
    -8.0: Recovered(1.0, 0.96, 29.0, 1.0),
    -4.0: Recovered(0.91, 0.88, 21.1, 1.0),
    -2.0: Recovered(0.70, 0.73, 15.0, 0.84),
    -1.0: Recovered(0.73, 0.62, 12.7, 0.38),
}
SKETCH = {  # by -samples
    -256.0: Recovered(None, None, None, 0.72),
    -64.0: Recovered(0.00, None, 13.6, 0.26),
    -16.0: Recovered(0.00, 0.22, 12.7, 0.10),
    -4.0: Recovered(0.00, 0.08, 12.3, 0.03),
}

_SHAPE = "the noise's own shape named the message's sentence (docs/findings/shapes.md)"
_NOTHING = "nothing was measured at this strength: run `gradguard audit`"
_UNPROTECTED = "every word and image came back (docs/findings/undefended_text.md)"
_LAYER = (
    "an attacker who leaves the defended layer out found 97 % of a sentence's words and more "
    "(docs/findings/attacks_text.md)"
)
_NOT_TRAINED = (
    "of samples=16, at the start, span found no word of 10 sentences that were sent alone, and 8 "
    "of them were found among 200 (docs/findings/membership.md). No training was attacked yet. Of "
    "random samples that stay "
    "(gradient_sketch) of the same number: "
)
_WEIGHTED = (
    "of α = 0.6, span found 20 % of a sentence's words, and a candidate-set attacker 3 % of the "
    "sentences in a message of 16 (docs/findings/synthetic.md); of α = 0.5 images came back at "
    "15 dB (docs/findings/refiner_images.md)"
)
_PUBLISHED_PRUNING = (
    "what is left is exact: attackers who know the defense found 99 % of a sentence's words at a "
    "ratio of 0.9 (docs/findings/attacks_text.md), and all sentences in a message "
    "(docs/findings/pruning.md)"
)
_PROVED = "every row's share is bounded by proof (docs/differential_privacy.md)"


def recovered_behind(defense: Defense, kind: str | None = None) -> str:
    """What our attacks recovered behind a defense at its strength, or at the next weaker one that
    was measured, with the page that has conditions and intervals. Empty for a defense of another
    package.

    Args:
        defense: With its settings.
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
        return _NOT_TRAINED + _at(SKETCH, "samples", -settings.samples, "synthetic.md", kind)
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
    outcome = _at(rows, "relative_scale", settings.relative_scale, "noise.md", kind)
    if name in ("laplace_noise", "dp_sgd"):  # clipping by norm keeps the direction
        outcome = f"of Gaussian noise of equal power: {outcome}"
    return f"{outcome}; {_SHAPE}" if rows is OWN_SHAPE else outcome


def _of_selection(name: str, settings: Any, kind: str | None) -> str:
    if name == "quantization":
        if settings.sign_only or settings.error_feedback:
            return _NOTHING
        return _at(BITS, "bits", -settings.bits, "pruning.md", kind)
    if name == "gradient_sketch":
        return _at(SKETCH, "samples", -(settings.samples or 4), "synthetic.md", kind)
    if settings.ratio is None:
        return _NOTHING
    rows: Rows = PRUNING if name == "pruning" else OPTIMAL_PRUNING
    page = "pruning.md"
    if settings.error_feedback:
        page, rows = "error_feedback.md", PRUNING_FED_BACK
        if name == "optimal_pruning":
            many = settings.min_batches >= 8
            rows = OPTIMAL_PRUNING_OF_EIGHT if many else OPTIMAL_PRUNING_FED_BACK
    return _at(rows, "ratio", settings.ratio, page, kind)


def _at(rows: Rows, setting: str, strength: float, page: str, kind: str | None) -> str:
    """The strongest row that is no stronger."""
    weaker = [measured for measured in rows if measured <= strength]
    if not weaker:
        return _NOTHING
    concerned = str(rows[max(weaker)].of(kind))
    if not concerned:
        return _NOTHING
    return f"at {setting}={abs(max(weaker)):g}, {concerned} (docs/findings/{page})"
