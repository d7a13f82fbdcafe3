"""A decoder's sentences, token by token: what the layers behind its attention read for the last
token of a prefix lies in the span of their gradients' rows exactly if the prefix is right.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from ...models import without_adapters
from ..base import Observation, ordinary_id
from ..layer_inputs import Readers, layer_inputs
from .row_space import distances
from .texts import Text, View, choose


def endings(
    observation: Observation,
    readers: Readers,
    prefixes: Sequence[Text],
    tokens: Sequence[int],
    keeps: bool,
) -> Tensor:
    """What `readers` read of P prefixes with each of K tokens behind them, `(P K, T + 1, H)`: of
    the first prefix with all tokens, then of the next.

    Args:
        prefixes: Of T tokens each.
        tokens: K tokens.
        keeps: Whether the model can keep what it needs of a prefix; else all of it runs K times.

    Example:
        >>> from hf_gradguard.attacks.layer_inputs import find_readers
        >>> readers = find_readers(observation)[1]
        >>> endings(observation, readers, [(5, 6, 7)], [8, 9], keeps=False).shape
        torch.Size([2, 4, 32])
    """
    if not prefixes[0] or not keeps:
        rows = [[*prefix, token] for prefix in prefixes for token in tokens]
        return layer_inputs(observation, readers, torch.tensor(rows, device=observation.device))
    past = DynamicCache(config=observation.model.config.get_text_config(decoder=True))  # type: ignore[union-attr, operator]
    once = torch.tensor(prefixes, device=observation.device)
    before = layer_inputs(observation, readers, once, past_key_values=past, use_cache=True)
    past.batch_repeat_interleave(len(tokens))
    last = torch.tensor(tokens, device=observation.device).repeat(len(prefixes))[:, None]
    mask = last.new_ones(len(last), once.shape[1] + 1)
    behind = layer_inputs(observation, readers, last, mask, past_key_values=past, use_cache=True)
    return torch.cat([before.repeat_interleave(len(tokens), 0), behind], dim=1)


def keeps_the_past(observation: Observation, readers: Readers) -> bool:
    """Whether the model reads a text's end alike when it has kept the rest: tried out on a text of
    random words.

    Example:
        >>> from hf_gradguard.attacks.layer_inputs import find_readers
        >>> keeps_the_past(observation, find_readers(observation)[1])  # an encoder
        False
    """
    base = without_adapters(observation.model)
    if "past_key_values" not in inspect.signature(base.forward).parameters:
        return False
    one = ordinary_id(base, observation.tokenizer)
    whole, parts = (
        endings(observation, readers, [(one, one, one + 1)], [one], keeps=keeps)
        for keeps in (False, True)
    )
    return whole.shape == parts.shape and torch.allclose(
        whole, parts, rtol=1e-4, atol=1e-5 * float(whole.abs().max())
    )


DEFICIENT = 8  # times as many prefixes where the first tokens of a text cannot be told for certain


def extend(
    observation: Observation,
    view: View,
    heard: Tensor,
    known: Tensor,
    found: dict[int, list[int]],
    beams: int,
) -> Tensor:
    """A decoder's sentences, from left to right.

    Args:
        view: The next layers, whose input at a position depends on the tokens up to there.
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
        >>> from hf_gradguard.attacks.layer_inputs import find_readers
        >>> from hf_gradguard.attacks.span.row_space import row_space
        >>> readers = find_readers(observation)[1]
        >>> view = View(readers, row_space(readers.gradients(observation), None, rank=8))
        >>> found = {place: [5, 6] for place in range(8)}
        >>> extend(seen, view, seen.tokens, seen.known_ids(), found, beams=1).shape
        torch.Size([2, 8])
    """
    lengths = heard.sum(1).tolist()
    if any(not bool(row[:length].all()) for row, length in zip(heard, lengths, strict=True)):
        raise ValueError("span extends a decoder's texts from their first token: pad on the right.")
    levels = _prefixes(observation, view, heard, known, found, beams)
    candidates = []
    for wanted, length in zip(known.tolist(), lengths, strict=True):
        while not levels[length]:  # candidates ran out: as far as they went
            length -= 1
        fitting = {
            text: score
            for text, score in levels[length].items()
            if all(k in (-1, token) for k, token in zip(wanted, text, strict=False))
        }
        candidates.append(fitting or levels[length])
    rows = torch.full_like(known, -1)
    for row, best in zip(rows, choose(observation, [view], candidates), strict=True):
        row[: len(best)] = torch.tensor(best, dtype=torch.long, device=rows.device)
    return rows


def _prefixes(
    observation: Observation,
    view: View,
    heard: Tensor,
    known: Tensor,
    found: dict[int, list[int]],
    beams: int,
) -> list[dict[Text, float]]:
    """The best prefixes of every length, with the sums of their tokens' distances."""
    lengths = heard.sum(1).tolist()
    low_rank = view.readers.size[0] < view.readers.width  # LoRA
    deficient = low_rank and len(view.directions) < int(heard.sum())
    beams = beams * DEFICIENT if deficient else beams
    keeps = keeps_the_past(observation, view.readers)
    distances_of = functools.partial(_last_distances, observation, view, deficient, keeps)
    levels: list[dict[Text, float]] = [{(): 0.0}]
    for place in range(max(lengths)):
        going = sum(length > place for length in lengths)
        unknown = int(((known[:, place] < 0) & heard[:, place]).sum())
        tokens = found.get(0 if list(found) == [0] else place, [])
        certain = known[heard[:, place], place]
        tokens = sorted({*certain[certain >= 0].tolist(), *(tokens if unknown else [])})
        longer = [(*prefix, token) for prefix in levels[-1] for token in tokens]
        scores = distances_of([*levels[-1]], tokens)
        totals = {p: levels[-1][p[:-1]] + s for p, s in zip(longer, scores, strict=True)}
        ranked = sorted(totals.items(), key=lambda item: item[1])
        # One token, repeated, reads the same everywhere unless positions are absolute, and is then
        # as near as the truth. It takes no other's place, and is not dropped: it may be the truth.
        kept: list[tuple[Text, float]] = []
        for repeats in (False, True):
            kept += [item for item in ranked if _repeats(item[0]) == repeats][: beams * going]
        levels.append(dict(kept))
    return levels


def _repeats(text: Text) -> bool:
    return len(text) > 1 and len(set(text)) == 1


def _last_distances(
    observation: Observation,
    view: View,
    deficient: bool,
    keeps: bool,
    prefixes: list[Text],
    tokens: list[int],
) -> list[float]:
    """Of each token's input behind each prefix, the squared relative distance from the span; where
    the gradient has too few rows to span all inputs, from what it spans together with those before
    (subspace-augmented MUSIC: Lee, Bresler and Junge, "Subspace Methods for Joint Sparse Recovery",
    2012).
    """
    scores: list[float] = []
    together = max(1, 256 // max(1, len(tokens)))
    parts = [
        (prefixes[first : first + together], tokens[start : start + 256])
        for first in range(0, len(prefixes), together)
        for start in range(0, len(tokens), 256)
    ]
    for some, last in parts:
        x = endings(observation, view.readers, some, last, keeps).double() * view.space.columns
        if deficient and x.shape[1] > 1:
            size = x[:, -1].square().sum(1)
            x = x - ((x @ view.directions.T) * view.trust) @ view.directions
            before = torch.linalg.qr(x[:, :-1].mT).Q
            rest = x[:, -1] - (before @ (before.mT @ x[:, -1, :, None]))[:, :, 0]
            scores += (rest.square().sum(1) / size).tolist()
        else:
            scores += distances(x[:, -1], view.directions, view.trust).clamp(min=0).tolist()
    return scores
