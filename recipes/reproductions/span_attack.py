"""What the span attack reads from MiniLM's and GPT-2's gradients: undefended, under noise, and behind defences.

    python recipes/reproductions/span_attack.py --model MODEL --data_dir SST2 --output docs/results/span_attack.json

Sentences of 8 to 20 words of SST-2's dev set, the model as it is before fine-tuning (new head, no dropout), token embeddings
withheld, lengths known. A token counts as found if it is among those recovered at its position, special tokens included;
"in its sentence" also asks for the right sentence, matched by assignment. Run again, it goes on with what is missing.
"""

import argparse
import functools
import itertools
import json
import math
import random
import time
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification as Classifier
from transformers import AutoTokenizer, GPT2Config, GPT2ForSequenceClassification, set_seed

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Observation
from hf_gradguard.attacks.span import Span

NOISE = [0.0, 0.015, 0.05, 0.15, 0.5, 1.5]
DEFENSES = {
    "gaussian_noise": [{"relative_scale": s} for s in (0.01, 0.1, 1.0)],
    "optimal_noise": [{"relative_scale": s} for s in (0.01, 0.1, 1.0)],
    "pruning": [{"ratio": r} for r in (0.5, 0.9, 0.99)],
    "optimal_pruning": [{"ratio": r} for r in (0.5, 0.9, 0.99)],
    "refiner": [{"iterations": n, "evaluation_network": "text-evaluation-network-minilm-l6"} for n in (1, 10, 30)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data_dir", required=True, help="folder with dev.tsv")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--batches", type=int, default=20, help="of one sentence, undefended")
    parser.add_argument(
        "--curve_batches", type=int, default=10, help="of one sentence, in the rows on noise and defences"
    )
    parser.add_argument("--large_batches", type=int, default=5, help="of two and more sentences")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    bert = Classifier.from_pretrained(args.model, num_labels=2).eval()
    gpt2 = GPT2ForSequenceClassification(  # width 768
        GPT2Config(n_layer=2, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, num_labels=2)
    ).eval()
    data = load_dataset("csv", data_files={"dev": f"{args.data_dir}/dev.tsv"}, delimiter="\t", quoting=3)["dev"]
    rows = [row for row in data if 8 <= len(row["sentence"].split()) <= 20]
    report = json.loads(args.output.read_text(encoding="utf-8")) if args.output.exists() else {}

    def measure(name: str, model, size: int, count: int, share=lambda gmap, _: gmap.gradient(), **settings) -> None:
        if name in report:
            return
        found = []
        for index in range(count):
            part = rows[index * size : (index + 1) * size]
            batch = dict(tokenizer([row["sentence"] for row in part], padding=True, return_tensors="pt"))
            batch.pop("token_type_ids", None)
            gmap = GradientMap(model, batch | {"labels": torch.tensor([row["label"] for row in part])})
            seen = Observation(
                model=model,
                gradient=share(gmap, torch.Generator().manual_seed(1000 * args.seed + index)),
                input_shape=tuple(batch["input_ids"].shape),
                attention_mask=batch["attention_mask"],
                tokenizer=tokenizer,
            )
            start = time.process_time()
            result = Span(**settings)(seen)
            times = {"seconds": result.seconds, "cpu": time.process_time() - start}
            found.append(score(result.token_ids, batch) | times)
        report[name] = summary(found, args.seed)
        args.output.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        r = report[name]
        print(
            f"| {name} | {r['batches']} | {r['hits']} of {r['distinct']} | {r['share']:.3f} {r['interval']} | "
            f"{r['together'] / r['tokens']:.3f} | {r['exact']} of {r['texts']} | {r['seconds']} | {r['cpu']} |", flush=True
        )  # fmt: skip

    print("| | batches | found | share [95 %] | in its sentence | exact | seconds | CPU seconds |\n|" + "---|" * 8)
    for size in (1, 2, 4, 8):
        measure(f"MiniLM, batch {size}", bert, size, args.batches if size == 1 else args.large_batches)
    measure("GPT-2 of 2 layers, batch 4", gpt2, 4, args.large_batches)
    for level in NOISE:
        own, whole = functools.partial(noise, level, True), functools.partial(noise, level, False)
        measure(f"{level:.1%} of each matrix's own RMS", bert, 1, args.curve_batches, own)
        measure(
            f"{level:.1%} of each matrix's own RMS, threshold 0.01", bert, 1, args.curve_batches, own, threshold=0.01
        )
        measure(f"{level:.1%} of the whole gradient's RMS", bert, 1, args.curve_batches, whole)
    for name, strengths in DEFENSES.items():
        for strength in strengths:
            defense = make_defense(name, **strength)
            label = f"{name} {next(iter(strength))}={next(iter(strength.values()))}"
            measure(label, bert, 1, args.curve_batches, defense)
            if name.endswith("pruning"):
                measure(f"{label}, completed", bert, 1, args.curve_batches, defense, complete=True)


def noise(level: float, own: bool, gmap: GradientMap, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Gaussian noise on every tensor, relative to its own RMS or to the whole gradient's."""
    gradient = gmap.gradient()
    whole = torch.cat([g.flatten() for g in gradient.values()]).square().mean().sqrt()
    return {
        name: g + level * (g.square().mean().sqrt() if own else whole) * torch.randn(g.shape, generator=generator)
        for name, g in gradient.items()
    }


def score(found: list[list[int]], batch: dict) -> dict[str, float]:
    """Distinct tokens found at their position, and tokens in their sentence and position."""
    truth = [ids[mask.bool()].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    places = [{text[t] for text in truth if len(text) > t} for t in range(max(map(len, truth)))]
    hits = [len(place & {ids[t] for ids in found if len(ids) > t}) for t, place in enumerate(places)]
    same = [[sum(a == b for a, b in zip(ids, text, strict=False)) for text in truth] for ids in found]
    order = max(itertools.permutations(range(len(truth))), key=lambda js: sum(same[i][j] for i, j in enumerate(js)))
    together = [same[i][j] for i, j in enumerate(order)]
    exact = sum(found[i] == truth[j] for i, j in enumerate(order))
    tokens = sum(map(len, truth))
    return {"hits": sum(hits), "distinct": sum(map(len, places)), "together": sum(together), "tokens": tokens,
            "exact": exact, "texts": len(truth)}  # fmt: skip


def summary(rows: list[dict], seed: int) -> dict:
    """Sums over batches, with a bootstrap interval over batches for the share found."""
    total = {key: sum(row[key] for row in rows) for key in rows[0]}
    draws = random.Random(seed)
    shares = sorted(
        sum(row["hits"] for row in sample) / sum(row["distinct"] for row in sample)
        for sample in (draws.choices(rows, k=len(rows)) for _ in range(1000))
    )
    slowest = {key: math.ceil(10 * max(row[key] for row in rows)) / 10 for key in ("seconds", "cpu")}
    return total | slowest | {
        "interval": [round(shares[25], 4), round(shares[974], 4)],
        "batches": len(rows), "share": round(total["hits"] / total["distinct"], 4),
    }  # fmt: skip


if __name__ == "__main__":
    main()
