"""The search for the text that makes a message likeliest, by words and not by slopes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from transformers.utils import logging

from ...gradient_map.domain import TEXT
from ...models import label_kind
from ..base import Attack, Clock, Observation, Reconstruction, as_text, without_dropout
from ..label_recovery import recover_labels
from ..layer_inputs import is_causal_lm
from ..likelihood import mechanism_of
from .messages import WhiteMessage, white_message
from .proposals import PublicWords, cross, mutate, neighbors, texts_of_length
from .score import AT_ONCE, Text, WhitenedScore, WholeLikelihood, linear_names, public_ids

_FEWEST = 16  # public texts
_MOST_CLASSES = 8  # that are tried where the label is unknown
_SCANNED = 0.25  # of the effort goes to public texts themselves
_POPULATION = 96
_NEAR_COPIES = 4  # texts of a population that differ from one in a word at most
_SWEEP_EVERY = 20  # generations
_SWEPT_WORDS = 24  # at each place
_SETTLED = 1.0  # standard deviations below what a text's own gradient says it would score
_PATIENCE = 40  # generations without a better text, once it has settled
_END_PATIENCE = 20  # likewise, at the end by the whole likelihood
_OF_POPULATIONS = 0.7  # of a search's effort, before their best texts are crossed
_BEST_OF_EACH, _FEWEST_OF_EACH = 40, 500  # texts that are crossed, and that are scored
_TURNS = 3  # of each of several texts
_REMEMBERED = 192  # texts that a turn begins with


@dataclass
class Found(Reconstruction):
    """The reconstruction of a search, and how far the search came.

    Args:
        score: The score of the text, in standard deviations of the noise; for several texts their
            mean.
        expected_score: The score that the true text would have; NaN if the noise is unknown.
        evaluated: How many texts were scored.
        scores: The best score after each generation.
    """

    score: float = float("nan")
    expected_score: float = float("nan")
    evaluated: int = 0
    scores: list[float] = field(default_factory=list)


@dataclass
class LikelihoodSearch(Attack):
    """Searches word by word for the text that makes a message likeliest.

    Noise that hides every word from descent on embeddings does not hide them here: it spreads over
    all of a gradient's entries, and a candidate looks along one direction.

    The search starts from public texts of the message's length. Texts that score well are changed
    word by word, and crossed with each other; places are swept with the words that public texts
    have beside their neighbors. The score is the product of the message with a candidate's
    gradient, in a metric that public texts whiten (score.py), plus the logarithm of how likely
    public texts make the words. It needs no slope, so it works behind every defense: with the
    mechanism's noise where that is known, by cosine where it is not. Behind Gaussian noise as large
    as the gradient, one text's search can end by the likelihood itself: near the true text it
    distinguishes orders and small words.

    A message of several texts is a sum. Each text has turns in which it is searched in what the
    others leave of the message: as much of these is subtracted as their scores say is correct.
    Lengths and special tokens are the observation's. Labels that it lacks are tried out for one
    text, and read off the last layer for several.

    References: genetic search for adversarial texts, Alzantot et al. (2018); discrete search on
    gradients, Balunović et al., "LAMP" (2022). The metric is this library's.

    Args:
        public_texts: Texts like the client's, or their ids: at least 16. Audits give candidates
            that are in no audited message.
        seconds: Time after which the search stops.
        evaluations: The number of scored texts after which the search stops. Default: by `seconds`
            alone.
        damping: The damping of the metric, in variances of the noise.
        prior: The weight of public texts' probabilities; 1 is Bayes' rule.
        populations: The number of populations in one text's search. Each begins from public texts
            of its own, and ends in an optimum of its own; then their best texts are crossed.
        whole_share: The fraction of the effort that is spent, at the end, on the whole likelihood
            if that is known.
        progress: Show a bar.

    Raises:
        ValueError: If a setting is out of range.

    References: genetic search for adversarial texts, Alzantot et al. (2018); discrete search on
    gradients, Balunović et al., "LAMP" (2022). The metric is this library's.

    Example:
        >>> search = LikelihoodSearch(["a fine film", "a dull plot"] * 8, evaluations=64)
        >>> search.seconds
        300.0
    """

    name: ClassVar[str] = "likelihood_search"
    domains: ClassVar[tuple[str, ...]] = ("text",)
    informed_by: ClassVar[frozenset[str]] = frozenset({"mechanism"})
    public_texts: Sequence[Any] = ()
    seconds: float = 300.0
    evaluations: int | None = None
    damping: float = 10.0
    prior: float = 1.0
    populations: int = 6
    whole_share: float = 0.0
    progress: bool = False

    def __post_init__(self) -> None:
        if not self.seconds > 0 or not self.damping > 0 or not self.prior >= 0:
            raise ValueError(
                "seconds and damping must be above 0, and prior at least 0, but they are "
                f"{self.seconds}, {self.damping} and {self.prior}."
            )
        if not 0 <= self.whole_share < 1:
            raise ValueError(f"whole_share must be from 0 to below 1, but is {self.whole_share}.")
        counts = 1 if self.evaluations is None else self.evaluations, self.populations
        if min(counts) < 1:
            raise ValueError(f"evaluations and populations must be at least 1, but are {counts}.")

    def reconstruct(self, observation: Observation, generator: torch.Generator) -> Found:
        effort = _Effort(self)
        public = [text for text in public_ids(self.public_texts, observation) if text]
        rows = _rows_of(observation)
        by_length = {row.length: _of_length(public, row.length) for row in rows}
        mechanism = mechanism_of(observation)
        message = white_message(observation, mechanism, linear_names(observation.model))
        with without_dropout(observation.model):
            scores: dict[Any, WhitenedScore] = {}
            for row in rows:
                if row.key not in scores:
                    scores[row.key] = self._score(row, rows, message, by_length[row.length])
            table: Any = TEXT.token_embeddings(observation.model)[0].weight
            seed = int(torch.randint(2**31, (1,), generator=generator, device=generator.device))
            words, random_ = PublicWords(public, table.detach()), random.Random(seed)
            searches = [
                _Search(self, row, scores[row.key], words, by_length[row.length], random_, effort)
                for row in rows
            ]
            by_whole = self.whole_share and WholeLikelihood.applies(observation, mechanism)
            _take_turns(searches, 1 - self.whole_share if by_whole else 1.0)
            if by_whole and mechanism is not None:
                searches[0].end_by(WholeLikelihood(searches[0].whitened, mechanism), self.prior)
        effort.bar.close()
        return _found(observation, searches, effort)

    def _score(
        self, row: _Row, rows: Sequence[_Row], message: WhiteMessage, public: Sequence[Text]
    ) -> WhitenedScore:
        """Return the score, with the label that public texts fit best if it is not known."""
        message, count = message.for_fraction(row.fraction), len(rows)
        other_labels = {text.label for text in rows} - {row.label, None}
        classes = [torch.tensor([k], device=row.observation.device) for k in other_labels]
        scores = [
            WhitenedScore(row.observation, message, public, label, self.damping, classes, count)
            for label in _labels(row.observation)
        ]
        return max(scores, key=lambda score: score.fit)


@dataclass(frozen=True)
class _Row:
    """One text of a message.

    Args:
        observation: The observation as if the message were of this text alone.
        length: The number of words, without the special tokens around them.
        fraction: The text's fraction of the gradient.
        label: Its class, beside other texts.
    """

    observation: Observation
    length: int
    fraction: float = 1.0
    label: int | None = None

    @property
    def key(self) -> Any:
        """The key of the text's metric; texts of one key have one metric."""
        return self.length, self.label


def _rows_of(observation: Observation) -> list[_Row]:
    framed = sum(map(len, observation.frame))
    lengths = observation.tokens.sum(1).tolist()
    if observation.batch_size == 1:
        return [_Row(observation, lengths[0] - framed)]
    if is_causal_lm(observation.model):  # whose mean loss is over the words that it predicts
        total = sum(lengths) - len(lengths)
        alone = [_alone(observation, length, None) for length in lengths]
        return [_Row(seen, length - framed, (length - 1) / total)
                for seen, length in zip(alone, lengths, strict=True)]  # fmt: skip
    labels = observation.labels
    labels = recover_labels(observation) if labels is None else labels
    if labels.dim() > 1 or labels.is_floating_point():
        raise ValueError("likelihood_search reads several texts where each has one class.")
    rows = zip(lengths, labels, strict=True)
    return [
        _Row(_alone(observation, length, label[None]), length - framed, 1 / len(labels), int(label))
        for length, label in rows
    ]


def _alone(observation: Observation, length: int, labels: Tensor | None) -> Observation:
    """Return the observation as if the message were of one text of this many tokens."""
    return replace(observation, input_shape=(1, length), attention_mask=None, labels=labels)


def _of_length(public: Sequence[Text], length: int) -> list[Text]:
    same_length = texts_of_length(public, length) if length > 0 else []
    if len(same_length) < _FEWEST:
        raise ValueError(
            f"public_texts have {len(same_length)} texts of {length} tokens, where the search "
            f"needs {_FEWEST}: give more, or longer ones."
        )
    return same_length


def _labels(observation: Observation) -> list[Tensor | None]:
    """Return each label that the text may have; for language models it is the text itself."""
    model = observation.model
    if is_causal_lm(model):
        return [None]
    if observation.labels is not None:
        return [observation.labels]
    if label_kind(model) != "class":
        raise ValueError(
            "The label is not known, and is no class: likelihood_search needs it granted."
        )
    classes = int(model.config.num_labels)  # type: ignore[union-attr, arg-type]
    if classes > _MOST_CLASSES:
        return [recover_labels(observation)]
    return [torch.tensor([label], device=observation.device) for label in range(classes)]


class _Effort:
    """The time and evaluations that are granted, and how much of it was spent."""

    def __init__(self, attack: LikelihoodSearch) -> None:
        self.attack, self.clock, self.evaluated = attack, Clock(attack.seconds), 0
        self.bar = logging.tqdm(total=100, desc=attack.name, disable=not attack.progress)

    @property
    def spent(self) -> float:
        """The fraction that was spent."""
        spent = self.clock.elapsed / self.attack.seconds
        if self.attack.evaluations is not None:
            spent = max(spent, self.evaluated / self.attack.evaluations)
        return spent

    def show(self, standing: str) -> None:
        """Show the spent fraction and the standing on the bar."""
        self.bar.update(min(int(100 * self.spent), 100) - self.bar.n)
        self.bar.set_postfix_str(standing)


class _Search:
    """A population of texts, and all that were scored."""

    def __init__(
        self, attack: LikelihoodSearch, row: _Row, score: WhitenedScore, words: PublicWords,
        public: Sequence[Text], random_: random.Random, effort: _Effort,
    ) -> None:  # fmt: skip
        self.whitened, self.score = score, cast("WhitenedScore | WholeLikelihood", score)
        self.row, self.words, self.public = row, words, public
        self.random, self.effort = random_, effort
        self.scores: dict[Text, float] = {}
        self._own_scores: dict[Text, float] = {}
        self._fitness: dict[Text, float] = {}
        self.population: list[Text] = []
        self.history: list[float] = []
        # What the prior is worth beside a score near that of the true text.
        self._slope = attack.prior / max(score.expected or 1.0, 10.0)
        self._swept: set[Text] = set()
        self._begun = 0  # generations before this population
        self._stayed: bool | None = None  # in the end by the whole likelihood

    @property
    def best(self) -> Text:
        return self.population[0]

    @property
    def gradient_fraction(self) -> float:
        """The fraction of the best text's gradient that is in the message, by its score."""
        return min(max(self.scores[self.best] / self._own_scores[self.best], 0.0), 1.0)

    def take_out(self, searches: Sequence[_Search]) -> None:
        """Subtract from the message what other texts, as far as they are known, have in it."""
        self.whitened.leave_out([
            (
                text.score.batch([text.best]),
                text.gradient_fraction * text.row.fraction / self.row.fraction,
            )
            for text in searches
        ])  # fmt: skip
        self._begin_anew(_REMEMBERED)

    def end_by(self, likelihood: WholeLikelihood, prior: float) -> None:
        """Continue by the whole likelihood, until a text stays the best or the effort is spent."""
        history = list(self.history)
        self.score, self._slope = likelihood, prior
        self._begin_anew(_REMEMBERED)
        self.run(1.0)
        self._stayed = self._stays()
        self.score = self.whitened
        self._begin_anew(1)
        self.history = history

    def _begin_anew(self, count: int) -> None:
        """Start again with `count` of the best texts, which are scored again."""
        best = sorted(self.scores, key=lambda text: -self._fitness[text])[:count]
        for stale in (self.scores, self._own_scores, self._fitness, self._swept, self.history):
            stale.clear()
        self.population, self._begun = [], 0
        for start in range(0, len(best), AT_ONCE):
            self._evaluate(best[start : start + AT_ONCE])

    def run_populations(self, count: int, end: float) -> None:
        """Run several populations, one after the other, and then one of their best texts."""
        start, public, best = self.effort.spent, self.public, set[Text]()
        for number in range(count if count > 1 else 0):
            if self.effort.evaluated < number * _FEWEST_OF_EACH:
                break  # so little effort is better spent on one
            self.population, self._begun = [], len(self.history)
            self.public = public[number::count] or public
            fraction = _OF_POPULATIONS * (number + 1) / count
            self.run(start + fraction * (end - start), may_settle=False)
            best.update(self.population[:_BEST_OF_EACH])
        self._begun = len(self.history)
        self.population = sorted(best, key=lambda text: (-self._fitness[text], text))
        self.run(end)

    def run(self, end: float, may_settle: bool = True) -> None:
        """Run until this fraction of the effort is spent, or the best text has settled.

        It settles only if `may_settle`: the best text scores as the true one would and stays the
        best.
        """
        if not self.population:
            self._scan(self.effort.spent + _SCANNED * (end - self.effort.spent))
        self.words.learn(self.scores)
        for number, texts in enumerate(self._generations(), 1):
            self._evaluate(texts)
            self.history.append(self.scores[self.best])
            if number % 10 == 0:
                self.words.learn(self.scores)
            self.effort.show(self.standing())
            if self.effort.spent >= end or (may_settle and self.has_settled()):
                break

    def _scan(self, end: float) -> None:
        order = list(self.public)
        for start in range(0, len(order), AT_ONCE):
            self._evaluate(order[start : start + AT_ONCE])
            if self.effort.spent >= end:
                break
        self.population = self.population or order[:_POPULATION]  # all had been scored

    def _generations(self) -> Iterator[list[Text]]:
        for number in range(1, 2**31):
            if number % _SWEEP_EVERY == 0 and (swept := self._sweep()):
                for start in range(0, len(swept), AT_ONCE):
                    yield swept[start : start + AT_ONCE]
            children: dict[Text, None] = {}
            for _ in range(20 * AT_ONCE):  # of short texts all changes may be known
                child = self._child()
                if child not in self.scores:
                    children[child] = None
                if len(children) == AT_ONCE:
                    break
            yield list(children)

    def _child(self) -> Text:
        text = self._pick()
        if self.random.random() < 0.6:
            return mutate(text, self.words, self.population, self.random)
        crossed = cross(text, self._pick(), self.random)
        if self.random.random() < 0.4:
            return mutate(crossed, self.words, self.population, self.random)
        return crossed

    def _pick(self) -> Text:
        place = int(self.random.expovariate(6 / len(self.population)))
        return self.population[min(place, len(self.population) - 1)]

    def _sweep(self) -> list[Text]:
        """Return variants of the best text that was not swept, with other words at each place."""
        text = next((text for text in self.population[:20] if text not in self._swept), None)
        if text is None:
            return []
        self._swept.add(text)
        changed = [
            (*text[:place], word, *text[place + 1 :])
            for place in range(len(text))
            for word in self.words.likeliest_between(*neighbors(text, place), _SWEPT_WORDS)
        ]
        return [variant for variant in dict.fromkeys(changed) if variant not in self.scores]

    def _evaluate(self, texts: Sequence[Text]) -> None:
        texts = [text for text in dict.fromkeys(texts) if text not in self.scores]
        self.effort.evaluated += len(texts)
        for text, (score, own_score) in zip(texts, self.score(texts).tolist(), strict=True):
            prior = self.words.log_probability(text) * self._slope
            self.scores[text], self._own_scores[text] = score, own_score
            self._fitness[text] = score + prior
        ordered = sorted({*self.population, *texts}, key=lambda t: -self._fitness[t])
        self.population = []
        for text in ordered:
            near_copies = sum(_distance(text, kept_text) <= 1 for kept_text in self.population)
            if near_copies < _NEAR_COPIES:
                self.population.append(text)
            if len(self.population) == _POPULATION:
                break

    def has_settled(self) -> bool:
        """Return whether a text stays the best whose score is what the true text would have.

        Its own gradient says what that is.
        """
        if isinstance(self.score, WholeLikelihood):
            return self._stays()
        stays = self._stays() if self._stayed is None else self._stayed
        if self.score.expected is None or not stays:
            return False
        return self._own_scores[self.best] - self.scores[self.best] < _SETTLED

    def _stays(self) -> bool:
        """Return whether no better text came for long."""
        patience = _END_PATIENCE if self.score is not self.whitened else _PATIENCE
        has_waited = len(self.history) - self._begun > patience
        return has_waited and self.history[-1] <= self.history[-1 - patience]

    def standing(self) -> str:
        """Return the best score beside the expected one."""
        expected = self.score.expected
        goal = "" if expected is None else f" of about {expected:.1f} that the truth would score"
        return f"{self.scores[self.best]:.1f}{goal}"


def _take_turns(searches: Sequence[_Search], end: float) -> None:
    """Search each text in turn, in what the others leave, up to a fraction of the effort."""
    if len(searches) == 1:
        searches[0].run_populations(searches[0].effort.attack.populations, end)
        return
    turns = _TURNS * len(searches)
    for turn in range(turns):
        search = searches[turn % len(searches)]
        if search.population and search.effort.spent >= end:  # a turn begins by scoring anew
            break
        search.take_out([x for x in searches if x is not search and x.population])
        search.run(end * (turn + 1) / turns)


def _found(observation: Observation, searches: Sequence[_Search], effort: _Effort) -> Found:
    """Return the best texts so far as the reconstruction."""
    prefix_ids, suffix_ids = observation.frame
    ids = [[*prefix_ids, *search.best, *suffix_ids] for search in searches]
    labels = [search.whitened.label for search in searches if search.whitened.label is not None]
    expected = [search.score.expected for search in searches]
    is_known = None not in expected
    open_ = [search.standing() for search in searches if not search.has_settled()]
    undecided = f"The search stopped at {', '.join(open_)}." if open_ and is_known else ""
    fitness = _mean([search._fitness[search.best] for search in searches])
    return Found(
        token_ids=ids,
        text=as_text(ids, observation.tokenizer),
        labels=torch.cat(labels) if labels else None,
        objective=-fitness,
        seconds=effort.clock.elapsed,
        history=[-score for score in searches[-1].history],
        undecided=undecided,
        complete=not open_,
        score=_mean([search.scores[search.best] for search in searches]),
        expected_score=_mean([e for e in expected if e is not None]) if is_known else math.nan,
        evaluated=effort.evaluated,
        scores=list(searches[-1].history),
    )


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def _distance(text: Text, reference: Text) -> int:
    return sum(a != b for a, b in zip(text, reference, strict=True))
