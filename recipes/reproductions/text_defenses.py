"""Every defense at three strengths against every attack on text, and against attackers who know the
defense.

    python recipes/reproductions/text_defenses.py --tokenizer MODEL --data_dir SST2 \
        --output docs/results/text_defenses

20 sentences of SST-2's dev set that have 14 tokens, one a message, on a random BERT of 2 layers and
width 128 (larger models take hours a row); labels and lengths known, token embeddings withheld.
Attack budgets are such that undefended gradients give everything away, and the same for every
defense. The adaptive attacker takes the mean of eight uploads of the batch where there is fresh
noise, and weighs coordinates by its covariance where that is not the same everywhere; matches only
what a pruning left (span: completes it); leaves out soteria's layer; starts from random words, four
times over, against refiner.

Token F1 with 95 % bootstrap intervals.
"""

import functools

import torch
from every_defense import fill, present, quickly, share, strengths
from reporting import Results, parser_of, summary
from sentences import sst2
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, set_seed

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.metrics import score_text
from hf_gradguard.networks import train_text_network

DEFENSES = strengths((0.1, 0.5, 2.0), alphas=(0.3, 0.6, 0.9))
ATTACKS = {
    "tag": {"steps": 300},
    "span": {},
    "inverting_gradients": {
        "steps": 300,
        "learning_rate": 0.01,
        "signed": False,
        "schedule": "linear",
        "warmup": 50,
    },
    "lamp": {"steps": 300, "every": 100, "moves": 20},
}
LENGTH, SIZES = (
    14,
    {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 256,
    },
)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokenizer", required=True, help="a folder or name")
    parser.add_argument("--data_dir", required=True, help="folder with train.tsv and dev.tsv")
    args = parser.parse_args()
    torch.set_num_threads(1)
    set_seed(0)
    plan = {
        "defenses": DEFENSES,
        "attacks": ATTACKS,
        "samples": 20,
        "network_steps": 1000,
        "seed": 0,
    }
    plan = quickly(plan) | {"network_steps": 2} if args.quick else plan
    results = Results(args.output, plan)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    config = BertConfig(
        vocab_size=len(tokenizer), max_position_embeddings=64, initializer_range=0.05, **SIZES
    )
    model = BertForSequenceClassification(config).eval()
    encoded = [
        (dict(tokenizer(row["sentence"], return_tensors="pt")), row["label"])
        for row in sst2(args.data_dir)
    ]
    fitting = [pair for pair in encoded if pair[0]["input_ids"].shape[1] == LENGTH][
        : plan["samples"]
    ]
    maps = [GradientMap(model, ids | {"labels": torch.tensor([label])}) for ids, label in fitting]
    texts = [ids["input_ids"].tolist() for ids, _ in fitting]

    @functools.cache
    def network():
        embedding, public = (
            model.get_input_embeddings(),
            sst2(args.data_dir, "train")["sentence"][:20_000],
        )
        return train_text_network(embedding, tokenizer, public, steps=plan["network_steps"], seed=0)

    def scores(defense: str, strength: dict, else_seen: dict, attack: str, settings: dict) -> dict:
        made = make_defense(
            defense,
            **strength,
            **({"evaluation_network": network()} if defense == "refiner" else {}),
        )
        grants = {"input_shape": (1, LENGTH), "tokenizer": tokenizer}
        seen = [
            share(model, gmap, made, number, grants | {"labels": gmap.batch["labels"]}, **else_seen)
            for number, gmap in enumerate(maps)
        ]
        attacker = make_attack(attack, **settings)
        if attack == "span":
            return scored([spanned(attacker, one) for one in seen])
        return scored(
            [one.token_ids for one in attacker.together(seen, torch.Generator().manual_seed(0))]
        )

    def scored(ids: list) -> dict:
        names = ("token_f1", "position_accuracy", "rougeL", "exact_match")
        return summary(score_text(ids, texts, tokenizer=tokenizer), names)

    fill(results, scores, again={"start": "tokens", "restarts": 4})
    chance = scored(texts[1:] + texts[:1])["token_f1"]  # the next sentence, said of each
    present(args.output, results, chance, "token_f1", digits=2)


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
