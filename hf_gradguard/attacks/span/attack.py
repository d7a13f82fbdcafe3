"""The span attack: tokens whose layer inputs lie in the span of a weight gradient's rows.

The gradient of a linear layer's weight is δᵀX, where X, of one row per token, is what the layer
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

from ...gradient_map.domain import is_encoder_decoder
from ..base import Attack, Observation, Reconstruction, as_text
from ..layer_inputs import Readers, find_readers, is_causal_lm, with_length
from .decoder import extend
from .encoder import assemble
from .row_space import RowSpace, Search, complete, row_space, vectors
from .texts import View


def heard_positions(observation: Observation) -> Tensor:
    """Positions whose inputs the loss depends on: all tokens but, in a causal language model, each
    text's last.

    Raises:
        ValueError: If there are none.

    Example:
        >>> bool((heard_positions(observation) <= observation.tokens).all())
        True
    """
    heard = observation.tokens.clone()
    if is_causal_lm(observation.model):
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


VIEWS = 3  # that score an encoder's texts: the attention's output, and both feed-forward layers


@dataclass
class Span(Attack):
    """Rank every vocabulary token at every position by its distance from the span of the first
    layer's gradients.

    Encoders give each position's tokens. Which of a batch's sentences a token is of, and the order
    where positions are relative, are looked for by the gradients behind the attention; where none
    was shared, or it tells nothing, `undecided` says so. Decoders give whole sentences, extended
    token by token: what the layers behind the attention read for the last token of a right prefix
    lies in the span of their gradients. Of the candidates those are taken that together leave the
    least of that span unexplained.

    The attack needs fewer tokens in the batch than the layer is wide. Of LoRA that is the rank in
    the first message, in which A has no gradient; later on encoders are read whose texts have
    several times as many tokens. The last token of a causal language model's text is not in any
    gradient but the output head's: it is left at -1.

    Args:
        threshold: Take candidates of at most this relative distance from the span, as published,
            and not the nearest ones.
        shortlist: Candidates a position that are looked at closely; at least two for every token to
            be found there.
        beams: Prefixes of a decoder's text to keep, for every sentence of the batch.
        complete: Where a pruning left zeros, fill in what the gradient's low rank says, and do not
            take them for zeros.

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
        start = time.perf_counter()
        observation = with_length(observation)
        groups = find_readers(observation)
        first = _first(groups)
        behind = _behind(observation, groups, first)
        heard = heard_positions(observation)
        known = observation.known_ids().masked_fill(~heard, -1)
        wanted = heard & (known < 0)
        space = self.row_space(observation, first, largest_rank(known, wanted, first.positional))
        places = places_to_search(wanted, first.positional)
        found = Search(observation, first, space, *places, known).nearest(
            self.shortlist, self.threshold
        )
        found = _without_frame(observation, found)
        undecided = ""
        if behind and behind[0].mixing == "causal":
            widest = max(behind, key=lambda g: g.size)
            view = View(widest, self.row_space(observation, widest, int(heard.sum())))
            rows = extend(observation, view, heard, known, found, self.beams)
        else:
            views = self._views(observation, behind, heard)
            again = self.threshold is None
            rows = fill(wanted, known, found, first.positional, decided=bool(views), again=again)
            if views and (observation.batch_size > 1 or not first.positional):
                if not first.positional:
                    found = dict.fromkeys(range(observation.input_shape[1]), found.get(0, []))
                rows = assemble(observation, views, heard, known, found, rows, View(first, space))
            else:
                undecided = _undecided(observation, first)
        ids = [row[present].tolist() for row, present in zip(rows, observation.tokens, strict=True)]
        return Reconstruction(
            token_ids=ids,
            text=as_text(ids, observation.tokenizer),
            labels=observation.labels,
            objective=_objective(observation, first, space, rows),
            seconds=time.perf_counter() - start,
            undecided=" ".join(filter(None, (undecided, _repeated(ids)))),
        )

    def _views(self, observation: Observation, behind: list[Readers], heard: Tensor) -> list[View]:
        """The layers that tell whether a whole text is right, in the order in which they run."""
        views = []
        for readers in behind:
            rank = len(heard) if readers.pooled else int(heard.sum()) * readers.calls
            view = View(readers, self.row_space(observation, readers, rank))
            if rank < readers.size[0] and view.tells:
                views.append(view)
        return views[:VIEWS] + [v for v in views[VIEWS:] if v.readers.pooled]

    def row_space(self, observation: Observation, readers: Readers, rank: int) -> RowSpace:
        """The row space of some layers' gradients, weighed by the noise where it is known.

        Args:
            observation: What the server saw.
            readers: The layers, which read the same input.
            rank: The largest rank that their gradients can have without noise.
        """
        blocks = readers.gradients(observation)
        if self.complete:
            blocks = [complete(block, rank) for block in blocks]
        return row_space(blocks, _variances(observation, readers), rank)


def first_readers(groups: list[Readers]) -> Readers | None:
    """The readers of unmixed inputs with the largest gradient: the first block's query, key and
    value. Of LoRA's two matrices the one that reads tokens as they are, and not what the other made
    of them. `None` where there are none.

    Args:
        groups: As `find_readers` finds them.

    Example:
        >>> from hf_gradguard.attacks.layer_inputs import find_readers
        >>> first_readers(find_readers(observation)).mixing
        'none'
    """
    unmixed = [g for g in groups if g.mixing == "none"]
    return max(unmixed, key=lambda g: (-g.calls, g.size[0], g.width)) if unmixed else None


def _first(groups: list[Readers]) -> Readers:
    if (found := first_readers(groups)) is None:
        raise ValueError(
            "No gradient was shared of a linear layer that reads tokens before attention mixes "
            "them (in most models the first block's query, key and value), or it is zero: span has "
            "nothing to search. Attack by gradient matching, e.g. tag."
        )
    return found


def _behind(observation: Observation, groups: list[Readers], first: Readers) -> list[Readers]:
    """The readers of mixed inputs from after the first to its like in the next block, and those of
    whole texts behind the last.
    """
    behind = [g for g in groups[groups.index(first) + 1 :] if g.mixing != "none"]
    last = next((i for i, g in enumerate(behind) if g.calls == 1 and g.like(first)), len(behind))
    # An encoder-decoder's output is read where its text ends, which is nowhere in wrong ones.
    pooled = [] if is_encoder_decoder(observation.model) else [g for g in behind if g.pooled]
    return [g for g in behind[: last + 1] if not g.pooled] + pooled


def _without_frame(observation: Observation, found: dict[int, list[int]]) -> dict[int, list[int]]:
    """Where lengths are known, the special tokens around a text stand at their places alone."""
    if observation.tokenizer is None or observation.attention_mask is None:
        return found
    before, after = observation.frame
    frame = {*before, *after, observation.tokenizer.pad_token_id}
    return {place: [t for t in tokens if t not in frame] for place, tokens in found.items()}


def _undecided(observation: Observation, first: Readers) -> str:
    """What is left open where no gradient behind the attention tells a right text from others."""
    open_ = [
        part
        for part, holds in (
            ("in which order the tokens were", not first.positional),
            ("of which sentence a token is", observation.batch_size > 1),
        )
        if holds
    ]
    return f"No gradient behind the first attention tells {' nor '.join(open_)}." if open_ else ""


def _repeated(ids: list[list[int]]) -> str:
    """What is left open where one text is answered several times."""
    if len({tuple(text) for text in ids}) == len(ids):
        return ""
    return (
        "A text that is there several times spans what it spans once: another one may stand in its "
        "place that was not found."
    )


def _variances(observation: Observation, readers: Readers) -> list[Tensor] | None:
    """The known noise of each layer's gradient, in its shape."""
    variance = observation.noise_variance
    if variance is None:
        return None
    parts = []
    for index, name in enumerate(readers.names):
        value = variance[name] if isinstance(variance, Mapping) else torch.tensor(float(variance))
        parts.append(
            readers.like_rows(
                index, value.to(observation.device).expand(observation.gradient[name].shape)
            )
        )
    return parts


def _objective(observation: Observation, readers: Readers, space: RowSpace, rows: Tensor) -> float:
    """Share of the gradient's norm that what was found does not span."""
    at = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
    pairs = torch.stack([at, rows], -1)[rows >= 0].unique(dim=0)
    if not len(pairs):
        return 1.0
    places = pairs[:, 0] if readers.positional else torch.zeros_like(pairs[:, 0])
    basis = torch.linalg.qr(
        (vectors(observation, readers, pairs[:, 1:], places)[:, 0] * space.columns).T
    ).Q.T
    return math.sqrt(
        float(space.without(basis).factor.square().sum() / space.factor.square().sum())
    )
