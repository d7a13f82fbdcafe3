"""Attention that was made to pick single tokens, seen in its weights.

Where queries and keys are huge, the softmax gives all weight to one token. Nothing is averaged any
more: what layers behind it read is of single tokens, and their gradients say which.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

SHARP = 100.0
"""Logits of one query that are so far apart leave no second token. A third of that would do; the
margin is for pretrained weights behind normalizations whose gains are small, which are not looked
at.
"""
QUERIES = ("query", "q_proj", "q_lin", "q", "wq", "query_proj", "q_attn")
KEYS = ("key", "k_proj", "k_lin", "k", "wk", "key_proj", "k_attn")
NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm")
FUSED = ("c_attn", "query_key_value", "qkv", "qkv_proj", "wqkv")


def sharp_attention(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Attention whose logits lie too far apart for more than one token to count.

    By the weights alone: how far apart the logits of one query are for keys of inputs whose entries
    have variance 1, as layer normalization makes them, in the median head. Frozen layers count too:
    they decide on what trained ones behind them read. Where queries and keys are normalized (Qwen3,
    Gemma 3, OLMo 2), their weights' size says nothing, and attention is not looked at.

    Yields:
        The attention's name, and what it does.

    Example:
        >>> list(sharp_attention(model))
        []
        >>> with torch.no_grad():
        ...     for parameter in (block := model.bert.encoder.layer[0].attention.self).parameters():
        ...         _ = parameter.mul_(1e3)
        >>> [name for name, _ in sharp_attention(model)]
        ['bert.encoder.layer.0.attention.self']
    """
    if not any(p.requires_grad for p in model.parameters()):
        return
    for name, module in model.named_modules():
        parts = _parts(module)
        if parts is None:
            continue
        spread = float(_spreads(*parts, _head_width(module, model, parts[0][0])).median())
        if spread > SHARP:
            yield (
                name,
                f"Its logits are {spread:.0f} apart for one query: attention picks single tokens, "
                "and what is behind it reads them one by one.",
            )


_Layer = tuple[Tensor, Tensor | None]


def _parts(module: nn.Module) -> tuple[_Layer, _Layer] | None:
    """Queries' and keys' weights `(out, in)` with biases; of a fused layer all of it is either."""
    if any(name in NORMS for name, _ in module.named_children()):
        return None
    layers = {
        name.lower(): child
        for name, child in module.named_children()
        if isinstance(weight := getattr(child, "weight", None), Tensor) and weight.dim() == 2
    }
    query, key = _first(layers, QUERIES), _first(layers, KEYS)
    if query is None or key is None:
        query = key = _first(layers, FUSED)
    if query is None or key is None:
        return None
    found = _matrix(query), _matrix(key)
    return found if found[0][0].shape[1] == found[1][0].shape[1] else None


def _first(layers: Mapping[str, nn.Module], names: tuple[str, ...]) -> nn.Module | None:
    return next((layers[name] for name in names if name in layers), None)


def _matrix(layer: Any) -> _Layer:
    weight, bias = layer.weight.detach(), getattr(layer, "bias", None)
    own = bias.detach().float() if isinstance(bias, Tensor) else None
    return (weight.T if isinstance(layer, Conv1D) else weight).float(), own


def _head_width(module: nn.Module, model: nn.Module, weight: Tensor) -> int:
    """Entries of a head's queries; all of them where nothing says it."""
    config: Any = getattr(model, "config", None)
    for owner, names in (
        (module, ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")),
        (config, ("head_dim", "d_kv")),
    ):
        for name in names:
            width = getattr(owner, name, None)
            if isinstance(width, int) and width > 0 and len(weight) % width == 0:
                return width
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or heads < 1 or weight.shape[1] % heads:
        return len(weight)
    width = weight.shape[1] // heads
    return width if len(weight) % width == 0 else len(weight)


def _spreads(query: _Layer, key: _Layer, width: int) -> Tensor:
    """`(heads,)`: ‖[W_q b_q]ᵀ W_k‖_F/√d of every head of queries with its own keys. Of shared keys
    each is several heads'; of a fused layer every head is taken with itself.
    """
    queries = _heads(query[0], width)
    keys = _heads(key[0], width)
    keys = keys.repeat_interleave(max(1, len(queries) // len(keys)), 0)[: len(queries)]
    queries = queries[: len(keys)]
    if query[1] is not None:
        bias = query[1].view(-1, width, 1)[: len(queries)]
        queries = torch.cat([queries, bias], 2)
    # ‖QᵀK‖² = ⟨QQᵀ, KKᵀ⟩: matrices of a head's width
    inner = (queries @ queries.mT * (keys @ keys.mT)).sum((1, 2))
    return inner.clamp(min=0).sqrt() / math.sqrt(width)


def _heads(weight: Tensor, width: int) -> Tensor:
    return weight.reshape(-1, width, weight.shape[1])
