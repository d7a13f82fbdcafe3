"""What an attacker finds out on images of its own behind the same defense: how much to smooth."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..attacks import Attack, GradientMatching
from ..gradient_map.domain import IMAGE
from .adaptive import Attacker, is_default
from .client import Upload

if TYPE_CHECKING:
    from .cells import Cell
    from .modality import Modality

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
