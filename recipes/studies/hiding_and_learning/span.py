r"""What the span attack reads from MiniLM's and GPT-2's gradients: undefended, under noise, and
behind defenses.

    python -m recipes.studies.hiding_and_learning.run span --model MODEL --data_dir SST2 \
        --output docs/results/span_attack

Sentences of 8 to 20 words of SST-2's dev set, the model as it is before fine-tuning (new head, no
dropout), token embeddings withheld, lengths known. A token counts as found if it is among those
recovered at its position, special tokens included; "together" also asks for the right sentence,
matched by assignment. Writes OUTPUT.md, OUTPUT_noise.md and OUTPUT_defenses.md. Up to an hour of
one core.
"""

import itertools
import math
import random
import time
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification as Classifier
from transformers import AutoTokenizer, GPT2Config, GPT2ForSequenceClassification, set_seed

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation
from hf_gradguard.attacks.span.attack import Span
from hf_gradguard.randomness import Stream

from ..lib.defenses import published
from ..lib.tables import write_table
from ..lib.text import NETWORK, of_usual_length, sst2
from .settings import DEFENSES, NOISE, OWN, QUICK_SPAN, SPAN, WHOLE

ARGUMENTS = {
    "--model": "an encoder",
    "--data_dir": "folder with dev.tsv",
    "--evaluation_network": NETWORK,
}


def rows(quick: bool = False) -> dict:
    if quick:
        return {(name,): SPAN[name] | {"batches": 1} for name in QUICK_SPAN}
    return {(name,): row for name, row in SPAN.items()}


def cells(args) -> dict:
    return rows(args.quick)


def prepare(args):
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    bert = Classifier.from_pretrained(args.model, num_labels=2, trust_remote_code=False).eval()
    small = {"n_layer": 2, "n_embd": 96 if args.quick else 768, "vocab_size": len(tokenizer)}
    config = GPT2Config(**small, pad_token_id=tokenizer.pad_token_id, num_labels=2)
    models = {"MiniLM": bert, "GPT-2": GPT2ForSequenceClassification(config).eval()}
    texts = of_usual_length(sst2(args.data_dir))

    def measure(cell: dict) -> dict:
        kind, strength = cell["defense"]
        network = {"evaluation_network": args.evaluation_network} if kind == "refiner" else {}
        defense = published(kind, **strength, **network)
        if network:
            defense.prepare(models[cell["model"]], tokenizer)
        return attack_batches(cell, models[cell["model"]], defense, tokenizer, texts)

    return measure


def attack_batches(row: dict, model, defense, tokenizer, texts: list[dict]) -> dict:
    """Sums over batches, the slowest batch's seconds, and the share found with a bootstrap interval
    over batches.
    """
    found, seconds = [], []
    for index in range(row["batches"]):
        part = texts[index * row["size"] : (index + 1) * row["size"]]
        sentences = [text["sentence"] for text in part]
        batch = dict(tokenizer(sentences, padding=True, return_tensors="pt"))
        batch.pop("token_type_ids", None)
        labels = torch.tensor([text["label"] for text in part])
        gmap, generator = (
            GradientMap(model, batch | {"labels": labels}),
            Stream.from_seeds(index),
        )
        noise = row["noise"]
        seen = Observation(
            model=model,
            gradient=noisy(gmap.gradient(), *noise, generator)
            if noise
            else defense(gmap, generator),
            input_shape=tuple(batch["input_ids"].shape),
            attention_mask=batch["attention_mask"],
            tokenizer=tokenizer,
        )
        start = time.perf_counter()
        ids = attacked(seen, row["attack"])
        seconds.append(math.ceil(10 * (time.perf_counter() - start)) / 10)
        found.append(score(ids, batch))
    total = {key: sum(one[key] for one in found) for key in found[0]}
    draws = random.Random(0)
    samples = (draws.choices(found, k=len(found)) for _ in range(1000))
    shares = sorted(
        sum(one["hits"] for one in some) / sum(one["distinct"] for one in some) for some in samples
    )
    share, low, high = (
        round(value, 4) for value in (total["hits"] / total["distinct"], shares[25], shares[974])
    )
    return total | {"seconds": max(seconds), "interval": [low, high], "share": share}


def attacked(seen: Observation, settings: dict) -> list[list[int]]:
    """Token ids; only those that an attacker knows beforehand where pruning left nothing to
    attack.
    """
    try:
        return Span(**settings)(seen).token_ids
    except ValueError as error:
        if "nothing to search" not in str(error):
            raise
        return [
            ids[present].tolist()
            for ids, present in zip(seen.known_ids(), seen.tokens, strict=True)
        ]


def noisy(gradient: dict, level: float, unit: str, generator: Stream) -> dict[str, torch.Tensor]:
    whole = torch.cat([g.flatten() for g in gradient.values()]).square().mean().sqrt()
    scale = {
        name: level * (g.square().mean().sqrt() if unit == OWN else whole)
        for name, g in gradient.items()
    }
    return {name: g + scale[name] * generator.normal(g.shape) for name, g in gradient.items()}


def score(found: list[list[int]], batch: dict) -> dict[str, int]:
    """Distinct tokens found at their position, and tokens in their sentence and position."""
    truth = [
        ids[mask.bool()].tolist()
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    places = [{text[t] for text in truth if len(text) > t} for t in range(max(map(len, truth)))]
    hits = [
        len(place & {ids[t] for ids in found if len(ids) > t}) for t, place in enumerate(places)
    ]
    same = [
        [sum(a == b for a, b in zip(ids, text, strict=False)) for text in truth] for ids in found
    ]
    order = max(
        itertools.permutations(range(len(truth))),
        key=lambda js: sum(same[i][j] for i, j in enumerate(js)),
    )
    return {
        "hits": sum(hits),
        "distinct": sum(map(len, places)),
        "together": sum(same[i][j] for i, j in enumerate(order)),
        "tokens": sum(map(len, truth)),
        "exact": sum(found[i] == truth[j] for i, j in enumerate(order)),
        "texts": len(truth),
    }


def report(figures: dict, args) -> None:
    tables(args.output, figures)


def tables(output: Path, figures: dict) -> None:
    """OUTPUT.md, OUTPUT_noise.md and OUTPUT_defenses.md; a dash where a row is missing."""

    def share(row: str) -> str:
        if row not in figures:
            return "–"
        low, high = figures[row]["interval"]
        return f"{100 * figures[row]['share']:.0f} % [{100 * low:.0f}, {100 * high:.0f}]"

    def exact(row: str) -> str:
        return f"{figures[row]['exact']} of {figures[row]['texts']}" if row in figures else "–"

    rows = []
    for row, one in figures.items():
        if "batch" in row:
            sentence = f"{100 * one['together'] / one['tokens']:.0f} % of {one['tokens']}"
            rows.append(
                (row, f"{share(row)} of {one['distinct']}", sentence, exact(row), one["seconds"])
            )
    header = [
        "undefended",
        "distinct tokens found",
        "tokens in their sentence",
        "sentences exact",
        "seconds, slowest batch",
    ]
    write_table(output, header, rows)
    columns = [f"of {OWN}", f"of {OWN}, threshold 0.01", f"of {WHOLE}"]
    rows = [
        (f"{100 * level:g} %", *(share(f"{level:.1%} {column}") for column in columns))
        for level in NOISE
    ]
    header = [
        "noise",
        f"share {columns[0]}",
        "the same, fixed threshold 0.01",
        f"share {columns[2]}",
    ]
    write_table(output.with_name(f"{output.name}_noise"), header, rows)
    rows = []
    for row in DEFENSES:
        name, strength = row.split()
        completed = share(f"{row}, completed") if "pruning" in name else ""
        rows.append((f"`{name}`", f"`{strength}`", share(row), exact(row), completed))
    header = [
        "defense",
        "strength",
        "tokens found",
        "sentences exact",
        "tokens found, pruned entries filled in",
    ]
    write_table(output.with_name(f"{output.name}_defenses"), header, rows)
