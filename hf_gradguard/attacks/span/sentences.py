"""From each position's tokens to sentences: gradients behind an encoder's attention tell which
tokens stood together.

Attention averages over a sentence, so that a text with tokens of several sentences is the nearer to
the gradients' span the more of them are of one: going down from any start, one token at a time,
ends at a whole sentence. Each is looked for by itself, from tokens that no sentence has used up
yet.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..observation import Observation
from .choice import Text, choose
from .views import View, outside

SWEEPS, ROUNDS = 12, 4


def assemble(
    seen: Observation,
    views: Sequence[View],
    heard: Tensor,
    known: Tensor,
    found: dict[int, list[int]],
) -> Tensor:
    """An encoder's sentences.

    Args:
        views: Layers whose input depends on the whole sentence.
        heard: `(B, T)`, true at tokens.
        known: `(B, T)` known ids, -1 elsewhere.
        found: Candidates by position, the best first.

    Returns:
        `(B, T)` ids, -1 where nothing was looked for or found.

    Example:
        >>> from hf_gradguard.attacks.span.layer_inputs import find_readers
        >>> from hf_gradguard.attacks.span.subspace import row_space
        >>> mixed = [readers for readers in find_readers(seen) if readers.mixing == "full"][:2]
        >>> views = [View(r, row_space(r.gradients(seen), None, rank=13)) for r in mixed]
        >>> ids, heard = batch["input_ids"], batch["attention_mask"].bool()
        >>> known = ids.masked_fill((ids > 4) & heard, -1)
        >>> found = {place: ids[:, place].tolist() for place in range(1, 7)}
        >>> rows = assemble(seen, views, heard, known, found)
        >>> sorted(rows.tolist()) == sorted(ids.tolist())
        True
    """
    patterns: dict[tuple[tuple[bool, ...], Text], list[int]] = {}
    for index, (present, given) in enumerate(zip(heard.tolist(), known.tolist(), strict=True)):
        patterns.setdefault((tuple(present), tuple(given)), []).append(index)
    pools: list[dict[Text, float]] = [{} for _ in heard]
    left = {(place, token) for place, tokens in found.items() for token in tokens}
    for (present, given), indices in patterns.items():
        pool = _Descent(seen, views, present, given, found).sentences(left, len(indices))
        for index in indices:
            pools[index] = pool
    rows = known.clone()
    for index, text in enumerate(choose(seen, views, pools)):
        rows[index, heard[index]] = torch.tensor(text, dtype=torch.long, device=rows.device)
    return rows


class _Descent:
    """Looks for sentences of one length, with the same known tokens."""

    def __init__(
        self,
        seen: Observation,
        views: Sequence[View],
        present: tuple[bool, ...],
        given: Text,
        found: dict[int, list[int]],
    ) -> None:
        self.seen, self.views = seen, views
        self.mask = torch.tensor(present, device=seen.device)
        self.given = torch.tensor(given, device=seen.device)
        self.tokens = {
            place: torch.tensor(found[place], device=seen.device)
            for place in range(len(present))
            if present[place] and given[place] < 0 and found.get(place)
        }
        self.scores: dict[Text, float] = {}

    def sentences(self, left: set[tuple[int, int]], count: int) -> dict[Text, float]:
        """Whole sentences with their distances.

        Args:
            left: `(place, token)` that no sentence uses so far; what is found here is taken out.
            count: How many are looked for.
        """
        pool: dict[Text, float] = {}
        for _ in range(ROUNDS):
            starts, anchors = self._starts(left)
            rows, far = self.descend(starts, anchors)
            for row, distance in zip(rows, far.tolist(), strict=True):
                text = tuple(row[self.mask].tolist())
                pool[text] = min(distance, pool.get(text, distance))
            used = {(p, int(row[p])) for row in rows for p in self.tokens}
            if not self.tokens or used.isdisjoint(left) or len(pool) >= 2 * count:
                break
            left -= used
        return pool

    def _starts(self, left: set[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """`(S, T)` texts to start from, and the `(S,)` places that stay as they are: a start for
        each token that is left over at the place that has most of them.
        """
        over = {
            place: [token for token in tokens.tolist() if (place, token) in left] or tokens.tolist()
            for place, tokens in self.tokens.items()
        }
        row = self.given.clamp(min=0)
        if not over:
            return row[None], row.new_full((1,), -1)
        anchor = max(over, key=lambda place: len(over[place]))
        starts = row.repeat(len(over[anchor]), 1)
        for place, tokens in over.items():
            starts[:, place] = torch.tensor(
                [tokens[i % len(tokens)] for i in range(len(starts))], device=row.device
            )
        return starts, starts.new_full((len(starts),), anchor)

    def descend(self, rows: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Take at every place the token that brings the text nearest, until none does."""
        rows = rows.clone()
        best = outside(self.seen, self.views, rows, self.mask.expand_as(rows))
        for _ in range(SWEEPS):
            before = rows.clone()
            for place, tokens in self.tokens.items():
                free = (anchors != place).nonzero().flatten()
                if len(tokens) < 2 or not len(free):
                    continue
                tried = rows[free][:, None].repeat(1, len(tokens), 1)
                tried[:, :, place] = tokens
                flat = tried.flatten(0, 1)
                far = outside(self.seen, self.views, flat, self.mask.expand_as(flat))
                lowest, which = far.view(len(free), -1).min(1)
                better = lowest < best[free] * (1 - 1e-9)
                rows[free[better], place] = tokens[which[better]]
                best[free[better]] = lowest[better]
            if torch.equal(rows, before):
                break
        return rows, best
