"""What whoever keeps a client's uploads has of one batch behind error feedback.

There an entry waits until it is sent, and is then the sum of all gradients since it was sent last.
From the uploads anybody knows of how many: of the batch's own alone where it was sent the time
before. And he can wait: what the batch's own upload left out comes with later ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from ..gradient_map import Tensors
from .observation import Observation


def gathered(uploads: Iterable[Observation], at: int = 0) -> Observation:
    """One batch's upload with what later ones bring of it, each entry with the number of batches
    that it is a sum of, in its mechanism.

    Args:
        uploads: One client's, in order, behind error feedback, with mechanisms, at models that
            differ little. Earlier ones tell how many batches an entry holds, later ones what was
            left out. What a first one's mechanism says of the batches before it is taken over.
        at: Which of them is attacked.

    Returns:
        The observation at that place. Entries that no upload brings are 0, and count the batches
        that the next one would bring. Fitted messages are `later_messages` of its mechanism.

    Raises:
        ValueError: If there is none at that place, or one has no mechanism or other parameters.

    Example:
        >>> from hf_gradguard.defenses.mechanism import Mechanism
        >>> bias, mechanism = "classifier.bias", Mechanism(selection="largest", has_residual=True)
        >>> sent = [[1.0, 0.0], [2.0, 0.0], [0.0, 6.0]]
        >>> uploads = [
        ...     replace(seen, gradient={bias: torch.tensor(y)}, mechanism=mechanism) for y in sent
        ... ]
        >>> whole = gathered(uploads, at=1)  # the second entry waits for the third upload
        >>> whole.gradient[bias].tolist(), whole.mechanism.batches[bias].tolist()
        ([2.0, 6.0], [1, 3])
    """
    target: Observation | None = None
    later: list[Tensors] = []
    gradient: Tensors = {}
    batches: Tensors = {}  # in each entry of the upload, or of the one that brings it
    waiting: Tensors = {}  # for one that does
    for number, seen in enumerate(uploads):
        if seen.mechanism is None or (number and seen.gradient.keys() != batches.keys()):
            raise ValueError(
                "gathered needs uploads of one client, with gradients of the same parameters and "
                "the mechanism of each: Observation(mechanism=defense.mechanism(message))."
            )
        if not number:
            before = seen.mechanism.batches or {}
            batches = {n: before.get(n, torch.ones_like(y)).int() for n, y in seen.gradient.items()}
        if number == at:
            target = seen
            gradient = {name: torch.zeros_like(y) for name, y in seen.gradient.items()}
            waiting = {name: torch.ones_like(y, dtype=torch.bool) for name, y in gradient.items()}
        if seen.mechanism.fitted is not None:
            later += [dict(seen.gradient)] if number > at else []
            continue
        for name, y in seen.gradient.items():
            if number < at:
                batches[name] = (batches[name] + 1).masked_fill(y != 0, 1)
                continue
            gradient[name] = torch.where(waiting[name], y, gradient[name])
            waiting[name] &= y == 0
            batches[name] = batches[name] + waiting[name]
    if target is None or target.mechanism is None:
        raise ValueError(f"There is no upload at {at}.")
    if target.mechanism.fitted is not None:
        return replace(
            target,
            mechanism=replace(target.mechanism, later_messages=tuple(later), has_residual=True),
        )
    mechanism = replace(target.mechanism, batches=batches, has_residual=True)
    return replace(target, gradient=gradient, mechanism=mechanism)


def own_entries(seen: Observation) -> Observation | None:
    """Of what was gathered the entries that are the batch's own, as if it had been pruned to them
    without feedback, for any attack; `None` where there is none, or nobody knows which.

    Args:
        seen: With `batches` in its mechanism.

    Example:
        >>> from hf_gradguard.defenses.mechanism import Mechanism
        >>> bias, batches = "classifier.bias", {"classifier.bias": torch.tensor([1, 3])}
        >>> mechanism = Mechanism(selection="largest", has_residual=True, batches=batches)
        >>> whole = replace(seen, gradient={bias: torch.tensor([2.0, 6.0])}, mechanism=mechanism)
        >>> own = own_entries(whole)
        >>> own.gradient[bias].tolist(), own.mechanism.has_residual
        ([2.0, 0.0], False)
    """
    mechanism = seen.mechanism
    if mechanism is None or mechanism.batches is None:
        return None
    gradient = {
        name: y.masked_fill(mechanism.batches[name] > 1, 0) for name, y in seen.gradient.items()
    }
    if not any(bool(y.any()) for y in gradient.values()):
        return None
    known = replace(mechanism, selection="chosen", has_residual=False, batches=None)
    return replace(seen, gradient=gradient, mechanism=known)
