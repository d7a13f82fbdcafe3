"""Every defence at three strengths against every attack on text, and against attackers who know the defence.

    python recipes/reproductions/text_defenses.py --tokenizer MODEL --data_dir SST2 --output docs/results/text_defenses.json

20 sentences of SST-2's dev set that have 14 tokens, one a message, on a random BERT of 2 layers and width 128 (larger models
take hours a row); labels and lengths known, token embeddings withheld. Attack budgets are such that undefended gradients
give everything away, and the same for every defence. The adaptive attacker takes the mean of eight uploads of the batch where
there is fresh noise, and weighs coordinates by its covariance where that is not the same everywhere; matches only what a
pruning left (span: completes it); leaves out soteria's layer; starts from random words, four times over, against refiner.

Token F1 with 95 % bootstrap intervals. Run again, it goes on with what is missing, then prints the table.
"""

import argparse
import functools
import json
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, set_seed
from transformers.utils import logging

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Observation, average, make_attack
from hf_gradguard.metrics import score_text
from hf_gradguard.networks import train_text_network

POWER, SHARE = [{"relative_scale": s} for s in (0.1, 0.5, 2.0)], [{"ratio": r} for r in (0.5, 0.9, 0.99)]
DEFENSES = {
    "none": [{}],
    "gaussian_noise": POWER,
    "laplace_noise": POWER,
    "optimal_noise": POWER,
    "dp_sgd": [{"clip": 1.0, **p} for p in POWER],
    "optimal_dp_sgd": [{"clip": 0.01, **p} for p in POWER],
    "pruning": SHARE,
    "optimal_pruning": SHARE,
    "quantization": [{"bits": b} for b in (8, 4, 2)],
    "soteria": SHARE,
    "refiner": [{"alpha": a} for a in (0.3, 0.6, 0.9)],
}
ATTACKS = {
    "tag": {"steps": 300},
    "span": {},
    "inverting_gradients": {"steps": 300, "learning_rate": 0.01, "signed": False, "schedule": "linear", "warmup": 50},
    "lamp": {"steps": 300, "every": 100, "moves": 20},
}
NOISE, UPLOADS = ("gaussian_noise", "laplace_noise", "optimal_noise", "dp_sgd", "optimal_dp_sgd"), 8
LENGTH, SIZES = 14, {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="a folder or name")
    parser.add_argument("--data_dir", required=True, help="folder with train.tsv and dev.tsv")
    parser.add_argument("--defenses", nargs="+", default=list(DEFENSES), choices=DEFENSES)
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=ATTACKS)
    parser.add_argument("--adaptive", nargs="+", type=int, default=[0, 1], choices=[0, 1])
    parser.add_argument("--sentences", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, initializer_range=0.05, **SIZES)
    model = BertForSequenceClassification(config).eval()
    files = {split: f"{args.data_dir}/{split}.tsv" for split in ("train", "dev")}
    data = load_dataset("csv", data_files=files, delimiter="\t", quoting=3)
    encoded = [(dict(tokenizer(row["sentence"], return_tensors="pt")), row["label"]) for row in data["dev"]]
    fitting = [pair for pair in encoded if pair[0]["input_ids"].shape[1] == LENGTH][: args.sentences]
    maps = [GradientMap(model, ids | {"labels": torch.tensor([label])}) for ids, label in fitting]
    texts = [ids["input_ids"].tolist() for ids, _ in fitting]

    @functools.cache
    def network():
        embedding, public = model.get_input_embeddings(), data["train"]["sentence"][:20_000]
        return train_text_network(embedding, tokenizer, public, steps=1000, seed=args.seed)

    def share(number: int, defense: str, strength: dict, uploads: int = 1, covariance: bool = False) -> Observation:
        """What the server sees of a sentence: the mean of so many uploads, and the noise's covariance if it knows it."""
        made = make_defense(defense, **strength, **({"evaluation_network": network()} if defense == "refiner" else {}))
        gmap, generator = maps[number], torch.Generator().manual_seed(1000 + number)
        grants = {"input_shape": (1, LENGTH), "labels": gmap.batch["labels"], "tokenizer": tokenizer}
        if covariance:
            gradient = made.clipped(gmap.gradient())
            grants["noise_variance"] = made.variance(gradient, made.shape(gmap, gradient, generator))
        return average([Observation(model, made(gmap, generator=generator), **grants) for _ in range(uploads)])

    def summary(ids: list) -> dict:
        scores = score_text(ids, texts, tokenizer=tokenizer)
        names = ("token_f1", "position_accuracy", "rougeL", "exact_match")
        return {name: [round(v, 4) for v in (scores.mean[name], *scores.interval[name])] for name in names}

    report = json.loads(args.output.read_text(encoding="utf-8")) if args.output.exists() else {}
    report["chance"] = {"tag": summary(texts[1:] + texts[:1])}  # the next sentence, said of each
    cells = [(a, b, c, d) for a in args.adaptive for b in args.attacks for c in args.defenses for d in DEFENSES[c]]
    for adaptive, attack, defense, strength in logging.tqdm(cells):
        row, column = (
            " ".join([defense, *map("{0[0]}={0[1]}".format, strength.items())]),
            attack + ", adaptive" * adaptive,
        )
        what_else = knowledge(defense, attack) if adaptive else ({}, {})
        if column in report.get(row, {}) or what_else is None:
            continue
        seen = [share(number, defense, strength, **what_else[0]) for number in range(len(maps))]
        made, generator = (
            make_attack(attack, **ATTACKS[attack], **what_else[1]),
            torch.Generator().manual_seed(args.seed),
        )
        found = [made(one) for one in seen] if attack == "span" else made.together(seen, generator)
        report.setdefault(row, {})[column] = summary([one.token_ids for one in found])
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(report))


def knowledge(defense: str, attack: str) -> tuple[dict, dict] | None:
    """What an attacker who knows the defence has seen, and how its attack is set; `None` if all is as before."""
    if defense in NOISE:
        return {"uploads": UPLOADS, "covariance": defense.startswith("optimal") and attack != "span"}, {}
    if "pruning" in defense:
        return {}, ({"complete": True} if attack == "span" else {"match_nonzero": True})
    if defense == "soteria" and attack != "span":
        return {}, {"leave_out": ["classifier"]}
    return ({}, {"start": "tokens", "restarts": 4}) if defense == "refiner" and attack != "span" else None


def table(report: dict) -> str:
    columns = [attack + ", adaptive" * adaptive for attack in ATTACKS for adaptive in (0, 1)]
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row, cells in report.items():
        shown = [cells[column]["token_f1"] if column in cells else None for column in columns]
        lines.append(
            f"| {row} | " + " | ".join(f"{v[0]:.2f} [{v[1]:.2f}, {v[2]:.2f}]" if v else "" for v in shown) + " |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
