"""Inputs that an attacker draws at random, to see what the model makes of such."""

from __future__ import annotations

import torch
from torch import Tensor

from ..gradient_map.domain import IMAGE, ends_of, is_encoder_decoder
from ..gradient_map.random_batch import ordinary_ids, special_ids
from .observation import Observation


def random_inputs(seen: Observation, generator: torch.Generator) -> dict[str, Tensor]:
    """A batch of the shapes that were seen, drawn at random, without labels.

    Example:
        >>> random_inputs(seen, torch.Generator())["input_ids"].shape
        torch.Size([2, 8])
    """
    return _RANDOM[seen.domain.name](seen, generator)


def _random_ids(seen: Observation, generator: torch.Generator) -> dict[str, Tensor]:
    batch = seen.placeholder()
    size = seen.model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    words = ordinary_ids(size, _special(seen)).to(seen.device)
    which = torch.randint(len(words), seen.input_shape, generator=generator, device=seen.device)
    ids = torch.where(seen.known_ids() >= 0, batch["input_ids"], words[which])
    return {**batch, "input_ids": _closed(seen, ids)}


def _special(seen: Observation) -> list[int]:
    """Ids that are no words: of padding and ends, models make masks and places."""
    found = {*special_ids(seen.model, seen.tokenizer), *special_ids(seen.model)}
    return sorted(found | set(_ends(seen)))


def _ends(seen: Observation) -> list[int]:
    """The ids that end a text, of which some models have several."""
    end = getattr(getattr(seen.model, "config", None), "eos_token_id", None)
    return [] if end is None else list(end) if isinstance(end, list | tuple) else [int(end)]


def _closed(seen: Observation, ids: Tensor) -> Tensor:
    """Texts with an end, where no special token of the tokenizer's is one: classifiers of
    encoder-decoders read their output there.
    """
    ends = _ends(seen)
    if ends and is_encoder_decoder(seen.model):
        rows = (~torch.isin(ids, torch.tensor(ends, device=ids.device)).any(1)).nonzero()[:, 0]
        ids[rows, ends_of(seen.tokens)[1][rows]] = ends[0]
    return ids


def _random_pixels(seen: Observation, generator: torch.Generator) -> dict[str, Tensor]:
    like = IMAGE.main_input(seen.placeholder())
    drawn = torch.rand(like.shape, generator=generator, device=like.device, dtype=like.dtype)
    return {IMAGE.key: drawn}


_RANDOM = {"text": _random_ids, "image": _random_pixels}
