"""Matrices with missing entries, filled in by what their low rank says."""

from __future__ import annotations

import torch
from torch import Tensor


def complete(matrix: Tensor, rank: int, iterations: int = 30) -> Tensor:
    """Fill a matrix's zeros, taken for missing, with the values of its best approximation of low
    rank.

    Alternates between filling and truncating (hard impute). A pruning drops small entries, so what
    is filled in stays within the smallest one that it kept.

    Args:
        matrix: `(M, H)`. One without zeros is returned as it is.
        rank: Of the matrix, if nothing were missing.
        iterations: Of filling and truncating.

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
        left, values, right = torch.linalg.svd(filled, full_matrices=False)
        low = (left[:, :rank] * values[:rank]) @ right[:rank]
        filled = torch.where(missing, low.clamp(-bound, bound), matrix.double())
    return filled.to(matrix.dtype)
