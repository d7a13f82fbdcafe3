"""Whether the influence's lower bound says how well an attack will do: Zhang et al. (2023), Figures
2, 4 and 16.

    python recipes/reproductions/influence_predicts_attacks.py --mnist MNIST.npz \
        --cifar10 LOSSLESS.npz --sst2 SST2 --tokenizer MODEL \
        --output docs/results/influence_predicts_attacks

One sample a gradient, Gaussian noise at five strengths and pruning at four ratios, label known.
Images: the leakage papers' LeNet before training, Inverting Gradients by L-BFGS (as published it
reaches 13 dB undefended, so 32), pixels clipped to their range. Sentences of 8 to 20 words: a
random BERT of 2 layers, token embeddings withheld, TAG with 300 steps, which find all of an
undefended sentence. Influences are norms, rmse is a coordinate's; I itself takes the damping 1e-3
λ_max.
"""

import argparse
from pathlib import Path

import matplotlib
import numpy as np
import pandas
import torch
from lenet import INVERTING, lenet_for, single_images
from reporting import Results, named, parser_of, write_table
from scipy.stats import rankdata
from sentences import of_usual_length, sst2
from torch import Tensor
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, set_seed

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.leakage import (
    inversion_influence,
    inversion_influence_lower_bound,
    largest_eigenvalue,
)
from hf_gradguard.metrics import score_text

matplotlib.use("agg")
from matplotlib import pyplot as plt

RATIOS = [0.3, 0.5, 0.7, 0.9]
PLAN = {
    "images": {
        "gaussian_noise": [1e-4, 1e-3, 1e-2, 1e-1, 1.0],
        "pruning": RATIOS,
    },  # the gradient's RMS is about 0.2
    "sentences": {
        "gaussian_noise": [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2],
        "pruning": RATIOS,
    },  # about 0.01
    "samples": 12,
    "side": 32,
    "steps": {"lbfgs": 60, "tag": 300},
}
FEW = {"gaussian_noise": [1e-3, 1e-2], "pruning": [0.5, 0.9]}
QUICK = {"images": FEW, "sentences": FEW, "samples": 2, "side": 8, "steps": {"lbfgs": 1, "tag": 2}}
SCORES = {"MNIST": ("rmse",), "CIFAR-10": ("rmse",), "SST-2": ("rougeL", "google_bleu")}
TITLES = {"rmse": "RMSE", "rougeL": "ROUGE-L", "google_bleu": "Google BLEU"}


def main() -> None:
    parser = parser_of(__doc__)
    for name, what in (("mnist", "npz with x_train and y_train"), ("cifar10", "npz with x and y"),
                       ("sst2", "folder with dev.tsv"), ("tokenizer", "folder or name")):  # fmt: skip
        parser.add_argument(f"--{name}", required=True, help=what)
    args = parser.parse_args()
    plan = QUICK if args.quick else PLAN
    results = Results(args.output, plan)
    for data, path in (("MNIST", args.mnist), ("CIFAR-10", args.cifar10), ("SST-2", None)):
        set_seed(0)
        if path:
            batches, tokenizer = single_images(path, plan["samples"], plan["side"]), None
            model = lenet_for(batches[0])
        else:
            model, batches, tokenizer = sentences(args, plan)
        for sample, batch in enumerate(batches):
            results.get((data, str(sample)), attacked, plan, sample, model, batch, tokenizer)
    report(results.figures, args.output)


def sentences(args: argparse.Namespace, plan: dict) -> tuple:
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    sizes = {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 256,
    }
    sizes |= {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 64,
        "initializer_range": 0.05,
    }
    rows = of_usual_length(sst2(args.sst2))[: plan["samples"]]
    encoded = [dict(tokenizer(row["sentence"], return_tensors="pt")) for row in rows]
    batches = [
        batch | {"labels": torch.tensor([row["label"]])}
        for batch, row in zip(encoded, rows, strict=True)
    ]
    return BertForSequenceClassification(BertConfig(**sizes)).eval(), batches, tokenizer


def attacked(plan: dict, sample: int, model, batch: dict[str, Tensor], tokenizer) -> list[dict]:
    """One sample behind every defense: influences and what the attack makes of it."""
    gmap = GradientMap(model, batch)
    gradient, top = gmap.gradient(), largest_eigenvalue(gmap)
    shape = tuple(batch["input_ids" if tokenizer else "pixel_values"].shape)
    points, seen = [], []
    strengths = plan["sentences" if tokenizer else "images"]
    settings = [("gaussian_noise", "scale", s) for s in strengths["gaussian_noise"]]
    settings += [("pruning", "ratio", r) for r in strengths["pruning"]]
    for number, (name, argument, strength) in enumerate(settings):
        generator = torch.Generator().manual_seed(100 * sample + number)
        shared = make_defense(name, **{argument: strength})(gmap, generator=generator)
        delta = {key: shared[key] - g for key, g in gradient.items()}
        point = {
            "defense": name,
            "strength": strength,
            "size": torch.cat([d.flatten() for d in delta.values()]).norm(),
        }
        point["bound"] = inversion_influence_lower_bound(gmap, delta, eigenvalue=top)
        point["influence"] = inversion_influence(gmap, delta, 1e-3 * top, tolerance=1e-2)
        points.append(point | {"coordinates": point["bound"].num_coordinates})
        seen.append(Observation(model, shared, shape, labels=batch["labels"], tokenizer=tokenizer))
    attack = make_attack("tag", steps=plan["steps"]["tag"])
    if tokenizer is None:
        attack = make_attack(
            "inverting_gradients", steps=plan["steps"]["lbfgs"], patience=5, **INVERTING
        )
    for point, found in zip(
        points, attack.together(seen, torch.Generator().manual_seed(sample)), strict=True
    ):
        guess = found.input if tokenizer else found.input.clamp(0, 1)
        point["rmse"] = (guess - gmap.input).square().mean().sqrt()
        if tokenizer:
            scores = score_text(
                [found.token_ids], [batch["input_ids"].tolist()], tokenizer=tokenizer, bootstrap=0
            )
            point |= {score: scores.mean[score] for score in ("rougeL", "google_bleu")}
    return [
        {k: v if isinstance(v, str) else float(f"{float(v):.4g}") for k, v in point.items()}
        for point in points
    ]


def report(figures: dict, output: Path) -> None:
    """Table and picture."""
    columns = [
        "I_lb",
        "under noise",
        "under pruning",
        "samples at one setting (mean)",
        "I, ε = 1e-3 λ_max",
        "‖δ‖",
    ]
    rows, picture, panels = [], *plt.subplots(2, 2, figsize=(10, 8), layout="constrained")
    kinds = [(data, score) for data, scores in SCORES.items() for score in scores]
    for (data, score), axis in zip(kinds, panels.flat, strict=True):
        samples = sorted(figures[data].items(), key=lambda item: int(item[0]))
        frame = pandas.DataFrame([point for _, points in samples for point in points])
        below = frame["bound"] / frame["coordinates"] ** 0.5 <= frame["rmse"]
        rows.append(
            [
                f"{data}, {TITLES[score]}",
                *ranks(frame, score, len(samples)),
                f"{below.sum()} of {len(frame)}",
            ]
        )
        plot(axis, frame, score)
        axis.set(
            xscale="log",
            xlabel="I_lb",
            ylabel=TITLES[score],
            title=f"{data}: Spearman {rank(frame, score):.2f}",
        )
    write_table(output, ["", *columns, "I_lb/√m ≤ RMSE"], rows)
    picture.savefig(named(output, ".png"), dpi=80)


def rank(frame: pandas.DataFrame, score: str, figure: str = "bound") -> float:
    return float(frame[figure].corr(frame[score], method="spearman"))


def ranks(frame: pandas.DataFrame, score: str, samples: int) -> list[str]:
    """Spearman of I_lb and the score, with a 95 % bootstrap interval over samples; in parts; of
    other figures.
    """
    draws = np.random.default_rng(0).integers(samples, size=(1000, samples))
    drawn = np.arange(len(frame)).reshape(samples, -1)[draws].reshape(1000, -1)
    pairs = (rankdata(frame[figure].to_numpy()[drawn], axis=1) for figure in ("bound", score))
    low, high = np.quantile(
        [np.corrcoef(pair)[0, 1] for pair in zip(*pairs, strict=True)], (0.025, 0.975)
    )
    noise, pruning = (rank(part, score) for _, part in frame.groupby("defense"))
    settings = [
        part for _, part in frame.groupby(["defense", "strength"]) if part[score].nunique() > 1
    ]
    alike = float(np.mean([rank(part, score) for part in settings])) if settings else float("nan")
    others = [noise, pruning, alike, rank(frame, score, "influence"), rank(frame, score, "size")]
    return [
        f"**{rank(frame, score):.2f}** [{low:.2f}, {high:.2f}]",
        *(f"{other:z.2f}" for other in others),
    ]


def plot(axis, frame: pandas.DataFrame, score: str) -> None:
    for (defense, strength), part in frame.groupby(["defense", "strength"]):
        marker, colors = ("o", "Blues") if defense == "gaussian_noise" else ("^", "Oranges")
        strengths = sorted(set(frame["strength"][frame["defense"] == defense]))
        color = plt.get_cmap(colors)(0.3 + 0.15 * strengths.index(strength))
        axis.scatter(
            part["bound"],
            part[score],
            s=14,
            marker=marker,
            color=color,
            label=f"{defense} {strength:g}",
        )
    if score == "rmse":
        axis.set_yscale("log")
        root = frame["coordinates"].iloc[0] ** 0.5
        axis.axline(
            (root, 1), (root / 10, 0.1), color="black", linewidth=0.8, label="I_lb / √m = rmse"
        )
    axis.legend(fontsize=6)


if __name__ == "__main__":
    main()
