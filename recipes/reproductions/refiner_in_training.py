"""Does Refiner's gradient still point the right way once a model has begun to learn, and what does
refining add?

    python recipes/reproductions/refiner_in_training.py --model MODEL --data_dir SST2 \
        --output docs/results/refiner_in_training

Before and after fine-tuning undefended on SST-2 (batches of 32, AdamW, 5e-5), compares over batches
of 16 the true gradient with that of data blended with noise, and refined from there. "Together" is
the cosine between the averages over the batches: what an optimizer that averages over steps gets to
see.
"""

import statistics

import torch
from reporting import Results, parser_of, write_table
from sentences import sst2
from torch.nn.functional import cosine_similarity
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed
from transformers.utils import logging

from hf_gradguard import GradientMap, make_defense

BLENDED = {"iterations": 1, "learning_rate": 1e-9}
ROWS = {
    "α = 0.1, blended only": {"alpha": 0.1, **BLENDED},
    "α = 0.3, blended only": {"alpha": 0.3, **BLENDED},
    "α = 0.3, learning rate 0.001": {"alpha": 0.3, "learning_rate": 0.001},
    "α = 0.3, learning rate 0.01": {"alpha": 0.3, "learning_rate": 0.01},
    "α = 0.6, blended only": {"alpha": 0.6, **BLENDED},
    "α = 0.6, learning rate 0.001": {"alpha": 0.6, "learning_rate": 0.001},
    "α = 0.6, learning rate 0.01 (default)": {"alpha": 0.6, "learning_rate": 0.01},
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data_dir", required=True, help="folder with train.tsv")
    parser.add_argument(
        "--evaluation_network", default="text-evaluation-network-minilm-l6", help="of --model"
    )
    args = parser.parse_args()
    plan = {"rows": ROWS, "steps": 80, "batches": 4}
    if args.quick:
        plan = {
            "rows": {row: {"iterations": 2} | settings for row, settings in ROWS.items()},
            "steps": 2,
            "batches": 2,
        }
    results = Results(args.output, plan)
    for when, steps in (("before", 0), ("after", plan["steps"])):
        results.get((when,), measure, args, steps, plan)
    header = ["", "before: each", "together", "after: each", "together", "D after"]
    write_table(args.output, header, table(results.figures))


def measure(args, steps: int, plan: dict) -> dict:
    """What each row shares after `steps` of undefended training."""
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2).train()
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

    maps = [
        GradientMap(model, batch(32 * plan["steps"] + 16 * i, 16)) for i in range(plan["batches"])
    ]
    true = [flat(gmap.gradient()) for gmap in maps]
    figures = {"loss": statistics.mean(float(gmap.loss) for gmap in maps)}
    for row, settings in logging.tqdm(plan["rows"].items(), desc=f"after {steps} steps"):
        refiner = make_defense("refiner", evaluation_network=args.evaluation_network, **settings)
        found = [
            refiner.refine(gmap, torch.Generator().manual_seed(i)) for i, gmap in enumerate(maps)
        ]
        shared = [flat(robust.gradient) for robust in found]
        cosines = [float(cosine_similarity(a, b, dim=0)) for a, b in zip(true, shared, strict=True)]
        figures[row] = {
            "each": round(statistics.mean(cosines), 3),
            "least": round(min(cosines), 3),
            "together": round(float(cosine_similarity(sum(true), sum(shared), dim=0)), 3),
            "relative UM": round(statistics.mean(robust.utility_metric[-1] for robust in found), 4),
            "noise ratio": round(statistics.mean(robust.noise_ratio[-1] for robust in found), 3),
        }
    return figures


def flat(gradient: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in gradient.values()])


def table(figures: dict) -> list[list[str]]:
    rows = []
    for row in ROWS:
        before, after = figures["before"][row], figures["after"][row]
        cosines = [one[key] for one in (before, after) for key in ("each", "together")]
        rows.append([row, *(f"{cosine:.3f}" for cosine in cosines), f"{after['noise ratio']:.2f}"])
    return rows


if __name__ == "__main__":
    main()
