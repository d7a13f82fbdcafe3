"""Analytic reading of a first layer, without optimization and without a prior.

The gradients of a linear layer's weight and bias are Σ_b δ_b x_bᵀ and Σ_b δ_b. If a single sample
activated a unit, a row of the first over that entry of the second is the layer's input (Phong et
al., 2018). Whoever makes the weights can make many such units: in a layer whose rows measure the
same with biases in a ladder, the samples between two steps are in the difference of two rows (Fowl
et al., "Robbing the Fed", 2021). The patches of a vision transformer are solved for from the
gradients of their projection and of the position embeddings (`solve_patches`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..gradient_map.domain import IMAGE
from ..gradient_map.inputs import PixelSpace
from ..gradient_map.replay import hooked
from .base import ENDLESS, Attack, Clock, Observation, Reconstruction, without_dropout
from .label_recovery import recover_labels


def is_patch_projection(module: nn.Module) -> bool:
    """Return whether a convolution reads its input in patches that do not overlap.

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


def position_embeddings(observation: Observation, projection: str) -> list[str]:
    """Return names of parameters that have the shape of position embeddings.

    They have a row for each patch, behind at most two for other tokens, and are as wide as the
    projection.
    """
    module = _convolution(observation, projection)
    count = len(_patches(torch.zeros(1, *observation.input_shape[1:]), module.kernel_size))
    return [
        name
        for name, parameter in observation.model.named_parameters()
        if parameter.dim() in (2, 3)
        and len(parameter.view(-1, *parameter.shape[-2:])) == 1
        and parameter.shape[-1] == module.out_channels
        and count <= parameter.shape[-2] <= count + 2
        and not isinstance(observation.model.get_submodule(name.rpartition(".")[0]), nn.Linear)
    ]


def read_patches(
    observation: Observation, projection: str, positions: list[str], clock: Clock = ENDLESS
) -> tuple[Tensor, str]:
    """Return the image, `(1, C, H, W)`, and a sentence on what in it was not decided.

    Args:
        observation: An observation of one image.
        projection: The name of the module that reads the patches.
        positions: Names of parameters that may be its position embeddings.
        clock: The attack's clock. If it is over before the patches are solved, they are gray.

    Raises:
        ValueError: If there are several images, one of the two gradients was not shared, or the
            model does something else with the parameters.
    """
    if observation.batch_size > 1:
        raise ValueError(
            f"analytic reads the patches of one image, and of {observation.batch_size} a gradient "
            "holds sums over all that nothing takes apart. Take inverting_gradients."
        )
    weight = f"{projection}.weight"
    shared = [name for name in positions if name in observation.gradient]
    if not shared or weight not in observation.gradient:
        raise ValueError(
            f"analytic solves the gradients of {weight} and {' or '.join(positions)} for the "
            "patches, and both were not shared. Take inverting_gradients."
        )
    kernel = _convolution(observation, projection).kernel_size
    added_positions = [name for name in shared if _is_added(observation, weight, name, kernel)]
    if not added_positions:
        raise ValueError(
            f"{' and '.join(shared)} are not added to what {projection} makes of the patches, so "
            "their gradients say nothing of them. Take inverting_gradients."
        )
    space = PixelSpace(
        observation.gradient[weight].double(), observation.image_mean, observation.image_std
    )
    gray = ((0.5 - space.mean) / space.std).expand(1, *observation.input_shape[1:]).clone()
    gray_patches = _patches(gray, kernel)
    slopes, product = _slopes_and_product(
        observation.gradient, weight, added_positions[0], len(gray_patches)
    )
    ratio = _noise_to_signal(observation, weight, added_positions[0], len(gray_patches), space)
    rounding = torch.finfo(observation.gradient[weight].dtype).eps * len(gray_patches) ** 0.5
    if not slopes.any():
        raise ValueError(
            f"The gradient of {added_positions[0]} is zero, so it says nothing of the patches."
        )
    if clock.must_stop():
        return gray, "Time was up before the patches were solved: this is gray."
    solved, rank = solve_patches(slopes, product, gray_patches, ratio, rounding)
    sides = tuple(side // size * size for side, size in zip(gray.shape[2:], kernel, strict=True))
    solved_pixels = nn.functional.fold(solved.T[None], sides, kernel, stride=kernel)
    gray[..., : sides[0], : sides[1]] = solved_pixels
    if rank == len(gray_patches):
        return gray, ""
    return gray, (
        f"The slopes at {len(gray_patches)} patches, of {slopes.shape[1]} dimensions, are {rank} "
        "independent ones: what lies between those is taken for gray."
    )


def solve_patches(
    slopes: Tensor,
    product: Tensor,
    center: Tensor,
    ratio: float = 0.0,
    rounding: float = 1e-12,
) -> tuple[Tensor, int]:
    """Return the X of ΔᵀX = G that is nearest to `center`, and the rank of Δ.

    Args:
        slopes: Δ, `(N, H)`.
        product: G, `(H, P)`.
        center: X without a gradient, `(N, P)`.
        ratio: The variance of noise in G over that of X around its center; it is added to the
            squares of Δ's singular values.
        rounding: Singular values that are a smaller fraction of the largest count as zero.

    Example:
        >>> slopes = torch.tensor([[1.0, 0.0, 1.0], [0.0, 2.0, 0.0]])
        >>> patches = torch.tensor([[0.5], [0.25]])
        >>> solved, rank = solve_patches(slopes, slopes.T @ patches, torch.zeros(2, 1))
        >>> bool((solved - patches).abs().max() < 1e-6), rank
        (True, 2)
    """
    u, singular_values, vh = torch.linalg.svd(slopes.T, full_matrices=False)
    rank = int((singular_values > rounding * singular_values.max()).sum())
    u, singular_values, vh = u[:, :rank], singular_values[:rank], vh[:rank]
    coefficients = u.T @ (product - slopes.T @ center)
    solved: Tensor = center + vh.T @ (
        (singular_values / (singular_values.square() + ratio))[:, None] * coefficients
    )
    return solved, rank


def _convolution(observation: Observation, name: str) -> nn.Conv2d:
    module = observation.model.get_submodule(name)
    assert isinstance(module, nn.Conv2d)
    return module


def _patches(images: Tensor, kernel: tuple[int, ...]) -> Tensor:
    """Return the patches of one image, `(N, P)`."""
    return nn.functional.unfold(images, kernel, stride=kernel)[0].T


def _slopes_and_product(
    gradient: Mapping[str, Tensor], weight: str, positions: str, count: int
) -> tuple[Tensor, Tensor]:
    slopes = gradient[positions]
    rows = slopes.reshape(-1, slopes.shape[-1])[-count:]
    return rows.double(), gradient[weight].flatten(1).double()


def _is_added(
    observation: Observation, weight: str, positions: str, kernel: tuple[int, ...]
) -> bool:
    """Return whether the gradients of an image of the attacker's own hold it as expected."""
    labels = observation.labels
    labels = recover_labels(observation) if labels is None else labels.to(observation.device)
    with without_dropout(observation.model):
        gmap = observation.gradient_map(labels)
        random_image = torch.rand(gmap.input.shape, generator=torch.Generator().manual_seed(0))
        gradient = gmap.gradient_at(random_image.to(gmap.input))
    if weight not in gradient or positions not in gradient:
        return False
    patches = _patches(random_image.to(gmap.input).double(), kernel)
    slopes, product = _slopes_and_product(gradient, weight, positions, len(patches))
    return bool((slopes.T @ patches - product).norm() < 0.05 * product.norm())


def _noise_to_signal(
    observation: Observation, weight: str, positions: str, count: int, space: PixelSpace
) -> float:
    """Return (σ² of G + N σ² of Δ · mean of x²) / variance of x, for uniform pixels."""
    variance = observation.noise_variance
    if variance is None:
        return 0.0
    in_product, in_slopes = (
        float(variance[name].mean()) if isinstance(variance, Mapping) else float(variance)
        for name in (weight, positions)
    )
    signal = float((1 / 12 / space.std.square()).mean())
    square = signal + float((((0.5 - space.mean) / space.std).square()).mean())
    return (in_product + count * in_slopes * square) / signal


@dataclass
class Analytic(Attack):
    """Reads images off the gradient of a layer that sees all pixels, in closed form.

    For the first linear layer that reads all pixels it divides rows of the weight's gradient by the
    bias's, and differences of neighbors in the order of the biases. It takes those readings that
    lie in the range of pixels and come up most often. For a vision transformer it reads one image
    off the gradients of its patch projection and of its position embeddings.

    It is exact for one image in every such layer, and for many if the weights were made for it.
    Patches are exact if their embeddings are wider than there are patches. Otherwise they are what
    the gradients say of them. Noise in the gradient is divided by the bias's gradient, too; patches
    are weighed by its variance, if that is known.

    Args:
        tolerance: How far two readings of one image may differ, in the range of pixels.
        seconds: Time after which readings in the range of pixels are taken uncounted, or patches
            are left gray, and the result is not complete.

    Example:
        >>> from hf_gradguard.attacks import make_attack
        >>> make_attack("analytic")(image_observation)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: No linear layer of LeakageLeNetForImageClassification reads all pixels ...
    """

    name: ClassVar[str] = "analytic"
    domains: ClassVar[tuple[str, ...]] = ("image",)
    informed_by: ClassVar[frozenset[str]] = frozenset({"noise_variance"})
    tolerance: float = 0.02
    seconds: float | None = None

    def reconstruct(self, observation: Observation, generator: torch.Generator) -> Reconstruction:
        clock = Clock(self.seconds)
        undecided = ""
        if (layer := _find_pixel_layer(observation, _reads_all_pixels(observation))) is not None:
            images = self._images(observation, *layer, clock)
        else:
            projection, positions = _patch_embedding(observation)
            images, undecided = read_patches(observation, projection, positions, clock)
            space = PixelSpace(images, observation.image_mean, observation.image_std)
            space.project_(images)
            images = images.to(IMAGE.main_input(observation.placeholder()))
        return Reconstruction(
            images, labels=observation.labels, seconds=clock.elapsed, undecided=undecided,
            complete=not clock.has_stopped,
        )  # fmt: skip

    def _images(
        self, observation: Observation, name: str, layer: nn.Module, clock: Clock
    ) -> Tensor:
        """Return images `(B, C, H, W)`, read off a linear layer on all pixels."""
        assert isinstance(layer, nn.Linear)
        if layer.bias is None:
            raise ValueError(f"{name} has no bias, so there is nothing to divide by.")
        weight, bias = f"{name}.weight", f"{name}.bias"
        if bias not in observation.gradient or weight not in observation.gradient:
            raise ValueError(
                f"analytic divides the gradient of {weight} by that of {bias}, and both were not "
                "shared."
            )
        if not observation.gradient[bias].any():
            raise ValueError(f"The gradient of {bias} is zero, so there is nothing to divide by.")
        biases = layer.bias.detach()
        rows = divide_rows(observation.gradient[weight], observation.gradient[bias], biases)
        shape = (observation.batch_size, *observation.input_shape[1:])
        space = PixelSpace(
            observation.gradient[weight], observation.image_mean, observation.image_std
        )
        readings = space.plain(rows.view(-1, *shape[1:]))
        images = self._most_frequent(readings, observation.batch_size, clock)
        normalized: Tensor = (images - space.mean) / space.std
        return normalized

    def _most_frequent(self, images: Tensor, count: int, clock: Clock) -> Tensor:
        """Return the readings that lie in [0, 1], the most frequent first, `(B, C, H, W)`."""
        flat = images.flatten(1)
        excess = (flat.clamp(0, 1) - flat).square().mean(1).sqrt()
        order = excess.argsort()[: max(count, 512)]
        flat, excess = flat[order].clamp(0, 1), excess[order]
        if clock.must_stop():  # those that lie there best, how often they come up or not
            return flat[torch.arange(count) % len(flat)].view(-1, *images.shape[1:])
        distance = torch.cdist(flat, flat) / flat.shape[1] ** 0.5
        near = distance < self.tolerance
        score = near.sum(1) - 1e3 * (excess > self.tolerance)
        is_available, chosen = torch.ones_like(excess, dtype=torch.bool), list[int]()
        for place in score.argsort(descending=True, stable=True).tolist():
            if is_available[place]:
                chosen.append(place)
                is_available &= ~near[place]
        chosen = chosen[:count] + [chosen[0]] * (count - len(chosen))
        return flat[chosen].view(-1, *images.shape[1:])


def divide_rows(weight: Tensor, bias: Tensor, order: Tensor) -> Tensor:
    """Return the inputs of a linear layer that its gradients give away, `(K, in)`.

    Args:
        weight: The weight's gradient, `(out, in)`.
        bias: The bias's gradient, `(out,)`.
        order: The biases; neighbors in their order are subtracted from each other.

    Example:
        >>> weight = torch.outer(torch.tensor([2.0, 0.0]), torch.tensor([3.0, 4.0]))
        >>> divide_rows(weight, torch.tensor([2.0, 0.0]), torch.tensor([0.0, 1.0])).tolist()
        [[3.0, 4.0], [3.0, 4.0]]
    """
    steps = order.argsort()
    weights = torch.cat([weight, weight[steps][1:] - weight[steps][:-1]])
    biases = torch.cat([bias, bias[steps][1:] - bias[steps][:-1]])
    used = biases.abs() > 1e-5 * biases.abs().max().clamp_min(1e-30)
    return weights[used] / biases[used, None]


def is_readable(model: nn.Module, shape: tuple[int, ...]) -> bool:
    """Return whether there is something in a model that `Analytic` can read.

    Args:
        model: A model of images.
        shape: The shape of its input, `(B, C, H, W)`.

    Example:
        >>> is_readable(image_observation.model, image_observation.input_shape)
        False
    """
    any_gradient = {name: p.detach() for name, p in model.named_parameters()}
    observation = Observation(model, any_gradient, (1, *shape[1:]))
    if _find_pixel_layer(observation, _reads_all_pixels(observation)) is not None:
        return True
    projection = _find_pixel_layer(observation, is_patch_projection)
    return projection is not None and bool(position_embeddings(observation, projection[0]))


def _patch_embedding(observation: Observation) -> tuple[str, list[str]]:
    """Return the module that reads patches, and parameters that may be position embeddings."""
    projection = _find_pixel_layer(observation, is_patch_projection)
    positions = position_embeddings(observation, projection[0]) if projection else []
    if not projection or not positions:
        raise ValueError(
            f"No linear layer of {type(observation.model).__name__} reads all pixels of an image, "
            "and no position embeddings are trained with its patches, so there is nothing to "
            "divide. Take inverting_gradients."
        )
    return projection[0], positions


def _reads_all_pixels(observation: Observation) -> Callable[[nn.Module], bool]:
    pixels = math.prod(observation.input_shape[1:])
    return lambda module: isinstance(module, nn.Linear) and module.in_features == pixels


def _find_pixel_layer(
    observation: Observation, is_wanted: Callable[[nn.Module], bool]
) -> tuple[str, nn.Module] | None:
    """Return the first wanted module that reads unchanged pixels, found by running the model."""
    pixels = torch.rand(
        (1, *observation.input_shape[1:]), generator=torch.Generator().manual_seed(0)
    ).to(IMAGE.main_input(observation.placeholder()))
    layer_names: list[str] = []
    handles = []
    for name, module in observation.model.named_modules():
        if is_wanted(module):

            def record_match(_: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
                if args[0].numel() == pixels.numel() and bool(
                    (args[0].flatten() == pixels.flatten()).all()
                ):
                    layer_names.append(name)

            handles.append(module.register_forward_pre_hook(record_match))
    if handles:
        with hooked(handles), torch.no_grad(), without_dropout(observation.model):
            observation.model(**{**observation.placeholder(), IMAGE.key: pixels})
    name = next(iter(layer_names), None)
    return None if name is None else (name, observation.model.get_submodule(name))
