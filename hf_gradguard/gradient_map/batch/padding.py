"""Padding: what a text gets because others of its batch are longer. A model may read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .texts import ends_of, is_of_targets

READ = (
    "gives a text another gradient where others of its batch are longer: it reads the padding, or "
    "counts positions from it, as with padding on the left. So one long text changes what all "
    "others add, and no clipping bounds that. Pad on the right (tokenizer.padding_side = 'right'), "
    "with an attention_mask; or pass position_ids that count from each text's start."
)


def real_tokens(model: nn.Module, batch: Mapping[str, Any]) -> Tensor | None:
    """`(B, T)`: which positions are no padding, by the mask or else by the padding's id; `None`
    where a batch is not of texts.

    Example:
        >>> mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
        >>> real_tokens(model, {"input_ids": 1 + mask, "attention_mask": mask}).sum().item()
        5
    """
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return mask.bool()
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    if mask is not None or padding is None or not isinstance(ids, Tensor) or ids.dim() != 2:
        return None
    return ids != padding


def shorter(model: nn.Module, row: Mapping[str, Any], real: Tensor) -> dict[str, Any]:
    """A batch of one text without its padding at both ends.

    Args:
        model: Whose batch it is.
        row: The batch.
        real: As `real_tokens` says, `(1, T)`.
    """
    first, last = map(int, ends_of(real))

    def along(name: str, value: Any) -> bool:
        if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != real.shape[1]:
            return False
        several = name.endswith("labels") and value.is_floating_point()  # of as many classes
        return not several and not is_of_targets(model, name)

    return {
        name: value[:, first : last + 1] if along(name, value) else value
        for name, value in row.items()
    }


def most_padded(real: Tensor, rows: Tensor) -> int | None:
    """Of some rows, `(B,)` bools, the one with the most padding at its ends; `None` if none has."""
    if real.all():
        return None
    first, last = ends_of(real)
    length = (last - first + 1).where(rows.to(real.device), real.shape[1])
    row = int(length.argmin())
    return row if length[row] < real.shape[1] else None
