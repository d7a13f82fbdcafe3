r"""Every defense against every attack on text.

    python -m recipes.studies.every_defense.run text --tokenizer MODEL --data_dir SST2 \
        --output docs/results/text_defenses

20 sentences of 14 tokens of SST-2's dev set, one per message, on a random BERT of 2 layers and
width 128 (larger models take hours per row); labels and lengths known, token embeddings withheld.
Attack budgets are such that undefended gradients give everything away, and the same for every
defense. The adaptive attacker takes the mean of eight uploads of the batch where there is fresh
noise, and weighs coordinates by its covariance where that is not the same everywhere; matches only
what a pruning left (span: completes it); leaves out Soteria's layer; starts from random words, four
times over, against Refiner.

Token F1 with 95 % bootstrap intervals. About four hours of one core.
"""

import functools

import torch
from transformers import AutoTokenizer, set_seed

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation
from hf_gradguard.metrics import score_text
from hf_gradguard.networks import train_text_network

from ..lib.attacks import attack_of
from ..lib.defenses import published
from ..lib.tables import summary
from ..lib.text import batches_of_one, of_length, small_bert, sst2
from .attackers import cells_of, present, quickly, share
from .settings import TEXT

ARGUMENTS = {"--tokenizer": "folder or name", "--data_dir": "folder with train.tsv and dev.tsv"}
LENGTH = 14
SCORES = ("token_f1", "position_accuracy", "rougeL", "exact_match")


def plan(args) -> dict:
    return quickly(TEXT) if args.quick else TEXT


def cells(args) -> dict:
    # What another sentence, the next one, has in common with each; no gradient is asked.
    chance = {("chance", "tag"): {"attack": "another sentence", **plan(args)["samples"]}}
    return chance | cells_of(plan(args))


def prepare(args):
    torch.set_num_threads(1)
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer, trust_remote_code=False)
    model = small_bert(tokenizer)
    samples = plan(args)["samples"]["samples"]
    batches = of_length(batches_of_one(tokenizer, sst2(args.data_dir)), LENGTH, samples)
    maps = [GradientMap(model, batch) for batch in batches]
    texts = [batch["input_ids"].tolist() for batch in batches]

    @functools.cache
    def network(steps: int):
        public = sst2(args.data_dir, "train")["sentence"][:20_000]
        embedding = model.get_input_embeddings()
        return train_text_network(embedding, tokenizer, public, steps=steps, seed=0)

    def measure(cell: dict) -> dict:
        if cell["attack"] == "another sentence":
            return scored(texts[1:] + texts[:1])
        own = {}
        if cell["defense"] == "refiner":
            own = {"evaluation_network": network(cell["network_steps"])}
        made = published(cell["defense"], **cell["strength"], **own)
        if own:
            made.prepare(model, tokenizer)
        seen = []
        for number, gmap in enumerate(maps):
            grants = {"input_shape": (1, LENGTH), "tokenizer": tokenizer}
            grants |= {"labels": gmap.batch["labels"]}
            seen.append(share(model, gmap, made, number, grants, **cell["seen"]))
        attack = attack_of(cell["attack"], **cell["settings"])
        if cell["attack"] == "span":
            return scored([spanned(attack, one) for one in seen])
        found = attack.together(seen, torch.Generator().manual_seed(cell["seed"]))
        return scored([one.token_ids for one in found])

    def scored(ids: list) -> dict:
        return summary(score_text(ids, texts, tokenizer=tokenizer), SCORES)

    return measure


def spanned(span, seen: Observation) -> list[list[int]]:
    """The tokens that span finds; none where a pruning left nothing of the layers that it reads."""
    try:
        return span(seen).token_ids
    except ValueError as error:
        if "nothing to search" not in str(error):
            raise
        return [[-1] * LENGTH]


def report(figures: dict, args) -> None:
    chance = figures.pop("chance")["tag"]["token_f1"]
    present(plan(args), figures, chance, "token_f1", 2, args.output)
