"""What an audit found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Audit:
    """What an audit found. `asdict` of it is `audit.json`.

    Args:
        settings: Model, data, threat model, seeds, versions: all that it takes to repeat it.
        defenses: `{label: settings}`.
        attacks: `{label: settings}`.
        messages: The originals, one entry per message that was attacked. Private data.
        chance: Scores of guesses without a gradient: for each of these messages
            `{score: one number per sample}`.
        shared: One entry per message, repeat and defense: `relative_error` ‖shared - g‖/‖g‖ and
            `cosine` of what was shared, `figures`, one number per sample for each estimator
            (`None` is infinite), `no_figures`, the reasons of the others, and `labels`, those that
            were read off it, or `no_labels`, why none were; or `reason`, if the defense refused; or
            `crash`, if it failed.
        cells: One entry per message, repeat, defense and attack: `scores` and the reconstruction;
            or `reason`, if the attack is not applicable; or `crash`, if it failed.

    Example:
        >>> from hf_gradguard.audit import audit
        >>> result = audit(model, tokenizer, samples, "pruning", "span", output="runs/audit")
        >>> [cell["defense"] for cell in result.cells]
        ['none', 'pruning', 'pruning', 'none', 'pruning', 'pruning']
    """

    settings: dict[str, Any]
    defenses: dict[str, dict[str, Any]]
    attacks: dict[str, dict[str, Any]]
    messages: list[dict[str, Any]]
    chance: list[dict[str, list[float]]]
    shared: list[dict[str, Any]]
    cells: list[dict[str, Any]]
