r"""How many batches must an entry hold before a pruning with error feedback sends it?

    python -m recipes.studies.frontier.run batches --model MODEL --data_dir SST2 \
        --output docs/results/frontier_batches

A client's first message that says something is the sum of so many batches in all that it sends, at
one and the same model: the encoder before training, here. Batches are of 16 sentences of SST-2's
dev set. Two attackers know that. One has a list of up to 300 sentences, the last batch's among
them and no other batch's; the other one's list has those of all batches. Shown is the share that is
told at 1 % false alarms: of the last batch's 16, in three messages; of all batches' sentences, in
one. Beside it the median rank of the former: 1 + how many that are not in the message come before.
Both know all labels. The first tries two ways: beside what was left out, of unknown size, and as
the message of one large batch; the better one counts. Twenty-five minutes of one core.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Observation
from hf_gradguard.defenses.mechanism import Mechanism
from hf_gradguard.randomness import Stream

from ..lib.tables import write_table
from ..lib.text import of_usual_length, sst2
from .attackers import told
from .settings import BATCH
from .shown import read, told_of
from .training import TEXTS, Task

ARGUMENTS = TEXTS
DEFENSES = ("optimal_pruning", "pruning")
COUNTS, MESSAGES, LISTED = (1, 2, 4, 8, 16), 3, 300


def cells(args) -> dict:
    counts, size, messages = ((1, 2), 2, 1) if args.quick else (COUNTS, BATCH, MESSAGES)
    return {
        (name, str(count)): {
            "defense": name, "strength": {"ratio": 0.99, "error_feedback": True},
            "min_batches": count, "size": size, "messages": messages, "listed": LISTED, "seed": 0,
        }
        for count in counts
        for name in DEFENSES
    }  # fmt: skip


def prepare(args):
    task = Task(args.model, args.data_dir)
    model = task.start(0).eval()
    texts = of_usual_length(sst2(args.data_dir))

    def measure(cell: dict) -> dict:
        size, count, messages = cell["size"], cell["min_batches"], cell["messages"]
        parts = [texts[at : at + size] for at in range(0, size * (count + messages - 1), size)]
        others = texts[size * len(parts) :]
        sent = [
            _first(model, task.tokenizer, cell, parts[number : number + count])
            for number in range(messages)
        ]
        lasts = [text for part in parts[count - 1 :] for text in part]
        listed = (lasts + others)[: cell["listed"]]
        ways = [_told(cell, listed, [way[at] for way in sent], size) for at in range(2)]
        whole = [text for part in parts[:count] for text in part]
        every = _told(cell, (whole + others)[: max(cell["listed"], len(whole) + 1)],
                      [sent[0][1]], len(whole))  # fmt: skip
        return max(ways, key=lambda way: sum(way["tpr_1%"])) | {"all": every["tpr_1%"]}

    return measure


def _first(model, tokenizer, cell: dict, parts: Sequence[list[dict]]) -> list[Observation]:
    """A client's first message that is not empty, as the two ways have it."""
    defense = make_defense(cell["defense"], **cell["strength"], min_batches=cell["min_batches"])
    defense.prepare(model, tokenizer)
    longest = 0
    for number, part in enumerate(parts):
        batch = dict(tokenizer([t["sentence"] for t in part], padding=True, return_tensors="pt"))
        labels = torch.tensor([text["label"] for text in part])
        stream = Stream.from_seeds(cell["seed"], number)
        message = defense(GradientMap(model, batch | {"labels": labels}), stream)
        longest = max(longest, batch["input_ids"].shape[1])
    shape, mechanism = tuple(batch["input_ids"].shape), defense.mechanism(message)
    beside = Observation(
        model, dict(message), shape, labels=labels, tokenizer=tokenizer, mechanism=mechanism
    )
    mean = {name: y / len(parts) for name, y in message.items()}
    kept = "largest" if cell["defense"] == "pruning" else "chosen"
    every = torch.tensor([text["label"] for part in parts for text in part])
    return [beside, replace(beside, gradient=mean, input_shape=(len(every), longest),
                            labels=every, mechanism=Mechanism(selection=kept))]  # fmt: skip


def _told(cell: dict, listed: list[dict], seen: Sequence[Observation], size: int) -> dict:
    names, labels = ([text[key] for text in listed] for key in ("sentence", "label"))
    return told(cell | {"attack": "candidates", "size": size}, names, labels, seen)


def report(figures: dict, args) -> None:
    rows = [
        [f"`{name}`", count, read({"0": one}), f"{median(one['rank']):g}",
         told_of([one["all"]], "tpr_1%")]
        for name, found in figures.items()
        for count, one in found.items()
    ]  # fmt: skip
    header = ["0.99, feedback", "batches in an entry", "of the last batch, others not on the list",
              "their rank, median", "of all batches, all on the list"]  # fmt: skip
    write_table(args.output, header, rows)
