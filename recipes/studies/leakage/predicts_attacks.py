r"""Whether the influence's lower bound says how well an attack will do: Zhang et al. (2023),
Figures 2, 4 and 16.

    python -m recipes.studies.leakage.run predicts_attacks --mnist MNIST.npz \
        --cifar10 LOSSLESS.npz --sst2 SST2 --tokenizer MODEL \
        --output docs/results/influence_predicts_attacks

One sample a gradient, Gaussian noise at five strengths and pruning at four ratios, label known.
Images: the leakage papers' LeNet before training, Inverting Gradients by L-BFGS (as published it
reaches 13 dB undefended, so 32), pixels clipped to their range. Sentences of 8 to 20 words: a
random BERT of 2 layers, token embeddings withheld, TAG with 300 steps, which find all of an
undefended sentence. Influences are norms, rmse is a coordinate's; I itself takes the damping 1e-3
λ_max. About an hour of one core.
"""

import functools

import numpy as np
import pandas
import torch
from scipy.stats import rankdata
from torch import Tensor
from transformers import AutoTokenizer, set_seed

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.leakage import (
    inversion_influence,
    inversion_influence_lower_bound,
    largest_eigenvalue,
)
from hf_gradguard.metrics import score_text
from hf_gradguard.randomness import Stream

from ..lib.attacks import attack_of
from ..lib.images import INVERTING, SINGLE_IMAGES, lenet_for, single_images
from ..lib.tables import plt, save, write_table
from ..lib.text import batches_of_one, of_usual_length, small_bert, sst2
from .directions import DATA
from .settings import IMAGE_GROUPS, PREDICTS, QUICK_GROUPS, QUICK_PREDICTS, TEXT_GROUPS

ARGUMENTS = SINGLE_IMAGES | {"--sst2": "folder with dev.tsv", "--tokenizer": "folder or name"}
SCORES = {"MNIST": ("rmse",), "CIFAR-10": ("rmse",), "SST-2": ("rougeL", "google_bleu")}
STRENGTH = {"gaussian_noise": "scale", "pruning": "ratio"}  # the argument of a defense
TITLES = {"rmse": "RMSE", "rougeL": "ROUGE-L", "google_bleu": "Google BLEU"}


def plan(args) -> dict:
    return QUICK_PREDICTS if args.quick else PREDICTS


def cells(args) -> dict:
    sizes, found = plan(args), {}
    for data in SCORES:
        groups = IMAGE_GROUPS if data in DATA else TEXT_GROUPS
        image = {"side": sizes["side"], "steps": sizes["lbfgs"]}
        settings = image if data in DATA else {"steps": sizes["tag"]}
        for sample in range(sizes["samples"]):
            for number, strengths in enumerate(QUICK_GROUPS if args.quick else groups):
                one = {"data": data, "sample": sample, "strengths": strengths, **settings}
                found[data, str(sample), str(number)] = one
    return found


def prepare(args):
    @functools.cache
    def started(data: str, side: int | None) -> tuple:
        """The model, all samples, and the tokenizer if there is one."""
        set_seed(0)
        if data in DATA:
            batches = single_images(getattr(args, DATA[data]), plan(args)["samples"], side)
            return lenet_for(batches[0]), batches, None
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer, trust_remote_code=False)
        batches = batches_of_one(tokenizer, of_usual_length(sst2(args.sst2)))
        return small_bert(tokenizer), batches, tokenizer

    def measure(cell: dict) -> list[dict]:
        model, batches, tokenizer = started(cell["data"], cell.get("side"))
        return attacked(cell, model, batches[cell["sample"]], tokenizer)

    return measure


def attacked(cell: dict, model, batch: dict[str, Tensor], tokenizer) -> list[dict]:
    """One sample behind every defense: influences and what the attack makes of it."""
    gmap = GradientMap(model, batch)
    gradient, top = gmap.gradient(), largest_eigenvalue(gmap)
    shape = tuple(batch["input_ids" if tokenizer else "pixel_values"].shape)
    points, seen = [], []
    sample, strengths = cell["sample"], cell["strengths"]
    settings = [(name, strength) for name, some in strengths.items() for strength in some]
    for number, (name, strength) in enumerate(settings):
        generator = Stream.from_seeds(100 * sample + number)
        shared = make_defense(name, **{STRENGTH[name]: strength})(gmap, generator=generator)
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
    if tokenizer:
        attack = make_attack("tag", steps=cell["steps"])
    else:
        attack = attack_of("inverting_gradients", steps=cell["steps"], patience=5, **INVERTING)
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


def report(figures: dict, args) -> None:
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
        samples = figures[data].values()
        points = [point for groups in samples for group in groups.values() for point in group]
        frame = pandas.DataFrame(points)
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
    write_table(args.output, ["", *columns, "I_lb/√m ≤ RMSE"], rows)
    save(picture, args.output, dpi=80)


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
