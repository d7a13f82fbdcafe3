r"""Refiner's second form, line by line: what each part of it gives, beside the published form and
uniform noise.

    python -m recipes.studies.refiner.run second_form --model MODEL --data_dir SST2 \
        --models FOLDER --output docs/results/refiner_second_form

One client of 16 phrases of SST-2 a message, 200 steps of AdamW, one seed (`--all`: three seeds, and
more rows); accuracy on 2,693 sentences, compared with the undefended run of the same seed sentence
by sentence. At the end of its own training each is attacked by span, on messages of a sentence of 8
to 20 words of the dev set, and by an attacker with a list: how many of 64 sentences of that set,
one of which it is, have a gradient at a smaller angle to the message. Who knows Refiner reads off
the message which samples were made up (the first layer's gradient is of their tokens), fits each
candidate's gradient as the client fitted its own, and compares that; here the samples are granted.
FOLDER keeps what was trained, 45 MB a stage.
"""

import functools
import statistics

import numpy as np
import torch

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.defenses.made_up import fit_in, made_up
from hf_gradguard.gradient_map.sample_span import SampleSpan
from hf_gradguard.metrics import score_text
from hf_gradguard.randomness import Stream

from ..frontier.text import lost
from ..frontier.training import TEXTS, Task
from ..lib.tables import interval, write_table
from ..lib.text import batches_of_one, of_usual_length, sst2
from .federation import flat
from .settings import (
    CANDIDATES,
    FIRST_READ,
    FIRST_ROWS,
    QUICK_SECOND,
    SECOND_FORM,
    SECOND_SEEDS,
    SECOND_SIZES,
    SENTENCES_READ,
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
    return found


def prepare(args):
    task = Task(args.model, args.data_dir, args.models)
    texts = of_usual_length(sst2(args.data_dir))

    def measure(cell: dict) -> dict:
        training = {k: v for k, v in cell.items() if k not in ("messages", "candidates")}
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
    batches = batches_of_one(tokenizer, texts[: cell["candidates"]])
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
        if knows_samples(cell):
            fits = fitted(stage.defense, gmap, gradients, Stream.from_seeds(cell["seed"], number))
            near = torch.stack([cosine(fit, flat(message)) for fit in fits])
            found.setdefault("informed_rank", []).append(int((near > near[number]).sum()))
        found["token_f1"].append(round(spanned(stage.model, message, batch, tokenizer, number), 4))
    return found


def knows_samples(cell: dict) -> bool:
    """Whether samples are made up, and stay as they were drawn."""
    strength = cell["strength"]
    return strength.get("objective") == "cosine" and not strength["iterations"]


def fitted(defense, gmap: GradientMap, gradients: list[torch.Tensor], stream: Stream):
    """Flat gradients, each at its nearest point in the span of what the client made up."""
    span = SampleSpan(made_up(gmap, defense.samples, stream, defense._special.ids))
    sizes = [p.numel() for p in gmap.parameters.values()]
    for gradient in gradients:
        parts = zip(gmap.parameters.items(), gradient.split(sizes), strict=True)
        wanted = {name: part.view(p.shape) for (name, p), part in parts}
        yield flat(fit_in(span, wanted, defense.factors).nearest)


def cosine(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cosine_similarity(one, other, dim=0)


def spanned(model, message, batch: dict, tokenizer, number: int) -> float:
    seen = Observation(
        model=model, gradient=message, input_shape=tuple(batch["input_ids"].shape),
        labels=batch["labels"], attention_mask=batch["attention_mask"], tokenizer=tokenizer,
    )  # fmt: skip
    settings = {"complete": True} if message.transmitted is not None else {}
    try:
        attack = make_attack("span", **settings)
        ids = attack(seen, generator=torch.Generator().manual_seed(number)).token_ids
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
            first = [float(rank == 0) for rank in whole("rank")]
            cells += [f"{statistics.mean(whole('cosine')):.2f}", interval(whole("token_f1"), 2)]
            cells += [interval(first, 2), f"{statistics.median(whole('rank')):g}"]
            if all("informed_rank" in one for one in reads.values()):
                cells += [f"{statistics.median(whole('informed_rank')):g}"]
        rows.append([row, *cells, *[""] * (7 - len(cells))])
    header = ["accuracy", "less than none", "cosine", "span, token F1", "sentence is first of 64"]
    header += ["its rank, median", "by who knows the samples"]
    write_table(args.output, ["", *header], rows)


def _whole(reads: dict, figure: str) -> list[float]:
    return [value for one in reads.values() for value in one[figure]]
