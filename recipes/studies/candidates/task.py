"""The model, its two states, the sentences and the defenses, and what a list tells of a message."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.audit.attackers import attackers
from hf_gradguard.audit.settings import AuditSettings
from hf_gradguard.defenses import Defense
from hf_gradguard.metrics import score_candidates, score_text
from hf_gradguard.metrics.candidates import FALSE_POSITIVES
from hf_gradguard.networks import train_text_network
from hf_gradguard.randomness import Stream

from ..lib.attacks import ids_found
from ..lib.tables import summary
from ..lib.text import of_usual_length, sst2

POOL = 1000  # sentences that are kept out of training
READ = 6 * POOL  # rows of the training set, for these and for what is trained on


class Task:
    """A study's data and models, each made once.

    Args:
        args: `model` and `data_dir`.
    """

    def __init__(self, args) -> None:
        torch.set_num_threads(1)
        self.name = args.model
        self.tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
        rows = list(of_usual_length(sst2(args.data_dir, "train").take(READ)))
        self.kept, self.trained_on = rows[: len(rows) // 4][:POOL], rows[len(rows) // 4 :]
        self.data_dir = args.data_dir
        self.model = functools.cache(self._model)
        self.network = functools.cache(self._network)

    def thousand(self) -> list[dict]:
        """Sentences behind those."""
        rows = sst2(self.data_dir, "train").skip(READ).take(READ)
        return of_usual_length(rows)[:POOL]

    def _model(self, state: str, layers: int, steps: int):
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(
            self.name, num_hidden_layers=layers, trust_remote_code=False
        )
        if state == "trained":
            train(model, self.tokenizer, self.trained_on, steps)
        return model.eval()

    def _network(self, layers: int, steps: int):
        embedding = self.model("initial", layers, 0).get_input_embeddings()
        public = [row["sentence"] for row in self.trained_on]
        return train_text_network(embedding, self.tokenizer, public, steps=steps, seed=0)

    def model_of(self, cell: Mapping[str, Any]):
        return self.model(cell["state"], cell["layers"], cell["train_steps"])

    def defense(self, cell: Mapping[str, Any], strength: Mapping[str, Any]) -> Defense:
        own = {}
        if cell["defense"] == "refiner" and "alpha" in strength:  # the published form
            own = {"evaluation_network": self.network(cell["layers"], cell["network_steps"])}
        defense = make_defense(cell["defense"], **strength, **own)
        defense.prepare(self.model_of(cell), self.tokenizer)
        return defense

    def batch(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        """A message's, with labels."""
        batch = dict(
            self.tokenizer([row["sentence"] for row in rows], padding=True, return_tensors="pt")
        )
        return batch | {"labels": torch.tensor([row["label"] for row in rows])}


def train(model, tokenizer, rows: list[dict], steps: int) -> None:
    """As one plain client would. The word embeddings stay, as they do in a federation."""
    model.train()
    model.get_input_embeddings().requires_grad_(False)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-4)
    draw = np.random.default_rng(0)
    for _ in range(steps):
        some = [rows[i] for i in draw.integers(len(rows), size=16)]
        batch = tokenizer([row["sentence"] for row in some], padding=True, return_tensors="pt")
        model(**batch, labels=torch.tensor([row["label"] for row in some])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.get_input_embeddings().requires_grad_(True)


def said(strength: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in strength.items())


def drawn(cell: Mapping[str, Any], number: int, rows: list[dict]) -> tuple[list[dict], list[int]]:
    """The candidates of a message, and which of them are in it."""
    draw = np.random.default_rng([cell["seed"], cell["size"], number])
    listed = [rows[i] for i in draw.permutation(len(rows))[: cell["candidates"]]]
    return listed, sorted(draw.permutation(len(listed))[: cell["size"]].tolist())


def measured(task: Task, cell: Mapping[str, Any], rows: list[dict]) -> dict:
    """Scores by strength and by who knows the defense: `"ratio=0.9|knows"`."""
    strengths = [(one, task.defense(cell, one)) for one in cell["strengths"]]
    scores: dict[str, list] = {}
    members = []
    for number in range(cell["messages"]):
        listed, inside = drawn(cell, number, rows)
        members.append(inside)
        for place, found in _ranked(task, cell, listed, inside, strengths, number):
            scores.setdefault(place, []).append(found)
    return {place: _figures(found, members) for place, found in scores.items()}


def searched(task: Task, cell: Mapping[str, Any], rows: list[dict]) -> dict:
    """Token F1 of an attack that knows the defense and has no list, with a 95 % interval."""
    defense, model = task.defense(cell, cell["strength"]), task.model_of(cell)
    plain = make_attack(cell["attack"], **cell["settings"])
    *_, attacker = attackers(cell["attack"], plain, defense, AuditSettings()).values()
    found, truths = [], []
    for number in range(cell["messages"]):
        listed, inside = drawn(cell, number, rows)
        batch = task.batch([listed[i] for i in inside])
        message = defense(GradientMap(model, batch), Stream.from_seeds(cell["seed"], number))
        noise = message.noise if "noise_variance" in attacker.grants else None
        seen = Observation(
            model, dict(message), tuple(batch["input_ids"].shape), labels=batch["labels"],
            tokenizer=task.tokenizer, noise_variance=None if noise is None else noise.added,
        )  # fmt: skip
        found.append(ids_found(attacker.attack, seen, number))
        truths.append(batch["input_ids"].tolist())
    return summary(score_text(found, truths, tokenizer=task.tokenizer), ["token_f1"])


def _ranked(
    task: Task, cell: Mapping[str, Any], listed: list, inside: list, strengths: list, number: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Scores of all candidates: one tensor for each strength, and who knows the defense or not."""
    model, batch = task.model_of(cell), task.batch([listed[i] for i in inside])
    shape = tuple(batch["input_ids"].shape)
    places, observations = [], []
    gmap = GradientMap(model, batch)
    for strength, defense in strengths:
        message = defense(gmap, Stream.from_seeds(cell["seed"], number))
        grants = {"labels": batch["labels"], "tokenizer": task.tokenizer}
        seen = Observation(model, dict(message), shape, **grants)
        mechanism = defense.mechanism(message)
        who = {} if mechanism is None else {"knows": mechanism}
        if not (who and cell.get("informed")):
            who["does not"] = None
        for knows, granted in who.items():
            places.append(f"{said(strength)}|{knows}")
            observations.append(Observation(**{**vars(seen), "mechanism": granted}))
    texts, labels = [row["sentence"] for row in listed], [row["label"] for row in listed]
    attack = make_attack("candidates", candidates=texts, labels=labels)
    found = attack.together(observations, torch.Generator().manual_seed(number))
    yield from zip(places, [one.scores for one in found], strict=True)


def _figures(scores: list, members: list) -> dict:
    """Means over members with 95 % intervals over messages."""
    found = score_candidates([one.numpy() for one in scores], members)
    shown = {
        name: [round(float(x), 4) for x in (found.mean[name], *found.interval[name])]
        for name in ("top1", "rank", *FALSE_POSITIVES)
    }
    return shown | {"area": round(found.area, 4), "members": sum(map(len, members))}
