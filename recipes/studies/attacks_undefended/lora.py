r"""The span attack on messages of LoRA adapters, in the first step and after ten.

    python -m recipes.studies.attacks_undefended.run lora --tokenizer MODEL \
        --output docs/results/undefended_lora

Random models of width 384 and two blocks with adapters for queries and values, frozen otherwise;
one text of 24 tokens with its special ones, length known. Before the message the client trains on
two other texts, by AdamW at 1e-3. In the first step B is zero, so that A has no gradient. Tokens
that are right, of those that the loss depends on. One seed: what is read is exact or far from it.
Seconds are one thread's, on the processor. Five minutes of one core.
"""

import time

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, set_seed

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.attacks.span.attack import heard_positions

from ..lib.families import CLASSIFIER, LM, build
from ..lib.tables import write_table
from .settings import ADAPTED, LONG, RANKS, SENTENCES, STEPS_BEFORE

ARGUMENTS = {"--tokenizer": "of which the vocabulary is"}
KINDS = {CLASSIFIER: "SEQ_CLS", LM: "CAUSAL_LM"}


def cells(args) -> dict:
    ranks = RANKS[:1] if args.quick else RANKS
    return {
        (f"{family}, {task}", f"rank {rank}, after {steps} steps"): {
            "family": family, "task": task, "rank": rank, "steps": steps, "seed": 0,
        }
        for family, task in list(ADAPTED)[: 1 if args.quick else None]
        for rank in ranks
        for steps in STEPS_BEFORE
    }  # fmt: skip


def prepare(args):
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer, trust_remote_code=False)
    return lambda cell: measure(cell, tokenizer)


def measure(cell: dict, tokenizer) -> dict:
    set_seed(cell["seed"])
    model = adapted(cell, tokenizer)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    for step in range(cell["steps"]):
        optimizer.zero_grad()
        model(**batch_of(SENTENCES[step % 2], cell["task"], tokenizer)).loss.backward()
        optimizer.step()
    batch = batch_of(LONG, cell["task"], tokenizer)
    ids = batch["input_ids"]
    gradient = GradientMap(model, batch, second_order=False).gradient()
    seen = Observation(
        model, gradient, tuple(ids.shape), attention_mask=batch["attention_mask"],
        tokenizer=tokenizer,
    )  # fmt: skip
    heard = int(heard_positions(seen).sum())
    start = time.process_time()
    try:
        found = make_attack("span")(seen).token_ids[0][:heard]
    except ValueError:
        return {"right": None, "of": heard}
    right = sum(a == b for a, b in zip(found, ids[0, :heard].tolist(), strict=True))
    return {"right": right, "of": heard, "seconds": time.process_time() - start}


def adapted(cell: dict, tokenizer) -> torch.nn.Module:
    """The model with new adapters."""
    layers = ADAPTED[cell["family"], cell["task"]]
    settings = LoraConfig(
        r=cell["rank"], lora_alpha=2 * cell["rank"], target_modules=list(layers),
        task_type=KINDS[cell["task"]], fan_in_fan_out=cell["family"] == "gpt2",
    )  # fmt: skip
    return get_peft_model(build(cell["family"], cell["task"], tokenizer), settings).eval()


def batch_of(text: str, task: str, tokenizer) -> dict[str, torch.Tensor]:
    batch = dict(tokenizer([text], return_tensors="pt"))
    batch.pop("token_type_ids", None)
    return batch | {"labels": batch["input_ids"] if task == LM else torch.tensor([1])}


def report(figures: dict, args) -> None:
    columns = list(next(iter(figures.values())))
    rows = [[name, *(said(found[column]) for column in columns)] for name, found in figures.items()]
    write_table(args.output, ["tokens", *columns], rows)


def said(found: dict) -> str:
    if found["right"] is None:
        return "refused"
    return f"{found['right']} of {found['of']} · {found['seconds']:.0f} s"
