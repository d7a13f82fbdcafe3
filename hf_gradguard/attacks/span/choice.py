"""Of candidate texts those that together fit what was shared."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..observation import Observation
from .views import Explained, View, vectors_of

Text = tuple[int, ...]
CLOSE = 0.1  # dimensions: nearer than this, nothing is left to better
NEAR = 1e-4  # a position's squared distance that only right texts have, if there is no noise


def choose(
    seen: Observation,
    views: Sequence[View],
    candidates: Sequence[dict[Text, float]],
    sweeps: int = 3,
) -> list[Text]:
    """One candidate for each row: those whose inputs lie in the views' spans, and that leave the
    least of them unexplained. A right text, taken twice, is better than a wrong one that explains
    no more than rounding.

    Args:
        views: Layers with the row spaces of their gradients.
        candidates: For each row the texts, with their distances from the spans.

    Returns:
        For each row a text; an empty one where there is no candidate.

    Example:
        >>> from hf_gradguard.attacks.span.layer_inputs import find_readers
        >>> from hf_gradguard.attacks.span.subspace import row_space
        >>> mixed = next(r for r in find_readers(seen) if r.mixing == "full")
        >>> view = View(mixed, row_space(mixed.gradients(seen), None, rank=13))
        >>> right = [tuple(row[row > 0].tolist()) for row in batch["input_ids"]]
        >>> found = choose(seen, [view], [dict.fromkeys(right, 0.0)] * 2)
        >>> sorted(found) == sorted(right)
        True
    """
    texts = list(dict.fromkeys(text for row in candidates for text in row))
    vectors: dict[Text, list[Tensor]] = dict(
        zip(texts, vectors_of(seen, views, texts), strict=True)
    )
    chosen = _choose(views, candidates, vectors, sweeps)
    right = [
        {text: far for text, far in row.items() if far < NEAR * len(text)} or row
        for row in candidates
    ]
    # Where rounding does not end, it counts as something to explain.
    ends = [k for k, view in enumerate(views) if view.space.ends]
    if ends and any(text not in row for text, row in zip(chosen, right, strict=True) if row):
        again = _choose(views, right, vectors, sweeps)
        mine, others = (_left(views, ends, texts, vectors) for texts in (again, chosen))
        if mine <= others + CLOSE * len(ends):
            return again
    return chosen


def _left(
    views: Sequence[View],
    some: Sequence[int],
    texts: Sequence[Text],
    vectors: dict[Text, list[Tensor]],
) -> float:
    """What texts leave unexplained of some of the views."""
    explained = Explained([views[k] for k in some])
    for text in filter(None, texts):
        explained.take([vectors[text][k] for k in some])
    return explained.left


def _choose(
    views: Sequence[View],
    candidates: Sequence[dict[Text, float]],
    vectors: dict[Text, list[Tensor]],
    sweeps: int,
) -> list[Text]:
    """The best for each row in turn, and again beside those of all others."""
    chosen: list[Text] = [()] * len(candidates)
    # Long texts first: short ones may be their beginnings.
    order = sorted(range(len(candidates)), key=lambda i: -max(map(len, candidates[i]), default=0))
    explained = Explained(views)
    for index in order:
        chosen[index] = _best(candidates[index], vectors, explained)
        if chosen[index]:
            explained.take(vectors[chosen[index]])
    for _ in range(sweeps):
        if explained.left < CLOSE * len(views):
            break
        before = list(chosen)
        for index in order:
            explained = Explained(views)
            for other in order:
                if other != index and chosen[other]:
                    explained.take(vectors[chosen[other]])
            chosen[index] = _best(candidates[index], vectors, explained)
            if chosen[index]:
                explained.take(vectors[chosen[index]])
        if chosen == before:
            break
    return chosen


def _best(row: dict[Text, float], vectors: dict[Text, list[Tensor]], explained: Explained) -> Text:
    return min(row, key=lambda text: row[text] - explained.gain(vectors[text]), default=())
