"""Scores of reconstructed images.

They are computed per image over all its channels and pixels, with pixels in [0, R], R =
`data_range`:

- `mse`, `rmse`: the mean squared error and its root, in units of pixels squared and of pixels.
- `psnr`: 10 log10(R² / mse) in dB, at most 100: equal images would have infinity, and no mean.
- `ssim`: Wang et al. (2004): Gaussian windows of 11 x 11 pixels (standard deviation 1.5) that lie
  wholly inside, mean over channels. Images below 11 pixels take the largest odd window that fits,
  its deviation scaled accordingly.
- `noise_ratio`, with `evaluation_network`: how much of the *prediction* looks like noise, in [0,
  1].
- `lpips`, with `lpips`: the perceptual distance; 0 for equal images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics.functional.image import structural_similarity_index_measure

from ..networks import ImageEvaluationNetwork, adapt_images
from .scores import Scores, check_bootstrap, match, summarize

MAX_PSNR = 100.0
"""The PSNR in dB of equal images, so that means stay finite. 8-bit images that differ at all are
far below it.
"""


@torch.no_grad()
def score_images(
    predictions: Tensor | Sequence[Tensor],
    references: Tensor | Sequence[Tensor],
    data_range: float = 1.0,
    *,
    evaluation_network: Any = None,
    lpips: Callable[[Tensor, Tensor], Tensor] | None = None,
    bootstrap: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Scores:
    """Score reconstructed images by how close they are to the true ones.

    The scores are `mse`, `rmse`, `psnr` in dB, and `ssim`. On request there are `noise_ratio`,
    which says how much of a prediction is noise, and the perceptual distance `lpips`.

    A tensor is **one batch**, shared in one gradient. A gradient has no order, so its predictions
    are matched to its references one to one, by the smallest sum of squared errors, before anything
    is scored. Several batches are a list of tensors; nothing is matched across batches. Independent
    images are batches of one: `images.split(1)`.

    Args:
        predictions: A batch `(B, C, H, W)` of any real type, or a list of such batches. They are
            not clipped.
        references: The true images, in the same shapes and on the same device.
        data_range: R, the largest value that a pixel can take; the smallest is 0. 1 for pixels in
            [0, 1], 255 for bytes.
        evaluation_network: A network whose `noise_ratio(x)` returns `(B,)` for pixels in [0, 1].
            Images smaller than an `ImageEvaluationNetwork`'s are padded, and gray ones repeated, as
            `adapt_images` does.
        lpips: A function `(x, y) -> B numbers` for `(B, 3, H, W)` pixels in [-1, 1], such as
            `lpips.LPIPS()`; gray is repeated.
        bootstrap: Resamples of whole batches for the intervals of the means; 0 for no intervals.
        confidence: The confidence of the intervals.
        seed: The seed of the resampling.

    Returns:
        Scores per reference, means, intervals, and which prediction was compared with which
        reference.

    Raises:
        ValueError: If shapes differ, pixels are not finite, or references leave [0, `data_range`].

    Example:
        >>> gray = torch.full((2, 1, 16, 16), 0.5)
        >>> round(score_images(gray, gray + 0.1).mean["psnr"], 3)  # 10 log10(1 / 0.01)
        20.0
    """
    check_bootstrap(bootstrap, confidence)
    rows: list[dict[str, float]] = []
    matched: list[int | None] = []
    pairs = _as_batches(predictions, references, data_range)
    for predicted, true in pairs:
        # float64: SSIM takes small differences of squares.
        predicted, true = predicted.double(), true.double()
        errors = torch.stack([(predicted - t).square().flatten(1).mean(1) for t in true])
        order = match(-errors.cpu().numpy())
        predicted = predicted[[i for i in order if i is not None]]  # the counts are equal: all are
        scores = _score(predicted, true, data_range, evaluation_network, lpips)
        columns = [values.tolist() for values in scores.values()]
        rows += [dict(zip(scores, row, strict=True)) for row in zip(*columns, strict=True)]
        matched += order
    sizes = [len(true) for _, true in pairs]
    return summarize(rows, matched, sizes, bootstrap=bootstrap, confidence=confidence, seed=seed)


def _score(
    predicted: Tensor,
    true: Tensor,
    data_range: float,
    evaluation_network: Any,
    lpips: Callable[[Tensor, Tensor], Tensor] | None,
) -> dict[str, Tensor]:
    """Return every score, `(B,)`, for images in the same order."""
    mse = (predicted - true).square().flatten(1).mean(1)
    scores = {
        "mse": mse,
        "rmse": mse.sqrt(),
        "psnr": (10 * (data_range**2 / mse).log10()).clamp(max=MAX_PSNR),
        "ssim": _ssim(predicted, true, data_range),
    }
    if evaluation_network is not None:
        scores["noise_ratio"] = _noise_ratio(evaluation_network, predicted / data_range)
    if lpips is not None:
        if true.shape[1] not in (1, 3):
            raise ValueError(
                f"LPIPS judges gray or color images, but these have {true.shape[1]} channels."
            )
        pair = (x.expand(-1, 3, -1, -1).float() / data_range for x in (predicted, true))
        scores["lpips"] = lpips(*(2 * x - 1 for x in pair)).flatten()
    return scores


def _ssim(predicted: Tensor, true: Tensor, data_range: float) -> Tensor:
    """Return the SSIM of each image, `(B,)`.

    torchmetrics mirrors the image at its border and counts the windows there; the paper does not.
    """
    radius = (min(11, *true.shape[2:]) - 1) // 2
    full = structural_similarity_index_measure(
        predicted, true, sigma=0.3 * radius, data_range=data_range, reduction="none",
        return_full_image=True,
    )[1]  # fmt: skip
    return full[..., radius:-radius, radius:-radius].flatten(1).mean(1)


def _noise_ratio(network: Any, images: Tensor) -> Tensor:
    images = images.float()
    return network.noise_ratio(
        adapt_images(images, network) if isinstance(network, ImageEvaluationNetwork) else images
    )


def _as_batches(
    predictions: Any, references: Any, data_range: float
) -> list[tuple[Tensor, Tensor]]:
    if not (math.isfinite(data_range) and data_range > 0):
        raise ValueError(f"data_range must be positive, but is {data_range}.")
    predictions = [predictions] if isinstance(predictions, Tensor) else list(predictions)
    references = [references] if isinstance(references, Tensor) else list(references)
    if len(predictions) != len(references) or not references:
        raise ValueError(
            f"There are {len(predictions)} batches of predictions and {len(references)} of "
            "references; there must be as many, and at least one. A tensor is one batch, a list of "
            "tensors several."
        )
    for predicted, true in zip(predictions, references, strict=True):
        if predicted.shape != true.shape or true.ndim != 4 or true.numel() == 0:
            raise ValueError(
                "A batch of images has shape (B, C, H, W), the same for predictions and "
                f"references, but they have {tuple(predicted.shape)} and {tuple(true.shape)}. "
                "There is no empty image: for one that an attack did not give, put what it knows "
                "without attacking, such as a gray image."
            )
        if min(true.shape[2:]) < 3:
            raise ValueError(
                f"SSIM needs images of at least 3 x 3 pixels, but they are {tuple(true.shape[2:])}."
            )
        if not (torch.isfinite(predicted).all() and torch.isfinite(true).all()):
            raise ValueError(
                "Some pixels are NaN or infinite. If an attack diverged, say so with "
                "`torch.nan_to_num(predictions, nan=...)`."
            )
        low, high = float(true.min()), float(true.max())
        if low < -1e-3 * data_range or high > (1 + 1e-3) * data_range:
            raise ValueError(
                f"The references' pixels range from {low:.3g} to {high:.3g}, outside [0, "
                f"data_range] = [0, {data_range:g}]. Pass data_range=255 for bytes, and undo the "
                "image processor's normalization on both sides first."
            )
    return list(zip(predictions, references, strict=True))
