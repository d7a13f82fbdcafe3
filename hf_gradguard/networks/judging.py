"""Evaluation of networks: how well they predict the noise ratio of data that they never saw."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .image_network import ImageEvaluationNetwork, adapt_images
from .noising import as_pixels, blend_images, embedding_weight, ordinary_token_ids, replace_tokens
from .text_network import TextEvaluationNetwork

RATIOS = tuple(round(0.1 * step, 1) for step in range(11))
PACKAGED = {"text": (0.0424, 0.9787), "image": (0.0334, 0.9907)}
"""Mean absolute error and rank correlation of the packaged networks, on WikiText-2 and CIFAR-10,
which they were not trained on (docs/results/evalnets.json).
"""
_ONE_IN, _LEAST, _MOST = 10, 20, 500


@dataclass(frozen=True)
class NetworkMetrics:
    """The metrics of a network's predictions at noise ratios 0, 0.1, ..., 1.

    Args:
        samples: The number of images or texts, each judged at all ratios.
        ratios: The noise ratios asked for.
        mean_predictions: The network's mean prediction at each of them.
        strictly_increasing: Whether those increase from each ratio to the next.
        spearman_of_means: Rank correlation of the means with the ratios (1 exactly if strictly
            increasing).
        spearman: Rank correlation of all single predictions with the noise ratio that each sample
            really had.
        spearman_nominal: Rank correlation of all single predictions with the ratio asked for. For
            texts it is lower: of three words, 0.1 replaces none.
        mean_absolute_error: Mean distance of single predictions from the ratio that each sample
            really had.
        worst_mean_error: The largest distance of a mean prediction from the mean ratio that it
            should be.
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

    def describe(self, kind: Literal["text", "image"]) -> str:
        """Return a sentence on the metrics, and another one if the packaged network does better."""
        error, correlation = PACKAGED[kind]
        said = (
            f"On {self.samples} held-out {kind}s the mean absolute error is "
            f"{self.mean_absolute_error:.3f} and the rank correlation {self.spearman:.3f}."
        )
        if self.mean_absolute_error <= error and self.spearman >= correlation:
            return said
        return (
            f"{said} The packaged network has {error:.3f} and {correlation:.3f}: train for longer, "
            "or on more data, before a defense relies on this one."
        )


def hold_out(samples: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Return indices to train on, and indices to evaluate on.

    One sample in ten is held out, 500 at most; none of fewer than 20.

    Example:
        >>> training, held_out = hold_out(range(30))
        >>> len(training), held_out
        (27, [9, 19, 29])
    """
    held_out = list(range(_ONE_IN - 1, len(samples), _ONE_IN))[:_MOST]
    if len(samples) < _LEAST:
        held_out = []
    return sorted(set(range(len(samples))) - set(held_out)), held_out


def evaluate_image_network(
    network: ImageEvaluationNetwork, images: Any, *, seed: int = 0, batch_size: int = 250
) -> NetworkMetrics:
    """Evaluate a network on images blended with uniform noise at every ratio.

    Noise is added at the images' own shape and size, then they pass through `adapt_images`: a
    client that protects gray digits adds gray noise of their size too.

    Args:
        network: The network.
        images: Images in any form that `as_pixels` takes.
        seed: The seed of the noise.
        batch_size: The number of images at a time.

    Example:
        >>> from hf_gradguard.networks import load_network
        >>> network, images = load_network("image-evaluation-network-32"), torch.zeros(4, 28, 28)
        >>> evaluate_image_network(network, images).strictly_increasing
        True
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
) -> NetworkMetrics:
    """Evaluate a network on texts with a fraction of tokens replaced by random ones.

    It is evaluated at every ratio of 0, 0.1, ..., 1.

    Args:
        network: The network; `embedding` must be the one that it was trained on.
        embedding: The language model's input-embedding module.
        tokenizer: The model's tokenizer. Texts are encoded as for the model, special tokens and
            padding included.
        texts: The texts. Those without an ordinary token are left out.
        seed: The seed of the noise.
        batch_size: The number of texts at a time.
        max_length: The most tokens of a text; longer ones are cut.
        blend: Mix every token's embedding with a random token's by the ratio, instead of replacing
            tokens.

    Example:
        >>> from hf_gradguard.networks import train_text_network
        >>> embedding = model.get_input_embeddings()
        >>> network = train_text_network(embedding, tokenizer, texts, steps=1, progress=False)
        >>> evaluate_text_network(network, embedding, tokenizer, texts).samples == len(texts)
        True
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
    """Return padded batches of texts of similar length, which need little padding."""
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
def _figures(batches: Any, samples: int) -> NetworkMetrics:
    predictions, targets, nominal = [], [], []
    for ratio in RATIOS:
        chunks = list(batches(ratio))
        predictions.append(torch.cat([chunk[0] for chunk in chunks]).double())
        targets.append(torch.cat([chunk[1] for chunk in chunks]).double())
        nominal.append(torch.full_like(targets[-1], ratio))
    means = torch.stack([p.mean() for p in predictions])
    target_means = torch.stack([t.mean() for t in targets])
    predicted, target = torch.cat(predictions), torch.cat(targets)
    return NetworkMetrics(
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
    """Return Spearman's rank correlation, NaN if all values of one side are equal."""
    return round(float(torch.corrcoef(torch.stack([_ranks(predicted), _ranks(true)]))[0, 1]), 4)


def _ranks(values: Tensor) -> Tensor:
    """Return ranks from 1 on; equal values have the mean of their ranks."""
    _, places, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2).double()[places]
