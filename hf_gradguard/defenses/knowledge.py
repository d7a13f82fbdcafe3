"""What attackers who know a defense know: the law of its messages, and how they set their attacks.

One table for the built-in defenses. Those of other packages override `Defense.law` and
`Defense.informed`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..gradient_map.law import Fitted, Law
from .message import Message

if TYPE_CHECKING:
    from .base import Defense


def law_of(defense: Defense, message: Message) -> Law | None:
    """How a defense's messages come from gradients; `None` if nobody could follow it.

    Gaussian noise's covariance and the transmitted entries are the message's own facts. The rest is
    from the settings, and from what the message shows.
    """
    make: Callable[[Any, Message], Law | None] = _LAWS.get(defense.name, _by_facts)
    law = make(defense, message)
    if message.carries:
        fitted = None if law is None else law.fitted
        law = Law(fitted=fitted, left_out=True)  # whatever else was done
    if law is None or message.transmitted is None:
        return law
    return replace(law, kept=_selection(defense))


def informed_settings(defense: Defense) -> dict[str, Any]:
    """Settings that attacks which have them take against a defense, and what is to be granted them:
    `noise_variance`, or `law` alone where nothing else would do.
    """
    return dict(_SETTINGS.get(defense.name, lambda _: {})(defense))


def _by_facts(defense: Any, message: Message) -> Law | None:
    if message.noise is not None and message.noise.added is not None:
        return Law(noise="gaussian", variance=message.noise.added)
    if getattr(defense, "error_feedback", False):  # nothing was left out before the first message
        return Law() if replace(defense, error_feedback=False).exact else None
    return Law() if message.exact else None


def _clipped(defense: Any, message: Message) -> Law | None:
    law = _by_facts(defense, message)
    return None if law is None else replace(law, **_clip(defense))


def _clip(defense: Any) -> dict[str, Any]:
    by_norm = getattr(defense, "clip_by", "coordinate") == "norm"
    return {"clip_norm" if by_norm else "clip_coordinate": defense.clip}


def _laplace(defense: Any, message: Message) -> Law | None:
    """Of relative noise, y itself tells its strength: E ‖y‖² = ‖g‖² (1 + r²)."""
    masks = message.transmitted
    total = sum(t.numel() for t in message.values())
    count = total if masks is None else sum(int(mask.sum()) for mask in masks.values())
    if defense.scale is not None:
        variance = defense.scale**2 * total / max(count, 1)
    elif defense.relative_scale is not None:
        share = defense.relative_scale**2 / (1 + defense.relative_scale**2)
        power = sum(float(t.double().square().sum()) for t in message.values())
        variance = share * power / max(count, 1)
    else:
        return None
    return Law(noise="laplace", variance=variance) if variance else Law()


def _rounded(defense: Any, _message: Message) -> Law | None:
    if defense.sign_only:
        return Law(rounding="sign")
    how: Any = "stochastic" if defense.stochastic else "nearest"
    return Law(rounding=how, levels=2**defense.bits)


def _fitted(defense: Any, _message: Message) -> Law | None:
    """Of samples that stay as they were drawn. How far others move depends on the gradient."""
    if defense.objective != "cosine" or defense.iterations:
        return None
    return Law(fitted=Fitted(defense.samples, defense.factors, defense.special_ids))


def _chained(defense: Any, message: Message) -> Law | None:
    """Of exact entries the second defense's. Noise that something came after has other facts."""
    if defense.first.exact:
        law: Law | None = defense.second.law(message)
        return law
    return None if message.noise is None else defense.first.law(message)


def _selection(defense: Any) -> Any:
    """By which rule entries were left out: the first that did so."""
    if defense.name == "chain":
        return _selection(defense.first)
    return "largest" if defense.name == "pruning" else "chosen"


_LAWS: dict[str, Callable[[Any, Message], Law | None]] = {
    "laplace_noise": _laplace,
    "dp_sgd": _clipped,
    "optimal_dp_sgd": _clipped,
    "quantization": _rounded,
    "refiner": _fitted,
    "chain": _chained,
}


def _shaped(_defense: Any) -> dict[str, Any]:
    return {"noise_variance": True}


_MATCH_KEPT = {"match_nonzero": True, "complete": True}
_SETTINGS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "pruning": lambda _: _MATCH_KEPT,
    "optimal_pruning": lambda _: _MATCH_KEPT,
    "soteria": lambda _: {"match_nonzero": True},
    "dp_sgd": _clip,
    "optimal_noise": _shaped,
    "optimal_dp_sgd": lambda defense: _shaped(defense) | _clip(defense),
    "quantization": lambda _: {"law": True},  # no setting matches cells
    "refiner": lambda _: {"restarts": 4},  # it hides where it started from
    "chain": lambda both: both.first.informed() | both.second.informed(),
}
