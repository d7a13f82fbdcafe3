"""Does an attacker that learns to invert, from messages of public texts behind the same defense,
recover more of a sentence than a search does?
"""

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from transformers import set_seed

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.bodies import passes_of
from hf_gradguard.metrics import score_text
from hf_gradguard.randomness import Stream

from ..study import Study
from .lib.intervals import student
from .lib.tables import write_table
from .lib.text import batch_of, load_classifier, load_tokenizer, sst2, token_counts

DEFENSES: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "pruning, 0.99": ("pruning", {"ratio": 0.99}),
    "gaussian_noise of 20": ("gaussian_noise", {"relative_scale": 20.0, "strength": "own"}),
    "refiner, 4 samples": ("refiner", {"samples": 4, "error_feedback": False}),
}
MESSAGES = {"none": 150, "refiner, 4 samples": 150}  # of public texts to learn from; else:
USUAL_MESSAGES, QUICK_MESSAGES, SENTENCES = 300, 20, 20
LEARNED, SPAN, GUESS = "learned", "span", "most frequent tokens"
CLEAN = 150  # public texts whose layers are looked into
SLOPES, MIXTURES = 8, 64  # directions of a layer's slopes, and random ones
OTHER_TOKENS = 60  # beside those of a text, when it is learned which are its own
HELD_OUT = 0.2  # of the messages, by which the classifier is chosen
CLASSIFIERS = {
    "logistic, 0.01": lambda: LogisticRegression(C=0.01, max_iter=300),
    "logistic, 0.1": lambda: LogisticRegression(C=0.1, max_iter=300),
    "boosted trees": lambda: HistGradientBoostingClassifier(
        max_iter=150, learning_rate=0.06, l2_regularization=1.0, max_leaf_nodes=15, random_state=0
    ),
}


class LearnedInversion(Study):
    """Single SST-2 sentences. A classifier says of each token whether a message has it. It was
    trained on messages of public phrases through the same model and defense.

    Conditions and figures: docs/findings/attributes.md.
    """

    ARGUMENTS: dict[str, Any] = Study.ALL | {
        "--model": "a text encoder and its tokenizer", "--data_dir": "folder of {train,dev}.tsv",
    }  # fmt: skip

    def cells(self) -> dict:
        names = list(DEFENSES)[:1] if self.quick else list(DEFENSES)
        sizes = {"sentences": 2 if self.quick else SENTENCES, "seed": 0}
        cells: dict = {(GUESS, GUESS): {"attack": GUESS, **sizes}}
        for name in names:
            defense, settings = DEFENSES[name]
            common = {"defense": defense, "settings": settings, **sizes}
            count = QUICK_MESSAGES if self.quick else MESSAGES.get(name, USUAL_MESSAGES)
            cells[name, SPAN] = common | {"attack": SPAN}
            cells[name, LEARNED] = common | {"attack": LEARNED, "messages": count}
        return self.published(cells)

    def load(self) -> None:
        torch.set_num_threads(1)
        self.tokenizer = load_tokenizer(self.args.model)
        dev = [row | {"sentence": row["sentence"].strip()} for row in sst2(self.args.data_dir)]
        self.private = [row for row in dev if 8 <= len(row["sentence"].split()) <= 12]
        sentences = {row["sentence"] for row in dev}
        train = [
            row | {"sentence": row["sentence"].strip()} for row in sst2(self.args.data_dir, "train")
        ]
        self.public = [
            row
            for row in train
            if row["sentence"] not in sentences and 3 <= len(row["sentence"].split()) <= 20
        ]
        random.Random(0).shuffle(self.public)
        set_seed(0)
        self.model = load_classifier(self.args.model)
        self.layers: PublicLayers | None = None

    def measure(self, cell: dict) -> dict[str, Any]:
        rows = self.private[: cell["sentences"]]
        read = {GUESS: self._guesses, SPAN: self._by_span, LEARNED: self._learned}[cell["attack"]]
        scores = [
            score_text([found], [self._tokens(row)], tokenizer=self.tokenizer).mean["token_f1"]
            for row, found in zip(rows, read(rows, cell), strict=True)
        ]
        return {"token_f1": [round(score, 4) for score in scores]}

    def report(self, metrics: dict) -> None:
        guess = metrics.pop(GUESS)[GUESS]["token_f1"]
        rows = [["no message", "", f"{np.mean(guess):.2f}", "", ""]]
        for name, attacks in metrics.items():
            if LEARNED not in attacks:
                continue
            span, learned = (np.array(attacks[a]["token_f1"]) for a in (SPAN, LEARNED))
            over_guess, over_span = (student((learned - b).tolist()) for b in (guess, span))
            rows.append([name, f"{span.mean():.2f}", f"{learned.mean():.2f}",
                         over_guess.text(2), over_span.text(2)])  # fmt: skip
        header = ["defense", "token F1: span", "learned, or the most frequent tokens"]
        write_table(self.output, [*header, "more than these", "more than span"], rows)

    def _tokens(self, row: dict) -> list[int]:
        """Without the special ones around them."""
        ids: list[int] = self.tokenizer(row["sentence"], add_special_tokens=False)["input_ids"]
        return ids

    def _batch(self, row: dict) -> dict[str, Tensor]:
        return batch_of(self.tokenizer, [row], truncation=True)

    def _message(self, row: dict, cell: dict, seed: int) -> dict[str, Tensor]:
        """The first of a client."""
        defense = make_defense(cell["defense"], **cell["settings"])
        defense.prepare(self.model, self.tokenizer)
        return defense(GradientMap(self.model, self._batch(row)), Stream.from_seeds(seed))

    def _guesses(self, rows: Sequence[dict], _cell: dict) -> Iterable[list[int]]:
        counts = self._counts().most_common(100)
        for row in rows:
            yield [token for token, _ in counts[: len(self._tokens(row))]]

    def _counts(self) -> Counter:
        return token_counts(self.tokenizer, [row["sentence"] for row in self.public])

    def _by_span(self, rows: Sequence[dict], cell: dict) -> Iterable[list[int]]:
        for number, row in enumerate(rows):
            batch = self._batch(row)
            observation = Observation(
                model=self.model,
                gradient=self._message(row, cell, number),
                input_shape=tuple(batch["input_ids"].shape),
                labels=batch["labels"],
                tokenizer=self.tokenizer,
            )
            found = make_attack("span")(observation, Stream.from_seeds(number)).token_ids
            assert found is not None
            yield found[0]

    def _learned(self, rows: Sequence[dict], cell: dict) -> Iterable[list[int]]:
        if self.layers is None:
            clean = [self._batch(row) for row in self.public[:CLEAN]]
            self.layers = PublicLayers(self.model, clean)
        counts = self._counts()
        reader = TokenReader(self.layers, counts, cell["seed"])
        shadows = self.public[CLEAN : CLEAN + cell["messages"]]
        for number, row in enumerate(shadows):
            message = self._message(row, cell, 1000 + number)
            reader.add(message, row["label"], set(self._tokens(row)))
        reader.learn()
        for number, row in enumerate(rows):
            message = self._message(row, cell, number)
            yield reader.likeliest(message, row["label"], len(self._tokens(row)))


class PublicLayers:
    """What public texts tell of linear layers: what each token brings into one, by a linear map of
    its embedding, and the directions of slopes by label.

    Args:
        model: A text encoder with a class for a label.
        batches: Of one public text each.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Mapping[str, Tensor]]) -> None:
        embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
        width = embeddings.weight.shape[1]
        self.names = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and module.in_features == width
            and "layer" in name
        ]  # fmt: skip
        inputs, slopes = ({name: list[Tensor]() for name in self.names} for _ in range(2))
        for batch in batches:
            with torch.enable_grad(), passes_of(model, self.names) as passes:
                loss = model(**batch).loss
                ends = [passes[name].outputs for name in self.names]
                layer_slopes = torch.autograd.grad(loss, ends)
            for name, slope in zip(self.names, layer_slopes, strict=True):
                inputs[name].append(passes[name].inputs[0])
                slopes[name].append(slope[0])
        tokens = torch.cat([batch["input_ids"][0] for batch in batches])
        labels = torch.cat(
            [batch["labels"].expand(batch["input_ids"].shape[1]) for batch in batches]
        )
        table = embeddings.weight.detach().double()
        table = torch.cat([table, torch.ones(len(table), 1).double()], 1)
        self.tokens = {n: _brought_in(torch.cat(inputs[n]), tokens, table) for n in self.names}
        generator = torch.Generator().manual_seed(0)
        self._mixing = {
            name: torch.randn(MIXTURES, torch.cat(slopes[name]).shape[1], generator=generator)
            for name in self.names
        }
        self.slopes = {
            (name, label): _directions(torch.cat(slopes[name])[labels == label])
            for name in self.names
            for label in labels.unique().tolist()
        }

    def products(self, message: Mapping[str, Tensor], label: int) -> dict[str, tuple]:
        """Of each layer the message along slopes' directions `(SLOPES, in)`, and along random ones
        `(MIXTURES, in)`, in which a vector is as long as in the message, roughly.
        """
        products = {}
        for name in self.names:
            gradient = message[f"{name}.weight"].float()
            products[name] = self.slopes[name, label] @ gradient, self._mixing[name] @ gradient
        return products

    def features(self, products: Mapping[str, tuple], tokens: Tensor) -> np.ndarray:
        """`(tokens, features)`: products by layer and slope, their sizes, and logarithms of
        energies.
        """
        along, energies = [], []
        for name, (rows, mixtures) in products.items():
            brought_in = self.tokens[name][tokens]
            along.append(brought_in @ rows.T)
            energies.append((brought_in @ mixtures.T).square().sum(1).clamp(min=1e-30).log())
        return torch.cat([*along, torch.stack(energies, 1)], 1).numpy()


def _brought_in(inputs: Tensor, tokens: Tensor, table: Tensor) -> Tensor:
    """`(vocabulary, in)` of norm 1, in coordinates in which public inputs vary alike."""
    known = table[tokens]
    ridge = 10 * known.square().mean() * torch.eye(table.shape[1]).double()
    weights = torch.linalg.solve(known.T @ known + ridge, known.T @ inputs.double())
    centered = inputs.double() - inputs.double().mean(0)
    values, vectors = torch.linalg.eigh(centered.T @ centered / len(inputs))
    white = vectors / (values.clamp(min=0) + 1e-3 * values[-1]).sqrt() @ vectors.T
    brought_in = (table @ weights - inputs.double().mean(0)) @ white
    return nn.functional.normalize(brought_in, dim=1).float()


def _directions(slopes: Tensor) -> Tensor:
    """`(SLOPES, out)`, each pointing where the mean slope does."""
    mean = slopes.mean(0)
    rows = torch.cat([mean[None] * len(slopes) ** 0.5, slopes]).double()
    _, vectors = torch.linalg.eigh(rows.T @ rows)
    directions = vectors.flip(1)[:, :SLOPES].T.float()
    return directions * torch.sign(directions @ mean)[:, None]


class TokenReader:
    """A classifier of tokens, shared by all of them: is it in this message's text?

    Args:
        layers: Of public texts.
        counts: How often tokens are in public texts, which is the prior.
        seed: Of the tokens that are compared.
    """

    def __init__(self, layers: PublicLayers, counts: Counter, seed: int) -> None:
        self._layers, self._rng = layers, np.random.default_rng(seed)
        self._tokens = np.array(sorted(counts))
        frequencies = np.array([counts[token] for token in self._tokens.tolist()], dtype=float)
        self._prior = frequencies / frequencies.sum()
        self._rows: list[np.ndarray] = []
        self._is_in_text: list[np.ndarray] = []

    def add(self, message: Mapping[str, Tensor], label: int, text: set[int]) -> None:
        """A public text's message to learn from."""
        drawn = self._rng.choice(self._tokens, OTHER_TOKENS, p=self._prior)
        others = sorted(set(drawn.tolist()) - text)
        usual = self._rng.choice(self._tokens, 500)
        products = self._layers.products(message, label)
        rows = self._layers.features(products, torch.tensor([*sorted(text), *others, *usual]))
        count = len(text) + len(others)
        self._rows.append(_standardized(rows[:count], rows[count:]))
        self._is_in_text.append(np.arange(count) < len(text))

    def learn(self) -> None:
        """Choose a classifier on messages that it was not trained on, and train it on all."""
        first = round((1 - HELD_OUT) * len(self._rows))
        train, rest = (
            (np.concatenate(self._rows[part]), np.concatenate(self._is_in_text[part]))
            for part in (slice(first), slice(first, None))
        )
        quality = {}
        for name, make in CLASSIFIERS.items():
            scores = make().fit(*train).decision_function(rest[0])
            quality[name] = roc_auc_score(rest[1], scores)
        make = CLASSIFIERS[max(quality, key=quality.__getitem__)]
        self._classifier = make().fit(np.concatenate(self._rows), np.concatenate(self._is_in_text))

    def likeliest(self, message: Mapping[str, Tensor], label: int, count: int) -> list[int]:
        """So many tokens, each once."""
        products = self._layers.products(message, label)
        rows = self._layers.features(products, torch.from_numpy(self._tokens))
        scores = self._classifier.decision_function(_standardized(rows, rows))
        best = np.argsort(-(scores + np.log(self._prior)), kind="stable")[:count]
        found: list[int] = self._tokens[best].tolist()
        return found


def _standardized(rows: np.ndarray, usual: np.ndarray) -> np.ndarray:
    """In units of usual tokens, and the sizes beside the signed products."""
    rows = (rows - usual.mean(0)) / np.maximum(usual.std(0), 1e-6)
    return np.concatenate([rows, np.abs(rows)], 1)
