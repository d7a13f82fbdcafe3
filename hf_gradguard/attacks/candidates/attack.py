"""Which of a list of candidates is behind a message.

An attacker who has a list (templates, a leaked corpus, the vocabulary at one place) need not search:
each candidate's gradient is computed once, and compared to what was shared. Noise of a million
coordinates does not hide one of a thousand candidates, where it hides words from every search.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...gradient_map import Tensors
from ...gradient_map.law import Law
from ...gradient_map.many import ManyGradients, has_draws
from ...randomness import Stream, torch_generator
from ..base import Attack, Reconstruction, as_text
from ..observation import Observation, average
from .entries import Entries, at_places, make_entries
from .likelihood import Likelihood
from .linear import Filtered, MatchedFilter

_MEAN_OF = 64  # candidates of a label, whose gradients are averaged
_SPREAD_OF = 4  # candidates, whose gradients are compared between draws of dropout


@dataclass
class Ranked(Reconstruction):
    """How likely each of K candidates is to be in a message.

    The best B of them stand as the reconstruction.

    Args:
        scores: `(K,)` in float64, logarithms: for one sample of p(message | candidate), up to what
            all have in common; for several of p(message | candidate in it)/p(message).
        ranking: `(K,)`: numbers of candidates, the likeliest first.
        posterior: `(K,)`: the probability of each of being in the message, where all were equally
            likely before and B of them are. They add up to B. Where the defense has no law that is
            known, they are only as good as a guess at one.

    Example:
        >>> found = Candidates(["a fine film", "a dull plot"])(seen)
        >>> found.scores.shape, found.ranking.sort().values.tolist(), found.text[0] in texts
        (torch.Size([2]), [0, 1], True)
    """

    scores: Tensor = field(default_factory=lambda: torch.empty(0))
    ranking: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    posterior: Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass
class Candidates(Attack):
    """Ranks a list of texts or images by how well each explains the message. No search: one gradient
    a candidate and label.

    With the defense's law (`Observation.law`, or `noise_variance` of Gaussian noise) the score is
    the log-likelihood: of noisy values, of the kept set and its values, of cells. Without one it is
    the better of cosine and distance, with the mean gradient of the label taken off: the one in
    which the best candidate stands out more. Of several samples it is the log-ratio of membership,
    where other samples' gradients count as noise that varies as candidates do.

    Args:
        candidates: Texts, lists of token ids, tensors `(C, H, W)` of pixels as the model takes them,
            or mappings of a batch's entries for one sample, `labels` included. With `places`, one
            text. Entries of the other domain are passed over.
        labels: One class id a candidate, if the attacker's list has them. Default: those that the
            message may have.
        places: Positions of a text (special tokens included) at which every word is tried.
        words: Which words those are. Default: the vocabulary without special tokens.
        draws: Where the client ran dropout, the attacker's gradients are means over so many draws of
            their own, and how much these differ counts as noise.
        rounding: How far evaluations of one gradient differ, in units of its root mean square.
        vectorized: Evaluate several candidates in one pass, where the model allows it.

    Example:
        >>> found = make_attack("candidates", candidates=["a fine film", "a dull plot"])(seen)
        >>> found.posterior.sum() > 1.99  # of two candidates two are in it
        tensor(True)
    """

    name: ClassVar[str] = "candidates"
    informed_by: ClassVar[frozenset[str]] = frozenset({"law"})
    candidates: Any = None
    labels: Sequence[Any] | None = None
    places: Sequence[int] = ()
    words: Sequence[Any] | None = None
    draws: int = 4
    rounding: float = 1e-4
    vectorized: bool = True

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise ValueError(f"draws must be at least 1, but is {self.draws}.")
        if not 0 < self.rounding < 1:
            raise ValueError(f"rounding must be between 0 and 1, but is {self.rounding}.")

    def reconstruct(self, seen: Observation, generator: torch.Generator) -> Ranked:
        return self._rank([[seen]], generator)[0]

    def together(
        self, observations: Sequence[Observation], generator: Stream | torch.Generator | None = None
    ) -> list[Ranked]:
        """Attack several observations at one model, each by itself: every candidate's gradient is
        computed once for all of them.

        Args:
            observations: All of one model and input shape, with gradients of the same parameters
                and labels that are known alike.
            generator: Source of all randomness.

        Raises:
            ValueError: If they differ in those, or this attack cannot work on them.
        """
        _check_together(observations)
        drawn = torch_generator(generator, observations[0].device)
        return self._rank([[seen] for seen in observations], drawn)

    def history(
        self, observations: Sequence[Observation], generator: Stream | torch.Generator | None = None
    ) -> Ranked:
        """Attack all uploads of the same batch together, each with the model at which it was made:
        log-likelihoods add up, and what was uploaded at the same weights is averaged first.

        Args:
            observations: Of one client and one batch.
            generator: Source of all randomness.

        Raises:
            ValueError: If there are none, or this attack cannot work on them.
        """
        if not observations:
            raise ValueError("There is nothing to attack: give at least one observation.")
        same: dict[int, list[Observation]] = {}
        for seen in observations:
            same.setdefault(id(seen.model), []).append(seen)
        means = [_averaged(several) for several in same.values()]
        return self._rank([means], torch_generator(generator, observations[0].device))[0]

    def _rank(
        self, targets: Sequence[Sequence[Observation]], generator: torch.Generator
    ) -> list[Ranked]:
        """One result a target: the uploads of one batch, each at a model of its own."""
        started = time.perf_counter()
        totals: list[Tensor] = []
        for uploads in zip(*targets, strict=True):
            entries = self._entries(uploads[0])
            found = _Scorer(self, uploads, entries, generator).scores()
            totals = [a + b for a, b in zip(totals, found, strict=True)] if totals else found
        firsts = [uploads[0] for uploads in targets]
        seconds = (time.perf_counter() - started) / len(firsts)
        return [
            _ranked(seen, entries, scores, seconds)
            for seen, scores in zip(firsts, totals, strict=True)
        ]

    def _entries(self, seen: Observation) -> Entries:
        listed = self.candidates
        if listed is None or (not self.places and isinstance(listed, str | Mapping)):
            raise ValueError(
                "There is nothing to compare with: give candidates, a list of texts or images, or "
                "one text with places at which to try every word."
            )
        if self.places:
            listed = at_places(seen, listed, self.places, self.words)
        return make_entries(seen, listed, self.labels)


class _Scorer:
    """Scores of all candidates for several observations at one model."""

    def __init__(
        self,
        attack: Candidates,
        observations: Sequence[Observation],
        entries: Entries,
        generator: torch.Generator,
    ) -> None:
        self.attack, self.observations, self.entries = attack, observations, entries
        self.generator, self.names = generator, list(observations[0].gradient)
        seen, batches = observations[0], entries.batches
        draws = attack.draws if has_draws(seen.model, batches[0]) else 1
        seeds = torch.randint(2**31, (draws,), generator=generator, device=generator.device)
        self.many = (
            seen.local.many(seen.model, self.names, seeds.tolist())
            if seen.local is not None and seen.batch_size == 1  # of several, to first order
            else ManyGradients(
                seen.model, self.names, seeds.tolist(), vectorized=attack.vectorized
            )
        )
        self.spread = self.many.spread(batches[:: max(1, len(batches) // _SPREAD_OF)][:_SPREAD_OF])
        self.spread = {name: (1 + 1 / draws) * value for name, value in self.spread.items()}
        self.laws = [law_of(one) for one in observations]
        self.direct = {
            at: Likelihood(law, dict(one.gradient), self._floor(one))
            for at, (one, law) in enumerate(zip(observations, self.laws, strict=True))
            if law is not None and one.batch_size == 1
        }

    def scores(self) -> list[Tensor]:
        """`(K,)` for each observation."""
        pairs = len(self.entries.batches)
        told = {at: self.entries.prior.new_zeros(pairs) for at in self.direct}
        rest = [at for at in range(len(self.observations)) if at not in self.direct]
        means, filters = ({}, []) if not rest else self._filters(rest)
        size = self.entries.size
        for rows, gradient in self.many(self.entries.batches):
            if bool((size[rows] != 1).any()):
                gradient = {n: _scaled(g, size[rows]) for n, g in gradient.items()}
            for at, likelihood in self.direct.items():
                told[at][rows] = likelihood(gradient)
            if filters:
                labels = torch.tensor([self.entries.label[row] for row in rows])
                mean = {n: m[labels.to(m.device)] for n, m in means.items()}
                changes = {name: gradient[name] - mean[name] for name in self.names}
                for one, _ in filters:
                    one.add(rows, changes)
        found = {at: self._by_candidate(scores, one=True) for at, scores in told.items()}
        for one, numbers in filters:
            for place, at in enumerate(numbers):
                found[at] = self._filtered(one, place, at)
        return [found[at] for at in range(len(self.observations))]

    def _filters(self, rest: list[int]) -> tuple[dict[str, Tensor], list[Any]]:
        """Means of labels `(labels, *shape)`, and a filter for all observations that weigh alike."""
        means = self._means()
        share = torch.tensor([self.entries.counts.get(i, 0.0) for i in range(self._classes)])
        center = {
            n: torch.tensordot(share.to(m), m, 1) / share.sum().to(m) for n, m in means.items()
        }
        groups: list[tuple[Tensors | None, list[int], list[Filtered]]] = []
        for at in rest:
            seen, law = self.observations[at], self.laws[at]
            weights, variance = self._weights(seen, law)
            scale = _fitted(seen.gradient, center) if law is None or law.clip_norm else 1.0
            message = {name: g / scale for name, g in seen.gradient.items()}
            variance = None if variance is None else variance / scale**2
            told = Filtered(message, center, seen.batch_size, variance)
            plain = [g for g in groups if g[0] is None and weights is None]
            if plain:
                plain[0][1].append(at)
                plain[0][2].append(told)
            else:
                groups.append((weights, [at], [told]))
        count = len(self.entries.batches)
        return means, [
            (MatchedFilter(several, weights, count, self.generator), numbers)
            for weights, numbers, several in groups
        ]

    @property
    def _classes(self) -> int:
        return max(self.entries.label) + 1

    def _means(self) -> dict[str, Tensor]:
        """The mean gradient of each label, over some of its candidates."""
        of: dict[int, list[int]] = {}
        for row, label in enumerate(self.entries.label):
            of.setdefault(label, []).append(row)
        parameters = self.many.parameters
        means = {n: p.new_zeros(self._classes, *p.shape).detach() for n, p in parameters.items()}
        for label, rows in of.items():
            step = max(1, len(rows) // _MEAN_OF)
            chosen = rows[::step][:_MEAN_OF]
            for some, gradient in self.many([self.entries.batches[row] for row in chosen]):
                size = self.entries.size[[chosen[i] for i in some]]
                for name, g in gradient.items():
                    means[name][label] += _scaled(g, size).sum(0) / len(chosen)
        return means

    def _weights(self, seen: Observation, law: Law | None) -> tuple[Tensors | None, float | None]:
        """What coordinates weigh, and the noise's variance in these units."""
        if law is None or law.rounding == "sign":
            return None, None
        floor = self._floor(seen)
        if law.uniform and law.rounding is None:
            mean = sum(v * seen.gradient[n].numel() for n, v in floor.items())
            size = sum(g.numel() for g in seen.gradient.values())
            return None, law.mean_variance(seen.gradient) + mean / size
        weights = {}
        for name, y in seen.gradient.items():
            variance = law.variance_of(name) + floor[name]
            if law.levels is not None:  # uniform within its cell
                step = float(y.max() - y.min()) / (law.levels - 1)
                variance = variance + step**2 / (12 if law.rounding == "nearest" else 6)
            precise = torch.as_tensor(variance, device=y.device).float().rsqrt()
            weights[name] = precise.expand_as(y) * (y != 0 if law.kept != "all" else 1)
        return weights, 1.0

    def _floor(self, seen: Observation) -> dict[str, float]:
        """The variance by which evaluations of one gradient differ, a parameter."""
        size = sum(g.numel() for g in seen.gradient.values())
        power = sum(float(g.double().square().sum()) for g in seen.gradient.values()) / size
        eps = max(torch.finfo(g.dtype).eps for g in seen.gradient.values())
        least = max(self.attack.rounding, 4 * eps) ** 2 * power + 1e-38
        return {name: least + self.spread[name] for name in self.names}

    def _filtered(self, one: MatchedFilter, place: int, at: int) -> Tensor:
        seen = self.observations[at]
        weight = self.entries.prior / self.entries.prior.sum()
        ratios = self._by_candidate(one.log_ratio(place, weight), one=seen.batch_size == 1)
        if self.laws[at] is not None and self.laws[at].rounding != "sign":  # type: ignore[union-attr]
            return ratios
        cosines = self._best(one.cosines(place))
        return _standing_out([ratios, cosines], seen.batch_size)

    def _by_candidate(self, scores: Tensor, one: bool) -> Tensor:
        """`(P,)` of pairs to `(K,)`: the mean of what labels say, by how likely they are."""
        weighed = scores + self.entries.prior.log()
        most = self._best(weighed)
        shifted = (weighed - most[self.entries.candidate]).exp()
        sums = torch.zeros_like(most).index_add_(0, self.entries.candidate, shifted)
        return most + sums.log()

    def _best(self, scores: Tensor) -> Tensor:
        count = len(self.entries.inputs)
        found = scores.new_full((count,), -torch.inf)
        return found.scatter_reduce_(0, self.entries.candidate, scores, "amax")


def law_of(seen: Observation) -> Law | None:
    """The law of a message as it was granted; of `noise_variance` alone that of Gaussian noise.

    Example:
        >>> from dataclasses import replace
        >>> law_of(replace(seen, noise_variance=0.5)).variance, law_of(seen)
        (0.5, None)
    """
    if seen.law is None and seen.noise_variance is not None:
        return Law(noise="gaussian", variance=seen.noise_variance)
    return seen.law


def _fitted(message: Mapping[str, Tensor], center: Mapping[str, Tensor]) -> float:
    """How large a message is in units of what it is on average: defenses may scale it down."""
    product = sum(float((g.double() * center[name]).sum()) for name, g in message.items())
    square = sum(float(center[name].double().square().sum()) for name in message)
    return product / square if product > 1e-3 * square else 1.0


def _averaged(uploads: Sequence[Observation]) -> Observation:
    return uploads[0] if len(uploads) == 1 else average(uploads)


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


def _ranked(seen: Observation, entries: Entries, scores: Tensor, seconds: float) -> Ranked:
    ranking = scores.argsort(descending=True, stable=True)
    best = [entries.inputs[int(k)] for k in ranking[: seen.batch_size]]
    best += [best[-1]] * (seen.batch_size - len(best))  # a short list
    labels = seen.labels
    return Ranked(
        **_SHOWN[seen.domain.name](seen, best),
        labels=None if labels is None or labels.dim() != 1 else labels,
        objective=-float(scores.max()),
        seconds=seconds,
        scores=scores,
        ranking=ranking,
        posterior=_posterior(scores, seen.batch_size),
    )


def _texts(seen: Observation, best: list[Tensor]) -> dict[str, Any]:
    ids = [row[0, : seen.input_shape[1]].tolist() for row in best]
    return {"token_ids": ids, "text": as_text(ids, seen.tokenizer)}


def _images(seen: Observation, best: list[Tensor]) -> dict[str, Any]:
    return {"input": torch.cat(best)}


_SHOWN = {"text": _texts, "image": _images}


def _posterior(scores: Tensor, samples: int) -> Tensor:
    """`(K,)`: how likely each is to be one of so many, if all are among the candidates."""
    if samples == 1:
        return scores.softmax(0)
    if samples >= len(scores):
        return torch.ones_like(scores)
    low, high = -float(scores.max()) - 50, -float(scores.min()) + 50
    for _ in range(200):  # one number that makes them add up
        middle = (low + high) / 2
        few = float((scores + middle).sigmoid().sum()) < samples
        low, high = (middle, high) if few else (low, middle)
    return (scores + high).sigmoid()


def _scaled(gradient: Tensor, size: Tensor) -> Tensor:
    return gradient * size.to(gradient).view(-1, *[1] * (gradient.dim() - 1))


def _check_together(observations: Sequence[Observation]) -> None:
    first = observations[0]
    for other in observations[1:]:
        known = (first.labels is None) == (other.labels is None)
        if (
            other.model is not first.model
            or other.input_shape != first.input_shape
            or other.gradient.keys() != first.gradient.keys()
            or not known
            or (first.labels is not None and not torch.equal(first.labels, other.labels))  # type: ignore[arg-type]
        ):
            raise ValueError(
                "Observations that are attacked together must be of one model, input shape and "
                "labels, with gradients of the same parameters. Attack the others by themselves."
            )
