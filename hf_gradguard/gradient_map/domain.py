"""Text or image: what a client's private input is made of. Nothing else in the library asks which.

A domain knows the entry of the batch that is private and how it becomes the continuous input. The
space of a batch knows where a continuous input may lie: which entries are free to move, what noise
looks like there, and how to get back inside.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..randomness import Stream
from .batch.random_labels import ends, ordinary_ids, random_entries
from .batch.texts import IDS, check_text, distinct_texts, embedding_of, mask_of, owner_of, text_keys


class Domain(ABC):
    """What an input is made of.

    Attributes:
        name: `"text"` or `"image"`.
        key: The entry of the batch that is private.
        content: What that entry holds, in a word.
        shape: Of that entry, as its dimensions are called.
    """

    name: ClassVar[str]
    key: str
    content: ClassVar[str]
    shape: ClassVar[str]

    @property
    def dims(self) -> int:
        """How many dimensions the private entry has at least."""
        return len(self.shape.split(", "))

    def check(self, model: nn.Module, batch: Mapping[str, Any]) -> None:  # noqa: B027
        """Refuse entries that do not fit the private one, or a private one that does not fit the
        model.

        Raises:
            ValueError: With the entry's name.
        """

    def main_input(self, batch: Mapping[str, Any]) -> Tensor:
        """The private entry of a batch, of one row per sample."""
        value: Tensor = batch[self.key]
        return value

    @abstractmethod
    def present(self, batch: Mapping[str, Any]) -> Tensor | None:
        """`(B, T)`, true where a text has a token; `None` where every entry of the input counts."""

    @abstractmethod
    def embedding(self, model: nn.Module) -> nn.Module | None:
        """The module whose output is the continuous input; `None` if the batch holds it."""

    @abstractmethod
    def token_embeddings(self, model: nn.Module) -> list[nn.Module]:
        """Every module that embeds token ids: the model's, and an encoder-decoder's two."""

    def random_batch(
        self,
        model: nn.Module,
        batch: Mapping[str, Any],
        generator: Stream,
        special: Sequence[int] = (),
    ) -> dict[str, Any]:
        """A batch of the same shapes with nothing of the content: random inputs and labels, no
        padding.

        Args:
            model: Says how many tokens and classes there are.
            batch: For shapes and types.
            generator: Of the inputs and labels.
            special: Ids of special tokens. Texts begin and end with those that the batch's do.

        Raises:
            ValueError: For an entry that it cannot make up, by name.
        """
        made: dict[str, Any] = self.random_inputs(model, batch, generator, special)
        return made | random_entries(model, batch, self.key, made, generator)

    def random_inputs(
        self, model: nn.Module, batch: Mapping[str, Any], generator: Stream, special: Sequence[int]
    ) -> dict[str, Tensor]:
        """The private entries, drawn at random."""
        like, present = self.main_input(batch), self.present(batch)
        return {self.key: self.random_input(model, like, generator, special, present)}

    @abstractmethod
    def random_input(
        self,
        model: nn.Module,
        like: Tensor,
        generator: Stream,
        special: Sequence[int],
        present: Tensor | None = None,
    ) -> Tensor:
        """The private entry, drawn at random. `present` is as of the method of that name."""


class Text(Domain):
    """Token ids, of which a model makes embeddings `(B, T, H)`; of several texts side by side.

    Args:
        keys: The entries of the batch that are texts.
    """

    name, content, shape = "text", "tokens", "(B, T)"

    def __init__(self, keys: Sequence[str] = (IDS,)) -> None:
        self.keys, self.key = keys, keys[0]

    def texts(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """The texts that differ, `(B, T)` each."""
        if len(self.keys) == 1:
            return {self.key: batch[self.key]}
        return {key: batch[key] for key in distinct_texts(batch, self.keys)}

    def main_input(self, batch: Mapping[str, Any]) -> Tensor:
        texts = list(self.texts(batch).values())
        return texts[0] if len(texts) == 1 else torch.cat(texts, 1)

    def check(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        for key in self.keys:
            check_text(model, self.embedding(model), batch, key)

    def present(self, batch: Mapping[str, Any]) -> Tensor | None:
        masks = [mask_of(batch, key) for key in self.texts(batch)]
        found = [mask.bool() for mask in masks if mask is not None]
        if len(found) < len(masks):
            return None
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def embedding(self, model: nn.Module) -> nn.Module:
        """The module that embeds `input_ids`, in an encoder-decoder that of the encoder.

        Raises:
            ValueError: If the model names none.
        """
        # An encoder-decoder embeds its source in a module of the encoder's own: a hook on the
        # shared one never fires.
        owner = owner_of(model)
        if getattr(getattr(owner, "config", None), "is_encoder_decoder", False):
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
        whole = owner_of(model)
        owners = [whole]
        if getattr(getattr(whole, "config", None), "is_encoder_decoder", False):
            owners += [whole.get_encoder(), whole.get_decoder()]
        return [module for module in map(embedding_of, owners) if module is not None]

    def random_inputs(
        self, model: nn.Module, batch: Mapping[str, Any], generator: Stream, special: Sequence[int]
    ) -> dict[str, Tensor]:
        texts = distinct_texts(batch, self.keys) if len(self.keys) > 1 else {self.key: self.keys}
        made: dict[str, Tensor] = {}
        for first, names in texts.items():
            mask = mask_of(batch, first)
            present = None if mask is None else mask.bool()
            drawn = self.random_input(model, batch[first], generator, special, present)
            made |= dict.fromkeys(names, drawn)
        return made

    def random_input(
        self,
        model: nn.Module,
        like: Tensor,
        generator: Stream,
        special: Sequence[int],
        present: Tensor | None = None,
    ) -> Tensor:
        """Tokens drawn from the vocabulary without special ones, which stand at the ends only."""
        words = len(self.embedding(model).weight)  # type: ignore[arg-type]
        ordinary = ordinary_ids(words, special).to(like.device)
        ids = ordinary[generator.integers(len(ordinary), like.shape, device=like.device)]
        first, last = ends(like, special, present)
        if first is not None:
            ids[:, 0] = first
        if last is not None and ids.shape[1] > 1:
            ids[:, -1] = last
        return ids.to(like.dtype)


class Image(Domain):
    """Pixels `(B, C, H, W)`."""

    name, key, content, shape = "image", "pixel_values", "pixels", "(B, C, H, W)"

    def present(self, batch: Mapping[str, Any]) -> Tensor | None:
        return None

    def embedding(self, model: nn.Module) -> None:
        return None

    def random_input(
        self,
        model: nn.Module,
        like: Tensor,
        generator: Stream,
        special: Sequence[int],
        present: Tensor | None = None,
    ) -> Tensor:
        """Patches of even color under fine noise, of mean 0 and deviation 1: more like images than
        white noise is.
        """
        coarse = generator.normal((*like.shape[:2], 4, 4), device=like.device)
        smooth = nn.functional.interpolate(coarse, size=like.shape[2:], mode="bilinear")
        fine = generator.normal(like.shape, device=like.device)
        return (smooth + 0.3 * fine).to(like.dtype)

    def token_embeddings(self, model: nn.Module) -> list[nn.Module]:
        # Vision models call their patch projection an input embedding; it is shared like any
        # other weight.
        return []


TEXT, IMAGE = Text(), Image()
DOMAINS: dict[str, Domain] = {domain.name: domain for domain in (TEXT, IMAGE)}


def domains_in(batch: Mapping[str, Any]) -> list[Domain]:
    """What a batch holds of texts and images."""
    texts = text_keys(batch)
    found: list[Domain] = [TEXT if texts == TEXT.keys else Text(texts)] if texts else []
    return [*found, IMAGE] if IMAGE.key in batch else found


def count_rows(batch: Mapping[str, Any]) -> int:
    """How many rows a batch has, also one without text or image: of its first tensor that has any.

    Example:
        >>> count_rows(batch)
        2
    """
    found = domains_in(batch)
    tensors = (v for v in batch.values() if isinstance(v, Tensor) and v.dim())
    return len(batch[found[0].key] if found else next(tensors))


def domain_of_batch(batch: Mapping[str, Any]) -> Domain:
    """The domain of a collated batch.

    Raises:
        ValueError: If it holds no token ids or pixels, both, or pixels that are whole numbers.
    """
    found = domains_in(batch)
    if len(found) > 1:
        raise ValueError(
            "The batch holds both `input_ids` and `pixel_values`. Protecting one of them would "
            "leave the other open, so multimodal batches are not supported. Train the text and the "
            "vision part separately."
        )
    if not found:
        raise ValueError(
            f"The batch holds {sorted(batch)}: neither `input_ids` nor `pixel_values`, so there is "
            "no continuous input to protect. Return one of them from the collator (precomputed "
            "`inputs_embeds` are not supported: pass the ids)."
        )
    if found[0] is IMAGE and not torch.is_floating_point(batch[IMAGE.key]):
        raise ValueError(
            f"`pixel_values` are {batch[IMAGE.key].dtype}: there is no gradient with respect to "
            "integers. Convert them to floating point in the collator, as HF image processors do."
        )
    return found[0]


def domain_of_model(model: nn.Module) -> Domain:
    """The domain of a model's main input: images where it is `pixel_values`."""
    named = getattr(model, "main_input_name", TEXT.key)
    return IMAGE if named == IMAGE.key else TEXT


def check_batch(model: nn.Module, batch: Any, needs_input: bool = True) -> None:
    """Refuse a batch of which a model could make no loss, or one that says nothing of the batch.

    Args:
        model: The model.
        batch: What a collator returned.
        needs_input: Whether anything asks for the continuous input. If not, what the model takes
            may be anything.

    Raises:
        ValueError: With the entry's name, what it is, and what it should be.
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
        found = (
            f"have shape {tuple(value.shape)}"
            if isinstance(value, Tensor)
            else f"are a {type(value).__name__}"
        )
        raise ValueError(
            f"`{domain.key}` of a batch {found}, where a tensor {domain.shape} of at least one row "
            "is needed. Change the collator or the data."
        )
    domain.check(model, batch)


def domain_of_shape(shape: Sequence[int]) -> Domain:
    """The domain of a batch's main input by its shape: `(B, T)` or `(B, C, H, W)`."""
    return TEXT if len(shape) == 2 else IMAGE


def embed(module: nn.Module, ids: Tensor) -> Tensor:
    """`(*ids.shape, H)`: a token embedding's own forward pass, which may scale.

    Hooks (NEFTune's, say) are for the model's passes.
    """
    with torch.no_grad():
        output: Tensor = type(module).forward(module, ids)
    return output
