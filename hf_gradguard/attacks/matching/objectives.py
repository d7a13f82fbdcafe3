"""Distances of a candidate's gradient from the shared one, which attacks can minimize.

Every objective takes a candidate's gradient and the shared one, both `{name: tensor}`, and returns
a scalar. The candidate's may hold `Factors` for a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...gradient_map import Tensors
from ...gradient_map.parameters import layer_numbers
from ...gradient_map.replay import hooked
from ...gradient_map.vectorized import Factors

Candidate = Mapping[str, Tensor | Factors]
Objective = Callable[[Candidate, Tensors], Tensor]

_TINY = 1e-30


def squared_distance(candidate: Candidate, shared: Tensors) -> Tensor:
    """Return Σ_i (ĝ_i - g_i)² (Zhu, Liu and Han, "Deep Leakage from Gradients", 2019).

    Example:
        >>> squared_distance({"w": torch.tensor([1.0, 4.0])}, {"w": torch.tensor([1.0, 2.0])})
        tensor(4.)
    """
    return _distance(candidate, shared, 1.0)


def cosine_distance(candidate: Candidate, shared: Tensors) -> Tensor:
    """Return 1 - ⟨ĝ, g⟩ / (‖ĝ‖‖g‖), over all parameters together.

    It is computed as ½ ‖ĝ/‖ĝ‖ - g/‖g‖‖²: one minus a cosine near one is nothing but rounding error
    in float32. (Geiping et al., "Inverting Gradients", 2020.)

    Example:
        >>> cosine_distance({"w": torch.tensor([0.0, 4.0])}, {"w": torch.tensor([1.0, 0.0])})
        tensor(1.)
    """
    candidate_scale = inverse_norm(candidate[name] for name in shared)
    shared_scale = inverse_norm(shared.values())
    candidate = {name: candidate[name] * candidate_scale for name in shared}
    return _distance(candidate, {name: g * shared_scale for name, g in shared.items()}, 0.5)


class TagDistance:
    """The distance Σ_l ½‖Δ_l‖² + a w_l ‖Δ_l‖₁, with w_l falling linearly from layer to layer.

    (Deng et al., "TAG", 2021.)

    Args:
        absolute: a, the weight of the absolute differences.

    Example:
        >>> shared = {"layer.0.weight": torch.tensor([1.0])}
        >>> TagDistance(absolute=0.5)({"layer.0.weight": torch.tensor([3.0])}, shared)
        tensor(3.)
    """

    def __init__(self, absolute: float = 0.1) -> None:
        self.absolute = absolute

    def __call__(self, candidate: Candidate, shared: Tensors) -> Tensor:
        layers = layer_numbers(shared)
        deepest = max(layers.values())
        weights = {n: self.absolute * (1 - (layer - 1) / deepest) for n, layer in layers.items()}
        return _distance(candidate, shared, 0.5, weights)


def inverse_norm(tensors: Iterable[Tensor | Factors]) -> Tensor:
    """Return 1 / ‖g‖ over all tensors together.

    Example:
        >>> inverse_norm([torch.tensor([0.0, 4.0]), torch.tensor([3.0])])
        tensor(0.2000)
    """
    squares = [t.squared_norm() if isinstance(t, Factors) else t.square().sum() for t in tensors]
    return torch.stack(squares).sum().clamp_min(_TINY).rsqrt()


def _distance(
    candidate: Candidate,
    shared: Tensors,
    square: float,
    weights: Mapping[str, float] | None = None,
) -> Tensor:
    """Return Σ_names a ‖Δ‖² + b_name ‖Δ‖₁."""
    factors: list[float] = []
    tensors: list[tuple[Tensor, ...]] = []
    for name, g in shared.items():
        estimate = candidate[name]
        if isinstance(estimate, Factors):
            tensors.append((estimate.left_factor, estimate.right_factor, g))
        else:
            tensors.append((estimate, g))
        factors.append(weights[name] if weights else 0.0)
    sizes = [len(group) for group in tensors]
    flat = [tensor for group in tensors for tensor in group]
    value: Tensor = _Distance.apply(square, factors, sizes, *flat)[0]
    return value


class _Distance(torch.autograd.Function):
    """The function Σ a ‖Δ‖² + b ‖Δ‖₁ over groups of tensors, with derivatives.

    A group is (ĝ, g) with Δ = ĝ - g, or (left, right, g) with Δ = leftᵀ right - g.

    The derivatives are found in the forward pass, while a Δ is in the processor's cache; Δ itself
    is not kept. With s = 2a Δ + b sign Δ, the value is ⟨s, Δ⟩ - a ‖Δ‖², and ∂/∂ĝ = s, ∂/∂left =
    right sᵀ, ∂/∂right = left s.
    """

    @staticmethod
    def forward(
        square: float, weights: list[float], sizes: list[int], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        outputs = _compare(square, weights, sizes, [tensor[None] for tensor in tensors])
        return tuple(output[0] for output in outputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.sizes = inputs[2]
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output[1:])

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        slopes = iter(ctx.saved_tensors)
        gradients = [
            [*(upstream * next(slopes) for _ in range(size - 1)), None] for size in ctx.sizes
        ]
        return None, None, None, *(slope for group in gradients for slope in group)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *inputs: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        tensors = [
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(inputs[3:], in_dims[3:], strict=True)
        ]
        square, weights, sizes = inputs[:3]
        outputs = _compare(square, weights, sizes, tensors)
        return outputs, (0,) * len(outputs)


def _compare(
    square: float, weights: Sequence[float], sizes: Sequence[int], tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return values `(K,)` and derivatives of K candidates.

    All tensors have a first dimension of K.
    """
    remaining = iter(tensors)
    values, slopes = [], []
    for weight, size in zip(weights, sizes, strict=True):
        *estimate, g = (next(remaining) for _ in range(size))
        # On a CPU small tensors go together, large ones one by one, so that what is made of each
        # stays in its cache.
        chunk_size = max(1, _CACHED // g[0].numel()) if g.device.type == "cpu" else len(g)
        if chunk_size >= len(g):
            value, *slope = _compare_group(square, weight, *estimate, g)
        else:
            chunks = zip(*(tensor.split(chunk_size) for tensor in (*estimate, g)), strict=True)
            chunk_results = [_compare_group(square, weight, *chunk) for chunk in chunks]
            value, *slope = (torch.cat(column) for column in zip(*chunk_results, strict=True))
        values.append(value)
        slopes += slope
    return torch.stack(values).sum(0), *slopes


def _compare_group(square: float, weight: float, *tensors: Tensor) -> tuple[Tensor, ...]:
    *estimate, g = tensors
    factored = len(estimate) == 2
    if factored:
        difference = torch.baddbmm(g, estimate[0].mT, estimate[1], beta=-1)
    else:
        difference = estimate[0] - g
    flat = difference.flatten(1)
    slope = flat.sign().mul_(weight).add_(flat, alpha=2 * square) if weight else flat * (2 * square)
    value = torch.linalg.vecdot(slope, flat) - square * torch.linalg.vecdot(flat, flat)
    slope = slope.view(difference.shape)
    return (value, estimate[1] @ slope.mT, estimate[0] @ slope) if factored else (value, slope)


_CACHED = 2**18


def total_variation(x: Tensor) -> Tensor:
    """Return the mean absolute difference between neighboring pixels of images, `(K,)`.

    Args:
        x: Images `(K, B, C, H, W)`.

    Example:
        >>> total_variation(torch.tensor([[0.0, 1.0], [3.0, 3.0]]).view(1, 1, 1, 2, 2))
        tensor([3.])
    """
    down = (x[..., 1:, :] - x[..., :-1, :]).abs().flatten(1).mean(1)
    right = (x[..., 1:] - x[..., :-1]).abs().flatten(1).mean(1)
    return down + right


def squared_norm(x: Tensor) -> Tensor:
    """Return the mean square of each candidate's entries, `(K,)`.

    Example:
        >>> squared_norm(torch.tensor([[[3.0, 4.0]]]))
        tensor([12.5000])
    """
    return x.flatten(1).square().mean(1)


def embedding_length(x: Tensor, mean_norm: Tensor) -> Tensor:
    """Return (mean norm of each candidate's embeddings - the vocabulary's)², `(K,)`.

    (Balunović et al., "LAMP", 2022, Eq. 5.)

    Example:
        >>> embedding_length(torch.tensor([[[[3.0, 4.0]]]]), torch.tensor(2.0))
        tensor([9.])
    """
    return (x.norm(dim=-1).flatten(1).mean(1) - mean_norm).square()


def batch_norm_distance(model: nn.Module, x: Tensor) -> Tensor:
    """Return the distance of images' statistics from batch normalizations' running ones, `(K,)`.

    It is Σ over batch normalizations of ‖mean - running mean‖² + ‖variance - running variance‖².
    (Yin et al., "See through Gradients", 2021, Eq. 10.) Running statistics are part of the model
    that the server knows.

    Args:
        model: The model.
        x: Images `(K, B, C, H, W)`.

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

        kind = nn.modules.batchnorm._NormBase
        norms = [m for m in model.modules() if isinstance(m, kind) and m.track_running_stats]
        with hooked(norm.register_forward_pre_hook(compare) for norm in norms):
            model(pixel_values=images)
        values.append(torch.stack(terms).sum() if terms else images.new_zeros(()))
    return torch.stack(values)
