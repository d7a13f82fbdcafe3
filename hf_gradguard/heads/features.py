"""Features of a frozen encoder, and the public directions onto which they are cut.

What noise costs a head depends on how many directions it has, and how well they are aligned with
what differs between samples. So features come from all layers, and public samples say in which
directions they vary. These directions are half-whitened (divided by the fourth root of their
variance), and the others are cut off.

Reference: Tramèr and Boneh, "Differentially Private Learning Needs Better Features (or Much More
Data)" (2021).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_COLUMNS = 4096  # at once
_LEAST_FRACTION = 1e-7  # of the largest variance: below it there is rounding alone


def layer_features(encoder: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Return features of samples from all layers of an encoder, `(B, width)`.

    They are the means of hidden states over attended positions, the states of the first position,
    and the means of activations inside the layers. They are in float32, or in float64 if the
    encoder is.

    Args:
        encoder: A model of Transformers that takes texts or images.
        inputs: What it takes, by name.

    Example:
        >>> inputs = {name: entry for name, entry in batch.items() if name != "labels"}
        >>> layer_features(model.base_model, inputs).ndim
        2
    """
    states, activations = _states(encoder, inputs)
    attention_mask = inputs.get("attention_mask")
    blocks = [_mean(state, attention_mask) for state in states]
    blocks += [state[:, 0] for state in states if state.ndim == 3]
    blocks += [_mean(state, attention_mask) for state in activations if state.ndim > 2]
    return torch.cat([_precise(block) for block in blocks], 1)


def token_features(encoder: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Return features of each token from all layers of an encoder, `(B, T, width)`.

    They are the token's hidden states and its activations inside the layers.

    Args:
        encoder: A model of Transformers that takes texts.
        inputs: What it takes, by name.

    Example:
        >>> inputs = {name: entry for name, entry in batch.items() if name != "labels"}
        >>> token_features(model.base_model, inputs).shape[:2] == inputs["input_ids"].shape
        True
    """
    states, activations = _states(encoder, inputs)
    places = states[0].shape[:2]
    blocks = [*states, *activations]
    of_tokens = [block for block in blocks if block.ndim == 3 and block.shape[:2] == places]
    return torch.cat([_precise(block) for block in of_tokens], 2)


def pair_features(encoder: nn.Module, inputs: Mapping[str, Any], separator: int) -> Tensor:
    """Return features of pairs of texts, `(B, width)`: how far those of both differ, and agree.

    They are the absolute differences and the products of the features that each text has by itself.
    On neighboring sentences they tell far more than features of both texts in one pass.

    Args:
        encoder: A model of Transformers that takes texts.
        inputs: The `input_ids` and the `attention_mask` of both texts together, padded on the
            right.
        separator: The token that stands between them, once or twice.

    Example:
        >>> ids = torch.tensor([[2, 7, 8, 3, 9, 3]])  # of [CLS] a film [SEP] plot [SEP]
        >>> inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        >>> pair_features(model.base_model, inputs, 3).ndim
        2
    """
    features, others_features = (
        layer_features(encoder, text) for text in split_pairs(inputs, separator)
    )
    return torch.cat([(features - others_features).abs(), features * others_features], 1)


def split_pairs(inputs: Mapping[str, Any], separator: int) -> tuple[dict[str, Tensor], ...]:
    """Return the ids and masks of both texts of each pair, as if each stood by itself.

    Args:
        inputs: The `input_ids` and the `attention_mask` of both texts together, padded on the
            right.
        separator: The token that stands between them, once or twice.

    Example:
        >>> ids = torch.tensor([[2, 7, 8, 3, 9, 3]])  # of [CLS] a film [SEP] plot [SEP]
        >>> inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        >>> [text["input_ids"][text["attention_mask"] > 0] for text in split_pairs(inputs, 3)]
        [tensor([2, 7, 8, 3]), tensor([2, 9, 3])]
    """
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    places, most = torch.arange(ids.shape[1], device=ids.device)[None], ids.shape[1] - 1
    end = (ids == separator).int().argmax(1, keepdim=True)
    start = (end + 1).clamp(max=most)
    start = start + (ids.gather(1, start) == separator).int()  # RoBERTa has two of them
    sources = (start + places - 1).where(places > 0, 0)  # the first token begins every text
    seconds_mask = (sources < mask.sum(1, keepdim=True)).to(mask)
    return (
        {"input_ids": ids, "attention_mask": (places <= end).to(mask)},
        {"input_ids": ids.gather(1, sources.clamp(max=most)), "attention_mask": seconds_mask},
    )


def _states(encoder: nn.Module, inputs: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the hidden states of all layers, and the activations inside them."""
    with _activations_of(encoder) as activations:
        output = encoder(**inputs, output_hidden_states=True)
    return list(output.hidden_states), activations


def whitened_directions(features: Tensor, count: int) -> nn.Linear:
    """Return the centered map onto the directions of largest variance, half-whitened.

    Each direction is divided by the fourth root of its variance, after the mean is subtracted.

    Args:
        features: Features of public samples, `(N, width)`.
        count: The most directions to keep.

    Raises:
        ValueError: If the samples do not differ in any direction.

    Example:
        >>> map = whitened_directions(torch.tensor([[4.0, 0], [-4, 0], [0, 1], [0, -1]]), 2)
        >>> map(torch.eye(2)).abs().round(decimals=2)
        tensor([[0.5500, 0.0000],
                [0.0000, 1.1100]], grad_fn=<RoundBackward1>)
    """
    mean = features.mean(0, dtype=torch.float64)
    matrix = half_whitened(features, count, mean)
    directions = nn.Linear(matrix.shape[1], matrix.shape[0])
    with torch.no_grad():
        directions.weight.copy_(matrix)
        directions.bias.copy_(-matrix @ mean)
    return directions


def half_whitened(rows: Tensor, count: int, center: Tensor | None = None) -> Tensor:
    """Return the directions in which rows differ most from a center, half-whitened.

    Each direction is divided by the fourth root of its second moment.

    Args:
        rows: The rows, `(N, width)`.
        count: The most directions to keep.
        center: The center, `(width,)` in float64. Default: zero.

    Returns:
        The directions, `(count, width)` in float64.

    Raises:
        ValueError: If the rows do not differ in any direction.
    """
    width = rows.shape[1]
    is_wide = len(rows) <= width

    def columns() -> Iterator[Tensor]:
        """Yield some columns at a time: all of them in float64 are gigabytes."""
        for start in range(0, width, _COLUMNS if is_wide else width):
            end = start + (_COLUMNS if is_wide else width)
            block = rows[:, start:end].double()
            yield block if center is None else block - center[start:end]

    # eigenvectors of the smaller of both products
    product = sum(block @ block.T if is_wide else block.T @ block for block in columns())
    values, vectors = torch.linalg.eigh(product)
    values, vectors = values.flip(0)[:count], vectors.flip(1)[:, :count]
    is_real = values > _LEAST_FRACTION * values[0]
    if not bool(is_real.any()):
        raise ValueError("public samples do not differ: give texts or images that do.")
    values, vectors = values[is_real], vectors[:, is_real]
    if is_wide:
        vectors = torch.cat([block.T @ (vectors / values.sqrt()) for block in columns()])
    return (vectors / (values / (len(rows) - 1)) ** 0.25).T


@contextmanager
def _activations_of(encoder: nn.Module) -> Iterator[list[Tensor]]:
    """Collect what the activation functions inside an encoder's layers return, in order."""
    activations: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output: activations.append(output))
        for module in encoder.modules()
        if type(module).__module__ in ("transformers.activations", "torch.nn.modules.activation")
        and not isinstance(module, nn.MultiheadAttention)
    ]
    try:
        yield activations
    finally:
        for hook in hooks:
            hook.remove()


def _precise(features: Tensor) -> Tensor:
    return features.to(torch.promote_types(features.dtype, torch.float32))


def _mean(state: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return means over attended positions of `(B, T, width)`, or over all places of an image."""
    if state.ndim == 4:
        return state.mean((2, 3))
    if attention_mask is None or attention_mask.shape != state.shape[:2]:
        return state.mean(1)
    attended = attention_mask[..., None].to(state)
    return (state * attended).sum(1) / attended.sum(1).clamp(min=1)
