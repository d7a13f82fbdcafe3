"""The search for the text that makes a message likeliest, by words and not by slopes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.utils import logging

from ...gradient_map.domain import TEXT
from ...models import label_kind
from ..base import Attack, Clock, Observation, Reconstruction, as_text, without_dropout
from ..labels import recover_labels
from ..layer_inputs import is_causal_lm
from ..likelihood import mechanism_of
from .messages import white_message
from .proposals import PublicWords, cross, mutate, neighbors, texts_of_length
from .score import AT_ONCE, Text, WhitenedScore, linear_names

_FEWEST = 16  # public texts
_MOST_CLASSES = 8  # that are tried where the label is unknown
_SCANNED = 0.25  # of the effort goes to public texts themselves
_POPULATION = 96
_ALIKE = 4  # texts of a population that differ from one in a word at most
_SWEEP_EVERY = 20  # generations
_SWEPT_WORDS = 24  # at each place
_SETTLED = 1.0  # standard deviations below what a text's own gradient says it would score
_PATIENCE = 40  # generations without a better text, once it has settled


@dataclass
class Found(Reconstruction):
    """What a search found, and how far it came.

    Args:
        score: Of the text, in standard deviations of the noise.
        expected_score: What the true text would score; NaN where the noise is unknown.
        evaluated: How many texts were scored.
        scores: The best score after each generation.
    """

    score: float = float("nan")
    expected_score: float = float("nan")
    evaluated: int = 0
    scores: list[float] = field(default_factory=list)


@dataclass
class LikelihoodSearch(Attack):
    """Searches for the text of a message by its likelihood. Noise that hides every word from
    descent on embeddings does not hide them here: it spreads over all of a gradient's entries, and
    a candidate looks along one direction.

    The search starts from public texts of the message's length. Texts that score well are changed
    word by word, and crossed with each other; places are swept with the words that public texts
    have beside their neighbors. The score is the product of the message with a candidate's
    gradient, in a metric that public texts whiten (score.py), plus the logarithm of how likely
    public texts make the words. It needs no slope, so it works behind every defense: with the
    mechanism's noise where that is known, by cosine where it is not.

    Of messages of one text. Lengths and special tokens are the observation's.

    References: genetic search for adversarial texts, Alzantot et al. (2018); discrete search on
    gradients, Balunović et al., "LAMP" (2022). The metric is this library's.

    Args:
        public_texts: Texts like the client's, or their ids: at least 16. Audits give candidates
            that are in no audited message.
        seconds: Stop after so many.
        evaluations: Stop after so many texts were scored. Default: by `seconds` alone.
        damping: Of the metric, in variances of the noise.
        prior: What public texts' probabilities weigh; 1 is Bayes' rule.
        progress: Show a bar.

    Raises:
        ValueError: For a setting out of range.

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
    progress: bool = False

    def __post_init__(self) -> None:
        if not self.seconds > 0 or not self.damping > 0 or not self.prior >= 0:
            raise ValueError(
                "seconds and damping must be above 0, and prior at least 0, but they are "
                f"{self.seconds}, {self.damping} and {self.prior}."
            )
        if self.evaluations is not None and self.evaluations < 1:
            raise ValueError(f"evaluations must be at least 1, but is {self.evaluations}.")

    def reconstruct(self, observation: Observation, generator: torch.Generator) -> Found:
        clock = Clock(self.seconds)
        public = self._public(observation)
        length = int(observation.tokens.sum()) - sum(map(len, observation.frame))
        same_length = texts_of_length(public, length) if length > 0 else []
        if len(same_length) < _FEWEST:
            raise ValueError(
                f"public_texts have {len(same_length)} texts of {length} tokens, where the search "
                f"needs {_FEWEST}: give more, or longer ones."
            )
        with without_dropout(observation.model):
            score = self._score(observation, same_length)
            table: Any = TEXT.token_embeddings(observation.model)[0].weight
            seed = int(torch.randint(2**31, (1,), generator=generator, device=generator.device))
            search = _Search(
                self,
                score,
                PublicWords(public, table.detach()),
                same_length,
                random.Random(seed),
                clock,
            )
            search.run()
        return search.found(observation)

    def _public(self, observation: Observation) -> list[Text]:
        if observation.tokenizer is None:
            raise ValueError(
                "likelihood_search reads public texts: give the Observation the model's tokenizer."
            )
        if observation.batch_size > 1:
            raise ValueError(
                f"likelihood_search reads messages of one text, and this one is of "
                f"{observation.batch_size}: take candidates, or span."
            )
        special = set(observation.tokenizer.all_special_ids)
        encoded = [
            observation.tokenizer(text, add_special_tokens=False)["input_ids"]
            if isinstance(text, str)
            else torch.as_tensor(text).flatten().tolist()
            for text in self.public_texts
        ]
        return [
            tuple(word for word in ids if word not in special) for ids in encoded if len(ids) > 0
        ]

    def _score(self, observation: Observation, public: Sequence[Text]) -> WhitenedScore:
        """With the label that public texts fit best, where it is not known."""
        mechanism = mechanism_of(observation)
        message = white_message(observation, mechanism, linear_names(observation.model))
        scores = [
            WhitenedScore(observation, message, public, label, self.damping)
            for label in _labels(observation)
        ]
        return max(scores, key=lambda score: score.fit)


def _labels(observation: Observation) -> list[Tensor | None]:
    """Each that the text may have; of language models it is the text itself."""
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


class _Search:
    """A population of texts, and all that were scored."""

    def __init__(
        self, attack: LikelihoodSearch, score: WhitenedScore, words: PublicWords,
        public: Sequence[Text], random_: random.Random, clock: Clock,
    ) -> None:  # fmt: skip
        self.attack, self.score, self.words, self.public = attack, score, words, public
        self.random, self.clock = random_, clock
        self.scores: dict[Text, float] = {}
        self._own: dict[Text, float] = {}
        self._fitness: dict[Text, float] = {}
        self.population: list[Text] = []
        self.history: list[float] = []
        # What the prior is worth beside a score near that of the true text.
        self._slope = attack.prior / max(score.expected or 1.0, 10.0)
        self._swept: set[Text] = set()

    @property
    def effort(self) -> float:
        """Of what is granted, which share was spent."""
        spent = self.clock.elapsed / self.attack.seconds
        if self.attack.evaluations is not None:
            spent = max(spent, len(self.scores) / self.attack.evaluations)
        return spent

    @property
    def best(self) -> Text:
        return self.population[0]

    def run(self) -> None:
        """Until time is up, or the best text scores as the true one would and stays the best."""
        bar = logging.tqdm(total=100, desc=self.attack.name, disable=not self.attack.progress)
        self._scan()
        self.words.learn(self.scores)
        for number, texts in enumerate(self._generations(), 1):
            self._evaluate(texts)
            self.history.append(self.scores[self.best])
            if number % 10 == 0:
                self.words.learn(self.scores)
            bar.update(min(int(100 * self.effort), 100) - bar.n)
            bar.set_postfix_str(self._standing())
            if self.effort >= 1 or self._has_settled():
                break
        bar.close()

    def _scan(self) -> None:
        order = list(self.public)
        for start in range(0, len(order), AT_ONCE):
            self._evaluate(order[start : start + AT_ONCE])
            if self.effort >= _SCANNED:
                break

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
        """The best text that was not swept, with other words at each place."""
        text = next((text for text in self.population[:20] if text not in self._swept), None)
        if text is None:
            return []
        self._swept.add(text)
        changed = [
            (*text[:place], word, *text[place + 1 :])
            for place in range(len(text))
            for word in self.words.likeliest_between(*neighbors(text, place), _SWEPT_WORDS)
        ]
        return [other for other in dict.fromkeys(changed) if other not in self.scores]

    def _evaluate(self, texts: Sequence[Text]) -> None:
        texts = [text for text in dict.fromkeys(texts) if text not in self.scores]
        for text, (score, own) in zip(texts, self.score(texts).tolist(), strict=True):
            prior = self.words.log_probability(text) * self._slope
            self.scores[text], self._own[text] = score, own
            self._fitness[text] = score + prior
        ordered = sorted({*self.population, *texts}, key=lambda t: -self._fitness[t])
        self.population = []
        for text in ordered:
            alike = sum(_distance(text, other) <= 1 for other in self.population)
            if alike < _ALIKE:
                self.population.append(text)
            if len(self.population) == _POPULATION:
                break

    def _has_settled(self) -> bool:
        """A text whose score is what its own gradient says the true text would score."""
        if self.score.expected is None or len(self.history) <= _PATIENCE:
            return False
        misses = self._own[self.best] - self.scores[self.best]
        return misses < _SETTLED and self.history[-1] <= self.history[-1 - _PATIENCE]

    def _standing(self) -> str:
        expected = self.score.expected
        of = "" if expected is None else f" of about {expected:.1f} that the true text would score"
        return f"{self.scores[self.best]:.1f}{of}"

    def found(self, observation: Observation) -> Found:
        """The best text so far."""
        before, after = observation.frame
        ids = [[*before, *self.best, *after]]
        expected = self.score.expected
        unfinished = expected is not None and not self._has_settled()
        return Found(
            token_ids=ids,
            text=as_text(ids, observation.tokenizer),
            labels=self.score.label,
            objective=-self._fitness[self.best],
            seconds=self.clock.elapsed,
            history=[-score for score in self.history],
            undecided=f"The search stopped at {self._standing()}." if unfinished else "",
            complete=self._has_settled(),
            score=self.scores[self.best],
            expected_score=math.nan if expected is None else expected,
            evaluated=len(self.scores),
            scores=list(self.history),
        )


def _distance(text: Text, other: Text) -> int:
    return sum(a != b for a, b in zip(text, other, strict=True))
