r"""Sentences on an encoder.

    python -m recipes.studies.attacks_undefended.run text --model MODEL --data_dir SST2 \
        --output docs/results/undefended_text

The first 20 sentences of SST-2's dev set with 8 to 20 words, one a gradient, a new classification
head, token embeddings withheld, label and length known. Means with 95 % bootstrap intervals. Half
an hour of one core.
"""

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed
from transformers.utils import logging

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation, make_attack, recover_labels
from hf_gradguard.metrics import score_text

from ..lib.tables import summary
from ..lib.text import batches_of_one, of_usual_length, sst2
from .images import show
from .settings import FULL, QUICK, TEXT

ARGUMENTS = {"--model": "an encoder", "--data_dir": "folder with dev.tsv"}
SCORES = ("token_f1", "position_accuracy", "rougeL", "exact_match")


def cells(args) -> dict:
    size, fast = (QUICK, {"steps": 1}) if args.quick else (FULL, {})
    return {
        (row,): {
            "attack": row,
            "settings": settings | fast,
            "samples": size["sentences"],
            "seed": 0,
        }
        for row, settings in TEXT.items()
    }


def prepare(args):
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    model = AutoModelForSequenceClassification.from_pretrained(
        args.model, num_labels=2, trust_remote_code=False
    ).eval()
    batches = batches_of_one(tokenizer, of_usual_length(sst2(args.data_dir)))

    def measure(cell: dict) -> dict:
        mine = batches[: cell["samples"]]
        seen, right = [], []
        for batch in mine:
            shape, labels = tuple(batch["input_ids"].shape), batch["labels"]
            blind = Observation(model, GradientMap(model, batch).gradient(), input_shape=shape)
            right.append(bool((recover_labels(blind) == labels).all()))
            seen.append(
                Observation(model, blind.gradient, shape, labels=labels, tokenizer=tokenizer)
            )
        found = by_length(make_attack(cell["attack"], **cell["settings"]), seen, cell["seed"])
        truth = [batch["input_ids"].tolist() for batch in mine]
        scores = score_text(found, truth, tokenizer=tokenizer)
        return {
            **summary(scores, SCORES),
            "labels right": sum(right) / len(right),
            "token_f1 of each": scores.per_sample["token_f1"],
        }

    return measure


def by_length(attack, seen: list[Observation], seed: int) -> list[list[list[int]]]:
    """Token ids of each. Sentences of one length are attacked together."""
    found = {}
    for length in logging.tqdm(sorted({one.input_shape[1] for one in seen}), desc=attack.name):
        alike = [number for number, one in enumerate(seen) if one.input_shape[1] == length]
        generator = torch.Generator().manual_seed(seed)
        results = attack.together([seen[number] for number in alike], generator)
        found |= {at: one.token_ids for at, one in zip(alike, results, strict=True)}
    return [found[number] for number in range(len(seen))]


def report(figures: dict, args) -> None:
    show(figures, SCORES, args.output)
