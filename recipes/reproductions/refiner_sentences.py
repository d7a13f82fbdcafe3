"""Does Refiner do what its equation says, sentence by sentence? And what do alpha and the learning rate trade?

    python recipes/reproductions/refiner_sentences.py --model MODEL --evaluation_network NETWORK --data_dir SST2 \
        --output docs/results/refiner_sentences.json

Refines each of the first sentences of SST-2's dev set by itself, with the model as it is before fine-tuning (a new
classification head, no dropout), and reports: how often the utility metric fell and the noise ratio rose, the cosine of
the shared with the true gradient, and the share of words whose nearest token embedding is still their own.
"""

import argparse
import json
import math
import statistics
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed
from transformers.utils import logging

from hf_gradguard import GradientMap, make_defense

logger = logging.get_logger(__name__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--evaluation_network", required=True)
    parser.add_argument("--data_dir", required=True, help="folder with dev.tsv")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--sentences", type=int, default=200)
    parser.add_argument("--curve_sentences", type=int, default=40, help="sentences for each point of the trade-off")
    parser.add_argument("--alphas", type=float, nargs="*", default=[0.0, 0.1, 0.3, 0.5, 0.7, 0.9])
    parser.add_argument("--learning_rates", type=float, nargs="*", default=[0.003, 0.01, 0.03])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2).eval()
    data = load_dataset("csv", data_files={"dev": f"{args.data_dir}/dev.tsv"}, delimiter="\t", quoting=3)["dev"]
    samples = []
    for row in data.select(range(args.sentences)):
        batch = dict(tokenizer(row["sentence"], truncation=True, max_length=64, return_tensors="pt"))
        samples.append(batch | {"labels": torch.tensor([row["label"]])})

    def measure(count: int, **settings: float) -> dict:
        defense = make_defense("refiner", evaluation_network=args.evaluation_network, **settings)
        generator = torch.Generator().manual_seed(args.seed)
        rows = [one(model, defense, sample, generator) for sample in logging.tqdm(samples[:count], desc=str(settings))]
        result = {"settings": settings, "sentences": count, **summary(rows)}
        print(json.dumps(result))
        return result

    report = {"defaults": measure(args.sentences), "projection": [], "curve": []}
    for bound in ({"epsilon": 0.05}, {"relative_epsilon": 0.05}, {"relative_epsilon": 0.5}):
        report["projection"].append(measure(args.curve_sentences, **bound))
    for alpha in args.alphas:
        for rate in args.learning_rates:
            report["curve"].append(measure(args.curve_sentences, alpha=alpha, learning_rate=rate))
    args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def one(model: torch.nn.Module, defense, sample: dict, generator: torch.Generator) -> dict:
    gmap = GradientMap(model, sample)
    found = defense.refine(gmap, generator)
    sent = defense.project(gmap.gradient(), found.gradient)
    true, shared = (torch.cat([t.flatten() for t in g.values()]) for g in (gmap.gradient(), sent))
    words = ~torch.isin(sample["input_ids"][0], torch.tensor(defense.evaluation_network.config.special_token_ids))
    matrix = torch.nn.functional.normalize(model.get_input_embeddings().weight.detach(), dim=1)
    nearest = (torch.nn.functional.normalize(found.input[0, words], dim=1) @ matrix.T).argmax(1)
    return {
        "fell": found.utility_metric[-1] < found.utility_metric[0],
        "rose": found.noise_ratio[-1] > found.noise_ratio[0],
        "metric_start": found.utility_metric[0],
        "metric_end": found.utility_metric[-1],
        "ratio_start": found.noise_ratio[0],
        "ratio_end": found.noise_ratio[-1],
        "cosine": float(torch.nn.functional.cosine_similarity(true, shared, dim=0)),
        "distance": float((true - shared).norm()),
        "norm": float(true.norm()),
        "same_tokens": float((nearest == sample["input_ids"][0, words]).float().mean()),
    }


def summary(rows: list[dict]) -> dict:
    """Means with 95 % intervals over the sentences; medians where values spread over decades."""
    result = {}
    for name in rows[0]:
        values = [float(row[name]) for row in rows]
        half = 1.96 * statistics.stdev(values) / math.sqrt(len(values))
        result[name] = {"mean": round(statistics.mean(values), 4), "±": round(half, 4)}
        if name.startswith("metric"):
            result[name]["median"] = round(statistics.median(values), 6)
    result["fell and rose"] = round(statistics.mean(row["fell"] and row["rose"] for row in rows), 4)
    return result


if __name__ == "__main__":
    main()
