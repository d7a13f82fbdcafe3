"""Another input in the place of a batch's, which the model takes as well."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..domain import TEXT
from .texts import text_keys

STRUCTURE = re.compile(
    r"(.*_)?(masks?|position_ids|positions?|token_type_ids|segment_ids|lengths?)"
)
"""Entries of a batch that say where things are, and not what they are: they stay."""
TOKENS = {TEXT.key, "decoder_input_ids", "labels"}
"""Entries of token ids, from which positions may be counted too."""


def contents(batch: Mapping[str, Any]) -> set[str]:
    """The entries of a batch that say what is there.

    Example:
        >>> sorted(contents(batch))
        ['input_ids', 'labels']
    """
    return {key for key in batch if not STRUCTURE.fullmatch(key)}


def vary(model: nn.Module, batch: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """A batch of the same shapes with another content.

    Token ids become other ids of the vocabulary; special tokens stay, since positions are counted
    from padding. Other whole numbers are taken from the batch itself (a row's from the next one),
    or halved, so that none is outside a table's range.

    Args:
        model: The model, whose configuration names special tokens.
        batch: What a collator returns.

    Returns:
        The other batch, and which entries differ.

    Example:
        >>> other, varied = vary(model, batch)
        >>> bool((other["input_ids"] == batch["input_ids"]).all())
        False
    """
    special = special_ids(getattr(model, "config", None))
    other, texts = dict(batch), text_keys(batch)
    for key, value in batch.items():
        if not isinstance(value, Tensor) or key not in contents(batch) or not value.numel():
            continue
        if value.is_floating_point():
            other[key] = 0.5 * value.flip(0).roll(1, -1) + 0.1
        elif value.dtype != torch.bool:
            changed = _other_ids(model, value, special) if key in texts else value
            for change in (_next_row, _rolled, _halved):
                if not torch.equal(changed, value):
                    break
                changed = change(value, special)
            other[key] = changed
    return other, {
        key
        for key, value in batch.items()
        if isinstance(value, Tensor) and not torch.equal(other[key], value)
    }


def special_ids(config: Any) -> set[int]:
    """The ids that a configuration, or one inside it, calls by a name: padding, end of text.

    Example:
        >>> 0 in special_ids(model.config)  # padding
        True
    """
    found = set[int]()
    values = dict(getattr(config, "__dict__", {}))
    for name, value in values.items():
        if name.endswith(("token_id", "token_ids", "token_index")):
            several = value if isinstance(value, list | tuple) else [value]
            found |= {one for one in several if isinstance(one, int)}
        elif hasattr(value, "to_dict") and hasattr(value, "model_type"):
            found |= special_ids(value)
    return found


def _other_ids(model: nn.Module, ids: Tensor, special: set[int]) -> Tensor:
    """Other ordinary ids, none the same as before, and not all as far from it."""
    size = _vocabulary(model)
    ordinary = torch.tensor([i for i in range(size) if i not in special], device=ids.device)
    if len(ordinary) < 3:
        return ids
    free = torch.isin(ids, ordinary)
    steps = torch.arange(ids.numel(), device=ids.device).view_as(ids) * 31 % (len(ordinary) - 1)
    places = (torch.searchsorted(ordinary, ids.contiguous()) + 1 + steps) % len(ordinary)
    return torch.where(free, ordinary[places].to(ids.dtype), ids)


def _vocabulary(model: nn.Module) -> int:
    """How many ids there are for certain; 0 if nothing says so."""
    try:
        weight: Any = TEXT.embedding(model).weight
        rows = weight.shape[0]
    except (ValueError, AttributeError, NotImplementedError):
        rows = 0
    config: Any = getattr(model, "config", None)
    said = getattr(config, "vocab_size", None)
    sizes = [size for size in (rows, said) if isinstance(size, int) and size > 0]
    return min(sizes, default=0)


def _next_row(value: Tensor, special: set[int]) -> Tensor:
    """Boxes and the like, `(B, T, ...)`: those of the next position."""
    return value.roll(1, 1) if value.dim() > 2 else value


def _rolled(value: Tensor, special: set[int]) -> Tensor:
    """Ordinary values in another order."""
    free = value >= 0
    for one in special if value.dim() > 1 else ():
        free &= value != one
    changed = value.clone()
    changed[free] = value[free].roll(1)
    return changed


def _halved(value: Tensor, special: set[int]) -> Tensor:
    """Half of each value, which keeps corners of boxes in order."""
    return torch.where(value >= 0, value // 2, value)
