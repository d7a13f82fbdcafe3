"""The attackers of an audit: what they see, know of the defense, and try out beforehand."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..attacks import Attack, GradientMatching
from ..attacks.candidates.membership import Candidates
from ..attacks.learned_inversion import LearnedInversion
from ..attacks.likelihood_search.search import LikelihoodSearch
from ..defenses import Defense
from ..gradient_map.domain import IMAGE, TEXT
from ..randomness import Stream
from .cells import Cell
from .client import Attacker, Modality, Upload, in_gradient_unit, training_of
from .report.verdicts import INFORMED, MAIN_SCORES
from .settings import AuditSettings

_ORDER = 5  # a stream of random numbers, beside a client's

WEIGHTS = (1e-5, 1e-4, 1e-3, 1e-2, 3e-2, 1e-1)
"""The weights of total variation that an attacker tries on its own images."""

TRIAL_MESSAGES = 2
"""The number of its own messages that an attacker tries them on."""

SMOOTHING = (
    "An attacker that knows the defense smooths images by the weight that recovered most of images "
    "of its own behind that defense: candidates that are in no audited message."
)


def attackers(
    label: str, attack: Attack, defense: Defense, settings: AuditSettings
) -> dict[str, Attacker]:
    """Return the attackers with one attack under one defense, by the labels of their cells.

    The first does not know the defense. If that makes a difference, a second one does. An attack
    that reads mechanisms (`candidates`) gains nothing by ignoring one: if it may know the
    mechanism, it does.
    """
    # A defense names bounds in its message's unit: of an update, that is the weights' change.
    informed_settings = in_gradient_unit(training_of(settings), defense.informed())
    granted = frozenset({"noise_variance"} if settings.noise_known else ())
    if isinstance(attack, LearnedInversion) and attack.defense is None:
        # It learns behind the defense or, where it does not know that, behind none.
        attack = replace(attack, defense=defense if settings.adaptive else "none")
        return {label: Attacker(attack, granted, knows_defense=settings.adaptive)}
    if "mechanism" in attack.informed_by:
        grants = granted | ({"mechanism"} if settings.adaptive else frozenset())
        return {label: Attacker(attack, grants, knows_defense=settings.adaptive)}
    names = {field.name for field in fields(attack) if field.init}  # type: ignore[arg-type]
    applicable = {name: value for name, value in informed_settings.items() if name in names}
    # What is granted is a field of the observation, and no setting of the attack.
    needs = frozenset(informed_settings) & attack.informed_by
    defaults = {n: value for n, value in applicable.items() if is_default(attack, n)}
    changed = {n: value for n, value in defaults.items() if getattr(attack, n) != value}
    # A defense with nothing to know is known to everybody. One that names settings that this attack
    # lacks is known to none of its attackers.
    can_adapt = not informed_settings or bool(applicable or needs)
    knows_already = can_adapt and not changed and needs <= granted
    by_label = {label: Attacker(attack, granted, knows_defense=knows_already)}
    if settings.adaptive and can_adapt and not knows_already:
        # Without changed settings the same attack differs by what it is granted alone.
        informed = replace(attack, **changed) if changed else attack  # type: ignore[type-var]
        by_label[label + INFORMED] = Attacker(informed, granted | needs, knows_defense=True)
    return by_label


def is_default(attack: Attack, name: str) -> bool:
    """Return whether an attack's setting has its default; those of the user are never changed."""
    default = next(f.default for f in fields(attack) if f.name == name)  # type: ignore[arg-type]
    return bool(getattr(attack, name) == default)


# --- membership inference


def with_candidates(
    attacks: Mapping[str, Attack], candidates: list[Any] | None, seed: int
) -> dict[str, Attack]:
    """Return the attacks, with `candidates` among them if there is a list for it.

    Args:
        attacks: Attacks by label.
        candidates: Candidates as `modality.candidates` makes them.
        seed: The seed of their order: equal scores are ranked by place, so the place must say
            nothing.

    Raises:
        ValueError: If an attack brings a list of its own, which may not have the form that clients'
            inputs have.
    """
    listed = dict(attacks)
    if candidates is not None:
        order = Stream.from_seeds(seed, _ORDER).uniform((len(candidates),)).argsort().tolist()
        candidates = [candidates[index] for index in order]
        if not any(isinstance(attack, Candidates) for attack in attacks.values()):
            listed[Candidates.name] = Candidates()
    for label, attack in listed.items():
        if not isinstance(attack, Candidates) or attack.places:
            continue
        if attack.candidates is not None:
            raise ValueError(f"Give the candidates of {label} to audit(candidates=...).")
        if candidates is not None:
            listed[label] = replace(attack, candidates=candidates)
    return listed


def with_public_texts(
    attacks: Mapping[str, Attack], candidates: Sequence[Any] | None,
    batches: Sequence[dict[str, Tensor]], modality: Modality,
) -> dict[str, Attack]:  # fmt: skip
    """Return the attacks, with public texts for those that search with some and have none.

    The public texts are candidates that are in no audited batch.

    Args:
        attacks: Attacks by label.
        candidates: Candidates as `modality.candidates` makes them.
        batches: The audited batches.
        modality: The modality of the audit.
    """
    listed = dict(attacks)
    searches = {
        label: attack
        for label, attack in attacks.items()
        if isinstance(attack, LikelihoodSearch | LearnedInversion) and not len(attack.public_texts)
    }
    if not searches or candidates is None or TEXT.key not in batches[0]:
        return listed
    audited = {index for batch in batches for index in modality.members_among(candidates, batch)}
    rows = [row for index, row in enumerate(candidates) if index not in audited]
    public = [row[TEXT.key] if isinstance(row, Mapping) else row for row in rows]
    for label, attack in searches.items():
        listed[label] = replace(attack, public_texts=public)
    return listed


def with_seconds(attacks: Mapping[str, Attack], seconds: float | None) -> dict[str, Attack]:
    """Return the attacks, each with a time per message if it takes one and the user set none.

    Args:
        attacks: Attacks by label.
        seconds: The time; `None` changes nothing.
    """
    listed = dict(attacks)
    for label, attack in attacks.items() if seconds is not None else ():
        names = {field.name for field in fields(attack) if field.init}  # type: ignore[arg-type]
        if "seconds" in names and is_default(attack, "seconds"):
            listed[label] = replace(attack, seconds=seconds)  # type: ignore[type-var]
    return listed


# --- smoothing of images


def smooths(attack: Attack) -> bool:
    """Return whether an attack smooths images, by a weight that the user has not set.

    Example:
        >>> from hf_gradguard.attacks import make_attack
        >>> smooths(make_attack("inverting_gradients")), smooths(make_attack("dlg"))
        (True, False)
    """
    if not isinstance(attack, GradientMatching):
        return False
    return attack.total_variation > 0 and is_default(attack, "total_variation")


def attacker_batches(
    candidates: Sequence[Any] | None, batches: Sequence[dict[str, Tensor]], modality: Modality
) -> list[dict[str, Tensor]]:
    """Return batches like the audited ones, made of candidates that are in none of those.

    Classes are given in turn. The list is empty if there are too few candidates.

    Args:
        candidates: Pixels `(C, H, W)` each.
        batches: The audited batches.
        modality: The modality of the audit.
    """
    # Texts are not smoothed, and of labels only classes can be made up.
    if IMAGE.key not in batches[0] or modality.labels != "class" or candidates is None:
        return []
    audited = {index for batch in batches for index in modality.members_among(candidates, batch)}
    images = [pixels for index, pixels in enumerate(candidates) if index not in audited]
    labels = batches[0]["labels"]
    size, classes = len(labels), int(modality.model.config.num_labels)  # type: ignore[union-attr, arg-type]
    if len(images) < TRIAL_MESSAGES * size:
        return []
    return [
        {
            IMAGE.key: torch.stack(images[start : start + size]).to(batches[0][IMAGE.key]),
            "labels": (torch.arange(start, start + size) % classes).to(labels),
        }
        for start in range(0, TRIAL_MESSAGES * size, size)
    ]


def choose_weight(attacker: Attacker, uploads: Sequence[Upload], modality: Modality) -> Cell:
    """Return the weight of total variation that recovers most of an attacker's own images.

    If there is none, the cell has the reason. Each weight is tried with one start.

    Args:
        attacker: An attacker whose attack smooths.
        uploads: What the defense makes of the attacker's own messages.
        modality: The modality of the audit.
    """
    mean_psnr: dict[float, float] = {}
    for weight in WEIGHTS:
        attack: Any = attacker.attack
        # One start is enough to compare weights, and the audit itself uses all of them.
        trial = replace(attacker, attack=replace(attack, total_variation=weight, restarts=1))
        cells = [upload.attack(trial, modality) for upload in uploads]
        for cell in cells:
            if "scores" not in cell:
                # What is refused for its own messages is refused for the audited ones too.
                return {why: cell[why] for why in ("reason", "crash") if why in cell}
        mean_psnr[weight] = statistics.mean(x for cell in cells for x in cell["scores"]["psnr"])
    best = max(mean_psnr, key=lambda weight: mean_psnr[weight])
    return {"total_variation": best, "psnr": mean_psnr[best]}


# --- the threat model


def threat_model(model: nn.Module, modality: Modality, settings: AuditSettings) -> list[str]:
    """Return what the attacker sees and knows, one sentence each."""
    score, rows = MAIN_SCORES[modality.settings()["kind"]], settings.rows
    samples = f"one {score.sample}" if rows == 1 else f"{rows} {score.sample}s"
    sentences = [
        f"The server knows the model and follows the protocol. It sees {_shared(settings)} of "
        f"{samples} at a time, as the defense lets it through, and tries to reconstruct the data.",
        *modality.threat_model(),
    ]
    if settings.accumulation > 1:
        count = settings.accumulation
        sentences.append(f"The client averages {count} batches, protected one by one, first.")
    # Labels that are made of the text would give it away, so no setting grants them.
    if not modality.can_grant:
        sentences.append("The labels are made of the texts themselves, so they are not granted.")
    elif settings.labels_known:
        sentences.append("It knows the labels.")
    else:
        sentences.append("It does not know the labels: attacks have to recover them.")
    if settings.noise_known:
        sentences.append("It knows the covariance of the noise that a defense adds.")
    else:
        unless = ", unless it is said to know the defense" if settings.adaptive else ""
        sentences.append(f"It does not know how a defense's noise was shaped{unless}.")
    if model.training:
        sentences.append("The model ran in training mode: dropout adds noise of its own.")
    else:
        sentences.append("The model ran in eval mode, without dropout: the attacker's best case.")
    if (seconds := settings.attack_seconds) is not None:
        sentences.append(f"Each attack has {seconds:g} seconds a message: more time may find more.")
    return [
        *sentences,
        "Every message is attacked by itself. A server that sees the same data again knows more.",
    ]


def _shared(settings: AuditSettings) -> str:
    if not settings.local_steps:
        return "the gradient"
    return (
        f"the change of the weights after {settings.local_steps} local steps (batches of "
        f"{settings.batch_size}, {settings.optimizer}, learning rate {settings.learning_rate:g}, "
        "in an order that it knows)"
    )
