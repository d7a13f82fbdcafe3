r"""Whether gradients leak less as training goes on: Zhang et al. (2023), Figure 18.

    python -m recipes.studies.leakage.run epochs --mnist MNIST.npz --cifar10 LOSSLESS.npz \
        --train TRAIN.parquet --output docs/results/influence_epochs

The leakage papers' LeNet, trained on MNIST and on CIFAR-10, and kept after some epochs. At each,
single images' gradients with Gaussian noise: of variance 1e-3, as in the paper, and of a fixed
multiple of the gradient. Labels known; DLG by L-BFGS, and Inverting Gradients by L-BFGS, which
smooths as shows most of two images of its own. Beside their RMSE, pixels clipped to their range:
I_lb/√m of the same noise, the gradient's norm, and the noise's as a multiple of it. Images: of
MNIST's test set; of CIFAR-10 lossless ones, which are among those trained on, recompressed. Half an
hour of one core.
"""

import functools

import numpy as np
import torch
from torch import Tensor

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.defenses.message import norm
from hf_gradguard.leakage import inversion_influence_lower_bound
from hf_gradguard.randomness import Stream

from ..lib.attacks import attack_of
from ..lib.images import INVERTING, SINGLE_IMAGES, parquet_images, single_images, smoothed
from ..lib.tables import bracketed, interval, plt, save, write_table
from .settings import EPOCHS, NOISES, QUICK_EPOCHS
from .training import accuracy, stages

ARGUMENTS = SINGLE_IMAGES | {"--train": "CIFAR-10 as a parquet with img and label, to train on"}
MNIST, CIFAR10 = "MNIST", "CIFAR-10"
ATTACKS = {"dlg": "RMSE, DLG", "inverting_gradients": "RMSE, Inverting Gradients"}
SCORES = {"bound": "I_lb/√m", **ATTACKS}
BATCH = 64


def cells(args) -> dict:
    settings = dict(QUICK_EPOCHS if args.quick else EPOCHS)
    epochs = settings.pop("epochs")
    return {
        (data, noise, str(epoch)): {
            "data": data, "epoch": epoch, "of": epochs, "strength": strength, **settings,
        }
        for data in (MNIST, CIFAR10)
        for noise, strength in NOISES.items()
        for epoch in epochs
    }  # fmt: skip


def prepare(args):
    @functools.cache
    def trained(data: str, epochs: tuple[int, ...], limit: int) -> tuple[dict, Tensor, Tensor]:
        """The model after every one of the epochs, and what it learned from."""
        if data == MNIST:
            with np.load(args.mnist) as file:
                x, y = file["x_train"][:limit, None], file["y_train"][:limit]
            pixels, labels = torch.from_numpy(x), torch.from_numpy(y).long()
        else:
            pixels, labels = (tensor[:limit] for tensor in parquet_images(args.train))
        steps = {epoch: -(-epoch * len(pixels) // BATCH) for epoch in epochs}
        kept = stages(pixels, labels, list(steps.values()))
        return {epoch: kept[step] for epoch, step in steps.items()}, pixels, labels

    @functools.cache
    def attacked_images(data: str, count: int) -> list[dict[str, Tensor]]:
        if data == MNIST:
            return single_images(args.mnist, count, split="test")
        return single_images(args.cifar10, count)

    def measure(cell: dict) -> dict:
        models, pixels, labels = trained(cell["data"], tuple(cell["of"]), cell["learned_from"])
        model = models[cell["epoch"]]
        right = accuracy(model, pixels[:10000].float() / 255, labels[:10000])
        images = attacked_images(cell["data"], cell["samples"] + cell["own"])
        return {"accuracy": round(right, 4), **attacked(cell, model, images)}

    return measure


def attacked(cell: dict, model, batches: list[dict[str, Tensor]]) -> dict[str, list[float]]:
    """Figures of each image; the last `own` are the attacker's."""
    noise, count = make_defense("gaussian_noise", **cell["strength"]), cell["samples"]
    figures: dict[str, list] = {name: [] for name in ("norm", "noise", *SCORES)}
    seen = []
    for number, batch in enumerate(batches):
        gmap = GradientMap(model, batch)
        shared, gradient = noise(gmap, generator=Stream.from_seeds(number)), gmap.gradient()
        delta = {name: shared[name] - g for name, g in gradient.items()}
        shape = tuple(batch["pixel_values"].shape)
        seen.append(Observation(model, shared, shape, labels=batch["labels"]))
        if number < count:
            bound = inversion_influence_lower_bound(gmap, delta)
            figures["norm"].append(norm(gradient, None))
            figures["noise"].append(norm(delta, None) / norm(gradient, None))
            figures["bound"].append(float(bound) / bound.num_coordinates**0.5)
    images = [batch["pixel_values"] for batch in batches]
    inverting = INVERTING | {"steps": cell["steps"], "patience": 5}
    inverting |= {"total_variation": cell["total_variation"]}
    inverting = smoothed(inverting, seen[count:], images[count:])
    attacks = {
        "dlg": make_attack("dlg", steps=cell["steps"], start="uniform", patience=5),
        "inverting_gradients": attack_of("inverting_gradients", **inverting),
    }
    for name, attack in attacks.items():
        found = attack.together(seen[:count], torch.Generator().manual_seed(0))
        for one, image in zip(found, images[:count], strict=True):
            guess = one.input.nan_to_num(0.5).clamp(0, 1)
            figures[name].append(float((guess - image).square().mean().sqrt()))
    return {name: [float(f"{one:.4g}") for one in some] for name, some in figures.items()}


def report(figures: dict, args) -> None:
    rows = []
    for data, noises in figures.items():
        for noise, epochs in noises.items():
            for epoch, one in epochs.items():
                rows.append([data, noise, epoch, f"{one['accuracy']:.3f}", *_shown(one)])
            first, *_, last = epochs.values()
            ratio = np.median(np.divide(last["bound"], first["bound"]))
            less = [interval(np.subtract(last[name], first[name]).tolist(), 2) for name in ATTACKS]
            rows.append([data, noise, "last less first", "", "", "", f"times {ratio:.2g}", *less])
    header = ["", "noise", "epochs", "accuracy (train)", "gradient's norm", "noise, times that"]
    write_table(args.output, [*header, *SCORES.values()], rows)
    plot(figures, args.output)


def _shown(one: dict) -> list[str]:
    """Medians, of the bound with the least and the largest; means."""
    norms = [f"{np.median(one[name]):.2g}" for name in ("norm", "noise")]
    bound = bracketed(np.quantile(one["bound"], (0.5, 0, 1)).tolist(), ".2g")
    return [*norms, bound, *(interval(one[name], 2) for name in ATTACKS)]


def plot(figures: dict, output) -> None:
    """A column a score, a row a data set, a line an image."""
    picture, panels = plt.subplots(
        len(figures), len(SCORES), figsize=(11, 6), layout="constrained", squeeze=False
    )
    colors = dict(zip(NOISES, ("tab:blue", "tab:orange"), strict=True))
    for (data, noises), axes in zip(figures.items(), panels, strict=True):
        for (score, title), axis in zip(SCORES.items(), axes, strict=True):
            for noise, epochs in noises.items():
                values = np.array([one[score] for one in epochs.values()])
                axis.plot(list(epochs), values, color=colors[noise], alpha=0.2, linewidth=0.7)
                axis.plot(
                    list(epochs), np.median(values, 1), "o-", color=colors[noise], label=noise
                )
            axis.set(title=f"{data}: {title}", xlabel="epochs")
            if score == "bound":
                axis.set_yscale("log")
    panels[0, 0].legend(title="noise", fontsize=8)
    save(picture, output, dpi=80)
