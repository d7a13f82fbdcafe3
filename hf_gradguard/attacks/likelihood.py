"""Likelihood of a message if a batch is behind it, and which of two batches it is of.

A reconstruction attack that fails may be too weak. Pairs search nothing: given two texts that
differ in one word, or images that differ in one patch, the attacker says which one a message is of.
A fair coin decides which is sent, so that a message which does not depend on the text is at chance
exactly, whatever the attacker does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from scipy.stats import binomtest
from torch import Tensor

from ..defenses.mechanism import Mechanism
from ..gradient_map import Tensors
from ..gradient_map.domain import TEXT, domain_of_batch
from ..gradient_map.vectorized import ManyGradients
from ..randomness import Stream
from .base import Observation

_DRAWS = 4  # of dropout, over which the attacker's gradients are means
_ROUNDING = 1e-4  # by which evaluations of one gradient differ, in units of its root mean square
PATCHES = 4
"""Patches along each side of an image."""


def mechanism_of(observation: Observation) -> Mechanism | None:
    """Return a message's mechanism as it was granted; `noise_variance` alone means Gaussian noise.

    Example:
        >>> from dataclasses import replace
        >>> mechanism_of(replace(seen, noise_variance=0.5)).variance, mechanism_of(seen)
        (0.5, None)
    """
    if (
        observation.mechanism is not None
        and observation.mechanism.fitted is not None
        and observation.local is not None
    ):
        return None  # an update is in the span of others
    if observation.mechanism is None and observation.noise_variance is not None:
        return Mechanism(noise="gaussian", variance=observation.noise_variance)
    return observation.mechanism


class Likelihood:
    """The function log p(message | candidate) of K candidates, up to a common constant.

    If the mechanism says that entries are exact, or in a cell, those that are not count by their
    distance in units of what evaluations differ in by rounding.

    Args:
        mechanism: How the message was made.
        message: The shared message.
        floor: The variance of that rounding, or of draws that the attacker does not know, by
            parameter.

    Example:
        >>> mechanism = Mechanism(noise="gaussian", variance=0.5)
        >>> likelihood = Likelihood(mechanism, {"w": torch.tensor([1.0])}, {"w": 0.0})
        >>> likelihood({"w": torch.tensor([[0.0], [1.0]])}).tolist()
        [-1.0, 0.0]
    """

    def __init__(self, mechanism: Mechanism, message: Tensors, floor: Mapping[str, float]) -> None:
        self.mechanism, self.message, self.floor = mechanism, message, floor
        keeps_all = mechanism.selection == "all"
        self._is_kept = None if keeps_all else {n: y != 0 for n, y in message.items()}
        self._least = math.inf
        if mechanism.selection == "largest":
            smallest_kept = [y[y != 0].abs().min() for y in message.values() if y.any()]
            self._least = float(torch.stack(smallest_kept).min())
        self._noisy = sum(self._noisy_entries(name, y) for name, y in message.items())

    def _noisy_entries(self, name: str, y: Tensor) -> int:
        is_noisy = torch.as_tensor(self.mechanism.variance_of(name), device=y.device) > 0
        is_kept = torch.ones_like(y) if self._is_kept is None else self._is_kept[name]
        return int((is_noisy & is_kept.bool()).sum())

    def __call__(self, gradient: Mapping[str, Tensor]) -> Tensor:
        """Return the log-likelihood of gradients `(K, *parameter.shape)`, `(K,)` in float64."""
        gradient = self._as_sent(gradient)
        count = len(next(iter(gradient.values())))
        device = next(iter(gradient.values())).device
        total = torch.zeros(count, dtype=torch.float64, device=device)
        growth = self._growth_of_noise(gradient)
        if growth is not None:
            total -= self._noisy / 2 * growth.log()
        threshold = self._threshold(gradient) if self.mechanism.selection == "largest" else None
        for name, y in self.message.items():
            shape = (count, *[1] * y.dim())
            limit = None if threshold is None else threshold.view(shape)
            factor = 1.0 if growth is None else growth.to(y).view(shape)
            total += self._of_parameter(name, y, gradient[name], limit, factor)
        return total

    def _growth_of_noise(self, gradient: Mapping[str, Tensor]) -> Tensor | None:
        """Return by which factor the variance would be another behind each candidate, `(K,)`.

        It is `None` unless the noise follows the gradient's own strength.
        """
        if self.mechanism.relative_to is None:
            return None
        kept = gradient
        if self._is_kept is not None:
            kept = {name: g * self._is_kept[name] for name, g in gradient.items()}
        powers = torch.stack([_sum(g.square()) for g in kept.values()]).sum(0)
        return (powers / self.mechanism.relative_to).clamp(min=1e-12)

    def _as_sent(self, gradient: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if (bound := self.mechanism.clip_coordinate) is not None:
            gradient = {n: g.clamp(-bound, bound) for n, g in gradient.items()}
        if self.mechanism.clip_norm is not None:
            gradient = clipped(gradient, self.mechanism.clip_norm)
        if self.mechanism.scale != 1:
            gradient = {n: g * self.mechanism.scale for n, g in gradient.items()}
        return gradient

    def _of_parameter(
        self, name: str, y: Tensor, g: Tensor, threshold: Tensor | None, growth: Tensor | float
    ) -> Tensor:
        mechanism, floor = self.mechanism, self.floor[name]
        if mechanism.noise is None and mechanism.rounding is not None:
            return self._rounded(y, g, floor)
        if mechanism.rounding is not None:  # noise on what was rounded
            g = _quantized(g, mechanism)
        variance = mechanism.variance_of(name) * growth + floor
        if mechanism.noise == "laplace":
            scale = torch.as_tensor(variance, device=y.device).div(2).sqrt()
            misfit = (y - g).abs().div_(scale)
        else:
            misfit = (y - g).square_().div_(2 * variance)
        if self._is_kept is not None:
            is_kept = self._is_kept[name]
            misfit = misfit.masked_fill_(~is_kept, 0)
            if threshold is not None:
                size = g.abs()
                excess = torch.where(is_kept, threshold - size, size - threshold)
                misfit = misfit.add_(excess.clamp_(min=0).square_().div_(2 * floor))
        return -_sum(misfit)

    def _threshold(self, gradient: Mapping[str, Tensor]) -> Tensor:
        """Return the least |g| that is kept, `(K,)`.

        It is the message's own, or a candidate's where noise hides that.
        """
        assert self._is_kept is not None
        sizes = next(iter(gradient.values()))
        if self.mechanism.noise is None:
            return sizes.new_full((len(sizes),), self._least)
        flat = torch.cat([g.flatten(1).abs() for g in gradient.values()], 1)
        kept_count = sum(int(mask.sum()) for mask in self._is_kept.values())
        return flat.kthvalue(flat.shape[1] - kept_count + 1, dim=1).values

    def _rounded(self, y: Tensor, g: Tensor, floor: float) -> Tensor:
        """Return the log-likelihood that a candidate's entries are in the message's cells."""
        if self.mechanism.rounding == "sign":
            size = g.abs()
            wrong = size.masked_fill(g.sign() == y.sign(), 0)
            mean = size.flatten(1).mean(1) - y.abs().max()
            return -(_sum(wrong.square()) + mean.double().square()) / (2 * floor)
        assert self.mechanism.levels is not None
        step = (y.max() - y.min()) / (self.mechanism.levels - 1)
        away = (y - g).abs()
        if self.mechanism.rounding == "nearest":
            return -_sum((away - step / 2).clamp_(min=0).square_()) / (2 * floor)
        outside_cell = _sum((away - step).clamp_(min=0).square_()) / (2 * floor)
        if not step:
            return -outside_cell
        return _sum((1 - away / step).clamp_(min=1e-6).log_()) - outside_cell


def clipped(gradient: Mapping[str, Tensor], norm: float) -> Tensors:
    """Scale each of K gradients `(K, *parameter.shape)` down to this norm if it is longer."""
    squares = [g.flatten(1).double().square().sum(1) for g in gradient.values()]
    scale = (norm / torch.stack(squares).sum(0).sqrt()).clamp(max=1)
    return {name: scaled(g, scale) for name, g in gradient.items()}


def scaled(gradient: Tensor, by: Tensor) -> Tensor:
    """Multiply each of the K entries of `(K, *shape)` by its number."""
    return gradient * by.to(gradient).view(-1, *[1] * (gradient.dim() - 1))


def _quantized(g: Tensor, mechanism: Mechanism) -> Tensor:
    """Return several gradients, each rounded as a client would."""
    flat = g.flatten(1)
    if mechanism.rounding == "sign":
        return g.sign() * flat.abs().mean(1).view(-1, *[1] * (g.dim() - 1))
    if mechanism.rounding == "stochastic":
        return g  # whose mean it is
    assert mechanism.levels is not None
    low, high = flat.min(1).values, flat.max(1).values
    step = (high - low) / (mechanism.levels - 1)
    low, step = (column.view(-1, *[1] * (g.dim() - 1)) for column in (low, step))
    return low + ((g - low) / step.clamp(min=1e-38)).round() * step


def _sum(tensor: Tensor) -> Tensor:
    return tensor.flatten(1).sum(1, dtype=torch.float64)


# --- pairs


@dataclass(frozen=True)
class Distinguishability:
    """The rate at which messages reveal which of two texts that differ in one word they are of.

    Args:
        correct: The number of pairs for which the attacker's answer was correct; a tie counts half.
        pairs: The number of pairs, each with a message of its own.
        relative_change: ‖g - g'‖/‖g‖ of a pair's gradients, the median.
        direction_ratio: √d ‖g‖/‖message - g‖, the median: by how much a gradient stands out of
            noise of that size, along its own direction. Noise leaves about `direction_ratio` times
            `relative_change` standard deviations between both texts.

    Example:
        >>> found = Distinguishability(9.0, 10, 0.25, 160.0)
        >>> found.rate, [round(end, 2) for end in found.interval], found.is_at_chance
        (0.9, [0.55, 1.0], False)
    """

    correct: float
    pairs: int
    relative_change: float
    direction_ratio: float

    @property
    def rate(self) -> float:
        """The fraction of pairs for which the answer is correct; 0.5 is chance, 1 is all."""
        return self.correct / self.pairs

    @property
    def interval(self) -> tuple[float, float]:
        """The exact interval of `rate` at 95 % (Clopper and Pearson).

        Pairs have messages and coins of their own. Ties are rounded toward chance.
        """
        whole = int(self.correct) if 2 * self.correct >= self.pairs else -int(-self.correct // 1)
        ends = binomtest(whole, self.pairs).proportion_ci(0.95, method="exact")
        return float(ends.low), float(ends.high)

    @property
    def is_at_chance(self) -> bool:
        """Whether the interval reaches down to 0.5.

        Only then may a word be called hidden, and only as far as this many pairs show it.
        """
        return self.interval[0] <= 0.5


@dataclass(frozen=True)
class Pair:
    """The outcome of one pair.

    Args:
        correct: 1 if the likelier text was the true one, 0.5 if both were equally likely.
        relative_change: ‖g - g'‖/‖g‖.
        direction_ratio: √d ‖g‖/‖message - g‖; infinite where nothing was changed.
    """

    correct: float
    relative_change: float
    direction_ratio: float


def summarize_pairs(pairs: Sequence[Pair]) -> Distinguishability:
    """Return the summary of all pairs.

    Example:
        >>> summarize_pairs([Pair(1.0, 0.25, 10.0), Pair(0.5, 0.75, 20.0)])
        Distinguishability(correct=1.5, pairs=2, relative_change=0.5, direction_ratio=15.0)
    """
    return Distinguishability(
        sum(pair.correct for pair in pairs), len(pairs),
        median(pair.relative_change for pair in pairs),
        median(pair.direction_ratio for pair in pairs),
    )  # fmt: skip


def distinguish(
    batch: dict[str, Any],
    tokenizer: Any,
    send: Callable[[dict[str, Any]], Observation],
    pairs: int,
    stream: Stream,
) -> list[Pair]:
    """Return outcomes of pairs: a batch, and the same with one word, or one patch, changed.

    Args:
        batch: The batch that a client has.
        tokenizer: The tokenizer, which knows special tokens. `None` for images.
        send: A function that returns what the server sees of a batch.
        pairs: The number of pairs.
        stream: The source of changes and coins.
    """
    outcomes: list[Pair] = []
    of_batch: dict[float | None, tuple[Tensors, dict[str, float]]] = {}  # the same for all pairs
    for _ in range(pairs):
        both = [batch, change(batch, tokenizer, stream)]
        true = int(stream.integers(2, (1,))[0])  # the coin
        observation = send(both[true])
        mechanism = mechanism_of(observation)
        clip = None if mechanism is None else mechanism.clip_sample
        if clip not in of_batch:
            of_batch[clip] = _gradient(observation, batch, clip)
        gradients = of_batch[clip], _gradient(observation, both[1], clip)
        outcomes.append(_choose(observation, gradients[true], gradients[1 - true][0]))
    return outcomes


def change(batch: dict[str, Any], tokenizer: Any, stream: Stream) -> dict[str, Any]:
    """Return the batch with one word of one text, or one patch of one image, replaced.

    A word is replaced by another of the vocabulary, a patch by another of the same image.

    Raises:
        ValueError: If there is no word to replace.

    Example:
        >>> changed = change(batch, tokenizer, Stream.from_seeds(0))
        >>> int((changed["input_ids"] != batch["input_ids"]).sum())
        1
    """
    domain = domain_of_batch(batch)
    main = batch[domain.key]
    row = int(stream.integers(len(main), (1,))[0])
    changed = main.clone()
    if domain is not TEXT:
        return {**batch, domain.key: _move_patch(main, row, stream)}
    special = torch.tensor(tokenizer.all_special_ids, device=main.device)
    is_word = ~torch.isin(main[row], special)
    if "attention_mask" in batch:
        is_word &= batch["attention_mask"][row].bool()
    places = is_word.nonzero().flatten().tolist()
    if not places:
        raise ValueError("A text has no word that could be changed.")
    place = places[int(stream.integers(len(places), (1,))[0])]
    word = int(main[row, place])
    while word == int(main[row, place]) or word in tokenizer.all_special_ids:
        word = int(stream.integers(len(tokenizer), (1,))[0])
    changed[row, place] = word
    labels = batch.get("labels")
    if labels is not None and labels.shape == main.shape and labels[row, place] == main[row, place]:
        labels = labels.clone()  # a language model's labels are the words themselves
        labels[row, place] = word
        return {**batch, domain.key: changed, "labels": labels}
    return {**batch, domain.key: changed}


def _move_patch(images: Tensor, row: int, stream: Stream) -> Tensor:
    """Return images of which one has a patch in the place of another one."""
    changed = images.clone()
    sides = [(side, max(1, side // PATCHES)) for side in images.shape[-2:]]
    for _ in range(20):  # patches of a plain background are alike
        rows, columns = (
            [int(start) for start in stream.integers(side - patch + 1, (2,))]
            for side, patch in sides
        )
        to, source = (
            tuple(slice(start[end], start[end] + patch)
                  for start, (_, patch) in zip((rows, columns), sides, strict=True))
            for end in (0, 1)
        )  # fmt: skip
        changed[row, :, to[0], to[1]] = images[row, :, source[0], source[1]]
        if not torch.equal(changed, images):
            break
    return changed


def _choose(
    observation: Observation, true: tuple[Tensors, dict[str, float]], other_gradient: Tensors
) -> Pair:
    """Return whether the message is likelier for the batch that was sent than for the other.

    Args:
        observation: What the server sees.
        true: `_gradient` of the batch that was sent.
        other_gradient: The gradient of the other batch.
    """
    message, mechanism = observation.gradient, mechanism_of(observation)
    gradient, spread = true
    if mechanism is None or mechanism.fitted is not None or mechanism.has_residual:
        score, other_score = (_cosines(message, g) for g in (gradient, other_gradient))
    else:
        both = {name: torch.stack([gradient[name], other_gradient[name]]) for name in message}
        floor = {name: value + _floor(observation) for name, value in spread.items()}
        score, other_score = Likelihood(mechanism, dict(message), floor)(both).tolist()
    entries, size = sum(g.numel() for g in gradient.values()), max(_norm(gradient), 1e-38)
    added = _norm({name: message[name] - g for name, g in gradient.items()}) / size
    return Pair(
        correct=0.5 if score == other_score else float(score > other_score),
        relative_change=_norm({n: g - other_gradient[n] for n, g in gradient.items()}) / size,
        direction_ratio=entries**0.5 / added if added > _ROUNDING else math.inf,
    )


def _gradient(
    observation: Observation, batch: dict[str, Any], clip: float | None
) -> tuple[Tensors, dict[str, float]]:
    """Return a batch's gradient, or the mean of its samples' if each is clipped.

    If the model drops out at random, it is the mean over draws of the attacker's own. The second
    value is by how much these vary.
    """
    model, names, rows = observation.model, list(observation.gradient), [batch]
    if clip is not None:
        count = len(batch[domain_of_batch(batch).key])
        rows = [{key: value[k : k + 1] for key, value in batch.items()} for k in range(count)]
    draws = []
    for seed in range(_DRAWS if model.training else 1):
        if observation.local is not None:
            many = observation.local.many_gradients(model, names, [seed])
        else:
            many = ManyGradients(model, names, [seed], vectorized=False)
        found = [gradient for _, gradient in many(rows)]
        gradients = {name: torch.cat([gradient[name] for gradient in found]) for name in names}
        gradients = gradients if clip is None else clipped(gradients, clip)
        draws.append({name: g.mean(0) for name, g in gradients.items()})
    if len(draws) == 1:
        return draws[0], dict.fromkeys(names, 0.0)
    stacked_draws = {name: torch.stack([draw[name] for draw in draws]) for name in names}
    mean = {name: stack.mean(0) for name, stack in stacked_draws.items()}
    # The client's own draw varies as well as the mean over the attacker's.
    growth = 1 + 1 / len(draws)
    return mean, {name: growth * float(s.var(0).mean()) for name, s in stacked_draws.items()}


def _floor(observation: Observation) -> float:
    """Return the variance by which evaluations of one gradient differ, per entry."""
    entries = sum(y.numel() for y in observation.gradient.values())
    return _ROUNDING**2 * _norm(observation.gradient) ** 2 / entries + 1e-38


def _cosines(message: Mapping[str, Tensor], gradient: Tensors) -> float:
    """Return the sum over tensors of the cosine in the entries that were shared."""
    total = 0.0
    for name, y in message.items():
        g = gradient[name] * (y != 0)
        size = float(y.double().norm() * g.double().norm())
        total += float((y.double() * g).sum()) / size if size > 0 else 0.0
    return total


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return sum(float(t.double().square().sum()) for t in tensors.values()) ** 0.5
