"""The vocabulary, ranked by its distance from a row space: every token at every place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...gradient_map.domain import TEXT
from ..observation import Observation
from .layer_inputs import Readers, layer_inputs
from .subspace import RowSpace, distances, select

CHUNK = (
    2**20
    # entries of layer inputs at once: 4 MiB in float32. Much larger ones cost as much again in page
    # faults
)
# Word and position embeddings add up, so LN(w + p) of a token seen elsewhere, at a position where
# another was seen, can lie in the span too: what is nearly as near as the nearest goes on to where
# the attention has mixed them.
TIE, ALTERNATIVES = 1e4, 64
SURE = 1e-16  # nearer than this are only tokens that were there, whatever the type


@dataclass(frozen=True)
class Search:
    """What is looked for, and in what.

    Args:
        seen: What the server saw.
        readers: The layers whose inputs are candidates.
        space: The row space of their gradients.
        places: `(P,)` positions to look at.
        capacity: `(P,)`: how many tokens to find at each.
        known: `(B, T)` known ids, -1 elsewhere.

    Example:
        >>> from hf_gradguard.attacks.span.attack import Span
        >>> from hf_gradguard.attacks.span.layer_inputs import find_readers
        >>> first = find_readers(seen)[0]
        >>> space = Span().row_space(seen, first, rank=int(seen.tokens.sum()))
        >>> at = torch.tensor([1])
        >>> search = Search(seen, first, space, at, torch.tensor([2]), seen.known_ids())
        >>> found = search.nearest(shortlist=8, threshold=None)
        >>> set(gmap.batch["input_ids"][:, 1].tolist()) <= set(found[1])
        True
    """

    seen: Observation
    readers: Readers
    space: RowSpace
    places: Tensor
    capacity: Tensor
    known: Tensor

    def nearest(self, shortlist: int, threshold: float | None) -> dict[int, list[int]]:
        """Token ids at every place, the best first.

        Args:
            shortlist: Candidates a place that are looked at closely; at least two for every token
                to be found there.
            threshold: Take those of at most this relative distance, and not the nearest ones.

        Raises:
            ValueError: If the row space is everything, so that every token lies in it.
        """
        if not len(self.places):
            return {}
        directions, trust = self.space.directions()
        if len(directions) >= len(self.space.columns):
            raise ValueError(
                f"The gradients of {', '.join(self.readers.names)} span all "
                f"{len(self.space.columns)} dimensions of their inputs, so that every token lies "
                "in the span. span needs fewer tokens in a batch than the layer is wide (if there "
                f"are: give attention_mask, or the true T){_of_rank(self.readers)}. Attack by "
                "gradient matching, e.g. tag."
            )
        scores, ids = self._ranked(directions, trust, shortlist)
        if threshold is not None:
            near = scores.clamp(min=0).sqrt() <= threshold
            return {
                int(p): ids[i, near[i]][: int(self.capacity[i])].tolist()
                for i, p in enumerate(self.places)
            }
        return self._chosen(scores, ids)

    def _ranked(self, directions: Tensor, trust: Tensor, shortlist: int) -> tuple[Tensor, Tensor]:
        """Squared distances and ids `(P, K)` of the nearest tokens at every place, nearest
        first.
        """
        seen, readers, space, places = self.seen, self.readers, self.space, self.places
        weight: Tensor = TEXT.embedding(seen.model).weight  # type: ignore[assignment]
        size = len(weight)
        padding = getattr(getattr(seen.model, "config", None), "pad_token_id", None)
        length = int(places.max()) + 1
        most = max(shortlist, 2 * int(self.capacity.max()))
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
        x = vectors(seen, readers, kept, places) * space.columns
        scores, order = distances(x, directions, trust).sort(dim=1, stable=True)
        return scores, kept.gather(1, order)

    def _chosen(self, scores: Tensor, ids: Tensor) -> dict[int, list[int]]:
        """Of ranked tokens those that together span the row space, then others as near as they."""
        seen, readers = self.seen, self.readers
        candidates = vectors(seen, readers, ids, self.places)
        frame = self.known >= 0
        certain = torch.stack([frame.nonzero()[:, 1], self.known[frame]], 1).unique(dim=0)
        given = candidates.new_zeros(0, candidates.shape[-1])
        if len(certain):
            at, tokens = certain[:, 0], certain[:, 1]
            at = at if readers.positional else torch.zeros_like(at)
            given = vectors(seen, readers, tokens[:, None], at)[:, 0]
        chosen = select(self.space, given, candidates, self.capacity)
        found = {}
        for i, place in enumerate(self.places.tolist()):
            best: list[int] = [int(ids[i, k]) for k in chosen[i]]
            short = 0 < len(best) < int(self.capacity[i])  # all that there is stands there
            nearest = scores[i, chosen[i]] if short else scores[i, : int(self.capacity[i])]
            farthest = nearest.max().clamp(min=SURE if short else 0)
            close: list[int] = ids[i, scores[i] <= TIE * farthest].tolist()
            found[place] = best + [token for token in close if token not in best][:ALTERNATIVES]
        return found


def _of_rank(readers: Readers) -> str:
    """What else to do about LoRA, whose B reads no more of a token than A makes of it."""
    if not any("lora_B" in name for name in readers.names):
        return ""
    return (
        f": of LoRA of rank {readers.width} at most {readers.width - 1} while B is zero and A so "
        "has no gradient. Attack a later message, or with candidates"
    )


def vectors(seen: Observation, readers: Readers, ids: Tensor, places: Tensor) -> Tensor:
    """`(P, K, H)` in float64: what is read for each of the ids `(P, K)` at its place.

    Example:
        >>> from hf_gradguard.attacks.span.layer_inputs import find_readers
        >>> ids = torch.tensor([[7, 8, 9]])
        >>> vectors(seen, find_readers(seen)[0], ids, torch.tensor([1])).shape[:2]
        torch.Size([1, 3])
    """
    length = int(places.max()) + 1
    full = torch.zeros(ids.shape[1], length, dtype=torch.long, device=ids.device)
    out = []
    for place, tokens in zip(places.tolist(), ids, strict=True):
        out.append(layer_inputs(seen, readers, tokens[:, None].expand_as(full))[:, place].double())
    return torch.stack(out)
