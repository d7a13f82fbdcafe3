"""What the attacks recover from gradients that nobody defended: images on the leakage papers' LeNet, sentences on an encoder.

    python recipes/reproductions/undefended.py images --cifar10 LOSSLESS.npz --mnist MNIST.npz --output docs/results/undefended
    python recipes/reproductions/undefended.py text --model MODEL --data_dir SST2 --output docs/results/undefended

Images: the first 16 of each file, one a gradient, initial weights, labels read off the gradient. Sentences: the first 20 of
SST-2's dev set with 8 to 20 words, one a gradient, a new classification head, token embeddings withheld, label and length
known. Each row is kept as OUTPUT/ROW.json (those that exist are not run again), and the table is printed.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed
from transformers.utils import logging

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation, make_attack, recover_labels
from hf_gradguard.metrics import score_images, score_text
from hf_gradguard.models import LeakageLeNetConfig, LeakageLeNetForImageClassification

LBFGS = {"optimizer": "lbfgs", "learning_rate": 1.0, "schedule": "constant"}
IMAGES = {
    "dlg": {"steps": 100, "start": "uniform"},
    "idlg": {"steps": 100, "start": "uniform"},
    "inverting_gradients": {"steps": 100, "start": "uniform", "signed": False, "total_variation": 1e-5, **LBFGS},
    "inverting_gradients, as published": {"steps": 4800},
}
TEXT = {
    "tag": {"steps": 1500},
    "inverting_gradients": {"steps": 1500, "learning_rate": 0.01, "signed": False, "schedule": "linear", "warmup": 50},
    "lamp": {"steps": 1500},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("images", "text"))
    parser.add_argument("--cifar10", help="npz with x and y")
    parser.add_argument("--mnist", help="npz with x_train and y_train")
    parser.add_argument("--model", help="a text encoder")
    parser.add_argument("--data_dir", help="folder with dev.tsv")
    parser.add_argument("--rows", nargs="+", help="only these")
    parser.add_argument("--samples", type=int, help="only so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    set_seed(args.seed)
    run_images(args) if args.part == "images" else run_text(args)


def keep(args: argparse.Namespace, row: str, run) -> None:
    path = args.output / f"{row.replace(', ', '-').replace(' ', '_')}.json"
    if args.rows and not any(row.endswith(wanted) for wanted in args.rows):
        return
    if not path.exists():
        started = time.perf_counter()
        report = run()
        report |= {"seconds": round(time.perf_counter() - started, 1), "threads": torch.get_num_threads()}
        path.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    report = json.loads(path.read_text(encoding="utf-8"))
    cells = [f"{name} {mean:.3g} [{low:.3g}, {high:.3g}]" for name, (mean, low, high) in report["scores"].items()]
    print(f"| {row} | " + " | ".join(cells) + f" | {report['seconds']} s |")


def summary(scores, names: tuple[str, ...]) -> dict:
    """Mean and 95 % bootstrap interval over the samples."""
    return {name: [round(float(v), 4) for v in (scores.mean[name], *scores.interval[name])] for name in names}


def run_images(args: argparse.Namespace) -> None:
    for data, path, names in (("cifar10", args.cifar10, ("x", "y")), ("mnist", args.mnist, ("x_train", "y_train"))):
        if path is None:
            continue
        with np.load(path) as file:
            pixels, labels = (torch.from_numpy(file[name][: args.samples or 16]) for name in names)
        images = (pixels[:, None] if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2)).float() / 255
        config = LeakageLeNetConfig(num_channels=images.shape[1], image_size=images.shape[2])
        model = LeakageLeNetForImageClassification(config).eval()
        seen = []
        for image, label in zip(images.split(1), labels.long().split(1), strict=True):
            gradient = GradientMap(model, {"pixel_values": image, "labels": label}).gradient()
            seen.append(Observation(model, gradient, input_shape=tuple(image.shape)))
        for row, settings in IMAGES.items():

            def run(row: str = row, settings: dict = settings, images=images, labels=labels, seen=seen) -> dict:
                attack = make_attack(row.split(",")[0], **settings)
                generator = torch.Generator().manual_seed(args.seed)
                if settings.get("optimizer") or "dlg" in row:  # L-BFGS takes one at a time
                    found = [attack(one, generator) for one in logging.tqdm(seen, desc=row)]
                else:
                    found = attack.together(seen, generator)
                scores = score_images([one.input for one in found], list(images.split(1)))
                right = [bool((recover_labels(one) == label).all()) for one, label in zip(seen, labels, strict=True)]
                return {
                    "settings": settings,
                    "scores": summary(scores, ("psnr", "ssim")),
                    "psnr": scores.per_sample["psnr"],
                    "labels right": sum(right) / len(right),
                }

            keep(args, f"{data} {row}", run)


def run_text(args: argparse.Namespace) -> None:
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2).eval()
    data = load_dataset("csv", data_files={"dev": f"{args.data_dir}/dev.tsv"}, delimiter="\t", quoting=3)["dev"]
    data = data.filter(lambda row: 8 <= len(row["sentence"].split()) <= 20).select(range(args.samples or 20))
    observed = []
    for sample in data:
        batch, labels = dict(tokenizer(sample["sentence"], return_tensors="pt")), torch.tensor([sample["label"]])
        gradient = GradientMap(model, batch | {"labels": labels}).gradient()
        shape = tuple(batch["input_ids"].shape)
        observed.append(Observation(model, gradient, input_shape=shape, labels=labels, tokenizer=tokenizer))
    for row, settings in TEXT.items():

        def run(row: str = row, settings: dict = settings) -> dict:
            attack, found = make_attack(row, **settings), {}
            for length in logging.tqdm(sorted({seen.input_shape[1] for seen in observed}), desc=row):
                alike = [number for number, seen in enumerate(observed) if seen.input_shape[1] == length]
                results = attack.together([observed[n] for n in alike], torch.Generator().manual_seed(args.seed))
                found |= dict(zip(alike, results, strict=True))
            ids = [[list(tokenizer(sample["sentence"])["input_ids"])] for sample in data]
            scores = score_text([found[number].token_ids for number in range(len(data))], ids, tokenizer=tokenizer)
            names = ("token_f1", "position_accuracy", "rougeL", "exact_match")
            return {"settings": settings, "scores": summary(scores, names), "token_f1": scores.per_sample["token_f1"]}

        keep(args, f"sst2 {row}", run)


if __name__ == "__main__":
    main()
