"""Gradient matching: find the input whose gradient is the one that was shared.

    x̂ = argmin dist(g(x̂), shared) + priors(x̂)

One loop for all of it. What differs between the published attacks (distance, priors, optimizer,
schedule) is in the settings of their classes in `images.py` and `text.py`.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ...gradient_map import GradientMap, Tensors
from ...randomness import private_generator
from ..base import Attack, Reconstruction, texts
from ..labels import recover_labels
from ..observation import Observation, without_dropout
from .lockstep import in_lockstep
from .objectives import Candidate, Objective, inverse_norm
from .priors import squared_norm, total_variation
from .vocabulary import Vocabulary

Slopes = tuple[Tensor, Tensor, Tensors]
"""Distances of candidates `(K,)`, their derivatives by the candidates, and by their labels."""
Descent = tuple[Tensor, Tensor, Tensor, Tensor]
"""The best candidates `(K, ...)`, their objectives `(K,)`, their labels, and the objectives on the
way `(K, steps)`.
"""


@dataclass
class GradientMatching(Attack):
    """Base of the attacks that descend on the distance between gradients. Subclasses say which
    distance and priors.

    Args:
        steps: Iterations. One costs a plain gradient, and its derivative by the input: 7/3 plain
            gradients in matrix products.
        learning_rate: Peak rate of the optimizer, in the input's unit.
        optimizer: `"adam"`, `"adamw"` or `"lbfgs"`. L-BFGS takes up to 20 evaluations a step.
        schedule: `"constant"`, `"linear"` (down to 0, after `warmup` steps up), or `"steps"` (a
            tenth at 3/8, 5/8 and 7/8).
        warmup: Steps over which a linear schedule rises.
        signed: Follow the sign of the input's gradient.
        start: `"normal"`, `"uniform"` (images), `"tokens"` (embeddings of random tokens), or a
            tensor in the input's shape: an attacker's own guess, such as robust data.
        restarts: Starts from which to descend; the best match is returned. They are evaluated in
            one vectorized pass.
        total_variation: Weight of that prior on images.
        squared_norm: Weight of that prior.
        match_nonzero: Match only where the shared gradient is not zero: against pruning.
        leave_out: Parts of parameter names to leave out of the matching: against defenses of single
            layers.
        clip_norm: Clip candidates' gradients to this norm, as the defense does: against clipping by
            norm.
        clip_coordinate: Coordinates that were shared at ± this bound match whatever lies beyond it:
            against clipping of coordinates that get no noise.
        tolerance: Stop when the objective falls to it.
        patience: Stop after so many steps without a new best.
        time_budget: Stop after so many seconds.
        progress: Show a bar.
    """

    steps: int = 1000
    learning_rate: float = 0.1
    optimizer: str = "adam"
    schedule: str = "constant"
    warmup: int = 0
    signed: bool = False
    start: Any = "normal"
    restarts: int = 1
    total_variation: float = 0.0
    squared_norm: float = 0.0
    match_nonzero: bool = False
    leave_out: Sequence[str] = ()
    clip_norm: float | None = None
    clip_coordinate: float | None = None
    tolerance: float = 0.0
    patience: int | None = None
    time_budget: float | None = None
    progress: bool = False

    def __post_init__(self) -> None:
        for name, known in (("optimizer", _OPTIMIZERS), ("schedule", _SCHEDULES)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(known)}, but is {getattr(self, name)!r}."
                )
        if not isinstance(self.start, Tensor) and self.start not in _STARTS:
            raise ValueError(
                f"start must be one of {', '.join(_STARTS)} or a tensor, but is {self.start!r}."
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

    def objective(self) -> Objective:
        """The distance between gradients. Implemented by subclasses."""
        raise NotImplementedError

    def penalty(self, problem: Problem, x: Tensor) -> Tensor | float:
        """The priors' penalty of candidates `(K, B, ...)`: `(K,)`."""
        value: Tensor | float = 0.0
        if self.total_variation and not problem.vocabulary:
            value = value + self.total_variation * total_variation(x)
        if self.squared_norm:
            value = value + self.squared_norm * squared_norm(x)
        return value

    def between_steps(
        self, problem: Problem, step: int, x: Tensor, first: int, generator: torch.Generator
    ) -> None:
        """What happens to candidates after a step, in place: to those from number `first` on."""

    def reconstruct(self, seen: Observation, generator: torch.Generator) -> Reconstruction:
        return self.together([seen], generator)[0]

    def together(
        self, observations: Sequence[Observation], generator: torch.Generator | None = None
    ) -> list[Reconstruction]:
        """Attack several observations at once, each by itself: faster than one after the other.

        Args:
            observations: All of one model, one input shape and one attention mask, with gradients
                of the same parameters.
            generator: Source of all randomness.

        Raises:
            ValueError: If they differ in those, or this attack cannot work on them.
        """
        generator = generator or private_generator(observations[0].device)
        started = time.perf_counter()
        with without_dropout(observations[0].model):
            problem = Problem(observations, self)
            x = problem.start(self.start, generator)
            if self.optimizer == "lbfgs":  # whose line search is each candidate's own
                runs = self._descend_apart(problem, x, generator, started)
            else:
                runs = [self._descend(problem, problem.slopes, x, slice(None), generator, started)]
        best_x, best_value, best_labels = (
            torch.cat(parts) for parts in zip(*(run[:3] for run in runs), strict=True)
        )
        problem.project_(best_x)
        seconds = time.perf_counter() - started
        results = []
        for number, seen in enumerate(observations):
            at = number * self.restarts + int(
                best_value[number * self.restarts :][: self.restarts].argmin()
            )
            found, labels = best_x[at], best_labels[at]
            ids = problem.decode(found)
            results.append(
                Reconstruction(
                    input=found,
                    token_ids=ids,
                    text=None if ids is None else texts(ids, seen.tokenizer),
                    labels=labels.argmax(-1) if problem.soft else labels,
                    objective=float(best_value[at]),
                    seconds=seconds,
                    history=runs[0 if len(runs) == 1 else at][3][
                        0 if len(runs) > 1 else at
                    ].tolist(),
                )
            )
        return results

    def _descend_apart(
        self, problem: Problem, x: Tensor, generator: torch.Generator, started: float
    ) -> list[Descent]:
        """Each candidate by an optimizer of its own, all of them evaluated together."""
        vectorized = True

        def run(
            k: int, own: torch.Generator, ask: Callable[[tuple[Tensor, Tensor]], Slopes]
        ) -> Descent:
            def slopes_at(x: Tensor, labels: Tensor, rows: slice) -> Slopes:
                return ask((x.detach(), labels.detach()))

            return self._descend(problem, slopes_at, x, slice(k, k + 1), own, started)

        def evaluate(numbers: list[int], asked: list[tuple[Tensor, Tensor]]) -> list[Slopes]:
            nonlocal vectorized
            if vectorized and len(numbers) > 1:
                rows = (
                    slice(None)
                    if len(numbers) == len(x)
                    else torch.tensor(numbers, device=x.device)
                )
                try:
                    xs, labels = (torch.cat(parts) for parts in zip(*asked, strict=True))
                    found = problem.slopes(xs, labels, rows)
                # a model that cannot run so, or no memory for it: the same numbers, in more time
                except RuntimeError:
                    vectorized = False
                else:
                    return [_row(found, i) for i in range(len(numbers))]
            return [
                problem.slopes(*one, slice(k, k + 1)) for k, one in zip(numbers, asked, strict=True)
            ]

        seeds = torch.randint(
            2**62, (len(x),), generator=generator, device=generator.device
        ).tolist()
        owns = [torch.Generator(device=generator.device).manual_seed(seed) for seed in seeds]
        return in_lockstep([functools.partial(run, k, own) for k, own in enumerate(owns)], evaluate)

    def _descend(
        self,
        problem: Problem,
        slopes_at: Callable[[Tensor, Tensor, slice], Slopes],
        x: Tensor,
        rows: slice,
        generator: torch.Generator,
        started: float,
    ) -> Descent:
        """From the candidates `rows` of `x` on, following `slopes_at`."""
        first = rows.start or 0
        x, labels = x[rows].clone(), problem.labels[rows].clone()
        leaves = [x, labels] if problem.soft else [x]
        optimizer = _OPTIMIZERS[self.optimizer](leaves, self.learning_rate)
        rate = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: _SCHEDULES[self.schedule](self, step)
        )
        best = [
            x.clone(),
            torch.full((len(x),), math.inf, device=x.device, dtype=x.dtype),
            labels.clone(),
        ]
        history: list[Tensor] = []

        def evaluate() -> float:
            values, slopes, others = slopes_at(x, labels, rows)
            penalty = self.penalty(problem, at := x.detach().requires_grad_())
            if isinstance(penalty, Tensor):
                values = values + penalty.detach()
                slopes = slopes + torch.autograd.grad(penalty.sum(), at)[0]
            better = values < best[1]
            for kept, new in zip(best, (x, values, labels), strict=True):
                kept.copy_(torch.where(better.view(-1, *[1] * (kept.dim() - 1)), new, kept))
            x.grad = (slopes.sign() if self.signed else slopes) * problem.free
            if problem.soft:
                labels.grad = others["labels"]
            history.append(values)
            return float(values.sum())

        least, since = math.inf, 0
        bar = logging.tqdm(
            range(self.steps), desc=self.name, disable=not self.progress or first > 0
        )
        for step in bar:
            optimizer.step(evaluate)
            rate.step()
            problem.project_(x)
            self.between_steps(problem, step, x, first, generator)
            if step % 20 == 0:
                bar.set_postfix(objective=f"{float(best[1].min()):.4g}")
            now = float(best[1].sum())
            least, since = (now, 0) if now < least else (least, since + 1)
            if float(best[1].max()) <= self.tolerance or not torch.isfinite(x).all():
                break
            if self.patience is not None and since >= self.patience:
                break
            if self.time_budget is not None and time.perf_counter() - started > self.time_budget:
                break
        bar.close()
        return best[0], best[1], best[2], torch.stack(history, 1)


def _row(found: Slopes, i: int) -> Slopes:
    values, slopes, others = found
    return (
        values[i : i + 1],
        slopes[i : i + 1],
        {name: other[i : i + 1] for name, other in others.items()},
    )


class Problem:
    """Observations to be matched, with the map that evaluates candidates for them: K = observations
    × restarts.

    Raises:
        ValueError: If the observations do not belong together, or the attack cannot work on them.
    """

    def __init__(self, observations: Sequence[Observation], attack: GradientMatching) -> None:
        first = observations[0]
        self.seen = first
        for other in observations[1:]:
            if (
                other.model is not first.model
                or other.input_shape != first.input_shape
                or not torch.equal(other.tokens, first.tokens)
                or other.gradient.keys() != first.gradient.keys()
            ):
                raise ValueError(
                    "Observations that are attacked together must be of one model, input shape and "
                    "attention mask, with gradients of the same parameters. Attack the others by "
                    "themselves."
                )
        # Labels that are neither known nor read off the gradient are optimized as logits, as DLG
        # does.
        self.soft = first.labels is None and getattr(attack, "optimize_labels", False)
        labels = [self._labels(seen) for seen in observations]
        self.labels = torch.stack(labels).repeat_interleave(attack.restarts, 0)
        self.gmap: GradientMap = first.gradient_map(
            self.labels[0], loss_fn=soft_label_loss if self.soft else None
        )
        self.objective = attack.objective()
        self.clip_norm, self.clip_coordinate = attack.clip_norm, attack.clip_coordinate
        self.shared = [name for name in self.gmap.parameters if name in first.gradient]
        self.names = [
            name for name in self.shared if not any(part in name for part in attack.leave_out)
        ]
        if not self.names:
            raise ValueError(
                "No gradient is left to match: what was shared is the token embeddings' alone "
                "(embedding_rows reads those), or leave_out names all of it."
            )
        weights = [_weights(attack, seen, self.names) for seen in observations]
        self.weighted = any(own is not None for own in weights)
        each = []
        for seen, own in zip(observations, weights, strict=True):
            shared = {name: seen.gradient[name] for name in self.names}
            if self.weighted:
                own = own or {name: torch.ones_like(tensor) for name, tensor in shared.items()}
                shared = {name: tensor * own[name] for name, tensor in shared.items()}
                shared |= {f"weight {name}": tensor for name, tensor in own.items()}
            each.append(shared)
        self.extras: Tensors = {
            name: torch.stack([shared[name] for shared in each]).repeat_interleave(
                attack.restarts, 0
            )
            for name in each[0]
        }
        self.vocabulary = Vocabulary(first) if first.is_text else None
        if self.vocabulary is None:
            self.free = torch.ones((), dtype=torch.bool, device=first.device)
            mean = torch.tensor(list(first.image_mean or [0.0]), device=first.device).view(
                1, -1, 1, 1
            )
            std = torch.tensor(list(first.image_std or [1.0]), device=first.device).view(
                1, -1, 1, 1
            )
            self.low, self.high = (0 - mean) / std, (1 - mean) / std
        else:
            self.free = (self.vocabulary.known < 0)[..., None]
            if not self.free.any():
                raise ValueError(
                    "Every token of this shape is special or padding: there is nothing to "
                    "reconstruct."
                )

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

    def start(self, start: Any, generator: torch.Generator) -> Tensor:
        """The first candidates, `(K, *input.shape)`."""
        shape = (len(self.labels), *self.gmap.input.shape)
        like = self.gmap.input
        if isinstance(start, Tensor):
            if start.shape != like.shape:
                raise ValueError(
                    f"start has shape {tuple(start.shape)}, the input {tuple(like.shape)}."
                )
            x = start.to(like).expand(shape).clone()
        elif self.vocabulary is not None:
            if start == "uniform":
                raise ValueError(
                    "A text has no range to start uniformly in. Take start='normal' or 'tokens'."
                )
            if start == "tokens":
                x = self.vocabulary.embed(self.vocabulary.random(shape[:-1], generator)).to(like)
            else:
                scale = self.vocabulary.matrix[self.vocabulary.candidates].std()
                x = (
                    torch.randn(shape, generator=generator, device=like.device, dtype=like.dtype)
                    * scale
                )
        elif start == "tokens":
            raise ValueError("Images have no tokens. Take start='normal' or 'uniform'.")
        elif start == "uniform":
            x = torch.rand(shape, generator=generator, device=like.device, dtype=like.dtype)
            x = self.low + x * (self.high - self.low)
        else:
            x = torch.randn(shape, generator=generator, device=like.device, dtype=like.dtype)
        if self.vocabulary is not None:  # the placeholder has the known tokens in their places
            x = torch.where(self.free, x, like)
        return x

    def project_(self, x: Tensor) -> None:
        """Back into the pixel range."""
        if self.vocabulary is None:
            torch.minimum(torch.maximum(x, self.low.to(x.dtype)), self.high.to(x.dtype), out=x)

    def decode(self, x: Tensor) -> list[list[int]] | None:
        """Of a text, the ids at the positions that hold tokens."""
        if self.vocabulary is None:
            return None
        return [
            ids[present].tolist()
            for ids, present in zip(self.vocabulary.nearest(x), self.seen.tokens, strict=True)
        ]

    def _labels(self, seen: Observation) -> Tensor:
        if seen.labels is not None:
            return seen.labels.to(seen.device)
        if not self.soft:
            return recover_labels(seen)
        config: Any = seen.model.config
        like = next(iter(seen.gradient.values()))
        return like.new_zeros(seen.batch_size, config.num_labels)


def _weights(attack: GradientMatching, seen: Observation, names: list[str]) -> Tensors | None:
    """What an adaptive attacker multiplies gradients by; `None` for all ones.

    Zeros leave out what a pruning took. Against Gaussian noise of known variance Σ, Σ^-½ (times a
    constant) makes the squared distance its negative log-likelihood; the smallest variances count
    as 1e-4 of their mean.
    """
    weights: Tensors | None = None
    if attack.clip_coordinate is not None:
        weights = {name: torch.ones_like(seen.gradient[name]) for name in names}
    if isinstance(seen.noise_variance, Mapping):
        variance = {name: seen.noise_variance[name] for name in names}
        mean = sum(float(v.sum()) for v in variance.values()) / sum(
            v.numel() for v in variance.values()
        )
        weights = {name: (mean / v.clamp_min(1e-4 * mean)).sqrt() for name, v in variance.items()}
    if attack.match_nonzero:
        kept = {name: (seen.gradient[name] != 0).to(seen.gradient[name].dtype) for name in names}
        weights = kept if weights is None else {name: weights[name] * kept[name] for name in names}
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


def soft_label_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Cross-entropy with `labels` as logits `(B, C)` of soft labels."""
    batch = dict(batch)
    labels = batch.pop("labels").softmax(-1)
    return -(labels * model(**batch).logits.log_softmax(-1)).sum(-1).mean()


def _linear(attack: GradientMatching, step: int) -> float:
    if step < attack.warmup:
        return (step + 1) / (attack.warmup + 1)
    return max(0.0, (attack.steps - step) / max(1, attack.steps - attack.warmup))


def _in_steps(attack: GradientMatching, step: int) -> float:
    return 0.1 ** sum(step >= attack.steps * eighths / 8 for eighths in (3, 5, 7))


_SCHEDULES: dict[str, Callable[[GradientMatching, int], float]] = {
    "constant": lambda attack, step: 1.0,
    "linear": _linear,
    "steps": _in_steps,
}
_OPTIMIZERS: dict[str, Callable[[list[Tensor], float], torch.optim.Optimizer]] = {
    "adam": lambda leaves, rate: torch.optim.Adam(leaves, lr=rate),
    "adamw": lambda leaves, rate: torch.optim.AdamW(leaves, lr=rate),
    "lbfgs": lambda leaves, rate: torch.optim.LBFGS(
        leaves, lr=rate, history_size=100, line_search_fn="strong_wolfe"
    ),
}
_STARTS = ("normal", "uniform", "tokens")
