"""The span attack, which finds tokens whose layer inputs lie in the span of a weight gradient.

The gradient of a linear layer's weight is δᵀX, where X, of one row per token, is the layer's input.
In front of the first attention nothing has mixed positions yet, so X holds one known vector for
every (token, position) of the batch: a vocabulary token was there exactly if its vector lies in the
row space of the query, key and value gradients. This takes seconds, and no optimization.

Reference: Petrov et al., "DAGER: Exact Gradient Inversion for Large Language Models" (2024). There
a fixed threshold decides; here candidates are ranked, which noise does not stop as soon.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ...gradient_map.domain import TEXT, is_encoder_decoder
from ..base import Attack, Clock, Observation, Reconstruction, as_text
from ..layer_inputs import Projections, Slots, find_projections, layer_inputs, with_length
from .decoder import extend_prefixes
from .encoder import assemble_texts
from .row_space import RowSpace, View, distances, row_space, select

# Entries of layer inputs at once: 4 MiB in float32. Much larger ones cost as much again in page
# faults.
CHUNK = 2**20
# Word and position embeddings add up, so LN(w + p) of a token seen elsewhere, at a position where
# another was seen, can lie in the span too: what is nearly as near as the nearest goes on to where
# the attention has mixed them.
TIE, ALTERNATIVES = 1e4, 64
SURE = 1e-16  # nearer than this are only tokens that were there, whatever the type


def nearest_tokens(
    observation: Observation,
    view: View,
    slots: Slots,
    shortlist: int,
    threshold: float | None,
) -> dict[int, list[int]]:
    """Return the ids that together span a row space, by position, the best first.

    Args:
        observation: The observation of the server.
        view: The layers whose inputs are candidates, with the row space of their gradients.
        slots: The places to look at; what is known there is in the span.
        shortlist: Candidates per position that are examined closely; at least two for every token
            to be found there.
        threshold: Take those of at most this relative distance, and not the nearest ones.

    Raises:
        ValueError: If the row space is everything, so that every token lies in it.

    Example:
        >>> from hf_gradguard.attacks.layer_inputs import find_projections
        >>> projections = find_projections(observation)[0]
        >>> slots = Slots.from_observation(observation)
        >>> view = View(projections, Span().row_space(observation, projections, rank=13))
        >>> nearest = nearest_tokens(observation, view, slots, shortlist=8, threshold=None)
        >>> set(gmap.batch["input_ids"][:, 1].tolist()) <= set(nearest[1])
        True
    """
    projections, width = view.projections, len(view.space.columns)
    positions, capacity = slots.capacity(projections.positional)
    if not len(positions):
        return {}
    if len(view.directions) >= width:
        raise ValueError(
            f"The gradients of {', '.join(projections.names)} span all {width} dimensions of their "
            "inputs, so that every token lies in the span. span needs fewer tokens in a batch than "
            "the layer is wide (if there are: give attention_mask, or the true T)"
            f"{_lora_advice(projections)}. Attack by gradient matching, e.g. tag."
        )
    count, limit = max(shortlist, 2 * int(capacity.max())), ALTERNATIVES
    if view.space.ends:  # all that lies in the span
        count = limit = max(count, len(view.directions))
    scores, ids = _rank_vocabulary(observation, view, positions, count)
    if threshold is not None:
        is_near = scores.clamp(min=0).sqrt() <= threshold
        return {
            int(position): ids[i, is_near[i]][: int(capacity[i])].tolist()
            for i, position in enumerate(positions)
        }
    candidates = vectors(observation, projections, ids, positions)
    known_vectors = candidates.new_zeros(0, candidates.shape[-1])
    if len(pairs := slots.known_pairs(projections.positional)):
        known_vectors = vectors(observation, projections, pairs[:, 1:], pairs[:, 0])[:, 0]
    chosen = select(view.space, known_vectors, candidates, capacity)
    return {
        position: _with_ties(ids[i], scores[i], chosen[i], int(capacity[i]), limit)
        for i, position in enumerate(positions.tolist())
    }


def _with_ties(
    ids: Tensor, scores: Tensor, chosen: list[int], capacity: int, limit: int
) -> list[int]:
    """Return the chosen ids of a position, and those that are as near."""
    best: list[int] = [int(ids[k]) for k in chosen]
    short = 0 < len(best) < capacity  # all that there is stands there
    nearest = scores[chosen] if short else scores[:capacity]
    farthest = nearest.max().clamp(min=SURE if short else 0)
    close: list[int] = ids[scores <= TIE * farthest].tolist()
    return best + [token for token in close if token not in best][:limit]


def _rank_vocabulary(
    observation: Observation, view: View, positions: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Return squared distances and ids `(P, count)` of the nearest tokens at every position.

    The nearest come first.
    """
    projections, columns = view.projections, view.space.columns
    size = len(TEXT.embedding(observation.model).weight)  # type: ignore[arg-type]
    padding = getattr(getattr(observation.model, "config", None), "pad_token_id", None)
    length = int(positions.max()) + 1
    chunk = max(1, CHUNK // (length * len(columns)))
    best_scores = torch.empty(len(positions), 0, device=observation.device)
    best_ids = torch.empty(len(positions), 0, dtype=torch.long, device=observation.device)
    for start in range(0, size, chunk):
        ids = torch.arange(start, min(start + chunk, size), device=observation.device)
        x = layer_inputs(observation, projections, ids[:, None].expand(-1, length))[:, positions]
        x = x * columns.to(x.dtype)
        scores = distances(x, view.directions.to(x.dtype), view.trust.to(x.dtype)).T.float()
        if padding is not None:
            scores[:, ids == padding] = 2.0
        best_scores = torch.cat([best_scores, scores], 1)
        best_ids = torch.cat([best_ids, ids.expand(len(positions), -1)], 1)
        best_scores, order = best_scores.topk(min(count, best_scores.shape[1]), largest=False)
        best_ids = best_ids.gather(1, order)
    # Differences of squares near 1 lose half of float32's digits: once more, exactly.
    x = vectors(observation, projections, best_ids, positions) * columns
    scores, order = distances(x, view.directions, view.trust).sort(dim=1, stable=True)
    return scores, best_ids.gather(1, order)


def _lora_advice(projections: Projections) -> str:
    """Return what else to do about LoRA, whose B reads no more of a token than A makes of it."""
    if not any("lora_B" in name for name in projections.names):
        return ""
    return (
        f": of LoRA of rank {projections.width} at most {projections.width - 1} while B is zero "
        "and A so has no gradient. Attack a later message, or with candidates"
    )


def vectors(
    observation: Observation, projections: Projections, ids: Tensor, positions: Tensor
) -> Tensor:
    """Return the layer input for each of the ids `(P, K)` at its position, `(P, K, H)` in float64.

    Example:
        >>> from hf_gradguard.attacks.layer_inputs import find_projections
        >>> ids = torch.tensor([[7, 8, 9]])
        >>> vectors(observation, find_projections(observation)[0], ids, torch.tensor([1])).shape[:2]
        torch.Size([1, 3])
    """
    length = int(positions.max()) + 1
    full = torch.zeros(ids.shape[1], length, dtype=torch.long, device=ids.device)
    inputs = []
    for position, tokens in zip(positions.tolist(), ids, strict=True):
        x = layer_inputs(observation, projections, tokens[:, None].expand_as(full))
        inputs.append(x[:, position].double())
    return torch.stack(inputs)


def complete(matrix: Tensor, rank: int, iterations: int = 30) -> Tensor:
    """Fill a matrix's zeros, taken for missing, from its best approximation of low rank.

    It alternates between filling and truncating (hard impute). A pruning drops small entries, so
    what is filled in stays within the smallest one that it kept.

    Args:
        matrix: The matrix, `(M, H)`. One without zeros is returned as it is.
        rank: The rank of the matrix, if nothing were missing.
        iterations: The number of rounds of filling and truncating.

    Example:
        >>> pruned = torch.tensor([[2.0, 4.0, 2.0], [2.0, 4.0, 2.0], [2.0, 4.0, 0.0]])
        >>> torch.allclose(complete(pruned, rank=1)[2], torch.tensor([2.0, 4.0, 2.0]), atol=0.01)
        True
    """
    missing = matrix == 0
    if not bool(missing.any()) or bool(missing.all()) or rank >= min(matrix.shape):
        return matrix
    bound = matrix[~missing].abs().min()
    filled = matrix.double()
    for _ in range(iterations):
        u, singular_values, vh = torch.linalg.svd(filled, full_matrices=False)
        low_rank = (u[:, :rank] * singular_values[:rank]) @ vh[:rank]
        filled = torch.where(missing, low_rank.clamp(-bound, bound), matrix.double())
    return filled.to(matrix.dtype)


def fill(slots: Slots, positional: bool, decided: bool = True, may_repeat: bool = False) -> Tensor:
    """Return rows of ids from the candidates at each position.

    Args:
        slots: Known ids, and candidates where others are looked for.
        positional: Whether the model has positions.
        decided: Whether a later step decides which sentence a token is of, or there is only one. If
            nothing decides it, tokens go to the sentences by their ids, so that the result does not
            depend on rounding errors.
        may_repeat: Whether tokens may be repeated if a position has more sentences than tokens were
            found: then these are all that there were.

    Returns:
        `(B, T)` ids: those known and, in the order found, those at each position; -1 where there is
            none.

    Example:
        >>> known_ids = torch.tensor([[2, -1], [2, -1]])
        >>> slots = Slots(torch.ones(2, 2).bool(), known_ids, {1: [9, 7, 8]})
        >>> fill(slots, positional=True).tolist()
        [[2, 9], [2, 7]]
        >>> fill(slots, positional=True, decided=False).tolist()
        [[2, 7], [2, 9]]
        >>> fill(replace(slots, candidate_ids={1: [9]}), True, may_repeat=True).tolist()
        [[2, 9], [2, 9]]
    """

    def take(ids: list[int], count: int) -> list[int]:
        return (ids * (count // max(1, len(ids)) + 1 if may_repeat else 1))[:count]

    rows, is_unknown = slots.known_ids.clone(), slots.is_unknown
    if not positional:
        bag = take(slots.candidate_ids.get(0, []), int(is_unknown.sum()))
        entries = is_unknown.nonzero()[: len(bag)]
        rows[entries[:, 0], entries[:, 1]] = torch.tensor(bag, dtype=torch.long, device=rows.device)
        return rows
    for position, ids in slots.candidate_ids.items():
        texts = is_unknown[:, position].nonzero().flatten()
        tokens = take(ids, len(texts))
        rows[texts[: len(tokens)], position] = torch.tensor(
            tokens if decided else sorted(tokens), dtype=torch.long, device=rows.device
        )
    return rows


VIEWS = 3  # that score an encoder's texts: the attention's output, and both feed-forward layers


@dataclass
class Span(Attack):
    """Ranks every vocabulary token at every position by its distance from a gradient's span.

    The span is that of the first layer's gradients. It gives each position's tokens in an encoder.
    The gradients behind the attention decide which of a batch's sentences a token is of, and the
    order if positions are relative: sentences are solved for if special tokens are known and there
    is no noise but rounding, and searched otherwise. If no such gradient was shared, or it decides
    nothing, `undecided` says so. Decoders give whole sentences, extended token by token: what the
    layers behind the attention read for the last token of a correct prefix lies in the span of
    their gradients. Of the candidates those are taken that together leave the least of that span
    unexplained.

    The attack needs fewer tokens in the batch than the layer is wide. For LoRA that width is the
    rank in the first message, in which A has no gradient; later on encoders are read whose texts
    have several times as many tokens. The last token of a causal language model's text is not in
    any gradient but the output head's: it is left at -1.

    Args:
        threshold: Take candidates of at most this relative distance from the span, as published,
            and not the nearest ones.
        shortlist: Candidates a position that are examined closely; at least two for every token to
            be found there.
        beams: Prefixes of a decoder's text to keep, for every sentence of the batch.
        complete: Where a pruning left zeros, fill in what the gradient's low rank says, instead of
            taking them for zeros.
        seconds: Time after which the nearest texts so far are returned. The vocabulary is always
            ranked.

    Example:
        >>> found = Span()(observation)
        >>> [len(ids) for ids in found.token_ids] == observation.tokens.sum(1).tolist()
        True
    """

    name: ClassVar[str] = "span"
    domains: ClassVar[tuple[str, ...]] = ("text",)
    informed_by: ClassVar[frozenset[str]] = frozenset({"noise_variance"})
    threshold: float | None = None
    shortlist: int = 128
    beams: int = 2
    complete: bool = False
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.threshold is not None and not 0 < self.threshold < 1:
            raise ValueError(
                "threshold must be above 0 and below 1, a relative distance, but is "
                f"{self.threshold}."
            )
        for name in ("shortlist", "beams"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but is {getattr(self, name)}.")

    def reconstruct(self, observation: Observation, generator: torch.Generator) -> Reconstruction:
        clock = Clock(self.seconds)
        observation = with_length(observation)
        groups = find_projections(observation)
        unmixed = _need_first_projections(groups)
        mixed = _mixed_projections(observation, groups, unmixed)
        slots, positional = Slots.from_observation(observation), unmixed.positional
        rank = len(slots.known_pairs(positional)) + int(slots.is_unknown.sum())
        first_view = View(unmixed, self.row_space(observation, unmixed, rank))
        search = self.shortlist, self.threshold
        candidate_ids = nearest_tokens(observation, first_view, slots, *search)
        slots = replace(slots, candidate_ids=_without_frame(observation, candidate_ids))
        undecided = ""
        if mixed and mixed[0].mixing == "causal":
            widest = max(
                mixed, key=lambda projections: (projections.max_rank, projections.num_rows)
            )
            space = self.row_space(observation, widest, int(slots.attended.sum()))
            rows = extend_prefixes(observation, View(widest, space), slots, self.beams, clock)
        else:
            views = self._views(observation, mixed, slots.attended)
            may_repeat = self.threshold is None
            rows = fill(slots, positional, decided=bool(views), may_repeat=may_repeat)
            if views and (observation.batch_size > 1 or not positional):
                if not positional:  # any of the tokens may stand anywhere
                    everywhere, length = slots.candidate_ids.get(0, []), observation.input_shape[1]
                    candidate_ids = dict.fromkeys(range(length), everywhere)
                    slots = replace(slots, candidate_ids=candidate_ids)
                rows = assemble_texts(observation, views, slots, rows, first_view, clock)
            else:
                undecided = _undecided(observation, unmixed)
        ids = [row[present].tolist() for row, present in zip(rows, observation.tokens, strict=True)]
        return Reconstruction(
            token_ids=ids,
            text=as_text(ids, observation.tokenizer),
            labels=observation.labels,
            objective=_objective(observation, first_view, rows),
            seconds=clock.elapsed,
            undecided=" ".join(filter(None, (undecided, _cut_short(clock), _repeated(ids)))),
            complete=not clock.has_stopped,
        )

    def _views(
        self, observation: Observation, mixed: list[Projections], attended: Tensor
    ) -> list[View]:
        """Return the layers that show whether a whole text is correct, in running order."""
        views = []
        for projections in mixed:
            rank = len(attended) if projections.pooled else int(attended.sum()) * projections.calls
            view = View(projections, self.row_space(observation, projections, rank))
            if rank < projections.max_rank and view.is_informative:
                views.append(view)
        return views[:VIEWS] + [v for v in views[VIEWS:] if v.projections.pooled]

    def row_space(self, observation: Observation, projections: Projections, rank: int) -> RowSpace:
        """Return the row space of some layers' gradients, weighed by the noise if it is known.

        Args:
            observation: The observation of the server.
            projections: The layers, which read the same input.
            rank: The largest rank that their gradients can have without noise.
        """
        blocks = projections.gradients(observation)
        if self.complete:
            blocks = [complete(block, rank) for block in blocks]
        return row_space(blocks, _variances(observation, projections), rank)


def first_projections(groups: list[Projections]) -> Projections | None:
    """Return the layers with unmixed inputs and the largest gradient, or `None`.

    They are the first block's query, key and value. Of LoRA's two matrices it is the one that reads
    tokens as they are, and not what the other made of them.

    Args:
        groups: Groups of layers as `find_projections` finds them.

    Example:
        >>> from hf_gradguard.attacks.layer_inputs import find_projections
        >>> first_projections(find_projections(observation)).mixing
        'none'
    """
    unmixed = [g for g in groups if g.mixing == "none"]
    return max(unmixed, key=lambda g: (-g.calls, g.max_rank, g.width)) if unmixed else None


def _need_first_projections(groups: list[Projections]) -> Projections:
    if (unmixed := first_projections(groups)) is None:
        raise ValueError(
            "No gradient was shared of a linear layer that reads tokens before attention mixes "
            "them (in most models the first block's query, key and value), or it is zero: span has "
            "nothing to search. Attack by gradient matching, e.g. tag."
        )
    return unmixed


def _mixed_projections(
    observation: Observation, groups: list[Projections], unmixed: Projections
) -> list[Projections]:
    """Return the layers with mixed inputs between the first ones and the next block's.

    Those of whole texts behind the last block follow.
    """
    mixed = [g for g in groups[groups.index(unmixed) + 1 :] if g.mixing != "none"]
    blocks = (i for i, g in enumerate(mixed) if g.calls == 1 and g.has_shapes_of(unmixed))
    next_block = next(blocks, len(mixed))
    # An encoder-decoder's output is read where its text ends, which is nowhere in wrong ones.
    pooled = [] if is_encoder_decoder(observation.model) else [g for g in mixed if g.pooled]
    return [g for g in mixed[: next_block + 1] if not g.pooled] + pooled


def _without_frame(
    observation: Observation, candidate_ids: dict[int, list[int]]
) -> dict[int, list[int]]:
    """Return candidates without the special tokens around a text, if lengths are known.

    Then these stand only at their own places.
    """
    if observation.tokenizer is None or observation.attention_mask is None:
        return candidate_ids
    prefix_ids, suffix_ids = observation.frame
    frame = {*prefix_ids, *suffix_ids, observation.tokenizer.pad_token_id}
    return {place: [t for t in tokens if t not in frame] for place, tokens in candidate_ids.items()}


def _undecided(observation: Observation, unmixed: Projections) -> str:
    """Return what is undecided where no gradient behind the attention shows a correct text."""
    open_ = [
        open_question
        for open_question, is_open in (
            ("in which order the tokens were", not unmixed.positional),
            ("of which sentence a token is", observation.batch_size > 1),
        )
        if is_open
    ]
    return f"No gradient behind the first attention tells {' nor '.join(open_)}." if open_ else ""


def _cut_short(clock: Clock) -> str:
    """Return what is undecided because time was up."""
    if not clock.has_stopped:
        return ""
    return f"Time was up after {clock.seconds:g} seconds: these are the nearest texts so far."


def _repeated(ids: list[list[int]]) -> str:
    """Return what is undecided because one text is answered several times."""
    if len({tuple(text) for text in ids}) == len(ids):
        return ""
    return (
        "A text that is there several times spans what it spans once: another one may stand in its "
        "place that was not found."
    )


def _variances(observation: Observation, projections: Projections) -> list[Tensor] | None:
    """Return the known noise variance of each layer's gradient, in its shape."""
    variance = observation.noise_variance
    if variance is None:
        return None
    variances = []
    for index, name in enumerate(projections.names):
        value = variance[name] if isinstance(variance, Mapping) else torch.tensor(float(variance))
        value = value.to(observation.device).expand(observation.gradient[name].shape)
        variances.append(projections.as_rows(index, value))
    return variances


def _objective(observation: Observation, view: View, rows: Tensor) -> float:
    """Return the fraction of the gradient's norm that the recovered tokens do not span."""
    space, tokens = view.space, Slots(rows >= 0, rows).known_pairs(view.projections.positional)
    if not len(tokens):
        return 1.0
    inputs = vectors(observation, view.projections, tokens[:, 1:], tokens[:, 0])[:, 0]
    basis = torch.linalg.qr((inputs * space.columns).T).Q.T
    unexplained = space.without(basis).factor.square().sum()
    return math.sqrt(float(unexplained / space.factor.square().sum()))
