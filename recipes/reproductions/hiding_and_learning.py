"""What each defense hides from the span attack, and what it costs in accuracy: one picture.

    python recipes/reproductions/hiding_and_learning.py --tokens docs/results/span_attack.json \
        --accuracies docs/results/sst2.json --output docs/results/hiding_and_learning

Puts figures of span_attack.py (single sentences, before fine-tuning) beside those of
sst2_defenses.py (300 steps on messages of 16 sentences) where both have the same defense at the
same strength. Messages of 16 hide more than single sentences do. Other attacks read other things:
see text_defenses.py.
"""

import json
import math
from pathlib import Path

import matplotlib
from reporting import named, parser_of, write_table

matplotlib.use("agg")
from matplotlib import pyplot as plt

PAIRS = {  # a row of span_attack.py: the row of sst2_defenses.py
    "MiniLM, batch 1": "none",
    "gaussian_noise relative_scale=1.0": "gaussian_noise-1",
    "optimal_noise relative_scale=1.0": "optimal_noise-1",
    "pruning ratio=0.9": "pruning-0.9",
    "pruning ratio=0.99": "pruning-0.99",
    "optimal_pruning ratio=0.9": "optimal_pruning-0.9",
    "optimal_pruning ratio=0.99": "optimal_pruning-0.99",
    "refiner iterations=10": "refiner",
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=Path, required=True, help="of span_attack.py")
    parser.add_argument("--accuracies", type=Path, required=True, help="of sst2_defenses.py")
    args = parser.parse_args()
    tokens, accuracies = (
        json.loads(path.read_text(encoding="utf-8"))["figures"]
        for path in (args.tokens, args.accuracies)
    )
    rows, figure = [], plt.figure(figsize=(7.5, 4.8), layout="constrained")
    axes = figure.subplots()
    for number, (row, other) in enumerate(
        (row, other) for row, other in PAIRS.items() if row in tokens and other in accuracies
    ):
        # An attacker who knows of a pruning fills it in; take the better of both.
        found = max(
            (tokens[name] for name in (row, f"{row}, completed") if name in tokens),
            key=lambda one: one["share"],
        )
        share, (low, high) = found["share"], found["interval"]
        accuracy, n = accuracies[other]["accuracy"], accuracies[other]["eval_sentences"]
        half = 1.96 * math.sqrt(accuracy * (1 - accuracy) / n)
        name = "none" if other == "none" else row
        rows.append(
            [f"`{name}`", f"{share:.0%} [{low:.0%}, {high:.0%}]", f"{accuracy:.3f} ± {half:.3f}"]
        )
        axes.errorbar(
            100 * share,
            100 * accuracy,
            100 * half,
            [[100 * (share - low)], [100 * (high - share)]],
            "o",
            color=f"C{number}",
            label=name,
        )
    write_table(
        args.output, ["defense", "tokens that span finds in a sentence", "accuracy on SST-2"], rows
    )
    axes.set(
        xlabel="tokens that span finds in a single sentence, in % (left: hidden)",
        ylabel="accuracy on SST-2 in % (up: learned)",
    )
    axes.set(xlim=(-3, 103))
    axes.legend(fontsize=8)
    figure.savefig(named(args.output, ".png"), dpi=100)


if __name__ == "__main__":
    main()
