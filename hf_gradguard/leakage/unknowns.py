"""Which coordinates an attacker has to find, as vectors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..gradient_map import GradientMap, Tensors
from .krylov import not_finite

NoiseVariance = float | Mapping[str, Tensor]
"""Diagonal Σ: one variance for all coordinates, or one tensor per shared parameter, of its shape or
broadcast to it.
"""


class Unknowns:
    """The m coordinates of a batch, or of one of its samples, that an attacker has to find.

    Padding is none of them: its embedding is public. All pixels are, and all real tokens, special
    ones included.

    Args:
        gmap: The client's gradient map.
        sample: Only this sample's coordinates are unknown; the others' are given.

    Raises:
        ValueError: If there is no such sample, a sample has no coordinates, or the padding cannot
            be told.
    """

    def __init__(self, gmap: GradientMap, sample: int | None = None) -> None:
        self._gmap, x = gmap, gmap.input
        self._mask = torch.ones_like(x, dtype=torch.bool)
        present = gmap.domain.present(gmap.batch)
        if present is not None:
            if present.shape != x.shape[:2]:
                raise ValueError(
                    f"attention_mask has shape {tuple(present.shape)}, so it does not say which "
                    f"of the {tuple(x.shape[:2])} tokens are padding. Give one number per token."
                )
            self._mask &= present[..., None]
        self.per_sample: Tensor = self._mask.flatten(1).sum(1)
        if not self.per_sample.all():
            raise ValueError(
                f"Sample {int((self.per_sample == 0).nonzero()[0])} of the batch is nothing but "
                "padding."
            )
        if sample is not None:
            if not 0 <= sample < len(x):
                raise ValueError(f"sample must be from 0 to {len(x) - 1}, but is {sample}.")
            self._mask[torch.arange(len(x), device=x.device) != sample] = False
        self._like = self.pack(x)
        self.size = len(self._like)

    def pack(self, tensor: Tensor) -> Tensor:
        """The unknown entries of a tensor in the input's shape, as a vector in at least float32."""
        return tensor[self._mask].to(torch.promote_types(tensor.dtype, torch.float32))

    def unpack(self, vector: Tensor) -> Tensor:
        """The inverse of `pack`, with zeros elsewhere."""
        x = self._gmap.input
        return torch.zeros_like(x).masked_scatter(self._mask, vector.to(x.dtype))

    def vjp(self, delta: Tensors) -> Tensor:
        """J δ. Coordinates that an earlier defense of a chain withheld carry nothing."""
        return self.pack(self._gmap.vjp(self._gmap.restrict(delta)))

    def jvp(self, v: Tensor) -> Tensors:
        """Jᵀ v."""
        return self._gmap.restrict(self._gmap.jvp(self.unpack(v)))

    def gram(self, v: Tensor, weights: Tensors | None = None) -> Tensor:
        """J D Jᵀ v with a diagonal D of `weights`, or the identity."""
        product = self.jvp(v)
        if weights is not None:
            product = {name: tensor * weights[name] for name, tensor in product.items()}
        return self.vjp(product)

    def dense_gram(self, weights: Tensors | None = None) -> Tensor:
        """J D Jᵀ as an (m, m) matrix: m products.

        Raises:
            FloatingPointError: If a product is not finite.
            ValueError: If m is above 8192.
        """
        if self.size > 8192:
            raise ValueError(
                f"{self.size} coordinates are too many for a dense (m, m) matrix. Choose one "
                "`sample`, a smaller batch, or an estimate."
            )
        matrix = torch.stack([self.gram(unit, weights) for unit in self.units()])
        if not matrix.isfinite().all():
            raise not_finite()
        return (matrix + matrix.T) / 2

    def units(self) -> Iterator[Tensor]:
        """The unit vectors e_1 to e_m."""
        for index in range(self.size):
            unit = torch.zeros_like(self._like)
            unit[index] = 1
            yield unit

    def random_vector(self) -> Tensor:
        """A standard normal vector, the same every time: where an iteration starts decides nothing
        but its length.
        """
        generator = torch.Generator().manual_seed(0)
        return torch.randn(self.size, generator=generator).to(self._like)


def variances(gmap: GradientMap, noise_variance: NoiseVariance) -> Tensors:
    """The diagonal of Σ as tensors that broadcast to the shared parameters.

    Raises:
        ValueError: If a name is missing or too many, a shape does not fit, or a variance is
            negative or NaN.
    """
    parameters = gmap.parameters
    if isinstance(noise_variance, Mapping):
        if noise_variance.keys() != parameters.keys():
            wrong = sorted(noise_variance.keys() ^ parameters.keys())
            raise ValueError(
                "noise_variance must name every shared parameter and no other; it differs in "
                f"{', '.join(wrong)}. The shared parameters are: {', '.join(parameters)}."
            )
        result = {name: _compact(noise_variance[name]) for name in parameters}
    else:
        # A small variance would be zero in half precision.
        result = {
            name: torch.tensor(
                noise_variance, dtype=torch.promote_types(p.dtype, torch.float32), device=p.device
            )
            for name, p in parameters.items()
        }
    for name, variance in result.items():
        try:
            variance.expand(parameters[name].shape)
        except RuntimeError as error:
            raise ValueError(
                f"noise_variance[{name!r}] has shape {tuple(variance.shape)}, the parameter "
                f"{tuple(parameters[name].shape)}."
            ) from error
        if not (variance >= 0).all():  # also where it is NaN
            raise ValueError(
                f"Variances must be at least 0, but noise_variance[{name!r}] has a smaller one or "
                "NaN."
            )
    return result


def _compact(tensor: Tensor) -> Tensor:
    """One number that was expanded to a shape, as that number."""
    alike = tensor.numel() and not any(tensor.stride())
    return tensor[(0,) * tensor.dim()] if alike else tensor
