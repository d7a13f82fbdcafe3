"""The span of what the samples of a batch add to its gradient, in which another gradient is fitted.

What a linear layer's weight has as its gradient is a sum over samples of δ_bᵀa_b: its slopes and
its features. Inner products and weighted sums come from these short factors, so no sample's
gradient of such a weight is written out.
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
"""Of factors: one per message, per sample, per sample and parameter, or per token and weight, where
neighbors share one if there are many.
"""

RIDGE = 1e-6
"""Added to a Gram matrix of unit vectors: samples' gradients may be nearly alike."""

TERMS, EACH = 256, 16
"""Factors that are fitted for a weight, at most, in all and for each sample: to solve for more
takes longer than a pass.
"""


class Fit(NamedTuple):
    """A gradient's nearest point in a span.

    Args:
        nearest: One tensor a shared parameter, at least in float32.
        cosine: Between the two, at least 0; 0 where either is zero.
        factors: c of Σ_b c_b u_b, `(B,)`.
    """

    nearest: Tensors
    cosine: float
    factors: Tensor


class SampleSpan:
    """The span of B + 1 vectors: what each sample adds to the gradients of layers, and the gradient
    of all parameters that no layer has (position embeddings, say).

    Costs a pass without gradients of weights to make, and about a plain gradient and a half a fit.

    Args:
        gmap: A map of the samples.
        x: Where, in the shape of the map's input. Default: at that.

    Example:
        >>> fit = SampleSpan(gmap).fit(gmap.gradient())  # which is in it
        >>> round(fit.cosine, 3)
        1.0
    """

    def __init__(self, gmap: GradientMap, x: Tensor | None = None) -> None:
        count, layers = len(gmap.input), layers_of(gmap.model, gmap.parameters)
        found = Pass.of(gmap, gmap.input if x is None else x, layers)
        self._count = count
        self._like = {name: p.detach() for name, p in gmap.parameters.items()}
        self._factors: dict[str, _Outer] = {}
        self._written: dict[str, _Written] = {}
        for key, layer in layers.items():
            rows = found.rows(key, count)
            if not rows:  # it did not run, or mixes samples: nothing of it is in the span
                continue
            if layer.bias is not None:
                biases = [layer.bias_gradients(slopes) for slopes, _ in rows]
                self._written[layer.bias] = _Written(torch.stack(biases).sum(0).flatten(1))
            if layer.weight is not None and isinstance(layer.module, LINEAR):
                slopes, features = (torch.cat(parts, 1) for parts in zip(*rows, strict=True))
                turned = isinstance(layer.module, Conv1D)  # (in, out), where others have (out, in)
                self._factors[layer.weight] = _Outer(slopes, features, turned)
            elif layer.weight is not None:
                weights = [layer.weight_gradients(*row) for row in rows]
                self._written[layer.weight] = _Written(torch.stack(weights).sum(0).flatten(1))
        self.rest = found.rest

    def fit_by(self, wanted: Tensors, factors: Granularity) -> Fit:
        """The nearest point, with factors of samples, of parameters too, or of tokens; all but
        `"message"`.

        Example:
            >>> round(SampleSpan(gmap).fit_by(gmap.gradient(), "token").cosine, 3)
            1.0
        """
        if factors == "sample":
            return self.fit(wanted)
        return self.fit_each(wanted, tokens=factors == "token")

    def powers(self, factors: Granularity) -> Powers:
        """What lies in it of other gradients, of which there may be many."""
        rest: _Parts = [(name, _Written(r.flatten()[None])) for name, r in self.rest.items()]
        parts = list(self._parts())
        if factors == "message":  # the sum of all samples, and of what no layer has
            ones = torch.ones(self._count)
            whole = [(n, _Written(part.weighted(ones).flatten()[None])) for n, part in parts]
            return Powers([whole + rest])
        if factors == "sample":
            return Powers([parts, rest])
        if factors == "token":
            parts = [(n, p.of_tokens() if isinstance(p, _Outer) else p) for n, p in parts]
        return Powers([*([one] for one in parts), rest])

    def fit(self, wanted: Tensors) -> Fit:
        """The nearest point of the span, by least squares."""
        some = next(iter(wanted.values()))
        inner = some.new_zeros(self._count, dtype=torch.float64)
        gram = some.new_zeros(self._count, self._count, dtype=torch.float64)
        for name, part in self._parts():
            inner += part.inner(wanted[name])
            gram += part.gram()
        weights = _solve(gram, inner)
        return self._with_rest(
            {n: part.weighted(weights) for n, part in self._parts()}, wanted, weights
        )

    def fit_each(self, wanted: Tensors, tokens: bool = False) -> Fit:
        """The nearest point where each parameter has factors of its own: that of the product of
        their spans.

        Args:
            wanted: The gradient to come near to.
            tokens: Factors of a linear layer's weight are of tokens and not of samples, or of
                groups of neighbors where there are more than 16 for each sample or 256 in all.
        """
        nearest = {}
        for name, part in self._parts():
            if tokens and isinstance(part, _Outer):
                part = part.of_tokens()
            weights = _solve(part.gram().double(), part.inner(wanted[name]).double())
            nearest[name] = part.weighted(weights)
        return self._with_rest(nearest, wanted, torch.ones(self._count))

    def _parts(self) -> Iterator[tuple[str, _Outer | _Written]]:
        yield from self._factors.items()
        yield from self._written.items()

    def _with_rest(self, nearest: Tensors, wanted: Tensors, weights: Tensor) -> Fit:
        """With the vector of what no layer has, and zeros where nothing ran."""
        for name, like in self._like.items():
            found = nearest.get(name)
            nearest[name] = torch.zeros_like(like) if found is None else found.view(like.shape)
        rest = {name: wanted[name] for name in self.rest}
        nearest |= scaled(self.rest, rest).nearest if rest else {}
        return scaled(nearest, wanted, weights)


class Powers:
    """‖P g‖² of gradients g, where P projects on a span: a number for each group of parameters
    that have factors in common.

    Costs about half of what a gradient does for each.

    Args:
        groups: Of them, with what each adds to the vectors that span. Those of none are left out.

    Example:
        >>> powers = SampleSpan(gmap).powers("sample")
        >>> found = powers({name: g[None] for name, g in gmap.gradient().items()})
        >>> found.shape, powers.factors.tolist()  # two samples, and what is no layer's
        (torch.Size([1, 2]), [2, 1])
    """

    def __init__(self, groups: Sequence[_Parts]) -> None:
        grams = [(g, torch.stack([p.gram().double() for _, p in g]).sum(0)) for g in groups if g]
        self._groups = [(group, *_unit(gram)) for group, gram in grams if gram.any()]
        self.names = [[name for name, _ in group] for group, _, _ in self._groups]
        self.factors = torch.tensor([len(scale) for _, _, scale in self._groups])
        self._roots = [_root(unit) for _, unit, _ in self._groups]

    def __call__(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """`(K, groups)` in float64, of gradients `(K, *parameter.shape)`."""
        return torch.stack([c.square().sum(1) for c in self.coordinates(gradients)], 1)

    def coordinates(self, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        """U'g of gradients `(K, *parameter.shape)`, `(K, factors)` in float64 for each group: U is
        an orthonormal basis of what is spanned.
        """
        found = []
        for (group, _, scale), root in zip(self._groups, self._roots, strict=True):
            inner = torch.stack(
                [
                    torch.stack([part.inner(g).double() for g in gradients[name]])
                    for name, part in group
                ]
            )
            found.append(inner.sum(0) * scale @ root)
        return found

    def across(self, other: Powers) -> list[Tensor]:
        """U'V for each group, `(factors, factors of the other)`: V is a basis of what another span
        of the same groups has.
        """
        found = []
        for (group, _, scale), root, (beside, _, size), turned in zip(
            self._groups, self._roots, other._groups, other._roots, strict=True
        ):
            pairs = zip(group, beside, strict=True)
            products = torch.stack([one.across(two).double() for (_, one), (_, two) in pairs])
            found.append(root.T @ (scale[:, None] * products.sum(0) * size) @ turned)
        return found


class _Outer(NamedTuple):
    """Slopes `(B, T, out)` and features `(B, T, in)` of a linear layer."""

    slopes: Tensor
    features: Tensor
    turned: bool

    def of_tokens(self) -> _Outer:
        """With tokens in the place of samples, or groups of neighbors where there are many."""
        count, length, _ = self.slopes.shape
        size = -(-count * length // min(TERMS, EACH * count))
        more = -length % size
        slopes, features = (
            nn.functional.pad(part, (0, 0, 0, more)).reshape(-1, size, part.shape[-1])
            for part in (self.slopes, self.features)
        )
        return _Outer(slopes, features, self.turned)

    def inner(self, wanted: Tensor) -> Tensor:
        """With each sample's gradient, `(B,)`."""
        matrix = (wanted.T if self.turned else wanted).to(self.features)
        return ((self.slopes @ matrix) * self.features).sum((1, 2))

    def gram(self) -> Tensor:
        """Between samples' gradients, `(B, B)`."""
        count, length, _ = self.slopes.shape
        out, width = self.slopes.shape[-1], self.features.shape[-1]
        if length * length * count > out * width:  # shorter written out
            written = (self.slopes.mT @ self.features).flatten(1)
            return written @ written.T
        return self.across(self)

    def across(self, other: Any) -> Tensor:
        """With those of others, `(B, B')`."""
        sizes = [part.slopes.shape[:2] for part in (self, other)]
        mine, theirs = ((p.slopes.flatten(0, 1), p.features.flatten(0, 1)) for p in (self, other))
        products = (mine[0] @ theirs[0].T) * (mine[1] @ theirs[1].T)
        return products.view(*sizes[0], *sizes[1]).sum((1, 3))

    def weighted(self, weights: Tensor) -> Tensor:
        """Σ_b c_b times samples' gradients."""
        slopes = self.slopes * weights.to(self.slopes)[:, None, None]
        found = slopes.flatten(0, 1).T @ self.features.flatten(0, 1)
        return found.T.contiguous() if self.turned else found


class _Written(NamedTuple):
    """Samples' gradients, `(B, numel)`."""

    rows: Tensor

    def inner(self, wanted: Tensor) -> Tensor:
        return self.rows @ wanted.flatten().to(self.rows)

    def gram(self) -> Tensor:
        return self.rows @ self.rows.T

    def across(self, other: Any) -> Tensor:
        return self.rows @ other.rows.T

    def weighted(self, weights: Tensor) -> Tensor:
        return weights.to(self.rows) @ self.rows


_Parts = list[tuple[str, "_Outer | _Written"]]


def _solve(gram: Tensor, inner: Tensor) -> Tensor:
    """Least squares in float64, of vectors of unit length."""
    unit, scale = _unit(gram)
    return torch.linalg.solve(unit, inner * scale) * scale


def _unit(gram: Tensor) -> tuple[Tensor, Tensor]:
    """The Gram matrix of vectors of unit length, which can be solved; and one over their length."""
    sizes = gram.diagonal().clamp(min=0).sqrt()
    scale = torch.where(sizes > 0, 1 / sizes, 0.0)
    unit = gram * scale[:, None] * scale
    return unit + RIDGE * torch.eye(len(unit), dtype=unit.dtype, device=unit.device), scale


def _root(unit: Tensor) -> Tensor:
    """R with R Rᵀ the inverse. A Gram matrix of float32 may be a little below 0 somewhere."""
    values, vectors = torch.linalg.eigh(unit)
    return vectors * values.clamp(min=RIDGE).rsqrt()


def scaled(found: Tensors, wanted: Tensors, factors: Tensor | None = None) -> Fit:
    """`found` times the factor a with which it is nearest: what is left out is then orthogonal to
    it, and has the share 1 - cos² of the power.

    Args:
        found: One tensor a shared parameter.
        wanted: What it is to be near to.
        factors: Those that made it, to be multiplied with a as well.

    Example:
        >>> found, wanted = {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([3.0, 4.0])}
        >>> scaled(found, wanted)
        Fit(nearest={'w': tensor([3., 0.])}, cosine=0.6, factors=tensor([3.]))
    """
    factors = torch.ones(1) if factors is None else factors
    along, power, size = (
        sum(float((one[n].double() * other[n].double()).sum()) for n in wanted)
        for one, other in ((found, wanted), (found, found), (wanted, wanted))
    )
    if not power or not size:
        return Fit({n: torch.zeros_like(t) for n, t in wanted.items()}, 0.0, 0 * factors)
    factor = along / power
    nearest = {name: found[name] * factor for name in wanted}
    return Fit(nearest, abs(along) / (power * size) ** 0.5, factors * factor)
