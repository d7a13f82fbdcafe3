"""Candidates' gradients, each computed once, and read by everything that makes a score of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...defenses.mechanism import Fitted
from ...gradient_map import Tensors
from ...gradient_map.per_sample.span import Powers
from ...gradient_map.vectorized import ManyGradients, has_draws
from ..base import Observation
from ..uploads import own_entries
from .fitted import Fits, InSpan, brought, spanned, spans_of
from .inputs import Entries, evenly, place_of
from .likelihood import (
    Likelihood,
    beside_others,
    by_noise,
    clip_of_samples,
    clipped,
    in_units,
    mechanism_of,
    scaled,
    to_filter,
)
from .regression import Filtered, MatchedFilter


@dataclass(frozen=True)
class Asked:
    """What a message may have of a pool.

    Args:
        prior: `(P,)`, of pairs; 0 for those of other messages. Those of one candidate add up to 1.
        counts: The share of each of the pool's labels in the message.
    """

    prior: Tensor
    counts: dict[int, float]

    @property
    def share(self) -> Tensor:
        """`(P,)`, of the population of candidates: they add up to 1."""
        return self.prior / self.prior.sum()

    def of(self, rows: list[int], gradient: Tensors) -> tuple[list[int], Tensors]:
        """Which of these pairs it may have, and their gradients, `(K, *parameter.shape)`."""
        mine = (self.prior[rows] > 0).nonzero().flatten()
        if len(mine) < len(rows):
            gradient = {name: g[mine.to(g.device)] for name, g in gradient.items()}
        return [rows[i] for i in mine.tolist()], gradient


class Pool:
    """P pairs of a candidate and a label, as batches of one.

    Texts that are cut to a message's length are other pairs where the length is another.

    Args:
        entries: Of one list, one per message.

    Attributes:
        batches: One a pair.
        candidate: `(P,)`, which of the candidates a pair is of.
        label: Which of the labels of all messages it has.
        size: `(P,)`, what each weighs in a batch's mean loss, in units of their mean.
        units: By what each message is multiplied to be in these.
        asked: One a message.

    Example:
        >>> from hf_gradguard.attacks.candidates.inputs import make_entries
        >>> pool = Pool([make_entries(observation, ["a fine film", "a dull plot"], [0, 1])])
        >>> len(pool.batches), pool.label, pool.candidate.tolist()
        (2, [0, 1], [0, 1])
    """

    def __init__(self, entries: Sequence[Entries]) -> None:
        self.batches: list[dict[str, Any]] = []
        self.label: list[int] = []
        rows: dict[tuple[Any, ...], int] = {}
        values: list[Tensor] = []
        candidates: list[int] = []
        items: list[float] = []
        found = []
        for one in entries:
            places = [_added(values, value) for value in one.values]
            labels = [places[label] if places else label for label in one.label]
            at = []
            for batch, candidate, label, count in zip(
                one.batches, one.candidate.tolist(), labels, one.items.tolist(), strict=True
            ):
                shape = tuple(t.shape for t in batch.values() if isinstance(t, Tensor))
                row = rows.setdefault((candidate, label, shape), len(rows))
                if row == len(self.batches):
                    self.batches.append(batch)
                    self.label.append(label)
                    candidates.append(candidate)
                    items.append(count)
                at.append(row)
            counts = {places[k] if places else k: share for k, share in one.counts.items()}
            found.append((torch.tensor(at), one.prior, counts))
        device = entries[0].prior.device
        self.candidate = torch.tensor(candidates, device=device)
        size = torch.tensor(items, device=device)
        self.size = size / size.mean()
        self.units = [one.mean_items / float(size.mean()) for one in entries]
        self.asked = [Asked(self._spread(at, prior), counts) for at, prior, counts in found]

    def _spread(self, at: Tensor, prior: Tensor) -> Tensor:
        return prior.new_zeros(len(self.batches)).index_copy_(0, at.to(prior.device), prior)


def _added(values: list[Tensor], value: Tensor) -> int:
    """Its place among these, to which it is added if it is new."""
    place = place_of(values, value)
    if place == len(values):
        values.append(value)
    return place


_MEAN_OF = 64  # candidates of a label, whose gradients are averaged
_SPREAD_OF = 4  # candidates, whose gradients are compared between draws of dropout


class Settings(Protocol):
    """What of an attack's settings matters here."""

    draws: int
    rounding: float
    vectorized: bool


class _Alike(NamedTuple):
    """Messages whose coordinates weigh alike, and what gradients are in these coordinates."""

    weights: Tensors | None
    numbers: list[int]
    told: list[Filtered]
    within: InSpan | None = None


class Scorer:
    """Scores of all candidates for several observations at one model.

    Args:
        attack: Says how often dropout is drawn, what counts as rounding, and whether several
            candidates run together.
        observations: Of one model, with gradients of the same parameters.
        entries: The candidates of each, from one list.
        generator: Of draws and sketches: each message's are what they would be by itself.
    """

    def __init__(
        self,
        attack: Settings,
        observations: Sequence[Observation],
        entries: Sequence[Entries],
        generator: torch.Generator,
    ) -> None:
        self.attack, self.pool = attack, Pool(entries)
        self.generator, self.names = generator, list(observations[0].gradient)
        observation, batches = observations[0], self.pool.batches
        drops = has_draws(observation.model, batches[0])
        draws = attack.draws if drops else 1
        seeds = torch.randint(2**31, (draws,), generator=generator, device=generator.device)
        self.many = (
            observation.local.many(observation.model, self.names, seeds.tolist())
            if observation.local is not None
            and observation.batch_size == 1  # of several, to first order
            else ManyGradients(
                observation.model, self.names, seeds.tolist(), vectorized=attack.vectorized
            )
        )
        self.spread = self.many.spread(evenly(batches, _SPREAD_OF))
        self.spread = {name: (1 + 1 / draws) * value for name, value in self.spread.items()}
        mechanisms = [mechanism_of(one) for one in observations]
        self.clip_sample = clip_of_samples(mechanisms)
        sized = self.clip_sample is None and bool((self.pool.size != 1).any())
        self.sums = [sized and one.batch_size > 1 for one in observations]
        told = [
            in_units(one, mechanism, unit if sums else 1.0)
            for one, mechanism, unit, sums in zip(
                observations, mechanisms, self.pool.units, self.sums, strict=True
            )
        ]
        self.observations, self.mechanisms = (
            [one for one, _ in told],
            [mechanism for _, mechanism in told],
        )
        self.direct = {
            at: Likelihood(mechanism, dict(one.gradient), self._floor(one))
            for at, (one, mechanism) in enumerate(told)
            if mechanism is not None
            and not (mechanism.fitted or mechanism.has_residual)
            and one.batch_size == 1
        }
        fitted = {at: fit for at in range(len(told)) if (fit := self._fit(at))}
        self.spans = {
            at: spans
            for at, fit in fitted.items()
            if not drops and (spans := spans_of(self.observations[at], fit, batches[0], generator))
        }
        alone = {
            at: (self.observations[at].gradient, fit)
            for at, fit in fitted.items()
            if self.observations[at].batch_size == 1
        }
        known = {at: spans[0] for at, spans in self.spans.items()}
        self.fits = Fits(alone, batches[0], observation.model, generator, known)

    def scores(self) -> list[Tensor]:
        """`(K,)` for each observation."""
        given = [*self.direct, *self.fits.numbers]
        told = {at: torch.zeros_like(self.pool.size, dtype=torch.float64) for at in given}
        every = range(len(self.observations))
        rest = [at for at in every if at not in told]
        means, sizes = self._means(rest, any(map(self._beside, rest)))
        filters = self._filters(rest, self._centers(means), sizes)
        for rows, gradient in self.many(self.pool.batches):
            parts = {sums: self._of_sample(gradient, rows, sums) for sums in set(self.sums)}
            for at, likelihood in self.direct.items():
                some, own = self.pool.asked[at].of(rows, parts[False])
                if some:
                    told[at][some] = likelihood(own)
            here = [at for at in self.fits.numbers if self.pool.asked[at].prior[rows].any()]
            for at, scores in self.fits(parts[False], here).items() if here else ():
                told[at][rows] = scores
            changes = {sums: self._changes(parts[sums], rows, mean) for sums, mean in means.items()}
            for one, numbers, within in filters:
                change = changes[self.sums[numbers[0]]]
                one.add(rows, within(change) if within else change)
        read = {at: [self._by_candidate(scores, at, one=True)] for at, scores in told.items()}
        for filter_, numbers, _ in filters:
            for place, at in enumerate(numbers):
                read.setdefault(at, []).extend(self._filtered(filter_, place, at))
        return [
            read[at][0] if self._known(at) else _standing_out(read[at], observation.batch_size)
            for at, observation in enumerate(self.observations)
        ]

    def _fit(self, at: int) -> Fitted | None:
        mechanism = self.mechanisms[at]
        return None if mechanism is None else mechanism.fitted

    def _beside(self, at: int) -> bool:
        """Whether a message of several samples, sent entry by entry, has what earlier ones left out
        beside them.
        """
        mechanism, several = self.mechanisms[at], self.observations[at].batch_size > 1
        return (
            mechanism is not None
            and mechanism.fitted is None
            and mechanism.has_residual
            and several
        )

    def _known(self, at: int) -> bool:
        """Whether scores are likelihoods. Else, and where others' noise is a guess, it is also one
        how sure they are.
        """
        mechanism = self.mechanisms[at]
        if mechanism is None or mechanism.fitted is not None or mechanism.has_residual:
            return False
        return at in self.direct or mechanism.rounding != "sign"

    def _centers(self, means: dict[bool, Tensors]) -> list[Tensors]:
        """What messages of their labels are on average, by means of labels `(labels, *shape)`.
        Those of the same labels have one.
        """
        found: dict[tuple[bool, tuple[float, ...]], Tensors] = {}
        shares = [
            (sums, tuple(asked.counts.get(i, 0.0) for i in range(self._classes)))
            for sums, asked in zip(self.sums, self.pool.asked, strict=True)
        ]
        for sums, share in set(shares):
            found[sums, share] = {
                n: torch.tensordot(torch.tensor(share).to(m), m, 1) / sum(share)
                for n, m in means.get(sums, {}).items()
            }
        return [found[share] for share in shares]

    def _filters(self, rest: list[int], centers: list[Tensors], sizes: Tensors) -> list[Any]:
        """A filter for observations whose coordinates and samples weigh alike, with what gradients
        are in its coordinates where these are others.
        """
        groups: list[_Alike] = []
        mechanisms = {fit for at in rest if at not in self.spans and (fit := self._fit(at))}
        spans = {
            fit: spanned(fit, self.pool.batches, self.many, self.generator) for fit in mechanisms
        }
        for at in rest:
            observation, mechanism, center = self.observations[at], self.mechanisms[at], centers[at]
            if fit := self._fit(at):
                drawn = None if at in self.spans else spans[fit]
                groups.append(self._fitted(at, center, drawn))
                continue
            several, own = [], own_entries(observation) if self._beside(at) else None
            if own is not None:
                several.append(
                    (own.mechanism, *by_noise(own, own.mechanism, center, self._floor(observation)))
                )
            else:
                several.append(
                    (mechanism, *by_noise(observation, mechanism, center, self._floor(observation)))
                )
            if self._beside(at) and (own is None or not self._enough(own)):
                several.append((mechanism, beside_others(observation, mechanism, sizes), None))
            for known, weights, variance in several:
                told = to_filter(observation, known, center, weights, variance)
                alike = [g for g in groups if self.sums[g.numbers[0]] == self.sums[at]]
                plain = [g for g in alike if g.weights is None and weights is None]
                if plain:
                    plain[0].numbers.append(at)
                    plain[0].told.append(told)
                else:
                    groups.append(_Alike(weights, [at], [told]))
        count = len(self.pool.batches)
        return [
            (MatchedFilter(one.told, one.weights, count, self.generator), one.numbers, one.within)
            for one in groups
        ]

    def _fitted(self, at: int, center: Tensors, drawn: tuple[Powers, list[float]] | None) -> _Alike:
        """Of a message of several samples, fitted in a span that it names, or in one like that
        which was drawn.
        """
        observation, mechanism = self.observations[at], self.mechanisms[at]
        messages = [observation.gradient, *(mechanism.later_messages if mechanism else ())]
        if drawn is None:
            inside = InSpan(messages, self.spans[at])
            mean = inside({name: c[None] for name, c in center.items()})
            told = Filtered(
                inside.message, {n: c[0] for n, c in mean.items()}, observation.batch_size, None
            )
            return _Alike(inside.weights, [at], [told], inside)
        y, precise = brought(messages, *drawn)
        return _Alike(precise, [at], [Filtered(y, center, observation.batch_size, None)])

    def _enough(self, own: Observation) -> bool:
        """Whether entries that are a batch's own tell candidates apart without any others."""
        return sum(int((y != 0).sum()) for y in own.gradient.values()) >= len(self.pool.batches)

    @property
    def _classes(self) -> int:
        return max(self.pool.label) + 1

    def _means(self, asked: list[int], squared: bool) -> tuple[dict[bool, Tensors], Tensors]:
        """Over some candidates of each label: their mean gradient, `(labels, *shape)`, alone and as
        part of a sum, as far as messages ask for it; and if `squared` the root of the mean square
        of all of them as parts, `(*shape)`.
        """
        of: dict[int, list[int]] = {}
        for row, label in enumerate(self.pool.label):
            of.setdefault(label, []).append(row)
        parameters = self.many.parameters
        zeros = {n: p.new_zeros(self._classes, *p.shape).detach() for n, p in parameters.items()}
        kinds = {self.sums[at] for at in asked}
        means = {sums: {n: m.clone() for n, m in zeros.items()} for sums in kinds}
        squares = {n: torch.zeros_like(m[0]) for n, m in zeros.items()} if squared else {}
        count = 0
        for label, rows in of.items() if kinds else ():
            chosen = evenly(rows, _MEAN_OF)
            for some, gradient in self.many([self.pool.batches[row] for row in chosen]):
                for sums, mean in means.items():
                    part = self._of_sample(gradient, [chosen[i] for i in some], sums)
                    for name, g in part.items():
                        mean[name][label] += g.sum(0) / len(chosen)
                        if squared and sums == max(kinds):
                            squares[name] += g.square().sum(0)
            count += len(chosen)
        return means, {name: (square / count).sqrt() for name, square in squares.items()}

    def _of_sample(self, gradient: Tensors, rows: list[int], sums: bool) -> Tensors:
        """What each candidate is as a message, clipped if each sample is; or what it adds to a sum:
        its size times its gradient.
        """
        if self.clip_sample is not None:
            return clipped(gradient, self.clip_sample)
        if not sums:
            return gradient
        return {name: scaled(g, self.pool.size[rows]) for name, g in gradient.items()}

    def _changes(self, gradient: Tensors, rows: list[int], means: Tensors) -> Tensors:
        """Gradients minus the means of their labels."""
        labels = torch.tensor([self.pool.label[row] for row in rows])
        return {
            name: gradient[name] - means[name][labels.to(gradient[name].device)]
            for name in self.names
        }

    def _floor(self, observation: Observation) -> dict[str, float]:
        """The variance by which evaluations of one gradient differ, a parameter."""
        size = sum(g.numel() for g in observation.gradient.values())
        power = sum(float(g.double().square().sum()) for g in observation.gradient.values()) / size
        eps = max(torch.finfo(g.dtype).eps for g in observation.gradient.values())
        least = max(self.attack.rounding, 4 * eps) ** 2 * power + 1e-38
        return {name: least + self.spread[name] for name in self.names}

    def _filtered(self, one: MatchedFilter, place: int, at: int) -> list[Tensor]:
        """Statistics of a message, of which there are several where its mechanism is not known."""
        share = self.pool.asked[at].share
        unknown = one.messages[place].variance is None
        beside = one.weights is not None and unknown  # what is left out, or in no span
        if beside or not one.complete(place, share):
            return [self._best(one.regressed(place, share), at)]
        alone = self.observations[at].batch_size == 1
        ratios = self._by_candidate(one.log_ratio(place, share), at, one=alone)
        return (
            [ratios]
            if self._known(at) or not unknown
            else [ratios, self._best(one.cosines(place), at)]
        )

    def _by_candidate(self, scores: Tensor, at: int, one: bool) -> Tensor:
        """`(P,)` of pairs to `(K,)`: the mean of what labels say, by how likely they are."""
        weighed = scores + self.pool.asked[at].prior.log()
        most = self._best(weighed, at)
        shifted = (weighed - most[self.pool.candidate]).exp()
        sums = torch.zeros_like(most).index_add_(0, self.pool.candidate, shifted)
        return most + sums.log()

    def _best(self, scores: Tensor, at: int) -> Tensor:
        """`(P,)` of pairs to `(K,)`: the best of those that the message may have."""
        own = scores.masked_fill(self.pool.asked[at].prior == 0, -torch.inf)
        found = own.new_full((int(self.pool.candidate.max()) + 1,), -torch.inf)
        return found.scatter_reduce_(0, self.pool.candidate, own, "amax")


def _standing_out(statistics: Sequence[Tensor], samples: int) -> Tensor:
    """The statistic in which the best candidates stand out the most, as log-ratios.

    In units of its own spread others are N(0, 1), and who is in the message is N(z, 1) with the z
    that the best ones have.
    """
    found = []
    for statistic in statistics:
        middle = statistic.median()
        spread = (statistic - middle).abs().median() * 1.4826
        spread = spread if spread > 0 else statistic.std(correction=0)
        z = (statistic - middle) / spread.clamp(min=1e-300)
        top = z.topk(min(samples, len(z))).values.mean()
        found.append((float(top), top * z - top**2 / 2))
    return max(found, key=lambda one: one[0])[1]
