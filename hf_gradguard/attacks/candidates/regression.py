"""Regression of a message on candidates: a filter that knows how their gradients vary.

A message of B samples is y = (1/B) Σ_b g_b + noise. With the mean gradient of each label
subtracted, and coordinates weighed by the noise's precision, one candidate h adds h/B, and the
other samples add noise of their own, with the covariance that candidates' gradients have,

    C = I + (B - 1)/B² Σ_c p_c h_c h_cᵀ,    log p(y | h in it)/p(y) = ⟨y, C⁻¹h⟩/B - ½ ⟨h, C⁻¹h⟩/B².

By Woodbury's identity that takes only products ⟨h, y⟩ and ⟨h, h'⟩. The former, from which noise
averages out over all coordinates, are exact. The latter are those of sketches: sums of coordinates
under random signs, as long as there is memory for (Charikar, Chen and Farach-Colton, "Finding
Frequent Items in Data Streams", 2002). If candidates and noise do not explain all of a message, it
is regressed on candidates instead: not all of its samples need be among them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ...gradient_map import Tensors

ENTRIES = 2**26  # of all sketches together: 256 MiB
SHORTEST = 16_381
_FREE_COORDINATES = 32  # coordinates beside candidates, for what these do not explain to be known
_UNEXPLAINED_FRACTION = 1e-4  # of a message's power: less is not explained where all of it is
_REFERENCE_CANDIDATES = 2048  # candidates that say how gradients vary
_RIDGE = 1e-7
_REGRESSION_RIDGE = 1e-2  # the ridge of a regression on candidates, in units of their mean square


@dataclass(frozen=True)
class WhitenedMessage:
    """A message with its mean, its number of samples and its noise.

    Args:
        message: The shared message.
        center: The mean of messages of these labels.
        samples: B, the number of samples.
        variance: The variance of the noise on an entry, in units of the weights; `None` if it is
            not known.
    """

    message: Tensors
    center: Mapping[str, Tensor]
    samples: int
    variance: float | None


class MatchedFilter:
    """Products of candidates' gradients with messages whose coordinates weigh the same.

    Args:
        messages: At least one message, all of the same parameters.
        weights: The factors of differences; `None` for 1 everywhere. Coordinates of weight 0 take
            no memory.
        count: P, how many candidates there will be.
        generator: The source of the sketch's signs. It is not changed.

    Example:
        >>> y = {"w": torch.tensor([1.0, 0.0, 0.0])}
        >>> whitened = WhitenedMessage(y, {"w": torch.zeros(3)}, samples=1, variance=0.5)
        >>> matched = MatchedFilter([whitened], None, 2, torch.Generator())
        >>> matched.add([0, 1], {"w": torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])})
        >>> matched.log_ratio(0, torch.ones(2).double() / 2).tolist()
        [-1.0, 1.0]
    """

    def __init__(
        self,
        messages: Sequence[WhitenedMessage],
        weights: Tensors | None,
        count: int,
        generator: torch.Generator,
    ) -> None:
        self.messages, self.weights = list(messages), weights
        reference = messages[0].message
        device = next(iter(reference.values())).device
        generator = generator.clone_state()
        self._coordinates = {} if weights is None else _weighed_coordinates(weights)
        sizes = {name: t.numel() for name, t in reference.items()}
        sizes |= {name: len(index) for name, index in self._coordinates.items()}
        self.size = max(1, sum(sizes.values()))
        # A message of one sample has no other members: products of candidates are not needed.
        self.alone = all(message.samples == 1 for message in messages)
        longest = max(ENTRIES // max(count, 1), SHORTEST) | 1  # odd: rows of matrices do not align
        self.length = 1 if self.alone else min(longest, self.size)
        # Nothing collides where a sketch has room for all.
        self._signs = {
            name: torch.ones(size, device=device, dtype=torch.float32)
            if self.size == self.length or self.alone
            else torch.randint(2, (size,), generator=generator, device=device).float() * 2 - 1
            for name, size in sizes.items()
        }
        self._starts = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
        self.products = torch.zeros(count, len(messages), device=device, dtype=torch.float64)
        self.norms = torch.zeros(count, device=device, dtype=torch.float64)
        self.sketches = torch.zeros(count, self.length, device=device)
        self._populations: dict[tuple[float, ...], _Population] = {}
        changes = {
            n: torch.stack([m.message[n] - m.center[n] for m in messages]) for n in reference
        }
        self._ys = {name: self._weighed(name, change) for name, change in changes.items()}
        self.y_sketches = torch.zeros(len(messages), self.length, device=device)
        for name, y in self._ys.items():
            self._sketch(self.y_sketches, slice(None), name, y)
        self.y_squares = [
            sum(float(y[index].double().square().sum()) for y in self._ys.values())
            for index in range(len(messages))
        ]

    def add(self, rows: Sequence[int], changes: Mapping[str, Tensor]) -> None:
        """Add candidates `rows`, by their gradients minus their label's mean, `(k, *shape)`."""
        row_index = torch.tensor(list(rows), device=self.norms.device)
        for name, change in changes.items():
            h = self._weighed(name, change)
            self.norms[row_index] += torch.linalg.vecdot(h, h).double()
            self.products[row_index] += (h @ self._ys[name].T).double()
            self._sketch(self.sketches, row_index, name, h)

    def log_ratio(self, message: int, prior: Tensor) -> Tensor:
        """Return the log-likelihood ratios of each candidate being in a message or not, `(P,)`.

        Args:
            message: The number of the message.
            prior: The candidates' fractions in the population, `(P,)`; they add up to 1.
        """
        variance, samples = self.messages[message].variance, self.messages[message].samples
        if samples == 1:  # a variance that is not known makes all of it larger or smaller
            return (self.products[:, message] - self.norms / 2) / (variance or 1.0)
        products, variance, exact = self._terms(message, prior)
        factor = (samples - 1) / samples**2 / variance
        population = self._population(prior)
        matched, squares = population.whitened(products, self.norms if exact else None, factor)
        return (matched / samples - squares / (2 * samples**2)) / variance

    def regressed(self, message: int, prior: Tensor) -> Tensor:
        """Return the evidence that each candidate is in the message, `(P,)`.

        It is the t-statistic in a ridge regression of the message on candidates. Other parts of the
        message may be of any size, and may point where candidates do.

        Args:
            message: The number of the message.
            prior: The candidates' fractions in the population, as for `log_ratio`.
        """
        products, _, _ = self._terms(message, prior)
        return self._population(prior).studentized(products)

    def _terms(self, message: int, prior: Tensor) -> tuple[Tensor, float, bool]:
        """Return products with candidates `(P,)`, their noise's variance, and if they are exact.

        Others' gradients are known by their sketches. Exact products do not agree with these;
        sketched ones do, but noise averages out less in them.
        """
        variance = self.messages[message].variance
        if variance is None:
            variance, _ = self._residual(message, prior)
        energy = max(self.y_squares[message] - variance * self.size, 0.0)
        exact_variance = variance + energy / self.length * (self.length < self.size)
        sketch_variance = variance * max(1.0, self.size / self.length)
        if sketch_variance > exact_variance:
            return self.products[:, message], exact_variance, True
        products = _products(self.sketches, self.y_sketches[message][None])[:, 0]
        return products, sketch_variance, False

    def _population(self, prior: Tensor) -> _Population:
        if (fractions := tuple(prior.tolist())) not in self._populations:
            self._populations[fractions] = _Population(self.sketches, prior)
        return self._populations[fractions]

    def cosines(self, message: int) -> Tensor:
        """Return candidates' cosines with the message less its mean, `(P,)`."""
        sizes = (self.norms * self.y_squares[message]).sqrt().clamp(min=1e-30)
        return self.products[:, message] / sizes

    def explains(self, message: int, prior: Tensor) -> bool:
        """Return whether the known noise explains a message's residual after its candidates.

        If it does not, some of the message's samples are not candidates, and the residual is no
        such noise. A message of one sample always counts as explained.
        """
        whitened = self.messages[message]
        if whitened.samples == 1 or whitened.variance is None:
            return True
        residual_variance, free = self._residual(message, prior)
        if not free:
            return True
        by_chance = whitened.variance * (1 + 5 * math.sqrt(2 / free))
        least = _UNEXPLAINED_FRACTION * self.y_squares[message] / self.size
        return residual_variance <= max(by_chance, least)

    def _residual(self, message: int, prior: Tensor) -> tuple[float, int]:
        """Return the variance of what candidates leave of a message, and of how many coordinates.

        The second is 0 if candidates leave too few coordinates to tell; then everything counts.
        """
        y, population = self.y_sketches[message][None], self._population(prior)
        unexplained, free = float(_products(y, y)), self.length - population.count
        if free < _FREE_COORDINATES:
            free = 0
        else:
            unexplained -= population.explained(_products(self.sketches, y)[:, 0])
        per_entry = max(unexplained, 0.0) / (free or self.length)
        per_entry *= min(1.0, self.length / self.size)
        # Never less than what evaluations differ in.
        return max(per_entry, 1e-8 * self.y_squares[message] / self.size + 1e-38), free

    def _weighed(self, name: str, tensor: Tensor) -> Tensor:
        flat = tensor.flatten(1)
        if self.weights is None:
            return flat.float()
        weights = self.weights[name].flatten()
        if name in self._coordinates:
            flat, weights = flat[:, self._coordinates[name]], weights[self._coordinates[name]]
        return flat.float() * weights

    def _sketch(self, into: Tensor, rows: Tensor | slice, name: str, h: Tensor) -> None:
        if self.alone:
            return
        signed = h * self._signs[name]
        start = self._starts[name] % self.length
        lead = min(self.length - start, signed.shape[1])
        into[rows, start : start + lead] += signed[:, :lead]
        remaining = signed[:, lead:]
        full_length = remaining.shape[1] // self.length * self.length
        if full_length:
            into[rows] += remaining[:, :full_length].reshape(len(h), -1, self.length).sum(1)
        if full_length < remaining.shape[1]:
            into[rows, : remaining.shape[1] - full_length] += remaining[:, full_length:]


class _Population:
    """The covariance of candidates' gradients, Σ_c p_c h_c h_cᵀ, from their inner products."""

    def __init__(self, sketches: Tensor, prior: Tensor) -> None:
        chosen = slice(None)
        if len(sketches) > _REFERENCE_CANDIDATES:
            step = len(sketches) // _REFERENCE_CANDIDATES
            chosen = slice(0, step * _REFERENCE_CANDIDATES, step)
        self.chosen = chosen
        fractions = prior[chosen] / prior[chosen].sum()
        self.root, self.count = fractions.sqrt(), int((fractions > 0).sum())
        cross = _products(sketches, sketches[chosen]) * self.root  # h·h_c √p_c
        self.norms = _products(sketches, None)
        # By eigenvalues: what is known to many digits more than the noise leaves would cancel in
        # the factors of a solver.
        system = self.root[:, None] * cross[chosen]
        values, self.vectors = torch.linalg.eigh((system + system.T) / 2)
        self.values = values.clamp(min=0)
        self.projected = cross @ self.vectors

    def explained(self, products: Tensor) -> float:
        """Return ‖y‖² in the candidates' span, for a y with these products."""
        along = self.vectors.T @ (self.root * products[self.chosen])
        ridge = _RIDGE * float(self.values.sum()) / max(self.count, 1) + 1e-30
        return float((along.square() / (self.values + ridge)).sum())

    def whitened(
        self, products: Tensor, norms: Tensor | None, factor: float
    ) -> tuple[Tensor, Tensor]:
        """Return ⟨h, (I + share Σ)⁻¹ y⟩ of all candidates h, `(P,)`, and the same with h for y.

        Args:
            products: Products of y with candidates, `(P,)`.
            norms: Squared norms of candidates; `None` for those of their sketches.
            factor: The factor of Σ.
        """
        damped = factor / (1 + factor * self.values)
        along = self.vectors.T @ (self.root * products[self.chosen])
        matched = products - self.projected @ (damped * along)
        squares = (self.norms if norms is None else norms) - self.projected.square() @ damped
        return matched, squares.clamp(min=0)

    def studentized(self, products: Tensor) -> Tensor:
        """Return t-statistics of all candidates in a ridge regression of y on the population.

        Args:
            products: Products of y with candidates, `(P,)`.
        """
        size = float(self.norms[self.chosen][self.root > 0].mean())
        factor = self.count / (_REGRESSION_RIDGE * size + 1e-30)
        matched, squares = self.whitened(products, None, factor)
        leverage = torch.zeros_like(squares)
        leverage[self.chosen] = factor * self.root.square() * squares[self.chosen]
        return matched / (squares * (1 - leverage)).clamp(min=1e-30).sqrt()


def _weighed_coordinates(weights: Tensors) -> dict[str, Tensor]:
    """Return coordinates of non-zero weight, of parameters that have others too."""
    coordinates = {name: weight.flatten().nonzero()[:, 0] for name, weight in weights.items()}
    return {
        name: index for name, index in coordinates.items() if len(index) < weights[name].numel()
    }


def _products(rows_a: Tensor, rows_b: Tensor | None) -> Tensor:
    """Return inner products of rows in float64, `(n, m)`; `(n,)` of each with itself."""
    total: Tensor | float = 0.0
    for start in range(0, rows_a.shape[1], 2**14):
        chunk = rows_a[:, start : start + 2**14].double()
        if rows_b is None:
            total = total + chunk.square().sum(1)
        else:
            total = total + chunk @ rows_b[:, start : start + 2**14].double().T
    assert isinstance(total, Tensor)
    return total
