"""Where the span attack looks, for how many tokens, and how what it finds is put in rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ..observation import Observation
from .layer_inputs import is_causal_lm


def heard_positions(seen: Observation) -> Tensor:
    """Positions whose inputs the loss depends on: all tokens but, in a causal language model, each
    text's last.

    Raises:
        ValueError: If there are none.

    Example:
        >>> bool((heard_positions(seen) <= seen.tokens).all())
        True
    """
    heard = seen.tokens.clone()
    if is_causal_lm(seen.model):
        for row in heard:
            row[row.nonzero()[-1:]] = False
    if not heard.any():
        raise ValueError(
            "No position is left to look for: the texts have no tokens that the loss depends on."
        )
    return heard


def largest_rank(known: Tensor, wanted: Tensor, positional: bool) -> int:
    """The most linearly independent inputs that there can be: equal tokens at equal positions count
    once.

    Example:
        >>> known = torch.tensor([[2, -1, 3], [2, -1, 3]])  # [CLS], a word, [SEP]; twice
        >>> largest_rank(known, known < 0, positional=True)
        4
    """
    at = torch.arange(known.shape[1], device=known.device).expand_as(known)
    pairs = torch.stack([at if positional else torch.zeros_like(at), known], -1)[known >= 0]
    return len(pairs.unique(dim=0)) + int(wanted.sum())


def places_to_search(wanted: Tensor, positional: bool) -> tuple[Tensor, Tensor]:
    """Where to look, and for how many tokens at each. Without positions everything is in one
    place.

    Example:
        >>> wanted = torch.tensor([[False, True, True], [False, True, False]])
        >>> [tensor.tolist() for tensor in places_to_search(wanted, positional=True)]
        [[1, 2], [2, 1]]
        >>> [tensor.tolist() for tensor in places_to_search(wanted, positional=False)]
        [[0], [3]]
    """
    if not positional:
        total = wanted.sum().reshape(1)
        return torch.zeros_like(total)[total > 0], total[total > 0]
    counts = wanted.sum(0)
    return counts.nonzero().flatten(), counts[counts > 0]


def fill(
    wanted: Tensor,
    known: Tensor,
    found: dict[int, list[int]],
    positional: bool,
    decided: bool = True,
    again: bool = False,
) -> Tensor:
    """Rows of ids from what was found at each place.

    Args:
        wanted: `(B, T)`, true where a token is looked for.
        known: `(B, T)` known ids, -1 elsewhere.
        found: Ids by place, the best first; under 0 alone if there are no positions.
        positional: Whether there are.
        decided: Whether a later step tells which sentence a token is of, or there is but one.
            If nothing tells whose token it is, they go to the sentences by their ids, so that the
            result does not hang on rounding errors.
        again: Whether, where a place has more sentences than tokens were found, these stand there
            several times: then that is all there was.

    Returns:
        `(B, T)` ids: those known and, in the order found, those at each position; -1 where there
        is none.

    Example:
        >>> known = torch.tensor([[2, -1], [2, -1]])
        >>> fill(known < 0, known, {1: [9, 7, 8]}, positional=True).tolist()
        [[2, 9], [2, 7]]
        >>> fill(known < 0, known, {1: [9, 7, 8]}, positional=True, decided=False).tolist()
        [[2, 7], [2, 9]]
        >>> fill(known < 0, known, {1: [9]}, positional=True, again=True).tolist()
        [[2, 9], [2, 9]]
    """

    def first(ids: list[int], count: int) -> list[int]:
        return (ids * (count // max(1, len(ids)) + 1 if again else 1))[:count]

    rows = known.clone()
    if not positional:
        bag = first(found.get(0, []), int(wanted.sum()))
        slots = wanted.nonzero()[: len(bag)]
        rows[slots[:, 0], slots[:, 1]] = torch.tensor(bag, dtype=torch.long, device=rows.device)
        return rows
    for place, ids in found.items():
        slots = wanted[:, place].nonzero().flatten()
        tokens = first(ids, len(slots))
        rows[slots[: len(tokens)], place] = torch.tensor(
            tokens if decided else sorted(tokens), dtype=torch.long, device=rows.device
        )
    return rows
