"""The order of a model's layers, from the input to the loss, read off its parameters' names."""

from __future__ import annotations

from collections.abc import Iterable


def layer_numbers(names: Iterable[str]) -> dict[str, int]:
    """The layer that each parameter belongs to: 1 for the layers nearest the input.

    Hugging Face models number their blocks (`bert.encoder.layer.3.…`, `transformer.h.3.…`). Each
    block is a layer, and so is what stands together before, between and after blocks: embeddings,
    poolers, the head. Of a model without numbered blocks every module is a layer. Names are taken
    in the order given, which is the order in which the model defines its parts; an
    encoder-decoder's decoder so follows its encoder.

    Args:
        names: Parameter names, as `model.named_parameters()` lists them.

    Example:
        >>> names = ["embed.weight", "layer.0.weight", "layer.0.bias", "layer.1.bias", "head.bias"]
        >>> list(layer_numbers(names).values())
        [1, 2, 2, 3, 4]
    """
    names = list(names)
    blocks = {name: _block(name) for name in names}
    if not any(blocks.values()):
        blocks = {name: name.rpartition(".")[0] for name in names}
    numbers: dict[str, int] = {}
    number, previous = 0, None
    for name in names:
        if blocks[name] != previous or not numbers:
            number, previous = number + 1, blocks[name]
        numbers[name] = number
    return numbers


def _block(name: str) -> str:
    """The name through its first number, or nothing if it has none."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ""
