"""What a search by likelihood reconstructs behind noise, of single sentences and of several."""

import math
import random
import time
from typing import Any

import torch
from transformers import set_seed
from transformers.utils import logging

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import make_attack
from hf_gradguard.metrics import score_text
from hf_gradguard.randomness import Stream

from ..study import Study
from .lib.attacks import observe
from .lib.tables import write_table
from .lib.text import TEXT_FLAGS, batch_of, load_classifier, load_tokenizer, sst2, token_counts
from .lib.training import learn

STRENGTH, OTHER_STRENGTHS = 20.0, (1.0, 5.0, 100.0, 1000.0)
SEVERAL = ((4, 5.0), (4, 20.0), (16, 20.0))  # texts of a message, and its strength
STATES = ("start", "trained")
SENTENCES, FEW = 20, 5  # of a row, and of other strengths
GUESS = ("no message: the most frequent tokens", "", "00")  # the place of a guess's cell
POPULATIONS, EVALUATIONS_OF_THESE = 6, 16_000
MOST_POPULATIONS, MOST_EVALUATIONS = 12, 32_000
EFFORTS = (POPULATIONS, MOST_POPULATIONS)
BETTER = "start, of 6 and of 12 populations: the higher score"
FEWEST_EVALUATIONS = 2000
OTHER_DEFENSES: dict[str, tuple[str, dict[str, Any]]] = {
    "pruning of 99 %": ("pruning", {"ratio": 0.99}),
    "refiner, 4 samples": ("refiner", {"samples": 4, "error_feedback": False}),
}
EVALUATIONS_OF_SEVERAL = 16_000
TRAINING = {"rows": 8000, "batch": 16, "learning_rate": 5e-5}


class LikelihoodSearches(Study):
    """One cell a sentence, so that a study that was stopped goes on.

    Conditions and figures: docs/findings/attacks_text.md.
    """

    ARGUMENTS: dict[str, Any] = Study.ALL | TEXT_FLAGS | {
        "--sentences": {"type": int, "default": SENTENCES, "help": "of each row"}
    }  # fmt: skip

    def cells(self) -> dict:
        states, evaluations = STATES[: 1 if self.quick else None], 200 if self.quick else 9000
        of_several = 400 if self.quick else EVALUATIONS_OF_SEVERAL
        several = {
            (f"start, {texts} in a message", f"{r:g}", "00"): {
                "state": "start", "relative_scale": r, "sentence": 0, "texts": texts,
                "evaluations": of_several, "version": 1,
            }
            for texts, r in SEVERAL[: 1 if self.quick else None]
        }  # fmt: skip
        count = self.args.sentences
        rows = [(state, STRENGTH, count) for state in states]
        rows += [("start", r, min(FEW, count)) for r in OTHER_STRENGTHS if not self.quick]
        single = {
            (state, f"{r:g}", f"{number:02}"): {
                "state": state, "relative_scale": r, "sentence": number,
                "evaluations": evaluations, "version": 1,
            }
            for state, r, messages in rows for number in range(messages)
        }  # fmt: skip
        at_start = {
            number: settings for (state, strength, number), settings in single.items()
            if (state, strength) == ("start", "20") and not self.quick
        }  # fmt: skip
        ended = {
            ("start, ends by the whole likelihood", "20", number): {**settings, "version": 2}
            for number, settings in at_start.items()
        }
        restarted = {
            (f"{state}, {POPULATIONS} populations", strength, number): {
                **settings, "version": 3, "evaluations": EVALUATIONS_OF_THESE,
            }
            for (state, strength, number), settings in single.items()
            if strength == "20" and not self.quick
        }  # fmt: skip
        efforts = {
            ("start, 2,000 texts", "20", number): settings | {"evaluations": FEWEST_EVALUATIONS}
            for number, settings in at_start.items()
        } | {
            (f"start, {MOST_POPULATIONS} populations", "20", number): settings | {
                "version": 3, "evaluations": MOST_EVALUATIONS, "populations": MOST_POPULATIONS,
            }
            for number, settings in at_start.items()
        }  # fmt: skip
        others = {
            ("start", name, number): {
                **at_start[number], "defense": defense, "settings": settings, "version": 3,
                "evaluations": EVALUATIONS_OF_THESE, "relative_scale": None,
            }
            for name, (defense, settings) in OTHER_DEFENSES.items()
            for number in list(at_start)[:FEW]
        }  # fmt: skip
        guessed = {GUESS: {"guess": GUESS[0], "sentences": count if self.quick else SENTENCES}}
        return self.published(single | efforts | restarted | ended | several | others | guessed)

    def load(self) -> None:
        logging.set_verbosity_error()
        dev = sst2(self.args.data_dir)
        private = {row["sentence"].strip() for row in dev}
        self.sentences = [row for row in dev if 8 <= len(row["sentence"].split()) <= 12]
        rows = sst2(self.args.data_dir, "train")
        train = [{**row, "sentence": row["sentence"].strip()} for row in rows]
        self.train = [row for row in train if row["sentence"] not in private]
        self.public = [
            row["sentence"] for row in self.train if 3 <= len(row["sentence"].split()) <= 40
        ]
        random.Random(0).shuffle(self.public)
        self.tokenizer = load_tokenizer(self.args.model)
        set_seed(0)
        self.models = {"start": load_classifier(self.args.model)}

    def measure(self, cell: dict) -> dict[str, Any]:
        if "guess" in cell:
            return {"guessed": self._guessed(cell["sentences"])}
        if cell["state"] not in self.models:
            self.models["trained"] = self._train()
        model = self.models[cell["state"]]
        first = cell["sentence"]
        rows = self.sentences[first : first + cell.get("texts", 1)]
        batch = batch_of(self.tokenizer, rows)
        noise = {"relative_scale": cell["relative_scale"], "strength": "own"}
        defense = make_defense(cell.get("defense", "gaussian_noise"), **cell.get("settings", noise))
        defense.prepare(model, self.tokenizer)
        message = defense(GradientMap(model, batch), Stream.from_seeds(cell["sentence"]))
        observation = observe(
            model, batch, message, attention_mask=batch["attention_mask"],
            tokenizer=self.tokenizer, mechanism=defense.mechanism(message),
        )  # fmt: skip
        attack = make_attack(
            "likelihood_search", public_texts=self.public, seconds=7200.0,
            evaluations=cell["evaluations"], whole_share=0.25 if cell["version"] == 2 else 0.0,
            populations=cell.get("populations", POPULATIONS if cell["version"] == 3 else 1),
        )  # fmt: skip
        started = time.process_time()
        found: Any = attack(observation, Stream.from_seeds(cell["sentence"]))
        seconds = time.process_time() - started
        ids, lengths = batch["input_ids"].tolist(), batch["attention_mask"].sum(1).tolist()
        true = [row[:length] for row, length in zip(ids, lengths, strict=True)]
        scores = score_text(found.token_ids, true, tokenizer=self.tokenizer).mean
        public_best = sum(map(self._best_public, true)) / len(true)
        return {
            "token_f1": round(scores["token_f1"], 4),
            "position_accuracy": round(scores["position_accuracy"], 4),
            "chance": round(public_best, 4),
            "score": round(found.score, 2),
            "expected": None
            if math.isnan(found.expected_score)
            else round(found.expected_score, 2),
            "evaluated": found.evaluated,
            "processor_seconds": round(seconds, 1),
        }

    def _guessed(self, count: int) -> list[float]:
        """The token F1 of each sentence if as many of the most frequent public tokens are said."""
        counts = token_counts(self.tokenizer, self.public)
        scores = []
        for row in self.sentences[:count]:
            true = self.tokenizer(row["sentence"], add_special_tokens=False)["input_ids"]
            guess = [token for token, _ in counts.most_common(len(true))]
            mean = score_text([guess], [true], tokenizer=self.tokenizer).mean
            scores.append(round(mean["token_f1"], 4))
        return scores

    def _best_public(self, true: list[int]) -> float:
        """The mean token F1 of public sentences of that length: what knows no message has."""
        ids = [self.tokenizer(text)["input_ids"] for text in self.public[:4000]]
        same = [row for row in ids if len(row) == len(true)][:100]
        scores = [score_text([row], [true], tokenizer=self.tokenizer).mean for row in same]
        return round(sum(score["token_f1"] for score in scores) / len(scores), 4)

    def _train(self) -> torch.nn.Module:
        set_seed(1)
        model = load_classifier(self.args.model).train()
        optimizer = torch.optim.AdamW(model.parameters(), TRAINING["learning_rate"])
        rows = random.Random(1).sample(self.train, int(TRAINING["rows"]))
        size = int(TRAINING["batch"])
        for start in range(0, len(rows), size):
            batch = batch_of(self.tokenizer, rows[start : start + size], truncation=True)
            learn(model, optimizer, batch)
        return model.eval()

    def report(self, metrics: dict) -> None:
        guess, rows = metrics.pop(GUESS[0], None), []
        few, most = (metrics.get(f"start, {n} populations", {}).get("20", {}) for n in EFFORTS)
        if both := sorted(few.keys() & most.keys()):
            better = {number: _better(few[number], most[number]) for number in both}
            metrics[BETTER] = {"20": better}
        for state, strengths in metrics.items():
            for strength, sentences in strengths.items():
                cells = list(sentences.values())
                f1 = torch.tensor([cell["token_f1"] for cell in cells])
                draws = torch.randint(
                    len(f1), (10_000, len(f1)), generator=torch.Generator().manual_seed(0)
                )
                low, high = f1[draws].mean(1).quantile(torch.tensor([0.025, 0.975])).tolist()
                interval = f" [{low:.2f}, {high:.2f}]" * (len(cells) > 1)
                mean = {
                    key: sum(cell[key] for cell in cells) / len(cells)
                    for key in ("token_f1", "position_accuracy", "chance", "processor_seconds")
                }
                rows.append(
                    [state, strength, len(cells), f"{mean['token_f1']:.2f}{interval}",
                     f"{mean['position_accuracy']:.2f}", f"{mean['chance']:.2f}",
                     ", ".join(f"{c['token_f1']:.2f}" for c in cells),
                     ", ".join(map(_score_of_expected, cells)),
                     f"{mean['processor_seconds']:.0f}"]
                )  # fmt: skip
        if guess is not None:
            scores = guess[GUESS[1]][GUESS[2]]["guessed"]
            each = ", ".join(f"{score:.2f}" for score in scores)
            mean = f"{sum(scores) / len(scores):.2f}"
            rows.append([GUESS[0], "", len(scores), mean, "", "", each, "", ""])
        write_table(
            self.output,
            ("model", "noise, or defense", "messages", "token F1", "words at their place",
             "public sentences", "F1 of each", "score of each, of what is expected",
             "processor seconds"),
            rows,
        )  # fmt: skip


def _better(figures: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What whoever runs two searches keeps, and what both take."""
    best = max(figures, other, key=lambda search: search["score"])
    sums = {name: figures[name] + other[name] for name in ("evaluated", "processor_seconds")}
    return best | sums


def _score_of_expected(figures: dict[str, Any]) -> str:
    """The second is known where the noise is."""
    expected = figures["expected"]
    return f"{figures['score']:.0f}" + ("" if expected is None else f" of {expected:.0f}")
