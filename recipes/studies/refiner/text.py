r"""What TAG and Inverting Gradients read of sentences behind pruning, Gaussian noise and Refiner:
Refiner paper (2025), Table 13.

    python -m recipes.studies.refiner.run text --model MODEL --data_dir SST2 \
        --output docs/results/refiner_text

The first 10 sentences of SST-2's dev set that have 14 tokens, one per message, the model as it is
before fine-tuning (new head, no dropout), labels and lengths known, token embeddings withheld. Both
attacks get 500 evaluations: TAG 500 updates, Inverting Gradients 25 steps of L-BFGS with up to 20,
its best of seven settings on three other, undefended sentences: Adam, signed or not, stays far
behind. Token F1 with 95 % bootstrap intervals. Rows called "paper" have the paper's strengths (its
BERT is fine-tuned, its samples 1,000); the others are those whose accuracies hiding_and_learning
has, shown beside them. About an hour of one core.
"""

from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation
from hf_gradguard.metrics import score_text
from hf_gradguard.randomness import Stream

from ..hiding_and_learning import accuracy
from ..hiding_and_learning.picture import PUBLISHED
from ..lib.attacks import attack_of
from ..lib.defenses import published
from ..lib.results import Results, nested
from ..lib.tables import bracketed, summary, write_table
from ..lib.text import NETWORK, batches_of_one, of_length, sst2
from .settings import PAPER_TEXT, QUICK_STEPS, TEXT, TEXT_ATTACKS

ARGUMENTS = {
    "--model": "an encoder",
    "--data_dir": "folder with dev.tsv",
    "--evaluation_network": NETWORK,
    "--accuracies": {
        "type": Path, "default": PUBLISHED / "sst2", "help": "OUTPUT of hiding_and_learning's"
    },
}  # fmt: skip
LENGTH, SAMPLES, QUICK_SAMPLES = 14, 10, 2


def cells(args) -> dict:
    samples, fast = (QUICK_SAMPLES, QUICK_STEPS) if args.quick else (SAMPLES, {})
    return {
        (row, attack): {
            "defense": defense,
            "strength": strength,
            "attack": attack,
            "settings": settings | fast,
            "samples": samples,
            "seed": 0,
        }
        for row, (defense, strength) in TEXT.items()
        for attack, settings in TEXT_ATTACKS.items()
    }


def prepare(args):
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    model = AutoModelForSequenceClassification.from_pretrained(
        args.model, num_labels=2, trust_remote_code=False
    ).eval()
    fitting = of_length(batches_of_one(tokenizer, sst2(args.data_dir)), LENGTH, SAMPLES)

    def measure(cell: dict) -> dict:
        network, batches, seen = {}, fitting[: cell["samples"]], []
        if cell["defense"] == "refiner":
            network = {"evaluation_network": args.evaluation_network}
        defense = published(cell["defense"], **cell["strength"], **network)
        defense.prepare(model, tokenizer)
        for number, batch in enumerate(batches):
            gmap = GradientMap(model, batch)
            shared = defense(gmap, Stream.from_seeds(number))
            known = {"labels": batch["labels"], "tokenizer": tokenizer}
            seen.append(Observation(model, shared, input_shape=(1, LENGTH), **known))
        attack = attack_of(cell["attack"], **cell["settings"])
        found = attack.together(seen, torch.Generator().manual_seed(cell["seed"]))
        texts = [batch["input_ids"].tolist() for batch in batches]
        scores = score_text([one.token_ids for one in found], texts, tokenizer=tokenizer)
        return summary(scores, ("token_f1", "position_accuracy"))

    return measure


def report(figures: dict, args) -> None:
    accuracies, table = nested(accuracy.rows("accuracy"), Results(args.accuracies)), []
    for row, found in figures.items():
        learned = f"{accuracies[row]['accuracy']:.3f}" if row in accuracies else ""
        shown = [bracketed(found[attack]["token_f1"], ".2f") for attack in TEXT_ATTACKS]
        table.append([row, learned, *shown, PAPER_TEXT.get(row, "")])
    header = ["", "accuracy", *(f"token F1, {attack}" for attack in TEXT_ATTACKS)]
    write_table(args.output, [*header, "paper: accuracy, F1 (TAG); accuracy, F1 (IG)"], table)
