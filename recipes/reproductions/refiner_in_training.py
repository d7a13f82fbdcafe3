"""Does Refiner's gradient still point the right way once a model has begun to learn, and what does refining add?

    python recipes/reproductions/refiner_in_training.py --model MODEL --evaluation_network NETWORK --data_dir SST2 \
        --output docs/results/refiner_in_training.json

Fine-tunes undefended on SST-2 (batches of 32, AdamW, 5e-5), and before and after that compares, over batches of 16, the true
gradient with that of data blended with noise (start) and refined from there. "Mean" is the cosine between the averages over
the batches: what an optimizer that averages over steps gets to see.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch
from datasets import load_dataset
from torch.nn.functional import cosine_similarity
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed
from transformers.utils import logging

from hf_gradguard import GradientMap, make_defense

NOT_REFINED = {"iterations": 1, "learning_rate": 1e-9}
ROWS = {
    **{f"alpha={a}, not refined": {"alpha": a, **NOT_REFINED} for a in (0.1, 0.3, 0.6)},
    **{f"alpha={a}, learning_rate={r}": {"alpha": a, "learning_rate": r} for a in (0.3, 0.6) for r in (0.001, 0.01)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--evaluation_network", required=True)
    parser.add_argument("--data_dir", required=True, help="folder with train.tsv")
    parser.add_argument("--steps", type=int, default=80, help="of undefended training")
    parser.add_argument("--batches", type=int, default=4, help="to measure on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    set_seed(args.seed)
    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2).train()
    data = load_dataset("csv", data_files={"train": f"{args.data_dir}/train.tsv"}, delimiter="\t", quoting=3)["train"]
    data = data.shuffle(seed=args.seed)
    network = make_defense("refiner", evaluation_network=args.evaluation_network).evaluation_network

    def batch(start: int, size: int) -> dict[str, torch.Tensor]:
        rows = data[start : start + size]
        encoded = tokenizer(rows["sentence"], padding=True, truncation=True, max_length=64, return_tensors="pt")
        return dict(encoded) | {"labels": torch.tensor(rows["label"])}

    def measure() -> dict:
        maps = [GradientMap(model, batch(32 * args.steps + 16 * i, 16)) for i in range(args.batches)]
        true = [flat(gmap.gradient()) for gmap in maps]
        report = {"loss": statistics.mean(float(gmap.loss) for gmap in maps)}
        for row, settings in logging.tqdm(ROWS.items()):
            refiner = make_defense("refiner", evaluation_network=network, **settings)
            found = [refiner.refine(gmap, torch.Generator().manual_seed(i)) for i, gmap in enumerate(maps)]
            shared = [flat(robust.gradient) for robust in found]
            cosines = [float(cosine_similarity(a, b, dim=0)) for a, b in zip(true, shared, strict=True)]
            report[row] = {
                "cosine": round(statistics.mean(cosines), 3),
                "least": round(min(cosines), 3),
                "mean": round(float(cosine_similarity(sum(true), sum(shared), dim=0)), 3),
                "relative UM": round(statistics.mean(robust.utility_metric[-1] for robust in found), 4),
                "noise ratio": round(statistics.mean(robust.noise_ratio[-1] for robust in found), 3),
            }
        return report

    report = {"before": measure()}
    embeddings = model.get_input_embeddings().requires_grad_(False)  # withheld, so not trained
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-5)
    for step in logging.tqdm(range(args.steps)):
        optimizer.zero_grad()
        model(**batch(32 * step, 32)).loss.backward()
        optimizer.step()
    embeddings.requires_grad_(True)
    report["after"] = measure()
    args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for when, rows in report.items():
        print(f"{when}: loss {rows.pop('loss'):.3f}")
        for row, figures in rows.items():
            print(f"| {row} | " + " | ".join(map(str, figures.values())) + " |")


def flat(gradient: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in gradient.values()])


if __name__ == "__main__":
    main()
