r"""Which of 48 sentences are in a message of 1, 4 or 16 of SST-2?

    python -m recipes.studies.candidates.run text --model MODEL --data_dir SST2 \
        --output docs/results/candidates

MiniLM cut to two layers, with a random head, and after 200 steps of plain training (AdamW, rate
2e-4, batches of 16). Candidates are sentences of the training set of 8 to 20 words that the model
was not trained on, with their labels; members are drawn from them. Attackers know the labels. Those
who know the defense rank by likelihood, the others by cosine or distance. Each row has three
strengths, and the same draws in each. A few minutes of one core; `--all` asks for every defense,
for the trained model, and for messages of 4 and 16, which takes an hour.
"""

import functools

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.metrics import score_candidates
from hf_gradguard.networks import train_text_network
from hf_gradguard.randomness import Stream

from ..lib.tables import write_table
from ..lib.text import of_usual_length, sst2
from .settings import DEFENSES, FIRST, MESSAGES, PLAN, QUICK, STATES

ARGUMENTS = {
    "--model": "a text encoder and its tokenizer",
    "--data_dir": "folder of train.tsv",
    "--all": {"action": "store_true", "help": "all rows and columns"},
}
WHO = {"knows": "yes", "does not": "no"}
SCORES = ("top1", "rank", "tpr_1%")
POOL = 1000  # sentences that are kept out of training


def cells(args) -> dict:
    """Refiner's last, which ask for an evaluation network."""
    plan = QUICK if args.quick else PLAN
    found = {
        (defense, state, str(size)): {
            "defense": defense,
            "strengths": DEFENSES[defense],
            "state": state,
            "size": size,
            "messages": 1 if args.quick else messages,
            **plan,
        }
        for size, messages in MESSAGES.items()
        for state in STATES
        for defense in DEFENSES
        if args.all or (size == 1 and state == "initial" and defense in FIRST)
    }
    return dict(sorted(found.items(), key=lambda one: one[0][0] == "refiner"))


def prepare(args):
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    rows = list(of_usual_length(sst2(args.data_dir, "train").take(6 * POOL)))
    kept, trained_on = rows[: len(rows) // 4][:POOL], rows[len(rows) // 4 :]

    @functools.cache
    def model_in(state: str, layers: int, steps: int):
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(
            args.model, num_hidden_layers=layers, trust_remote_code=False
        )
        if state == "trained":
            train(model, tokenizer, trained_on, steps)
        return model.eval()

    @functools.cache
    def network(layers: int, steps: int):
        embedding = model_in("initial", layers, 0).get_input_embeddings()
        public = [row["sentence"] for row in trained_on]
        return train_text_network(embedding, tokenizer, public, steps=steps, seed=0)

    def measure(cell: dict) -> dict:
        model = model_in(cell["state"], cell["layers"], cell["train_steps"])
        own = {}
        if cell["defense"] == "refiner":
            own = {"evaluation_network": network(cell["layers"], cell["network_steps"])}
        defenses = [make_defense(cell["defense"], **s, **own) for s in cell["strengths"]]
        for defense in defenses:
            defense.prepare(model, tokenizer)
        scores: dict = {}
        members = []
        for number in range(cell["messages"]):
            draw = np.random.default_rng([cell["seed"], cell["size"], number])
            order = draw.permutation(len(kept))[: cell["candidates"]]
            listed = [kept[i] for i in order]
            inside = sorted(draw.permutation(len(listed))[: cell["size"]].tolist())
            members.append(inside)
            for place, found in rank(cell, model, tokenizer, listed, inside, defenses, number):
                scores.setdefault(place, []).append(found)
        return {place: figures(found, members) for place, found in scores.items()}

    return measure


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


def rank(cell: dict, model, tokenizer, listed: list, inside: list, defenses: list, number: int):
    """Scores of all candidates: one tensor for each strength, and who knows the defense or not."""
    texts = [row["sentence"] for row in listed]
    labels = [row["label"] for row in listed]
    batch = dict(tokenizer([texts[i] for i in inside], padding=True, return_tensors="pt"))
    batch["labels"] = torch.tensor([labels[i] for i in inside])
    shape = tuple(batch["input_ids"].shape)
    places, observations = [], []
    gmap = GradientMap(model, batch)
    for strength, defense in zip(cell["strengths"], defenses, strict=True):
        message = defense(gmap, Stream.from_seeds(cell["seed"], number))
        seen = Observation(model, dict(message), shape, labels=batch["labels"], tokenizer=tokenizer)
        said = " ".join(f"{key}={value}" for key, value in strength.items())
        for knows, law in (("knows", defense.law(message)), ("does not", None)):
            if knows == "does not" or law is not None:
                places.append(f"{said}|{knows}")
                observations.append(Observation(**{**vars(seen), "law": law}))
    attack = make_attack("candidates", candidates=texts, labels=labels)
    found = attack.together(observations, torch.Generator().manual_seed(number))
    yield from zip(places, [one.scores for one in found], strict=True)


def figures(scores: list, members: list) -> dict:
    """Means over members with 95 % intervals over messages."""
    found = score_candidates([one.numpy() for one in scores], members)
    shown = {
        name: [round(float(x), 4) for x in (found.mean[name], *found.interval[name])]
        for name in SCORES
    }
    return shown | {"area": round(found.area, 4), "members": sum(map(len, members))}


def report(figures: dict, args) -> None:
    rows = []
    columns = [
        (state, str(size))
        for state in STATES
        for size in sorted(MESSAGES)
        if any(str(size) in states.get(state, {}) for states in figures.values())
    ]
    for defense, states in figures.items():
        keys = dict.fromkeys(k for sizes in states.values() for one in sizes.values() for k in one)
        for key in keys:
            strength, knows = key.split("|")
            row = [f"`{defense}`", f"`{strength}`" if strength else "", WHO[knows]]
            for state, size in columns:
                one = states.get(state, {}).get(size, {}).get(key)
                row.append(_shown(one) if one else "")
            rows.append(row)
    named = [f"{state} model, messages of {size}" for state, size in columns]
    write_table(args.output, ["defense", "strength", "who knows it", *named], rows)


def _shown(one: dict) -> str:
    """Named, mean rank, and found at 1 % false alarms."""
    top, low, high = (100 * value for value in one["top1"])
    ends = f" [{low:.0f}, {high:.0f}]" if low == low else ""
    return f"{top:.0f} %{ends}, {one['rank'][0]:.1f}, {100 * one['tpr_1%'][0]:.0f} %"
