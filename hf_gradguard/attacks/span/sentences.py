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

SWEEPS, ROUNDS = 40, 4
NEAR = 1e-4  # a position's squared distance that only right texts have, if there is no noise


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
        pool = _Descent(seen, views, present, given, found, len(heard)).sentences(left, len(indices))
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
        rows: int,
    ) -> None:
        self.seen, self.views, self.rows = seen, views, rows
        self.mask = torch.tensor(present, device=seen.device)
        self.given = torch.tensor(given, device=seen.device)
        self.tokens = {
            place: torch.tensor(found[place], device=seen.device)
            for place in range(len(present))
            if present[place] and given[place] < 0 and found.get(place)
        }

    def sentences(self, left: set[tuple[int, int]], count: int) -> dict[Text, float]:
        """Whole sentences with their distances.

        Args:
            left: `(place, token)` that no sentence uses so far; what is found here is taken out.
            count: How many are looked for.
        """
        pool: dict[Text, float] = {}
        for _ in range(ROUNDS if self.tokens else 1):
            rows, far = self.descend(*self._starts(left), count)
            for row, distance in zip(rows, far.tolist(), strict=True):
                text = tuple(row[self.mask].tolist())
                pool[text] = min(distance, pool.get(text, distance))
            near = far.argsort()[:count].tolist()
            used = {(place, int(rows[i, place])) for i in near for place in self.tokens}
            left -= used
            if sorted(pool.values())[count - 1 : count] < [NEAR * int(self.mask.sum())]:
                break
        return pool

    def _starts(self, left: set[tuple[int, int]]) -> tuple[Tensor, int]:
        """`(S, T)` texts to start from: one for each token that is left over at the place that has
        the fewest to choose from; and that place.
        """
        row = self.given.clamp(min=0)
        if not self.tokens:
            return row[None], -1
        over = {
            place: [token for token in tokens.tolist() if (place, token) in left] or tokens.tolist()
            for place, tokens in self.tokens.items()
        }
        anchor = min(over, key=lambda place: (len(self.tokens[place]) < 2, len(self.tokens[place])))
        starts = row.repeat(len(over[anchor]), 1)
        for place, tokens in over.items():
            starts[:, place] = torch.tensor(
                [tokens[i % len(tokens)] for i in range(len(starts))], device=row.device
            )
        return starts, anchor

    def descend(self, rows: Tensor, anchor: int, count: int) -> tuple[Tensor, Tensor]:
        """Take at every place the token that brings the text nearest, and exchange those of two
        places, until nothing does.

        First by the attention's output and among the surest tokens alone, the anchor kept. Where
        word and position add up, that tells which tokens are of a sentence and not their order:
        what is behind it does, which has no need of the starts that stayed far.
        """
        best = outside(self.seen, self.views[:1], rows, self.mask.expand_as(rows))
        few = {p: tokens[: self.rows] for p, tokens in self.tokens.items() if p != anchor}
        rows, best = self._settle(rows.clone(), best, self.views[:1], few)
        rows = rows[best.argsort()[: count + 1]].unique(dim=0)
        best = outside(self.seen, self.views, rows, self.mask.expand_as(rows))
        return self._settle(rows, best, self.views, self.tokens)

    def _settle(
        self, rows: Tensor, best: Tensor, views: Sequence[View], choice: dict[int, Tensor]
    ) -> tuple[Tensor, Tensor]:
        for _ in range(SWEEPS):
            before = rows.clone()
            for place, tokens in choice.items():
                if len(tokens) > 1:
                    tried = rows[:, None].repeat(1, len(tokens), 1)
                    tried[:, :, place] = tokens
                    self._improve(rows, best, tried, views)
            if torch.equal(rows, before) and len(views) == len(self.views):
                self._exchange(rows, best)
            if torch.equal(rows, before):
                break
        return rows, best

    def _exchange(self, rows: Tensor, best: Tensor) -> None:
        """The best exchange of two places' tokens in each text, if it brings the text nearer."""
        places = list(self.tokens)
        pairs = [(p, q) for i, p in enumerate(places) for q in places[i + 1 :]]
        if pairs:
            tried = rows[:, None].repeat(1, len(pairs), 1)
            for index, (p, q) in enumerate(pairs):
                tried[:, index, p], tried[:, index, q] = rows[:, q], rows[:, p]
            self._improve(rows, best, tried, self.views)

    def _improve(self, rows: Tensor, best: Tensor, tried: Tensor, views: Sequence[View]) -> None:
        """Put the nearest of the texts tried, `(S, K, T)`, in place of a row that is farther."""
        flat = tried.flatten(0, 1)
        far = outside(self.seen, views, flat, self.mask.expand_as(flat))
        far, which = far.view(len(rows), -1).min(1)
        better = far < best * (1 - 1e-9)
        rows[better] = tried[better, which[better]]
        best[better] = far[better]
