"""The texts of a batch, and the module that embeds them.

Most models read one text a row, `input_ids`. Sentence encoders read several, one after the other:
`anchor_input_ids`, `positive_input_ids`. Their continuous input is all of them side by side,
`(B, ΣT, H)`, so that everything else sees one input. A text that stands there twice is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

IDS, MASK = "input_ids", "attention_mask"


def text_keys(batch: Mapping[str, Any]) -> tuple[str, ...]:
    """The entries of a batch that are texts.

    Example:
        >>> text_keys(batch)
        ('input_ids',)
        >>> text_keys({"query_input_ids": 0, "query_attention_mask": 0, "answer_input_ids": 0})
        ('query_input_ids', 'answer_input_ids')
    """
    if IDS in batch:
        return (IDS,)
    return tuple(k for k in batch if k.endswith(f"_{IDS}") and k != f"decoder_{IDS}")


def distinct_texts(batch: Mapping[str, Any], keys: Sequence[str]) -> dict[str, list[str]]:
    """Texts that differ: the name of the first with these ids, and all names that have them.

    Example:
        >>> ids = torch.tensor([[5, 7]])
        >>> distinct_texts({"a_input_ids": ids, "b_input_ids": ids}, ["a_input_ids", "b_input_ids"])
        {'a_input_ids': ['a_input_ids', 'b_input_ids']}
    """
    found: dict[str, list[str]] = {}
    for key in keys:
        same = (k for k in found if torch.equal(batch[k], batch[key]))
        found.setdefault(next(same, key), []).append(key)
    return found


def check_text(model: nn.Module, embedding: nn.Module, batch: Mapping[str, Any], key: str) -> None:
    """Refuse ids that a model does not embed, and a mask of another shape.

    Raises:
        ValueError: With the entry's name.
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
    """The attention mask of a text."""
    mask: Tensor | None = batch.get(key.removesuffix(IDS) + MASK)
    return mask


def is_encoder_decoder(model: nn.Module) -> bool:
    """Whether a decoder reads what an encoder made of the text.

    Example:
        >>> is_encoder_decoder(model)
        False
    """
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def is_of_targets(model: nn.Module, name: str) -> bool:
    """Whether an entry of a batch is of texts that an encoder-decoder writes. They have a length of
    their own.

    Example:
        >>> is_of_targets(model, "labels")  # of a classifier
        False
    """
    return is_encoder_decoder(model) and (name.endswith("labels") or name.startswith("decoder_"))


def ends_of(present: Tensor) -> tuple[Tensor, Tensor]:
    """`(B,)` each: the first and the last place of each text that is no padding.

    Example:
        >>> ends_of(torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]]))
        (tensor([1, 0]), tensor([2, 3]))
    """
    mask = present.int()
    return mask.argmax(1), mask.shape[1] - 1 - mask.flip(1).argmax(1)


def owner_of(model: nn.Module) -> Any:
    """What embeds texts: the model, or the one model of Transformers inside it, as sentence
    encoders and adapters of one's own hold it.
    """
    if embedding_of(model) is not None:
        return model
    inner = list(_outermost(model))
    return inner[0] if len(inner) == 1 else model


def embedding_of(owner: Any) -> nn.Module | None:
    """The module that a model names as its input embedding."""
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


class Slots:
    """A hook on the module that embeds texts, which puts the continuous input in the place of what
    it makes.

    A call without gradients, as of a reference model that shares its weights, is let through: it
    counts as a constant. One with ids that were seen before is the same text. One with several of
    the batch's texts, row under row, is those.

    Args:
        texts: The batch's, `(B, T)` each.
        value: The continuous input; `None` makes a new leaf of what the module makes.
        only: Whether the batch has one text alone, of which a model may embed what it makes.
    """

    def __init__(self, texts: Sequence[Tensor], value: Tensor | None, only: bool) -> None:
        self._texts, self.x, self._given, self._only = list(texts), value, value is not None, only
        self._ends = torch.tensor([text.shape[-1] for text in texts]).cumsum(0).tolist()
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}
        self.strangers = 0
        # Vectorized evaluations differentiate by themselves, with the engine's own graphs off.
        self._enabled = torch.is_grad_enabled()

    def __call__(self, _module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor | None:
        if self._enabled and not torch.is_grad_enabled():
            return None
        ids = args[0] if args else next(iter(kwargs.values()))
        rows = len(ids) if self._only else len(self._texts[0])
        parts = zip(ids.split(rows), output.split(rows), strict=True)
        entered = [self._enter(own, made) for own, made in parts]
        found = [x for x in entered if x is not None]
        if len(found) < len(entered):
            self.strangers += 1
            return None
        x = found[0] if len(found) == 1 else torch.cat(found)
        # The value is x. The graph keeps `output`, so the embedding matrix still gets its gradient
        # if it is shared.
        return output + (x - output.detach())

    @property
    def found(self) -> int:
        """How many texts were embedded."""
        return len(self._seen)

    def _enter(self, ids: Tensor, made: Tensor) -> Tensor | None:
        """What stands in the place of an embedded text; `None` if it is none of the batch's."""
        place = self._place(ids)
        if place is None:
            return None
        length = made.shape[1] if self._only else self._texts[place].shape[1]
        own = made[:, :length]  # what follows is padding
        if place not in self._seen:
            self._seen[place] = ids, own.detach()
            if not self._given:
                self._fill(place, own)
        elif not self._given and not torch.equal(self._seen[place][1], own):
            raise ValueError(
                "A text was embedded twice, and not in the same way: noise on embeddings "
                "(neftune_noise_alpha) has no place in a loss that reads a text twice."
            )
        x = self._part(place)
        return x if length == made.shape[1] else torch.cat([x, made[:, length:].detach()], 1)

    def _place(self, ids: Tensor) -> int | None:
        if self._only:
            return 0 if not self._seen or _same(ids, self._seen[0][0]) else None
        return next((k for k, text in enumerate(self._texts) if _pads(ids, text)), None)

    def _fill(self, place: int, made: Tensor) -> None:
        """Write what was embedded to the leaf."""
        if len(self._texts) == 1:
            self.x = made.detach().clone().requires_grad_()
            return
        if self.x is None:
            shape = (len(made), self._ends[-1], made.shape[-1])
            self.x = made.new_zeros(shape).requires_grad_()
        with torch.no_grad():
            self._part(place).copy_(made)

    def _part(self, place: int) -> Tensor:
        assert self.x is not None
        if len(self._texts) == 1:
            return self.x
        end = self._ends[place]
        return self.x[:, end - self._texts[place].shape[1] : end]


def _pads(ids: Tensor, text: Tensor) -> bool:
    """Whether ids are a text's, with zeros after it: texts are embedded together, as wide as the
    widest.
    """
    length = text.shape[1]
    return _same(ids[:, :length], text) and not ids[:, length:].any()


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def special_frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special ids that a tokenizer puts before and after a text.

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
    """Whether every text `(T,)` of a batch has the tokenizer's special tokens around it.

    Example:
        >>> ids = torch.tensor([tokenizer("a fine film").input_ids])
        >>> is_framed(tokenizer, ids, torch.ones_like(ids))
        True
        >>> is_framed(tokenizer, ids[:, 1:], torch.ones_like(ids[:, 1:]))
        False
    """
    before, after = special_frame(tokenizer)
    texts = [row[present.bool()].tolist() for row, present in zip(ids, mask, strict=True)]
    return all(
        len(text) >= len(before) + len(after)
        and text[: len(before)] == before
        and text[len(text) - len(after) :] == after
        for text in texts
    )
