"""Domains: whether a client's private input is text or an image.

Nothing else in the library asks which. A domain knows the entry of the batch that is private and
how it becomes the continuous input. The space of a batch knows where a continuous input may lie:
which entries are free to move, what noise looks like there, and how to get back inside.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

IDS, MASK = "input_ids", "attention_mask"


class Domain(ABC):
    """A base of domains: what an input is made of.

    Attributes:
        name: `"text"` or `"image"`.
        key: The entry of the batch that is private.
        content: What that entry holds, in a word.
        shape: The names of that entry's dimensions.
    """

    name: ClassVar[str]
    key: str
    content: ClassVar[str]
    shape: ClassVar[str]

    @property
    def dims(self) -> int:
        """The least number of dimensions of the private entry."""
        return len(self.shape.split(", "))

    def check(self, model: nn.Module, batch: Mapping[str, Any]) -> None:  # noqa: B027
        """Refuse entries that do not fit the private one, and a private one that the model refuses.

        Raises:
            ValueError: If an entry does not fit; the message has its name.
        """

    def main_input(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the private entry of a batch, of one row per sample."""
        value: Tensor = batch[self.key]
        return value

    @abstractmethod
    def present(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Return a mask `(B, T)` of a text's tokens, or `None` if every entry counts."""

    @abstractmethod
    def embedding(self, model: nn.Module) -> nn.Module | None:
        """Return the module whose output is the continuous input, `None` if the batch has it."""

    @abstractmethod
    def token_embeddings(self, model: nn.Module) -> list[nn.Module]:
        """Return every module that embeds token ids: the model's, and an encoder-decoder's two."""


class Text(Domain):
    """The domain of token ids, of which a model makes embeddings `(B, T, H)`.

    The embeddings of several texts stand side by side.

    Args:
        keys: The entries of the batch that are texts.
    """

    name, content, shape = "text", "tokens", "(B, T)"

    def __init__(self, keys: Sequence[str] = (IDS,)) -> None:
        self.keys, self.key = keys, keys[0]

    def distinct(self, batch: Mapping[str, Any]) -> dict[str, list[str]]:
        """Return texts that differ: the name of the first with these ids, and all their names.

        Example:
            >>> ids = torch.tensor([[5, 7]])
            >>> pair = {"a_input_ids": ids, "b_input_ids": ids}
            >>> Text(["a_input_ids", "b_input_ids"]).distinct(pair)
            {'a_input_ids': ['a_input_ids', 'b_input_ids']}
        """
        names: dict[str, list[str]] = {}
        for key in self.keys:
            same = (known_key for known_key in names if torch.equal(batch[known_key], batch[key]))
            names.setdefault(next(same, key), []).append(key)
        return names

    def texts(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the texts that differ, `(B, T)` each."""
        return {key: batch[key] for key in self.distinct(batch)}

    def main_input(self, batch: Mapping[str, Any]) -> Tensor:
        texts = list(self.texts(batch).values())
        return texts[0] if len(texts) == 1 else torch.cat(texts, 1)

    def check(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        for key in self.keys:
            check_text(model, self.embedding(model), batch, key)

    def present(self, batch: Mapping[str, Any]) -> Tensor | None:
        masks = [mask_of(batch, key) for key in self.texts(batch)]
        is_token = [mask.bool() for mask in masks if mask is not None]
        if len(is_token) < len(masks):
            return None
        return is_token[0] if len(is_token) == 1 else torch.cat(is_token, 1)

    def embedding(self, model: nn.Module) -> nn.Module:
        """Return the module that embeds `input_ids`; in an encoder-decoder it is the encoder's.

        Raises:
            ValueError: If the model names none.
        """
        # An encoder-decoder embeds its source in a module of the encoder's own: a hook on the
        # shared one never fires.
        owner = owner_of(model)
        if is_encoder_decoder(owner):
            owner = owner.get_encoder()
        embedding = embedding_of(owner)
        if embedding is None:
            raise ValueError(
                f"{type(model).__name__} names no input embedding, so `input_ids` give no "
                "continuous input. Implement `get_input_embeddings()` to return the module that "
                "embeds them."
            )
        return embedding

    def token_embeddings(self, model: nn.Module) -> list[nn.Module]:
        owner = owner_of(model)
        owners = [owner]
        if is_encoder_decoder(owner):
            owners += [owner.get_encoder(), owner.get_decoder()]
        return [module for module in map(embedding_of, owners) if module is not None]


class Image(Domain):
    """The domain of pixels `(B, C, H, W)`."""

    name, key, content, shape = "image", "pixel_values", "pixels", "(B, C, H, W)"

    def present(self, batch: Mapping[str, Any]) -> Tensor | None:
        return None

    def embedding(self, model: nn.Module) -> None:
        return None

    def token_embeddings(self, model: nn.Module) -> list[nn.Module]:
        # Vision models call their patch projection an input embedding; it is shared like any
        # other weight.
        return []


TEXT, IMAGE = Text(), Image()
IGNORED = -100
"""The label of a place that has none."""
DOMAINS: dict[str, Domain] = {domain.name: domain for domain in (TEXT, IMAGE)}


def domains_in(batch: Mapping[str, Any]) -> list[Domain]:
    """Return the domains of the texts and images that a batch holds."""
    texts = text_keys(batch)
    domains: list[Domain] = [TEXT if texts == TEXT.keys else Text(texts)] if texts else []
    return [*domains, IMAGE] if IMAGE.key in batch else domains


def count_rows(batch: Mapping[str, Any]) -> int:
    """Return how many rows a batch has; without text or image, its first tensor decides.

    Example:
        >>> count_rows(batch)
        2
    """
    domains = domains_in(batch)
    tensors = (v for v in batch.values() if isinstance(v, Tensor) and v.dim())
    return len(batch[domains[0].key] if domains else next(tensors))


def domain_of_batch(batch: Mapping[str, Any]) -> Domain:
    """Return the domain of a collated batch.

    Raises:
        ValueError: If it holds no token ids or pixels, both, or pixels that are whole numbers.
    """
    domains = domains_in(batch)
    if len(domains) > 1:
        raise ValueError(
            "The batch holds both `input_ids` and `pixel_values`. Protecting one of them would "
            "leave the other open, so multimodal batches are not supported. Train the text and the "
            "vision part separately."
        )
    if not domains:
        raise ValueError(
            f"The batch holds {sorted(batch)}: neither `input_ids` nor `pixel_values`, so there is "
            "no continuous input to protect. Return one of them from the collator (precomputed "
            "`inputs_embeds` are not supported: pass the ids)."
        )
    if domains[0] is IMAGE and not torch.is_floating_point(batch[IMAGE.key]):
        raise ValueError(
            f"`pixel_values` are {batch[IMAGE.key].dtype}: there is no gradient with respect to "
            "integers. Convert them to floating point in the collator, as HF image processors do."
        )
    return domains[0]


def domain_of_model(model: nn.Module) -> Domain:
    """Return the domain of a model's main input: images if it is `pixel_values`."""
    return IMAGE if declared_domain(model) == IMAGE.name else TEXT


def declared_domain(model: nn.Module) -> str | None:
    """Return `"text"` or `"image"`, by a model's main input; `None` if it declares another."""
    domains = {TEXT.key: TEXT.name, IMAGE.key: IMAGE.name}
    return domains.get(getattr(model, "main_input_name", ""))


def check_batch(model: nn.Module, batch: Any, needs_input: bool = True) -> None:
    """Refuse a batch that gives a model no loss, or a loss that says nothing of the batch.

    Args:
        model: The model.
        batch: The batch that a collator returned.
        needs_input: Whether anything asks for the continuous input. If not, what the model takes
            may be anything.

    Raises:
        ValueError: If an entry is wrong; the message has its name, what it is, and what it should
            be.
    """
    if not isinstance(batch, Mapping) or not batch:
        empty = " without entries" if isinstance(batch, Mapping) else ""
        raise ValueError(
            f"A batch is a {type(batch).__name__}{empty}, where a mapping of names to tensors is "
            "needed: the model is called by names. Change the collator."
        )
    if embeds := sorted(key for key in batch if key.endswith("inputs_embeds")):
        raise ValueError(
            f"The batch holds {', '.join(embeds)}: what was embedded outside the model cannot be "
            "told from what is private. Return `input_ids` from the collator instead."
        )
    taken = getattr(model, "main_input_name", None)
    if not needs_input and len(domains_in(batch)) != 1 and (taken is None or taken in batch):
        return
    domain = domain_of_batch(batch)
    needed = getattr(model, "main_input_name", domain.key)
    if needed not in batch:
        raise ValueError(
            f"{type(model).__name__} takes `{needed}`, but the batch holds {sorted(batch)}. Change "
            "the collator or the model."
        )
    value = batch[domain.key]
    if not isinstance(value, Tensor) or value.dim() < domain.dims or not value.numel():
        described = (
            f"have shape {tuple(value.shape)}"
            if isinstance(value, Tensor)
            else f"are a {type(value).__name__}"
        )
        raise ValueError(
            f"`{domain.key}` of a batch {described}, where a tensor {domain.shape} of at least one "
            "row is needed. Change the collator or the data."
        )
    if not needs_input and isinstance(domain, Text) and not domain.token_embeddings(model):
        return  # a plain module names no embedding: its tables are found by what indexes them
    domain.check(model, batch)


def domain_of_shape(shape: Sequence[int]) -> Domain:
    """Return the domain of a batch's main input by its shape: `(B, T)` or `(B, C, H, W)`."""
    return TEXT if len(shape) == 2 else IMAGE


def embed(module: nn.Module, ids: Tensor) -> Tensor:
    """Return a token embedding's own forward pass, which may scale, `(*ids.shape, H)`.

    Hooks (NEFTune's, say) are for the model's passes.
    """
    with torch.no_grad():
        output: Tensor = type(module).forward(module, ids)
    return output


def text_keys(batch: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a batch's entries that are texts.

    Example:
        >>> text_keys(batch)
        ('input_ids',)
        >>> text_keys({"query_input_ids": 0, "query_attention_mask": 0, "answer_input_ids": 0})
        ('query_input_ids', 'answer_input_ids')
    """
    if IDS in batch:
        return (IDS,)
    return tuple(k for k in batch if k.endswith(f"_{IDS}") and k != f"decoder_{IDS}")


def check_text(model: nn.Module, embedding: nn.Module, batch: Mapping[str, Any], key: str) -> None:
    """Refuse ids that a model does not embed, and a mask of another shape.

    Raises:
        ValueError: If the text is wrong; the message has the entry's name.
    """
    ids, mask = batch[key], mask_of(batch, key)
    if ids.is_floating_point():
        raise ValueError(f"`{key}` of a batch are {ids.dtype}, where whole numbers are ids.")
    rows = getattr(embedding, "num_embeddings", None)
    low, high = (int(end) for end in ids.aminmax())
    if rows is not None and not 0 <= low <= high < rows:
        raise ValueError(
            f"`{key}` of a batch go from {low} to {high}, but {type(model).__name__} "
            f"embeds 0 to {rows - 1}. The tokenizer is another model's, or new tokens need "
            "model.resize_token_embeddings."
        )
    if isinstance(mask, Tensor) and mask.dim() == ids.dim() and mask.shape != ids.shape:
        raise ValueError(
            f"`{key.removesuffix(IDS)}{MASK}` has shape {tuple(mask.shape)}, but "
            f"`{key}` have {tuple(ids.shape)}. Change the collator."
        )


def mask_of(batch: Mapping[str, Any], key: str) -> Tensor | None:
    """Return the attention mask of a text, or `None`."""
    mask: Tensor | None = batch.get(key.removesuffix(IDS) + MASK)
    return mask


def is_encoder_decoder(model: nn.Module) -> bool:
    """Return whether a decoder reads what an encoder made of the text.

    Example:
        >>> is_encoder_decoder(model)
        False
    """
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def is_of_targets(model: nn.Module, name: str) -> bool:
    """Return whether a batch entry belongs to texts that an encoder-decoder writes.

    They have a length of their own.

    Example:
        >>> is_of_targets(model, "labels")  # of a classifier
        False
    """
    return is_encoder_decoder(model) and (name.endswith("labels") or name.startswith("decoder_"))


def ends_of(present: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and the last place of each text that is no padding, `(B,)` each.

    Example:
        >>> ends_of(torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]]))
        (tensor([1, 0]), tensor([2, 3]))
    """
    mask = present.int()
    return mask.argmax(1), mask.shape[1] - 1 - mask.flip(1).argmax(1)


def owner_of(model: nn.Module) -> Any:
    """Return what embeds texts: the model, or the one model of Transformers inside it.

    Sentence encoders and custom adapters hold one inside.
    """
    if embedding_of(model) is not None:
        return model
    inner = list(_outermost(model))
    return inner[0] if len(inner) == 1 else model


def embedding_of(owner: Any) -> nn.Module | None:
    """Return the module that a model names as its input embedding, or `None`."""
    try:
        embedding = owner.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return embedding if isinstance(embedding, nn.Module) else None


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if embedding_of(child) is not None:
            yield child
        else:
            yield from _outermost(child)


def special_ids(model: nn.Module, processing_class: Any = None) -> list[int]:
    """Return ids of special tokens: the tokenizer's, or without one those that the config names."""
    ids = getattr(processing_class, "all_special_ids", None)
    if ids is None:
        config = getattr(model, "config", None)
        names = ("bos", "eos", "cls", "sep", "pad", "mask")
        ids = [getattr(config, f"{name}_token_id", None) for name in names]
    return sorted({index for index in ids if isinstance(index, int)})


def ordinary_ids(count: int, special: Sequence[int]) -> Tensor:
    """Return ids below `count` that are not special.

    Example:
        >>> ordinary_ids(5, special=[0, 3, 99])
        tensor([1, 2, 4])
    """
    allowed = torch.ones(count, dtype=torch.bool)
    allowed[[index for index in special if index < count]] = False
    return allowed.nonzero().flatten()


def special_frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the special ids that a tokenizer puts before and after a text.

    Example:
        >>> before, after = special_frame(tokenizer)
        >>> tokenizer.convert_ids_to_tokens([*before, *after])
        ['[CLS]', '[SEP]']
    """
    special = set(tokenizer.all_special_ids)
    ids = tokenizer("a")["input_ids"]
    ordinary = [place for place, token in enumerate(ids) if token not in special]
    if not ordinary:  # "a" is unknown to this vocabulary, and the unknown token is special
        unknown = [place for place, token in enumerate(ids) if token == tokenizer.unk_token_id]
        ordinary = unknown or [len(ids)]
    return list(ids[: ordinary[0]]), list(ids[ordinary[-1] + 1 :])


def is_framed(tokenizer: Any, ids: Tensor, mask: Tensor) -> bool:
    """Return whether every text `(T,)` of a batch has the tokenizer's special tokens around it.

    Example:
        >>> ids = torch.tensor([tokenizer("a fine film").input_ids])
        >>> is_framed(tokenizer, ids, torch.ones_like(ids))
        True
        >>> is_framed(tokenizer, ids[:, 1:], torch.ones_like(ids[:, 1:]))
        False
    """
    prefix, suffix = special_frame(tokenizer)
    texts = [row[present.bool()].tolist() for row, present in zip(ids, mask, strict=True)]
    return all(
        len(text) >= len(prefix) + len(suffix)
        and text[: len(prefix)] == prefix
        and text[len(text) - len(suffix) :] == suffix
        for text in texts
    )
