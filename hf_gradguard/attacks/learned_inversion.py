"""An attack that learns to invert, from messages of public texts behind the client's defense.

A linear layer's gradient is g = Σ_t δ_t a_tᵀ: along the directions of slopes δ it holds what the
text's tokens bring into the layer. Public texts say what each token brings in, and which directions
slopes have. A classifier, shared by all tokens, learns from messages of other texts what a defense
leaves of this.

Reference: Wu et al., "Learning To Invert: Simple Adaptive Attacks for Gradient Inversion in
Federated Learning" (2023), whose network writes the input itself, from far more messages.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..extras import need
from ..gradient_map import GradientMap
from ..gradient_map.domain import TEXT
from ..randomness import Stream
from ..registry import DEFENSES, make
from .base import Attack, Clock, Observation, Reconstruction, as_text, without_dropout
from .label_recovery import recover_labels
from .layer_inputs import is_causal_lm
from .likelihood_search.score import Text, layer_factors, linear_names, public_ids, text_batch

try:
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
except ModuleNotFoundError:
    need("attacks", "attacks", "sklearn")
    raise

_CLEAN, _CLEAN_FRACTION = 150, 0.25  # public texts whose layers are looked into, and of the time
_FEWEST_TEXTS, _FEWEST_MESSAGES = 16, 10
_SLOPES, _MIXTURES = 8, 64  # directions of a layer's slopes, and random ones
_OTHER_TOKENS = 60  # beside those of a text, when it is learned which are its own
_USUAL_TOKENS = 500  # in whose units features are
_HELD_OUT = 0.2  # of the messages, by which the classifier is chosen
_CLASSIFIERS = {
    "logistic, 0.01": lambda: LogisticRegression(C=0.01, max_iter=300),
    "logistic, 0.1": lambda: LogisticRegression(C=0.1, max_iter=300),
    "boosted trees": lambda: HistGradientBoostingClassifier(
        max_iter=150, learning_rate=0.06, l2_regularization=1.0, max_leaf_nodes=15, random_state=0
    ),
}


@dataclass
class LearnedInversion(Attack):
    """Learns from messages of public texts which tokens stand behind a message.

    It protects public texts as the client does, and trains a classifier on these messages: does
    this token's text stand behind the message? So it follows every defense, also one that no
    likelihood describes. It reads messages of one text, and returns as many tokens as that has,
    each once, the likeliest first: not their order. What it learned is kept for later messages of
    the same model.

    Args:
        public_texts: Texts like the client's, or their ids: at least 16. Audits give candidates
            that are in no audited message.
        public_labels: The classes of the public inputs. Default: the message's own labels for all
            of them.
        defense: The client's defense, a `Defense` or its name. Audits give the audited one.
        messages: The number of messages of public texts to learn from.
        seconds: Time after which learning stops. With less than 10 messages the most frequent
            tokens are returned.
        seed: The seed of its own messages' noise, and of the tokens that are compared: what it
            learns depends on no message.
        progress: Show a bar.

    Raises:
        ValueError: If a setting is out of range.

    Example:
        >>> attack = LearnedInversion(["a fine film", "a dull plot"] * 8, defense="pruning")
        >>> attack.messages
        300
    """

    name: ClassVar[str] = "learned_inversion"
    domains: ClassVar[tuple[str, ...]] = ("text",)
    public_texts: Sequence[Any] = ()
    public_labels: Sequence[int] | None = None
    defense: Any = None
    messages: int = 300
    seconds: float = 600.0
    seed: int = 0
    progress: bool = False
    _learned: tuple[Any, TokenClassifier] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not self.seconds > 0 or self.messages < _FEWEST_MESSAGES:
            raise ValueError(
                f"seconds must be above 0, and messages at least {_FEWEST_MESSAGES}, but are "
                f"{self.seconds} and {self.messages}."
            )
        if self.public_labels is not None and len(self.public_labels) != len(self.public_texts):
            raise ValueError(
                f"There are {len(self.public_labels)} labels of {len(self.public_texts)} texts."
            )

    def reconstruct(self, observation: Observation, generator: torch.Generator) -> Reconstruction:
        clock = Clock(self.seconds)
        if observation.batch_size > 1 or observation.local is not None:
            raise ValueError("learned_inversion reads messages of one text and one step.")
        if self.defense is None:
            raise ValueError(
                "learned_inversion learns from messages of its own: give it the client's defense."
            )
        prefix_ids, suffix_ids = observation.frame
        count = int(observation.tokens.sum()) - len(prefix_ids) - len(suffix_ids)
        labels = None  # of language models the text is the label
        if not is_causal_lm(observation.model):
            labels = observation.labels
            labels = recover_labels(observation) if labels is None else labels
        label = None if labels is None else int(labels[0])
        with without_dropout(observation.model):
            classifier = self._trained(observation, label, clock)
            tokens = classifier.likeliest(observation.gradient, label, count)
        ids = [[*prefix_ids, *tokens, *suffix_ids]]
        return Reconstruction(
            token_ids=ids,
            text=as_text(ids, observation.tokenizer),
            labels=labels,
            seconds=clock.elapsed,
            undecided="The order of its tokens is not learned, nor which come twice.",
            complete=classifier.messages >= self.messages,
        )

    def _trained(
        self, observation: Observation, label: int | None, clock: Clock
    ) -> TokenClassifier:
        """Return what was learned of this model, or learn it now."""
        model = observation.model
        versions = tuple(parameter._version for parameter in model.parameters())
        own_label = label if self.public_labels is None else None
        learned_of = ref(model), versions, own_label, frozenset(observation.gradient)
        if self._learned is None or self._learned[0] != learned_of:
            self._learned = learned_of, self._learn(observation, label, clock)
        return self._learned[1]

    def _learn(self, observation: Observation, label: int | None, clock: Clock) -> TokenClassifier:
        texts = public_ids(self.public_texts, observation)
        if len(texts) < _FEWEST_TEXTS:
            raise ValueError(
                f"learned_inversion needs {_FEWEST_TEXTS} public texts, but has {len(texts)}."
            )
        labels = [label] * len(texts) if self.public_labels is None else list(self.public_labels)
        rows = [row for row in zip(texts, labels, strict=True) if row[0]]
        counts = Counter(word for text in texts for word in text)
        clean = rows[: min(_CLEAN, len(rows) // 2)]
        layers = PublicLayers(observation, clean, sorted(counts), _CLEAN_FRACTION * self.seconds)
        classifier = TokenClassifier(layers, counts, self.seed)
        shadow_rows = list(itertools.islice(itertools.cycle(rows[len(clean) :]), self.messages))
        defense: Any = self.defense
        if isinstance(defense, str):
            defense = make(DEFENSES, defense, {})
        defense.prepare(observation.model, observation.tokenizer)
        bar = logging.tqdm(shadow_rows, desc=self.name, disable=not self.progress)
        for number, (text, text_label) in enumerate(bar):
            if clock.must_stop():
                break
            batch = text_batch(observation, [text], _as_labels(text_label, observation.device))
            gmap = GradientMap(observation.model, batch)
            # each is a client's first message
            message, _ = defense.apply(gmap, {}, Stream.from_seeds(self.seed, number))
            classifier.add(message, text_label, set(text))
        bar.close()
        classifier.learn()
        return classifier


def _as_labels(label: int | None, device: torch.device) -> Tensor | None:
    return None if label is None else torch.tensor([label], device=device)


class PublicLayers:
    """The inputs and slopes of linear layers on public texts.

    A token's input of a layer is a linear map of its embedding; the directions of slopes are kept
    by label.

    Args:
        observation: An observation of a message, for model and framing.
        rows: Public texts with their labels.
        tokens: Ids to distinguish.
        seconds: Time after which no more texts are examined, if there are 16.

    Raises:
        ValueError: If no layer that takes in a vector a token was shared.
    """

    def __init__(
        self, observation: Observation, rows: Sequence[tuple[Text, int | None]],
        tokens: Sequence[int], seconds: float = math.inf,
    ) -> None:  # fmt: skip
        model = observation.model
        table: Any = TEXT.token_embeddings(model)[0].weight
        is_turned = linear_names(model)
        parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if name in is_turned and name in observation.gradient
        }
        inputs, slopes = ({name: list[Tensor]() for name in parameters} for _ in range(2))
        ids, labels, clock = list[Tensor](), list[int | None](), Clock(seconds)
        for text, label in rows:
            if len(ids) >= _FEWEST_TEXTS and clock.must_stop():
                break
            batch = text_batch(observation, [text], _as_labels(label, observation.device))
            ids.append(batch["input_ids"][0])
            labels += [label] * len(ids[-1])
            for name, (slope, features) in layer_factors(model, parameters, batch).items():
                if features.shape[1:] == (len(ids[-1]), table.shape[1]):
                    inputs[name].append(features[0])
                    slopes[name].append(slope[0])
        self._turned = {n: is_turned[n] for n in parameters if len(inputs[n]) == len(ids)}
        if not self._turned:
            raise ValueError(
                "learned_inversion needs linear layers' gradients that take in a vector of the "
                "embedding's width for each token, and none was shared."
            )
        self.place = {token: place for place, token in enumerate(tokens)}
        vectors = nn.functional.pad(table.detach().double(), (0, 1), value=1.0)
        self._tokens = {
            name: _brought_in(torch.cat(inputs[name]), torch.cat(ids), vectors, list(tokens))
            for name in self._turned
        }
        generator = torch.Generator().manual_seed(0)
        self._mixing = {
            name: torch.randn(_MIXTURES, slopes[name][0].shape[1], generator=generator).to(table)
            for name in self._turned
        }
        self._slopes = {}
        for label in set(labels):
            is_labeled = torch.tensor(
                [token_label == label for token_label in labels], device=table.device
            )
            for name in self._turned:
                self._slopes[name, label] = _directions(torch.cat(slopes[name])[is_labeled])

    def products(
        self, message: Mapping[str, Tensor], label: int | None
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Return each layer's message along slopes' directions, and along random ones.

        They are `(slopes, in)` and `(mixtures, in)`. A vector is about as long in the latter as in
        the message.
        """
        products = {}
        for name, is_turned in self._turned.items():
            gradient = message[name].float()
            gradient = gradient.T if is_turned else gradient
            # Of a class that public texts do not have, slopes are the other way round, or alike.
            directions = self._slopes.get((name, label))
            if directions is None:
                directions = next(d for (n, _), d in self._slopes.items() if n == name)
            products[name] = directions @ gradient, self._mixing[name] @ gradient
        return products

    def features(self, products: Mapping[str, tuple[Tensor, Tensor]], places: Tensor) -> np.ndarray:
        """Return products by layer and slope, and logarithms of energies, `(tokens, features)`."""
        along, energies = [], []
        for name, (rows, mixtures) in products.items():
            brought_in = self._tokens[name][places]
            along.append(brought_in @ rows.T)
            energies.append((brought_in @ mixtures.T).square().sum(1).clamp(min=1e-30).log())
        return torch.cat([*along, torch.stack(energies, 1)], 1).cpu().numpy()


def _brought_in(inputs: Tensor, ids: Tensor, vectors: Tensor, tokens: list[int]) -> Tensor:
    """Return tokens' inputs of norm 1, `(tokens, in)`, in whitened coordinates.

    Public inputs vary equally in all of these coordinates.
    """
    public_vectors, inputs = vectors[ids], inputs.double()
    identity = torch.eye(vectors.shape[1]).to(vectors)
    ridge = 10 * public_vectors.square().mean() * identity
    weights = torch.linalg.solve(
        public_vectors.T @ public_vectors + ridge, public_vectors.T @ inputs
    )
    mean = inputs.mean(0)
    values, axes = torch.linalg.eigh((inputs - mean).T @ (inputs - mean) / len(inputs))
    white = axes / (values.clamp(min=0) + 1e-3 * values[-1]).sqrt() @ axes.T
    return nn.functional.normalize((vectors[tokens] @ weights - mean) @ white, dim=1).float()


def _directions(slopes: Tensor) -> Tensor:
    """Return directions of slopes, `(slopes, out)`, each pointing where the mean slope does."""
    mean = slopes.mean(0)
    rows = torch.cat([mean[None] * len(slopes) ** 0.5, slopes]).double()
    _, vectors = torch.linalg.eigh(rows.T @ rows)
    directions = vectors.flip(1)[:, :_SLOPES].T.float()
    return directions * torch.sign(directions @ mean)[:, None]


class TokenClassifier:
    """A classifier of tokens, shared by all of them: is a token in this message's text?

    Args:
        layers: What public texts tell of layers.
        counts: How often tokens are in public texts, which is the prior.
        seed: The seed of the tokens that are compared.
    """

    def __init__(self, layers: PublicLayers, counts: Mapping[int, int], seed: int) -> None:
        self._layers, self._rng = layers, np.random.default_rng(seed)
        self._tokens = np.array(list(layers.place))
        frequencies = np.array([counts[token] for token in self._tokens.tolist()], dtype=float)
        self._prior = frequencies / frequencies.sum()
        self._rows: list[np.ndarray] = []
        self._is_in_text: list[np.ndarray] = []
        self._classifier: Any = None

    @property
    def messages(self) -> int:
        """The number of messages that it learned from."""
        return len(self._rows)

    def add(self, message: Mapping[str, Tensor], label: int | None, text: set[int]) -> None:
        """Add a public text's message to learn from."""
        frequent = self._rng.choice(self._tokens, _OTHER_TOKENS, p=self._prior)
        other_tokens = sorted(set(frequent.tolist()) - text)
        reference = self._rng.choice(self._tokens, _USUAL_TOKENS)
        products = self._layers.products(message, label)
        tokens = [*sorted(text), *other_tokens, *reference.tolist()]
        places = torch.tensor([self._layers.place[token] for token in tokens])
        rows, count = self._layers.features(products, places), len(text) + len(other_tokens)
        self._rows.append(_standardized(rows[:count], rows[count:]))
        self._is_in_text.append(np.arange(count) < len(text))

    def learn(self) -> None:
        """Choose a classifier on messages that it was not trained on, and train it on all."""
        if self.messages < _FEWEST_MESSAGES:
            return
        learned = round((1 - _HELD_OUT) * self.messages)
        train, held_out = (
            (np.concatenate(self._rows[messages]), np.concatenate(self._is_in_text[messages]))
            for messages in (slice(learned), slice(learned, None))
        )
        quality = {}
        for name, classifier in _CLASSIFIERS.items():
            scores = classifier().fit(*train).decision_function(held_out[0])
            quality[name] = roc_auc_score(held_out[1], scores)
        best_classifier = _CLASSIFIERS[max(quality, key=quality.__getitem__)]
        self._classifier = best_classifier().fit(
            np.concatenate(self._rows), np.concatenate(self._is_in_text)
        )

    def likeliest(self, message: Mapping[str, Tensor], label: int | None, count: int) -> list[int]:
        """Return the `count` likeliest tokens, each once."""
        scores = np.log(self._prior)
        if self._classifier is not None:
            products = self._layers.products(message, label)
            rows = self._layers.features(products, torch.arange(len(self._tokens)))
            scores = scores + self._classifier.decision_function(_standardized(rows, rows))
        best = np.argsort(-scores, kind="stable")[:count]
        tokens: list[int] = self._tokens[best].tolist()
        return tokens


def _standardized(rows: np.ndarray, usual: np.ndarray) -> np.ndarray:
    """Return features in units of usual tokens, with sizes beside the signed products."""
    rows = (rows - usual.mean(0)) / np.maximum(usual.std(0), 1e-6)
    return np.concatenate([rows, np.abs(rows)], 1)
