"""The span of the contributions of a batch's samples to its gradient, and fits in that span.

The gradient of a linear layer's weight is a sum over samples of δ_bᵀa_b, which are slopes and
features. Inner products and weighted sums come from these short factors, so no sample's gradient of
such a weight is written out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..layers import LINEAR, Pass, layers_of
from ..map import GradientMap
from ..types import Tensors

Granularity = Literal["message", "sample", "parameter", "token"]
"""What has a factor of its own in a fit.

It is the message, each sample, each sample in each parameter, or each token in each weight. If
there are many tokens, neighbors share a factor.
"""

RIDGE = 1e-6
"""The ridge of a Gram matrix of unit vectors, since samples' gradients may be nearly alike."""

TERMS, TERMS_PER_SAMPLE = 256, 16
"""The most factors that are fitted for a weight, in all and for each sample.

Solving for more takes longer than a pass.
"""


class Fit(NamedTuple):
    """The point of a span that is nearest to a gradient.

    Args:
        nearest: The point, with one tensor for each shared parameter, at least in float32.
        cosine: The cosine between the gradient and the point, at least 0. It is 0 if either is
            zero.
        factors: The factors c of the point Σ_b c_b u_b, `(B,)`.
    """

    nearest: Tensors
    cosine: float
    factors: Tensor


class SampleSpan:
    """The span of what each of B samples adds to a batch's gradient.

    It has B + 1 vectors: one for each sample, in the gradients of layers, and one for all
    parameters that belong to no layer, such as position embeddings. Making a span takes a pass
    without gradients of weights. A fit takes as long as 1.5 plain gradients.

    Args:
        gmap: A gradient map of the samples.
        x: The input at which gradients are taken, in the shape of the map's input. By default it is
            the map's input.

    Example:
        >>> fit = SampleSpan(gmap).fit(gmap.gradient())  # the gradient lies in the span
        >>> round(fit.cosine, 3)
        1.0
    """

    def __init__(self, gmap: GradientMap, x: Tensor | None = None) -> None:
        count, layers = len(gmap.input), layers_of(gmap.model, gmap.parameters)
        evaluated = Pass.evaluate(gmap, gmap.input if x is None else x, layers, needs_slope=False)
        self._count = count
        self._parameters = {name: p.detach() for name, p in gmap.parameters.items()}
        self._factors: dict[str, _Outer] = {}
        self._written: dict[str, _Written] = {}
        for key, layer in layers.items():
            rows = evaluated.rows(key, count)
            if not rows:  # the layer did not run, or it mixes samples, so the span lacks it
                continue
            if layer.bias is not None:
                biases = [layer.bias_gradients(slopes) for slopes, _ in rows]
                self._written[layer.bias] = _Written(torch.stack(biases).sum(0).flatten(1))
            if layer.weight is not None and isinstance(layer.module, LINEAR):
                slopes, features = (
                    torch.cat(row_tensors, 1) for row_tensors in zip(*rows, strict=True)
                )
                turned = isinstance(layer.module, Conv1D)  # (in, out), where others have (out, in)
                self._factors[layer.weight] = _Outer(slopes, features, turned)
            elif layer.weight is not None:
                weights = [layer.weight_gradients(*row) for row in rows]
                self._written[layer.weight] = _Written(torch.stack(weights).sum(0).flatten(1))
        self.unsplit = evaluated.unsplit

    def fit_by(self, target: Tensors, factors: Granularity) -> Fit:
        """Return the span's nearest point to a gradient.

        Args:
            target: The gradient.
            factors: What has a factor of its own.

        Example:
            >>> round(SampleSpan(gmap).fit_by(gmap.gradient(), "token").cosine, 3)
            1.0
        """
        if factors == "sample":
            return self.fit(target)
        return self.fit_each(target, tokens=factors == "token")

    def powers(self, factors: Granularity) -> Powers:
        """Return a function that measures how much of other gradients lies in the span.

        Args:
            factors: What has a factor of its own.
        """
        unsplit: _Vectors = [
            (name, _Written(r.flatten()[None])) for name, r in self.unsplit.items()
        ]
        vectors = list(self._vectors())
        if factors == "message":  # one vector: the sum over samples, with what no layer has
            unit_weights = torch.ones(self._count)
            summed = [
                (n, _Written(vector.weighted(unit_weights).flatten()[None]))
                for n, vector in vectors
            ]
            return Powers([summed + unsplit])
        if factors == "sample":
            return Powers([vectors, unsplit])
        if factors == "token":
            vectors = [(n, p.of_tokens() if isinstance(p, _Outer) else p) for n, p in vectors]
        return Powers([*([vector_group] for vector_group in vectors), unsplit])

    def fit(self, target: Tensors) -> Fit:
        """Return the span's nearest point to a gradient, by least squares.

        Args:
            target: The gradient.
        """
        reference = next(iter(target.values()))
        inner = reference.new_zeros(self._count, dtype=torch.float64)
        gram = reference.new_zeros(self._count, self._count, dtype=torch.float64)
        for name, vectors in self._vectors():
            inner += vectors.inner(target[name])
            gram += vectors.gram()
        weights = _solve(gram, inner)
        return self._with_rest(
            {n: vectors.weighted(weights) for n, vectors in self._vectors()}, target, weights
        )

    def fit_each(self, target: Tensors, tokens: bool = False) -> Fit:
        """Return the nearest point to a gradient if each parameter has factors of its own.

        Args:
            target: The gradient.
            tokens: Whether each token has a factor in a linear layer's weight, and not each sample.
                Neighbors share one if there are more than 16 for each sample, or 256 in all.
        """
        nearest = {}
        for name, vectors in self._vectors():
            if tokens and isinstance(vectors, _Outer):
                vectors = vectors.of_tokens()
            weights = _solve(vectors.gram().double(), vectors.inner(target[name]).double())
            nearest[name] = vectors.weighted(weights)
        return self._with_rest(nearest, target, torch.ones(self._count))

    def _vectors(self) -> Iterator[tuple[str, _Outer | _Written]]:
        yield from self._factors.items()
        yield from self._written.items()

    def _with_rest(self, nearest: Tensors, target: Tensors, weights: Tensor) -> Fit:
        """Return a fit that also has parameters of no layer, and zeros where no layer ran."""
        for name, parameter in self._parameters.items():
            vector = nearest.get(name)
            nearest[name] = (
                torch.zeros_like(parameter) if vector is None else vector.view(parameter.shape)
            )
        unsplit_target = {name: target[name] for name in self.unsplit}
        nearest |= scaled(self.unsplit, unsplit_target).nearest if unsplit_target else {}
        return scaled(nearest, target, weights)


class Powers:
    """A function that returns ‖P g‖² for gradients g, where P projects on a span.

    It returns a number for each group of parameters that share factors. For each gradient it takes
    about half as long as computing one.

    Args:
        groups: The groups of parameters, each with its part of the span's vectors. Empty groups are
            left out.

    Example:
        >>> powers = SampleSpan(gmap).powers("sample")
        >>> found = powers({name: g[None] for name, g in gmap.gradient().items()})
        >>> found.shape, powers.factors.tolist()  # two samples, and parameters of no layer
        (torch.Size([1, 2]), [2, 1])
    """

    def __init__(self, groups: Sequence[_Vectors]) -> None:
        grams = [(g, torch.stack([p.gram().double() for _, p in g]).sum(0)) for g in groups if g]
        self._groups = [(group, *_unit(gram)) for group, gram in grams if gram.any()]
        self.names = [[name for name, _ in group] for group, _, _ in self._groups]
        self.factors = torch.tensor([len(scale) for _, _, scale in self._groups])
        self._roots = [_root(unit) for _, unit, _ in self._groups]

    def __call__(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return ‖P g‖² for K gradients, `(K, groups)` in float64.

        Args:
            gradients: The gradients, each `(K, *parameter.shape)`, by parameter.
        """
        return torch.stack([c.square().sum(1) for c in self.coordinates(gradients)], 1)

    def coordinates(self, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the coordinates Uᵀg of K gradients, for each group `(K, factors)` in float64.

        U is an orthonormal basis of the span.

        Args:
            gradients: The gradients, each `(K, *parameter.shape)`, by parameter.
        """
        coordinates = []
        for (group, _, scale), root in zip(self._groups, self._roots, strict=True):
            inner = torch.stack(
                [
                    torch.stack([vectors.inner(g).double() for g in gradients[name]])
                    for name, vectors in group
                ]
            )
            coordinates.append(inner.sum(0) * scale @ root)
        return coordinates

    def across(self, other_powers: Powers) -> list[Tensor]:
        """Return the products UᵀV of this span's basis U and another's V, for each group.

        Each is of shape `(factors, factors of the other)`.

        Args:
            other_powers: The other span, with the same groups.
        """
        products_by_group = []
        for (group, _, scale), root, (other_group, _, size), turned in zip(
            self._groups, self._roots, other_powers._groups, other_powers._roots, strict=True
        ):
            pairs = zip(group, other_group, strict=True)
            products = torch.stack(
                [
                    vectors.across(other_vectors).double()
                    for (_, vectors), (_, other_vectors) in pairs
                ]
            )
            products_by_group.append(root.T @ (scale[:, None] * products.sum(0) * size) @ turned)
        return products_by_group


class _Outer(NamedTuple):
    """Slopes `(B, T, out)` and features `(B, T, in)` of a linear layer."""

    slopes: Tensor
    features: Tensor
    turned: bool

    def of_tokens(self) -> _Outer:
        """Return factors by tokens, and not by samples; neighbors share one if there are many."""
        count, length, _ = self.slopes.shape
        size = -(-count * length // min(TERMS, TERMS_PER_SAMPLE * count))
        padding = -length % size
        slopes, features = (
            nn.functional.pad(factor, (0, 0, 0, padding)).reshape(-1, size, factor.shape[-1])
            for factor in (self.slopes, self.features)
        )
        return _Outer(slopes, features, self.turned)

    def inner(self, target: Tensor) -> Tensor:
        """Return a gradient's inner products with each sample's gradient, `(B,)`."""
        matrix = (target.T if self.turned else target).to(self.features)
        return ((self.slopes @ matrix) * self.features).sum((1, 2))

    def gram(self) -> Tensor:
        """Return the inner products between samples' gradients, `(B, B)`."""
        count, length, _ = self.slopes.shape
        out, width = self.slopes.shape[-1], self.features.shape[-1]
        if length * length * count > out * width:  # gradients that are written out are shorter
            written = (self.slopes.mT @ self.features).flatten(1)
            return written @ written.T
        return self.across(self)

    def across(self, other_vectors: Any) -> Tensor:
        """Return the inner products with other samples' gradients, `(B, B')`."""
        sizes = [factors.slopes.shape[:2] for factors in (self, other_vectors)]
        mine, theirs = (
            (p.slopes.flatten(0, 1), p.features.flatten(0, 1)) for p in (self, other_vectors)
        )
        products = (mine[0] @ theirs[0].T) * (mine[1] @ theirs[1].T)
        return products.view(*sizes[0], *sizes[1]).sum((1, 3))

    def weighted(self, weights: Tensor) -> Tensor:
        """Return the sum of samples' gradients, weighted by c, `(B,)`."""
        slopes = self.slopes * weights.to(self.slopes)[:, None, None]
        combination = slopes.flatten(0, 1).T @ self.features.flatten(0, 1)
        return combination.T.contiguous() if self.turned else combination


class _Written(NamedTuple):
    """The gradients of samples, written out, `(B, numel)`."""

    rows: Tensor

    def inner(self, target: Tensor) -> Tensor:
        return self.rows @ target.flatten().to(self.rows)

    def gram(self) -> Tensor:
        return self.rows @ self.rows.T

    def across(self, other_vectors: Any) -> Tensor:
        return self.rows @ other_vectors.rows.T

    def weighted(self, weights: Tensor) -> Tensor:
        return weights.to(self.rows) @ self.rows


_Vectors = list[tuple[str, "_Outer | _Written"]]


def _solve(gram: Tensor, inner: Tensor) -> Tensor:
    """Return the weights of least squares, solved in float64 for vectors of unit length."""
    unit, scale = _unit(gram)
    return torch.linalg.solve(unit, inner * scale) * scale


def _unit(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Gram matrix of vectors scaled to unit length, with a ridge, and the scales."""
    sizes = gram.diagonal().clamp(min=0).sqrt()
    scale = torch.where(sizes > 0, 1 / sizes, 0.0)
    unit = gram * scale[:, None] * scale
    return unit + RIDGE * torch.eye(len(unit), dtype=unit.dtype, device=unit.device), scale


def _root(unit: Tensor) -> Tensor:
    """Return R with R Rᵀ the inverse of a Gram matrix.

    An eigenvalue may be a little below 0 if the matrix came from float32.
    """
    values, vectors = torch.linalg.eigh(unit)
    return vectors * values.clamp(min=RIDGE).rsqrt()


def scaled(direction: Tensors, target: Tensors, factors: Tensor | None = None) -> Fit:
    """Return the multiple of a direction that is nearest to a target.

    The difference is orthogonal to the direction, and has the fraction 1 - cos² of the target's
    squared norm.

    Args:
        direction: The direction, with one tensor for each shared parameter.
        target: The tensors to come near to.
        factors: The factors that the direction was made with. They are multiplied as well.

    Example:
        >>> direction, target = {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([3.0, 4.0])}
        >>> scaled(direction, target)
        Fit(nearest={'w': tensor([3., 0.])}, cosine=0.6, factors=tensor([3.]))
    """
    factors = torch.ones(1) if factors is None else factors
    along, power, size = (
        sum(float((factor_a[n].double() * factor_b[n].double()).sum()) for n in target)
        for factor_a, factor_b in ((direction, target), (direction, direction), (target, target))
    )
    if not power or not size:
        return Fit({n: torch.zeros_like(t) for n, t in target.items()}, 0.0, 0 * factors)
    factor = along / power
    nearest = {name: direction[name] * factor for name in target}
    return Fit(nearest, abs(along) / (power * size) ** 0.5, factors * factor)


def vjp_by_difference(gmap: GradientMap, x: Tensor, delta: Tensors) -> Tensor:
    """Return J δ = ∇_x ⟨g(x), δ⟩ at an input, from two passes.

    The passes take no gradients of weights, and as long as 4/3 of a plain gradient. If the loss is
    smooth, the error is about the precision to the power of 2/3, which is 0.01 % in float32.

    Args:
        gmap: The gradient map. Its model is not written to.
        x: The input at which the product is taken, in the shape of the map's.
        delta: The tensors δ, for every shared parameter or for some.

    Returns:
        A tensor in the shape of `x`.

    Example:
        >>> delta = gmap.gradient()
        >>> product, exact = vjp_by_difference(gmap, gmap.input, delta), gmap.vjp(delta)
        >>> bool((product - exact).norm() < 0.01 * exact.norm())
        True
    """
    parameters = {name: gmap.parameters[name].detach() for name in delta}
    sizes = [
        float(torch.stack([t.norm() for t in tensors.values()]).norm())
        for tensors in (parameters, delta)
    ]
    if not sizes[1]:
        return torch.zeros_like(x)
    # At this step rounding and the third derivative err alike, if loss and parameters are of one
    # scale. In single precision networks bend sooner than that.
    relative = min(torch.finfo(x.dtype).eps ** (1 / 3), 1.5e-4)
    step = relative * (sizes[0] or 1.0) / sizes[1]
    ends = [
        gmap.slope_with({n: p + sign * step * delta[n] for n, p in parameters.items()}, x)
        for sign in (1, -1)
    ]
    return (ends[0] - ends[1]) / (2 * step)
