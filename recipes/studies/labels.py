"""What protects labels, and what it costs."""

import copy
import tempfile

import torch
from transformers import set_seed

from hf_gradguard import GradGuardConfig, GradGuardTrainer, GradientMap
from hf_gradguard.attacks import Observation, recover_labels, recover_labels_below
from hf_gradguard.training.privacy.labels import keep_probability
from recipes.small_networks import LeakyConvNetConfig, LeakyConvNetForImageClassification

from ..study import Study
from .lib.images import array_images, predicted_classes
from .lib.tables import interval, write_table

WITHHELD = "head withheld"


class Labels(Study):
    """Labels found in messages of one image, with and without protection, and test accuracy.

    Conditions and figures: docs/findings/attacks_images.md.
    """

    ARGUMENTS = {"--data": "npz with x_train, y_train, x_test, y_test in uint8"}
    EPSILONS = {"unprotected": None} | {f"ε = {e:g}": e for e in (4.0, 2.0, 1.0, 0.1)}

    def cells(self) -> dict:
        sizes = {"rows": 15_000, "batch": 128, "messages": 200}
        if self.quick:
            sizes = {"rows": 64, "batch": 8, "messages": 2}
        return {
            (str(classes), row, str(seed)): {
                "classes": classes, "epsilon": epsilon, "withhold": row == WITHHELD, "seed": seed,
                **sizes,
            }
            for classes in (2, 20)
            for row, epsilon in (self.EPSILONS | {WITHHELD: None}).items()
            for seed in range(1 if self.quick else 3)
        }  # fmt: skip

    def load(self) -> None:
        torch.set_num_threads(1)

    def task(self, split: str, classes: int, rows: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        pixels, digits = array_images(self.args.data, split, rows)
        images = pixels.float() / 255
        if classes == 2:
            return images, (digits >= 5).long()
        inverted = torch.arange(len(images)) % 2 == 1
        images = torch.where(inverted.view(-1, 1, 1, 1), 1 - images, images)
        return images, digits + 10 * inverted

    def measure(self, cell: dict) -> dict:
        set_seed(cell["seed"])
        classes = cell["classes"]
        images, labels = self.task("train", classes, cell["rows"])
        network = LeakyConvNetForImageClassification(LeakyConvNetConfig(num_labels=classes))
        head = [name for name, p in network.named_parameters() if len(p) == classes]
        withheld = head if cell["withhold"] else []
        start = copy.deepcopy(network)
        rows = [{"pixel_values": x, "labels": int(y)} for x, y in zip(images, labels, strict=True)]
        protect = {} if cell["epsilon"] is None else {"protect_labels": "randomized_response"}
        with tempfile.TemporaryDirectory() as folder:
            args = GradGuardConfig(
                folder, defense="none", per_device_train_batch_size=cell["batch"],
                num_train_epochs=1, learning_rate=1e-3, lr_scheduler_type="constant",
                weight_decay=0.0, seed=cell["seed"], save_strategy="no", logging_strategy="no",
                report_to="none", disable_tqdm=True, use_cpu=True, withhold=withheld or None,
                noise_seed=cell["seed"], label_epsilon=cell["epsilon"], **protect,
            )  # fmt: skip
            trainer = GradGuardTrainer(network, args, train_dataset=rows)
            trainer.train()
        shared = [trainer.train_dataset[place] for place in range(cell["messages"])]
        pixels, truth = self.task("test", classes, None)
        right = predicted_classes(network.eval(), pixels) == truth
        return {
            "before": recovered_share(start.eval(), shared, labels, withheld),
            "after": recovered_share(network, shared, labels, withheld),
            "accuracy": float(right.float().mean()),
        }

    def report(self, metrics: dict) -> None:
        rows = []
        for classes, defenses in metrics.items():
            for row, runs in defenses.items():
                found_before, found_after, accuracy = (
                    interval([run[name] for run in runs.values()])
                    for name in ("before", "after", "accuracy")
                )
                epsilon = self.EPSILONS.get(row)
                bound = 1.0 if epsilon is None else keep_probability(epsilon, int(classes))
                chance = [f"{bound:.3f}", f"{1 / int(classes):.3f}"]
                rows.append([classes, row, found_before, found_after, *chance, accuracy])
        header = ["classes", "", "labels found before training", "after training", "bound"]
        write_table(self.output, [*header, "chance", "test accuracy"], rows)


def recovered_share(network, shared: list[dict], labels, withheld: list[str]) -> float:
    """The share of true labels that an attack recovers from messages of one."""
    attack, right = recover_labels_below if withheld else recover_labels, 0
    for row, truth in zip(shared, labels.tolist(), strict=False):
        pixels, label = row["pixel_values"][None], torch.tensor([row["labels"]])
        batch = {"pixel_values": pixels, "labels": label}
        gmap = GradientMap(network, batch, withhold=withheld, second_order=False)
        observation = Observation(network, gmap.gradient(), input_shape=(*pixels.shape,))
        right += attack(observation).tolist() == [truth]
    return right / len(shared)
