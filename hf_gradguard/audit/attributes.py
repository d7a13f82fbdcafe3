"""Attribute inference: what a message reveals of its sample, by a trained classifier.

The classifier was trained on messages of public samples through the same model and defense. No text
is reconstructed. The label, the topic, the length or a word of a text may be inferred all the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import binomtest
from torch import Tensor, nn

from ..defenses import Defense
from ..extras import need
from ..gradient_map import GradientMap, Tensors
from ..gradient_map.domain import IMAGE
from ..gradient_map.vectorized import ManyGradients
from ..randomness import Stream, torch_generator

try:
    from sklearn.compose import ColumnTransformer
    from sklearn.decomposition import PCA
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_predict
    from sklearn.pipeline import Pipeline
    from sklearn.preprocessing import StandardScaler
except ModuleNotFoundError:
    need("audit.attributes", "attacks", "sklearn")
    raise

_DIRECTIONS_ONE_IN = 4  # one public sample in so many says in which directions to look
_FOLDS = 5
_MOST_LABELS = 10  # that are told from each other first
_LEAST_POWER = 1e-10  # of a direction, in units of the strongest: less is rounding
_PENALTIES = [1e-4, 1e-3, 1e-2, 1e-1, 1.0]  # C of the logistic regression: small ones bind more

Attribute = Callable[[Any, int], Hashable]
"""A function that returns the attribute's value for a sample, `(text or pixels, label)`."""


@dataclass(frozen=True)
class InferredAttribute:
    """The result of inferring one attribute of samples from their messages.

    Args:
        recall: For each value, the number of messages from which an attacker inferred it, and the
            number of messages of samples that have it. The attacker takes all values for equally
            likely.
        correct: The number of messages with a correct inference, if the attacker also counts how
            frequent values are.
        most_frequent: The number of messages for which the most frequent value of the public
            samples is correct.

    Example:
        >>> film = InferredAttribute({True: (18, 20), False: (70, 80)}, 91, 80)
        >>> film.accuracy, film.prior, [round(end, 2) for end in film.interval], film.verdict
        (0.8875, 0.5, [0.77, 0.94], 'beyond the prior')
        >>> film.correct_share, film.most_frequent_share
        (0.91, 0.8)
    """

    recall: Mapping[Hashable, tuple[int, int]]
    correct: int
    most_frequent: int

    @property
    def messages(self) -> int:
        """The number of messages that were attacked."""
        return sum(count for _, count in self.recall.values())

    @property
    def accuracy(self) -> float:
        """The balanced accuracy: the mean recall over values, as if each were equally frequent."""
        return sum(correct / count for correct, count in self.recall.values()) / len(self.recall)

    @property
    def prior(self) -> float:
        """The `accuracy` of a guess without a message."""
        return 1 / len(self.recall)

    @property
    def advantage(self) -> float:
        """The `accuracy` minus that of a guess without a message."""
        return self.accuracy - self.prior

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of `accuracy` over messages.

        Exact intervals of values (Clopper and Pearson) are combined as those of independent
        proportions (Zou and Donner, 2008).
        """
        below = above = 0.0
        for correct, count in self.recall.values():
            ends = binomtest(correct, count).proportion_ci(0.95, method="exact")
            below += (correct / count - float(ends.low)) ** 2
            above += (float(ends.high) - correct / count) ** 2
        low, high = (math.sqrt(square) / len(self.recall) for square in (below, above))
        return max(0.0, self.accuracy - low), min(1.0, self.accuracy + high)

    @property
    def verdict(self) -> str:
        """The verdict: `"beyond the prior"`, or `"cannot tell"` if the interval covers that."""
        return "beyond the prior" if self.interval[0] > self.prior else "cannot tell"

    @property
    def correct_share(self) -> float:
        """The fraction of correct inferences that also count how frequent values are."""
        return self.correct / self.messages

    @property
    def most_frequent_share(self) -> float:
        """The accuracy of always guessing the most frequent value; compare `correct_share`."""
        return self.most_frequent / self.messages


def infer_attributes(
    model: nn.Module, tokenizer: Any, private: Sequence[tuple[Any, int]],
    public: Sequence[tuple[Any, int]], attributes: Mapping[str, Attribute], defense: Defense, *,
    directions: int = 16, generator: Stream | None = None,
) -> dict[str, InferredAttribute]:  # fmt: skip
    """Infer attributes of samples from messages of one sample each, beyond what is likely without.

    The attacker has the model, the defense and public samples, and is granted neither labels nor
    lengths. From clean gradients of a quarter of the public samples it learns in which directions
    gradients differ, at random and between values, tensor by tensor. It sends the others through
    the defense, and trains a logistic regression on those coordinates and on tensors' norms: of the
    label first, then of each attribute within labels. Cross-validation decides scale and penalty.

    Args:
        model: The model, in the mode in which clients run it.
        tokenizer: The model's tokenizer; `None` for images.
        private: `(text, label)` or `(pixels, label)` of those who are attacked.
        public: Samples of others in the same form, preferably a few hundred. None may be among the
            private ones, or of the same document.
        attributes: Functions of a sample, by the attribute's name.
        defense: The defense that clients run.
        directions: Directions per tensor, beside one for each value. They take as much memory as
            this many gradients.
        generator: The source of noise and directions. Default: a private one.

    Raises:
        ValueError: If a public sample is private too, a value is too rare in public, or no private
            sample has it.

    Example:
        >>> forms = "a {} {} film", "the {} plot is {}"
        >>> def samples(*words):
        ...     texts = [text.format(a, b) for a in words for b in words for text in forms]
        ...     return [(text, int("film" in text)) for text in texts]
        >>> public = samples("warm", "dull", "bright", "slow", "sweet") * 2
        >>> private = samples("fine", "long", "great")
        >>> attributes = {"film": lambda text, label: "film" in text}
        >>> none, data = make_defense("none"), (private, public)
        >>> found = infer_attributes(model, tokenizer, *data, attributes, none, directions=4)
        >>> found["film"].accuracy, found["film"].verdict
        (1.0, 'beyond the prior')
    """
    stream = generator or Stream()
    values = _values_of(private, public, attributes)
    labels = [label for _, label in public]
    count = len(public) // _DIRECTIONS_ONE_IN
    batches = [_batch(model, tokenizer, sample) for sample in (*public, *private)]
    # Of a classifier a gradient is a residual times what the text makes of it: the residual's sign
    # is the label's, so values are compared within labels.
    cells = [list(zip(labels, known, strict=True))[:count] for known, _ in values.values()]
    contrasts = [_contrasts(labels[:count]), *map(_contrasts, cells)]
    bases = _directions(model, batches[:count], contrasts, directions, stream)
    messages = (defense(GradientMap(model, batch), stream) for batch in batches[count:])
    features, norms = _features(messages, bases, len(public) - count)
    seed = int(stream.integers(2**31 - 1, (1,))[0])
    features = _within_labels(features, norms, labels[count:], seed)
    return {
        name: _attack(features, norms, known[count:], hidden, seed)
        for name, (known, hidden) in values.items()
    }


def _values_of(
    private: Sequence[tuple[Any, int]], public: Sequence[tuple[Any, int]],
    attributes: Mapping[str, Attribute],
) -> dict[str, tuple[list[Hashable], list[Hashable]]]:  # fmt: skip
    """Return the values of public and of private samples, by attribute."""
    texts = {text for text, _ in private if isinstance(text, str)}
    if shared := [text for text, _ in public if isinstance(text, str) and text in texts]:
        raise ValueError(f"public and private samples have one in common: {shared[0]!r}.")
    values = {}
    for name, attribute in attributes.items():
        known, hidden = ([attribute(*s) for s in samples] for samples in (public, private))
        count = len(public) // _DIRECTIONS_ONE_IN
        frequency = Counter(known[count:])
        for value in {*hidden, *frequency}:
            if frequency[value] < _FOLDS or value not in known[:count]:
                raise ValueError(
                    f"{name} is {value!r} for too few public samples: give more of them, in random "
                    "order, or coarser values."
                )
            if value not in hidden:
                raise ValueError(f"{name} is {value!r} for no private sample.")
        if len(frequency) < 2:
            raise ValueError(f"{name} has one value only: there is nothing to infer.")
        values[name] = known, hidden
    return values


def _batch(model: nn.Module, tokenizer: Any, sample: tuple[Any, int]) -> dict[str, Tensor]:
    content, label = sample
    device = next(model.parameters()).device
    if tokenizer is None:
        entries = {IMAGE.key: torch.as_tensor(content)[None]}
    else:
        entries = dict(tokenizer(content, truncation=True, return_tensors="pt"))
    entries["labels"] = torch.tensor([label])
    return {key: entry.to(device) for key, entry in entries.items()}


def _contrasts(values: Sequence[Hashable]) -> Tensor:
    """Return weights of samples that give the mean of a value less that of all.

    They are `(samples, values - 1)`.
    """
    columns = []
    for value in list(dict.fromkeys(values))[1:]:
        is_of_value = torch.tensor([float(other == value) for other in values])
        columns.append(is_of_value / is_of_value.sum() - 1 / len(values))
    return torch.stack(columns, 1)


def _directions(
    model: nn.Module, batches: Sequence[Mapping[str, Tensor]], contrasts: Sequence[Tensor],
    count: int, stream: Stream,
) -> Tensors:  # fmt: skip
    """Return orthonormal rows for each tensor that span the directions in which gradients differ.

    They span the mean gradient, contrasts between values, and random mixtures of gradients'
    deviations from the mean, which lie where these vary most (Halko, Martinsson and Tropp, 2011).
    """
    parameters = GradientMap(model, batches[0]).parameters  # without what no client shares
    device = next(iter(parameters.values())).device
    rng = torch_generator(stream, device)
    mixed = torch.randn(len(batches), count, generator=rng, device=device)
    mean = torch.ones(len(batches), 1, device=device)
    columns = [mean, mixed - mixed.mean(0), *(contrast.to(device) for contrast in contrasts)]
    weights = torch.cat([column / column.norm(dim=0) for column in columns], 1)
    spans = {n: torch.zeros(weights.shape[1], p.numel(), device=device)
             for n, p in parameters.items()}  # fmt: skip
    for rows, gradients in ManyGradients(model, list(parameters))(batches):
        for name, g in gradients.items():
            spans[name].addmm_(weights[rows].T, g.flatten(1).float())
    return {name: _orthonormal(span) for name, span in spans.items()}


def _orthonormal(rows: Tensor) -> Tensor:
    """Return orthonormal rows of the same span, by a small eigenproblem."""
    wide = rows.double()
    powers, turns = torch.linalg.eigh(wide @ wide.T)
    is_there = powers > _LEAST_POWER * powers.max()
    return (turns[:, is_there] / powers[is_there].sqrt()).T.float() @ rows


def _features(
    messages: Iterable[Mapping[str, Tensor]], bases: Tensors, trained: int
) -> tuple[np.ndarray, int]:
    """Return one row for each message, coordinates first and then logarithms of norms.

    The second value is the number of norms.
    """
    coordinates, log_norms = [], []
    for message in messages:
        bases = {name: rows for name, rows in bases.items() if name in message}
        coordinates.append(torch.cat([b @ message[n].flatten().to(b) for n, b in bases.items()]))
        log_norms.append([math.log(float(message[n].double().norm()) + 1e-12) for n in bases])
    rows = torch.stack(coordinates).cpu().numpy()
    # One unit for all coordinates keeps noise that is alike in all of them alike.
    unit = float(np.sqrt(np.mean(np.square(rows[:trained])))) or 1.0
    return np.column_stack([rows / unit, log_norms]), len(bases)


def _within_labels(
    features: np.ndarray, norms: int, labels: Sequence[int], seed: int
) -> np.ndarray:
    """Return features with the coordinates repeated for each label, times its probability."""
    classes = np.array([sorted(set(labels)).index(label) for label in labels])
    if not 1 < classes.max() + 1 <= _MOST_LABELS or np.bincount(classes).min() < _FOLDS:
        return features
    train, search = features[: len(labels)], _search(norms, seed)
    search.fit(train, classes)
    # Of what it was trained on a classifier is too sure: those are inferred by the other folds.
    folds = _folds(seed)
    best = search.best_estimator_
    inside = cross_val_predict(best, train, classes, cv=folds, method="predict_proba")
    posterior = np.vstack([inside, search.predict_proba(features[len(labels) :])])
    copies = [features[:, :-norms] * column[:, None] for column in posterior.T]
    return np.column_stack([*copies, features])


def _folds(seed: int) -> StratifiedKFold:
    return StratifiedKFold(_FOLDS, shuffle=True, random_state=seed)


def _search(norms: int, seed: int) -> GridSearchCV:
    """Return a search over logistic regressions of features, of which the last are norms."""
    scale = ColumnTransformer(
        [("coordinates", StandardScaler(), slice(0, -norms)),
         ("norms", StandardScaler(), slice(-norms, None))]
    )  # fmt: skip
    # There are more features than messages: a rotation into their span changes no penalized fit.
    classifier = LogisticRegression(max_iter=500)
    steps = Pipeline([("scale", scale), ("rotate", PCA()), ("classifier", classifier)])
    choices = {
        "scale__coordinates": [StandardScaler(), "passthrough"], "classifier__C": _PENALTIES,
    }  # fmt: skip
    return GridSearchCV(steps, choices, scoring="neg_log_loss", cv=_folds(seed))


def _attack(
    features: np.ndarray, norms: int, known: Sequence[Hashable], hidden: Sequence[Hashable],
    seed: int,
) -> InferredAttribute:  # fmt: skip
    """Train on the messages whose values are known, and infer the others' values."""
    order = list(dict.fromkeys(known))
    classes = np.array([order.index(value) for value in known])
    truth = np.array([order.index(value) for value in hidden])
    search = _search(norms, seed).fit(features[: len(known)], classes)
    posterior = search.predict_proba(features[len(known) :])
    frequency = np.bincount(classes) / len(classes)
    inferred = (posterior / frequency).argmax(1)
    recall = {
        value: (int((inferred[truth == k] == k).sum()), int((truth == k).sum()))
        for k, value in enumerate(order)
    }
    most_frequent = int((truth == frequency.argmax()).sum())
    return InferredAttribute(recall, int((posterior.argmax(1) == truth).sum()), most_frequent)
