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
from .row_space import NearestTokens, RowSpace, complete, row_space, vectors
from .texts import View


def attended_positions(observation: Observation) -> Tensor:
    """Positions whose inputs the loss depends on: all tokens but, in a causal language model, each
    text's last.

    Raises:
        ValueError: If there are none.

    Example:
        >>> bool((attended_positions(observation) <= observation.tokens).all())
        True
    """
    attended = observation.tokens.clone()
    if is_causal_lm(observation.model):
        for row in attended:
            row[row.nonzero()[-1:]] = False
    if not attended.any():
        raise ValueError(
            "No position is left to look for: the texts have no tokens that the loss depends on."
        )
    return attended


def largest_rank(known_ids: Tensor, is_unknown: Tensor, positional: bool) -> int:
    """The most linearly independent inputs that there can be: equal tokens at equal positions count
    once.

    Example:
        >>> known = torch.tensor([[2, -1, 3], [2, -1, 3]])  # [CLS], a word, [SEP]; twice
        >>> largest_rank(known, known < 0, positional=True)
        4
    """
    positions = torch.arange(known_ids.shape[1], device=known_ids.device).expand_as(known_ids)
    pairs = torch.stack([positions if positional else torch.zeros_like(positions), known_ids], -1)[
        known_ids >= 0
    ]
    return len(pairs.unique(dim=0)) + int(is_unknown.sum())


def places_to_search(is_unknown: Tensor, positional: bool) -> tuple[Tensor, Tensor]:
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
        total = is_unknown.sum().reshape(1)
        return torch.zeros_like(total)[total > 0], total[total > 0]
    counts = is_unknown.sum(0)
    return counts.nonzero().flatten(), counts[counts > 0]


def fill(
    is_unknown: Tensor,
    known_ids: Tensor,
    candidate_ids: dict[int, list[int]],
    positional: bool,
    decided: bool = True,
    may_repeat: bool = False,
) -> Tensor:
    """Rows of ids from what was found at each place.

    Args:
        is_unknown: `(B, T)`, true where a token is looked for.
        known_ids: `(B, T)` known ids, -1 elsewhere.
        candidate_ids: Ids by place, the best first; under 0 alone if there are no positions.
        positional: Whether there are.
        decided: Whether a later step tells which sentence a token is of, or there is but one.
            If nothing tells whose token it is, they go to the sentences by their ids, so that the
            result does not hang on rounding errors.
        may_repeat: Whether, where a place has more sentences than tokens were found, these stand
            there several times: then that is all there was.

    Returns:
        `(B, T)` ids: those known and, in the order found, those at each position; -1 where there
        is none.

    Example:
        >>> known = torch.tensor([[2, -1], [2, -1]])
        >>> fill(known < 0, known, {1: [9, 7, 8]}, positional=True).tolist()
        [[2, 9], [2, 7]]
        >>> fill(known < 0, known, {1: [9, 7, 8]}, positional=True, decided=False).tolist()
        [[2, 7], [2, 9]]
        >>> fill(known < 0, known, {1: [9]}, positional=True, may_repeat=True).tolist()
        [[2, 9], [2, 9]]
    """

    def take(ids: list[int], count: int) -> list[int]:
        return (ids * (count // max(1, len(ids)) + 1 if may_repeat else 1))[:count]

    rows = known_ids.clone()
    if not positional:
        bag = take(candidate_ids.get(0, []), int(is_unknown.sum()))
        slots = is_unknown.nonzero()[: len(bag)]
        rows[slots[:, 0], slots[:, 1]] = torch.tensor(bag, dtype=torch.long, device=rows.device)
        return rows
    for place, ids in candidate_ids.items():
        slots = is_unknown[:, place].nonzero().flatten()
        tokens = take(ids, len(slots))
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
        unmixed = _need_first_readers(groups)
        mixed = _mixed_readers(observation, groups, unmixed)
        attended = attended_positions(observation)
        known_ids = observation.known_ids().masked_fill(~attended, -1)
        is_unknown = attended & (known_ids < 0)
        space = self.row_space(
            observation, unmixed, largest_rank(known_ids, is_unknown, unmixed.positional)
        )
        places = places_to_search(is_unknown, unmixed.positional)
        candidate_ids = NearestTokens(observation, unmixed, space, *places, known_ids).nearest(
            self.shortlist, self.threshold
        )
        candidate_ids = _without_frame(observation, candidate_ids)
        undecided = ""
        if mixed and mixed[0].mixing == "causal":
            widest = max(mixed, key=lambda g: g.size)
            view = View(widest, self.row_space(observation, widest, int(attended.sum())))
            rows = extend(observation, view, attended, known_ids, candidate_ids, self.beams)
        else:
            views = self._views(observation, mixed, attended)
            may_repeat = self.threshold is None
            rows = fill(
                is_unknown,
                known_ids,
                candidate_ids,
                unmixed.positional,
                decided=bool(views),
                may_repeat=may_repeat,
            )
            if views and (observation.batch_size > 1 or not unmixed.positional):
                if not unmixed.positional:
                    candidate_ids = dict.fromkeys(
                        range(observation.input_shape[1]), candidate_ids.get(0, [])
                    )
                rows = assemble(
                    observation,
                    views,
                    attended,
                    known_ids,
                    candidate_ids,
                    rows,
                    View(unmixed, space),
                )
            else:
                undecided = _undecided(observation, unmixed)
        ids = [row[present].tolist() for row, present in zip(rows, observation.tokens, strict=True)]
        return Reconstruction(
            token_ids=ids,
            text=as_text(ids, observation.tokenizer),
            labels=observation.labels,
            objective=_objective(observation, unmixed, space, rows),
            seconds=time.perf_counter() - start,
            undecided=" ".join(filter(None, (undecided, _repeated(ids)))),
        )

    def _views(
        self, observation: Observation, mixed: list[Readers], attended: Tensor
    ) -> list[View]:
        """The layers that tell whether a whole text is right, in the order in which they run."""
        views = []
        for readers in mixed:
            rank = len(attended) if readers.pooled else int(attended.sum()) * readers.calls
            view = View(readers, self.row_space(observation, readers, rank))
            if rank < readers.size[0] and view.is_informative:
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


def _need_first_readers(groups: list[Readers]) -> Readers:
    if (unmixed := first_readers(groups)) is None:
        raise ValueError(
            "No gradient was shared of a linear layer that reads tokens before attention mixes "
            "them (in most models the first block's query, key and value), or it is zero: span has "
            "nothing to search. Attack by gradient matching, e.g. tag."
        )
    return unmixed


def _mixed_readers(
    observation: Observation, groups: list[Readers], unmixed: Readers
) -> list[Readers]:
    """The readers of mixed inputs from after the first to its like in the next block, and those of
    whole texts behind the last.
    """
    mixed = [g for g in groups[groups.index(unmixed) + 1 :] if g.mixing != "none"]
    next_block = next(
        (i for i, g in enumerate(mixed) if g.calls == 1 and g.has_shapes_of(unmixed)), len(mixed)
    )
    # An encoder-decoder's output is read where its text ends, which is nowhere in wrong ones.
    pooled = [] if is_encoder_decoder(observation.model) else [g for g in mixed if g.pooled]
    return [g for g in mixed[: next_block + 1] if not g.pooled] + pooled


def _without_frame(
    observation: Observation, candidate_ids: dict[int, list[int]]
) -> dict[int, list[int]]:
    """Where lengths are known, the special tokens around a text stand at their places alone."""
    if observation.tokenizer is None or observation.attention_mask is None:
        return candidate_ids
    prefix_ids, suffix_ids = observation.frame
    frame = {*prefix_ids, *suffix_ids, observation.tokenizer.pad_token_id}
    return {place: [t for t in tokens if t not in frame] for place, tokens in candidate_ids.items()}


def _undecided(observation: Observation, unmixed: Readers) -> str:
    """What is left open where no gradient behind the attention tells a right text from others."""
    open_ = [
        open_question
        for open_question, is_open in (
            ("in which order the tokens were", not unmixed.positional),
            ("of which sentence a token is", observation.batch_size > 1),
        )
        if is_open
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
    variances = []
    for index, name in enumerate(readers.names):
        value = variance[name] if isinstance(variance, Mapping) else torch.tensor(float(variance))
        variances.append(
            readers.as_rows(
                index, value.to(observation.device).expand(observation.gradient[name].shape)
            )
        )
    return variances


def _objective(observation: Observation, readers: Readers, space: RowSpace, rows: Tensor) -> float:
    """Share of the gradient's norm that what was found does not span."""
    positions = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
    pairs = torch.stack([positions, rows], -1)[rows >= 0].unique(dim=0)
    if not len(pairs):
        return 1.0
    places = pairs[:, 0] if readers.positional else torch.zeros_like(pairs[:, 0])
    basis = torch.linalg.qr(
        (vectors(observation, readers, pairs[:, 1:], places)[:, 0] * space.columns).T
    ).Q.T
    return math.sqrt(
        float(space.without(basis).factor.square().sum() / space.factor.square().sum())
    )
