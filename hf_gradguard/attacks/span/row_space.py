"""The row space of a noisy matrix: the linear algebra of the span attack.

The rows of G = ΔᵀX + E lie, up to the noise E, in the span of X's rows. Candidates for those rows
are ranked by how far they are from it (the MUSIC method of array processing), and again after what
was found is projected out (RAP-MUSIC).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from ..layer_inputs import Projections

# Rounding leaves singular values below this many epsilons of the type, of the largest (and in half
# precision below what a weak text's may be), behind a gap, and with no tail.
ROUNDING, LOW, GAP, TAIL = 100.0, 1e-4, 4.0, 8.0


@dataclass(frozen=True)
class RowSpace:
    """A noisy matrix, reduced to what its row space needs, in float64.

    Args:
        factor: `(k, H)` with factorᵀ factor = GᵀG.
        count: M, how many rows G has.
        noise: The standard deviation of an entry of E.
        columns: The factors `(H,)` that candidates must be multiplied by, as G's columns were.
        ends: Whether a gap shows where E begins, which is rounding: all that X's rows span stands
            above it.

    Example:
        >>> space = row_space([torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]])], None, rank=2)
        >>> directions, trust = space.directions()
        >>> len(directions), bool((trust > 0.99).all())
        (2, True)
    """

    factor: Tensor
    count: int
    noise: float
    columns: Tensor
    ends: bool = False

    def directions(self, free: int | None = None) -> tuple[Tensor, Tensor]:
        """Return right singular vectors `(r, H)` that stand out of the noise, and their trust.

        The trust `(r,)` is the squared cosine between a singular vector of a noisy matrix and the
        one without noise (Benaych-Georges and Nadakuditi, 2012), which is 0 below the noise's own
        largest singular value.

        Args:
            free: The number of dimensions that are not projected out. Default: all.
        """
        _, values, vectors = torch.linalg.svd(self.factor, full_matrices=False)
        trust = _trust(values, self.count, free or self.factor.shape[1], self.noise)
        return vectors[trust > 0], trust[trust > 0]

    def without(self, basis: Tensor) -> RowSpace:
        """Return what is left when orthonormal rows `(k, H)` are projected out."""
        factor = self.factor - (self.factor @ basis.T) @ basis
        return RowSpace(factor, self.count, self.noise, self.columns)

    def energy(self, vectors: Tensor) -> Tensor:
        """Return ‖G x‖²/‖x‖² of vectors `(..., H)`: how much ‖G‖² falls when x is projected out."""
        squares = vectors.square().sum(-1)
        squares = squares.clamp(min=torch.finfo(squares.dtype).tiny)
        return (vectors @ self.factor.T).square().sum(-1) / squares


def row_space(blocks: list[Tensor], variances: list[Tensor] | None, rank: int) -> RowSpace:
    """Stack blocks of rows with the same row space into one row space.

    Blocks are scaled so that no block's noise covers another's signal.

    Args:
        blocks: The blocks, `(M_b, H)` each.
        variances: The variances of the entries' noise, in the blocks' shapes, if known. Rows and
            columns are then scaled to unit noise.
        rank: The largest rank that the blocks can have without noise: what comes after it is noise.

    Example:
        >>> space = row_space([torch.ones(5, 4), torch.ones(2, 4)], None, rank=1)
        >>> space.count, len(space.directions()[0])
        (7, 1)
    """
    epsilon = torch.finfo(blocks[0].dtype).eps
    matrices = [block.double() for block in blocks]
    width = matrices[0].shape[1]
    if variances is not None and any(bool(variance.any()) for variance in variances):
        stack, variance = torch.cat(matrices), torch.cat([v.double() for v in variances])
        rows, columns = _equalize(variance.clamp(min=float(variance.mean()) * 1e-6))
        factor = _factor(stack * rows[:, None] * columns)
        return RowSpace(factor, len(stack), 1.0, columns)
    stack = torch.cat([matrix / (float(matrix.norm()) or 1.0) for matrix in matrices])
    count = len(stack)
    _, values, right = torch.linalg.svd(_factor(stack), full_matrices=False)
    end = _rank_before_rounding(values, rank, epsilon)
    rank = rank if end is None else end
    rows, columns = _scales(stack, right, rank)
    factor = _factor(stack * rows[:, None] * columns)
    values = torch.linalg.svdvals(factor)
    # The edge of the noise's spectrum lies at noise (√M + √H); the first value that cannot be
    # signal is at most there, and counts as noise itself, up to what a decomposition rounds.
    edge = (1 + 1e-6) * float(values[rank]) if rank < len(values) else epsilon * float(values[0])
    noise = max(edge, 1e-15 * float(values[0])) / (math.sqrt(count) + math.sqrt(width))
    return RowSpace(factor, count, noise, columns, end is not None)


def distances(vectors: Tensor, directions: Tensor, trust: Tensor) -> Tensor:
    """Return 1 - Σ_i trust_i ⟨v_i, x⟩²/‖x‖², the squared relative distance from the span.

    It is 2 for zero vectors.

    Args:
        vectors: Vectors x, `(..., H)`.
        directions: Orthonormal vectors v_i of the span, `(r, H)`.
        trust: How much each is trusted, `(r,)`.

    Example:
        >>> basis = torch.tensor([[1.0, 0.0]])
        >>> distances(torch.tensor([[2.0, 0.0], [0.0, 5.0], [0.0, 0.0]]), basis, torch.ones(1))
        tensor([0., 1., 2.])
    """
    squares = vectors.square().sum(-1)
    power_inside = ((vectors @ directions.T).square() * trust).sum(-1)
    least = torch.finfo(squares.dtype).tiny
    return torch.where(squares > 0, 1 - power_inside / squares.clamp(min=least), 2.0)


def select(
    space: RowSpace, known_vectors: Tensor, candidates: Tensor, capacity: Tensor
) -> list[list[int]]:
    """Choose candidates that together span the row space.

    A few of the nearest are chosen at a time. They are then projected out of the matrix and of the
    candidates, so that what they share with the rest no longer counts. If they are seen to span all
    of it, each place gets one at least, and no more: equal rows span it once.

    Args:
        space: The row space.
        known_vectors: Vectors `(k, H)` that are in the span.
        candidates: K candidates for each of P places, `(P, K, H)`.
        capacity: How many to choose at most at each place, `(P,)`.

    Returns:
        For each place the indices of its candidates, the best first.

    Example:
        >>> true = torch.eye(4, dtype=torch.float64)[:2]
        >>> others = torch.eye(4, dtype=torch.float64)[2:]
        >>> candidates = torch.stack([true[:1], others[:1]], 1)  # one place, two candidates
        >>> select(row_space([true], None, 2), true[1:], candidates, torch.tensor([1]))
        [[0]]
    """
    candidates = candidates * space.columns
    basis = orthonormal(known_vectors * space.columns)
    remaining, residuals = space.without(basis), candidates - (candidates @ basis.T) @ basis
    size = candidates.square().sum(-1)
    taken = residuals.square().sum(-1) <= 1e-20 * size  # in the span of what is known, or zero
    chosen: list[list[int]] = [[] for _ in capacity]
    room, all_directions = capacity.clone(), space.directions()[0]
    smallest_outside = size  # that was ever outside the span of what was chosen and stands out
    while bool(room.any()) and len(basis) < candidates.shape[-1]:
        is_spanned = float((basis @ all_directions.T).square().sum()) > len(all_directions) - 0.5
        if space.ends and is_spanned:
            is_filled = torch.tensor([bool(indices) for indices in chosen])
            room = room.masked_fill(is_filled.to(room.device), 0)
        standing_out = remaining.directions(free=candidates.shape[-1] - len(basis))
        squares = residuals.square().sum(-1)
        outside_span = distances(residuals, *standing_out) * squares
        smallest_outside = torch.minimum(smallest_outside, outside_span)
        scores = (smallest_outside / squares).masked_fill(taken | (room == 0)[:, None], math.inf)
        best_scores, flat_indices = scores.flatten().topk(
            min(max(1, int(room.sum()) // 32), scores.numel()), largest=False
        )
        if not math.isfinite(float(best_scores[0])):
            break
        new_vectors = []
        for score, flat_index in zip(best_scores.tolist(), flat_indices.tolist(), strict=True):
            p, k = divmod(flat_index, candidates.shape[1])
            if room[p] and math.isfinite(score):
                chosen[p].append(k)
                taken[p, k] = True
                room[p] -= 1
                new_vectors.append(residuals[p, k])
        added = orthonormal(torch.stack(new_vectors), basis)
        basis, remaining = torch.cat([basis, added]), remaining.without(added)
        residuals = residuals - (residuals @ added.T) @ added
    return chosen


def orthonormal(rows: Tensor, basis: Tensor | None = None, least: float = 1e-12) -> Tensor:
    """Return an orthonormal basis `(rank, H)` of the rows' span.

    It is without what an orthonormal `basis` has of it already, and without rows of which less than
    `least` of their length is new.

    Example:
        >>> orthonormal(torch.tensor([[3.0, 0.0], [4.0, 0.0]])).abs()
        tensor([[1., 0.]])
    """
    if not len(rows):
        return rows
    rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    if (
        basis is not None
    ):  # a small rest is orthogonal to it only up to the rounding of what was large before
        rows = rows - (rows @ basis.T) @ basis
    q, r = torch.linalg.qr(rows.T)
    return q.T[r.diagonal().abs() > least]


def _factor(matrix: Tensor) -> Tensor:
    """Return R with RᵀR = GᵀG, without squaring the singular values."""
    return cast(Tensor, torch.linalg.qr(matrix, mode="r").R)


def _rank_before_rounding(values: Tensor, rank: int, epsilon: float) -> int | None:
    """Return how many singular values stand above those of rounding, at most `rank`.

    Equal rows count once. It is `None` if no gap shows it.
    """
    values = (values / values[0].clamp(min=1e-300)).clamp(min=0.01 * epsilon)
    for k in range(1, min(rank + 1, len(values))):
        low = values[k] <= min(ROUNDING * epsilon, LOW) and values[k - 1] > GAP * values[k]
        if low and values[k] <= TAIL * values[k:].median():
            return k
    return None


def _scales(stack: Tensor, vh: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return factors of rows and columns that make the noise even.

    Noise is estimated by what no matrix of that rank explains, with right singular vectors `vh`.
    Rounding errors grow with a row's and a column's entries, and so may a defense's noise. The
    factors are 1 if nothing is left over.
    """
    unit_scales = torch.ones_like(stack[:, 0]), torch.ones_like(stack[0])
    if rank >= min(stack.shape):
        return unit_scales
    squares = (stack - (stack @ vh[:rank].T) @ vh[:rank]).square()
    mean = float(squares.mean())
    return _equalize((squares / mean).clamp(min=1e-6)) if mean > 0 else unit_scales


def _equalize(variance: Tensor, steps: int = 20) -> tuple[Tensor, Tensor]:
    """Return factors that bring the mean variance of every row and column to 1.

    It is Sinkhorn's iteration.
    """
    rows, columns = torch.ones_like(variance[:, 0]), torch.ones_like(variance[0])
    for _ in range(steps):
        rows = 1 / (variance @ columns / len(columns))
        columns = 1 / (variance.T @ rows / len(rows))
    return rows.sqrt(), columns.sqrt()


def _trust(values: Tensor, count: int, width: int, noise: float) -> Tensor:
    """Return the squared cosine between noisy and true right singular vectors.

    The matrix is `(count, width)`, with noise of standard deviation `noise`.
    """
    long, short = max(count, width), min(count, width)
    beta = short / long
    squares = (values / (noise * math.sqrt(long))).square()
    gap = squares - 1 - beta
    signal = (gap + (gap.square() - 4 * beta).clamp(min=0).sqrt()) / 2
    # The side of the matrix with more dimensions is estimated worse.
    denominator = signal * (signal + (beta if count >= width else 1))
    above = (gap > 2 * math.sqrt(beta)) & (signal.square() > beta)
    return torch.where(above, (signal.square() - beta) / denominator, 0.0).clamp(0, 1)


@dataclass(frozen=True)
class View:
    """A view of layers behind the attention, with the row space of their gradients.

    Args:
        projections: The layers.
        space: The row space.

    Example:
        >>> from hf_gradguard.attacks.layer_inputs import find_projections
        >>> mixed = next(r for r in find_projections(observation) if r.mixing == "full")
        >>> View(mixed, row_space(mixed.gradients(observation), None, rank=13)).is_informative
        True
    """

    projections: Projections
    space: RowSpace
    directions: Tensor = field(init=False)
    trust: Tensor = field(init=False)

    def __post_init__(self) -> None:
        directions, trust = self.space.directions()
        object.__setattr__(self, "directions", directions)
        object.__setattr__(self, "trust", trust)

    @property
    def is_informative(self) -> bool:
        """Whether anything lies outside the span."""
        return 0 < len(self.directions) < len(self.space.columns)
