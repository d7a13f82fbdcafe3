"""A vision transformer's patches, read off the gradients of two parameters.

Position embeddings are added to the patches' embeddings, so their gradient Δ `(N, H)` is the slope
at each of N patches, and the gradient of the projection's weight is Δᵀ X `(H, P)`, with the patches
X `(N, P)`. Of one image both are shared, and X is what solves that: exactly, if the slopes are
independent, for which H - 1 has to reach N (layer normalization takes one dimension).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..gradient_map.inputs import PixelSpace
from .labels import recover_labels
from .observation import Observation, without_dropout


def is_patch_projection(module: nn.Module) -> bool:
    """Whether a convolution reads its input in patches that do not overlap, pixel by pixel.

    Example:
        >>> is_patch_projection(nn.Conv2d(3, 8, 4, stride=4)), is_patch_projection(nn.Linear(2, 2))
        (True, False)
    """
    return (
        isinstance(module, nn.Conv2d)
        and module.kernel_size == module.stride
        and module.groups == 1
        and set(module.dilation) == {1}
        and module.padding in ((0, 0), "valid")
    )


def position_embeddings(seen: Observation, projection: str) -> list[str]:
    """Parameters of the shape of position embeddings: a row for each patch behind at most two for
    other tokens, as wide as the projection.
    """
    module = _convolution(seen, projection)
    count = len(_patches(torch.zeros(1, *seen.input_shape[1:]), module.kernel_size))
    return [
        name
        for name, parameter in seen.model.named_parameters()
        if parameter.dim() in (2, 3)
        and len(parameter.view(-1, *parameter.shape[-2:])) == 1
        and parameter.shape[-1] == module.out_channels
        and count <= parameter.shape[-2] <= count + 2
        and not isinstance(seen.model.get_submodule(name.rpartition(".")[0]), nn.Linear)
    ]


def read_patches(seen: Observation, projection: str, positions: list[str]) -> tuple[Tensor, str]:
    """The image, `(1, C, H, W)`, and what of it was not decided.

    Args:
        seen: An observation of one image.
        projection: Name of the module that reads the patches.
        positions: Names of what may be its position embeddings.

    Raises:
        ValueError: For several images, or if one of the two gradients was not shared, or the model
            does something else with them.
    """
    if seen.batch_size > 1:
        raise ValueError(
            f"analytic reads the patches of one image, and of {seen.batch_size} a gradient holds "
            "sums over all that nothing takes apart. Take inverting_gradients."
        )
    weight = f"{projection}.weight"
    shared = [name for name in positions if name in seen.gradient]
    if not shared or weight not in seen.gradient:
        raise ValueError(
            f"analytic solves the gradients of {weight} and {' or '.join(positions)} for the "
            "patches, and both were not shared. Take inverting_gradients."
        )
    kernel = _convolution(seen, projection).kernel_size
    found = [name for name in shared if _is_added(seen, weight, name, kernel)]
    if not found:
        raise ValueError(
            f"{' and '.join(shared)} are not added to what {projection} makes of the patches, so "
            "their gradients say nothing of them. Take inverting_gradients."
        )
    space = PixelSpace(seen.gradient[weight].double(), seen.image_mean, seen.image_std)
    gray = torch.full((1, *seen.input_shape[1:]), 0.5).to(space.mean)
    gray = (gray - space.mean) / space.std
    middle = _patches(gray, kernel)
    slopes, product = _both(seen.gradient, weight, found[0], len(middle))
    ratio = _noise_to_signal(seen, weight, found[0], len(middle), space)
    rounding = torch.finfo(seen.gradient[weight].dtype).eps * len(middle) ** 0.5
    if not slopes.any():
        raise ValueError(f"The gradient of {found[0]} is zero, so it says nothing of the patches.")
    solved, rank = solve_patches(slopes, product, middle, ratio, rounding)
    sides = tuple(side // size * size for side, size in zip(gray.shape[2:], kernel, strict=True))
    gray[..., : sides[0], : sides[1]] = nn.functional.fold(
        solved.T[None], sides, kernel, stride=kernel
    )
    undecided = ""
    if rank < len(middle):
        undecided = (
            f"The slopes at {len(middle)} patches, of {slopes.shape[1]} dimensions, are {rank} "
            "independent ones: what lies between those is taken for gray."
        )
    return gray, undecided


def solve_patches(
    slopes: Tensor, product: Tensor, middle: Tensor, ratio: float = 0.0, rounding: float = 1e-12
) -> tuple[Tensor, int]:
    """X of ΔᵀX = G that is nearest to `middle`, and the rank of Δ.

    Args:
        slopes: Δ, `(N, H)`.
        product: G, `(H, P)`.
        middle: What X is without a gradient, `(N, P)`.
        ratio: Variance of noise in G over that of X around its middle: adds to the squares of Δ's
            singular values.
        rounding: Of these those count as zero which are a smaller share of the largest.

    Example:
        >>> slopes = torch.tensor([[1.0, 0.0, 1.0], [0.0, 2.0, 0.0]])
        >>> patches = torch.tensor([[0.5], [0.25]])
        >>> solved, rank = solve_patches(slopes, slopes.T @ patches, torch.zeros(2, 1))
        >>> bool((solved - patches).abs().max() < 1e-6), rank
        (True, 2)
    """
    left, sizes, right = torch.linalg.svd(slopes.T, full_matrices=False)
    rank = int((sizes > rounding * sizes.max()).sum())
    left, sizes, right = left[:, :rank], sizes[:rank], right[:rank]
    along = left.T @ (product - slopes.T @ middle)
    solved: Tensor = middle + right.T @ ((sizes / (sizes.square() + ratio))[:, None] * along)
    return solved, rank


def _convolution(seen: Observation, name: str) -> nn.Conv2d:
    module = seen.model.get_submodule(name)
    assert isinstance(module, nn.Conv2d)
    return module


def _patches(images: Tensor, kernel: tuple[int, ...]) -> Tensor:
    """`(N, P)` of one image."""
    return nn.functional.unfold(images, kernel, stride=kernel)[0].T


def _both(
    gradient: Mapping[str, Tensor], weight: str, positions: str, count: int
) -> tuple[Tensor, Tensor]:
    slopes = gradient[positions]
    return (
        slopes.reshape(-1, slopes.shape[-1])[-count:].double(),
        gradient[weight].flatten(1).double(),
    )


def _is_added(seen: Observation, weight: str, positions: str, kernel: tuple[int, ...]) -> bool:
    """Whether an image of the attacker's own is in its gradients as it should be."""
    labels = recover_labels(seen) if seen.labels is None else seen.labels.to(seen.device)
    with without_dropout(seen.model):
        gmap = seen.gradient_map(labels)
        own = torch.rand(gmap.input.shape, generator=torch.Generator().manual_seed(0))
        gradient = gmap.gradient_at(own.to(gmap.input))
    if weight not in gradient or positions not in gradient:
        return False
    patches = _patches(own.to(gmap.input).double(), kernel)
    slopes, product = _both(gradient, weight, positions, len(patches))
    return bool((slopes.T @ patches - product).norm() < 0.05 * product.norm())


def _noise_to_signal(
    seen: Observation, weight: str, positions: str, count: int, space: PixelSpace
) -> float:
    """(σ² of G + N σ² of Δ · mean of x²) / variance of x, of pixels uniform in their range."""
    known = seen.noise_variance
    if known is None:
        return 0.0
    in_product, in_slopes = (
        float(known[name].mean()) if isinstance(known, Mapping) else float(known)
        for name in (weight, positions)
    )
    signal = float((1 / 12 / space.std.square()).mean())
    square = signal + float((((0.5 - space.mean) / space.std).square()).mean())
    return (in_product + count * in_slopes * square) / signal
