"""The span attack: tokens whose layer inputs lie in the span of a weight gradient's rows.

The gradient of a linear layer's weight is δᵀX, where X, of one row a token, is what the layer
reads. In front of the first attention nothing has mixed positions yet, so X holds one known vector
for every (token, position) of the batch: a vocabulary token was there exactly if its vector lies in
the row space of the query, key and value gradients. Seconds, no optimization.

Reference: Petrov et al., "DAGER: Exact Gradient Inversion for Large Language Models" (2024). There
a fixed threshold decides; here candidates are ranked, which noise does not stop as soon.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...gradient_map.domain import TEXT
from ..base import Attack, Reconstruction, texts
from ..observation import Observation
from .completion import complete
from .layer_inputs import Readers, find_readers, is_causal_lm, layer_inputs
from .ordering import extend, group
from .subspace import RowSpace, distances, row_space, select

CHUNK = (
    2**20
    # entries of layer inputs at once: 4 MiB in float32. Much larger ones cost as much again in page
    # faults
)
# Word and position embeddings add up, so LN(w + p) of a token seen elsewhere, at a position where
# another was seen, can lie in the span too: what is nearly as near as the nearest goes on to where
# the attention has mixed them.
TIE, ALTERNATIVES = 1e4, 64


@dataclass
class Span(Attack):
    """Rank every vocabulary token at every position by its distance from the span of the first
    layer's gradients.

    Encoders give each position's tokens; a batch's are put into sentences by the gradients behind
    the attention, as far as those decide it. Decoders give whole sentences, extended token by
    token: what the layers behind the attention read for the last token of a right prefix lies in
    the span of their gradients. Encoders without absolute positions give a bag of tokens, the
    surest first.

    The attack needs fewer tokens in the batch than the layer is wide, or than LoRA matrices of the
    block have rows. The last token of a causal language model's text is not in any gradient but the
    output head's: it is left at -1.

    Args:
        threshold: Take candidates of at most this relative distance from the span, as published,
            and not the nearest ones.
        shortlist: Candidates a position that are looked at closely; at least two for every token to
            be found there.
        beams: Prefixes of a decoder's text to keep, for every sentence of the batch.
        complete: Where a pruning left zeros, fill in what the gradient's low rank says, and do not
            take them for zeros.

    Example:
        >>> seen = Observation(model=model, gradient=shared, input_shape=(1, 12), tokenizer=tokenizer)
        >>> Span()(seen).text
    """

    name: ClassVar[str] = "span"
    threshold: float | None = None
    shortlist: int = 128
    beams: int = 2
    complete: bool = False

    def __post_init__(self) -> None:
        if self.threshold is not None and not 0 < self.threshold < 1:
            raise ValueError(
                "threshold must be above 0 and below 1, a relative distance, but is "
                f"{self.threshold}."
            )
        for name in ("shortlist", "beams"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but is {getattr(self, name)}.")

    def reconstruct(self, seen: Observation, generator: torch.Generator) -> Reconstruction:
        start = time.perf_counter()
        if not seen.is_text:
            raise ValueError(
                "span looks for vocabulary tokens, but the input is pixels. Use "
                "inverting_gradients."
            )
        groups = find_readers(seen)
        first = _first(groups)
        behind = _behind(groups, first)
        heard = _heard(seen)
        known = seen.known_ids().masked_fill(~heard, -1)
        wanted = heard & (known < 0)
        space = self._space(seen, first, _rank(known, wanted, first.positional))
        places, capacity = _places(wanted, first.positional)
        found = self._find(seen, first, space, places, capacity, known)
        if behind and behind[0].mixing == "causal":
            mixed = self._space(seen, behind[0], int(heard.sum()))
            rows = extend(seen, behind[0], mixed, heard, known, found, self.beams)
        else:
            rows = _fill(wanted, known, found, places, first.positional)
            if first.positional and seen.batch_size > 1:
                spaces = [
                    (readers, self._space(seen, readers, int(heard.sum()))) for readers in behind
                ]
                rows = group(seen, spaces, heard, wanted, rows)
        ids = [row[present].tolist() for row, present in zip(rows, seen.tokens, strict=True)]
        return Reconstruction(
            token_ids=ids,
            text=texts(ids, seen.tokenizer),
            labels=seen.labels,
            objective=_objective(seen, first, space, rows),
            seconds=time.perf_counter() - start,
        )

    def _space(self, seen: Observation, readers: Readers, rank: int) -> RowSpace:
        blocks = readers.gradients(seen)
        if self.complete:
            blocks = [complete(block, rank) for block in blocks]
        return row_space(blocks, _variances(seen, readers), rank)

    def _find(
        self,
        seen: Observation,
        readers: Readers,
        space: RowSpace,
        places: Tensor,
        capacity: Tensor,
        known: Tensor,
    ) -> dict[int, list[int]]:
        """Token ids at every place, the best first."""
        if not len(places):
            return {}
        directions, trust = space.directions()
        if len(directions) >= len(space.columns):
            raise ValueError(
                f"The gradients of {', '.join(readers.names)} span all {len(space.columns)} "
                "dimensions of their inputs, so that every token lies in the span. span needs "
                "fewer tokens in a batch than the layer is wide (if there are: give "
                "attention_mask, or the true T). Attack by gradient matching, e.g. tag."
            )
        scores, ids = self._rank(seen, readers, space, places, capacity, directions, trust)
        if self.threshold is not None:
            near = scores.clamp(min=0).sqrt() <= self.threshold
            return {
                int(p): ids[i, near[i]][: int(capacity[i])].tolist() for i, p in enumerate(places)
            }
        vectors = _vectors(seen, readers, ids, places)
        frame = known >= 0
        certain = torch.stack([frame.nonzero()[:, 1], known[frame]], 1).unique(dim=0)
        at, tokens = certain[:, 0], certain[:, 1]
        given = (
            _vectors(
                seen, readers, tokens[:, None], at if readers.positional else torch.zeros_like(at)
            )[:, 0]
            if len(certain)
            else vectors.new_zeros(0, vectors.shape[-1])
        )
        chosen = select(space, given, vectors, capacity)
        found = {}
        for i, place in enumerate(places.tolist()):
            best: list[int] = [int(ids[i, k]) for k in chosen[i]]
            close: list[int] = ids[
                i, scores[i] <= TIE * scores[i, : int(capacity[i])].max().clamp(min=0)
            ].tolist()
            found[place] = best + [token for token in close if token not in best][:ALTERNATIVES]
        return found

    def _rank(
        self,
        seen: Observation,
        readers: Readers,
        space: RowSpace,
        places: Tensor,
        capacity: Tensor,
        directions: Tensor,
        trust: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Squared distances and ids `(P, K)` of the nearest tokens at every place, nearest
        first.
        """
        weight: Tensor = TEXT.embedding(seen.model).weight  # type: ignore[assignment]
        size = len(weight)
        padding = getattr(getattr(seen.model, "config", None), "pad_token_id", None)
        length = int(places.max()) + 1
        most = max(self.shortlist, 2 * int(capacity.max()))
        chunk = max(1, CHUNK // (length * len(space.columns)))
        best, kept = torch.empty(len(places), 0), torch.empty(len(places), 0, dtype=torch.long)
        best, kept = best.to(seen.device), kept.to(seen.device)
        for start in range(0, size, chunk):
            ids = torch.arange(start, min(start + chunk, size), device=seen.device)
            x = layer_inputs(seen, readers, ids[:, None].expand(-1, length))[:, places]
            x = x * space.columns.to(x.dtype)
            scores = distances(x, directions.to(x.dtype), trust.to(x.dtype)).T.float()
            if padding is not None:
                scores[:, ids == padding] = 2.0
            best = torch.cat([best, scores], 1)
            kept = torch.cat([kept, ids.expand(len(places), -1)], 1)
            best, order = best.topk(min(most, best.shape[1]), largest=False)
            kept = kept.gather(1, order)
        # Differences of squares near 1 lose half of float32's digits: once more, exactly.
        x = _vectors(seen, readers, kept, places) * space.columns
        scores, order = distances(x, directions, trust).sort(dim=1)
        return scores, kept.gather(1, order)


def _first(groups: list[Readers]) -> Readers:
    """The readers of unmixed inputs with the largest gradient: the first block's query, key and
    value.
    """
    unmixed = [g for g in groups if g.mixing == "none"]
    if not unmixed:
        raise ValueError(
            "No gradient was shared of a linear layer that reads tokens before attention mixes "
            "them (in most models the first block's query, key and value), or it is zero: span has "
            "nothing to search. Attack by gradient matching, e.g. tag."
        )
    return max(unmixed, key=lambda g: g.size)


def _behind(groups: list[Readers], first: Readers) -> list[Readers]:
    """The readers of mixed inputs from after the first to its like in the next block, the largest
    gradient first.
    """
    mixed = []
    for readers in groups[groups.index(first) + 1 :]:
        if readers.mixing != "none":
            mixed.append(readers)
            if readers.like(first):
                break
    return sorted(mixed, key=lambda g: g.size, reverse=True)


def _heard(seen: Observation) -> Tensor:
    """Positions whose inputs the loss depends on: all tokens but, in a causal language model, each
    text's last.
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


def _rank(known: Tensor, wanted: Tensor, positional: bool) -> int:
    """The most linearly independent inputs that there can be: equal tokens at equal positions count
    once.
    """
    at = torch.arange(known.shape[1], device=known.device).expand_as(known)
    pairs = torch.stack([at if positional else torch.zeros_like(at), known], -1)[known >= 0]
    return len(pairs.unique(dim=0)) + int(wanted.sum())


def _places(wanted: Tensor, positional: bool) -> tuple[Tensor, Tensor]:
    """Where to look, and for how many tokens at each. Without positions everything is in one
    place.
    """
    if not positional:
        total = wanted.sum().reshape(1)
        return torch.zeros_like(total)[total > 0], total[total > 0]
    counts = wanted.sum(0)
    return counts.nonzero().flatten(), counts[counts > 0]


def _vectors(seen: Observation, readers: Readers, ids: Tensor, places: Tensor) -> Tensor:
    """`(P, K, H)` in float64: what is read for each of the ids `(P, K)` at its place."""
    length = int(places.max()) + 1
    full = torch.zeros(ids.shape[1], length, dtype=torch.long, device=ids.device)
    out = []
    for place, tokens in zip(places.tolist(), ids, strict=True):
        out.append(layer_inputs(seen, readers, tokens[:, None].expand_as(full))[:, place].double())
    return torch.stack(out)


def _variances(seen: Observation, readers: Readers) -> list[Tensor] | None:
    """The known noise of each layer's gradient, in its shape."""
    variance = seen.noise_variance
    if variance is None:
        return None
    parts = []
    for index, name in enumerate(readers.names):
        value = variance[name] if isinstance(variance, Mapping) else torch.tensor(float(variance))
        parts.append(
            readers.like_rows(index, value.to(seen.device).expand(seen.gradient[name].shape))
        )
    return parts


def _fill(
    wanted: Tensor, known: Tensor, found: dict[int, list[int]], places: Tensor, positional: bool
) -> Tensor:
    """`(B, T)` ids: those known and, in the order found, those at each position; -1 where there is
    none.
    """
    rows = known.clone()
    if not positional:
        bag = found.get(0, [])[: int(wanted.sum())]
        slots = wanted.nonzero()[: len(bag)]
        rows[slots[:, 0], slots[:, 1]] = torch.tensor(bag, dtype=torch.long, device=rows.device)
        return rows
    for place in places.tolist():
        slots = wanted[:, place].nonzero().flatten()
        tokens = found[place][: len(slots)]
        rows[slots[: len(tokens)], place] = torch.tensor(
            tokens, dtype=torch.long, device=rows.device
        )
    return rows


def _objective(seen: Observation, readers: Readers, space: RowSpace, rows: Tensor) -> float:
    """Share of the gradient's norm that what was found does not span."""
    at = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
    pairs = torch.stack([at, rows], -1)[rows >= 0].unique(dim=0)
    if not len(pairs):
        return 1.0
    places = pairs[:, 0] if readers.positional else torch.zeros_like(pairs[:, 0])
    basis = torch.linalg.qr(
        (_vectors(seen, readers, pairs[:, 1:], places)[:, 0] * space.columns).T
    ).Q.T
    return math.sqrt(
        float(space.without(basis).factor.square().sum() / space.factor.square().sum())
    )
