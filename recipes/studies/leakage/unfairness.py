r"""The same noise protects some samples and classes and not others: Zhang et al. (2023), Figure 7.

    python -m recipes.studies.leakage.run unfairness --mnist MNIST.npz \
        --output docs/results/influence_unfairness

The leakage papers' LeNet, trained on MNIST, and single test images' gradients with Gaussian noise
of variance 1e-3. Label known, DLG by L-BFGS, pixels clipped to their range. Beside the realized
MSE: E I² = σ² Σ 1/λ (Eq. 6; eigenvalues below 1e-6 λ_max, where float32 ends, count as that), and
λ_max. A quarter of an hour of one core.
"""

import functools

import numpy as np
import torch
from scipy.stats import kruskal, spearmanr
from torch import Tensor

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.leakage import smallest_directions
from hf_gradguard.randomness import Stream
from recipes.small_networks import LeakageLeNetForImageClassification

from ..lib.images import single_images
from ..lib.tables import plt, save, write_table
from .settings import QUICK_UNFAIR, UNFAIR
from .training import accuracy, stages

ARGUMENTS = {
    "--mnist": "npz with x_train, y_train, x_test and y_test",
    "--pictures": {"help": "PNG of the best and worst guesses; holds images of the data set"},
}


def cells(args) -> dict:
    plan = QUICK_UNFAIR if args.quick else UNFAIR
    trained = {name: plan[name] for name in ("side", "training_steps")}
    found = {("accuracy",): {"measure": "accuracy", **trained}}
    for number in range(10 * plan["per_class"]):
        label, image = divmod(number, plan["per_class"])
        one = {"class": label, "image": image, "variance": plan["variance"], **trained}
        attack = {"measure": "mse", **one, "steps": plan["steps"], "seed": number}
        found["attacked", str(number)] = attack
        found["spectra", str(number)] = {"measure": "spectrum", **one}
    return found


@functools.cache
def images(path: str, side: int) -> list[dict[str, Tensor]]:
    return single_images(path, None, side, split="test")


def chosen(cell: dict, tests: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The cell's image: the first of its class, the second, and so on."""
    mine = [batch for batch in tests if int(batch["labels"]) == cell["class"]]
    return mine[cell["image"]]


def prepare(args):
    def measure(cell: dict):
        tests = images(args.mnist, cell["side"])
        model = trained(args.mnist, cell["side"], cell["training_steps"])
        if cell["measure"] == "accuracy":
            whole = (torch.cat([one[name] for one in tests]) for name in ("pixel_values", "labels"))
            return accuracy(model, *whole)
        batch = chosen(cell, tests)
        if cell["measure"] == "spectrum":
            return spectrum(cell, model, batch)
        return score(batch, attacked(cell, model, batch))

    return measure


def report(figures: dict, args) -> None:
    plan = QUICK_UNFAIR if args.quick else UNFAIR
    write_table(args.output, ["", "found"], table(figures))
    plot(figures, plan, args.output)
    if args.pictures:
        mse = np.array([one["mse"] for one in figures["attacked"].values()])
        ends = [*mse.argsort()[:4], *mse.argsort()[-4:]]
        wanted = [cells(args)["attacked", str(number)] for number in ends]
        tests = images(args.mnist, plan["side"])
        model = trained(args.mnist, plan["side"], plan["training_steps"])
        batches = [chosen(cell, tests) for cell in wanted]
        pairs = zip(wanted, batches, strict=True)
        guesses = [attacked(cell, model, batch) for cell, batch in pairs]
        show(args.pictures, mse[ends], [batch["pixel_values"] for batch in batches], guesses)


@functools.cache  # only where figures are missing
def trained(path: str, side: int, steps: int) -> LeakageLeNetForImageClassification:
    with np.load(path) as file:
        x, y = torch.from_numpy(file["x_train"])[:, None, :side, :side], file["y_train"]
    return stages(x, torch.from_numpy(y).long(), [steps])[steps]


def attacked(cell: dict, model, batch: dict[str, Tensor]) -> Tensor:
    """What DLG makes of the noisy gradient."""
    noise = make_defense("gaussian_noise", scale=cell["variance"] ** 0.5)
    shared = noise(GradientMap(model, batch), generator=Stream.from_seeds(cell["seed"]))
    seen = Observation(model, shared, tuple(batch["pixel_values"].shape), labels=batch["labels"])
    dlg = make_attack("dlg", steps=cell["steps"], start="uniform", patience=5)
    return dlg(seen, torch.Generator().manual_seed(cell["seed"])).input.clamp(0, 1)


def score(batch: dict[str, Tensor], guess: Tensor) -> dict:
    mse = (guess - batch["pixel_values"]).square().mean()
    return {"label": int(batch["labels"]), "mse": round(float(mse), 4)}


def spectrum(cell: dict, model, batch: dict[str, Tensor]) -> dict[str, float]:
    values = smallest_directions(
        GradientMap(model, batch), batch["pixel_values"].numel()
    ).eigenvalues.double()
    expected = cell["variance"] * (1 / values.clamp_min(1e-6 * float(values[-1]))).sum()
    return {
        key: float(f"{float(value):.6g}")
        for key, value in (("E I²", expected), ("λ_max", values[-1]))
    }


def by_class(figures: dict) -> dict[int, list[float]]:
    points = figures["attacked"].values()
    return {
        label: [p["mse"] for p in points if p["label"] == label]
        for label in sorted({p["label"] for p in points})
    }


def table(figures: dict) -> list[list[str]]:
    classes = by_class(figures)
    of_all = [one["mse"] for one in figures["attacked"].values()]
    mse = np.concatenate(list(classes.values()))
    means = [np.mean(values) for values in classes.values()]
    between = sum(
        len(v) * (m - mse.mean()) ** 2 for v, m in zip(classes.values(), means, strict=True)
    )
    low, middle, high = np.quantile(mse, (0.05, 0.5, 0.95))
    rows = [
        ["test accuracy", f"{figures['accuracy']:.1%}"],
        ["MSE: mean", f"{mse.mean():.2f}"],
        ["quantiles 5, 50, 95 %", f"{low:.2f}, {middle:.2f}, {high:.2f}"],
        ["samples below half the mean", f"{(mse < mse.mean() / 2).sum()} of {len(mse)}"],
        ["means of classes", f"{min(means):.2f} to {max(means):.2f}"],
        [
            "share of the variance between classes",
            f"{between / np.square(mse - mse.mean()).sum():.0%}",
        ],
        ["p that classes are alike (Kruskal-Wallis)", f"{kruskal(*classes.values()).pvalue:.2f}"],
    ]
    for key in ("E I²", "λ_max"):
        values = [one[key] for one in figures["spectra"].values()]
        rank = round(float(spearmanr(of_all, values).statistic), 3)
        rows.append([f"Spearman of MSE and {key}", f"{rank:.2f}"])
    return rows


def plot(figures: dict, plan: dict, output) -> None:
    classes = by_class(figures)
    mse = np.concatenate(list(classes.values()))
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.5), layout="constrained")
    figure.suptitle(f"noise of variance {plan['variance']:g}")
    left.hist(mse, bins=20)
    left.axvline(mse.mean(), color="purple")
    left.set(xlabel="MSE", ylabel="samples")
    right.boxplot(list(classes.values()), tick_labels=list(classes))
    right.axhline(mse.mean(), color="purple")
    right.set(xlabel="class", ylabel="MSE")
    save(figure, output, dpi=80)


def show(path: str, mse: np.ndarray, images: list[Tensor], guesses: list[Tensor]) -> None:
    """Originals over reconstructions, the four best and the four worst."""
    figure, axes = plt.subplots(2, len(mse), figsize=(8, 2.2), layout="constrained")
    for axis, picture in zip(axes.flat, [*images, *guesses], strict=True):
        axis.imshow(picture[0, 0], cmap="gray", vmin=0, vmax=1)
        axis.axis("off")
    for axis, one in zip(axes[1], mse, strict=True):
        axis.set_title(f"{one:.2g}", fontsize=8)
    figure.savefig(path, dpi=80)
