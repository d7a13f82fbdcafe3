r"""The span attack on one text or several, over the architectures that people fine-tune.

    python -m recipes.studies.attacks_undefended.run families --tokenizer MODEL \
        --output docs/results/span_families

Random models of width 384 and two blocks, the tokenizer of --tokenizer, plain English sentences
that no other table uses, lengths known. A text counts as exact if every token that the loss depends
on is right. Seconds are one thread's, on the processor.
"""

import time

import torch
from transformers import AutoTokenizer, set_seed

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.attacks.span.attack import heard_positions

from ..lib.families import CLASSIFIER, DECODERS, ENCODERS, LM, MASKED, build
from ..lib.results import chosen
from ..lib.tables import write_table
from .settings import SENTENCES

ARGUMENTS = {
    "--tokenizer": "of which the vocabulary is",
    "--all": {"action": "store_true", "help": "all families, of four and eight texts too"},
}
ENCODERS_FIRST = ("bert", "distilbert", "electra", "roberta", "albert")
FOUR = ("llama", "gpt2", *ENCODERS_FIRST)
TASKS = dict.fromkeys(DECODERS, (LM, CLASSIFIER)) | {"bert": (CLASSIFIER, MASKED)}


def cells(args) -> dict:
    """Single texts of decoders and of the commonest encoders, and four of some; the rest of it with
    `--all`.
    """
    one, four, eight, every = 20, 5, 1, DECODERS | ENCODERS
    common = DECODERS | dict.fromkeys(ENCODERS_FIRST)
    groups = [(1, one, common), (4, four, FOUR), (8, eight, FOUR)]
    groups += [(1, one, every), (4, four, every), (8, eight, every)]
    if args.quick:
        groups = [(1, 1, ["llama"]), (4, 1, ["bert"])]
    whole = {
        (row_of(family, task, special), str(texts)): {
            "family": family, "task": task, "special": special, "texts": texts, "batches": batches,
        }
        for texts, batches, families in groups
        for family in families
        for task in TASKS.get(family, (CLASSIFIER,))
        for special in ((True, False) if family in DECODERS else (True,))
    }  # fmt: skip
    first = {1: common, 4: FOUR, 8: ()}
    return chosen(whole, lambda cell: cell["family"] in first[cell["texts"]], args)


def row_of(family: str, task: str, special: bool) -> str:
    return f"{family}, {task}" + ("" if special else ", no special tokens")


def prepare(args):
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer, trust_remote_code=False)

    def measure(cell: dict) -> dict:
        set_seed(0)
        model = build(cell["family"], cell["task"], tokenizer)
        exact, right, tokens, seconds = 0, 0, 0, []
        for number in range(cell["batches"]):
            seen, truth = observe(model, tokenizer, number, **cell)
            start = time.process_time()
            try:
                found = make_attack("span")(seen).token_ids
            except ValueError:
                return {"exact": None}
            seconds.append(time.process_time() - start)
            rows = aligned(found, truth)
            exact += sum(row == text for row, text in rows)
            right += sum(a == b for row, text in rows for a, b in zip(row, text, strict=True))
            tokens += sum(map(len, truth))
        return {
            "exact": exact,
            "of": cell["texts"] * cell["batches"],
            "tokens right": right / tokens,
            "seconds": sum(seconds) / len(seconds),
        }

    return measure


def observe(
    model, tokenizer, number: int, task: str, special: bool, texts: int, **_
) -> tuple[Observation, list[list[int]]]:
    """What the server sees of a batch, and the tokens that its loss depends on."""
    mine = [SENTENCES[(number * texts + i) % len(SENTENCES)] for i in range(texts)]
    ids = tokenizer(mine, add_special_tokens=special)["input_ids"]
    batch = dict(tokenizer.pad({"input_ids": ids}, return_tensors="pt"))
    batch = {key: batch[key] for key in ("input_ids", "attention_mask")}
    if task in (LM, MASKED):
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    else:
        labels = torch.arange(texts) % 2
    gradient = GradientMap(model, batch | {"labels": labels}, second_order=False).gradient()
    seen = Observation(
        model,
        gradient,
        tuple(batch["input_ids"].shape),
        attention_mask=batch["attention_mask"],
        tokenizer=tokenizer if special else None,
    )
    heard = heard_positions(seen).sum(1).tolist()
    return seen, [row[:count] for row, count in zip(ids, heard, strict=True)]


def aligned(found: list[list[int]], truth: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    """Each true text with the found one that is nearest to it, of those that are left: a gradient
    does not say in which order the texts were.
    """
    pairs, left = [], [list(row) for row in found]
    for text in sorted(truth, key=len, reverse=True):
        scores = [sum(a == b for a, b in zip(row, text, strict=False)) for row in left]
        row = left.pop(scores.index(max(scores)))[: len(text)]
        pairs.append((row + [-1] * (len(text) - len(row)), text))
    return pairs


def report(figures: dict, args) -> None:
    columns = {"1": "1 text", "4": "4 texts", "8": "8 texts"}
    rows = [
        [name, *(said(sizes[texts]) if texts in sizes else "–" for texts in columns)]
        for name, sizes in figures.items()
    ]
    write_table(args.output, ["exact · tokens · seconds a batch", *columns.values()], rows)


def said(found: dict) -> str:
    if found["exact"] is None:
        return "refused"
    return (
        f"{found['exact']} of {found['of']} · {found['tokens right']:.0%} · "
        f"{found['seconds']:.1f} s"
    )
