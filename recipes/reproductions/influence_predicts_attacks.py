"""Whether the influence's lower bound says how well an attack will do: Zhang et al. (2023), Figures 2, 4 and 16.

    python recipes/reproductions/influence_predicts_attacks.py --mnist MNIST.npz --cifar10 LOSSLESS.npz \
        --sst2 SST2 --tokenizer MODEL --output docs/results/influence_predicts_attacks

One sample a gradient, Gaussian noise at five strengths and pruning at four ratios, label known. Images: the leakage papers'
LeNet, Inverting Gradients with L-BFGS (it reaches 32 dB undefended, the published signed Adam 11). Sentences of 8 to 20 words:
a random BERT of 2 layers, token embeddings withheld, TAG with 300 steps (which recover all of an undefended sentence).
Errors and influences are RMS values a coordinate. I itself takes the damping 1e-3 λ_max.

Appends each point to OUTPUT.jsonl (samples that are there are not run again); OUTPUT.json and OUTPUT.png are made from it.
"""

import argparse
import json
from pathlib import Path

import matplotlib
import numpy as np
import torch
from datasets import load_dataset
from scipy.stats import spearmanr
from torch import Tensor
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, set_seed
from transformers.utils import logging

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.leakage import inversion_influence, inversion_influence_lower_bound, largest_eigenvalue
from hf_gradguard.metrics import score_text
from hf_gradguard.models import LeakageLeNetConfig, LeakageLeNetForImageClassification

matplotlib.use("agg")
from matplotlib import pyplot as plt

RATIOS = (0.3, 0.5, 0.7, 0.9)
NOISE = {  # in the gradient's unit; its RMS is about 0.2 on LeNet and 0.01 on BERT
    "mnist": (1e-4, 1e-3, 1e-2, 1e-1, 1.0),
    "cifar10": (1e-4, 1e-3, 1e-2, 1e-1, 1.0),
    "sst2": (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
}
TARGETS = {"mnist": ("rmse",), "cifar10": ("rmse",), "sst2": ("rougeL", "google_bleu")}
LBFGS = {"optimizer": "lbfgs", "learning_rate": 1.0, "schedule": "constant", "signed": False}
IMAGE_ATTACK = make_attack("inverting_gradients", **LBFGS, start="uniform", total_variation=1e-5, steps=60, patience=5)
TEXT_ATTACK = make_attack("tag", steps=300)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", help="npz with x_train and y_train")
    parser.add_argument("--cifar10", help="npz with x and y")
    parser.add_argument("--sst2", help="folder with dev.tsv")
    parser.add_argument("--tokenizer", help="folder or name, for sst2")
    parser.add_argument("--samples", type=int, default=12, help="of each data set; each gives nine points")
    parser.add_argument("--output", default="docs/results/influence_predicts_attacks")
    args = parser.parse_args()
    lines = Path(f"{args.output}.jsonl")
    lines.parent.mkdir(parents=True, exist_ok=True)
    lines.touch()
    for data in NOISE:
        if getattr(args, data) is None:
            continue
        set_seed(0)
        load = sentences if data == "sst2" else images
        model, batches, tokenizer = load(args, data)
        for sample, batch in enumerate(logging.tqdm(batches, desc=data)):
            if f'{{"data": "{data}", "sample": {sample},' in lines.read_text(encoding="utf-8"):
                continue
            points = [
                {"data": data, "sample": sample} | point for point in attacked(data, sample, model, batch, tokenizer)
            ]
            with lines.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(point) + "\n" for point in points)
    points = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    report = {
        f"{data} {target}": summary([point for point in points if point["data"] == data], target)
        for data in dict.fromkeys(point["data"] for point in points)
        for target in TARGETS[data]
    }
    print(json.dumps(report, indent=2))
    Path(f"{args.output}.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    plot(args, points, report)


def images(args: argparse.Namespace, data: str) -> tuple:
    with np.load(getattr(args, data)) as file:
        names = ("x_train", "y_train") if data == "mnist" else ("x", "y")
        pixels, labels = (torch.from_numpy(file[name][: args.samples]) for name in names)
    pixels = (pixels[:, None] if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2)).float() / 255
    config = LeakageLeNetConfig(num_channels=pixels.shape[1], image_size=pixels.shape[2])
    batches = zip(pixels.split(1), labels.long().split(1), strict=True)
    model = LeakageLeNetForImageClassification(config).eval()
    return model, [{"pixel_values": x, "labels": y} for x, y in batches], None


def sentences(args: argparse.Namespace, data: str) -> tuple:
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    sizes |= {"vocab_size": len(tokenizer), "max_position_embeddings": 64, "initializer_range": 0.05}
    rows = load_dataset("csv", data_files={"dev": f"{args.sst2}/dev.tsv"}, delimiter="\t", quoting=3)["dev"]
    rows = rows.filter(lambda row: 8 <= len(row["sentence"].split()) <= 20).select(range(args.samples))
    batches = [
        dict(tokenizer(row["sentence"], return_tensors="pt")) | {"labels": torch.tensor([row["label"]])} for row in rows
    ]
    return BertForSequenceClassification(BertConfig(**sizes)).eval(), batches, tokenizer


def attacked(data: str, sample: int, model, batch: dict[str, Tensor], tokenizer) -> list[dict]:
    """One sample behind every defence: influences and what the attack makes of it."""
    gmap = GradientMap(model, batch)
    gradient, top = gmap.gradient(), largest_eigenvalue(gmap)
    known = {
        "input_shape": tuple(batch["pixel_values" if tokenizer is None else "input_ids"].shape),
        "labels": batch["labels"],
    }
    points, seen = [], []
    settings = [("gaussian_noise", "scale", s) for s in NOISE[data]] + [("pruning", "ratio", r) for r in RATIOS]
    for number, (name, argument, strength) in enumerate(settings):
        generator = torch.Generator().manual_seed(100 * sample + number)
        shared = make_defense(name, **{argument: strength})(gmap, generator=generator)
        delta = {key: shared[key] - g for key, g in gradient.items()}
        bound = inversion_influence_lower_bound(gmap, delta, eigenvalue=top)
        influence = inversion_influence(gmap, delta, 1e-3 * top, tolerance=1e-2)
        size = torch.cat([d.flatten() for d in delta.values()]).norm()
        points.append(
            {"defense": name, "strength": strength, "bound": bound.rmse, "influence": influence.rmse, "size": size}
        )
        seen.append(Observation(model, shared, tokenizer=tokenizer, **known))
    attack = IMAGE_ATTACK if tokenizer is None else TEXT_ATTACK
    for point, found in zip(points, attack.together(seen, torch.Generator().manual_seed(sample)), strict=True):
        if tokenizer is None:
            guess = found.input.clamp(0, 1)  # the attacker knows the range; L-BFGS leaves it within a step
        else:
            guess = found.input
            scores = score_text([found.token_ids], [batch["input_ids"].tolist()], tokenizer=tokenizer, bootstrap=0)
            point |= {name: scores.mean[name] for name in TARGETS[data]}
        point["rmse"] = (guess - gmap.input).square().mean().sqrt()
    return [{k: v if isinstance(v, str) else float(f"{float(v):.4g}") for k, v in point.items()} for point in points]


def summary(points: list[dict], target: str) -> dict:
    """Spearman of the bound and the target: all points with a 95 % bootstrap interval over samples, and parts of them."""
    samples = {s: [p for p in points if p["sample"] == s] for s in dict.fromkeys(p["sample"] for p in points)}
    draws = np.random.default_rng(0).choice(list(samples), (1000, len(samples)))
    spread = [rank([p for s in draw for p in samples[s]], "bound", target) for draw in draws]
    strengths = {(p["defense"], p["strength"]) for p in points}
    settings = [[p for p in points if (p["defense"], p["strength"]) == one] for one in strengths]
    defenses = {
        d: rank([p for p in points if p["defense"] == d], "bound", target) for d in ("gaussian_noise", "pruning")
    }
    report = {"points": len(points), "spearman": rank(points, "bound", target)}
    report |= {"interval": np.quantile(spread, (0.025, 0.975)).tolist()} | defenses
    report |= {"within a setting, mean": float(np.nanmean([rank(s, "bound", target) for s in settings]))}
    report |= {f"of the {name}": rank(points, name, target) for name in ("influence", "size")}
    report["bound <= rmse"] = float(np.mean([p["bound"] <= p["rmse"] for p in points]))
    return {key: np.round(value, 3).tolist() for key, value in report.items()}


def rank(points: list[dict], one: str, other: str) -> float:
    a, b = ([p[key] for p in points] for key in (one, other))
    return float(spearmanr(a, b).statistic) if len(set(a)) > 1 and len(set(b)) > 1 else float("nan")


def plot(args: argparse.Namespace, points: list[dict], report: dict) -> None:
    figure, axes = plt.subplots(2, 2, figsize=(10, 8), layout="constrained")
    for axis, (title, row) in zip(axes.flat, report.items(), strict=False):
        data, target = title.split()
        for name, marker, colors in (("gaussian_noise", "o", "Blues"), ("pruning", "^", "Oranges")):
            mine = [p for p in points if p["data"] == data and p["defense"] == name]
            levels = sorted({p["strength"] for p in mine})
            for number, level in enumerate(levels):
                some = [p for p in mine if p["strength"] == level]
                color = plt.get_cmap(colors)(0.3 + 0.7 * number / (len(levels) - 1))
                axis.scatter([p["bound"] for p in some], [p[target] for p in some], s=14, marker=marker, color=color,
                             label=f"{name} {level:g}")  # fmt: skip
        axis.set(xscale="log", xlabel="I_lb / √m", ylabel=target, title=f"{title}: Spearman {row['spearman']:.2f}")
        if target == "rmse":
            ends = np.array(axis.get_xlim())
            axis.set(yscale="log", ylim=axis.get_ylim())
            axis.plot(ends, ends, color="black", linewidth=0.8, label="equal")
        axis.legend(fontsize=6)
    figure.savefig(f"{args.output}.png", dpi=80)


if __name__ == "__main__":
    main()
