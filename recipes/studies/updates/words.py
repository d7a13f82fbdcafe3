r"""What the span attack reads from the change of MiniLM's weights after several local steps.

    python -m recipes.studies.updates.run words --model MODEL --data_dir SST2 \
        --output docs/results/updates_words

A client has four sentences of 8 to 20 words of SST-2's dev set. It trains MiniLM with a new head
(no dropout, token embeddings withheld) by torch's SGD at 0.01 or ten times that, one sentence a
step. The server has the weights in float32 before and after. A token
counts as found if it is among those recovered at its position, special tokens included; "together"
also asks for the right sentence. Five clients; 95 % bootstrap intervals over them. A few minutes of
one core.
"""

import random
import time

import torch
from transformers import AutoModelForSequenceClassification as Classifier
from transformers import AutoTokenizer, set_seed

from hf_gradguard.attacks import make_attack

from ..hiding_and_learning.span import score
from ..lib.tables import write_table
from ..lib.text import of_usual_length, sst2
from .client import observed, train
from .settings import CLIENTS, QUICK_WORDS, TEXTS, WORDS

ARGUMENTS = {"--model": "an encoder", "--data_dir": "folder with dev.tsv"}


def cells(args) -> dict:
    names = QUICK_WORDS if args.quick else WORDS
    return {(name,): WORDS[name] | {"clients": 1 if args.quick else CLIENTS} for name in names}


def prepare(args):
    torch.set_num_threads(1)
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    model = Classifier.from_pretrained(args.model, num_labels=2, trust_remote_code=False).eval()
    texts = of_usual_length(sst2(args.data_dir))
    return lambda cell: measure(cell, model, tokenizer, texts)


def measure(cell: dict, model, tokenizer, texts: list[dict]) -> dict:
    found, seconds = [], 0.0
    for client in range(cell["clients"]):
        own = texts[client * TEXTS : (client + 1) * TEXTS]
        batch = dict(tokenizer([row["sentence"] for row in own], padding=True, return_tensors="pt"))
        batch.pop("token_type_ids", None)
        batch["labels"] = torch.tensor([row["label"] for row in own])
        seen = observed(
            model, train(model, batch, cell, client), cell, cell["size"],
            input_shape=tuple(batch["input_ids"].shape), tokenizer=tokenizer,
            attention_mask=batch["attention_mask"],
        )  # fmt: skip
        start = time.perf_counter()
        ids = make_attack("span")(seen).token_ids
        seconds = max(seconds, time.perf_counter() - start)
        found.append(score(ids, batch))
    total = {key: sum(one[key] for one in found) for key in found[0]}
    draws = random.Random(0)
    samples = (draws.choices(found, k=len(found)) for _ in range(1000))
    shares = sorted(sum(o["hits"] for o in s) / sum(o["distinct"] for o in s) for s in samples)
    share = total["hits"] / total["distinct"]
    interval = [round(value, 3) for value in (share, shares[25], shares[974])]
    return total | {"share": interval, "seconds": round(seconds, 1)}


def report(figures: dict, args) -> None:
    header = ["four sentences", "tokens found", "share", "together", "seconds, the slowest"]
    rows = []
    for name, one in figures.items():
        mean, low, high = one["share"]
        rows.append([
            name, f"{one['hits']} of {one['distinct']}", f"{mean:.3f} [{low:.3f}, {high:.3f}]",
            f"{one['together']} of {one['tokens']}", f"{one['seconds']:.1f}",
        ])  # fmt: skip
    write_table(args.output, header, rows)
