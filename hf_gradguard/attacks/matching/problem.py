"""Settings of gradient matching, and the problem that it descends on.

The problem has the observations, and what an attacker that knows the defense does to gradients
before they are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...gradient_map import GradientMap, Tensors
from ..base import Observation
from ..label_recovery import check_classes, recover_labels
from .objectives import Candidate, Objective, inverse_norm, squared_norm
from .space import SPACES, STARTS, DeepPrior, SearchSpace

Slopes = tuple[Tensor, Tensor, Tensors]
"""The distances of candidates `(K,)`, their derivatives by the candidates, and by their labels."""


OPTIMIZERS: dict[str, Callable[[list[Tensor], float], torch.optim.Optimizer]] = {
    "adam": lambda leaves, rate: torch.optim.Adam(leaves, lr=rate),
    "adamw": lambda leaves, rate: torch.optim.AdamW(leaves, lr=rate),
    "lbfgs": lambda leaves, rate: torch.optim.LBFGS(
        leaves, lr=rate, history_size=100, line_search_fn="strong_wolfe"
    ),
}


def _linear(step: int, steps: int, warmup: int) -> float:
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return max(0.0, (steps - step) / max(1, steps - warmup))


def _in_steps(step: int, steps: int, warmup: int) -> float:
    return 0.1 ** sum(step >= steps * eighths / 8 for eighths in (3, 5, 7))


SCHEDULES: dict[str, Callable[[int, int, int], float]] = {
    "constant": lambda step, steps, warmup: 1.0,
    "linear": _linear,
    "steps": _in_steps,
}


@dataclass
class MatchingSettings:
    """The settings of gradient matching, to which subclasses add a distance, priors, and moves.

    Args:
        steps: Iterations. One costs a plain gradient, and its derivative by the input: 7/3 plain
            gradients in matrix products.
        learning_rate: The peak rate of the optimizer, in the input's unit.
        optimizer: `"adam"`, `"adamw"` or `"lbfgs"`. L-BFGS takes up to 20 evaluations a step.
        schedule: `"constant"`, `"linear"` (down to 0, after `warmup` steps up), or `"steps"` (a
            tenth at 3/8, 5/8 and 7/8).
        warmup: Steps over which a linear schedule rises.
        signed: Follow the sign of the input's gradient.
        start: `"normal"`, `"uniform"` (images), `"tokens"` (embeddings of random tokens), or a
            tensor in the input's shape: an attacker's own guess, such as robust data. `None`:
            uniform on images, normal on texts.
        prior: `"deep"`: an image is what an untrained convolutional network draws, whose weights
            are descended on in place of its pixels, at the same rate; it starts from random
            weights. `steps` says how strong a prior it is: noise is fitted last. `None` for none.
        restarts: Starts from which to descend; the best match is returned. They are evaluated in
            one vectorized pass.
        total_variation: The weight of total variation on images.
        squared_norm: The weight of the squared norm.
        match_nonzero: Match only where the shared gradient is not zero: against pruning.
        leave_out: Parts of parameter names to leave out of the matching: against defenses of single
            layers.
        clip_norm: Clip candidates' gradients to this norm, as the defense does: against clipping by
            norm.
        clip_coordinate: The bound at which shared coordinates match whatever lies beyond it:
            against clipping of coordinates that get no noise.
        tolerance: Stop when the objective falls to it.
        patience: Stop after this many steps without a new best.
        seconds: Stop after this many seconds.
        progress: Show a bar.

    Raises:
        ValueError: If a setting is out of range; the message has the range.

    Example:
        >>> MatchingSettings(steps=10, schedule="linear", warmup=4).rate(0)
        0.2
    """

    name: ClassVar[str]
    optimize_labels: ClassVar[bool] = False
    steps: int = 1000
    learning_rate: float = 0.1
    optimizer: str = "adam"
    schedule: str = "constant"
    warmup: int = 0
    signed: bool = False
    start: Any = "normal"
    prior: str | None = None
    restarts: int = 1
    total_variation: float = 0.0
    squared_norm: float = 0.0
    match_nonzero: bool = False
    leave_out: Sequence[str] = ()
    clip_norm: float | None = None
    clip_coordinate: float | None = None
    tolerance: float = 0.0
    patience: int | None = None
    seconds: float | None = None
    progress: bool = False

    def __post_init__(self) -> None:
        for name, choices in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES)):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} must be one of {', '.join(choices)}, but is {getattr(self, name)!r}."
                )
        if not isinstance(self.start, Tensor) and self.start not in (None, *STARTS):
            raise ValueError(
                f"start must be one of {', '.join(STARTS)} or a tensor, but is {self.start!r}."
            )
        if min(self.steps, self.restarts) < 1:
            raise ValueError(
                f"steps and restarts must be at least 1, but are {self.steps} and {self.restarts}."
            )
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate must be above 0, but is {self.learning_rate}.")
        for name in ("clip_norm", "clip_coordinate"):
            if (bound := getattr(self, name)) is not None and bound <= 0:
                raise ValueError(f"{name} must be above 0, but is {bound}.")
        if self.signed and self.optimizer == "lbfgs":
            raise ValueError("L-BFGS needs the gradient and not its sign: set signed=False.")
        if isinstance(self.leave_out, str):
            raise ValueError("leave_out is a list of parts of names, not one string.")
        if self.prior is not None:
            self._check_prior()

    def _check_prior(self) -> None:
        if self.prior != "deep":
            raise ValueError(f"prior must be 'deep' or None, but is {self.prior!r}.")
        if self.optimizer != "adam":
            raise ValueError(
                "prior='deep' descends on a network's weights, of which all layers have slopes of "
                f"another size: Adam evens that out, {self.optimizer} does not. Set "
                "optimizer='adam' and a learning_rate near 0.01."
            )
        if self.signed:
            raise ValueError(
                "prior='deep' needs the image's gradient and not its sign, to go on to the "
                "weights: set signed=False."
            )
        if isinstance(self.start, Tensor):
            raise ValueError(
                "prior='deep' starts from random weights, and which ones draw a given image is "
                "unknown: leave start out, or set prior=None."
            )
        if type(self).between_steps is not MatchingSettings.between_steps:
            raise ValueError(
                f"{self.name} moves candidates between steps, and with prior='deep' a network "
                "draws them anew: set prior=None."
            )

    def objective(self) -> Objective:
        """Return the distance between gradients; subclasses implement it."""
        raise NotImplementedError

    def penalty(self, problem: Problem, x: Tensor) -> Tensor | float:
        """Return the priors' penalty of candidates `(K, B, ...)`, `(K,)`."""
        value: Tensor | float = 0.0
        if self.total_variation:
            value = value + self.total_variation * problem.space.total_variation(x)
        if self.squared_norm:
            value = value + self.squared_norm * squared_norm(x)
        return value

    def between_steps(
        self,
        problem: Problem,
        step: int,
        x: Tensor,
        offset: int,
        generator: torch.Generator,
    ) -> None:
        """Change candidates in place after a step of the search.

        Args:
            problem: The problem that is solved.
            step: The number of the step.
            x: The candidates.
            offset: The number of the first candidate.
            generator: The source of randomness.
        """

    def rate(self, step: int) -> float:
        """Return the fraction of the learning rate that the schedule gives a step."""
        return SCHEDULES[self.schedule](step, self.steps, self.warmup)


class Problem:
    """Observations to be matched, with the map that evaluates K candidates for them.

    K is the number of observations times that of restarts.

    Args:
        observations: Observations of one model, input shape and attention mask, with gradients of
            the same parameters.
        settings: The attack's settings: its objective, restarts, and what of gradients it compares.

    Attributes:
        observation: The first observation.
        soft: Whether labels are optimized.
        labels: Labels `(K, B)`, or logits `(K, B, C)` where they are optimized.
        space: The space that candidates lie in.

    Raises:
        ValueError: If the observations do not belong together, or the attack cannot work on them.

    Example:
        >>> from dataclasses import replace
        >>> from hf_gradguard.attacks import make_attack
        >>> observation = replace(observation, attention_mask=batch["attention_mask"])
        >>> problem = Problem([observation], make_attack("dlg"))
        >>> bool(problem.distance(gmap.input, 0) < 1e-9)  # the true input has that gradient
        True
    """

    def __init__(self, observations: Sequence[Observation], settings: MatchingSettings) -> None:
        _check_together(observations)
        self.observation = reference = observations[0]
        self.settings, self.objective = settings, settings.objective()
        self.soft = reference.labels is None and settings.optimize_labels
        labels = [_labels(observation, self.soft) for observation in observations]
        self.labels = torch.stack(labels).repeat_interleave(settings.restarts, 0)
        self.gmap: GradientMap = reference.gradient_map(
            self.labels[0], loss_fn=soft_label_loss if self.soft else None
        )
        self.shared = [name for name in self.gmap.parameters if name in reference.gradient]
        excluded = settings.leave_out
        self.names = [n for n in self.shared if not any(fragment in n for fragment in excluded)]
        if not self.names:
            raise ValueError(
                "No gradient is left to match: what was shared is the token embeddings' alone "
                "(embedding_rows reads those), or leave_out names all of it."
            )
        weights = [_weights(observation, self.names, settings) for observation in observations]
        self.weighted = any(tensors is not None for tensors in weights)
        targets = [
            self._compared(observation, tensors)
            for observation, tensors in zip(observations, weights, strict=True)
        ]
        stacked = {name: torch.stack([target[name] for target in targets]) for name in targets[0]}
        count = settings.restarts
        self.extras: Tensors = {n: t.repeat_interleave(count, 0) for n, t in stacked.items()}
        self.space: SearchSpace = SPACES[reference.domain.name](reference, self.gmap.input)

    def start(self, start: Any, generator: torch.Generator) -> Tensor:
        """Return the first candidates, `(K, *input.shape)`."""
        return self.space.start(start, len(self.labels), generator)

    def network(self, generator: torch.Generator) -> DeepPrior:
        """Return the prior that draws candidates `(K, *input.shape)`, each by its own network."""
        return self.space.network(len(self.labels), generator)

    def slopes(self, x: Tensor, labels: Tensor, rows: slice | Tensor) -> Slopes:
        """Return dist(g(x̂), shared) of the candidates `rows`, `(K,)`, and its derivatives.

        The derivatives are by `x` and by soft labels.
        """
        extras = {name: tensor[rows] for name, tensor in self.extras.items()}
        factored = not self.weighted
        return self.gmap.slopes_at(self._distance, x, extras, factored=factored, labels=labels)

    def distance(self, x: Tensor, candidate: int) -> Tensor:
        """Return dist(g(x̂), shared) of one x̂ `(B, ...)` for the candidate of that number."""
        gradient = self.gmap.gradient_at(x, labels=self.labels[candidate])
        extras = {name: tensor[candidate] for name, tensor in self.extras.items()}
        return self._distance(gradient, extras)

    def _compared(self, observation: Observation, weights: Tensors | None) -> Tensors:
        """Return what candidates of this observation are compared to, and by which weights.

        Tensors have the types of the model's own gradients.
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
        settings = self.settings
        if settings.clip_norm is not None:
            inverse = inverse_norm(gradient[name] for name in self.shared)
            scale = (settings.clip_norm * inverse).clamp(max=1.0)
            gradient = {name: gradient[name] * scale for name in self.names}
        if self.weighted:  # never in factors
            gradient = {name: gradient[name] * extras[f"weight {name}"] for name in self.names}
        if settings.clip_coordinate is not None:
            bound = settings.clip_coordinate
            bounds = {name: bound * extras[f"weight {name}"] for name in self.names}
            gradient = {
                name: _clip_at_bound(gradient[name], shared[name], bounds[name])  # type: ignore[arg-type]
                for name in self.names
            }
        return self.objective(gradient, shared)


def soft_label_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Return the cross-entropy with `labels` as logits `(B, C)` of soft labels.

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
    shape = observation.batch_size, config.num_labels
    return torch.zeros(shape, dtype=dtype, device=observation.device)


def _weights(
    observation: Observation, names: list[str], settings: MatchingSettings
) -> Tensors | None:
    """Return what an adaptive attacker multiplies gradients by; `None` for all ones.

    Zeros leave out what a pruning took. Against Gaussian noise of known variance Σ, Σ^-½ (times a
    constant) makes the squared distance its negative log-likelihood; the smallest variances count
    as 1e-4 of their mean.
    """
    weights: Tensors | None = None
    if settings.clip_coordinate is not None:
        weights = {name: torch.ones_like(observation.gradient[name]) for name in names}
    if isinstance(observation.noise_variance, Mapping):
        variances = {name: observation.noise_variance[name] for name in names}
        variance = {
            n: v.to(torch.promote_types(v.dtype, torch.float32)) for n, v in variances.items()
        }
        size = sum(v.numel() for v in variance.values())
        mean = sum(float(v.sum()) for v in variance.values()) / size
        weights = {name: (mean / v.clamp_min(1e-4 * mean)).sqrt() for name, v in variance.items()}
    if settings.match_nonzero:
        shared = {name: observation.gradient[name] for name in names}
        is_shared = {name: (tensor != 0).to(tensor.dtype) for name, tensor in shared.items()}
        weights = {n: m if weights is None else weights[n] * m for n, m in is_shared.items()}
    return weights


def _clip_at_bound(candidate: Tensor, shared: Tensor, bound: Tensor) -> Tensor:
    """Return the candidate, clipped at the bound where the shared gradient is at it.

    What is beyond was clipped away.
    """
    sign = shared.sign()
    at_bound = (shared.abs() - bound).abs() <= 1e-5 * bound
    return torch.where(at_bound, torch.minimum(candidate * sign, bound) * sign, candidate)
