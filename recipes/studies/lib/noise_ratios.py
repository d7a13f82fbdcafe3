"""How well an evaluation network tells the noise ratio on data it never saw."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from hf_gradguard.networks.image import ImageEvaluationNetwork, adapt_images
from hf_gradguard.networks.noise import (
    as_pixels,
    blend_images,
    embedding_weight,
    ordinary_token_ids,
    replace_tokens,
)
from hf_gradguard.networks.text import TextEvaluationNetwork

RATIOS = tuple(round(0.1 * step, 1) for step in range(11))


@dataclass(frozen=True)
class NetworkFigures:
    """Predictions at noise ratios 0, 0.1, ..., 1.

    Args:
        samples: Images or texts, each judged at all ratios.
        ratios: The noise ratios asked for.
        mean_predictions: The network's mean at each of them.
        strictly_increasing: Whether those rise from each ratio to the next.
        spearman_of_means: Rank correlation of the means with the ratios (1 exactly if strictly
            increasing).
        spearman: Rank correlation of all single predictions with the noise ratio that each sample
            really had.
        spearman_nominal: The same with the ratio asked for. For texts it is lower: of three words,
            0.1 replaces none.
        mean_absolute_error: Of single predictions, from the ratio that each sample really had.
        worst_mean_error: The largest distance of a mean prediction from the mean ratio it should
            be.
    """

    samples: int
    ratios: list[float]
    mean_predictions: list[float]
    strictly_increasing: bool
    spearman_of_means: float
    spearman: float
    spearman_nominal: float
    mean_absolute_error: float
    worst_mean_error: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def evaluate_image_network(
    network: ImageEvaluationNetwork, images: Any, *, seed: int = 0, batch_size: int = 250
) -> NetworkFigures:
    """Judge images (whatever `as_pixels` takes) blended with uniform noise at every ratio.

    Noise is added at the images' own shape and size, then they pass through `adapt_images`: a
    client that protects gray digits adds gray noise of their size too.
    """
    pixels = as_pixels(images)
    generator = torch.Generator().manual_seed(seed)

    def batches(ratio: float) -> Iterator[tuple[Tensor, Tensor]]:
        for chunk in pixels.split(batch_size):
            target = torch.full((len(chunk),), ratio)
            noisy = adapt_images(blend_images(chunk.float() / 255, target, generator), network)
            yield network.noise_ratio(noisy.to(network.device)).cpu(), target

    return _figures(batches, len(pixels))


def evaluate_text_network(
    network: TextEvaluationNetwork,
    embedding: nn.Module,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    seed: int = 0,
    batch_size: int = 64,
    max_length: int = 128,
    blend: bool = False,
) -> NetworkFigures:
    """Judge texts with a fraction of their tokens replaced by random ones, at every ratio.

    Args:
        network: The network; `embedding` must be the one it was trained on.
        embedding: The language model's input-embedding module.
        tokenizer: Its tokenizer. Texts are encoded as for the model, special tokens and padding
            included.
        texts: The texts. Those without an ordinary token are left out.
        seed: Of the noise.
        batch_size: Texts at a time.
        max_length: Longer texts are cut.
        blend: Mix every token's embedding with a random token's by the ratio, instead of replacing
            tokens.
    """
    weight = embedding_weight(embedding)
    network.check_embedding(weight)
    candidates = ordinary_token_ids(tokenizer, weight)
    generator = torch.Generator().manual_seed(seed)
    encoded = _encode(tokenizer, texts, batch_size, max_length)
    replaceable = [
        torch.isin(batch["input_ids"], candidates) & batch["attention_mask"].bool()
        for batch in encoded
    ]

    def batches(ratio: float) -> Iterator[tuple[Tensor, Tensor]]:
        for batch, mask in zip(encoded, replaceable, strict=True):
            ids, ratios_asked = (
                batch["input_ids"],
                torch.full((len(mask),), 1.0 if blend else ratio),
            )
            noisy = replace_tokens(ids, mask, ratios_asked, candidates, generator)
            x = embedding(noisy.to(weight.device))
            if blend:
                x = torch.lerp(embedding(ids.to(weight.device)), x, ratio)
                target = torch.full((len(mask),), ratio)
            else:
                target = (noisy != ids).sum(1) / mask.sum(1).clamp(min=1)
            has_tokens = mask.any(1)
            predicted = network.noise_ratio(x, batch["attention_mask"].to(weight.device)).cpu()
            yield predicted[has_tokens], target[has_tokens]

    return _figures(batches, int(sum(int(mask.any(1).sum()) for mask in replaceable)))


def _encode(
    tokenizer: Any, texts: Sequence[str], batch_size: int, max_length: int
) -> list[Mapping[str, Tensor]]:
    """Padded batches, of texts alike in length: little padding."""
    texts = sorted((text for text in texts if text.strip()), key=len)
    return [
        tokenizer(
            texts[i : i + batch_size],
            truncation=True,
            max_length=max_length,
            padding=True,
            return_tensors="pt",
        )
        for i in range(0, len(texts), batch_size)
    ]


@torch.no_grad()
def _figures(batches: Any, samples: int) -> NetworkFigures:
    predictions, targets, nominal = [], [], []
    for ratio in RATIOS:
        chunks = list(batches(ratio))
        predictions.append(torch.cat([chunk[0] for chunk in chunks]).double())
        targets.append(torch.cat([chunk[1] for chunk in chunks]).double())
        nominal.append(torch.full_like(targets[-1], ratio))
    means = torch.stack([p.mean() for p in predictions])
    target_means = torch.stack([t.mean() for t in targets])
    predicted, target = torch.cat(predictions), torch.cat(targets)
    return NetworkFigures(
        samples=samples,
        ratios=list(RATIOS),
        mean_predictions=[round(float(m), 4) for m in means],
        strictly_increasing=bool((means.diff() > 0).all()),
        spearman_of_means=_spearman(means, torch.tensor(RATIOS)),
        spearman=_spearman(predicted, target),
        spearman_nominal=_spearman(predicted, torch.cat(nominal)),
        mean_absolute_error=round(float((predicted - target).abs().mean()), 4),
        worst_mean_error=round(float((means - target_means).abs().max()), 4),
    )


def _spearman(predicted: Tensor, true: Tensor) -> float:
    return round(float(spearmanr(predicted.numpy(), true.numpy()).statistic), 4)
