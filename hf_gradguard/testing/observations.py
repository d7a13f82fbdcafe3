"""Small observations for attacks to be tried on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..attacks import Observation
from ..gradient_map import GradientMap
from ..gradient_map.domain import DOMAINS
from .small import SMALL_TASKS


def small_observation(domain: str, **changes: Any) -> Observation:
    """What a server sees of a small model's gradient, with everything granted.

    Args:
        domain: `"text"` or `"image"`.
        **changes: Fields of the `Observation` to put in the place of its own.

    Example:
        >>> small_observation("image", labels=None).input_shape
        (2, 3, 16, 16)
    """
    model, batch, tokenizer = SMALL_TASKS[domain]()
    with torch.random.fork_rng(devices=[]):  # dropout draws from the process's generator
        gradient = GradientMap(
            model, batch, share_input_embeddings=True, second_order=False
        ).gradient()
    shape = tuple(DOMAINS[domain].main_input(batch).shape)
    seen = Observation(
        model=model,
        gradient=gradient,
        input_shape=shape,
        labels=batch["labels"],
        attention_mask=batch.get("attention_mask"),
        tokenizer=tokenizer,
    )
    return replace(seen, **changes)


def other_cases(seen: Observation) -> list[tuple[str, Observation]]:
    """What else a server may see, each with its name: less is granted, or more is told.

    Example:
        >>> [name for name, _ in other_cases(small_observation("image"))][:2]
        ['an observation without labels', 'one whose noise is known']
    """
    noise = {name: torch.full_like(g, 1e-6) for name, g in seen.gradient.items()}
    last = next(name for name in reversed(list(seen.gradient)) if seen.gradient[name].dim() == 1)
    zeros = {n: g if n == last else torch.zeros_like(g) for n, g in seen.gradient.items()}
    return [
        ("an observation without labels", replace(seen, labels=None)),
        ("one whose noise is known", replace(seen, noise_variance=noise)),
        (f"a gradient of zeros but for {last}", replace(seen, gradient=zeros)),
        (f"a gradient of {last} alone", replace(seen, gradient={last: seen.gradient[last]})),
        *_CASES[seen.domain.name](seen),
    ]


def _text_cases(seen: Observation) -> list[tuple[str, Observation]]:
    embeddings = {id(p) for p in seen.model.get_input_embeddings().parameters()}  # type: ignore[operator]
    names = {name for name, p in seen.model.named_parameters() if id(p) in embeddings}
    withheld = {name: g for name, g in seen.gradient.items() if name not in names}
    return [
        ("a text without its mask", replace(seen, attention_mask=None)),
        ("a text without a tokenizer", replace(seen, tokenizer=None)),
        ("a text whose embeddings are withheld", replace(seen, gradient=withheld)),
    ]


def _image_cases(seen: Observation) -> list[tuple[str, Observation]]:
    channels = seen.input_shape[1]
    scaled = replace(seen, image_mean=[0.5] * channels, image_std=[0.25] * channels)
    return [("images that were normalized", scaled)]


_CASES = {"text": _text_cases, "image": _image_cases}
