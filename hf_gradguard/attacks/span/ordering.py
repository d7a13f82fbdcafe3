"""From tokens to sentences: gradients behind the first attention tell which tokens stood together.

What the layers there read for a token depends on the sentence around it, and lies in the span of
their gradients' rows exactly if the sentence is right.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..observation import Observation, ordinary_id
from .layer_inputs import Readers, layer_inputs
from .subspace import RowSpace, distances


def extend(
    seen: Observation,
    readers: Readers,
    space: RowSpace,
    heard: Tensor,
    known: Tensor,
    found: dict[int, list[int]],
    beams: int,
) -> Tensor:
    """A decoder's sentences, from left to right.

    Args:
        readers: The next layers, whose input at a position depends on the tokens up to there.
        space: The row space of their gradients.
        heard: `(B, T)`, true at the tokens that the gradient depends on; right-padded.
        known: `(B, T)` known ids, -1 elsewhere.
        found: Candidates by position, the best first; under 0 alone if the model has no absolute
            positions.
        beams: Prefixes to keep a sentence.

    Returns:
        `(B, T)` ids, -1 where nothing was looked for.

    Raises:
        ValueError: If a text is not padded on the right.

    Example:
        >>> from hf_gradguard.attacks.span.layer_inputs import find_readers
        >>> from hf_gradguard.attacks.span.subspace import row_space
        >>> readers = find_readers(seen)[1]
        >>> space = row_space(readers.gradients(seen), None, rank=8)
        >>> found = {place: [5, 6] for place in range(8)}
        >>> extend(seen, readers, space, seen.tokens, seen.known_ids(), found, beams=1).shape
        torch.Size([2, 8])
    """
    lengths = heard.sum(1).tolist()
    if any(not bool(row[:length].all()) for row, length in zip(heard, lengths, strict=True)):
        raise ValueError("span extends a decoder's texts from their first token: pad on the right.")
    levels = _prefixes(seen, readers, space, heard, known, found, beams)
    rows = torch.full_like(known, -1)
    taken: list[tuple[int, ...]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        while not levels[length]:  # candidates ran out: as far as they went
            length -= 1
        wanted = known[index, :length].tolist()
        fitting = [
            p
            for p in levels[length]
            if all(k in (-1, token) for k, token in zip(wanted, p, strict=True))
        ] or list(levels[length])
        # A sentence that only starts another one may still be one of its own: then it is the last
        # choice.
        fresh = [p for p in fitting if not any(t[:length] == p for t in taken)]
        best = min(fresh or fitting, key=levels[length].__getitem__, default=())
        taken.append(best)
        rows[index, : len(best)] = torch.tensor(best, dtype=torch.long, device=rows.device)
    return rows


def _prefixes(
    seen: Observation,
    readers: Readers,
    space: RowSpace,
    heard: Tensor,
    known: Tensor,
    found: dict[int, list[int]],
    beams: int,
) -> list[dict[tuple[int, ...], float]]:
    """The best prefixes of every length, with the sums of their tokens' distances."""
    lengths = heard.sum(1).tolist()
    directions, trust = space.directions()
    levels: list[dict[tuple[int, ...], float]] = [{(): 0.0}]
    for place in range(max(lengths)):
        going = sum(length > place for length in lengths)
        unknown = int(((known[:, place] < 0) & heard[:, place]).sum())
        tokens = found.get(0 if list(found) == [0] else place, [])
        certain = known[heard[:, place], place]
        tokens = sorted({*certain[certain >= 0].tolist(), *(tokens if unknown else [])})
        longer = [(*prefix, token) for prefix in levels[-1] for token in tokens]
        scores = _last_distances(seen, readers, space, longer, directions, trust)
        totals = {p: levels[-1][p[:-1]] + s for p, s in zip(longer, scores, strict=True)}
        levels.append(dict(sorted(totals.items(), key=lambda item: item[1])[: beams * going]))
    return levels


def group(
    seen: Observation,
    views: list[tuple[Readers, RowSpace]],
    heard: Tensor,
    wanted: Tensor,
    rows: Tensor,
    sweeps: int = 8,
) -> Tensor:
    """An encoder's sentences: swap tokens at a position between them while the next readers' inputs
    get nearer their span.

    Finds a local optimum: two sentences usually come out whole, of more it leaves parts mixed up.

    Args:
        views: Layers whose input depends on the whole sentence, each with the row space of their
            gradients.
        heard: `(B, T)`, true at tokens.
        wanted: `(B, T)`, true where ids are not known beforehand.
        rows: `(B, T)` ids to start from.

    Returns:
        `(B, T)` ids.

    Example:
        >>> from hf_gradguard.attacks.span.layer_inputs import find_readers
        >>> from hf_gradguard.attacks.span.subspace import row_space
        >>> mixed = [readers for readers in find_readers(seen) if readers.mixing == "full"]
        >>> views = [(r, row_space(r.gradients(seen), None, rank=13)) for r in mixed]
        >>> ids, heard = batch["input_ids"], batch["attention_mask"].bool()
        >>> swapped = ids.clone()
        >>> swapped[:, 1] = ids[:, 1].flip(0)  # the first word of the other sentence
        >>> torch.equal(group(seen, views, heard, heard, swapped), ids)
        True
    """
    rows = rows.clone()
    trusted = [(readers, space.columns, *space.directions()) for readers, space in views]
    score = functools.partial(_whole_distances, seen, trusted)
    current = score(rows, heard)
    for _ in range(sweeps):
        changed = False
        for place in range(rows.shape[1]):
            there = wanted[:, place].nonzero().flatten().tolist()
            found = [
                (i, j) for i in there for j in there if i < j and rows[i, place] != rows[j, place]
            ]
            if not found:
                continue
            pairs = torch.tensor(found, device=rows.device)
            swapped = rows[pairs]  # (pairs, 2, T)
            swapped[:, :, place] = rows[pairs.flip(1), place]
            new = score(swapped.flatten(0, 1), heard[pairs].flatten(0, 1)).view(-1, 2)
            gains = (current[pairs] - new).sum(1)
            best = int(gains.argmax())
            if gains[best] > 1e-9 * current.sum():
                rows[pairs[best]], current[pairs[best]], changed = swapped[best], new[best], True
        if not changed:
            break
    return rows


def _whole_distances(
    seen: Observation,
    views: list[tuple[Readers, Tensor, Tensor, Tensor]],
    candidates: Tensor,
    masks: Tensor,
) -> Tensor:
    """`(K,)`: of sentences `(K, T)`, the sums of their tokens' distances in all views."""
    filled = torch.where(candidates >= 0, candidates, ordinary_id(seen.model, seen.tokenizer))
    total = torch.zeros(len(filled), dtype=torch.float64, device=filled.device)
    for readers, columns, directions, trust in views:
        x = layer_inputs(seen, readers, filled, masks).double() * columns
        total += (distances(x, directions, trust).clamp(min=0) * masks).sum(1)
    return total


def _last_distances(
    seen: Observation,
    readers: Readers,
    space: RowSpace,
    prefixes: list[tuple[int, ...]],
    directions: Tensor,
    trust: Tensor,
) -> list[float]:
    scores: list[float] = []
    for start in range(0, len(prefixes), 256):
        ids = torch.tensor(prefixes[start : start + 256], device=seen.device)
        x = layer_inputs(seen, readers, ids)[:, -1].double() * space.columns
        scores += distances(x, directions, trust).clamp(min=0).tolist()
    return scores
