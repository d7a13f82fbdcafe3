"""What does one message tell of its sentence, beyond the prior?"""

import functools
from typing import Any

import torch

from hf_gradguard import make_defense
from hf_gradguard.audit import infer_attributes
from hf_gradguard.randomness import Stream

from ..study import Study
from .candidates import model_after
from .lib.intervals import Interval
from .lib.tables import write_table
from .lib.text import TEXT_FLAGS, load_tokenizer, of_usual_length, sst2

FILM = {"film", "films", "movie", "movies"}
PEOPLE = {
    *("he", "his", "him", "himself", "man", "men", "boy", "boys", "father", "son", "husband"),
    *("she", "her", "hers", "herself", "woman", "women", "girl", "girls", "mother", "daughter"),
    *("wife", "actor", "actors", "actress", "actresses"),
}
ATTRIBUTES = {
    "positive": lambda text, label: label == 1,
    "more than 13 words": lambda text, label: len(text.split()) > 13,
    "film or movie": lambda text, label: bool(FILM & set(text.split())),
    "she, he, woman, man, ...": lambda text, label: bool(PEOPLE & set(text.split())),
}
STAGES = {"start": 0, "after 200 steps": 200}
PLAN = {"public": 200, "private": 120, "directions": 16, "seed": 0}
QUICK = {"public": 160, "private": 60, "directions": 4, "seed": 0}
FEWER = {"public": 160, "private": 100}  # of what takes ten times as long
DEFENSES: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "gaussian_noise": ("gaussian_noise", {}),
    "dp_sgd per sample, σ = 1.5": (
        "dp_sgd", {"per_sample": True, "clip": 1.0, "noise_multiplier": 1.5}
    ),
    "refiner, 4 samples": ("refiner", {"samples": 4}),
}  # fmt: skip


class Attributes(Study):
    """Messages of one sentence each; the attacker trained a classifier on messages of public ones
    through the same model and defense.

    Public are training phrases, private validation sentences. No phrase is part of one.
    """

    ARGUMENTS: dict[str, Any] = Study.ALL | TEXT_FLAGS

    def cells(self) -> dict:
        names = ["none", "gaussian_noise"] if self.quick else list(DEFENSES)
        cells = {
            (label, stage): {"defense": label, "settings": DEFENSES[label][1], "steps": steps}
            | (QUICK if self.quick else PLAN | (FEWER if DEFENSES[label][0] == "refiner" else {}))
            for stage, steps in STAGES.items()
            if not (self.quick and steps)
            for label in names
        }
        last = sorted(cells, key=lambda place: cells[place]["defense"].startswith("refiner"))
        return self.published({place: cells[place] for place in last})

    def load(self) -> None:
        torch.set_num_threads(1)
        self.tokenizer = load_tokenizer(self.args.model)
        self.private = list(of_usual_length(sst2(self.args.data_dir, "dev")))
        sentences = " | ".join(row["sentence"].strip() for row in self.private)
        phrases = of_usual_length(sst2(self.args.data_dir, "train").take(12_000))
        self.public = [row for row in phrases if row["sentence"].strip() not in sentences]
        others = self.public[PLAN["public"] :]
        self.model_after = functools.cache(
            functools.partial(model_after, self.args.model, self.tokenizer, others)
        )

    def measure(self, cell: dict) -> dict:
        model = self.model_after(cell["steps"])
        defense = make_defense(DEFENSES[cell["defense"]][0], **cell["settings"])
        defense.prepare(model, self.tokenizer)
        public, private = (
            [(row["sentence"], row["label"]) for row in rows[: cell[name]]]
            for name, rows in (("public", self.public), ("private", self.private))
        )
        found = infer_attributes(
            model, self.tokenizer, private, public, ATTRIBUTES, defense,
            directions=cell["directions"], generator=Stream.from_seeds(cell["seed"]),
        )  # fmt: skip
        return {
            name: {
                "accuracy": round(inferred.accuracy, 4),
                "interval": [round(end, 4) for end in inferred.interval],
                "recall": [[str(value), *shares] for value, shares in inferred.recall.items()],
                "correct": inferred.correct, "most frequent": inferred.most_frequent,
                "verdict": inferred.verdict,
            }
            for name, inferred in found.items()
        }  # fmt: skip

    def report(self, metrics: dict) -> None:
        rows = []
        for label, stages in metrics.items():
            for stage, by_attribute in stages.items():
                cells = []
                for found in by_attribute.values():
                    mark = "" if found["verdict"] == "beyond the prior" else " (cannot tell)"
                    cells.append(Interval(found["accuracy"], *found["interval"]).text(2) + mark)
                rows.append([label, stage, *cells])
        write_table(self.output, ["defense", "model", *ATTRIBUTES], rows)
