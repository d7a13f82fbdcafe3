"""Training evaluation networks: mix natural data with noise, and predict how much of it is
noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import logging

from .configuration import ImageEvaluationNetworkConfig, TextEvaluationNetworkConfig
from .modeling import (
    ImageEvaluationNetwork,
    TextEvaluationNetwork,
    embedding_fingerprint,
    special_token_ids,
)

logger = logging.get_logger(__name__)


def train_image_network(
    images: Any,
    *,
    epochs: float = 20,
    batch_size: int = 128,
    learning_rate: float = 5e-4,
    seed: int = 0,
    device: torch.device | str = "cpu",
    augment: bool = True,
    progress: bool = True,
    **config: Any,
) -> ImageEvaluationNetwork:
    """Train an `ImageEvaluationNetwork` to predict r from (1 - r) t1 + r t2: t1 natural, t2 uniform
    on [0, 1], r ~ U(0, 1).

    Every image draws a ratio of its own. The paper mixes each batch at all of r = 0, 0.1, ..., 1
    before the next one, which costs eleven times as much per image and shows no ratio in between.

    Args:
        images: What `as_pixels` takes: an array or tensor, or a `datasets` column of images, all of
            one size.
        epochs: Passes over the images.
        batch_size: Images a step.
        learning_rate: Peak rate of Adam; it falls to 0 along a half cosine. (The paper keeps 1e-4
            for eleven times as many steps.)
        seed: Same seed, same machine: same network. The global random state is left alone.
        device: Where to train.
        augment: Flips, gray and high-contrast versions, frames and gray noise, so that data sets
            unlike the training images are judged well too.
        progress: Show a bar.
        **config: Further entries of `ImageEvaluationNetworkConfig`, such as `filters`.

    Returns:
        The network, in eval mode, on `device`.
    """
    pixels = as_pixels(images)
    channels, height, width = pixels.shape[1:]
    size: Any = height if height == width else [height, width]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = ImageEvaluationNetwork(
            ImageEvaluationNetworkConfig(num_channels=channels, image_size=size, **config)
        )
    network.to(device=torch.device(device), memory_format=torch.channels_last)
    generator = torch.Generator().manual_seed(seed)
    steps = max(1, math.ceil(epochs * len(pixels) / batch_size))
    order = _shuffled(len(pixels), generator)

    def loss() -> Tensor:
        natural = pixels[[next(order) for _ in range(min(batch_size, len(pixels)))]].float() / 255
        ratio = torch.rand(len(natural), generator=generator)
        mixed = (
            _augmented_mix(natural, ratio, generator)
            if augment
            else blend_images(natural, ratio, generator)
        )
        return network(mixed.to(device), labels=ratio.to(device)).loss

    _optimize(network, loss, steps, learning_rate, progress)
    return network


def train_text_network(
    embedding: nn.Module,
    tokenizer: Any,
    texts: Iterable[str],
    *,
    base_model: str = "",
    steps: int = 5000,
    batch_size: int = 64,
    learning_rate: float = 2e-3,
    max_length: int = 48,
    blended: float = 0.25,
    jitter: float = 0.2,
    seed: int = 0,
    progress: bool = True,
    **config: Any,
) -> TextEvaluationNetwork:
    """Train a `TextEvaluationNetwork` to predict which fraction of a text's tokens was replaced by
    random ones.

    Each step cuts passages of one length, drawn from 1 to `max_length` tokens, out of the texts;
    replaces a fraction r ~ U(0, 1) of each one's tokens, rounded to whole tokens, by tokens uniform
    over the vocabulary; and learns which they were and how many. Special tokens are left out. A
    share of the passages is mixed in embedding space instead, each of its tokens being (1 - r) t1 +
    r t2 with t2 a random token's embedding: that is where the Refiner begins.

    Args:
        embedding: The language model's input-embedding module: ids `(B, T)` to `(B, T, H)`, with a
            `weight` `(V, H)`. The network is trained on its device.
        tokenizer: The model's tokenizer.
        texts: Public text. Each entry is a passage or longer.
        base_model: The model's Hub name, kept in the configuration. A local path does not belong
            here.
        steps: Optimizer steps.
        batch_size: Passages a step.
        learning_rate: Peak rate of Adam; it falls to 0 along a half cosine.
        max_length: Longest passage, in tokens.
        blended: Share of passages mixed in embedding space, 0 to 1.
        jitter: Gaussian noise on the embeddings, in their own standard deviations, so that the
            network learns directions rather than single words and does not change abruptly between
            them.
        seed: Same seed, same machine: same network. The global random state is left alone.
        progress: Show a bar.
        **config: Further entries of `TextEvaluationNetworkConfig`, such as `width`.

    Returns:
        The network, in eval mode.

    Raises:
        ValueError: If the texts hold no ordinary token, or the module and the tokenizer do not
            belong together.
    """
    weight = embedding_weight(embedding)
    special, candidates = special_token_ids(tokenizer), ordinary_token_ids(tokenizer, weight)
    passages = _Passages(tokenizer, texts, special)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = TextEvaluationNetwork(
            TextEvaluationNetworkConfig(
                embedding_size=weight.shape[1],
                embedding_fingerprint=embedding_fingerprint(weight),
                base_model=base_model,
                special_token_ids=special,
                **config,
            )
        )
    network.to(weight.device)
    network.set_embedding_statistics(weight)
    generator = torch.Generator().manual_seed(seed)

    def loss() -> Tensor:
        length = int(torch.randint(1, max_length + 1, (), generator=generator))
        ids, mask = passages.draw(batch_size, length, generator)
        ratio = torch.rand(batch_size, generator=generator)
        noisy = replace_tokens(ids, mask, ratio, candidates, generator)
        labels = (noisy != ids).float()
        with torch.no_grad():
            x = embedding(noisy.to(weight.device)).float()
            rows = int(blended * batch_size)
            if rows:
                share = ratio[:rows, None].expand(rows, length)
                other = candidates[
                    torch.randint(len(candidates), (rows, length), generator=generator)
                ]
                pair = embedding(torch.stack([ids[:rows], other]).to(weight.device)).float()
                x[:rows] = torch.lerp(pair[0], pair[1], share[..., None].to(weight.device))
                labels[:rows] = share
            x = x + jitter * network.embedding_std * torch.randn(x.shape, generator=generator).to(x)
        return network(x, mask.to(weight.device), labels=labels.to(weight.device)).loss

    _optimize(network, loss, steps, learning_rate, progress)
    return network


def blend_images(images: Tensor, ratio: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """(1 - r) t1 + r t2 with t2 uniform on [0, 1]: images `(B, C, H, W)`, one ratio each,
    `(B,)`.
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
    """Replace a fraction of each text's tokens, rounded to whole tokens, by uniformly drawn
    `candidates`.

    Args:
        ids: `(B, T)` token ids.
        mask: `(B, T)`, true at the tokens that may be replaced.
        ratio: `(B,)`, the fraction of those to replace.
        candidates: `(K,)` ids to draw from.
        generator: Source of randomness.

    Returns:
        `(B, T)` ids. A draw may hit the token that was there: compare to know what was really
        replaced.
    """
    mask = mask.bool()
    count = (ratio * mask.sum(1)).round()
    rank = torch.rand(ids.shape, generator=generator).masked_fill(~mask, 2).argsort(1).argsort(1)
    drawn = candidates[torch.randint(len(candidates), ids.shape, generator=generator)]
    return torch.where(mask & (rank < count[:, None]), drawn, ids)


def as_pixels(images: Any) -> Tensor:
    """`(N, C, H, W)` uint8 from an array, a tensor or a column of images.

    Args:
        images: `(N, H, W)`, `(N, H, W, C)` or `(N, C, H, W)`, uint8 or floating point in [0, 1]; or
            a sequence of such images or of PIL images, all of one size.

    Raises:
        ValueError: If there are no images, they differ in size, or their values are neither uint8
            nor in [0, 1].
    """
    if not isinstance(images, np.ndarray | Tensor):
        arrays = [np.asarray(image) for image in images]
        shapes = sorted({array.shape for array in arrays})
        if len(shapes) > 1:
            raise ValueError(
                f"The images have {len(shapes)} shapes, such as {shapes[0]} and {shapes[-1]}; a network judges one. Bring "
                'them to one with `image.convert("RGB").resize((size, size))`.'
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


def embedding_weight(embedding: nn.Module) -> Tensor:
    """The matrix `(V, H)` of an input-embedding module, detached. ValueError if it has none."""
    weight = getattr(embedding, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise ValueError(
            f"{type(embedding).__name__} has no embedding matrix `weight` of shape (V, H). Pass "
            "the language model's `get_input_embeddings()`."
        )
    return weight.detach()


def ordinary_token_ids(tokenizer: Any, weight: Tensor) -> Tensor:
    """`(K,)` ids of all tokens but the special ones: the noise of text is uniform over them."""
    if len(tokenizer) > weight.shape[0]:
        raise ValueError(
            f"The tokenizer has {len(tokenizer)} tokens, but the embedding matrix has "
            f"{weight.shape[0]} rows: they are not of the same model. Pass the model's own "
            "tokenizer, or resize its embeddings."
        )
    special = set(special_token_ids(tokenizer))
    return torch.tensor([i for i in range(len(tokenizer)) if i not in special])


class _Passages:
    """Random passages out of tokenized texts, none across the border of two texts."""

    def __init__(self, tokenizer: Any, texts: Iterable[str], special: Sequence[int]) -> None:
        kept, skip = [text for text in texts if text and text.strip()], set(special)
        encoded = (
            tokenizer(kept, add_special_tokens=False, verbose=False)["input_ids"] if kept else []
        )
        encoded = [[i for i in ids if i not in skip] for ids in encoded]
        lengths = torch.tensor([len(ids) for ids in encoded if ids], dtype=torch.long)
        if not len(lengths):
            raise ValueError(
                "The texts hold no ordinary token to train on. Is it the right column?"
            )
        self.ids = torch.tensor([i for ids in encoded for i in ids])
        self.end = torch.repeat_interleave(
            lengths.cumsum(0), lengths
        )  # of the text that each token is in
        self.start = self.end - torch.repeat_interleave(lengths, lengths)

    def draw(self, rows: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """`(rows, length)` ids and mask. Passages of shorter texts are padded with whatever
        follows, masked.
        """
        at = torch.randint(len(self.ids), (rows,), generator=generator)
        first = torch.maximum(torch.minimum(at, self.end[at] - length), self.start[at])
        position = first[:, None] + torch.arange(length)
        return self.ids[position.clamp(max=len(self.ids) - 1)], position < self.end[at][:, None]


def _augmented_mix(images: Tensor, ratio: Tensor, generator: torch.Generator) -> Tensor:
    """`blend_images` of images made more varied than any one data set is, shape unchanged."""
    shape, n = images.shape, len(images)

    def draw(*size: int) -> Tensor:
        return torch.rand(size, generator=generator)

    def chosen(probability: float) -> Tensor:
        return (draw(n) < probability)[:, None, None, None]

    def scalar(low: float, high: float) -> Tensor:
        return (low + (high - low) * draw(n))[:, None, None, None]

    images = images.where(chosen(0.5), images.flip(-1))
    gray = chosen(0.3)
    images = torch.where(gray, images.mean(1, keepdim=True), images)
    images = torch.where(chosen(0.1), 1 - images, images)
    # Contrast and brightness; then drawings: nearly black and white, mostly black, as digits are.
    toned = scalar(0.0, 1.0) + scalar(0.1, 1.6) * (images - images.mean((1, 2, 3), keepdim=True))
    images = torch.where(chosen(0.5), toned.clamp(0, 1), images)
    threshold = images.flatten(1).quantile(0.85, dim=1)[:, None, None, None]
    drawing = ((images - threshold) * scalar(3, 15)).clamp(0, 1)
    images = torch.where(chosen(0.2), drawing, images)
    noise = draw(*shape)
    noise = torch.where(gray & chosen(0.5), noise[:, :1], noise)
    mixed = torch.lerp(images, noise, ratio[:, None, None, None])
    # Smaller images in a black frame, as `adapt_images` makes them, and a few stretched ones.
    height, width = shape[2:]
    rows, columns = torch.arange(height)[:, None], torch.arange(width)
    inside = torch.minimum(
        torch.minimum(rows, height - 1 - rows), torch.minimum(columns, width - 1 - columns)
    )
    frame = (draw(n) * (height // 8 + 1)).floor()[:, None, None, None]
    mixed = torch.where((inside < frame) & chosen(0.25), 0.0, mixed)
    stretched = F.interpolate(
        mixed[..., : height - height // 8, : width - width // 8],
        size=(height, width),
        mode="bilinear",
    )
    return torch.where(chosen(0.05), stretched, mixed)


def _shuffled(count: int, generator: torch.Generator) -> Any:
    while True:
        yield from torch.randperm(count, generator=generator).tolist()


def _optimize(
    network: nn.Module, loss: Callable[[], Tensor], steps: int, learning_rate: float, progress: bool
) -> None:
    optimizer = torch.optim.Adam(network.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    network.train()
    smooth = None
    bar = logging.tqdm(range(steps), desc="evaluation network", disable=not progress)
    for step in bar:
        value = loss()
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            smooth = (
                float(value.detach())
                if smooth is None
                else 0.9 * smooth + 0.1 * float(value.detach())
            )
            bar.set_postfix(loss=f"{smooth:.4f}")
    network.eval()
