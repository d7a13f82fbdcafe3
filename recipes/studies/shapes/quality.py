r"""What does noise cost whose shape does not depend on the batch?

    python -m recipes.studies.shapes.run quality --model MODEL --data_dir SST2 --cifar10 CIFAR10 \
        --output docs/results/shapes_quality

A client fine-tunes (AdamW, 16 samples per step); defenses measure at every tenth step and keep
averages. At some steps other batches are looked at, of 16 samples and of one. Tr J_F·|U₂| does not
depend on the noise's strength; its least value, (Σ s|g|)², needs s and |g| of the very batch. s² is
from split probes (12, or 48 for one sample; exact ones for the ResNet, whose ReLU has kinks). dFIL
is compared with that of uniform noise of equal power. The last row has the averages of the
evaluated batches themselves, entry by entry. One hour of one core.
"""

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)
from transformers.utils import logging

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.randomness import Stream

from ..lib.tables import write_table
from ..lib.text import sst2
from .settings import BATCH, BATCHES, BEST, EVERY, PROBES, SEEDS, SHAPES, TASKS

ARGUMENTS = {
    "--model": "a text encoder and its tokenizer",
    "--data_dir": "folder of train.tsv",
    "--cifar10": "npz with x, y in uint8",
}


def cells(args) -> dict:
    size = {"batches": 1, "probes": 1, "size": 2, "batch": 2} if args.quick else {}
    return {
        (task, str(step), str(batch), str(seed)): {
            "task": task,
            "learning_rate": settings["learning_rate"],
            "step": min(step, 1) if args.quick else step,
            "size": batch,
            "seed": seed,
            "batches": BATCHES,
            "probes": PROBES[batch],
            "shapes": SHAPES,
        }
        | size
        for task, settings in TASKS.items()
        for seed in range(1 if args.quick else SEEDS)
        for step in (settings["steps"][:1] if args.quick else settings["steps"])
        for batch in settings["sizes"]
    }


def prepare(args):
    torch.set_num_threads(1)
    return lambda cell: measure(cell, *_task(cell, args))


def report(figures: dict, args) -> None:
    header = ["", "step", "samples", "noise", "over the optimum", "worst dFIL over uniform's"]
    rows = []
    for task, steps in figures.items():
        for step, sizes in steps.items():
            for size, seeds in sizes.items():
                for row in (*SHAPES, BEST):
                    ratios = [r for found in seeds.values() for r in found[row]["ratios"]]
                    dfils = [r for found in seeds.values() for r in found[row]["dfils"]]
                    said = (
                        f"{short(np.median(ratios))} [{short(min(ratios))}, {short(max(ratios))}]"
                    )
                    rows.append([task, step, size, row, said, short(max(dfils))])
    write_table(args.output, header, rows)


def short(value: float) -> str:
    return f"{value:.2f}" if value < 100 else "over 100"


def _task(cell: dict, args) -> tuple:
    """A model, and a function from a number of samples to the next batch."""
    set_seed(cell["seed"])
    order = np.random.default_rng(cell["seed"])
    if cell["task"] == "minilm":
        tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
        model = AutoModelForSequenceClassification.from_pretrained(
            args.model, trust_remote_code=False
        )
        rows = sst2(args.data_dir, "train")

        def draw(count: int) -> dict:
            some = rows.select(order.integers(len(rows), size=count))
            made = tokenizer(
                list(some["sentence"]),
                padding=True,
                truncation=True,
                max_length=64,
                return_tensors="pt",
            )
            return dict(made) | {"labels": torch.tensor(list(some["label"]))}

        return model, draw
    with np.load(args.cifar10) as file:
        images = torch.from_numpy(file["x"]).permute(0, 3, 1, 2).float() / 127.5 - 1
        labels = torch.from_numpy(file["y"]).long().flatten()
    if cell["task"] == "vit":
        sizes = {"hidden_size": 192, "intermediate_size": 768, "num_attention_heads": 3}
        model = ViTForImageClassification(
            ViTConfig(image_size=32, patch_size=4, num_hidden_layers=6, num_labels=10, **sizes)
        )
    else:
        model = ResNetForImageClassification(
            ResNetConfig(
                embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[1, 1, 1, 1],
                layer_type="basic", num_labels=10,
            )
        )  # fmt: skip

    def draw_images(count: int) -> dict:
        some = order.integers(len(images), size=count)
        return {"pixel_values": images[some], "labels": labels[some]}

    return model, draw_images


def measure(cell: dict, model, draw) -> dict:
    """For every shape, Tr J_F·|U₂| over its least value and dFIL over uniform noise's, of every
    batch.
    """
    clients = {
        row: make_defense(name, relative_scale=1.0, **settings)
        for row, (name, settings) in cell["shapes"].items()
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=cell["learning_rate"])
    model.train()
    for step in logging.tqdm(range(cell["step"]), desc=f"{cell['task']} to step {cell['step']}"):
        batch = draw(cell.get("batch", BATCH))
        if step % EVERY == 0:
            learn(clients, model, batch)
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    learn(clients, model, draw(cell.get("batch", BATCH)))
    freeze(model)
    evaluated = [
        GradientMap(model, draw(cell["size"]), second_order=False) for _ in range(cell["batches"])
    ]
    squares = [flat(g.squared_sensitivity(cell["probes"], Stream.from_seeds(1))) for g in evaluated]
    powers = [flat(g.gradient()).square() for g in evaluated]
    best = (sum(squares) / sum(powers).clamp(min=1e-30)).sqrt().clamp(max=1e12)
    found: dict = {row: {"ratios": [], "dfils": []} for row in (*clients, BEST)}
    for gmap, s, g in zip(evaluated, squares, powers, strict=True):
        for row, defense in clients.items():
            state = defense.state_dict()
            variance = flat(defense(gmap).noise.added)
            if state:
                defense.load_state_dict(state)
            add(found[row], variance, s, g)
        add(found[BEST], best, s, g)
    return found


def learn(clients: dict, model, batch: dict) -> None:
    """A message of each defense that keeps averages."""
    gmap = GradientMap(model, batch, second_order=False)
    for row, defense in clients.items():
        if row.startswith(("public", "past")):
            defense(gmap)


def freeze(model) -> None:
    """Batch statistics stay as they were trained."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._NormBase):
            module.eval()


def flat(tensors: dict) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()]).double()


def add(row: dict, variance: Tensor, s: Tensor, g: Tensor) -> None:
    information = float(torch.where(s > 0, s / variance, 0.0).sum())
    row["ratios"].append(
        information * float((g * variance).sum()) / float((s * g).sqrt().sum()) ** 2
    )
    row["dfils"].append(information * float(variance.mean()) / float(s.sum()))
