"""The same noise protects some samples and classes and not others: Zhang et al. (2023), Figure 7.

    python recipes/reproductions/influence_unfairness.py --mnist MNIST.npz \
        --output docs/results/influence_unfairness

The leakage papers' LeNet, trained on MNIST, and single test images' gradients with Gaussian noise
of variance 1e-3. Label known, DLG by L-BFGS, pixels clipped to their range. Beside the realized
MSE: E I² = σ² Σ 1/λ (Eq. 6; eigenvalues below 1e-6 λ_max, where float32 ends, count as that), and
λ_max.
"""

import functools
from pathlib import Path

import matplotlib
import numpy as np
import torch
from lenet import lenet_for, single_images
from reporting import Results, named, parser_of, write_table
from scipy.stats import kruskal, spearmanr
from torch import Tensor
from transformers import set_seed
from transformers.utils import logging

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.leakage import smallest_directions
from hf_gradguard.models import LeakageLeNetForImageClassification

matplotlib.use("agg")
from matplotlib import pyplot as plt

PLAN = {"per_class": 5, "side": 28, "variance": 1e-3, "training_steps": 5000, "steps": 60}
QUICK = {"per_class": 1, "side": 8, "variance": 1e-3, "training_steps": 5, "steps": 3}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--mnist", required=True, help="npz with x_train, y_train, x_test and y_test"
    )
    parser.add_argument(
        "--pictures", help="PNG of the best and worst reconstructions; holds images of the data set"
    )
    args = parser.parse_args()
    plan = QUICK if args.quick else PLAN
    results = Results(args.output, plan)
    tests = single_images(args.mnist, None, plan["side"], split="test")
    labels = [int(batch["labels"]) for batch in tests]
    chosen = [
        [at for at, one in enumerate(labels) if one == label][: plan["per_class"]]
        for label in range(10)
    ]
    batches = [tests[at] for ats in chosen for at in ats]
    model = functools.cache(lambda: trained(plan, args.mnist))  # only where figures are missing

    results.get(("accuracy",), lambda: accuracy(model(), tests))
    for number, batch in enumerate(batches):
        results.get(
            ("attacked", str(number)),
            lambda n, b: score(b, attacked(plan, model(), n, b)),
            number,
            batch,
        )
    mse = np.array(
        [results.figures["attacked"][str(number)]["mse"] for number in range(len(batches))]
    )

    def correlations() -> dict[str, float]:
        spectra = [
            results.get(("spectra", str(n)), spectrum, plan, model(), batch)
            for n, batch in enumerate(batches)
        ]
        return {
            key: round(float(spearmanr(mse, [one[key] for one in spectra]).statistic), 3)
            for key in spectra[0]
        }

    results.get(("Spearman of MSE and",), correlations)
    write_table(args.output, ["", "found"], table(results.figures))
    plot(results.figures, plan, named(args.output, ".png"))
    if args.pictures:
        ends = [*mse.argsort()[:4], *mse.argsort()[-4:]]
        guesses = [attacked(plan, model(), int(n), batches[n]) for n in ends]
        show(args.pictures, mse[ends], [batches[n]["pixel_values"] for n in ends], guesses)


def trained(plan: dict, path: str) -> LeakageLeNetForImageClassification:
    with np.load(path) as file:
        x, y = (
            torch.from_numpy(file["x_train"])[:, None, : plan["side"], : plan["side"]],
            file["y_train"],
        )
    set_seed(0)
    model, y = lenet_for({"pixel_values": x}).train(), torch.from_numpy(y).long()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    decay = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1 - step / plan["training_steps"]
    )
    for _ in logging.tqdm(range(plan["training_steps"]), desc="training"):
        batch = torch.randint(len(x), (64,))
        optimizer.zero_grad()
        model(pixel_values=x[batch].float() / 255, labels=y[batch]).loss.backward()
        optimizer.step()
        decay.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: LeakageLeNetForImageClassification, tests: list[dict[str, Tensor]]) -> float:
    images, labels = (
        torch.cat([batch[name] for batch in tests]) for name in ("pixel_values", "labels")
    )
    guesses = torch.cat([model(pixel_values=part).logits.argmax(1) for part in images.split(1000)])
    return float((guesses == labels).double().mean())


def attacked(plan: dict, model, number: int, batch: dict[str, Tensor]) -> Tensor:
    """What DLG makes of the noisy gradient."""
    noise = make_defense("gaussian_noise", scale=plan["variance"] ** 0.5)
    shared = noise(GradientMap(model, batch), generator=torch.Generator().manual_seed(number))
    seen = Observation(model, shared, tuple(batch["pixel_values"].shape), labels=batch["labels"])
    dlg = make_attack("dlg", steps=plan["steps"], start="uniform", patience=5)
    return dlg(seen, torch.Generator().manual_seed(number)).input.clamp(0, 1)


def score(batch: dict[str, Tensor], guess: Tensor) -> dict:
    mse = (guess - batch["pixel_values"]).square().mean()
    return {"label": int(batch["labels"]), "mse": round(float(mse), 4)}


def spectrum(plan: dict, model, batch: dict[str, Tensor]) -> dict[str, float]:
    values = smallest_directions(
        GradientMap(model, batch), batch["pixel_values"].numel()
    ).eigenvalues.double()
    expected = plan["variance"] * (1 / values.clamp_min(1e-6 * float(values[-1]))).sum()
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
    mse, means = (
        np.concatenate(list(classes.values())),
        [np.mean(values) for values in classes.values()],
    )
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
    return rows + [
        [f"Spearman of MSE and {key}", f"{rank:.2f}"]
        for key, rank in figures["Spearman of MSE and"].items()
    ]


def plot(figures: dict, plan: dict, path: Path) -> None:
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
    figure.savefig(path, dpi=80)


def show(path: str, mse: np.ndarray, images: list[Tensor], guesses: list[Tensor]) -> None:
    """Originals over reconstructions, the four best and the four worst."""
    figure, axes = plt.subplots(2, len(mse), figsize=(8, 2.2), layout="constrained")
    for axis, picture in zip(axes.flat, [*images, *guesses], strict=True):
        axis.imshow(picture[0, 0], cmap="gray", vmin=0, vmax=1)
        axis.axis("off")
    for axis, one in zip(axes[1], mse, strict=True):
        axis.set_title(f"{one:.2g}", fontsize=8)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
