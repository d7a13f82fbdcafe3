"""Attackers who know the defense: which settings they change, and what they are granted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from ..attacks import Attack
from ..attacks.candidates.attack import Candidates
from ..defenses import Defense
from ..randomness import Stream
from .local import in_unit_of_gradients, training_of
from .modality import Modality
from .report.verdicts import INFORMED
from .settings import AuditSettings

T = TypeVar("T")

_ORDER = 5  # a stream of random numbers, beside a client's


@dataclass(frozen=True)
class Attacker:
    """An attack under one defense, as somebody would set it.

    Args:
        attack: The attack with its settings.
        grants: Fields of the observation that it is granted beyond the threat model's.
        knows: Whether it does what there is to do about the defense, or there is nothing.
    """

    attack: Attack
    grants: frozenset[str]
    knows: bool


def attackers(
    label: str, attack: Attack, defense: Defense, terms: AuditSettings
) -> dict[str, Attacker]:
    """The attackers with one attack under one defense, by the labels of their cells.

    The one who does not know the defense, and if that makes a difference the one who does. An
    attack that reads laws (`candidates`) has no use for not knowing one: where it may, it does.
    """
    known = in_unit_of_gradients(training_of(terms), defense.informed())
    granted = frozenset({"noise_variance"} if terms.noise_known else ())
    if "law" in attack.informed_by:
        grants = granted | ({"law"} if terms.adaptive else frozenset())
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
