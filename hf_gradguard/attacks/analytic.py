"""A first layer, read analytically: no optimization, no prior.

The gradients of a linear layer's weight and bias are Σ_b δ_b x_bᵀ and Σ_b δ_b, so a row of the one
over that entry of the other is the layer's input, if a single sample activated the unit (Phong et
al., 2018). Whoever makes the weights can make many units like that: in a layer whose rows measure
the same with biases in a ladder, the samples between two steps are in the difference of two rows
(Fowl et al., "Robbing the Fed", 2021). How patches are read instead, says `patches.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..gradient_map.domain import IMAGE
from ..gradient_map.inputs import PixelSpace
from ..gradient_map.replay import hooked
from .base import Attack, Reconstruction
from .observation import Observation, without_dropout
from .patches import is_patch_projection, position_embeddings, read_patches


@dataclass
class Analytic(Attack):
    """Reads images off the first linear layer that reads all pixels: rows of its weight's gradient
    over the bias's, and differences of neighbors in the order of the biases. Of these it takes what
    lies in the range of pixels and comes up most often. Of a vision transformer it reads one image
    off the gradients of its patch projection and of its position embeddings.

    Exact for one image in every such layer, and for many where the weights were made for it; of
    patches where their embeddings are wider than there are patches, else what the gradients say of
    them. Noise in the gradient is divided as it is by the bias's gradient; patches are weighed by
    its variance, if that is known.

    Args:
        tolerance: How far two readings of one image may differ, in the range of pixels.

    Example:
        >>> from hf_gradguard.attacks import make_attack
        >>> make_attack("analytic")(image_seen)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: No linear layer of LeakageLeNetForImageClassification reads all pixels ...
    """

    name: ClassVar[str] = "analytic"
    domains: ClassVar[tuple[str, ...]] = ("image",)
    informed_by: ClassVar[frozenset[str]] = frozenset({"noise_variance"})
    tolerance: float = 0.02

    @property
    def passes(self) -> float:
        """It divides."""
        return 1.0

    def reconstruct(self, seen: Observation, generator: torch.Generator) -> Reconstruction:
        started = time.perf_counter()
        undecided = ""
        if (layer := _first(seen, _reads_all_pixels(seen))) is not None:
            found = self._images(seen, *layer)
        else:
            projection, positions = _patch_embedding(seen)
            found, undecided = read_patches(seen, projection, positions)
            space = PixelSpace(found, seen.image_mean, seen.image_std)
            space.project_(found)
            found = found.to(IMAGE.main_input(seen.placeholder()))
        seconds = time.perf_counter() - started
        return Reconstruction(input=found, labels=seen.labels, seconds=seconds, undecided=undecided)

    def _images(self, seen: Observation, name: str, layer: nn.Module) -> Tensor:
        """`(B, C, H, W)` off a linear layer on all pixels."""
        assert isinstance(layer, nn.Linear)
        if layer.bias is None:
            raise ValueError(f"{name} has no bias, so there is nothing to divide by.")
        weight, bias = f"{name}.weight", f"{name}.bias"
        if bias not in seen.gradient or weight not in seen.gradient:
            raise ValueError(
                f"analytic divides the gradient of {weight} by that of {bias}, and both were not "
                "shared."
            )
        if not seen.gradient[bias].any():
            raise ValueError(f"The gradient of {bias} is zero, so there is nothing to divide by.")
        order = layer.bias.detach()
        rows = layer_inputs(seen.gradient[weight], seen.gradient[bias], order)
        shape = (seen.batch_size, *seen.input_shape[1:])
        space = PixelSpace(seen.gradient[weight], seen.image_mean, seen.image_std)
        images = self._chosen(space.plain(rows.view(-1, *shape[1:])), seen.batch_size)
        found: Tensor = (images - space.mean) / space.std
        return found

    def _chosen(self, images: Tensor, count: int) -> Tensor:
        """`(B, C, H, W)` in [0, 1]: the readings that lie there, the most frequent first."""
        flat = images.flatten(1)
        outside = (flat.clamp(0, 1) - flat).square().mean(1).sqrt()
        order = outside.argsort()[: max(count, 512)]
        flat, outside = flat[order].clamp(0, 1), outside[order]
        distance = torch.cdist(flat, flat) / flat.shape[1] ** 0.5
        near = distance < self.tolerance
        score = near.sum(1) - 1e3 * (outside > self.tolerance)
        left, taken = torch.ones_like(outside, dtype=torch.bool), list[int]()
        for place in score.argsort(descending=True, stable=True).tolist():
            if left[place]:
                taken.append(place)
                left &= ~near[place]
        taken = taken[:count] + [taken[0]] * (count - len(taken))
        return flat[taken].view(-1, *images.shape[1:])


def layer_inputs(weight: Tensor, bias: Tensor, order: Tensor) -> Tensor:
    """`(K, in)`: what inputs of a linear layer its gradients give away.

    Args:
        weight: The weight's gradient, `(out, in)`.
        bias: The bias's gradient, `(out,)`.
        order: The biases: neighbors in their order are subtracted from each other.

    Example:
        >>> weight = torch.outer(torch.tensor([2.0, 0.0]), torch.tensor([3.0, 4.0]))
        >>> layer_inputs(weight, torch.tensor([2.0, 0.0]), torch.tensor([0.0, 1.0])).tolist()
        [[3.0, 4.0], [3.0, 4.0]]
    """
    steps = order.argsort()
    weights = torch.cat([weight, weight[steps][1:] - weight[steps][:-1]])
    biases = torch.cat([bias, bias[steps][1:] - bias[steps][:-1]])
    used = biases.abs() > 1e-5 * biases.abs().max().clamp_min(1e-30)
    return weights[used] / biases[used, None]


def readable(model: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether there is something in a model for `Analytic` to read.

    Args:
        model: Of images.
        shape: Of its input, `(B, C, H, W)`.

    Example:
        >>> readable(image_seen.model, image_seen.input_shape)
        False
    """
    any_gradient = {name: p.detach() for name, p in model.named_parameters()}
    seen = Observation(model, any_gradient, (1, *shape[1:]))
    if _first(seen, _reads_all_pixels(seen)) is not None:
        return True
    projection = _first(seen, is_patch_projection)
    return projection is not None and bool(position_embeddings(seen, projection[0]))


def _patch_embedding(seen: Observation) -> tuple[str, list[str]]:
    """The module that reads patches, and parameters that may be their position embeddings."""
    projection = _first(seen, is_patch_projection)
    positions = position_embeddings(seen, projection[0]) if projection else []
    if not projection or not positions:
        raise ValueError(
            f"No linear layer of {type(seen.model).__name__} reads all pixels of an image, and no "
            "position embeddings are trained with its patches, so there is nothing to divide. Take "
            "inverting_gradients."
        )
    return projection[0], positions


def _reads_all_pixels(seen: Observation) -> Callable[[nn.Module], bool]:
    pixels = math.prod(seen.input_shape[1:])
    return lambda module: isinstance(module, nn.Linear) and module.in_features == pixels


def _first(seen: Observation, wanted: Callable[[nn.Module], bool]) -> tuple[str, nn.Module] | None:
    """The first wanted module that reads the pixels as they are, found by running the model."""
    pixels = torch.rand((1, *seen.input_shape[1:]), generator=torch.Generator().manual_seed(0)).to(
        IMAGE.main_input(seen.placeholder())
    )
    found: list[str] = []
    handles = []
    for name, module in seen.model.named_modules():
        if wanted(module):

            def look(_: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
                if args[0].numel() == pixels.numel() and bool(
                    (args[0].flatten() == pixels.flatten()).all()
                ):
                    found.append(name)

            handles.append(module.register_forward_pre_hook(look))
    if handles:
        with hooked(handles), torch.no_grad(), without_dropout(seen.model):
            seen.model(**{**seen.placeholder(), IMAGE.key: pixels})
    return (found[0], seen.model.get_submodule(found[0])) if found else None
