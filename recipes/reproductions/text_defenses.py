"""Every defence at three strengths against every attack on text, and against attackers who know the defence.

    python recipes/reproductions/text_defenses.py --tokenizer MODEL --data_dir SST2 --output docs/results/text_defenses.json

20 sentences of SST-2's dev set that have 14 tokens, one a message, on a random BERT of 2 layers and width 128 (larger models
take hours a row); labels and lengths known, token embeddings withheld. Attack budgets are such that undefended gradients
give everything away, and the same for every defence. The adaptive attacker takes the mean of eight uploads of the batch where
there is fresh noise, and weighs coordinates by its covariance where that is not the same everywhere; matches only what a
pruning left (span: completes it); leaves out soteria's layer; starts from random words, four times over, against refiner.

Token F1 with 95 % bootstrap intervals. Run again, it goes on with what is missing, then prints the table.
"""

import functools
import json

import torch
from datasets import load_dataset
from every_defense import fill, parser_of, share, strengths, table
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, set_seed

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.metrics import score_text
from hf_gradguard.networks import train_text_network

DEFENSES = strengths((0.1, 0.5, 2.0), alphas=(0.3, 0.6, 0.9))
ATTACKS = {
    "tag": {"steps": 300},
    "span": {},
    "inverting_gradients": {"steps": 300, "learning_rate": 0.01, "signed": False, "schedule": "linear", "warmup": 50},
    "lamp": {"steps": 300, "every": 100, "moves": 20},
}
LENGTH, SIZES = 14, {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}


def main() -> None:
    parser = parser_of(__doc__, DEFENSES, ATTACKS)
    parser.add_argument("--tokenizer", required=True, help="a folder or name")
    parser.add_argument("--data_dir", required=True, help="folder with train.tsv and dev.tsv")
    parser.add_argument("--sentences", type=int, default=20)
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

    def observe(defense: str, strength: dict, **more) -> list[Observation]:
        made = make_defense(defense, **strength, **({"evaluation_network": network()} if defense == "refiner" else {}))
        grants = {"input_shape": (1, LENGTH), "tokenizer": tokenizer}
        return [
            share(model, gmap, made, number, grants | {"labels": gmap.batch["labels"]}, **more)
            for number, gmap in enumerate(maps)
        ]

    def reconstruct(attack: str, settings: dict, seen: list[Observation]) -> dict:
        made, generator = make_attack(attack, **settings), torch.Generator().manual_seed(args.seed)
        if attack == "span":
            return summary([spanned(made, one) for one in seen])
        return summary([one.token_ids for one in made.together(seen, generator)])

    def summary(ids: list) -> dict:
        scores = score_text(ids, texts, tokenizer=tokenizer)
        names = ("token_f1", "position_accuracy", "rougeL", "exact_match")
        return {name: [round(v, 4) for v in (scores.mean[name], *scores.interval[name])] for name in names}

    report = json.loads(args.output.read_text(encoding="utf-8")) if args.output.exists() else {}
    report["chance"] = {"tag": summary(texts[1:] + texts[:1])}  # the next sentence, said of each
    fill(args, DEFENSES, ATTACKS, report, observe, reconstruct, again={"start": "tokens", "restarts": 4})
    print(table(report, ATTACKS, "token_f1", digits=2))


def spanned(span, seen: Observation) -> list[list[int]]:
    """The tokens that span finds; none where a pruning left nothing of the layers that it reads."""
    try:
        return span(seen).token_ids
    except ValueError as error:
        if "nothing to search" not in str(error):
            raise
        return [[-1] * LENGTH]


if __name__ == "__main__":
    main()
