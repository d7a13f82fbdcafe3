r"""Labels found in messages of one image, with and without protection, and test accuracy.

    python -m recipes.studies.labels.run recovery --data MNIST.npz --output docs/results/labels

MNIST with 2 classes (digits below 5, and others) and with 20 (every second image inverted, a class
for each digit of either kind). A convolutional network learns 15,000 images by `GradGuardTrainer`,
once each, in batches of 128, with Adam at 1e-3; gradients are otherwise undefended. Then the first
200 of these images are messages of one each, at the weights before training and after: labels are
read off the last layer (`recover_labels`), or with it withheld off the one below
(`recover_labels_below`). Chance is one over the number of classes; the bound is what no attack on
one message can exceed on average, if all classes are equally likely. A seed is a start, an order
and the draws of labels. 25 minutes of one core.
"""

import copy
import tempfile

import numpy as np
import torch
from transformers import set_seed

from hf_gradguard import GradGuardConfig, GradGuardTrainer, GradientMap
from hf_gradguard.attacks import Observation, recover_labels, recover_labels_below
from hf_gradguard.training.privacy.labels import keep_probability
from recipes.small_networks import LeakyConvNetConfig, LeakyConvNetForImageClassification

from ..lib.tables import interval, write_table
from .settings import BATCH, CLASSES, EPSILONS, MESSAGES, QUICK, QUICK_SEEDS, ROWS, SEEDS

ARGUMENTS = {"--data": "npz with x_train, y_train, x_test, y_test in uint8"}
WITHHELD = "head withheld"


def cells(args) -> dict:
    sizes = QUICK if args.quick else {"rows": ROWS, "batch": BATCH, "messages": MESSAGES}
    return {
        (str(classes), row, str(seed)): {
            "classes": classes, "epsilon": epsilon, "withhold": row == WITHHELD, "seed": seed,
            **sizes,
        }
        for classes in CLASSES
        for row, epsilon in {**{_row(e): e for e in EPSILONS}, WITHHELD: None}.items()
        for seed in range(QUICK_SEEDS if args.quick else SEEDS)
    }  # fmt: skip


def prepare(args):
    torch.set_num_threads(1)
    with np.load(args.data) as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file}
    return lambda cell: measure(cell, arrays)


def report(figures: dict, args) -> None:
    header = ["classes", "", "labels found before training", "after training", "bound", "chance"]
    write_table(args.output, [*header, "test accuracy"], table(figures))


def table(figures: dict) -> list[list[object]]:
    rows = []
    for classes in CLASSES:
        epsilons = {_row(epsilon): epsilon for epsilon in EPSILONS}
        for row, runs in figures[str(classes)].items():
            columns = [
                interval([run[name] for run in runs.values()])
                for name in ("before", "after", "accuracy")
            ]
            epsilon = epsilons.get(row)
            bound = 1.0 if epsilon is None else keep_probability(epsilon, classes)
            figured = [f"{bound:.3f}", f"{1 / classes:.3f}"]
            rows.append([classes, row, *columns[:2], *figured, columns[2]])
    return rows


def measure(cell: dict, arrays: dict) -> dict:
    set_seed(cell["seed"])
    images, labels = task(arrays, "train", cell["classes"], cell["rows"])
    network = LeakyConvNetForImageClassification(LeakyConvNetConfig(num_labels=cell["classes"]))
    head = [n for n, p in network.named_parameters() if len(p) == cell["classes"]]
    start = copy.deepcopy(network)
    rows = [{"pixel_values": x, "labels": int(y)} for x, y in zip(images, labels, strict=True)]
    protect = {} if cell["epsilon"] is None else {"protect_labels": "randomized_response"}
    with tempfile.TemporaryDirectory() as folder:
        args = GradGuardConfig(
            folder, defense="none", per_device_train_batch_size=cell["batch"], num_train_epochs=1,
            learning_rate=1e-3, lr_scheduler_type="constant", weight_decay=0.0, seed=cell["seed"],
            save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True,
            use_cpu=True, withhold=head if cell["withhold"] else None, noise_seed=cell["seed"],
            label_epsilon=cell["epsilon"], **protect,
        )  # fmt: skip
        trainer = GradGuardTrainer(network, args, train_dataset=rows)
        trainer.train()
    shared = [trainer.train_dataset[place] for place in range(cell["messages"])]
    withheld = head if cell["withhold"] else []
    with torch.no_grad():
        pixels, truth = task(arrays, "test", cell["classes"], None)
        found = [network.eval()(pixel_values=some).logits.argmax(1) for some in pixels.split(500)]
    return {
        "before": read(start.eval(), shared, labels, withheld),
        "after": read(network, shared, labels, withheld),
        "accuracy": float((torch.cat(found) == truth).float().mean()),
    }


def task(arrays: dict, split: str, classes: int, rows: int | None) -> tuple:
    images = arrays[f"x_{split}"][:rows, None].float() / 255
    digits = arrays[f"y_{split}"][:rows].long()
    if classes == 2:
        return images, (digits >= 5).long()
    inverted = torch.arange(len(images)) % 2 == 1
    return torch.where(inverted.view(-1, 1, 1, 1), 1 - images, images), digits + 10 * inverted


def read(network, shared: list[dict], labels, withheld: list[str]) -> float:
    """The share of true labels that an attack finds in messages of one."""
    right = 0
    for row, truth in zip(shared, labels.tolist(), strict=False):
        pixels, label = row["pixel_values"][None], torch.tensor([row["labels"]])
        batch = {"pixel_values": pixels, "labels": label}
        gmap = GradientMap(network, batch, withhold=withheld, second_order=False)
        seen = Observation(model=network, gradient=gmap.gradient(), input_shape=(*pixels.shape,))
        attack = recover_labels_below if withheld else recover_labels
        right += attack(seen).tolist() == [truth]
    return right / len(shared)


def _row(epsilon: float | None) -> str:
    return "unprotected" if epsilon is None else f"ε = {epsilon:g}"
