"""Fisher information of what is shared about labels.

A client shares y = g + N(0, Σ). Sample j has the label a or b, and an attacker knows everything
else: the input, all other samples, the noise. Then it distinguishes two normal laws, which are

    μ_ab = ‖Σ^(-1/2) (g(a) - g(b))‖

deviations apart, and its answer is correct with a probability of at most Φ(μ_ab/2). Cross-entropy
is linear in a label's class probabilities. So μ² is also Fisher information: for p on the simplex
of K classes, the mean per dimension of its tangent is the mean of μ_ab²/2 over all pairs of
classes.

References: Hannun, Guo, van der Maaten, "Measuring Data Leakage in Machine-Learning Models with
Fisher Information" (2021), for information about attributes; Neyman, Pearson (1933).
"""

from __future__ import annotations

import math
from functools import cached_property
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..gradient_map import GradientMap, Tensors
from ..randomness import Stream
from .gram import Estimate, NoiseVariance, not_finite, variances
from .influence import Estimator, check_probes

if TYPE_CHECKING:
    from ..defenses import Message


def label_information(
    gmap: GradientMap,
    noise_variance: NoiseVariance,
    *,
    sample: int | None = None,
    classes: int | None = None,
    num_probes: int | None = None,
    generator: Stream | torch.Generator | None = None,
) -> Estimate:
    """Return the Fisher information about a label, per dimension.

    It is the mean of μ²/2 over pairs of classes. First-order passes are enough, so it works with
    any attention kernel.

    Args:
        gmap: The client's gradient map, of a model with a class for each sample.
        noise_variance: Diagonal Σ, as in `dfil`.
        sample: The sample whose label it is about. Default: the mean over the batch.
        classes: K, the number of classes. Default: the `num_labels` of the model's config.
        num_probes: The number of random pairs of classes for each sample, two passes each for the
            whole batch. `None` computes it exactly, in K - 1 passes a sample.
        generator: The source of the pairs, a `Stream` or a generator on the labels' device.
            Default: a new `Stream`.

    Returns:
        A float with its `standard_error`: 0 where exact, infinite for one probe. It is infinite if
            a coordinate without noise shows a label. Behind clipping it is that of the label before
            clipping.

    Raises:
        ValueError: If labels are no classes, or the map is one device's part of a model.

    Example:
        >>> exact = label_information(gmap, noise_variance=1.0)
        >>> 0.5 < label_success_bound(exact) < 1  # how often the right one of two labels
        True
        >>> label_information(gmap, 4.0) < exact
        True
    """
    labels = _Labels(gmap, noise_variance, classes)
    count = len(labels.true_classes)
    if sample is not None and not 0 <= sample < count:
        raise ValueError(f"sample must be from 0 to {count - 1}, but is {sample}.")
    samples = range(count) if sample is None else range(sample, sample + 1)
    if num_probes is None:
        return Estimate.exact(sum(map(labels.mean_over_pairs, samples)) / len(samples))
    check_probes(num_probes)
    generator = generator or Stream()
    draws = [labels.of_random_pairs(samples, generator) for _ in range(num_probes)]
    estimate = Estimate(sum(draws) / num_probes)
    spread = torch.tensor(draws, dtype=torch.float64).std() if num_probes > 1 else math.inf
    estimate.standard_error = float(spread) / math.sqrt(num_probes)
    return estimate


def label_success_bound(information: float) -> float:
    """Bound the accuracy of an attacker that decides between two labels: Φ(√(I/2)).

    Both labels of a sample are equally likely, and the bound is on the average over pairs.

    Args:
        information: I, the result of `label_information`.

    Example:
        >>> label_success_bound(0.0), round(label_success_bound(2.0), 3)
        (0.5, 0.841)
    """
    # The root and Φ are concave here, so the mean over pairs is at most that of the mean.
    return NormalDist().cdf(math.sqrt(information / 2))


def class_labels(gmap: GradientMap) -> str | None:
    """Return the name of the batch entry with a class for each sample, or `None`.

    Example:
        >>> class_labels(gmap)
        'labels'
    """
    for key in ("labels", "label"):
        labels = gmap.batch.get(key)
        if isinstance(labels, Tensor) and labels.dim() == 1 and not labels.is_floating_point():
            return key
    return None


class _Labels:
    """The labels of a batch, and the gradients that would be shared with other labels."""

    def __init__(
        self, gmap: GradientMap, noise_variance: NoiseVariance, classes: int | None = None
    ) -> None:
        key = class_labels(gmap)
        count = classes or getattr(getattr(gmap.model, "config", None), "num_labels", 0)
        if key is None or not count or count < 2:
            raise ValueError(
                "label_information is of labels that are classes, one for each sample: the batch "
                "needs a whole number for each in `labels`, and the model two classes or more."
            )
        if gmap.shards is not None:
            raise ValueError("label_information is of a whole gradient, not of one device's part.")
        self.classes, self.true_classes = count, gmap.batch[key]
        self._gmap, self._key = gmap, key
        # Infinite without noise, and 0 where nothing is shared.
        self._precision = {n: v.reciprocal() for n, v in variances(gmap, noise_variance).items()}

    def mean_over_pairs(self, sample: int) -> float:
        """Return the mean of μ²/2 over all pairs of classes, for one sample."""
        squares, moved = 0.0, {name: torch.zeros_like(g) for name, g in self._true_gradient.items()}
        for other_class in range(self.classes):
            if other_class == self.true_classes[sample]:
                continue
            labels = self.true_classes.clone()
            labels[sample] = other_class
            change = self._shared_change(self._gradient(labels), self._true_gradient)
            squares += self._information(change)
            moved = {name: moved[name] + tensor for name, tensor in change.items()}
        if math.isinf(squares):
            return math.inf
        # Σ over pairs of ‖a - b‖² is K Σ‖a‖² - ‖Σ a‖², whatever a is counted from.
        over_pairs = self.classes * squares - self._information(moved)
        return over_pairs / (self.classes * (self.classes - 1))

    def of_random_pairs(self, samples: range, generator: Stream | torch.Generator) -> float:
        """Return an unbiased draw of the mean of μ²/2 over pairs and these samples."""
        classes, other_classes = self.true_classes.clone(), self.true_classes.clone()
        random_classes = self._integers(self.classes, len(samples), generator).to(classes)
        step = 1 + self._integers(self.classes - 1, len(samples), generator).to(classes)
        classes[samples] = random_classes
        other_classes[samples] = (random_classes + step) % self.classes
        change = self._shared_change(self._gradient(classes), self._gradient(other_classes))
        # A pair comes in both orders, so products of different samples are 0 on average.
        return self._information(change) / 2 / len(samples)

    def _integers(self, high: int, count: int, generator: Stream | torch.Generator) -> Tensor:
        if isinstance(generator, Stream):
            return generator.integers(high, (count,))
        return torch.randint(high, (count,), generator=generator, device=generator.device)

    @cached_property
    def _true_gradient(self) -> Tensors:
        return self._gradient(self.true_classes)

    def _gradient(self, labels: Tensor) -> Tensors:
        entries: dict[str, Any] = {self._key: labels}
        return self._gmap.gradient_at(self._gmap.input, **entries)

    def _shared_change(self, gradient: Tensors, reference: Tensors) -> Tensors:
        """Return the difference of two gradients in the coordinates that are shared."""
        return self._gmap.restrict({name: g - reference[name] for name, g in gradient.items()})

    def _information(self, change: Tensors) -> float:
        """Return Δᵀ Σ⁻¹ Δ; an entry that does not change tells nothing, with noise or without."""
        squares = [
            torch.where(moved != 0, moved.double().square() * self._precision[name], 0.0).sum()
            for name, moved in change.items()
        ]
        total = float(torch.stack(squares).sum())
        if math.isnan(total):
            raise not_finite()
        return total


class LabelBound(Estimator):
    """The least rate at which an attacker takes the wrong one of two labels, for each sample.

    It is 1 less `label_success_bound`.
    """

    title = "label bound"
    meaning = (
        "how often an attacker is wrong at least that knows the input and all other labels, and "
        "has to tell which of two labels a sample has; 0.5 is a guess"
    )
    needs_noise = True
    ranks = False  # labels are not what attacks reconstruct
    most_classes: ClassVar[int] = 10
    """The most classes of which all pairs are taken; for more, a few random ones are."""
    pairs: ClassVar[int] = 4

    def estimate(self, message: Message, generator: Stream | torch.Generator | None) -> Tensor:
        assert message.noise is not None
        labels = _Labels(self.gmap, message.noise.variance)
        takes_all_pairs = labels.classes <= self.most_classes
        stream = generator or Stream()
        wrong = []
        for sample in range(len(labels.true_classes)):
            if takes_all_pairs:
                information = labels.mean_over_pairs(sample)
            else:
                alone = range(sample, sample + 1)
                draws = [labels.of_random_pairs(alone, stream) for _ in range(self.pairs)]
                information = sum(draws) / self.pairs
            wrong.append(1 - label_success_bound(information))
        return torch.tensor(wrong)
