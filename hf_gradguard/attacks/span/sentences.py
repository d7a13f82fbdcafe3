"""Whole texts against the gradients of layers behind the attention.

Two numbers count: what a text's layer inputs leave outside the gradients' span, and what of that
span a batch of texts leaves unexplained. Both count dimensions. A correct text has all its inputs
inside; but so has a text that repeats its first token behind causal attention without positions,
which reads the same thing everywhere. Only the correct batch also explains every direction of the
gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..base import Observation, ordinary_id
from ..layer_inputs import all_inputs
from .row_space import View, distances, orthonormal

CHUNK = 2**14  # tokens a pass: much larger ones cost as much again in page faults
SAME = 1e-5  # inputs of float32 that are nearer to each other's span than this are the same


def distance_outside(
    observation: Observation, views: Sequence[View], ids: Tensor, masks: Tensor
) -> Tensor:
    """Return the sum of squared relative distances of each text's inputs from the spans, `(K,)`.

    Args:
        observation: The observation of the server.
        views: Layers with the row spaces of their gradients.
        ids: Texts, `(K, T)`.
        masks: The positions that count, `(K, T)`.

    Example:
        >>> from hf_gradguard.attacks.layer_inputs import find_projections
        >>> from hf_gradguard.attacks.span.row_space import row_space
        >>> mixed = next(r for r in find_projections(observation) if r.mixing == "full")
        >>> view = View(mixed, row_space(mixed.gradients(observation), None, rank=13))
        >>> ids, mask = batch["input_ids"], batch["attention_mask"].bool()
        >>> far = distance_outside(observation, [view], ids, mask)
        >>> wrong = ids.clone()
        >>> wrong[:, 1] = ids[:, 1].flip(0)  # the first word of the other sentence
        >>> bool(distance_outside(observation, [view], wrong, mask)[0] > 2 * far[0])
        True
    """
    totals = []
    length = int(masks.any(0).nonzero().max()) + 1  # what pads all of them on the right is not read
    ids, masks = ids[:, :length], masks[:, :length]
    ids = torch.where(ids >= 0, ids, ordinary_id(observation.model, observation.tokenizer))
    texts_per_pass = max(1, CHUNK // ids.shape[1])
    for start in range(0, len(ids), texts_per_pass):
        mask = masks[start : start + texts_per_pass]
        rows, projections = (
            ids[start : start + texts_per_pass],
            [view.projections for view in views],
        )
        inputs = all_inputs(observation, projections, rows, mask)
        total = torch.zeros(len(mask), dtype=torch.float64, device=ids.device)
        for view, x in zip(views, inputs, strict=True):
            x = x.double() * view.space.columns
            squared = distances(x, view.directions, view.trust).clamp(min=0)
            total += squared if squared.dim() == 1 else (squared * mask).sum(1)
        totals.append(total)
    return torch.cat(totals)


def vectors_of(
    observation: Observation, views: Sequence[View], ids: Sequence[Sequence[int]]
) -> list[list[Tensor]]:
    """Return for every text and view the layer inputs, `(T, H)`, each of unit length."""
    vectors: list[list[Tensor]] = []
    for text in ids:
        row = torch.tensor([list(text)], device=observation.device)
        inputs = all_inputs(observation, [view.projections for view in views], row)
        vectors.append([])
        for view, x in zip(views, inputs, strict=True):
            rows = x[0, : len(text)] if x.dim() == 3 else x
            rows = rows.double() * view.space.columns
            vectors[-1].append(rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-30))
    return vectors


class Explained:
    """The part of the views' row spaces that the texts taken so far explain.

    Example:
        >>> from hf_gradguard.attacks.layer_inputs import find_projections
        >>> from hf_gradguard.attacks.span.row_space import row_space
        >>> mixed = next(r for r in find_projections(observation) if r.mixing == "full")
        >>> view = View(mixed, row_space(mixed.gradients(observation), None, rank=13))
        >>> texts = [row[row > 0].tolist() for row in batch["input_ids"]]
        >>> explained = Explained([view])
        >>> for vectors in vectors_of(observation, [view], texts):
        ...     explained.add(vectors)
        >>> explained.total < 0.1 * Explained([view]).total
        True
    """

    def __init__(self, views: Sequence[View]) -> None:
        self.unexplained = [v.directions * v.trust.sqrt()[:, None] for v in views]
        self.bases = [v.directions[:0] for v in views]

    @property
    def total(self) -> float:
        """The number of directions that nothing explains, each counted by its trust."""
        return sum(float(unexplained.square().sum()) for unexplained in self.unexplained)

    def gain(self, vectors: Sequence[Tensor]) -> float:
        """Return how much `total` would fall with a text."""
        return sum(
            float((unexplained @ orthonormal(x, basis, SAME).T).square().sum())
            for x, unexplained, basis in zip(vectors, self.unexplained, self.bases, strict=True)
        )

    def add(self, vectors: Sequence[Tensor]) -> None:
        """Count a text as taken."""
        for i, x in enumerate(vectors):
            new = orthonormal(x, self.bases[i], SAME)
            self.unexplained[i] = self.unexplained[i] - (self.unexplained[i] @ new.T) @ new
            self.bases[i] = torch.cat([self.bases[i], new])


Text = tuple[int, ...]
Pool = dict[Text, float]  # texts with their distances from spans
CLOSE = 0.1  # dimensions: nearer than this, nothing is left to better
NEAR = 1e-4  # a position's squared distance that only right texts have, if there is no noise


def choose(
    observation: Observation,
    views: Sequence[View],
    candidates: Sequence[Pool],
    sweeps: int = 3,
) -> list[Text]:
    """Choose one candidate for each row, so that together they explain the views' spans best.

    Their inputs lie in the spans, and they leave the least of them unexplained. A correct text,
    taken twice, is better than a wrong one that explains no more than rounding.

    Args:
        observation: The observation of the server.
        views: Layers with the row spaces of their gradients.
        candidates: For each row the texts, with their distances from the spans.
        sweeps: The most rounds over all rows.

    Returns:
        For each row a text; an empty one where there is no candidate.

    Example:
        >>> from hf_gradguard.attacks.layer_inputs import find_projections
        >>> from hf_gradguard.attacks.span.row_space import row_space
        >>> mixed = next(r for r in find_projections(observation) if r.mixing == "full")
        >>> view = View(mixed, row_space(mixed.gradients(observation), None, rank=13))
        >>> correct = [tuple(row[row > 0].tolist()) for row in batch["input_ids"]]
        >>> found = choose(observation, [view], [dict.fromkeys(correct, 0.0)] * 2)
        >>> sorted(found) == sorted(correct)
        True
    """
    texts = list(dict.fromkeys(text for row in candidates for text in row))
    inputs = vectors_of(observation, views, texts)
    vectors: dict[Text, list[Tensor]] = dict(zip(texts, inputs, strict=True))
    chosen = _choose(views, candidates, vectors, sweeps)
    correct = [
        {text: distance for text, distance in row.items() if distance < NEAR * len(text)} or row
        for row in candidates
    ]
    # Where rounding does not end, it counts as something to explain.
    noiseless_views = [k for k, view in enumerate(views) if view.space.ends]
    if noiseless_views and any(
        text not in row for text, row in zip(chosen, correct, strict=True) if row
    ):
        correct_chosen = _choose(views, correct, vectors, sweeps)
        of_correct, of_chosen = (
            _unexplained_by(views, noiseless_views, texts, vectors)
            for texts in (correct_chosen, chosen)
        )
        if of_correct <= of_chosen + CLOSE * len(noiseless_views):
            return correct_chosen
    return chosen


def _unexplained_by(
    views: Sequence[View],
    indices: Sequence[int],
    texts: Sequence[Text],
    vectors: dict[Text, list[Tensor]],
) -> float:
    """Return what texts leave unexplained of some of the views."""
    explained = Explained([views[k] for k in indices])
    for text in filter(None, texts):
        explained.add([vectors[text][k] for k in indices])
    return explained.total


def _choose(
    views: Sequence[View],
    candidates: Sequence[Pool],
    vectors: dict[Text, list[Tensor]],
    sweeps: int,
) -> list[Text]:
    """Choose the best for each row in turn, and again beside those of all others."""
    chosen: list[Text] = [()] * len(candidates)
    # Long texts first: short ones may be their beginnings.
    order = sorted(range(len(candidates)), key=lambda i: -max(map(len, candidates[i]), default=0))
    explained = Explained(views)
    for index in order:
        chosen[index] = _best(candidates[index], vectors, explained)
        if chosen[index]:
            explained.add(vectors[chosen[index]])
    for _ in range(sweeps):
        if explained.total < CLOSE * len(views):
            break
        previous = list(chosen)
        for index in order:
            explained = Explained(views)
            for other_index in order:
                if other_index != index and chosen[other_index]:
                    explained.add(vectors[chosen[other_index]])
            chosen[index] = _best(candidates[index], vectors, explained)
            if chosen[index]:
                explained.add(vectors[chosen[index]])
        if chosen == previous:
            break
    return chosen


def _best(row: Pool, vectors: dict[Text, list[Tensor]], explained: Explained) -> Text:
    return min(row, key=lambda text: row[text] - explained.gain(vectors[text]), default=())
