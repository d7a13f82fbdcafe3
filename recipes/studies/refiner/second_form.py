r"""Refiner's second form, line by line: what each part of it gives, beside the published form and
uniform noise.

    python -m recipes.studies.refiner.run second_form --model MODEL --data_dir SST2 \
        --models FOLDER --output docs/results/refiner_second_form

One client of 16 phrases of SST-2 a message, 200 steps of AdamW, one seed (`--all`: three seeds, and
more rows); accuracy on 2,693 sentences, compared with the undefended run of the same seed sentence
by sentence. At the end of its own training each is attacked by span, on messages of a sentence of 8
to 20 words of the dev set, and by an attacker with a list: how many of 64 sentences of that set,
one of which it is, have a gradient at a smaller angle to the message. Where samples are made up,
`candidates` then ranks the list twice, without the defense's law and with it, for the client's next
message and for what would be its first, of one sentence and of 16. And it ranks words at one place
of a sentence whose others are known: the true one, and 149 of the training set. Nothing else is
granted: who knows the law makes up samples of his own. FOLDER keeps what was trained, 45 MB a
stage.
"""

import dataclasses
import functools
import statistics
from collections.abc import Sequence

import numpy as np
import torch

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.metrics import score_text
from hf_gradguard.randomness import Stream

from ..frontier.shown import lost, told_of
from ..frontier.training import TEXTS, Task
from ..lib.attacks import generator_there
from ..lib.device import there
from ..lib.intervals import share
from ..lib.tables import interval, write_table
from ..lib.text import batches_of_one, of_usual_length, sst2
from .federation import flat
from .settings import (
    BATCHES_TOLD,
    CANDIDATES,
    FIRST_READ,
    FIRST_ROWS,
    QUICK_SECOND,
    SECOND_FORM,
    SECOND_SEEDS,
    SECOND_SIZES,
    SENTENCES_READ,
    WORDS,
)

ARGUMENTS = TEXTS | {
    "--models": "folder that keeps what was trained",
    "--all": {"action": "store_true", "help": "all rows, three seeds"},
}


def cells(args) -> dict:
    """Seeds after each other, and of each the trainings first. Without `--all` of one seed, the
    first rows, of which the very first are attacked.
    """
    some = QUICK_SECOND if args.quick else list(SECOND_FORM)[: None if args.all else FIRST_ROWS]
    rows = {row: SECOND_FORM[row] for row in some}
    sizes = {"steps": 2, "batch": 4} if args.quick else SECOND_SIZES
    found = {}
    for seed in range(SECOND_SEEDS if args.all and not args.quick else 1):
        trained = {
            row: {"defense": name, "strength": strength, "learning_rate": rate, "seed": seed}
            | sizes
            for row, (name, strength, rate) in rows.items()
        }
        found |= {(row, "accuracy", str(seed)): cell for row, cell in trained.items()}
        read = {"messages": 1 if args.quick else SENTENCES_READ}
        read |= {"candidates": 2 if args.quick else CANDIDATES}
        known = list(trained)[: None if args.all or args.quick else FIRST_READ]
        found |= {(row, "read", str(seed)): trained[row] | read for row in known}
        told = read | {"batches": [1] if args.quick else BATCHES_TOLD}
        fits = [row for row in known if synthetic_samples(trained[row])]
        found |= {(row, "told", str(seed)): trained[row] | told for row in fits}
        word = {"messages": read["messages"], "words": 3 if args.quick else WORDS}
        found |= {(row, "word", str(seed)): trained[row] | word for row in fits}
    return found


def prepare(args):
    task = Task(args.model, args.data_dir, args.models)
    texts = of_usual_length(sst2(args.data_dir))

    def measure(cell: dict) -> dict:
        attacks = ("messages", "candidates", "batches", "words")
        training = {k: v for k, v in cell.items() if k not in attacks}
        if "words" in cell:
            return word(cell, task.stage(training, "end"), task, texts)
        if "batches" in cell:
            return told(cell, task.stage(training, "end"), task.tokenizer, texts)
        if "messages" in cell:
            return read(cell, task.stage(training, "end"), task.tokenizer, texts)
        right = task.right(task.train(training, keep=True), task.test_rows)
        bits = np.packbits(right).tobytes().hex()
        return {"accuracy": float(right.mean()), "right": bits, "of": len(right)}

    return measure


def read(cell: dict, stage, tokenizer, texts: list[dict]) -> dict:
    """Token F1 of span, the rank of the true sentence, and the cosine with the true gradient, of
    each message. Each is a next one of the client's.
    """
    batches = _there(tokenizer, texts[: cell["candidates"]])
    gradients = [
        flat(GradientMap(stage.model, batch, second_order=False).gradient()) for batch in batches
    ]
    listed = torch.nn.functional.normalize(torch.stack(gradients), dim=1)
    state = stage.defense.state_dict()
    found: dict = {"token_f1": [], "rank": [], "cosine": []}
    for number, batch in enumerate(batches[: cell["messages"]]):
        stage.defense.load_state_dict(state)
        gmap = GradientMap(stage.model, batch, second_order=stage.defense.needs_jacobian)
        message = stage.defense(gmap, Stream.from_seeds(cell["seed"], number))
        cosines = listed @ torch.nn.functional.normalize(flat(message), dim=0)
        found["cosine"].append(round(float(cosines[number]), 4))
        found["rank"].append(int((cosines > cosines[number]).sum()))
        found["token_f1"].append(round(spanned(stage.model, message, batch, tokenizer, number), 4))
    return found


def synthetic_samples(cell: dict) -> bool:
    """Whether samples are made up, and stay as they were drawn."""
    strength = cell["strength"]
    return strength.get("objective") == "cosine" and not strength["iterations"]


def told(cell: dict, stage, tokenizer, texts: list[dict]) -> dict:
    """For each size of batch, message and attacker, how many of the other sentences `candidates`
    takes for likelier than each that is in the message.
    """
    batches = _there(tokenizer, texts[: cell["candidates"]])
    attack = make_attack("candidates", candidates=batches)
    ranks = functools.partial(ranked, stage, stage.defense.state_dict(), tokenizer, cell["seed"])
    found: dict = {}
    for size in cell["batches"]:
        last = cell["messages"] if size == 1 else cell["candidates"]
        for start in range(0, last, size):
            members = range(start, start + size)
            for name, some in ranks([batches[i] for i in members], attack, members).items():
                found.setdefault(f"{size} {name}", []).extend(some)
    return found


def word(cell: dict, stage, task: Task, texts: list[dict]) -> dict:
    """The same of words in the middle of a sentence whose others are known."""
    special, found = set(task.tokenizer.all_special_ids), {}
    learned = task.rows_to_learn()[:500]["input_ids"]
    pool = sorted({token for ids in learned for token in ids} - special)
    ranks = functools.partial(
        ranked, stage, stage.defense.state_dict(), task.tokenizer, cell["seed"]
    )
    for number, batch in enumerate(_there(task.tokenizer, texts[: cell["messages"]])):
        ids = batch["input_ids"][0].tolist()
        place = len(ids) // 2
        others = np.random.default_rng(number).permutation([t for t in pool if t != ids[place]])
        words = [ids[place], *others[: cell["words"] - 1].tolist()]
        attack = make_attack("candidates", candidates=ids, places=[place], words=words)
        for name, some in ranks([batch], attack, [0]).items():
            found.setdefault(f"word {name}", []).extend(some)
    return found


def _there(tokenizer, texts: list[dict]) -> list[dict]:
    return [there(batch) for batch in batches_of_one(tokenizer, texts)]


def ranked(
    stage, remembered: dict, tokenizer, seed: int, rows: list[dict], attack, members: Sequence[int]
) -> dict[str, list[int]]:
    """How many others are taken for likelier than each member, by message and attacker."""
    seen = {}
    for when, state in (("first", {}), ("later", remembered)):
        stage.defense.load_state_dict(state)
        plain, informed = shared(stage, tokenizer, rows, seed)
        seen |= {f"{when} plain": plain, f"{when} informed": informed}
    drawn, found = generator_there(next(iter(seen.values())), members[0]), {}
    for name, one in zip(seen, attack.together([*seen.values()], drawn), strict=True):
        others = one.scores.clone()
        others[list(members)] = -torch.inf
        found[name] = [int((others > one.scores[i]).sum()) for i in members]
    return found


def shared(stage, tokenizer, rows: list[dict], seed: int) -> tuple[Observation, Observation]:
    """What a server sees of a batch, without the law and with it."""
    texts = [{"input_ids": row["input_ids"][0].tolist()} for row in rows]
    batch = there(tokenizer.pad(texts, return_tensors="pt"))
    batch["labels"] = torch.cat([row["labels"] for row in rows])
    gmap = GradientMap(stage.model, batch, second_order=False)
    message = stage.defense(gmap, Stream.from_seeds(seed, int(batch["input_ids"].sum())))
    seen = Observation(
        stage.model, dict(message), tuple(batch["input_ids"].shape), labels=batch["labels"],
        tokenizer=tokenizer,
    )  # fmt: skip
    return seen, dataclasses.replace(seen, law=stage.defense.law(message))


def spanned(model, message, batch: dict, tokenizer, number: int) -> float:
    seen = Observation(
        model=model, gradient=message, input_shape=tuple(batch["input_ids"].shape),
        labels=batch["labels"], attention_mask=batch["attention_mask"], tokenizer=tokenizer,
    )  # fmt: skip
    settings = {"complete": True} if message.transmitted is not None else {}
    try:
        attack = make_attack("span", **settings)
        ids = attack(seen, generator_there(seen, number)).token_ids
    except ValueError as error:
        if not any(why in str(error) for why in ("nothing to search", "lies in the span")):
            raise
        return 0.0
    truth = [[batch["input_ids"][0].tolist()]]
    scores = score_text([ids], truth, tokenizer=tokenizer, bootstrap=0)
    return float(scores.per_sample["token_f1"][0])


def report(figures: dict, args) -> None:
    plain = figures.get("none", {}).get("accuracy", {})
    rows = []
    for row, found in figures.items():
        runs, reads = found.get("accuracy", {}), found.get("read", {})
        whole = functools.partial(_whole, reads)
        cells = [interval([one["accuracy"] for one in runs.values()]) if runs else ""]
        cells += [lost(runs, plain)]
        if reads:
            ranks, words = whole("rank"), told_of([whole("token_f1")], "token_f1")
            first = share(sum(rank == 0 for rank in ranks), len(ranks)).said(2)
            cells += [f"{statistics.mean(whole('cosine')):.2f}", words]
            cells += [first, f"{statistics.median(ranks):g}"]
        rows.append([row, *cells, *[""] * (6 - len(cells))])
    header = ["accuracy", "less than none", "cosine", "span, token F1", "sentence is first of 64"]
    write_table(args.output, ["", *header, "its rank, median"], rows)
    ranks: dict[tuple, list[int]] = {}
    for row, found in figures.items():
        for one in (one for kind in ("told", "word") for one in found.get(kind, {}).values()):
            for name, several in one.items():
                ranks.setdefault((row, *name.split()), []).extend(several)
    listed, words = (2, 3) if args.quick else (CANDIDATES, WORDS)
    table = []
    for key, found in ranks.items():
        others = words - 1 if key[1] == "word" else listed - int(key[1])
        first = share(sum(rank == 0 for rank in found), len(found)).said(2)
        before = interval([1 - rank / others for rank in found], 2)
        median = f"{statistics.median(found):g}"
        table.append([key[0], said(key[1]), *key[2:], first, median, before])
    header = ["listed", "message", "attacker", "before all others", "others before it, median"]
    write_table(
        args.output.with_name(args.output.name + "_list"),
        ["", *header, "before another (chance: 0.5)"],
        table,
    )


def said(size: str) -> str:
    """What is on the list."""
    return {"word": "one word", "1": "one sentence"}.get(size, f"{size} sentences")


def _whole(reads: dict, figure: str) -> list[float]:
    return [value for one in reads.values() for value in one[figure]]
