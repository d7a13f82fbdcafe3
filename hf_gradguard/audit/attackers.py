"""Attackers who know the defense: which settings they change, and what they are granted."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..attacks import Attack, GradientMatching
from ..attacks.candidates.attack import Candidates
from ..defenses import Defense
from ..gradient_map.domain import IMAGE
from ..randomness import Stream
from .cells import Cell
from .client import Attacker, Modality, Upload, in_unit_of_gradients, training_of
from .report.verdicts import INFORMED
from .settings import AuditSettings

T = TypeVar("T")

_ORDER = 5  # a stream of random numbers, beside a client's


def attackers(
    label: str, attack: Attack, defense: Defense, terms: AuditSettings
) -> dict[str, Attacker]:
    """The attackers with one attack under one defense, by the labels of their cells.

    The one who does not know the defense, and if that makes a difference the one who does. An
    attack that reads mechanisms (`candidates`) gains nothing by not knowing one: where it may, it
    does.
    """
    known = in_unit_of_gradients(training_of(terms), defense.informed())
    granted = frozenset({"noise_variance"} if terms.noise_known else ())
    if "mechanism" in attack.informed_by:
        grants = granted | ({"mechanism"} if terms.adaptive else frozenset())
        return {label: Attacker(attack, grants, knows=terms.adaptive)}
    settings = _settings_of(attack, known)
    wanted = frozenset(known) & attack.informed_by
    changed = {name: value for name, value in settings.items() if is_default(attack, name)}
    changed = {name: v for name, v in changed.items() if getattr(attack, name) != v}
    has = not known or bool(settings or wanted)
    plain = has and not changed and wanted <= granted
    found = {label: Attacker(attack, granted, knows=plain)}
    if terms.adaptive and has and not plain:
        informed = replace(attack, **changed) if changed else attack  # type: ignore[type-var]
        found[label + INFORMED] = Attacker(informed, granted | wanted, knows=True)
    return found


def with_list(
    attacks: Mapping[str, Attack], listed: list[Any] | None, modality: Modality, seed: int
) -> dict[str, Attack]:
    """The attacks, with `candidates` among them if there is a list for it. One that has a list of
    its own keeps it, as clients have it. Every list is shuffled.

    Args:
        attacks: By label.
        listed: As `modality.candidates` makes it.
        modality: What the inputs ask for.
        seed: Of the order.

    Raises:
        ValueError: If an attack's own list is none for this model.
    """
    found = {
        label: _with_own(one, modality, seed) if isinstance(one, Candidates) else one
        for label, one in attacks.items()
    }
    if listed is None:
        return found
    theirs = _shuffled(listed, seed)
    for label, one in found.items():
        if isinstance(one, Candidates) and one.candidates is None:
            found[label] = replace(one, candidates=theirs)
    if not any(isinstance(one, Candidates) for one in found.values()):
        found[Candidates.name] = Candidates(candidates=theirs)
    return found


def _with_own(attack: Candidates, modality: Modality, seed: int) -> Candidates:
    listed, labels = attack.candidates, attack.labels
    if listed is None or attack.places or isinstance(listed, str | Mapping):
        return attack
    if labels is not None and len(labels) != len(listed):
        raise ValueError(f"There are {len(labels)} labels for {len(listed)} candidates.")
    return replace(
        attack,
        candidates=_shuffled(modality.prepared(listed), seed),
        labels=None if labels is None else _shuffled(list(labels), seed),
    )


def _shuffled(listed: list[T], seed: int) -> list[T]:
    """The place in the list says nothing: who scores alike is ranked by it."""
    order = Stream.from_seeds(seed, _ORDER).uniform((len(listed),)).argsort().tolist()
    return [listed[at] for at in order]


def _settings_of(attack: Attack, known: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(attack) if field.init}  # type: ignore[arg-type]
    return {name: value for name, value in known.items() if name in names}


def is_default(attack: Attack, name: str) -> bool:
    """What a user has set is theirs."""
    default = next(f.default for f in fields(attack) if f.name == name)  # type: ignore[arg-type]
    return bool(getattr(attack, name) == default)


WEIGHTS = (1e-5, 1e-4, 1e-3, 1e-2, 3e-2, 1e-1)
"""Weights of total variation that are tried."""

MESSAGES = 2
"""Messages of its own that an attacker tries them on."""

SMOOTHED = (
    "Who is said to know the defense smooths images by the weight that showed most of images of "
    "its own behind that defense: of the list, in no audited message."
)


def smooths(attack: Attack) -> bool:
    """Whether an attack smooths images, by a weight that nobody has set.

    Example:
        >>> from hf_gradguard.attacks import make_attack
        >>> smooths(make_attack("inverting_gradients")), smooths(make_attack("dlg"))
        (True, False)
    """
    return (
        isinstance(attack, GradientMatching)
        and attack.total_variation > 0
        and is_default(attack, "total_variation")
    )


def own_batches(
    listed: Sequence[Any] | None, batches: Sequence[dict[str, Tensor]], modality: Modality
) -> list[dict[str, Tensor]]:
    """Batches like the audited ones, of images that an attacker has a list of and that are in none
    of those, with classes drawn one after the other; none if there are not enough.

    Args:
        listed: Pixels `(C, H, W)` each.
        batches: The audited ones.
        modality: Of the audit.
    """
    if IMAGE.key not in batches[0] or modality.labels != "class" or listed is None:
        return []
    inside = {at for batch in batches for at in modality.among(listed, batch)}
    images = [row for at, row in enumerate(listed) if at not in inside]
    labels = batches[0]["labels"]
    classes = int(modality.model.config.num_labels)  # type: ignore[union-attr, arg-type]
    found = []
    for first in range(0, min(len(images), MESSAGES * len(labels)), len(labels)):
        pixels = images[first : first + len(labels)]
        if len(pixels) == len(labels):
            drawn = torch.arange(first, first + len(labels), device=labels.device) % classes
            stacked = torch.stack(pixels).to(batches[0][IMAGE.key])
            found.append({IMAGE.key: stacked, "labels": drawn.to(labels.dtype)})
    return found if len(found) == MESSAGES else []


def chosen_weight(attacker: Attacker, uploads: Sequence[Upload], modality: Modality) -> Cell:
    """The weight of total variation that shows most of an attacker's own images, or why there is
    none. It tries with one start each.

    Args:
        attacker: Whose attack smooths.
        uploads: What the defense makes of its own messages.
        modality: Of the audit.
    """
    best: tuple[float, float] | None = None
    for weight in WEIGHTS:
        attack: Any = attacker.attack
        tried = replace(attacker, attack=replace(attack, total_variation=weight, restarts=1))
        cells = [upload.attacked(tried, modality) for upload in uploads]
        for cell in cells:
            if "scores" not in cell:
                return {why: cell[why] for why in ("reason", "crash") if why in cell}
        shown = statistics.mean(value for cell in cells for value in cell["scores"]["psnr"])
        if best is None or shown > best[0]:
            best = shown, weight
    assert best is not None
    return {"total_variation": best[1], "psnr": best[0]}
