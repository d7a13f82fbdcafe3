r"""Does Refiner's gradient still point the right way once a model has begun to learn, and what does
refining add?

    python -m recipes.studies.refiner.run in_training --model MODEL --data_dir SST2 \
        --output docs/results/refiner_in_training

Before and after fine-tuning undefended on SST-2 (80 batches of 32, AdamW, 5e-5), compares over
batches of 16 the true gradient with that of data blended with noise, and refined from there.
"Together" is the cosine between the averages over the batches: what an optimizer that averages over
steps gets to see. A quarter of an hour of one core.
"""

import functools
import statistics

import torch
from torch.nn.functional import cosine_similarity
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed
from transformers.utils import logging

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.randomness import Stream

from ..lib.tables import write_table
from ..lib.text import NETWORK, sst2
from .federation import flat
from .settings import IN_TRAINING

ARGUMENTS = {
    "--model": "an encoder",
    "--data_dir": "folder with train.tsv",
    "--evaluation_network": NETWORK,
}
STEPS, BATCHES = 80, 4


def cells(args) -> dict:
    steps, batches, fast = (2, 2, {"iterations": 2}) if args.quick else (STEPS, BATCHES, {})
    rows = {"loss": {}} | {row: {"strength": fast | s} for row, s in IN_TRAINING.items()}
    return {
        (when, row): {"steps": taken, "of": steps, "batches": batches, **strength}
        for when, taken in (("before", 0), ("after", steps))
        for row, strength in rows.items()
    }


def prepare(args):
    trained = functools.cache(lambda *sizes: maps_after(args, *sizes))

    def measure(cell: dict):
        maps = trained(cell["steps"], cell["of"], cell["batches"])
        if "strength" not in cell:
            return statistics.mean(float(gmap.loss) for gmap in maps)
        network = {"evaluation_network": args.evaluation_network}
        defense = make_defense("refiner", objective="weighted", **network, **cell["strength"])
        tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
        defense.prepare(maps[0].model, tokenizer)
        return compared(defense, maps)

    return measure


def maps_after(args, steps: int, of: int, batches: int) -> list[GradientMap]:
    """Batches at the weights after `steps` of undefended training; they follow those of `of`
    steps.
    """
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    model = AutoModelForSequenceClassification.from_pretrained(
        args.model, num_labels=2, trust_remote_code=False
    ).train()
    data = sst2(args.data_dir, "train").shuffle(seed=0)

    def batch(start: int, size: int) -> dict[str, torch.Tensor]:
        rows = data[start : start + size]
        encoded = tokenizer(
            rows["sentence"], padding=True, truncation=True, max_length=64, return_tensors="pt"
        )
        return dict(encoded) | {"labels": torch.tensor(rows["label"])}

    embeddings = model.get_input_embeddings().requires_grad_(False)  # withheld, so not trained
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-5)
    for step in logging.tqdm(range(steps), desc="training"):
        optimizer.zero_grad()
        model(**batch(32 * step, 32)).loss.backward()
        optimizer.step()
    embeddings.requires_grad_(True)

    return [GradientMap(model, batch(32 * of + 16 * i, 16)) for i in range(batches)]


def compared(refiner, maps: list[GradientMap]) -> dict[str, float]:
    """What Refiner shares of these batches with the true gradients."""
    true = [flat(gmap.gradient()) for gmap in maps]
    found = [refiner.refine(gmap, Stream.from_seeds(i)) for i, gmap in enumerate(maps)]
    shared = [flat(robust.gradient) for robust in found]
    cosines = [float(cosine_similarity(a, b, dim=0)) for a, b in zip(true, shared, strict=True)]
    return {
        "each": round(statistics.mean(cosines), 3),
        "least": round(min(cosines), 3),
        "together": round(float(cosine_similarity(sum(true), sum(shared), dim=0)), 3),
        "relative UM": round(statistics.mean(robust.utility_metric[-1] for robust in found), 4),
        "noise ratio": round(statistics.mean(robust.noise_ratio[-1] for robust in found), 3),
    }


def report(figures: dict, args) -> None:
    rows = []
    for row in IN_TRAINING:
        before, after = figures["before"][row], figures["after"][row]
        cosines = [one[key] for one in (before, after) for key in ("each", "together")]
        rows.append([row, *(f"{cosine:.3f}" for cosine in cosines), f"{after['noise ratio']:.2f}"])
    header = ["", "before: each", "together", "after: each", "together", "D after"]
    write_table(args.output, header, rows)
