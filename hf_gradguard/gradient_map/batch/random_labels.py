"""Labels that are drawn at random, and which ids are special: what a random batch takes beside its
inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...randomness import Stream
from .texts import ends_of


def random_entries(
    model: nn.Module,
    batch: Mapping[str, Any],
    private: str,
    inputs: Mapping[str, Tensor],
    generator: Stream,
) -> dict[str, Any]:
    """All entries of a batch but its inputs, with nothing of the content: random labels, no
    padding.

    Args:
        model: Says how many classes there are.
        batch: For shapes and types.
        private: The entry that labels may be of.
        inputs: Those that were drawn.
        generator: Of the labels.

    Raises:
        ValueError: For an entry that it cannot make up, by name.
    """
    made: dict[str, Any] = {}
    for key, value in batch.items():
        if key in inputs:
            continue
        if value is None or isinstance(value, bool | int | float | str):
            made[key] = value
        elif not isinstance(value, Tensor):
            raise ValueError(NOT_SYNTHETIC.format(repr(key)))
        elif key.endswith("attention_mask") and value.dim() == 2:
            made[key] = torch.ones_like(value)
        elif key == "completion_mask":  # of a prompt and its answer, as long as each other
            places = torch.arange(value.shape[-1], device=value.device)
            made[key] = (2 * places >= len(places)).to(value.dtype).expand_as(value)
        elif key.endswith("token_type_ids"):
            made[key] = torch.zeros_like(value)
        elif key.endswith("position_ids"):
            made[key] = torch.arange(value.shape[-1], device=value.device).expand_as(value)
        else:
            made[key] = random_labels(model, key, batch, batch[private], inputs[private], generator)
    return made


def random_labels(
    model: nn.Module,
    key: str,
    batch: Mapping[str, Any],
    private: Tensor,
    made: Tensor,
    generator: Stream,
) -> Tensor:
    """An entry of a batch, drawn at random.

    Args:
        model: Says how many classes or words there are.
        key: Of the entry.
        batch: For its shape and type.
        private: The batch's inputs: what is to be written may be what is read.
        made: Those that were drawn.
        generator: Of the labels.

    Raises:
        ValueError: If it is none of the labels that can be made up, by name.
    """
    value: Tensor = batch[key]
    config = getattr(model, "config", None)
    classes = int(getattr(config, "num_labels", 0) or 0)
    if key in _PLACES and private.dim() == 2:
        return generator.integers(private.shape[1], value.shape, device=value.device).to(
            value.dtype
        )
    if key == "decoder_input_ids" and _writes(model):
        return _words(model, value, generator)
    if key != "labels" and key != "label":
        raise ValueError(NOT_SYNTHETIC.format(repr(key)))
    if value.is_floating_point():
        if getattr(config, "problem_type", None) == "multi_label_classification":
            return generator.integers(2, value.shape, device=value.device).to(value.dtype)
        return generator.normal(value.shape, device=value.device).to(value.dtype)
    if value.dim() == 1 and classes > 1:
        return generator.integers(classes, value.shape, device=value.device).to(value.dtype)
    if value.dim() == 2 and _writes(model):
        counted = value != -100
        if value.shape == private.shape and bool((value == private)[counted].all()):
            return made.clone()  # what is read is what is to be written
        drawn = _words(model, value, generator)
        if value.shape == private.shape:  # masked: which places is drawn as well
            chosen = generator.uniform(value.shape, device=value.device) < 0.15
            chosen[:, 0] = True
            drawn = drawn.masked_fill(~chosen, -100)
        return drawn
    if value.shape == private.shape and classes > 1:
        return generator.integers(classes, value.shape, device=value.device).to(value.dtype)
    raise ValueError(
        NOT_SYNTHETIC.format(f"labels of shape {tuple(value.shape)}")
        + (" Class ids need model.config.num_labels, which is not set." if classes < 2 else "")
    )


def special_ids(model: nn.Module, processing_class: Any = None) -> list[int]:
    """Ids of special tokens: the tokenizer's, or without one those that the config names."""
    found = getattr(processing_class, "all_special_ids", None)
    if found is None:
        config = getattr(model, "config", None)
        names = ("bos", "eos", "cls", "sep", "pad", "mask")
        found = [getattr(config, f"{name}_token_id", None) for name in names]
    return sorted({index for index in found if isinstance(index, int)})


def ordinary_ids(count: int, special: Sequence[int]) -> Tensor:
    """Ids below `count` that are not special.

    Example:
        >>> ordinary_ids(5, special=[0, 3, 99])
        tensor([1, 2, 4])
    """
    allowed = torch.ones(count, dtype=torch.bool)
    allowed[[index for index in special if index < count]] = False
    return allowed.nonzero().flatten()


NOT_SYNTHETIC = (
    "Random inputs with {} cannot be made up, so noise and pruning have no public shape, and "
    "Refiner no samples. Choose shape='past', averages over the client's earlier batches, or "
    "shape='own'; in place of Refiner another defense, or its objective='weighted'."
)


_PLACES = ("start_positions", "end_positions")  # of an answer, in a text


def _words(model: nn.Module, like: Tensor, generator: Stream) -> Tensor:
    words = len(model.get_output_embeddings().weight)  # type: ignore[operator]
    return generator.integers(words, like.shape, device=like.device).to(like.dtype)


def _writes(model: nn.Module) -> bool:
    """Whether a model's output is words."""
    try:
        return getattr(model.get_output_embeddings(), "weight", None) is not None  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        return False


def ends(
    ids: Tensor, special: Sequence[int], present: Tensor | None
) -> tuple[int | None, int | None]:
    """The special tokens with which all texts begin and end, if there are such. Padding is none of
    a text.
    """
    rows = torch.arange(len(ids), device=ids.device)
    places = ends_of(torch.ones_like(ids) if present is None else present)
    found = [ids[rows, place].unique().tolist() for place in places]
    begins, closes = (
        index[0] if len(index) == 1 and index[0] in set(special) else None for index in found
    )
    return begins, closes
