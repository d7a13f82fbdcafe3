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
    that it is a sum of, in its law.

    Args:
        uploads: One client's, in order, behind error feedback and with their laws, at models that
            differ little. Earlier ones tell how many batches an entry holds, later ones what was
            left out. What a first one's law says of the batches before it is taken over.
        at: Which of them is attacked.

    Returns:
        The observation at that place. Entries that no upload brings are 0, and count the batches
        that the next one would bring. Fitted messages are kept `later` in its law.

    Raises:
        ValueError: If there is none at that place, or one has no law or other parameters.

    Example:
        >>> from hf_gradguard.gradient_map.law import Law
        >>> bias, law = "classifier.bias", Law(kept="largest", left_out=True)
        >>> sent = [[1.0, 0.0], [2.0, 0.0], [0.0, 6.0]]
        >>> uploads = [replace(seen, gradient={bias: torch.tensor(y)}, law=law) for y in sent]
        >>> whole = gathered(uploads, at=1)  # the second entry waits for the third upload
        >>> whole.gradient[bias].tolist(), whole.law.batches[bias].tolist()
        ([2.0, 6.0], [1, 3])
    """
    target: Observation | None = None
    later: list[Tensors] = []
    gradient: Tensors = {}
    batches: Tensors = {}  # in each entry of the upload, or of the one that brings it
    waiting: Tensors = {}  # for one that does
    for number, seen in enumerate(uploads):
        if seen.law is None or (number and seen.gradient.keys() != batches.keys()):
            raise ValueError(
                "gathered needs uploads of one client, with gradients of the same parameters and "
                "the law of each: Observation(law=defense.law(message))."
            )
        if not number:
            before = seen.law.batches or {}
            batches = {n: before.get(n, torch.ones_like(y)).int() for n, y in seen.gradient.items()}
        if number == at:
            target = seen
            gradient = {name: torch.zeros_like(y) for name, y in seen.gradient.items()}
            waiting = {name: torch.ones_like(y, dtype=torch.bool) for name, y in gradient.items()}
        if seen.law.fitted is not None:
            later += [dict(seen.gradient)] if number > at else []
            continue
        for name, y in seen.gradient.items():
            if number < at:
                batches[name] = (batches[name] + 1).masked_fill(y != 0, 1)
                continue
            gradient[name] = torch.where(waiting[name], y, gradient[name])
            waiting[name] &= y == 0
            batches[name] = batches[name] + waiting[name]
    if target is None or target.law is None:
        raise ValueError(f"There is no upload at {at}.")
    if target.law.fitted is not None:
        return replace(target, law=replace(target.law, later=tuple(later), left_out=True))
    law = replace(target.law, batches=batches, left_out=True)
    return replace(target, gradient=gradient, law=law)


def own_entries(seen: Observation) -> Observation | None:
    """Of what was gathered the entries that are the batch's own, as if it had been pruned to them
    without feedback, for any attack; `None` where there is none, or nobody knows which.

    Args:
        seen: With `batches` in its law.

    Example:
        >>> from hf_gradguard.gradient_map.law import Law
        >>> bias, batches = "classifier.bias", {"classifier.bias": torch.tensor([1, 3])}
        >>> law = Law(kept="largest", left_out=True, batches=batches)
        >>> whole = replace(seen, gradient={bias: torch.tensor([2.0, 6.0])}, law=law)
        >>> own = own_entries(whole)
        >>> own.gradient[bias].tolist(), own.law.left_out
        ([2.0, 0.0], False)
    """
    law = seen.law
    if law is None or law.batches is None:
        return None
    gradient = {name: y.masked_fill(law.batches[name] > 1, 0) for name, y in seen.gradient.items()}
    if not any(bool(y.any()) for y in gradient.values()):
        return None
    known = replace(law, kept="chosen", left_out=False, batches=None)
    return replace(seen, gradient=gradient, law=known)
