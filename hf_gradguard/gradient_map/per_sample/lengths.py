"""Checks that rows are not padded to the longest of their batch where no mask says so.

Speech and pictures are often padded with zeros. A model that takes the zeros for sound gives a row
another gradient where a longer one stands beside it, and no clipping bounds that. With a mask, or
the padding's id, rows are compared with themselves without padding. Without either nobody can tell
what is padding, but rows that are all padded to one length are the same in every batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

OTHER_LENGTHS = (
    "{name!r} has rows of {shape} in this batch and of {known_shape} in the first, and no "
    "attention_mask says what of them is padding. Where a row is filled up to the longest of its "
    "batch, that one changes what all others add, and no clipping bounds it. Pad all rows to one "
    "length (padding='max_length'), or pass an attention_mask, `(rows, length)`."
)


def row_shapes(batch: Mapping[str, Any], real: Tensor | None) -> dict[str, tuple[int, ...]]:
    """Return the shapes of rows that no mask tells from their padding.

    Args:
        batch: The batch, whose entries but the labels count.
        real: A mask `(B, T)` of tokens that are no padding, as `real_tokens` says.

    Example:
        >>> row_shapes({"input_values": torch.zeros(2, 5), "labels": torch.zeros(2, 3)}, None)
        {'input_values': (5,)}
    """
    return {
        name: tuple(entry.shape[1:])
        for name, entry in batch.items()
        if isinstance(entry, Tensor)
        and entry.dim() > 1
        and not name.endswith("labels")
        and (real is None or (entry.is_floating_point() and entry.shape[1] != real.shape[1]))
    }


def refuse_other_lengths(
    tried_shapes: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse rows of another shape than those that a model was tried out on.

    Args:
        tried_shapes: The result of `row_shapes` then.
        shapes: The result of `row_shapes` now.

    Raises:
        NotImplementedError: If shapes differ; the message has the entry, and what to do.

    Example:
        >>> refuse_other_lengths({"input_values": (400,)}, {"input_values": (400,)})
    """
    for name, shape in shapes.items():
        if tried_shapes.get(name, shape) != shape:
            raise NotImplementedError(
                OTHER_LENGTHS.format(name=name, shape=shape, known_shape=tried_shapes[name])
            )
