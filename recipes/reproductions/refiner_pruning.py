"""Which entries of a gradient can be left out: those of small |θ|, of small |g|, or of small |g θ|?
Refiner paper (2025), Table 1.

    python recipes/reproductions/refiner_pruning.py --train TRAIN.parquet --test TEST.parquet \
        --output docs/results/refiner_pruning

The leakage papers' LeNet on CIFAR-10, one client, 128 images a step. Of each gradient the given
share of entries is zeroed, over all layers together. The paper trains for 20 epochs at a learning
rate of 0.01 and names no optimizer; here 5 epochs of Adam from 0.005 down to 0, as in
federation.py. Test accuracy in %, with its 95 % t-interval over seeds.
"""

import torch
from federation import LEARNING_RATE, as_tensors, lenet, tested
from reporting import Results, interval, parser_of, write_table
from torch import Tensor
from transformers.utils import logging

from hf_gradguard import GradientMap

SCORES = {
    "weight": lambda g, w: w.abs(),
    "gradient": lambda g, w: g.abs(),
    "product": lambda g, w: (g * w).abs(),
}
FULL, QUICK = (
    {"seeds": 3, "epochs": 5, "ratios": [0.2, 0.4, 0.6, 0.8]},
    {"seeds": 2, "epochs": 1, "ratios": [0.2, 1.0]},
)
PAPER = {
    "weight": {0.2: 51.35, 0.4: 48.61, 0.6: 46.80, 0.8: 42.72},
    "gradient": {0.2: 51.67, 0.4: 50.90, 0.6: 49.14, 0.8: 47.35},
    "product": {0.2: 52.88, 0.4: 51.45, 0.6: 50.96, 0.8: 49.54},
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--train", required=True, help="parquet with img and label")
    parser.add_argument("--test", required=True, help="the same")
    args = parser.parse_args()
    plan = QUICK if args.quick else FULL
    results, train, test = Results(args.output, plan), as_tensors(args.train), as_tensors(args.test)
    cells = [("none", 0.0), *((name, ratio) for name in SCORES for ratio in plan["ratios"])]
    for seed in range(plan["seeds"]):
        for name, ratio in cells:
            results.get(
                (name, str(ratio), str(seed)),
                accuracy,
                name,
                ratio,
                seed,
                plan["epochs"],
                train,
                test,
            )
    rows = []
    for name, ratio in cells:
        mine = results.figures[name][str(ratio)]
        less = [100 * (mine[seed] - one) for seed, one in results.figures["none"]["0.0"].items()]
        found = interval([100 * one for one in mine.values()], 1)
        rows.append(
            [name, f"{ratio:.0%}", found, interval(less, 1), PAPER.get(name, {}).get(ratio, "")]
        )
    for other in ("gradient", "weight"):
        for ratio in plan["ratios"]:
            pairs = zip(
                *(results.figures[name][str(ratio)].values() for name in ("product", other)),
                strict=True,
            )
            paper = PAPER["product"].get(ratio, 0) - PAPER[other].get(ratio, 0)
            less = interval([100 * (a - b) for a, b in pairs], 1)
            rows.append(
                [f"product less {other}", f"{ratio:.0%}", "", less, f"{paper:.2f}" if paper else ""]
            )
    header = [
        "left out by small",
        "share left out",
        "accuracy",
        "less none, same seeds",
        "paper: accuracy",
    ]
    write_table(args.output, header, rows)


def accuracy(name: str, ratio: float, seed: int, epochs: int, train: tuple, test: tuple) -> float:
    model, draw = lenet(seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    steps = epochs * -(-len(train[0]) // 128)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    bar = logging.tqdm(total=steps, desc=f"{name}, {ratio:.0%}, seed {seed}")
    for _ in range(epochs):
        for rows in torch.randperm(len(train[0]), generator=draw).split(128):
            batch = {"pixel_values": train[0][rows].float() / 255, "labels": train[1][rows]}
            gradient = GradientMap(model, batch, second_order=False).gradient()
            kept = (
                gradient
                if name == "none"
                else pruned(gradient, dict(model.named_parameters()), name, ratio)
            )
            for key, parameter in model.named_parameters():
                parameter.grad = kept[key]
            optimizer.step()
            schedule.step()
            bar.update()
    return tested(model, test)


def pruned(
    gradient: dict[str, Tensor], parameters: dict[str, Tensor], name: str, ratio: float
) -> dict[str, Tensor]:
    """The gradient without the share `ratio` of its entries that score lowest, over all tensors
    together.
    """
    scores = {key: SCORES[name](g, parameters[key].detach()) for key, g in gradient.items()}
    together = torch.cat([score.flatten() for score in scores.values()])
    count = round(ratio * len(together))
    if count == 0:
        return gradient
    bound = together.kthvalue(count).values
    return {key: g * (scores[key] > bound) for key, g in gradient.items()}


if __name__ == "__main__":
    main()
