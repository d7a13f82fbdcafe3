"""Training of evaluation networks: mix natural data with noise, and predict the noise ratio."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import logging

from .configuration import ImageEvaluationNetworkConfig, TextEvaluationNetworkConfig
from .image_network import ImageEvaluationNetwork
from .noising import (
    as_pixels,
    blend_images,
    embedding_weight,
    ordinary_token_ids,
    replace_tokens,
    special_token_ids,
)
from .text_network import TextEvaluationNetwork, embedding_fingerprint, every_embedding


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
    """Train an `ImageEvaluationNetwork` to predict r from (1 - r) t1 + r t2.

    t1 is a natural image, t2 is uniform on [0, 1], and r ~ U(0, 1). Every image draws a ratio of
    its own. The paper mixes each batch at all of r = 0, 0.1, ..., 1 before the next one, which
    costs eleven times as much per image and shows no ratio in between.

    Args:
        images: Images in any form that `as_pixels` takes: an array or tensor, or a `datasets`
            column of images, all of one size.
        epochs: Passes over the images.
        batch_size: Images a step.
        learning_rate: The peak rate of Adam; it decreases to 0 along a half cosine. (The paper
            keeps 1e-4 for eleven times as many steps.)
        seed: The seed. The same seed gives the same network on the same machine. The global random
            state is not changed.
        device: The device to train on.
        augment: Add flips, gray and high-contrast versions, frames and gray noise, so that data
            sets unlike the training images are judged well too.
        progress: Show a bar.
        **config: Further entries of `ImageEvaluationNetworkConfig`, such as `filters`.

    Returns:
        The network, in eval mode, on `device`.

    Example:
        >>> settings = {"epochs": 1, "filters": [4], "progress": False}
        >>> network = train_image_network(torch.rand(8, 1, 8, 8), **settings)
        >>> network.noise_ratio(torch.rand(2, 1, 8, 8)).shape
        torch.Size([2])
    """
    pixels = as_pixels(images)
    network = _new_image_network(pixels, seed, config)
    network.to(device=torch.device(device), memory_format=torch.channels_last)
    generator = torch.Generator().manual_seed(seed)
    steps = max(1, math.ceil(epochs * len(pixels) / batch_size))
    order = _shuffled(len(pixels), generator)

    def loss() -> Tensor:
        natural = pixels[[next(order) for _ in range(min(batch_size, len(pixels)))]].float() / 255
        ratio = torch.rand(len(natural), generator=generator)
        mix = _augmented_mix if augment else blend_images
        mixed = mix(natural, ratio, generator)
        return network(mixed.to(device), labels=ratio.to(device)).loss

    _optimize(network, loss, steps, learning_rate, progress)
    return network


def _new_image_network(pixels: Tensor, seed: int, config: dict[str, Any]) -> ImageEvaluationNetwork:
    channels, height, width = pixels.shape[1:]
    size: Any = height if height == width else [height, width]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shape = {"num_channels": channels, "image_size": size}
        return ImageEvaluationNetwork(ImageEvaluationNetworkConfig(**shape, **config))


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
    """Train a `TextEvaluationNetwork` to predict which tokens of a text are noise, and how many.

    Each step cuts passages of one length, drawn from 1 to `max_length` tokens, out of the texts and
    replaces a fraction r ~ U(0, 1) of each one's tokens by tokens uniform over the vocabulary. The
    network is returned in eval mode.

    Args:
        embedding: The language model's input-embedding module: ids `(B, T)` to `(B, T, H)`, with a
            `weight` `(V, H)`. The network is trained on its device.
        tokenizer: The model's tokenizer.
        texts: Public text. Each entry is a passage or longer.
        base_model: The model's Hub name, kept in the configuration. No local path belongs here.
        steps: Optimizer steps.
        batch_size: Passages per step.
        learning_rate: The peak rate of Adam; it decreases to 0 along a half cosine.
        max_length: The longest passage, in tokens.
        blended: The fraction of passages, 0 to 1, that are mixed in embedding space instead: each
            token becomes (1 - r) t1 + r t2 with t2 a random token. That is where the Refiner
            begins.
        jitter: Gaussian noise on the embeddings, in their own standard deviations: the network
            learns directions, not single words, and does not change abruptly between them.
        seed: The seed. The same seed gives the same network on the same machine. The global random
            state is not changed.
        progress: Show a bar.
        **config: Further entries of `TextEvaluationNetworkConfig`, such as `width`.

    Raises:
        ValueError: If the texts hold no ordinary token, or the module and the tokenizer do not
            belong together.

    Example:
        >>> embedding = model.get_input_embeddings()
        >>> network = train_text_network(embedding, tokenizer, texts, steps=1, progress=False)
        >>> network.config.embedding_size == embedding.weight.shape[1]
        True
    """
    passages = _NoisyPassages(embedding, tokenizer, texts, blended, seed)
    network = _new_text_network(passages, base_model, seed, config)

    def loss() -> Tensor:
        x, mask, labels = passages.draw(batch_size, max_length)
        noise = torch.randn(x.shape, generator=passages.generator).to(x)
        return network(x + jitter * network.embedding_std * noise, mask, labels=labels).loss

    _optimize(network, loss, steps, learning_rate, progress)
    return network


def _new_text_network(
    passages: _NoisyPassages, base_model: str, seed: int, config: dict[str, Any]
) -> TextEvaluationNetwork:
    weight = passages.weight
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = TextEvaluationNetwork(
            TextEvaluationNetworkConfig(
                embedding_size=weight.shape[1],
                embedding_fingerprint=embedding_fingerprint(weight),
                base_model=base_model,
                special_token_ids=passages.special,
                **config,
            )
        )
    network.to(weight.device)
    network.set_embedding_statistics(every_embedding(passages.embedding))
    return network


class _NoisyPassages:
    """A source of passages' embeddings with noise in them, and of each token's noise ratio."""

    def __init__(
        self, embedding: nn.Module, tokenizer: Any, texts: Iterable[str], blended: float, seed: int
    ) -> None:
        self.embedding, self.weight, self.blended = embedding, embedding_weight(embedding), blended
        self.special = special_token_ids(tokenizer)
        self.candidates = ordinary_token_ids(tokenizer, self.weight)
        self.passages = _Passages(tokenizer, texts, self.special)
        self.generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def draw(self, rows: int, max_length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw embeddings `(B, T, H)`, their mask `(B, T)`, and tokens' noise ratios `(B, T)`."""
        generator, device = self.generator, self.weight.device
        length = int(torch.randint(1, max_length + 1, (), generator=generator))
        ids, mask = self.passages.draw(rows, length, generator)
        ratio = torch.rand(rows, generator=generator)
        noisy = replace_tokens(ids, mask, ratio, self.candidates, generator)
        labels = (noisy != ids).float()
        x = self.embedding(noisy.to(device)).float()
        mixed = int(self.blended * rows)
        if mixed:
            fraction = ratio[:mixed, None].expand(mixed, length)
            choice = torch.randint(len(self.candidates), (mixed, length), generator=generator)
            pair = torch.stack([ids[:mixed], self.candidates[choice]])
            original, replacement = self.embedding(pair.to(device)).float()
            x[:mixed] = torch.lerp(original, replacement, fraction[..., None].to(device))
            labels[:mixed] = fraction
        return x, mask.to(device), labels.to(device)


class _Passages:
    """A source of random passages out of tokenized texts, none across the border of two texts."""

    def __init__(self, tokenizer: Any, texts: Iterable[str], special: Sequence[int]) -> None:
        nonempty, skip = [text for text in texts if text and text.strip()], set(special)
        encoded = []
        if nonempty:
            encoded = tokenizer(nonempty, add_special_tokens=False, verbose=False)["input_ids"]
        encoded = [[i for i in ids if i not in skip] for ids in encoded]
        lengths = torch.tensor([len(ids) for ids in encoded if ids], dtype=torch.long)
        if not len(lengths):
            raise ValueError(
                "The texts hold no ordinary token to train on. Is it the right column?"
            )
        self.ids = torch.tensor([i for ids in encoded for i in ids])
        # Of the text that each token is in.
        self.end = torch.repeat_interleave(lengths.cumsum(0), lengths)
        self.start = self.end - torch.repeat_interleave(lengths, lengths)

    def draw(self, rows: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw ids and a mask, `(rows, length)`.

        Passages of shorter texts are padded with whatever follows, masked.
        """
        anchor = torch.randint(len(self.ids), (rows,), generator=generator)
        passage_start = torch.maximum(
            torch.minimum(anchor, self.end[anchor] - length), self.start[anchor]
        )
        position = passage_start[:, None] + torch.arange(length)
        return self.ids[position.clamp(max=len(self.ids) - 1)], position < self.end[anchor][:, None]


def _augmented_mix(images: Tensor, ratio: Tensor, generator: torch.Generator) -> Tensor:
    """Return `blend_images` of images that were varied beyond what one data set has."""
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
    to_rows = torch.minimum(rows, height - 1 - rows)
    edge_distance = torch.minimum(to_rows, torch.minimum(columns, width - 1 - columns))
    frame = (draw(n) * (height // 8 + 1)).floor()[:, None, None, None]
    mixed = torch.where((edge_distance < frame) & chosen(0.25), 0.0, mixed)
    corner = mixed[..., : height - height // 8, : width - width // 8]
    stretched = F.interpolate(corner, size=(height, width), mode="bilinear")
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
            current = float(value.detach())
            smooth = current if smooth is None else 0.9 * smooth + 0.1 * current
            bar.set_postfix(loss=f"{smooth:.4f}")
    network.eval()
