r"""One picture: what each defense hides from the span attack, and what it costs in accuracy.

    python -m recipes.studies.hiding_and_learning.run picture \
        --output docs/results/hiding_and_learning

Puts figures of span.py (single sentences, before fine-tuning) beside those of accuracy.py (300
steps on messages of 16 sentences) where both have the same defense at the same strength. Messages
of 16 hide more than single sentences do. Other attacks read other things: see every_defense.
Takes seconds.
"""

from pathlib import Path

from ..lib.results import Results, nested
from ..lib.tables import plt, save, write_table
from . import accuracy, span
from .settings import PAIRS

PUBLISHED = Path(__file__).resolve().parents[3] / "docs" / "results"
ARGUMENTS = {
    "--tokens": {"type": Path, "default": PUBLISHED / "span_attack", "help": "OUTPUT of span"},
    "--accuracies": {"type": Path, "default": PUBLISHED / "sst2", "help": "OUTPUT of accuracy"},
}


def cells(args) -> dict:
    return {}


def report(figures: dict, args) -> None:
    tokens = nested(span.rows(), Results(args.tokens))
    accuracies = nested(accuracy.rows("accuracy"), Results(args.accuracies))
    rows, (figure, axes) = [], plt.subplots(figsize=(7.5, 4.8), layout="constrained")
    pairs = [pair for pair in PAIRS.items() if pair[0] in tokens and pair[1] in accuracies]
    for number, (row, other) in enumerate(pairs):
        # An attacker who knows of a pruning fills it in; take the better of both.
        known = [tokens[name] for name in (row, f"{row}, completed") if name in tokens]
        found = max(known, key=lambda one: one["share"])
        share, (low, high) = found["share"], found["interval"]
        learned, half = accuracies[other]["accuracy"], accuracy.half(accuracies[other])
        name = "none" if other == "none" else row
        shown = f"{share:.0%} [{low:.0%}, {high:.0%}]"
        rows.append([f"`{name}`", shown, f"{learned:.3f} ± {half:.3f}"])
        error = [[100 * (share - low)], [100 * (high - share)]]
        style = {"color": f"C{number}", "label": name}
        axes.errorbar(100 * share, 100 * learned, 100 * half, error, "o", **style)
    header = ["defense", "tokens that span finds in a sentence", "accuracy on SST-2"]
    write_table(args.output, header, rows)
    axes.set(
        xlabel="tokens that span finds in a single sentence, in % (left: hidden)",
        ylabel="accuracy on SST-2 in % (up: learned)",
        xlim=(-3, 103),
    )
    axes.legend(fontsize=8)
    save(figure, args.output)
