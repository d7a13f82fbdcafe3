"""What the attacks recover from gradients that nobody defended: images on the leakage papers'
LeNet, sentences on an encoder.

    python recipes/reproductions/undefended.py images --cifar10 LOSSLESS.npz --mnist MNIST.npz \
        --output docs/results/undefended_images
    python recipes/reproductions/undefended.py text --model MODEL --data_dir SST2 \
        --output docs/results/undefended_text

Images: the first 16 of each file, one a gradient, initial weights, labels read off the gradient.
Sentences: the first 20 of SST-2's dev set with 8 to 20 words, one a gradient, a new classification
head, token embeddings withheld, label and length known. Means with 95 % bootstrap intervals.
"""

import argparse

import torch
from lenet import INVERTING, lenet_for, single_images
from reporting import Results, parser_of, summary, write_table
from sentences import of_usual_length, sst2
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed
from transformers.utils import logging

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation, make_attack, recover_labels
from hf_gradguard.metrics import score_images, score_text

IMAGES = {
    "dlg": {"steps": 100, "start": "uniform"},
    "idlg": {"steps": 100, "start": "uniform"},
    "inverting_gradients": {"steps": 100, **INVERTING},
    "inverting_gradients, as published": {"steps": 4800},
}
TEXT = {"tag": {"steps": 1500}}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("part", choices=("images", "text"))
    parser.add_argument("--cifar10", help="images: npz with x and y")
    parser.add_argument("--mnist", help="images: npz with x_train and y_train")
    parser.add_argument("--model", help="text: an encoder")
    parser.add_argument("--data_dir", help="text: folder with dev.tsv")
    args = parser.parse_args()
    plan = (
        {"attacks": IMAGES, "samples": 16}
        if args.part == "images"
        else {"attacks": TEXT, "samples": 20}
    )
    if args.quick:
        plan = {
            "attacks": {name: s | {"steps": 1} for name, s in plan["attacks"].items()},
            "samples": 2,
        }
    results = Results(args.output, plan | {"seed": 0})
    images(args, results) if args.part == "images" else text(args, results)
    scores = (
        ("psnr", "ssim")
        if args.part == "images"
        else ("token_f1", "position_accuracy", "rougeL", "exact_match")
    )
    rows = [
        [
            row,
            *("{:.3g} [{:.3g}, {:.3g}]".format(*found[score]) for score in scores),
            f"{found['labels right']:.0%}",
        ]
        for row, found in results.figures.items()
    ]
    write_table(args.output, ["", *scores, "labels read off the gradient"], rows)


def images(args: argparse.Namespace, results: Results) -> None:
    for data, path in (("cifar10", args.cifar10), ("mnist", args.mnist)):
        batches = single_images(path, results.plan["samples"])
        set_seed(0)
        model = lenet_for(batches[0])
        shape = tuple(batches[0]["pixel_values"].shape)
        seen = [
            Observation(model, GradientMap(model, batch).gradient(), input_shape=shape)
            for batch in batches
        ]
        for row, settings in results.plan["attacks"].items():
            results.get((f"{data}, {row}",), attack_images, row, settings, seen, batches)


def attack_images(row: str, settings: dict, seen: list[Observation], batches: list[dict]) -> dict:
    attack, generator = make_attack(row.split(",")[0], **settings), torch.Generator().manual_seed(0)
    found = attack.together(seen, generator)
    right = [
        bool((recover_labels(one) == batch["labels"]).all())
        for one, batch in zip(seen, batches, strict=True)
    ]
    scores = score_images(
        [one.input for one in found], [batch["pixel_values"] for batch in batches]
    )
    figures = summary(scores, ("psnr", "ssim")) | {"labels right": sum(right) / len(right)}
    return figures | {"psnr of each": [round(value, 2) for value in scores.per_sample["psnr"]]}


def text(args: argparse.Namespace, results: Results) -> None:
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2).eval()
    data = of_usual_length(sst2(args.data_dir))[: results.plan["samples"]]
    seen, ids, right = [], [], []
    for sample in data:
        batch, labels = (
            dict(tokenizer(sample["sentence"], return_tensors="pt")),
            torch.tensor([sample["label"]]),
        )
        gradient = GradientMap(model, batch | {"labels": labels}).gradient()
        ids.append(batch["input_ids"].tolist())
        shape = tuple(batch["input_ids"].shape)
        seen.append(
            Observation(model, gradient, input_shape=shape, labels=labels, tokenizer=tokenizer)
        )
        right.append(
            bool((recover_labels(Observation(model, gradient, input_shape=shape)) == labels).all())
        )
    for row, settings in results.plan["attacks"].items():
        results.get((row,), attack_text, row, settings, seen, ids, tokenizer, right)


def attack_text(
    row: str, settings: dict, seen: list[Observation], ids: list, tokenizer, right: list[bool]
) -> dict:
    """Sentences of one length are attacked together."""
    attack, found = make_attack(row, **settings), {}
    for length in logging.tqdm(sorted({one.input_shape[1] for one in seen}), desc=row):
        alike = [number for number, one in enumerate(seen) if one.input_shape[1] == length]
        results = attack.together(
            [seen[number] for number in alike], torch.Generator().manual_seed(0)
        )
        found |= dict(zip(alike, results, strict=True))
    scores = score_text(
        [found[number].token_ids for number in range(len(seen))], ids, tokenizer=tokenizer
    )
    figures = summary(scores, ("token_f1", "position_accuracy", "rougeL", "exact_match"))
    return figures | {
        "labels right": sum(right) / len(right),
        "token_f1 of each": scores.per_sample["token_f1"],
    }


if __name__ == "__main__":
    main()
