"""Observations to be matched, and what an attacker who knows the defense does to gradients before
they are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...gradient_map import GradientMap, Tensors
from ..base import Observation
from ..labels import check_classes, recover_labels
from .objectives import Candidate, Objective, inverse_norm
from .space import SPACES, DeepPrior, SearchSpace

Slopes = tuple[Tensor, Tensor, Tensors]
"""Distances of candidates `(K,)`, their derivatives by the candidates, and by their labels."""


class Problem:
    """Observations to be matched, with the map that evaluates candidates for them: K = observations
    × restarts.

    Args:
        observations: Of one model, input shape and attention mask, with gradients of the same
            parameters.
        objective: The distance between gradients.
        restarts: Candidates an observation.
        optimize_labels: Optimize labels that are not known as logits, as DLG does, and do not read
            them off the gradient.
        match_nonzero: Match only where the shared gradient is not zero.
        leave_out: Parts of parameter names to leave out.
        clip_norm: Clip candidates' gradients to this norm.
        clip_coordinate: Coordinates shared at ± this bound match whatever lies beyond it.

    Attributes:
        observation: The first observation.
        soft: Whether labels are optimized.
        labels: `(K, B)`, or logits `(K, B, C)` where they are optimized.
        space: Where candidates may lie.

    Raises:
        ValueError: If the observations do not belong together, or the attack cannot work on them.

    Example:
        >>> from hf_gradguard.attacks.matching.objectives import squared_distance
        >>> from dataclasses import replace
        >>> observation = replace(observation, attention_mask=batch["attention_mask"])
        >>> problem = Problem([observation], squared_distance)
        >>> bool(problem.distance(gmap.input, 0) < 1e-9)  # the true input has that gradient
        True
    """

    def __init__(
        self,
        observations: Sequence[Observation],
        objective: Objective,
        *,
        restarts: int = 1,
        optimize_labels: bool = False,
        match_nonzero: bool = False,
        leave_out: Sequence[str] = (),
        clip_norm: float | None = None,
        clip_coordinate: float | None = None,
    ) -> None:
        _check_together(observations)
        self.observation = reference = observations[0]
        self.objective = objective
        self.clip_norm, self.clip_coordinate = clip_norm, clip_coordinate
        self.soft = reference.labels is None and optimize_labels
        labels = [_labels(observation, self.soft) for observation in observations]
        self.labels = torch.stack(labels).repeat_interleave(restarts, 0)
        self.gmap: GradientMap = reference.gradient_map(
            self.labels[0], loss_fn=soft_label_loss if self.soft else None
        )
        self.shared = [name for name in self.gmap.parameters if name in reference.gradient]
        self.names = [
            name for name in self.shared if not any(excluded in name for excluded in leave_out)
        ]
        if not self.names:
            raise ValueError(
                "No gradient is left to match: what was shared is the token embeddings' alone "
                "(embedding_rows reads those), or leave_out names all of it."
            )
        weights = [
            _weights(observation, self.names, match_nonzero, clip_coordinate is not None)
            for observation in observations
        ]
        self.weighted = any(weight is not None for weight in weights)
        targets = [
            self._compared(observation, weight)
            for observation, weight in zip(observations, weights, strict=True)
        ]
        self.extras: Tensors = {
            name: torch.stack([shared[name] for shared in targets]).repeat_interleave(restarts, 0)
            for name in targets[0]
        }
        self.space: SearchSpace = SPACES[reference.domain.name](reference, self.gmap.input)

    def start(self, start: Any, generator: torch.Generator) -> Tensor:
        """The first candidates, `(K, *input.shape)`."""
        template = self.gmap.input
        return self.space.start(start, (len(self.labels), *template.shape), template, generator)

    def network(self, generator: torch.Generator) -> DeepPrior:
        """What draws candidates `(K, *input.shape)`, each by networks of its own."""
        template = self.gmap.input
        return self.space.network((len(self.labels), *template.shape), template, generator)

    def slopes(self, x: Tensor, labels: Tensor, rows: slice | Tensor) -> Slopes:
        """dist(g(x̂), shared) of the candidates `rows`, `(K,)`, and its derivatives by `x` and by
        soft labels.
        """
        extras = {name: tensor[rows] for name, tensor in self.extras.items()}
        return self.gmap.slopes_at(
            self._distance, x, extras, factored=not self.weighted, labels=labels
        )

    def distance(self, x: Tensor, candidate: int) -> Tensor:
        """dist(g(x̂), shared) of one x̂ `(B, ...)` for the candidate of that number."""
        gradient = self.gmap.gradient_at(x, labels=self.labels[candidate])
        return self._distance(
            gradient, {name: tensor[candidate] for name, tensor in self.extras.items()}
        )

    def _compared(self, observation: Observation, weights: Tensors | None) -> Tensors:
        """What a candidate of this observation is compared to, and by which weights; of the types
        that the model's own gradients have.
        """
        types = {name: self.gmap.parameters[name].dtype for name in self.names}
        shared = {name: observation.gradient[name].to(types[name]) for name in self.names}
        if not self.weighted:
            return shared
        own_weights = weights or {name: torch.ones_like(tensor) for name, tensor in shared.items()}
        own_weights = {name: tensor.to(types[name]) for name, tensor in own_weights.items()}
        shared = {name: tensor * own_weights[name] for name, tensor in shared.items()}
        return shared | {f"weight {name}": tensor for name, tensor in own_weights.items()}

    def _distance(self, gradient: Candidate, extras: Tensors) -> Tensor:
        shared = {name: extras[name] for name in self.names}
        if self.clip_norm is not None:
            scale = (self.clip_norm * inverse_norm(gradient[name] for name in self.shared)).clamp(
                max=1.0
            )
            gradient = {name: gradient[name] * scale for name in self.names}
        if self.weighted:  # never in factors
            gradient = {name: gradient[name] * extras[f"weight {name}"] for name in self.names}
        if self.clip_coordinate is not None:
            bounds = {name: self.clip_coordinate * extras[f"weight {name}"] for name in self.names}
            gradient = {
                name: _up_to(gradient[name], shared[name], bounds[name])  # type: ignore[arg-type]
                for name in self.names
            }
        return self.objective(gradient, shared)


def soft_label_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Cross-entropy with `labels` as logits `(B, C)` of soft labels.

    Example:
        >>> sure = 100.0 * torch.nn.functional.one_hot(batch["labels"], 2)
        >>> soft = soft_label_loss(model, {**batch, "labels": sure})
        >>> torch.allclose(soft, model(**batch).loss)
        True
    """
    batch = dict(batch)
    labels = batch.pop("labels").softmax(-1)
    return -(labels * model(**batch).logits.log_softmax(-1)).sum(-1).mean()


def _check_together(observations: Sequence[Observation]) -> None:
    reference = observations[0]
    for observation in observations[1:]:
        if (
            observation.model is not reference.model
            or observation.input_shape != reference.input_shape
            or not torch.equal(observation.tokens, reference.tokens)
            or observation.gradient.keys() != reference.gradient.keys()
        ):
            raise ValueError(
                "Observations that are attacked together must be of one model, input shape and "
                "attention mask, with gradients of the same parameters. Attack the others by "
                "themselves."
            )


def _labels(observation: Observation, soft: bool) -> Tensor:
    if observation.labels is not None:
        return observation.labels.to(observation.device)
    if not soft:
        return recover_labels(observation)
    check_classes(observation)  # the loss of logits is cross-entropy, whatever the model's own is
    config: Any = observation.model.config
    dtype = next(p.dtype for p in observation.model.parameters() if torch.is_floating_point(p))
    return torch.zeros(
        observation.batch_size, config.num_labels, dtype=dtype, device=observation.device
    )


def _weights(
    observation: Observation, names: list[str], match_nonzero: bool, clipped: bool
) -> Tensors | None:
    """What an adaptive attacker multiplies gradients by; `None` for all ones.

    Zeros leave out what a pruning took. Against Gaussian noise of known variance Σ, Σ^-½ (times a
    constant) makes the squared distance its negative log-likelihood; the smallest variances count
    as 1e-4 of their mean.
    """
    weights: Tensors | None = None
    if clipped:
        weights = {name: torch.ones_like(observation.gradient[name]) for name in names}
    if isinstance(observation.noise_variance, Mapping):
        variances = {name: observation.noise_variance[name] for name in names}
        variance = {
            n: v.to(torch.promote_types(v.dtype, torch.float32)) for n, v in variances.items()
        }
        mean = sum(float(v.sum()) for v in variance.values()) / sum(
            v.numel() for v in variance.values()
        )
        weights = {name: (mean / v.clamp_min(1e-4 * mean)).sqrt() for name, v in variance.items()}
    if match_nonzero:
        is_shared = {
            name: (observation.gradient[name] != 0).to(observation.gradient[name].dtype)
            for name in names
        }
        weights = (
            is_shared
            if weights is None
            else {name: weights[name] * is_shared[name] for name in names}
        )
    return weights


def _up_to(candidate: Tensor, shared: Tensor, bound: Tensor) -> Tensor:
    """The candidate, but no further than the bound where the shared one is at it: what is beyond
    was clipped away.
    """
    sign = shared.sign()
    return torch.where(
        (shared.abs() - bound).abs() <= 1e-5 * bound,
        torch.minimum(candidate * sign, bound) * sign,
        candidate,
    )
