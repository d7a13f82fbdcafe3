"""Batches of random inputs with random labels, in the shapes of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..randomness import Stream
from .domain import Domain, Text, ends_of, is_of_targets, mask_of, ordinary_ids
from .map import GradientMap


def random_batch(
    domain: Domain,
    model: nn.Module,
    batch: Mapping[str, Any],
    generator: Stream,
    special: Sequence[int] = (),
    unknown: Callable[[Any], Any] | None = None,
) -> dict[str, Any]:
    """Return a batch of the same shapes with nothing of the content: random inputs and labels.

    It has no padding.

    Args:
        domain: The batch's domain.
        model: The model, which says how many tokens and classes there are.
        batch: The batch, for shapes and types.
        generator: The source of the inputs and labels.
        special: Ids of special tokens. Texts begin and end with those that the batch's do.
        unknown: A function that makes what replaces an entry that cannot be made up.

    Raises:
        ValueError: If there is such an entry and no `unknown`; the message has its name.

    Example:
        >>> drawn = random_batch(gmap.domain, model, batch, Stream())
        >>> drawn["input_ids"].shape == batch["input_ids"].shape
        True
    """
    if isinstance(domain, Text):
        random_entries = random_texts(domain, model, batch, generator, special)
    else:
        random_entries = {domain.key: random_images(batch[domain.key], generator)}
    for key, value in batch.items():
        if key in random_entries:
            continue
        try:
            random_entries[key] = _random_entry(
                domain.key, model, batch, key, value, random_entries, generator
            )
        except ValueError:
            if unknown is None:
                raise
            random_entries[key] = unknown(value)
    return random_entries


def resize_texts(
    domain: Text, model: nn.Module, batch: Mapping[str, Any], length: int = 0
) -> dict[str, Any]:
    """Return a batch whose texts have another number of tokens, and the same beginnings and ends.

    Args:
        domain: The domain, which names the entries that are texts.
        model: The model, which says which entries are texts that it writes.
        batch: The batch.
        length: The number of tokens. Default: 16, or as many as the model takes.

    Example:
        >>> resize_texts(gmap.domain, model, batch)["input_ids"].shape
        torch.Size([2, 16])
    """
    length = length or min(LENGTH, _most_tokens(model))
    places: dict[torch.Size, Tensor] = {}
    for key in domain.keys:
        ids, mask = batch[key], mask_of(batch, key)
        if mask is None or mask.shape != ids.shape:
            mask = torch.ones_like(ids)
        places[ids.shape] = _places(mask, length)

    def resized(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() != 2 or name in ("label", "scores"):
            return value
        if value.shape in places and not (name == "labels" and value.is_floating_point()):
            return value.gather(1, places[value.shape])
        return value[:, :1].expand(-1, length) if is_of_targets(model, name) else value

    return {name: resized(name, value) for name, value in batch.items()}


def random_texts(
    domain: Text,
    model: nn.Module,
    batch: Mapping[str, Any],
    generator: Stream,
    special: Sequence[int],
) -> dict[str, Any]:
    """Draw the texts of a batch from the vocabulary; special tokens stand at the ends only.

    Args:
        domain: The domain, which names the entries that are texts.
        model: The model, which says how many tokens there are.
        batch: The batch, for shapes and types.
        generator: The source of the tokens.
        special: Ids of special tokens.
    """
    vocabulary = len(domain.embedding(model).weight)  # type: ignore[arg-type]
    random_entries: dict[str, Any] = {}
    # Texts that are the same in the batch are the same here.
    for key, names in domain.distinct(batch).items():
        ids, mask = batch[key], mask_of(batch, key)
        ordinary = ordinary_ids(vocabulary, special).to(ids.device)
        random_ids = ordinary[generator.integers(len(ordinary), ids.shape, device=ids.device)]
        first_token, last_token = special_ends(ids, special, None if mask is None else mask.bool())
        if first_token is not None:
            random_ids[:, 0] = first_token
        if last_token is not None and ids.shape[1] > 1:
            random_ids[:, -1] = last_token
        random_entries |= dict.fromkeys(names, random_ids.to(ids.dtype))
    return random_entries


def random_images(pixels: Tensor, generator: Stream) -> Tensor:
    """Draw patches of even color under fine noise, of mean 0 and deviation 1.

    They are more like images than white noise is.

    Args:
        pixels: Images `(B, C, H, W)`, for shape and type.
        generator: The source of the colors and the noise.
    """
    coarse = generator.normal((*pixels.shape[:2], 4, 4), device=pixels.device)
    smooth = nn.functional.interpolate(coarse, size=pixels.shape[2:], mode="bilinear")
    fine = generator.normal(pixels.shape, device=pixels.device)
    return (smooth + 0.3 * fine).to(pixels.dtype)


def _random_entry(
    private_key: str,
    model: nn.Module,
    batch: Mapping[str, Any],
    key: str,
    value: Any,
    random_entries: Mapping[str, Any],
    generator: Stream,
) -> Any:
    """Return a random value for an entry that is no input.

    Entries that say where things are become those of a batch without padding.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if not isinstance(value, Tensor):
        raise ValueError(NOT_SYNTHETIC.format(repr(key)))
    places = torch.arange(value.shape[-1] if value.dim() else 0, device=value.device)
    if key.endswith("attention_mask") and value.dim() == 2:
        return torch.ones_like(value)
    if key == "completion_mask":  # of a prompt and its answer, as long as each other
        return (2 * places >= len(places)).to(value.dtype).expand_as(value)
    if key.endswith("token_type_ids"):
        return torch.zeros_like(value)
    if key.endswith("position_ids"):
        return places.expand_as(value)
    return random_labels(
        model, key, batch, batch[private_key], random_entries[private_key], generator
    )


def random_labels(
    model: nn.Module,
    key: str,
    batch: Mapping[str, Any],
    private: Tensor,
    random_input: Tensor,
    generator: Stream,
) -> Tensor:
    """Draw an entry of a batch at random.

    Args:
        model: The model, which says how many classes or words there are.
        key: The name of the entry.
        batch: The batch, for its shape and type.
        private: The batch's inputs: what is to be written may be what is read.
        random_input: The inputs that were drawn.
        generator: The source of the labels.

    Raises:
        ValueError: If the entry is none of the labels that can be made up; the message has its
            name.
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
            return random_input.clone()  # what is read is what is to be written
        random_words = _words(model, value, generator)
        if value.shape == private.shape:  # masked: which places is drawn as well
            chosen = generator.uniform(value.shape, device=value.device) < 0.15
            chosen[:, 0] = True
            random_words = random_words.masked_fill(~chosen, -100)
        return random_words
    if value.shape == private.shape and classes > 1:
        return generator.integers(classes, value.shape, device=value.device).to(value.dtype)
    raise ValueError(
        NOT_SYNTHETIC.format(f"labels of shape {tuple(value.shape)}")
        + (" Class ids need model.config.num_labels, which is not set." if classes < 2 else "")
    )


NOT_SYNTHETIC = (
    "Random inputs with {} cannot be made up, so noise and pruning have no public shape, and "
    "gradient_sketch and refiner no samples. Choose shape='past', averages over the client's "
    "earlier batches, or shape='own'; in place of made-up samples noise, or refiner with "
    "objective='weighted'."
)


_PLACES = ("start_positions", "end_positions")  # of an answer, in a text


def _words(model: nn.Module, labels: Tensor, generator: Stream) -> Tensor:
    words = len(model.get_output_embeddings().weight)  # type: ignore[operator]
    return generator.integers(words, labels.shape, device=labels.device).to(labels.dtype)


def _writes(model: nn.Module) -> bool:
    """Whether a model's output is words."""
    try:
        return getattr(model.get_output_embeddings(), "weight", None) is not None  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        return False


def special_ends(
    ids: Tensor, special: Sequence[int], present: Tensor | None
) -> tuple[int | None, int | None]:
    """Return the special tokens with which all texts begin and end, if there are such.

    Padding is none of a text.
    """
    rows = torch.arange(len(ids), device=ids.device)
    places = ends_of(torch.ones_like(ids) if present is None else present)
    end_tokens = [ids[rows, place].unique().tolist() for place in places]
    begins, closes = (
        index[0] if len(index) == 1 and index[0] in set(special) else None for index in end_tokens
    )
    return begins, closes


LENGTH = 16
"""Tokens of a synthetic text come in so many, if the model takes as many."""
TOKEN_MARGIN = 4 / 3
"""Times as many tokens as a layer's inputs have directions: then these are in no span."""
READERS = 4  # of one input at most, whose gradients are read together: query, key and value
USUAL = {"text": 4, "image": 16}
"""Samples: of texts few are enough to learn from, and tell who is in a message less."""


def synthetic_samples(
    gmap: GradientMap, samples: int | None, generator: Stream, special: Sequence[int] = ()
) -> GradientMap:
    """Return the map of a model on random samples with random labels.

    Texts are of 16 tokens or more.

    Args:
        gmap: A map of the model, whose batch says which entries there are.
        samples: The number of samples. `None`: 4 texts, or 16 images.
        generator: The source of all randomness.
        special: Ids of special tokens, which stand at a text's ends only.

    Raises:
        ValueError: If an entry of the batch cannot be made up; the message has its name.

    Example:
        >>> synthetic_samples(gmap, 5, Stream()).input.shape[:2]
        torch.Size([5, 16])
    """
    x, batch = gmap.input, gmap.batch
    samples = USUAL[gmap.domain.name] if samples is None else samples
    rows = torch.arange(samples, device=x.device) % len(x)
    places = None
    if x.dim() == 3:
        present = gmap.domain.present(batch)
        attended = torch.ones(x.shape[:2], device=x.device) if present is None else present
        places = _places(attended, text_length(gmap, samples))

    def resized(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        if places is not None and value.shape == (len(x), x.shape[1]):
            value = value.gather(1, places)
        elif places is not None and value.dim() == 2 and is_of_targets(gmap.model, name):
            value = value[:, :1].expand(-1, places.shape[1])  # their length is the batch's, too
        return value[rows] if len(value) == len(x) else value

    resized_batch = {name: resized(name, value) for name, value in batch.items()}
    random_entries = random_batch(gmap.domain, gmap.model, resized_batch, generator, special)
    return gmap.undefended.of_batch(random_entries)


def text_length(gmap: GradientMap, samples: int) -> int:
    """Return the number of tokens of synthetic texts: half of what the model takes at most, or 16.

    A linear layer's gradient is δᵀX. Where X has fewer rows, one a token, than columns, it shows
    which tokens they are of (the span attack).

    Args:
        gmap: A map of the model.
        samples: The number of texts.

    Example:
        >>> text_length(gmap, 16), gmap.input.shape[2]  # 16 x 16 tokens are more than enough
        (16, 32)
    """
    matrices = [min(p.shape) for p in gmap.parameters.values() if p.dim() == 2]
    told_apart = min(READERS * max(matrices, default=1), gmap.input.shape[-1])
    length = LENGTH * math.ceil(TOKEN_MARGIN * told_apart / samples / LENGTH)
    most = _most_tokens(gmap.model)
    return min(length, max(min(LENGTH, most), most // 2))


def _most_tokens(model: nn.Module) -> int:
    return getattr(getattr(model, "config", None), "max_position_embeddings", None) or LENGTH


def _places(attended: Tensor, length: int) -> Tensor:
    """Return the places of each text to take, `(B, length)`.

    Places repeat if the text is short, and the last one is the text's own end. So synthetic texts
    end as the batch's do, whatever their lengths and padding.
    """
    first_place, last_place = ends_of(attended)
    places = (
        torch.arange(length, device=attended.device) % (last_place - first_place + 1)[:, None]
        + first_place[:, None]
    )
    places[:, -1] = last_place
    return places
