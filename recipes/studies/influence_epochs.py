"""LeNet as it is trained: whether gradients leak less as training goes on, and of whom."""

import copy
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy.stats import kruskal, spearmanr
from torch import Tensor, nn
from transformers import set_seed
from transformers.utils import logging

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import make_attack
from hf_gradguard.defenses.base import norm
from hf_gradguard.leakage import inversion_influence_lower_bound, smallest_directions
from hf_gradguard.randomness import Stream
from recipes.small_networks import LeakageLeNetForImageClassification

from ..study import Study
from .influence import invert_dlg
from .lib.attacks import attack_of, observe
from .lib.defenses import with_own_strength
from .lib.images import (
    INVERTING,
    SINGLE_IMAGES,
    array_images,
    lenet_for,
    parquet_images,
    single_images,
    smoothed,
)
from .lib.tables import bracketed, interval, plt, save, significant, write_table
from .lib.training import learn

BATCH = 64


def stages(
    x: Tensor, labels: Tensor, steps: Sequence[int]
) -> dict[int, LeakageLeNetForImageClassification]:
    """The model after so many steps of Adam on 64 images each, at a rate that falls from 3e-3 to 0
    at the last one.

    Args:
        x: `(N, C, H, W)` in uint8.
        labels: `(N,)`.
        steps: After which it is kept, in rising order.
    """
    set_seed(0)
    model, last_step, models = lenet_for({"pixel_values": x}).train(), steps[-1], {}
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / max(last_step, 1))
    for step in logging.tqdm(range(last_step + 1), desc="training"):
        if step in steps:
            models[step] = copy.deepcopy(model).eval()
        if step < last_step:
            rows = torch.randint(len(x), (BATCH,))
            learn(model, optimizer, {"pixel_values": x[rows].float() / 255, "labels": labels[rows]})
            decay.step()
    return models


@torch.no_grad()
def logits_of(model: nn.Module, pixels: Tensor) -> Tensor:
    """`(N, classes)`, of images in [0, 1]."""
    return torch.cat([model(pixel_values=chunk).logits for chunk in pixels.split(1000)])


def accuracy(model: nn.Module, pixels: Tensor, labels: Tensor) -> float:
    """Of images in [0, 1]."""
    return float((logits_of(model, pixels).argmax(1) == labels).double().mean())


@functools.cache
def trained_lenet(path: str, side: int, steps: int) -> LeakageLeNetForImageClassification:
    """On MNIST, cut to `side` pixels."""
    pixels, labels = array_images(path)
    return stages(pixels[..., :side, :side], labels, [steps])[steps]


class Epochs(Study):
    """Whether gradients leak less as training goes on: Zhang et al. (2023), Figure 18.

    Conditions and figures: docs/findings/estimators.md.
    """

    ARGUMENTS = SINGLE_IMAGES | {"--train": "CIFAR-10 as a parquet with img and label, to train on"}
    ATTACKS = {"dlg": "RMSE, DLG", "inverting_gradients": "RMSE, Inverting Gradients"}
    SCORES = {"bound": "I_lb/√m", **ATTACKS}
    NOISES = {
        "variance 1e-3": {"scale": 1e-3**0.5},
        "0.15 times the gradient": {"relative_scale": 0.15},
    }
    SETTINGS: dict[str, Any] = {
        "learned_from": 60000, "samples": 8, "own": 2, "steps": 30, "total_variation": [1e-3, 1e-1],
    }  # fmt: skip
    QUICK: dict[str, Any] = {
        "learned_from": 20, "samples": 2, "own": 1, "steps": 1, "total_variation": [1e-3, 1e-2],
    }  # fmt: skip

    def cells(self) -> dict:
        epochs = [0, 1] if self.quick else [0, 1, 5, 20]
        settings = self.QUICK if self.quick else self.SETTINGS
        return {
            (data, noise, str(epoch)): {
                "data": data, "epoch": epoch, "of": epochs, "strength": strength, **settings,
            }
            for data in ("MNIST", "CIFAR-10")
            for noise, strength in self.NOISES.items()
            for epoch in epochs
        }  # fmt: skip

    def load(self) -> None:
        self.trained = functools.cache(self._trained)

    def _trained(self, data: str, epochs: tuple[int, ...], limit: int) -> tuple:
        """The model after every one of the epochs, and what it learned from."""
        if data == "MNIST":
            pixels, labels = array_images(self.args.mnist, samples=limit)
        else:
            pixels, labels = (tensor[:limit] for tensor in parquet_images(self.args.train))
        steps = {epoch: -(-epoch * len(pixels) // BATCH) for epoch in epochs}
        models = stages(pixels, labels, list(steps.values()))
        return {epoch: models[step] for epoch, step in steps.items()}, pixels, labels

    def measure(self, cell: dict) -> dict:
        """Metrics of each image; the last `own` are the attacker's."""
        data, count = cell["data"], cell["samples"]
        models, pixels, labels = self.trained(data, tuple(cell["of"]), cell["learned_from"])
        model = models[cell["epoch"]]
        right = accuracy(model, pixels[:10000].float() / 255, labels[:10000])
        path, split = (self.args.mnist, "test") if data == "MNIST" else (self.args.cifar10, "train")
        batches = single_images(path, count + cell["own"], split=split)
        noise = make_defense("gaussian_noise", **with_own_strength(cell["strength"]))
        observations = []
        metrics: dict[str, list] = {name: [] for name in ("norm", "noise", *self.SCORES)}
        for number, batch in enumerate(batches):
            gmap = GradientMap(model, batch)
            shared, gradient = noise(gmap, generator=Stream.from_seeds(number)), gmap.gradient()
            observations.append(observe(model, batch, shared))
            if number < count:
                delta = {name: shared[name] - g for name, g in gradient.items()}
                bound = inversion_influence_lower_bound(gmap, delta)
                metrics["norm"].append(norm(gradient, None))
                metrics["noise"].append(norm(delta, None) / norm(gradient, None))
                metrics["bound"].append(float(bound) / bound.num_coordinates**0.5)
        images = [batch["pixel_values"] for batch in batches]
        inverting = INVERTING | {"steps": cell["steps"], "patience": 5}
        inverting |= {"total_variation": cell["total_variation"]}
        inverting = smoothed(inverting, observations[count:], images[count:])
        attacks = {
            "dlg": make_attack("dlg", steps=cell["steps"], start="uniform", patience=5),
            "inverting_gradients": attack_of("inverting_gradients", **inverting),
        }
        for name, attack in attacks.items():
            results = attack.reconstruct_many(
                observations[:count], torch.Generator().manual_seed(0)
            )
            for result, image in zip(results, images[:count], strict=True):
                guess = result.input.nan_to_num(0.5).clamp(0, 1)
                metrics[name].append(float((guess - image).square().mean().sqrt()))
        shown = {n: [significant(value, 4) for value in values] for n, values in metrics.items()}
        return {"accuracy": round(right, 4), **shown}

    def report(self, metrics: dict) -> None:
        rows = []
        for data, noises in metrics.items():
            for noise, epochs in noises.items():
                for epoch, cell in epochs.items():
                    # Medians, of the bound with the least and the largest; means.
                    norms = [f"{np.median(cell[name]):.2g}" for name in ("norm", "noise")]
                    bound = bracketed(np.quantile(cell["bound"], (0.5, 0, 1)).tolist(), ".2g")
                    means = [interval(cell[name], 2) for name in self.ATTACKS]
                    shown = [f"{cell['accuracy']:.3f}", *norms, bound, *means]
                    rows.append([data, noise, epoch, *shown])
                first_cell, *_, last_cell = epochs.values()
                ratio = np.median(np.divide(last_cell["bound"], first_cell["bound"]))
                differences = [
                    np.subtract(last_cell[name], first_cell[name]).tolist() for name in self.ATTACKS
                ]
                shown = [f"times {ratio:.2g}", *(interval(values, 2) for values in differences)]
                rows.append([data, noise, "last less first", "", "", "", *shown])
        header = ["", "noise", "epochs", "accuracy (train)", "gradient's norm", "noise, times that"]
        write_table(self.output, [*header, *self.SCORES.values()], rows)
        self.plot(metrics)

    def plot(self, metrics: dict) -> None:
        """A column a score, a row a data set, a line an image."""
        size = {"figsize": (11, 6), "layout": "constrained", "squeeze": False}
        picture, panels = plt.subplots(len(metrics), len(self.SCORES), **size)
        colors = dict(zip(self.NOISES, ("tab:blue", "tab:orange"), strict=True))
        for (data, noises), axes in zip(metrics.items(), panels, strict=True):
            for (score, title), axis in zip(self.SCORES.items(), axes, strict=True):
                for noise, epochs in noises.items():
                    values = np.array([cell[score] for cell in epochs.values()])
                    x, color = list(epochs), colors[noise]
                    axis.plot(x, values, color=color, alpha=0.2, linewidth=0.7)
                    axis.plot(x, np.median(values, 1), "o-", color=color, label=noise)
                axis.set(title=f"{data}: {title}", xlabel="epochs")
                if score == "bound":
                    axis.set_yscale("log")
        panels[0, 0].legend(title="noise", fontsize=8)
        save(picture, self.output, dpi=80)


class Unfairness(Study):
    """The same noise protects some samples and classes and not others: Figure 7.

    Conditions and figures: docs/findings/estimators.md.
    """

    ARGUMENTS = {"--mnist": "npz with x_train, y_train, x_test and y_test"}
    VARIANCE = 1e-3

    def cells(self) -> dict:
        per_class, side, training_steps, steps = (1, 6, 5, 1) if self.quick else (5, 28, 5000, 60)
        trained = {"side": side, "training_steps": training_steps}
        cells = {("accuracy",): {"measure": "accuracy", **trained}}
        for number in range(10 * per_class):
            label, image = divmod(number, per_class)
            common = {"class": label, "image": image, "variance": self.VARIANCE, **trained}
            attack = {"measure": "mse", **common, "steps": steps, "seed": number}
            cells["attacked", str(number)] = attack
            cells["spectra", str(number)] = {"measure": "spectrum", **common}
        return cells

    def measure(self, cell: dict) -> float | dict:
        """One image, the first of its class, the second, and so on; or the model's accuracy."""
        path, side = self.args.mnist, cell["side"]
        model = trained_lenet(path, side, cell["training_steps"])
        tests = mnist_tests(path, side)
        if cell["measure"] == "accuracy":
            return accuracy(
                model, *(torch.cat([test[n] for test in tests]) for n in ("pixel_values", "labels"))
            )
        batch = [test for test in tests if int(test["labels"]) == cell["class"]][cell["image"]]
        gmap = GradientMap(model, batch)
        if cell["measure"] == "mse":
            noise = make_defense("gaussian_noise", scale=cell["variance"] ** 0.5)
            shared = noise(gmap, generator=Stream.from_seeds(cell["seed"]))
            guess = invert_dlg(cell, model, shared, batch, cell["seed"]).clamp(0, 1)
            mse = (guess - batch["pixel_values"]).square().mean()
            return {"label": int(batch["labels"]), "mse": round(float(mse), 4)}
        values = smallest_directions(gmap, batch["pixel_values"].numel()).eigenvalues.double()
        expected = cell["variance"] * (1 / values.clamp_min(1e-6 * float(values[-1]))).sum()
        return {"E I²": significant(expected, 6), "λ_max": significant(values[-1], 6)}

    def report(self, metrics: dict) -> None:
        classes: dict[int, list[float]] = {}
        for point in sorted(metrics["attacked"].values(), key=lambda point: point["label"]):
            classes.setdefault(point["label"], []).append(point["mse"])
        mse = np.concatenate(list(classes.values()))
        self.write(metrics, classes, mse)
        figure, (histogram_axis, class_axis) = plt.subplots(
            1, 2, figsize=(8, 3.5), layout="constrained"
        )
        figure.suptitle(f"noise of variance {self.VARIANCE:g}")
        histogram_axis.hist(mse, bins=20)
        histogram_axis.axvline(mse.mean(), color="purple")
        histogram_axis.set(xlabel="MSE", ylabel="samples")
        class_axis.boxplot(list(classes.values()), tick_labels=list(classes))
        class_axis.axhline(mse.mean(), color="purple")
        class_axis.set(xlabel="class", ylabel="MSE")
        save(figure, self.output, dpi=80)

    def write(self, metrics: dict, classes: dict[int, list[float]], mse: np.ndarray) -> None:
        means = [np.mean(values) for values in classes.values()]
        pairs = zip(classes.values(), means, strict=True)
        between = sum(len(v) * (m - mse.mean()) ** 2 for v, m in pairs)
        low, middle, high = np.quantile(mse, (0.05, 0.5, 0.95))
        share = between / np.square(mse - mse.mean()).sum()
        rows = [
            ["test accuracy", f"{metrics['accuracy']:.1%}"],
            ["MSE: mean", f"{mse.mean():.2f}"],
            ["quantiles 5, 50, 95 %", f"{low:.2f}, {middle:.2f}, {high:.2f}"],
            ["samples below half the mean", f"{(mse < mse.mean() / 2).sum()} of {len(mse)}"],
            ["means of classes", f"{min(means):.2f} to {max(means):.2f}"],
            ["share of the variance between classes", f"{share:.0%}"],
            ["p that classes are alike (Kruskal-Wallis)",
             f"{kruskal(*classes.values()).pvalue:.2f}"],
        ]  # fmt: skip
        of_all = [point["mse"] for point in metrics["attacked"].values()]
        for key in ("E I²", "λ_max"):
            values = [spectrum[key] for spectrum in metrics["spectra"].values()]
            correlation = round(float(spearmanr(of_all, values).statistic), 3)
            rows.append([f"Spearman of MSE and {key}", f"{correlation:.2f}"])
        write_table(self.output, ["", "found"], rows)


@functools.cache
def mnist_tests(path: str, side: int) -> list[dict[str, Tensor]]:
    return single_images(path, None, side, split="test")
