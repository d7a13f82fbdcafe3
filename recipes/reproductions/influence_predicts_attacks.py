"""Whether the influence's lower bound says how well an attack will do: Zhang et al. (2023), Figures 2, 4 and 16.

    python recipes/reproductions/influence_predicts_attacks.py --mnist MNIST.npz --cifar10 LOSSLESS.npz \
        --sst2 SST2 --tokenizer MODEL --output docs/results/influence_predicts_attacks

One sample a gradient, Gaussian noise at five strengths and pruning at four ratios, label known. Images: the leakage papers'
LeNet before training, Inverting Gradients by L-BFGS (as published it reaches 11 dB undefended, so 32), pixels clipped to their
range. Sentences of 8 to 20 words: a random BERT of 2 layers, token embeddings withheld, TAG with 300 steps, which find all of an
undefended sentence. Influences are norms, rmse is a coordinate's; I itself takes the damping 1e-3 λ_max.

Appends each point to OUTPUT.jsonl (samples that are there are not run again); OUTPUT.json and OUTPUT.png are made from it.
"""

import argparse
import json
from pathlib import Path

import matplotlib
import numpy as np
import pandas
import torch
from datasets import load_dataset
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

IMAGE_NOISE = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # the gradient's RMS is about 0.2
TEXT_NOISE = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)  # about 0.01
LBFGS = {"optimizer": "lbfgs", "learning_rate": 1.0, "schedule": "constant", "signed": False}
IMAGE_ATTACK = make_attack("inverting_gradients", **LBFGS, start="uniform", total_variation=1e-5, steps=60, patience=5)
TEXT_ATTACK = make_attack("tag", steps=300)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, what in (("mnist", "npz with x_train and y_train"), ("cifar10", "npz with x and y"),
                       ("sst2", "folder with dev.tsv"), ("tokenizer", "folder or name")):  # fmt: skip
        parser.add_argument(f"--{name}", required=True, help=what)
    parser.add_argument("--samples", type=int, default=12, help="of each data set; each gives nine points")
    parser.add_argument("--output", type=Path, default=Path("docs/results/influence_predicts_attacks"))
    args = parser.parse_args()
    lines = args.output.with_suffix(".jsonl")
    lines.touch()
    points = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    for data in ("mnist", "cifar10", "sst2"):
        set_seed(0)
        model, batches, tokenizer = sentences(args) if data == "sst2" else images(args, data)
        for sample, batch in enumerate(logging.tqdm(batches, desc=data)):
            if not any((point["data"], point["sample"]) == (data, sample) for point in points):
                new = [{"data": data, "sample": sample} | p for p in attacked(sample, model, batch, tokenizer)]
                with lines.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(point) + "\n" for point in new)
                points += new
    report, frame = {}, pandas.DataFrame(points)
    for data, score in (("mnist", "rmse"), ("cifar10", "rmse"), ("sst2", "rougeL"), ("sst2", "google_bleu")):
        report[f"{data} {score}"] = summary(frame[frame["data"] == data], score)
    print(text := json.dumps(report, indent=2, ensure_ascii=False))
    args.output.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    plot(args, frame, report)


def images(args: argparse.Namespace, data: str) -> tuple:
    with np.load(getattr(args, data)) as file:
        names = ("x_train", "y_train") if data == "mnist" else ("x", "y")
        pixels, labels = (torch.from_numpy(file[name][: args.samples]) for name in names)
    pixels = (pixels[:, None] if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2)).float() / 255
    config = LeakageLeNetConfig(num_channels=pixels.shape[1], image_size=pixels.shape[2])
    batches = [{"pixel_values": x, "labels": y} for x, y in zip(pixels.split(1), labels.long().split(1), strict=True)]
    return LeakageLeNetForImageClassification(config).eval(), batches, None


def sentences(args: argparse.Namespace) -> tuple:
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    sizes |= {"vocab_size": len(tokenizer), "max_position_embeddings": 64, "initializer_range": 0.05}
    rows = load_dataset("csv", data_files={"dev": f"{args.sst2}/dev.tsv"}, delimiter="\t", quoting=3)["dev"]
    rows = [row for row in rows if 8 <= len(row["sentence"].split()) <= 20][: args.samples]
    encoded = [dict(tokenizer(row["sentence"], return_tensors="pt")) for row in rows]
    batches = [batch | {"labels": torch.tensor([row["label"]])} for batch, row in zip(encoded, rows, strict=True)]
    return BertForSequenceClassification(BertConfig(**sizes)).eval(), batches, tokenizer


def attacked(sample: int, model, batch: dict[str, Tensor], tokenizer) -> list[dict]:
    """One sample behind every defence: influences and what the attack makes of it."""
    gmap = GradientMap(model, batch)
    gradient, top = gmap.gradient(), largest_eigenvalue(gmap)
    shape = tuple(batch["input_ids" if tokenizer else "pixel_values"].shape)
    points, seen = [], []
    settings = [("gaussian_noise", "scale", s) for s in (TEXT_NOISE if tokenizer else IMAGE_NOISE)]
    settings += [("pruning", "ratio", r) for r in (0.3, 0.5, 0.7, 0.9)]
    for number, (name, argument, strength) in enumerate(settings):
        generator = torch.Generator().manual_seed(100 * sample + number)
        shared = make_defense(name, **{argument: strength})(gmap, generator=generator)
        delta = {key: shared[key] - g for key, g in gradient.items()}
        point = {"defense": name, "strength": strength, "size": torch.cat([d.flatten() for d in delta.values()]).norm()}
        point["bound"] = inversion_influence_lower_bound(gmap, delta, eigenvalue=top)
        point["influence"] = inversion_influence(gmap, delta, 1e-3 * top, tolerance=1e-2)
        point["coordinates"] = point["bound"].num_coordinates
        points.append(point)
        seen.append(Observation(model, shared, shape, labels=batch["labels"], tokenizer=tokenizer))
    attack = TEXT_ATTACK if tokenizer else IMAGE_ATTACK
    for point, found in zip(points, attack.together(seen, torch.Generator().manual_seed(sample)), strict=True):
        guess = found.input if tokenizer else found.input.clamp(0, 1)
        point["rmse"] = (guess - gmap.input).square().mean().sqrt()
        if tokenizer:
            scores = score_text([found.token_ids], [batch["input_ids"].tolist()], tokenizer=tokenizer, bootstrap=0)
            point |= {score: scores.mean[score] for score in ("rougeL", "google_bleu")}
    return [{k: v if isinstance(v, str) else float(f"{float(v):.4g}") for k, v in point.items()} for point in points]


def summary(frame: pandas.DataFrame, score: str) -> dict:
    """Spearman of the bound and the score, with a 95 % bootstrap interval over samples; in parts; of other figures."""

    def rank(part: pandas.DataFrame, figure: str = "bound") -> float:
        return round(float(part[figure].corr(part[score], method="spearman")), 3)

    samples = [part for _, part in frame.groupby("sample")]
    draws = np.random.default_rng(0).integers(len(samples), size=(1000, len(samples)))
    spread = [rank(pandas.concat([samples[sample] for sample in draw])) for draw in draws]
    alike = [part for _, part in frame.groupby(["defense", "strength"]) if part[score].nunique() > 1]
    report = {"points": len(frame), "spearman": rank(frame)}
    report["interval"] = np.quantile(spread, (0.025, 0.975)).round(3).tolist()
    report |= {defense: rank(part) for defense, part in frame.groupby("defense")}
    report |= {f"mean of {len(alike)} settings, samples compared": round(float(np.mean([rank(p) for p in alike])), 3)}
    report |= {"spearman of I": rank(frame, "influence"), "spearman of the norm of δ": rank(frame, "size")}
    root = frame["coordinates"] ** 0.5
    return report | {"share with bound/√m <= rmse": float((frame["bound"] <= root * frame["rmse"]).mean())}


def plot(args: argparse.Namespace, frame: pandas.DataFrame, report: dict) -> None:
    figure, axes = plt.subplots(2, 2, figsize=(10, 8), layout="constrained")
    for axis, (title, row) in zip(axes.flat, report.items(), strict=True):
        data, score = title.split()
        for number, (one, part) in enumerate(frame[frame["data"] == data].groupby(["defense", "strength"])):
            marker, colors = ("o", "Blues") if number < len(IMAGE_NOISE) else ("^", "Oranges")
            color = plt.get_cmap(colors)(0.3 + 0.15 * (number % len(IMAGE_NOISE)))
            axis.scatter(part["bound"], part[score], s=14, marker=marker, color=color, label=f"{one[0]} {one[1]:g}")
        axis.set(xscale="log", xlabel="I_lb", ylabel=score, title=f"{title}: Spearman {row['spearman']:.2f}")
        if score == "rmse":
            axis.set_yscale("log")
            root = part["coordinates"].iloc[0] ** 0.5
            axis.axline((root, 1), (root / 10, 0.1), color="black", linewidth=0.8, label="I_lb / √m = rmse")
        axis.legend(fontsize=6)
    figure.savefig(args.output.with_suffix(".png"), dpi=80)


if __name__ == "__main__":
    main()
