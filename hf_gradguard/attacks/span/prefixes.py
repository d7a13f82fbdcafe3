"""What a decoder's layers read at the end of a prefix, for many last tokens: the prefix itself runs
once, and attention keeps what it needs of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from ...models import without_adapters
from ..observation import Observation, ordinary_id
from .choice import Text
from .layer_inputs import Readers, layer_inputs


def endings(
    seen: Observation,
    readers: Readers,
    prefixes: Sequence[Text],
    tokens: Sequence[int],
    keeps: bool,
) -> Tensor:
    """What `readers` read of P prefixes with each of K tokens behind them, `(P K, T + 1, H)`: of
    the first prefix with all tokens, then of the next.

    Args:
        prefixes: Of T tokens each.
        tokens: K tokens.
        keeps: Whether the model can keep what it needs of a prefix; else all of it runs K times.

    Example:
        >>> from hf_gradguard.attacks.span.layer_inputs import find_readers
        >>> readers = find_readers(seen)[1]
        >>> endings(seen, readers, [(5, 6, 7)], [8, 9], keeps=False).shape
        torch.Size([2, 4, 32])
    """
    if not prefixes[0] or not keeps:
        rows = [[*prefix, token] for prefix in prefixes for token in tokens]
        return layer_inputs(seen, readers, torch.tensor(rows, device=seen.device))
    past = DynamicCache(config=seen.model.config.get_text_config(decoder=True))  # type: ignore[union-attr, operator]
    once = torch.tensor(prefixes, device=seen.device)
    before = layer_inputs(seen, readers, once, past_key_values=past, use_cache=True)
    past.batch_repeat_interleave(len(tokens))
    last = torch.tensor(tokens, device=seen.device).repeat(len(prefixes))[:, None]
    mask = last.new_ones(len(last), once.shape[1] + 1)
    behind = layer_inputs(seen, readers, last, mask, past_key_values=past, use_cache=True)
    return torch.cat([before.repeat_interleave(len(tokens), 0), behind], dim=1)


def keeps_the_past(seen: Observation, readers: Readers) -> bool:
    """Whether the model reads a text's end alike when it has kept the rest: tried out on a text of
    random words.

    Example:
        >>> from hf_gradguard.attacks.span.layer_inputs import find_readers
        >>> keeps_the_past(seen, find_readers(seen)[1])  # an encoder
        False
    """
    base = without_adapters(seen.model)
    if "past_key_values" not in inspect.signature(base.forward).parameters:
        return False
    one = ordinary_id(base, seen.tokenizer)
    whole, parts = (
        endings(seen, readers, [(one, one, one + 1)], [one], keeps=keeps) for keeps in (False, True)
    )
    return whole.shape == parts.shape and torch.allclose(
        whole, parts, rtol=1e-4, atol=1e-5 * float(whole.abs().max())
    )
