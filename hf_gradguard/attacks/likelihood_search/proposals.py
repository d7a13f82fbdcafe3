"""Proposals of texts to try next: those that score well, changed in the words of public texts."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .score import Text

_NEIGHBORS = 24  # words that lie next to a word
_SMOOTHING = 10  # texts' worth of nothing, beside those that a word's effect is a mean of
_EFFECT = 0.7  # what a word's effect of one standard deviation adds to its logarithmic frequency
_FREQUENCY = 0.75  # power of frequencies
_START, _END = -1, -2


class PublicWords:
    """The words of public texts: their frequencies, their neighbors, and which are similar.

    Args:
        texts: Ids of words.
        embeddings: The embeddings of the model's tokens, `(V, H)`.

    Raises:
        ValueError: If there is no word.
    """

    def __init__(self, texts: Sequence[Text], embeddings: Tensor) -> None:
        counts = Counter(word for text in texts for word in text)
        if not counts:
            raise ValueError("The public texts have no word.")
        self.words = list(counts)
        self.place = {word: place for place, word in enumerate(self.words)}
        self.after: dict[int, Counter[int]] = defaultdict(Counter)
        self.before: dict[int, Counter[int]] = defaultdict(Counter)
        self.between: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
        self._after_two: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
        for text in texts:
            padded = [_START, *text, _END]
            for left_word, word, right in zip(padded, padded[1:], padded[2:], strict=False):
                self.after[left_word][word] += 1
                self.before[right][word] += 1
                self.between[left_word, right][word] += 1
            for word_before, second, word in zip(padded, padded[1:], padded[2:-1], strict=False):
                self._after_two[word_before, second][word] += 1
        self._total = sum(counts.values())
        self._counts = counts
        self.log_frequency = torch.tensor([math.log(counts[word]) for word in self.words])
        rows = embeddings[self.words].float().cpu()
        self._directions = torch.nn.functional.normalize(rows - rows.mean(0), dim=1)
        self._neighbors: dict[int, list[int]] = {}
        self.learn({})

    def learn(self, scores: Mapping[Text, float]) -> None:
        """Set each word's proposal probability, by its frequency and its texts' scores."""
        mean = sum(scores.values()) / max(len(scores), 1)
        sums, counts = Counter[int](), Counter[int]()
        for text, score in scores.items():
            for word in set(text):
                sums[word] += score - mean  # type: ignore[assignment]
                counts[word] += 1
        effects = torch.tensor([sums[word] / (counts[word] + _SMOOTHING) for word in self.words])
        effects = effects / (effects.std(correction=0) + 1e-9)
        self.log_weights = _FREQUENCY * self.log_frequency + _EFFECT * effects
        self._cumulated = self.log_weights.double().softmax(0).cumsum(0)

    def log_probability(self, text: Text) -> float:
        """Return the log-probability of a text under public texts' trigrams.

        They are interpolated with bigrams and single words (Jelinek and Mercer).
        """
        total, word_before, second = 0.0, _START, _START
        for word in text:
            single = (self._counts[word] + 0.1) / (self._total + 0.1 * len(self.words))
            after_one = _fraction(self.after.get(second), word)
            after_two = _fraction(self._after_two.get((word_before, second)), word)
            total += math.log(0.25 * single + 0.4 * after_one + 0.35 * after_two)
            word_before, second = second, word
        return total

    def draw(self, random_: random.Random) -> int:
        """Draw a word, whatever its neighbors."""
        place = int(torch.searchsorted(self._cumulated, random_.random()))
        return self.words[min(place, len(self.words) - 1)]

    def draw_between(self, left_word: int, right: int, random_: random.Random) -> int:
        """Draw a word that public texts have beside both neighbors, or beside one of them."""
        both, which = self.between.get((left_word, right)), random_.random()
        if both and which < 0.35:
            return _draw(both, random_)
        counts = self.after.get(left_word) if which < 0.7 else self.before.get(right)
        return _draw(counts, random_) if counts else self.draw(random_)

    def draw_alike(self, word: int, random_: random.Random) -> int:
        """Draw a word whose embedding is near."""
        if word not in self._neighbors:
            cosines = self._directions @ self._directions[self.place[word]]
            count = min(_NEIGHBORS + 1, len(self.words))
            near = [self.words[place] for place in cosines.topk(count).indices.tolist()]
            self._neighbors[word] = [similar for similar in near if similar != word] or [word]
        return random_.choice(self._neighbors[word])

    def likeliest_between(self, left_word: int, right: int, count: int) -> list[int]:
        """Return the `count` likeliest words, by both neighbors and scores."""
        weights = self.log_weights.clone()
        for counts, weight in (
            (self.after.get(left_word), 1.0),
            (self.before.get(right), 1.0),
            (self.between.get((left_word, right)), 2.0),
        ):
            total = sum(counts.values()) if counts else 0
            for word, times in (counts or {}).items():
                weights[self.place[word]] += weight * math.log(1 + 50 * times / (total + 5))
        places = weights.topk(min(count, len(self.words))).indices.tolist()
        return [self.words[place] for place in places]


def _fraction(counts: Counter[int] | None, word: int) -> float:
    return counts[word] / counts.total() if counts else 0.0


def _draw(counts: Mapping[int, int], random_: random.Random) -> int:
    return random_.choices(list(counts), list(counts.values()))[0]


def mutate(text: Text, words: PublicWords, others: Sequence[Text], random_: random.Random) -> Text:
    """Return the text with one change, or a few; its length stays.

    A change is another word, an exchange of two words, a moved segment, or one word less here and
    one more there.
    """
    changed, kind = list(text), random_.random()
    place = random_.randrange(len(text))
    if kind < 0.38:
        changed[place] = words.draw_between(*neighbors(changed, place), random_)
    elif kind < 0.58:
        changed[place] = words.draw(random_)
    elif kind < 0.70:
        changed[place] = words.draw_alike(changed[place], random_)
    elif kind < 0.78:
        changed[place] = random_.choice(random_.choice(others))
    elif kind < 0.83:
        target = random_.randrange(len(text))
        changed[place], changed[target] = changed[target], changed[place]
    elif kind < 0.91:
        start, end = sorted(random_.sample(range(len(text) + 1), 2))
        segment = changed[start:end]
        del changed[start:end]
        place = random_.randrange(len(changed) + 1)
        changed[place:place] = segment
    else:
        del changed[place]
        place = random_.randrange(len(text))
        left_word = changed[place - 1] if place else _START
        right = changed[place] if place < len(changed) else _END
        changed.insert(place, words.draw_between(left_word, right, random_))
    if random_.random() < 0.3:
        return mutate(tuple(changed), words, others, random_)
    return tuple(changed)


def cross(text: Text, other: Text, random_: random.Random) -> Text:
    """Return a mix of two texts.

    Each word is of either text, or a segment of the other is put at its place or elsewhere.
    """
    start, end = sorted((random_.randrange(len(text) + 1), random_.randrange(len(text) + 1)))
    kind = random_.random()
    if kind < 0.3:
        return tuple(a if random_.random() < 0.5 else b for a, b in zip(text, other, strict=True))
    place = random_.randrange(len(text) - (end - start) + 1) if kind < 0.6 else start
    return text[:place] + other[start:end] + text[place + end - start :]


def neighbors(text: Sequence[int], place: int) -> tuple[int, int]:
    """Return the words before and after a place."""
    left_word = text[place - 1] if place else _START
    return left_word, text[place + 1] if place + 1 < len(text) else _END


def texts_of_length(texts: Sequence[Text], length: int) -> list[Text]:
    """Return public texts of this many words, and then windows of longer and joined texts.

    Example:
        >>> texts_of_length([(1, 2), (3, 4, 5)], 2)
        [(1, 2), (3, 4)]
    """
    fitting = [text for text in texts if len(text) == length]
    longer = [text[:length] for text in texts if len(text) > length]
    joined = [word for text in texts if len(text) < length for word in text]
    rows = [
        tuple(joined[start : start + length])
        for start in range(0, len(joined) - length + 1, length)
    ]
    return list(dict.fromkeys([*fitting, *longer, *rows]))
