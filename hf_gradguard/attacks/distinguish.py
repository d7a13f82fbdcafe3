"""Whether a message tells a text from the same text with one word changed, or an image from the
same image with one patch changed.

A reconstruction attack that fails may be too weak. This test searches nothing: it names both texts,
and asks which of them a message is of. A fair coin decides which, so that a message which does not
depend on the text is at chance exactly, whatever the attacker does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from scipy.stats import binomtest
from torch import Tensor, nn

from ..defenses import Defense
from ..gradient_map import GradientMap, Tensors
from ..gradient_map.domain import TEXT, domain_of_batch
from ..gradient_map.inputs import model_loss
from ..gradient_map.replay import Replay, differentiate, draws_kept, seed_draws
from ..randomness import Stream
from .base import Observation
from .candidates.likelihood import Likelihood, clipped, mechanism_of

_DRAWS = 4  # of dropout, over which the attacker's gradients are means
_ROUNDING = 1e-4  # by which evaluations of one gradient differ, in units of its root mean square
PATCHES = 4
"""Patches along each side of an image."""


@dataclass(frozen=True)
class Distinguishability:
    """Of pairs of texts that differ in one word, how often a message says which of them it is of.

    Args:
        correct: How often it did; where both are equally likely, half.
        pairs: How many there were, each with a message of its own.
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
        """The share of pairs that are told right: 0.5 is chance, 1 is all."""
        return self.correct / self.pairs

    @property
    def interval(self) -> tuple[float, float]:
        """Exact, at 95 % (Clopper and Pearson). Pairs have messages and coins of their own. Ties
        are rounded toward chance.
        """
        whole = int(self.correct) if 2 * self.correct >= self.pairs else -int(-self.correct // 1)
        ends = binomtest(whole, self.pairs).proportion_ci(0.95, method="exact")
        return float(ends.low), float(ends.high)

    @property
    def is_at_chance(self) -> bool:
        """Whether the interval reaches down to 0.5: only then may a word be called hidden, and only
        as far as so many pairs say it.
        """
        return self.interval[0] <= 0.5


def word_distinguishability(
    model: nn.Module,
    tokenizer: Any,
    texts: Sequence[str],
    labels: Sequence[int],
    defense: Defense,
    pairs: int = 8,
    *,
    batch_size: int = 1,
    generator: Stream | None = None,
) -> Distinguishability:
    """How many single-word changes of texts a message tells from the texts themselves.

    The attacker knows the defense, the labels, and both texts. It takes the one under which the
    message is likelier; where a mechanism has no likelihood, the one whose gradient is nearer, by
    the cosine of each tensor. Works for classifiers and for language models (labels are ids then).

    Args:
        model: In the mode in which clients run it.
        tokenizer: The model's.
        texts: At least one. Messages are of `batch_size` of them.
        labels: One class id per text.
        defense: What clients run.
        pairs: Per message.
        batch_size: B. The last texts are left out if they fill no message.
        generator: Of words, coins and noise. Default: a private one.

    Raises:
        ValueError: If there are fewer texts than a message has, or no word in one.

    Example:
        >>> from hf_gradguard.attacks import word_distinguishability
        >>> found = word_distinguishability(
        ...     model, tokenizer, ["a fine film"] * 4, [1] * 4, make_defense("none")
        ... )
        >>> found.rate, found.pairs
        (1.0, 32)
    """
    stream = generator or Stream()
    if len(texts) < batch_size or len(texts) != len(labels):
        raise ValueError(
            f"There are {len(texts)} texts and {len(labels)} labels for messages of {batch_size}."
        )
    outcomes = []
    for start in range(0, len(texts) - batch_size + 1, batch_size):
        chosen = slice(start, start + batch_size)
        encoded = tokenizer(list(texts[chosen]), padding=True, return_tensors="pt")
        batch = {**encoded, "labels": torch.tensor(list(labels[chosen]))}
        device = next(model.parameters()).device
        batch = {key: value.to(device) for key, value in batch.items()}

        def send(sent: dict[str, Any]) -> tuple[Observation, Mapping[str, Tensor]]:
            gmap = GradientMap(model, sent)
            message = defense(gmap, stream)
            mechanism, shape = defense.mechanism(message), tuple(sent["input_ids"].shape)
            return Observation(model, message, shape, mechanism=mechanism), gmap.gradient()

        outcomes += distinguish(batch, tokenizer, send, pairs, stream)
    return summarize_pairs(outcomes)


@dataclass(frozen=True)
class Pair:
    """What became of one pair.

    Args:
        correct: 1 if the likelier text was the true one, 0.5 if both were equally likely.
        relative_change: ‖g - g'‖/‖g‖.
        direction_ratio: √d ‖g‖/‖message - g‖; infinite where nothing was changed.
    """

    correct: float
    relative_change: float
    direction_ratio: float


def summarize_pairs(pairs: Sequence[Pair]) -> Distinguishability:
    """All pairs together.

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
    send: Callable[[dict[str, Any]], tuple[Observation, Mapping[str, Tensor]]],
    pairs: int,
    stream: Stream,
) -> list[Pair]:
    """Pairs of a batch and the same with one word, or one patch, changed.

    Args:
        batch: What a client has.
        tokenizer: Tells special tokens. `None` for images.
        send: What the server sees of a batch, and the gradient that was protected.
        pairs: How many.
        stream: Of changes and coins.
    """
    outcomes = []
    for _ in range(pairs):
        both = [batch, change(batch, tokenizer, stream)]
        true = int(stream.integers(2, (1,))[0])  # the coin
        observation, gradient = send(both[true])
        odds, distance = _log_odds(observation, both[true], both[1 - true])
        size = _norm(gradient)
        noise = _norm({name: observation.gradient[name] - g for name, g in gradient.items()})
        entries = sum(g.numel() for g in gradient.values())
        correct = 0.5 if odds == 0 else float(odds > 0)
        ratio = entries**0.5 * size / noise if noise > 1e-6 * size else float("inf")
        outcomes.append(Pair(correct, distance, ratio))
    return outcomes


def change(batch: dict[str, Any], tokenizer: Any, stream: Stream) -> dict[str, Any]:
    """The batch with one word of one text replaced by another of the vocabulary, or one patch of
    one image by another of the same image.

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
    """With a patch of one image in the place of another one of it."""
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


def _log_odds(
    observation: Observation, batch: dict[str, Any], other_batch: dict[str, Any]
) -> tuple[float, float]:
    """ln p(message | batch)/p(message | other batch), or a guess at it; and ‖g - g'‖/‖g‖."""
    names, mechanism = list(observation.gradient), mechanism_of(observation)
    clip = None if mechanism is None else mechanism.clip_sample
    (gradient, spread), (other_gradient, _) = (
        _gradient(observation, rows, clip) for rows in (batch, other_batch)
    )
    gradients = [gradient, other_gradient]
    change_of = {name: gradients[0][name] - gradients[1][name] for name in names}
    distance = _norm(change_of) / max(_norm(gradients[0]), 1e-38)
    if mechanism is None or mechanism.fitted is not None or mechanism.has_residual:
        scores = [_cosines(observation.gradient, gradient) for gradient in gradients]
        return scores[0] - scores[1], distance
    both = {name: torch.stack([gradient[name] for gradient in gradients]) for name in names}
    floor = {name: value + spread[name] for name, value in _floor(observation, names).items()}
    scores = Likelihood(mechanism, dict(observation.gradient), floor)(both).tolist()
    return scores[0] - scores[1], distance


def _gradient(
    observation: Observation, batch: dict[str, Any], clip: float | None
) -> tuple[Tensors, dict[str, float]]:
    """A batch's gradient, or the mean of its samples' where each is clipped. Where the model drops
    out at random, the mean over draws of the attacker's own; and by how much these vary.
    """
    model, names, rows = observation.model, list(observation.gradient), [batch]
    if clip is not None:
        count = len(batch[domain_of_batch(batch).key])
        rows = [{key: value[k : k + 1] for key, value in batch.items()} for k in range(count)]
    draws = []
    for seed in range(_DRAWS if model.training else 1):
        gradients = [_plain_gradient(observation, row, seed) for row in rows]
        if clip is not None:
            stacked = [{name: g[None] for name, g in gradient.items()} for gradient in gradients]
            gradients = [
                {name: g[0] for name, g in clipped(gradient, clip).items()} for gradient in stacked
            ]
        draws.append({name: torch.stack([g[name] for g in gradients]).mean(0) for name in names})
    if len(draws) == 1:
        return draws[0], dict.fromkeys(names, 0.0)
    stacked_draws = {name: torch.stack([draw[name] for draw in draws]) for name in names}
    mean = {name: stack.mean(0) for name, stack in stacked_draws.items()}
    # The client's own draw varies as well as the mean over the attacker's.
    share = 1 + 1 / len(draws)
    return mean, {name: share * float(s.var(0).mean()) for name, s in stacked_draws.items()}


def _plain_gradient(observation: Observation, batch: dict[str, Any], seed: int) -> Tensors:
    """A batch's own, with the draws of a seed."""
    model, names = observation.model, list(observation.gradient)
    if observation.local is not None:
        many = observation.local.many_gradients(model, names, [seed])
        return next({name: g[0] for name, g in gradient.items()} for _, gradient in many([batch]))
    parameters = dict(model.named_parameters())
    with draws_kept(model):
        seed_draws(model, seed)
        replay = Replay(model, second_order=False)
    with replay.run(), torch.enable_grad():
        loss = model_loss(model, dict(batch))
        return differentiate(loss, {name: parameters[name] for name in names})


def _floor(observation: Observation, names: Sequence[str]) -> dict[str, float]:
    """The variance by which evaluations of one gradient differ."""
    entries = sum(y.numel() for y in observation.gradient.values())
    least = _ROUNDING**2 * _norm(observation.gradient) ** 2 / entries + 1e-38
    return dict.fromkeys(names, least)


def _cosines(message: Mapping[str, Tensor], gradient: Tensors) -> float:
    """The sum over tensors of the cosine, of what was shared of each."""
    total = 0.0
    for name, y in message.items():
        g = gradient[name] * (y != 0)
        size = float(y.double().norm() * g.double().norm())
        total += float((y.double() * g).sum()) / size if size > 0 else 0.0
    return total


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return sum(float(t.double().square().sum()) for t in tensors.values()) ** 0.5
