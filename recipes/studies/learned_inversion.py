"""Does an attacker that learns to invert, from messages of public texts behind the same defense,
recover more of a sentence than a search does?
"""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import set_seed

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Attack, make_attack
from hf_gradguard.metrics import score_text
from hf_gradguard.randomness import Stream

from ..study import Study
from .lib.attacks import observe
from .lib.intervals import student
from .lib.tables import write_table
from .lib.text import TEXT_FLAGS, batch_of, load_classifier, load_tokenizer, sst2, token_counts

DEFENSES: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "pruning, 0.99": ("pruning", {"ratio": 0.99}),
    "gaussian_noise of 20": ("gaussian_noise", {"relative_scale": 20.0, "strength": "own"}),
    "refiner, 4 samples": ("refiner", {"samples": 4, "error_feedback": False}),
}
MESSAGES = {"none": 150, "refiner, 4 samples": 150}  # of public texts to learn from; else:
USUAL_MESSAGES, QUICK_MESSAGES, SENTENCES = 300, 20, 20
LEARNED, SPAN, GUESS = "learned", "span", "most frequent tokens"


class LearnedInversion(Study):
    """Single SST-2 sentences. A classifier says of each token whether a message has it. It was
    trained on messages of public phrases through the same model and defense.

    Conditions and figures: docs/findings/attacks_text.md.
    """

    ARGUMENTS: dict[str, Any] = Study.ALL | TEXT_FLAGS

    def cells(self) -> dict:
        names = list(DEFENSES)[:1] if self.quick else list(DEFENSES)
        sizes = {"sentences": 2 if self.quick else SENTENCES, "seed": 0}
        cells: dict = {(GUESS, GUESS): {"attack": GUESS, **sizes}}
        for name in names:
            defense, settings = DEFENSES[name]
            common = {"defense": defense, "settings": settings, **sizes}
            count = QUICK_MESSAGES if self.quick else MESSAGES.get(name, USUAL_MESSAGES)
            cells[name, SPAN] = common | {"attack": SPAN}
            learned = {"attack": LEARNED, "messages": count, "version": 2}
            cells[name, LEARNED] = common | learned
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
        return self._attacked(make_attack("span"), rows, cell)

    def _learned(self, rows: Sequence[dict], cell: dict) -> Iterable[list[int]]:
        attack = make_attack(
            "learned_inversion",
            public_texts=[row["sentence"] for row in self.public],
            public_labels=[row["label"] for row in self.public],
            defense=make_defense(cell["defense"], **cell["settings"]),
            messages=cell["messages"], seconds=7200.0, seed=cell["seed"],
        )  # fmt: skip
        return self._attacked(attack, rows, cell)

    def _attacked(self, attack: Attack, rows: Sequence[dict], cell: dict) -> Iterable[list[int]]:
        for number, row in enumerate(rows):
            batch = self._batch(row)
            message = self._message(row, cell, number)
            observation = observe(self.model, batch, message, tokenizer=self.tokenizer)
            found = attack(observation, Stream.from_seeds(number)).token_ids
            assert found is not None
            yield found[0]
