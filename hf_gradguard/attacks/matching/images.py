"""Gradient matching as published for images. All but DLG read the label off the last layer when it
is not known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from .attack import GradientMatching
from .objectives import Objective, cosine_distance, squared_distance
from .problem import Problem


@dataclass
class DLG(GradientMatching):
    """Squared distance, L-BFGS; labels that are not known are optimized with the input.

    Needs a model with second derivatives everywhere (sigmoid, GELU), and often restarts.

    Reference: Zhu, Liu and Han, "Deep Leakage from Gradients", 2019.

    Example:
        >>> found = DLG(steps=1, start="uniform")(image_seen)
        >>> found.input.shape == image_gmap.input.shape
        True
    """

    name: ClassVar[str] = "dlg"
    optimize_labels: ClassVar[bool] = True
    steps: int = 300
    learning_rate: float = 1.0
    optimizer: str = "lbfgs"

    def objective(self) -> Objective:
        return squared_distance


@dataclass
class IDLG(DLG):
    """DLG with the label read off the last layer.

    Reference: Zhao, Mopuri and Bilen, "iDLG: Improved Deep Leakage from Gradients", 2020.

    Example:
        >>> IDLG(steps=1)(image_seen).labels.shape
        torch.Size([2])
    """

    name: ClassVar[str] = "idlg"
    optimize_labels: ClassVar[bool] = False


@dataclass
class InvertingGradients(GradientMatching):
    """1 - cosine and total variation on images, by L-BFGS from anywhere in the range of pixels: far
    stronger than as published.

    Reference: Geiping et al., "Inverting Gradients: How easy is it to break privacy in federated
    learning?", 2020, for what it minimizes.

    Example:
        >>> found = InvertingGradients(steps=2, total_variation=1e-2)(image_seen)
        >>> found.objective == min(found.history)
        True
    """

    name: ClassVar[str] = "inverting_gradients"
    steps: int = 60
    learning_rate: float = 1.0
    optimizer: str = "lbfgs"
    start: Any = None
    total_variation: float = 1e-4
    patience: int | None = 5

    def objective(self) -> Objective:
        return cosine_distance


@dataclass
class InvertingGradientsPublished(InvertingGradients):
    """Inverting Gradients as published: signed Adam with three decays from a normal start.

    Reference: Geiping et al., "Inverting Gradients: How easy is it to break privacy in federated
    learning?", 2020.

    Example:
        >>> len(InvertingGradientsPublished(steps=2)(image_seen).history)
        2
    """

    name: ClassVar[str] = "inverting_gradients_published"
    steps: int = 4800
    learning_rate: float = 0.1
    optimizer: str = "adam"
    schedule: str = "steps"
    signed: bool = True
    start: Any = "normal"
    patience: int | None = None


@dataclass
class DeepImagePrior(InvertingGradients):
    """1 - cosine of images that an untrained convolutional network draws, by Adam on its weights.

    The best match is returned, and noise is matched in the end: behind a strong defense stop early,
    at 100 `steps`.

    Reference: Ulyanov, Vedaldi and Lempitsky, "Deep Image Prior", 2018, for the prior.

    Example:
        >>> found = DeepImagePrior(steps=2)(image_seen)
        >>> found.objective == min(found.history)
        True
    """

    name: ClassVar[str] = "deep_image_prior"
    domains: ClassVar[tuple[str, ...]] = ("image",)
    steps: int = 500
    learning_rate: float = 1e-2
    optimizer: str = "adam"
    prior: str | None = "deep"
    total_variation: float = 0.0
    patience: int | None = None


@dataclass
class GradInversion(GradientMatching):
    """Squared distance with total variation, squared norm, batch-norm statistics and agreement
    between restarts.

    Args:
        batch_norm: Weight of the distance to the batch normalizations' running statistics.
        group_consistency: Weight of each restart's squared distance to the restarts' mean.

    Reference: Yin et al., "See through Gradients: Image Batch Recovery via GradInversion", 2021.

    Example:
        >>> found = GradInversion(steps=2, restarts=2)(image_seen)
        >>> found.objective == min(found.history)
        True
    """

    name: ClassVar[str] = "grad_inversion"
    steps: int = 4000
    learning_rate: float = 0.1
    schedule: str = "steps"
    total_variation: float = 1e-4
    squared_norm: float = 1e-6
    batch_norm: float = 1e-3
    group_consistency: float = 1e-3

    def objective(self) -> Objective:
        return squared_distance

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer == "lbfgs" and self.restarts > 1 and self.group_consistency:
            raise ValueError(
                "With L-BFGS each restart descends by itself, so that they cannot be held "
                "together: set group_consistency=0, or take another optimizer."
            )

    def penalty(self, problem: Problem, x: Tensor) -> Tensor | float:
        value = super().penalty(problem, x)
        if self.batch_norm:
            distance = problem.space.batch_norm_distance(problem.seen.model, x)
            value = value + self.batch_norm * distance
        if self.group_consistency and self.restarts > 1 and len(x) > 1:
            groups = x.view(-1, self.restarts, *x.shape[1:])
            # Without restarts that diverged. What draws to it adds up to 0, so it has no slope.
            mean = groups.detach().nanmean(1, keepdim=True)
            away = (groups - mean).view_as(x).flatten(1)
            value = value + self.group_consistency * away.square().mean(1)
        return value
