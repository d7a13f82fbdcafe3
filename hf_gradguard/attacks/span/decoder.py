"""A decoder's sentences, token by token, from the span of gradients behind its attention.

What the layers behind its attention read for the last token of a prefix lies in the span of their
gradients' rows exactly if the prefix is correct.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor
from transformers import DynamicCache

from ...models import without_adapters
from ..base import ENDLESS, Clock, Observation, ordinary_id
from ..layer_inputs import Projections, Slots, layer_inputs
from .row_space import View, distances
from .sentences import Pool, Text, choose


def inputs_of_endings(
    observation: Observation,
    projections: Projections,
    prefixes: Sequence[Text],
    tokens: Sequence[int],
    uses_cache: bool,
) -> Tensor:
    """Return layer inputs of P prefixes with each of K tokens behind them, `(P K, T + 1, H)`.

    Those of the first prefix with all tokens come first, then those of the next.

    Args:
        observation: The observation of the server.
        projections: The layers.
        prefixes: Prefixes of T tokens each.
        tokens: The K tokens.
        uses_cache: Whether the model can keep what it needs of a prefix; else all of it runs K
            times.

    Example:
        >>> from hf_gradguard.attacks.layer_inputs import find_projections
        >>> projections = find_projections(observation)[1]
        >>> inputs_of_endings(observation, projections, [(5, 6, 7)], [8, 9], uses_cache=False).shape
        torch.Size([2, 4, 32])
    """
    if not prefixes[0] or not uses_cache:
        rows = [[*prefix, token] for prefix in prefixes for token in tokens]
        return layer_inputs(observation, projections, torch.tensor(rows, device=observation.device))
    past = DynamicCache(config=observation.model.config.get_text_config(decoder=True))  # type: ignore[union-attr, operator]
    prefix_ids = torch.tensor(prefixes, device=observation.device)
    cache = {"past_key_values": past, "use_cache": True}
    prefix_inputs = layer_inputs(observation, projections, prefix_ids, **cache)
    past.batch_repeat_interleave(len(tokens))
    token_ids = torch.tensor(tokens, device=observation.device).repeat(len(prefixes))[:, None]
    mask = token_ids.new_ones(len(token_ids), prefix_ids.shape[1] + 1)
    token_inputs = layer_inputs(observation, projections, token_ids, mask, **cache)
    return torch.cat([prefix_inputs.repeat_interleave(len(tokens), 0), token_inputs], dim=1)


def can_use_cache(observation: Observation, projections: Projections) -> bool:
    """Return whether the model gives a text's end the same layer inputs with its key-value cache.

    A text of one repeated word is tried.

    Example:
        >>> from hf_gradguard.attacks.layer_inputs import find_projections
        >>> can_use_cache(observation, find_projections(observation)[1])  # an encoder
        False
    """
    base = without_adapters(observation.model)
    if "past_key_values" not in inspect.signature(base.forward).parameters:
        return False
    token = ordinary_id(base, observation.tokenizer)
    text, ending = [(token, token, token + 1)], [token]
    full_inputs = inputs_of_endings(observation, projections, text, ending, uses_cache=False)
    cached_inputs = inputs_of_endings(observation, projections, text, ending, uses_cache=True)
    return full_inputs.shape == cached_inputs.shape and torch.allclose(
        full_inputs, cached_inputs, rtol=1e-4, atol=1e-5 * float(full_inputs.abs().max())
    )


DEFICIENT = 8  # times as many prefixes where the first tokens of a text are uncertain


def extend_prefixes(
    observation: Observation, view: View, slots: Slots, beams: int, clock: Clock = ENDLESS
) -> Tensor:
    """Return a decoder's sentences, found from left to right.

    Args:
        observation: The observation of the server.
        view: The next layers, whose input at a position depends on the tokens up to there.
        slots: Known and candidate tokens of every position; texts are right-padded.
        beams: Prefixes to keep per sentence.
        clock: A clock; when it is over, texts are left as long as they are.

    Returns:
        `(B, T)` ids, -1 where nothing was looked for.

    Raises:
        ValueError: If a text is not padded on the right.

    Example:
        >>> from dataclasses import replace
        >>> from hf_gradguard.attacks.layer_inputs import find_projections
        >>> from hf_gradguard.attacks.span.row_space import row_space
        >>> projections = find_projections(observation)[1]
        >>> slots = Slots.from_observation(observation)
        >>> view = View(projections, row_space(projections.gradients(observation), None, rank=8))
        >>> slots = replace(slots, candidate_ids={position: [5, 6] for position in range(8)})
        >>> extend_prefixes(observation, view, slots, beams=1).shape
        torch.Size([2, 8])
    """
    lengths = slots.attended.sum(1).tolist()
    if any(not bool(row[:n].all()) for row, n in zip(slots.attended, lengths, strict=True)):
        raise ValueError("span extends a decoder's texts from their first token: pad on the right.")
    levels = _prefixes(observation, view, slots, lengths, beams, clock)
    candidates = []
    for known_text, length in zip(slots.known_ids.tolist(), lengths, strict=True):
        length = min(length, len(levels) - 1)
        while not levels[length]:  # candidates ran out: as far as they went
            length -= 1
        fitting = {
            text: score
            for text, score in levels[length].items()
            if all(k in (-1, token) for k, token in zip(known_text, text, strict=False))
        }
        candidates.append(fitting or levels[length])
    rows = torch.full_like(slots.known_ids, -1)
    for row, text in zip(rows, choose(observation, [view], candidates), strict=True):
        row[: len(text)] = torch.tensor(text, dtype=torch.long, device=rows.device)
    return rows


def _prefixes(
    observation: Observation, view: View, slots: Slots, lengths: list[int], beams: int,
    clock: Clock,
) -> list[Pool]:  # fmt: skip
    """Return the best prefixes of every length, with the sums of their tokens' distances."""
    low_rank = view.projections.max_rank < view.projections.width  # LoRA
    deficient = low_rank and len(view.directions) < sum(lengths)
    beams = beams * DEFICIENT if deficient else beams
    uses_cache = can_use_cache(observation, view.projections)
    levels: list[Pool] = [{(): 0.0}]
    for position in range(max(lengths)):
        if position and clock.must_stop():
            break
        unfinished = sum(length > position for length in lengths)
        ids = slots.known_ids[slots.attended[:, position], position]
        place = 0 if list(slots.candidate_ids) == [0] else position
        candidates = slots.candidate_ids.get(place, []) if bool((ids < 0).any()) else []
        tokens = sorted({*ids[ids >= 0].tolist(), *candidates})
        longer = [(*prefix, token) for prefix in levels[-1] for token in tokens]
        scores = _last_distances(observation, view, deficient, uses_cache, [*levels[-1]], tokens)
        totals = {p: levels[-1][p[:-1]] + s for p, s in zip(longer, scores, strict=True)}
        ranked = sorted(totals.items(), key=lambda scored: scored[1])
        # One token, repeated, reads the same everywhere unless positions are absolute, and is then
        # as near as the truth. It takes no other's place, and is not dropped: it may be the truth.
        best: list[tuple[Text, float]] = []
        for repeats in (False, True):
            equal_kind = [scored for scored in ranked if _repeats(scored[0]) == repeats]
            best += equal_kind[: beams * unfinished]
        levels.append(dict(best))
    return levels


def _repeats(text: Text) -> bool:
    return len(text) > 1 and len(set(text)) == 1


def _last_distances(
    observation: Observation,
    view: View,
    deficient: bool,
    uses_cache: bool,
    prefixes: list[Text],
    tokens: list[int],
) -> list[float]:
    """Return the squared relative distance from the span of each token behind each prefix.

    If the gradient has too few rows to span all inputs, the distance is from what it spans together
    with the inputs before (subspace-augmented MUSIC: Lee, Bresler and Junge, "Subspace Methods for
    Joint Sparse Recovery", 2012).
    """
    scores: list[float] = []
    prefixes_per_chunk = max(1, 256 // max(1, len(tokens)))
    starts = range(0, len(prefixes), prefixes_per_chunk), range(0, len(tokens), 256)
    chunks = [
        (prefixes[i : i + prefixes_per_chunk], tokens[j : j + 256]) for i, j in product(*starts)
    ]
    for chunk_prefixes, chunk_tokens in chunks:
        x = (
            inputs_of_endings(
                observation, view.projections, chunk_prefixes, chunk_tokens, uses_cache
            ).double()
            * view.space.columns
        )
        if deficient and x.shape[1] > 1:
            size = x[:, -1].square().sum(1)
            x = x - ((x @ view.directions.T) * view.trust) @ view.directions
            prefix_basis = torch.linalg.qr(x[:, :-1].mT).Q
            residual = x[:, -1] - (prefix_basis @ (prefix_basis.mT @ x[:, -1, :, None]))[:, :, 0]
            scores += (residual.square().sum(1) / size).tolist()
        else:
            scores += distances(x[:, -1], view.directions, view.trust).clamp(min=0).tolist()
    return scores
