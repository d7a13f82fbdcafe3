"""How long the longest text was, from the gradient of learned position embeddings."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ..gradient_map.replay import hooked
from .observation import Observation, ordinary_id
from .span.layer_inputs import is_causal_lm, run


def observed_length(seen: Observation) -> int | None:
    """Tokens in the batch's longest text, special tokens included.

    Only positions at which some text has a token have a gradient; padding has none. Under noise,
    the rows of positions that cannot have been used (from T on) tell its size.

    Args:
        seen: What the server saw; only its T must be at least the length.

    Returns:
        The length; `None` if the model learns no position embeddings, their gradient was not
        shared, or noise covers it.

    Example:
        >>> observed_length(seen) == int(batch["attention_mask"].sum(1).max())
        True
    """
    tokens = seen.domain.embedding(seen.model)
    if tokens is None:  # pixels
        return None
    found = _positions(seen, tokens)
    if found is None:
        return None
    gradient, offset = found
    norms = gradient.norm(dim=1)[offset:]
    size = seen.input_shape[1]
    floor = 1.5 * float(norms[size:].max()) if len(norms) > size else 0.0
    used = (norms[:size] > floor).nonzero()
    if not len(used):
        return None
    return int(used.max()) + 1 + int(is_causal_lm(seen.model))


def with_length(seen: Observation) -> Observation:
    """The observation as an attacker takes it who reads the longest text's length off the gradient,
    where it was not granted and can be read.

    In what was pruned a row without entries says nothing, so nothing is read there. Token
    embeddings do not tell: of most words they have no gradient anyway.

    Example:
        >>> from dataclasses import replace
        >>> padded = replace(seen, input_shape=(2, 12), attention_mask=None)
        >>> with_length(padded).input_shape
        (2, 8)
    """
    if seen.attention_mask is not None or len(seen.input_shape) != 2:
        return seen
    length = None if _is_pruned(seen) else observed_length(seen)
    if length is None or length >= seen.input_shape[1]:
        return seen
    labels = seen.labels
    if labels is not None and labels.dim() > 1 and labels.shape == seen.input_shape:
        labels = labels[:, :length]
    return replace(seen, input_shape=(seen.batch_size, length), labels=labels)


def _is_pruned(seen: Observation) -> bool:
    words = getattr(seen.domain.embedding(seen.model), "weight", None)
    own = {name for name, p in seen.model.named_parameters() if p is words}  # a tied head's as well
    counted = [tensor for name, tensor in seen.gradient.items() if name not in own]
    kept = sum(int(tensor.count_nonzero()) for tensor in counted)
    return kept <= sum(tensor.numel() for tensor in counted) / 2


def _positions(seen: Observation, tokens: nn.Module) -> tuple[Tensor, int] | None:
    """The gradient of the embedding that is read at consecutive rows, and the row of the first
    position.
    """
    names = {id(p): name for name, p in seen.model.named_parameters() if name in seen.gradient}
    caught: dict[nn.Module, Tensor] = {}
    modules = [
        m
        for m in seen.model.modules()
        if isinstance(m, nn.Embedding) and m is not tokens and id(m.weight) in names
    ]

    def catch(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args:
            caught[module] = args[0]

    token = ordinary_id(seen.model, seen.tokenizer)
    with hooked(module.register_forward_pre_hook(catch) for module in modules):
        run(seen, torch.full((1, 3), token, device=seen.device))
    for module, read in caught.items():
        rows = read.flatten().tolist()
        if len(rows) == 3 and rows == list(range(rows[0], rows[0] + 3)):
            return seen.gradient[names[id(module.weight)]], int(rows[0])
    return None
