"""What an attacker believes about data before seeing any gradient, as penalties on candidates
`(K, B, ...)` -> `(K,)`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...gradient_map.replay import hooked


def total_variation(x: Tensor) -> Tensor:
    """Mean absolute difference between neighboring pixels, of images `(K, B, C, H, W)`.

    Example:
        >>> total_variation(torch.tensor([[0.0, 1.0], [3.0, 3.0]]).view(1, 1, 1, 2, 2))
        tensor([3.])
    """
    down = (x[..., 1:, :] - x[..., :-1, :]).abs().flatten(1).mean(1)
    right = (x[..., 1:] - x[..., :-1]).abs().flatten(1).mean(1)
    return down + right


def squared_norm(x: Tensor) -> Tensor:
    """Mean square of the entries.

    Example:
        >>> squared_norm(torch.tensor([[[3.0, 4.0]]]))
        tensor([12.5000])
    """
    return x.flatten(1).square().mean(1)


def embedding_length(x: Tensor, mean_norm: Tensor) -> Tensor:
    """(mean norm of the candidate's embeddings - the vocabulary's)². (Balunović et al., "LAMP",
    2022, Eq. 5.)

    Example:
        >>> embedding_length(torch.tensor([[[[3.0, 4.0]]]]), torch.tensor(2.0))
        tensor([9.])
    """
    return (x.norm(dim=-1).flatten(1).mean(1) - mean_norm).square()


def batch_norm_distance(model: nn.Module, x: Tensor) -> Tensor:
    """Σ over batch normalizations of ‖mean - running mean‖² + ‖variance - running variance‖², of
    images `(K, B, C, H, W)`.

    (Yin et al., "See through Gradients", 2021, Eq. 10.) Running statistics are part of the model
    that the server knows.

    Example:
        >>> batch_norm_distance(image_model, image_gmap.input[None])  # which has none
        tensor([0.])
    """
    values = []
    for images in x:
        terms: list[Tensor] = []

        def compare(
            module: nn.Module, inputs: tuple[Tensor, ...], terms: list[Tensor] = terms
        ) -> None:
            axes = [axis for axis in range(inputs[0].dim()) if axis != 1]
            mean, variance = inputs[0].mean(axes), inputs[0].var(axes, unbiased=False)
            running: Any = module
            terms.append((mean - running.running_mean).square().sum())
            terms.append((variance - running.running_var).square().sum())

        norms = [
            m
            for m in model.modules()
            if isinstance(m, nn.modules.batchnorm._NormBase) and m.track_running_stats
        ]
        with hooked(norm.register_forward_pre_hook(compare) for norm in norms):
            model(pixel_values=images)
        values.append(torch.stack(terms).sum() if terms else images.new_zeros(()))
    return torch.stack(values)
