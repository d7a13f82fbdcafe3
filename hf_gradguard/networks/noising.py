"""Natural data with noise mixed into it, which evaluation networks learn from and are judged on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def blend_images(images: Tensor, ratio: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return (1 - r) t1 + r t2: images t1 mixed with noise t2, uniform on [0, 1].

    Args:
        images: Images t1 in [0, 1], `(B, C, H, W)`.
        ratio: One ratio r for each image, `(B,)`.
        generator: The source of randomness.

    Example:
        >>> images = torch.full((2, 3, 8, 8), 0.5)
        >>> blended = blend_images(images, ratio=torch.tensor([0.0, 1.0]))
        >>> [bool((blended[i] == images[i]).all()) for i in range(2)]
        [True, False]
    """
    noise = torch.rand(images.shape, generator=generator)
    return torch.lerp(images, noise, ratio[:, None, None, None])


def replace_tokens(
    ids: Tensor,
    mask: Tensor,
    ratio: Tensor,
    candidates: Tensor,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Replace a fraction of each text's tokens, in whole tokens, by uniformly drawn `candidates`.

    Args:
        ids: Token ids, `(B, T)`.
        mask: True at the tokens that may be replaced, `(B, T)`.
        ratio: The fraction of those to replace, `(B,)`.
        candidates: The ids to draw from, `(K,)`.
        generator: The source of randomness.

    Returns:
        `(B, T)` ids. A draw may hit the token that was there: compare to know what was really
        replaced.

    Example:
        >>> ids, mask = batch["input_ids"], batch["attention_mask"]
        >>> ratio, candidates = torch.tensor([0.0, 1.0]), torch.tensor([20])
        >>> noisy = replace_tokens(ids, mask, ratio, candidates)
        >>> (noisy != ids).sum(1).tolist()
        [0, 8]
    """
    mask = mask.bool()
    count = (ratio * mask.sum(1)).round()
    rank = torch.rand(ids.shape, generator=generator).masked_fill(~mask, 2).argsort(1).argsort(1)
    replacements = candidates[torch.randint(len(candidates), ids.shape, generator=generator)]
    return torch.where(mask & (rank < count[:, None]), replacements, ids)


def as_pixels(images: Any) -> Tensor:
    """Return an array, a tensor or a column of images as `(N, C, H, W)` uint8.

    Args:
        images: `(N, H, W)`, `(N, H, W, C)` or `(N, C, H, W)`, uint8 or floating point in [0, 1]; or
            a sequence of such images or of PIL images, all of one size.

    Raises:
        ValueError: If there are no images, they differ in size, or their values are neither uint8
            nor in [0, 1].

    Example:
        >>> as_pixels(np.zeros((5, 28, 28), dtype=np.uint8)).shape
        torch.Size([5, 1, 28, 28])
    """
    if not isinstance(images, np.ndarray | Tensor):
        arrays = [np.asarray(_plain(image)) for image in images]
        shapes = sorted({array.shape for array in arrays})
        if len(shapes) > 1:
            raise ValueError(
                f"The images have {len(shapes)} shapes, such as {shapes[0]} and {shapes[-1]}; a "
                "network judges one. Bring them to one with "
                '`image.convert("RGB").resize((size, size))`.'
            )
        images = np.stack(arrays) if arrays else np.zeros((0, 1, 1, 1))
    pixels = torch.as_tensor(images)
    if pixels.ndim == 3:
        pixels = pixels[:, None]
    elif pixels.ndim == 4 and pixels.shape[-1] in (1, 3, 4) and pixels.shape[1] not in (1, 3):
        pixels = pixels.permute(0, 3, 1, 2)
    if pixels.ndim != 4 or pixels.shape[0] == 0:
        raise ValueError(
            "Images must be (N, H, W), (N, H, W, C) or (N, C, H, W), but are "
            f"{tuple(pixels.shape)}."
        )
    if pixels.dtype == torch.uint8:
        return pixels
    if not torch.is_floating_point(pixels) or not bool(((pixels >= 0) & (pixels <= 1)).all()):
        raise ValueError(
            f"Pixels must be uint8 or floating point in [0, 1], but are {pixels.dtype} beyond that."
        )
    return (pixels * 255).round().to(torch.uint8)


def _plain(image: Any) -> Any:
    """Return an image in gray or in color: a palette's indices are no pixels."""
    if not hasattr(image, "mode"):
        return image
    from ..data.images import is_gray, to_pil  # an extra, which texts do without

    return to_pil(image, "L" if is_gray(image) else "RGB")


def embedding_weight(embedding: nn.Module) -> Tensor:
    """Return the matrix `(V, H)` of an input-embedding module, detached.

    Raises:
        ValueError: If the module has none.
    """
    weight = getattr(embedding, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise ValueError(
            f"{type(embedding).__name__} has no embedding matrix `weight` of shape (V, H). Pass "
            "the language model's `get_input_embeddings()`."
        )
    return weight.detach()


def special_token_ids(tokenizer: Any) -> list[int]:
    """Return the ids of the tokenizer's special tokens, sorted."""
    ids: Iterable[int] = tokenizer.all_special_ids
    return sorted(set(ids))


def ordinary_token_ids(tokenizer: Any, weight: Tensor) -> Tensor:
    """Return the ids of all tokens but the special ones, `(K,)`.

    The noise of text is uniform over them.

    Raises:
        ValueError: If the tokenizer has more tokens than the embedding matrix `weight` has rows.
    """
    if len(tokenizer) > weight.shape[0]:
        raise ValueError(
            f"The tokenizer has {len(tokenizer)} tokens, but the embedding matrix has "
            f"{weight.shape[0]} rows: they are not of the same model. Pass the model's own "
            "tokenizer, or resize its embeddings."
        )
    special = set(special_token_ids(tokenizer))
    return torch.tensor([i for i in range(len(tokenizer)) if i not in special])
