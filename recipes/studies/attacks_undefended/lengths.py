r"""The span attack on one long text, on wider models, and on weights of half precision.

    python -m recipes.studies.attacks_undefended.run lengths --tokenizer MODEL \
        --output docs/results/undefended_lengths

Random models of two blocks, the sentences of the part `families` one after the other as one text,
length known. Tokens that are right, of those that the loss depends on; what is read is exact or far
from it, so one text a cell. Seconds are one thread's, on the processor. Ten minutes of one core;
`--all` also asks for 256 tokens.
"""

import time

import torch
from transformers import AutoTokenizer, set_seed

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.attacks.span.attack import heard_positions

from ..lib.families import CLASSIFIER, HEADS, LM, WIDTH, build
from ..lib.results import chosen
from ..lib.tables import write_table
from .settings import SENTENCES

ARGUMENTS = {
    "--tokenizer": "of which the vocabulary is",
    "--all": {"action": "store_true", "help": "also texts of 256 tokens"},
}
MODELS = (("llama", LM), ("gpt2", LM), ("bert", CLASSIFIER))
KINDS = ((WIDTH, "float32"), (2 * WIDTH, "float32"), (WIDTH, "bfloat16"))
TOKENS, LONGEST = (64, 128, 256), 128  # without `--all`


def cells(args) -> dict:
    """Without `--all` the shorter texts, and what is there."""
    whole = {
        (f"{family}, {task}", str(tokens), f"width {width}, {dtype}"): {
            "family": family, "task": task, "tokens": tokens, "width": width, "dtype": dtype,
            "seed": 0,
        }
        for tokens in ((8,) if args.quick else TOKENS)
        for width, dtype in KINDS
        for family, task in (MODELS[:1] if args.quick else MODELS)
    }  # fmt: skip
    return chosen(whole, lambda cell: cell["tokens"] <= LONGEST, args)


def prepare(args):
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer, trust_remote_code=False)
    return lambda cell: measure(cell, tokenizer)


def measure(cell: dict, tokenizer) -> dict:
    set_seed(cell["seed"])
    wider = {"hidden_size": cell["width"], "intermediate_size": 4 * cell["width"]}
    if cell["family"] == "llama":
        wider["head_dim"] = cell["width"] // HEADS
    model = build(cell["family"], cell["task"], tokenizer, **wider)
    model = model.to(getattr(torch, cell["dtype"]))
    batch = tokenizer(
        " ".join(SENTENCES), truncation=True, max_length=cell["tokens"], return_tensors="pt"
    )
    ids = batch["input_ids"]
    labels = ids if cell["task"] == LM else torch.zeros(1, dtype=torch.long)
    batch = {"input_ids": ids, "attention_mask": batch["attention_mask"], "labels": labels}
    gradient = GradientMap(model, batch, second_order=False).gradient()
    seen = Observation(model, gradient, tuple(ids.shape), tokenizer=tokenizer)
    start = time.process_time()
    found = make_attack("span")(seen).token_ids[0]
    seconds = time.process_time() - start
    heard = int(heard_positions(seen).sum())
    right = sum(a == b for a, b in zip(found[:heard], ids[0, :heard].tolist(), strict=True))
    return {"right": right, "of": heard, "seconds": seconds}


def report(figures: dict, args) -> None:
    columns = [f"width {width}, {dtype}" for width, dtype in KINDS]
    rows = [
        [model, tokens, *(said(found[column]) if column in found else "–" for column in columns)]
        for model, lengths in figures.items()
        for tokens, found in lengths.items()
    ]
    write_table(args.output, ["right tokens · seconds", "tokens", *columns], rows)


def said(found: dict) -> str:
    return f"{found['right']} of {found['of']} · {found['seconds']:.0f} s"
