"""Whole sentences by least squares, from what an encoder's first attention gives at known tokens.

Which token stands at a place is a choice z among candidates. At [CLS] the attention gives an
average in which numerator and denominator are linear in z, and hundreds of equations, exact to
rounding, say what it may be. With the denominators linearized, z ≥ 0 of sum 1 at every place is a
least-squares problem (Gauss-Newton, non-negative), and its solution is a sentence: none is
searched, and those of one message are found one after the other.

The method is this package's own; published attacks on encoders with several texts search.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from scipy.optimize import nnls
from torch import Tensor

from ..base import ENDLESS, Clock
from .first_attention import FirstAttention

STEPS, APART = 12, 4  # steps at most, of which the first ones keep apart from words used elsewhere
DECISIVE = 0.99  # the share of a place's token that decides it
SUMS = 10.0  # weight of a place's sum, in norms of an average column


@dataclass(frozen=True)
class _Query:
    """The equations of one known token.

    Args:
        columns: What each choice adds to the equations' numerators, `(heads, E, Z)`.
        known_columns: What known tokens add to the numerators, `(heads, E)`.
        weights: What each choice adds to the denominators, `(heads, Z)`.
        known_weights: What known tokens add to the denominators, `(heads,)`.
        constant: What is added to the fractions, `(E,)`.
    """

    columns: Tensor
    known_columns: Tensor
    weights: Tensor
    known_weights: Tensor
    constant: Tensor

    def linearized(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return A `(E, Z)` and b `(E,)` of A z' = b near z."""
        denominators = self.weights @ z + self.known_weights
        fractions = (self.columns @ z + self.known_columns) / denominators[:, None]
        relative = self.weights / denominators[:, None]
        matrix = torch.einsum("hez,h->ez", self.columns, 1 / denominators)
        target = torch.einsum("he,h->e", self.known_columns, 1 / denominators) + self.constant
        of_choices = 1 - self.known_weights / denominators
        return matrix - fractions.T @ relative, -target - fractions.T @ of_choices


class SentenceProgram:
    """The equations of all sentences of one length, with the same known tokens.

    Args:
        attention: The attention of the model.
        known_ids: Known tokens by place, at least one.
        candidates: Ids `(K,)` by place, where a token is looked for.
        clock: A clock; when it is over, the program stays unfinished, and its sentences are
            arbitrary.

    Example:
        >>> from hf_gradguard.attacks.layer_inputs import find_projections
        >>> from hf_gradguard.attacks.span.row_space import View, row_space
        >>> mixed = next(r for r in find_projections(observation) if r.mixing == "full")
        >>> view = View(mixed, row_space(mixed.gradients(observation), None, rank=13))
        >>> ids, attention = batch["input_ids"], FirstAttention(observation, [view])
        >>> candidates = {place: ids[:, place].unique() for place in range(1, 7)}
        >>> program = SentenceProgram(attention, {0: 2, 7: 3}, candidates)
        >>> program.sentence(torch.Generator().manual_seed(0)) in ids[:, 1:7].tolist()
        True
    """

    def __init__(
        self,
        attention: FirstAttention,
        known_ids: Mapping[int, int],
        candidates: Mapping[int, Tensor],
        clock: Clock = ENDLESS,
    ) -> None:
        self._clock = clock
        self.candidates = {place: ids.cpu() for place, ids in candidates.items()}
        self._sizes = [len(ids) for ids in self.candidates.values()]
        sums = torch.block_diag(*(torch.ones(1, size) for size in self._sizes))
        self._sums = sums.double()  # of the choices of each place
        queries = dict.fromkeys([min(known_ids), max(known_ids)])
        self._queries = [self._query(attention, known_ids, query) for query in queries]

    def sentence(self, generator: torch.Generator, used_words: Collection[int] = ()) -> list[int]:
        """Return a sentence: an id for each place that has candidates.

        Args:
            generator: The source of the start.
            used_words: Words of other sentences: begun without them, it ends at another one.
        """
        everything = torch.ones(sum(self._sizes), dtype=torch.bool)
        begun = self._without(used_words)
        z = begun * (1 + torch.rand(len(begun), generator=generator, dtype=torch.float64))
        z = self._normalized(z)
        for step in range(STEPS):
            if self._clock.must_stop():
                break
            has_begun = not used_words or step >= APART
            z = self._step(z, everything if has_begun else begun)
            decided = torch.stack([fractions.max() for fractions in z.split(self._sizes)])
            if has_begun and float(decided.min()) > DECISIVE:
                break
        pairs = zip(self.candidates.values(), z.split(self._sizes), strict=True)
        return [int(ids[fractions.argmax()]) for ids, fractions in pairs]

    def _query(self, attention: FirstAttention, known_ids: Mapping[int, int], query: int) -> _Query:
        by_head, constant = attention.equations(query, known_ids[query])
        alone = attention.average(
            query, {place: torch.tensor([t]) for place, t in known_ids.items()}
        )
        weights_of = attention.weights(query, known_ids, self.candidates, self._clock)
        columns = torch.cat(
            [
                torch.einsum("ehd,khd->hek", by_head, weights[..., None] * attention.values(*item))
                for item, weights in zip(self.candidates.items(), weights_of, strict=True)
            ],
            2,
        )
        weights = torch.cat(weights_of).T
        # Heads look past known tokens by orders of magnitude: each is counted by its mean.
        scale = 1 / (1 + len(self._sizes) * weights.mean(1))
        known_columns = torch.einsum("ehd,hd->he", by_head, alone[0])
        return _Query(
            columns * scale[:, None, None], known_columns * scale[:, None],
            weights * scale[:, None], scale, constant,
        )  # fmt: skip

    def _without(self, words: Collection[int]) -> Tensor:
        """Return choices among other words, or all where a place has no others."""
        used = torch.tensor(sorted(words), dtype=torch.long)
        is_other = [~torch.isin(ids, used) for ids in self.candidates.values()]
        return torch.cat([at_place | ~at_place.any() for at_place in is_other])

    def _normalized(self, z: Tensor) -> Tensor:
        by_place = z.split(self._sizes)
        return torch.cat([fractions / fractions.sum().clamp(min=1e-30) for fractions in by_place])

    def _step(self, z: Tensor, allowed: Tensor) -> Tensor:
        """Return the allowed choices that solve the equations linearized at z."""
        equations, targets = zip(*(query.linearized(z) for query in self._queries), strict=True)
        matrix, target = torch.cat(equations)[:, allowed], torch.cat(targets)
        weight = SUMS * float(matrix.norm(dim=0).mean())
        matrix = torch.cat([matrix, weight * self._sums[:, allowed]])
        target = torch.cat([target, target.new_full((len(self._sums),), weight)])
        try:
            solution, _ = nnls(matrix.numpy(), target.numpy(), maxiter=len(matrix))
        except RuntimeError:  # far from any sentence
            return z
        stepped = torch.zeros_like(z)
        stepped[allowed] = torch.from_numpy(solution)
        return self._normalized(stepped)
