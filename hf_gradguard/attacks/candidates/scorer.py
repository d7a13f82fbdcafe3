"""Scores of all candidates for several messages at one model.

Each candidate's gradient is computed once. Everything that makes a score reads it there:

- a likelihood, for one sample whose mechanism is known (likelihood.py);
- a fit in a span, for one sample that was fitted in one (fitted.py);
- a matched filter or a regression, for everything else (regression.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.utils import logging

from ...defenses.mechanism import Fitted
from ...gradient_map import Tensors
from ...gradient_map.per_sample.products import GradientProducts
from ...gradient_map.per_sample.span import Powers
from ...gradient_map.vectorized import ManyGradients, has_draws
from ..base import Clock, Observation
from ..likelihood import Likelihood, clipped, mechanism_of, scaled
from ..uploads import single_batch_entries
from .candidate_inputs import Entries, spread_out
from .fitted import Fits, SpanCoordinates, accumulate, draw_span_with_fractions, spans_of
from .pool import Pool
from .regression import MatchedFilter, WhitenedMessage
from .sample_likelihood import (
    ProductLikelihood,
    clip_of_samples,
    rescale,
    to_filter,
    weigh_beside_others,
    weigh_by_noise,
)

_MEAN_OF = 64  # candidates of a label, whose gradients are averaged
_SPREAD_OF = 4  # candidates, whose gradients are compared between draws of dropout


class Settings(Protocol):
    """The settings of an attack that a scorer uses."""

    draws: int
    rounding: float
    vectorized: bool
    progress: bool


@dataclass
class _FilterGroup:
    """Messages whose coordinates weigh the same, by their indices.

    `coordinates` converts gradients to these coordinates.
    """

    weights: Tensors | None
    indices: list[int]
    messages: list[WhitenedMessage]
    coordinates: SpanCoordinates | None = None


class Scorer:
    """Scores of all candidates for several observations at one model.

    Args:
        attack: The attack's settings: how often dropout is drawn, what counts as rounding, and
            whether several candidates run together.
        observations: Observations of one model, with gradients of the same parameters.
        entries: The candidates of each, from one list.
        generator: The source of draws and sketches: each message's are what they would be by
            itself.
        clock: The attack's clock: passes stop when it is over.
    """

    def __init__(
        self,
        attack: Settings,
        observations: Sequence[Observation],
        entries: Sequence[Entries],
        generator: torch.Generator,
        clock: Clock,
    ) -> None:
        self.attack, self.pool, self.clock = attack, Pool(entries), clock
        pairs = len(observations), len(self.pool.batches)
        self.is_scored = torch.zeros(pairs, dtype=torch.bool, device=self.pool.size.device)
        self.generator, self.names = generator, list(observations[0].gradient)
        model, batches = observations[0].model, self.pool.batches
        drops = has_draws(model, batches[0])
        draws = attack.draws if drops else 1
        seeds = torch.randint(2**31, (draws,), generator=generator, device=generator.device)
        self.gradients_of = self._gradients(observations[0], seeds.tolist())
        spread = self.gradients_of.spread(spread_out(batches, _SPREAD_OF))
        # The client's own draw varies as well as the mean over the attacker's.
        self.spread = {name: (1 + 1 / draws) * value for name, value in spread.items()}
        self._rescale(observations)
        self.direct = {
            i: Likelihood(mechanism, dict(observation.gradient), self._floor(observation))
            for i, (observation, mechanism) in enumerate(self._messages())
            if mechanism is not None
            and not (mechanism.fitted or mechanism.has_residual)
            and observation.batch_size == 1
        }
        self.by_products = {} if drops else self._likelihoods_by_products()
        fitted = {i: fit for i in range(len(observations)) if (fit := self._fit(i))}
        batch, messages = batches[0], self.observations
        self.spans = {
            i: spans
            for i, fit in fitted.items()
            if not drops and (spans := spans_of(messages[i], fit, batch, generator))
        }
        singles = [
            (i, self.observations[i]) for i in fitted if self.observations[i].batch_size == 1
        ]
        single_samples = {i: (message.gradient, fitted[i]) for i, message in singles}
        first_spans = {i: spans[0] for i, spans in self.spans.items()}
        self.fits = Fits(single_samples, batches[0], model, generator, first_spans)

    def _likelihoods_by_products(self) -> dict[int, ProductLikelihood]:
        """Return likelihoods of messages that need no written-out gradient."""
        if not self.attack.vectorized or type(self.gradients_of) is not ManyGradients:
            return {}
        if self.clip_sample is not None:
            return {}
        return {
            i: ProductLikelihood(likelihood.mechanism, likelihood.message, likelihood.floor)
            for i, likelihood in self.direct.items()
            if ProductLikelihood.applies(likelihood.mechanism, likelihood.message)
        }

    def _score_by_products(self, totals: dict[int, Tensor]) -> None:
        products = GradientProducts(self.gradients_of)
        even = [i for i, likelihood in self.by_products.items() if likelihood.weights is None]
        uneven = [[i] for i in self.by_products if i not in even]
        for group in [even, *uneven] if even else uneven:
            likelihoods = [self.by_products[i] for i in group]
            possible = torch.stack([self.pool.priors[i].prior > 0 for i in group]).any(0)
            rows = possible.nonzero().flatten().tolist()
            batches = [self.pool.batches[row] for row in rows]
            messages = [likelihood.message for likelihood in likelihoods]
            passes = (
                ([rows[number] for number in chosen], computed)
                for chosen, computed in products(batches, messages, likelihoods[0].weights)
            )
            for places, computed in self._in_time(passes, len(rows), group):
                for place, (i, likelihood) in enumerate(zip(group, likelihoods, strict=True)):
                    totals[i][places] = likelihood(computed, place)

    def _in_time(
        self, passes: Iterable[tuple[list[int], Any]], total: int, messages: Sequence[int]
    ) -> Iterator[tuple[list[int], Any]]:
        """Yield passes over pairs, until time is up and each of these messages has a score."""
        bar = logging.tqdm(total=total, desc="candidates", disable=not self.attack.progress)
        done, index = 0, torch.tensor(list(messages), device=self.is_scored.device)
        for rows, computed in passes:
            yield rows, computed
            self.is_scored[index[:, None], torch.tensor(rows, device=index.device)] = True
            bar.update(len(rows))
            done += len(rows)
            if done == total or self.clock.seconds is None:
                continue
            priors = (self.pool.priors[i].among(self.is_scored[i]).prior for i in messages)
            if all(prior.any() for prior in priors) and self.clock.must_stop():
                break
        bar.close()

    def _gradients(self, observation: Observation, seeds: list[int]) -> ManyGradients:
        """Return the function of candidates' gradients.

        An update of several samples is compared to first order.
        """
        model = observation.model
        if observation.local is not None and observation.batch_size == 1:
            return observation.local.many_gradients(model, self.names, seeds)
        return ManyGradients(model, self.names, seeds, vectorized=self.attack.vectorized)

    def _rescale(self, observations: Sequence[Observation]) -> None:
        """Bring messages in which samples weigh by their tokens into units of the pool's sizes."""
        mechanisms = [mechanism_of(observation) for observation in observations]
        self.clip_sample = clip_of_samples(mechanisms)
        sized = self.clip_sample is None and bool((self.pool.size != 1).any())
        self.sums = [sized and observation.batch_size > 1 for observation in observations]
        self.observations, self.mechanisms = [], []
        for observation, mechanism, unit, is_sum in zip(
            observations, mechanisms, self.pool.units, self.sums, strict=True
        ):
            rescaled = rescale(observation, mechanism, unit if is_sum else 1.0)
            self.observations.append(rescaled[0])
            self.mechanisms.append(rescaled[1])

    def _messages(self) -> zip[Any]:
        return zip(self.observations, self.mechanisms, strict=True)

    def scores(self) -> list[Tensor]:
        """Return the scores `(K,)` for each observation."""
        totals = {
            i: torch.zeros_like(self.pool.size, dtype=torch.float64)
            for i in [*self.direct, *self.fits.numbers]
        }
        self._score_by_products(totals)
        written = {i: x for i, x in self.direct.items() if i not in self.by_products}
        filtered = [i for i in range(len(self.observations)) if i not in totals]
        means, sizes = self._means(filtered, any(map(self._has_others, filtered)))
        filters = self._filters(filtered, self._centers(means), sizes)
        by_gradients = [i for i in range(len(self.observations)) if i not in self.by_products]
        batches = self.pool.batches if by_gradients else []
        passes = self.gradients_of(batches)
        for rows, gradient in self._in_time(passes, len(batches), by_gradients):
            as_sent = {is_sum: self._of_sample(gradient, rows, is_sum) for is_sum in set(self.sums)}
            for i, likelihood in written.items():
                possible, gradients = self.pool.priors[i].select(rows, as_sent[False])
                if possible:
                    totals[i][possible] = likelihood(gradients)
            fits = [i for i in self.fits.numbers if self.pool.priors[i].prior[rows].any()]
            for i, scores in self.fits(as_sent[False], fits).items() if fits else ():
                totals[i][rows] = scores
            changes = {
                kind: self._changes(as_sent[kind], rows, mean) for kind, mean in means.items()
            }
            for matched_filter, group in filters:
                change = changes[self.sums[group.indices[0]]]
                matched_filter.add(rows, group.coordinates(change) if group.coordinates else change)
        unreached = self._leave_out_unreached()
        statistics = {i: [self._by_candidate(s, i, exclusive=True)] for i, s in totals.items()}
        for matched_filter, group in filters:
            for place, i in enumerate(group.indices):
                statistics.setdefault(i, []).extend(self._filtered(matched_filter, place, i))
        return [
            self._combined(statistics[i], i, is_reached) for i, is_reached in enumerate(~unreached)
        ]

    def _leave_out_unreached(self) -> Tensor:
        """Return which candidates no pass reached before time was up, `(messages, K)`.

        No message may have them from here on.
        """
        count = int(self.pool.candidate.max()) + 1
        unreached = torch.zeros(
            len(self.observations), count, dtype=torch.bool, device=self.is_scored.device
        )
        for i, prior in enumerate(self.pool.priors if self.clock.has_stopped else []):
            reached = prior.among(self.is_scored[i])
            unreached[i, self.pool.candidate[prior.prior > 0]] = True
            unreached[i, self.pool.candidate[reached.prior > 0]] = False
            self.pool.priors[i] = reached
        return unreached

    def _combined(self, statistics: Sequence[Tensor], i: int, is_reached: Tensor) -> Tensor:
        """Return one score of a message's statistics, `(K,)`; NaN for unreached candidates."""
        reached = [statistic[is_reached] for statistic in statistics]
        scores = statistics[0].new_full((len(is_reached),), torch.nan)
        scores[is_reached] = (
            reached[0]
            if self._is_likelihood(i)
            else _most_outstanding(reached, self.observations[i].batch_size)
        )
        return scores

    def _fit(self, i: int) -> Fitted | None:
        mechanism = self.mechanisms[i]
        return None if mechanism is None else mechanism.fitted

    def _has_others(self, i: int) -> bool:
        """Return whether a message of several samples holds what earlier ones left out.

        It must have been sent entry by entry.
        """
        mechanism = self.mechanisms[i]
        if mechanism is None or mechanism.fitted is not None:
            return False
        return mechanism.has_residual and self.observations[i].batch_size > 1

    def _is_likelihood(self, i: int) -> bool:
        """Return whether scores are likelihoods, and not a guess at one.

        They are a guess where others' noise is not known, for example.
        """
        mechanism = self.mechanisms[i]
        if mechanism is None or mechanism.fitted is not None or mechanism.has_residual:
            return False
        return i in self.direct or mechanism.rounding != "sign"

    def _centers(self, means: dict[bool, Tensors]) -> list[Tensors]:
        """Return the means of messages by their labels; those of the same labels have one.

        Args:
            means: Means of labels, `(labels, *shape)`.
        """
        centers: dict[tuple[bool, tuple[float, ...]], Tensors] = {}
        keys = [
            (is_sum, tuple(prior.label_fractions.get(k, 0.0) for k in range(self._classes)))
            for is_sum, prior in zip(self.sums, self.pool.priors, strict=True)
        ]
        for is_sum, fractions in set(keys):
            centers[is_sum, fractions] = {
                n: torch.tensordot(torch.tensor(fractions).to(m), m, 1) / sum(fractions)
                for n, m in means.get(is_sum, {}).items()
            }
        return [centers[key] for key in keys]

    def _filters(
        self, filtered: list[int], centers: list[Tensors], sizes: Tensors
    ) -> list[tuple[MatchedFilter, _FilterGroup]]:
        """Return a filter for each group of observations with the same weights of coordinates.

        A group also says what gradients are in its coordinates, if these are others.
        """
        groups: list[_FilterGroup] = []
        unread = {fit for i in filtered if i not in self.spans and (fit := self._fit(i))}
        drawn_spans = {
            fit: draw_span_with_fractions(fit, self.pool.batches, self.gradients_of, self.generator)
            for fit in unread
        }
        for i in filtered:
            if fit := self._fit(i):
                groups.append(self._fitted(i, centers[i], drawn_spans.get(fit)))
                continue
            for message, weights in self._whitened(i, centers[i], sizes):
                # Where all coordinates weigh 1, one filter serves all messages.
                of_kind = (group for group in groups if self.sums[group.indices[0]] == self.sums[i])
                matching_groups = [x for x in of_kind if x.weights is None and weights is None]
                if matching_groups:
                    matching_groups[0].indices.append(i)
                    matching_groups[0].messages.append(message)
                else:
                    groups.append(_FilterGroup(weights, [i], [message]))
        count = len(self.pool.batches)
        make = partial(MatchedFilter, count=count, generator=self.generator)
        return [(make(group.messages, group.weights), group) for group in groups]

    def _whitened(
        self, i: int, center: Tensors, sizes: Tensors
    ) -> list[tuple[WhitenedMessage, Tensors | None]]:
        """Return a message by each way to weigh its coordinates.

        If it holds what earlier messages left out, one way weighs only the entries of its own
        batch.
        """
        observation, mechanism, floor = (
            self.observations[i], self.mechanisms[i], self._floor(self.observations[i])
        )  # fmt: skip
        single_batch = single_batch_entries(observation) if self._has_others(i) else None
        weightings: list[tuple[Any, Tensors | None, float | None]] = []
        if single_batch is not None:
            exact = single_batch.mechanism
            weightings.append((exact, *weigh_by_noise(single_batch, exact, center, floor)))
        else:
            weightings.append((mechanism, *weigh_by_noise(observation, mechanism, center, floor)))
        if self._has_others(i) and (single_batch is None or not self._suffices(single_batch)):
            weightings.append((mechanism, weigh_beside_others(observation, mechanism, sizes), None))
        return [
            (to_filter(observation, message_mechanism, center, weights, variance), weights)
            for message_mechanism, weights, variance in weightings
        ]

    def _fitted(
        self, i: int, center: Tensors, drawn_span: tuple[Powers, list[float]] | None
    ) -> _FilterGroup:
        """Return a message of several samples, fitted in a span that it names or that was drawn."""
        observation, mechanism = self.observations[i], self.mechanisms[i]
        messages = [observation.gradient, *(mechanism.later_messages if mechanism else ())]
        if i in self.spans:
            coordinates = SpanCoordinates(messages, self.spans[i])
            mean = coordinates({name: c[None] for name, c in center.items()})
            center = {name: c[0] for name, c in mean.items()}
            message = WhitenedMessage(coordinates.message, center, observation.batch_size, None)
            return _FilterGroup(coordinates.weights, [i], [message], coordinates)
        assert drawn_span is not None
        y, weights = accumulate(messages, *drawn_span)
        message = WhitenedMessage(y, center, observation.batch_size, None)
        return _FilterGroup(weights, [i], [message])

    def _suffices(self, exact: Observation) -> bool:
        """Return whether entries that are a batch's own suffice to distinguish candidates."""
        return sum(int((y != 0).sum()) for y in exact.gradient.values()) >= len(self.pool.batches)

    @property
    def _classes(self) -> int:
        return max(self.pool.label) + 1

    def _means(
        self, filtered: list[int], needs_squares: bool
    ) -> tuple[dict[bool, Tensors], Tensors]:
        """Return mean gradients over some candidates of each label, `(labels, *shape)`.

        They are computed alone and as terms of a sum, as messages ask for it. If `needs_squares`,
        the second value is the root of the mean square of all terms, `(*shape)`.
        """
        rows_of_label: dict[int, list[int]] = {}
        for row, label in enumerate(self.pool.label):
            rows_of_label.setdefault(label, []).append(row)
        parameters = self.gradients_of.parameters
        zeros = {n: p.new_zeros(self._classes, *p.shape).detach() for n, p in parameters.items()}
        kinds = {self.sums[i] for i in filtered}
        means = {is_sum: {n: m.clone() for n, m in zeros.items()} for is_sum in kinds}
        squares = {n: torch.zeros_like(m[0]) for n, m in zeros.items()} if needs_squares else {}
        count = 0
        for label, rows in rows_of_label.items() if kinds else ():
            chosen = spread_out(rows, _MEAN_OF)
            for indices, gradient in self.gradients_of([self.pool.batches[row] for row in chosen]):
                for is_sum, mean in means.items():
                    as_sent = self._of_sample(gradient, [chosen[k] for k in indices], is_sum)
                    for name, g in as_sent.items():
                        mean[name][label] += g.sum(0) / len(chosen)
                        if needs_squares and is_sum == max(kinds):
                            squares[name] += g.square().sum(0)
            count += len(chosen)
        return means, {name: (square / count).sqrt() for name, square in squares.items()}

    def _of_sample(self, gradient: Tensors, rows: list[int], is_sum: bool) -> Tensors:
        """Return each candidate's message, clipped if samples are, or what it adds to a sum.

        In a sum it is the candidate's size times its gradient.
        """
        if self.clip_sample is not None:
            return clipped(gradient, self.clip_sample)
        if not is_sum:
            return gradient
        return {name: scaled(g, self.pool.size[rows]) for name, g in gradient.items()}

    def _changes(self, gradient: Tensors, rows: list[int], means: Tensors) -> Tensors:
        """Return gradients minus the means of their labels."""
        labels = torch.tensor([self.pool.label[row] for row in rows])
        on_device = {name: labels.to(gradient[name].device) for name in self.names}
        return {name: gradient[name] - means[name][on_device[name]] for name in self.names}

    def _floor(self, observation: Observation) -> dict[str, float]:
        """Return the variance by which evaluations of one gradient differ, per parameter."""
        gradients = observation.gradient.values()
        size = sum(g.numel() for g in gradients)
        power = sum(float(g.double().square().sum()) for g in gradients) / size
        eps = max(torch.finfo(g.dtype).eps for g in gradients)
        least = max(self.attack.rounding, 4 * eps) ** 2 * power + 1e-38
        return {name: least + self.spread[name] for name in self.names}

    def _filtered(self, matched_filter: MatchedFilter, place: int, i: int) -> list[Tensor]:
        """Return statistics of a message, several if its mechanism is not known."""
        fraction = self.pool.priors[i].fraction
        unknown = matched_filter.messages[place].variance is None
        # Beside what earlier messages left out, or in no span, the rest may be of any size.
        regress = matched_filter.weights is not None and unknown
        if regress or not matched_filter.explains(place, fraction):
            return [self._best(matched_filter.regressed(place, fraction), i)]
        exclusive = self.observations[i].batch_size == 1
        ratios = self._by_candidate(matched_filter.log_ratio(place, fraction), i, exclusive)
        if self._is_likelihood(i) or not unknown:
            return [ratios]
        return [ratios, self._best(matched_filter.cosines(place), i)]

    def _by_candidate(self, scores: Tensor, i: int, exclusive: bool) -> Tensor:
        """Return candidates' scores `(K,)`: the prior-weighted mean of their pairs' `(P,)`."""
        weighed = scores + self.pool.priors[i].prior.log()
        best = self._best(weighed, i)
        shifted = (weighed - best[self.pool.candidate]).exp()
        sums = torch.zeros_like(best).index_add_(0, self.pool.candidate, shifted)
        return best + sums.log()

    def _best(self, scores: Tensor, i: int) -> Tensor:
        """Return the best score of each candidate `(K,)`, over pairs that the message may have."""
        possible = scores.masked_fill(self.pool.priors[i].prior == 0, -torch.inf)
        best = possible.new_full((int(self.pool.candidate.max()) + 1,), -torch.inf)
        return best.scatter_reduce_(0, self.pool.candidate, possible, "amax")


def _most_outstanding(statistics: Sequence[Tensor], samples: int) -> Tensor:
    """Return the statistic in which the best candidates stand out the most, as log-ratios.

    In units of its own spread, candidates of no message are N(0, 1). One in the message is N(z, 1)
    with the z that the best ones have: log N(x; z, 1)/N(x; 0, 1) = z x - z²/2.
    """
    log_ratios = []
    for statistic in statistics:
        middle = statistic.median()
        spread = (statistic - middle).abs().median() * 1.4826
        spread = spread if spread > 0 else statistic.std(correction=0)
        z = (statistic - middle) / spread.clamp(min=1e-300)
        top = z.topk(min(samples, len(z))).values.mean()
        log_ratios.append((float(top), top * z - top**2 / 2))
    return max(log_ratios, key=lambda pair: pair[0])[1]
