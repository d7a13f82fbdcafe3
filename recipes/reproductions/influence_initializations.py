"""Four initializations under the same noise: Zhang et al. (2023), Figures 5 and 8.

    python recipes/reproductions/influence_initializations.py --mnist MNIST.npz \
        --cifar10 LOSSLESS.npz --output docs/results/influence_initializations

The leakage papers' LeNet before training, with weights and biases uniform in ±0.5 or normal of
variance 0.5, or weights after Kaiming or Xavier (uniform, PyTorch's defaults) and no biases; new
weights for every image, one image a gradient, label known, Gaussian noise of one variance for all,
DLG by L-BFGS, pixels clipped to their range. Beside the MSE: the eigenvalues of J Jᵀ, drawn for the
first image, and the norm of the gradient, which one noise drowns or does not.
"""

from pathlib import Path

import matplotlib
import numpy as np
import torch
from lenet import lenet_for, parser_of_images, single_images
from reporting import Results, named, write_table
from scipy.stats import wilcoxon
from torch import Tensor, nn
from transformers import set_seed

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.leakage import largest_eigenvalue, smallest_directions

matplotlib.use("agg")
from matplotlib import pyplot as plt

PLAN = {"samples": 6, "side": 32, "variance": 1e-4, "steps": 60}
QUICK = {"samples": 2, "side": 6, "variance": 1e-4, "steps": 1}
INITIALIZATIONS = {
    "uniform ±0.5": lambda p: nn.init.uniform_(p, -0.5, 0.5),
    "normal, variance 0.5": lambda p: nn.init.normal_(p, 0, 0.5**0.5),
    "Kaiming": lambda p: nn.init.kaiming_uniform_(p) if p.dim() > 1 else nn.init.zeros_(p),
    "Xavier": lambda p: nn.init.xavier_uniform_(p) if p.dim() > 1 else nn.init.zeros_(p),
}
SPECTRUM = 100  # eigenvalues kept to be drawn


def main() -> None:
    args = parser_of_images(__doc__).parse_args()
    plan = QUICK if args.quick else PLAN
    results = Results(args.output, plan)
    for data, path in (("MNIST", args.mnist), ("CIFAR-10", args.cifar10)):
        batches = single_images(path, plan["samples"], plan["side"])
        for name in INITIALIZATIONS:
            results.get(("attacked", data, name), attacked, plan, name, batches)
            results.get(("spectrum", data, name), spectrum, name, batches[0])
    write_table(
        args.output,
        ["", *INITIALIZATIONS, "uniform below Xavier"],
        table(results.figures["attacked"]),
    )
    plot(results.figures, plan, named(args.output, ".png"))


def started(name: str, sample: int, batch: dict[str, Tensor]) -> nn.Module:
    """The weights that this sample gets."""
    set_seed(sample)
    model = lenet_for(batch)
    for parameter in model.parameters():
        INITIALIZATIONS[name](parameter.data)
    return model


def attacked(plan: dict, name: str, batches: list[dict[str, Tensor]]) -> dict:
    noise = make_defense("gaussian_noise", scale=plan["variance"] ** 0.5)
    dlg = make_attack("dlg", steps=plan["steps"], start="uniform", patience=5)
    mse, norms, largest = [], [], []
    for sample, batch in enumerate(batches):
        image, model = batch["pixel_values"], started(name, sample, batch)
        gmap = GradientMap(model, batch)
        shared = noise(gmap, generator=torch.Generator().manual_seed(sample))
        seen = Observation(model, shared, tuple(image.shape), labels=batch["labels"])
        found = dlg(seen, torch.Generator().manual_seed(sample))
        mse.append(rounded((found.input.clamp(0, 1) - image).square().mean()))
        norms.append(float(torch.cat([g.flatten() for g in gmap.gradient().values()]).norm()))
        largest.append(float(largest_eigenvalue(gmap)))
    return {
        "mse": mse,
        "median norm of the gradient": rounded(np.median(norms)),
        "median λ_max": rounded(np.median(largest)),
    }


def spectrum(name: str, batch: dict[str, Tensor]) -> dict[int, float]:
    """Eigenvalues of J Jᵀ by their rank."""
    m = batch["pixel_values"].numel()
    values = (
        smallest_directions(GradientMap(started(name, 0, batch), batch), m)
        .eigenvalues.flip(0)
        .clamp_min(1e-12)
    )
    ranks = np.unique(np.linspace(0, m - 1, SPECTRUM).round().astype(int))
    return {int(at) + 1: rounded(values[at]) for at in ranks}


def rounded(value: float | Tensor) -> float:
    return float(f"{float(value):.3g}")


def table(figures: dict) -> list[list[str]]:
    rows = []
    for data, found in figures.items():
        mse = [np.array(row["mse"]) for row in found.values()]
        below = (
            f"{(mse[0] < mse[3]).sum()} of {len(mse[0])}, p = {wilcoxon(mse[0], mse[3]).pvalue:.2f}"
        )
        spread = [f"{one.mean():.3f} ({one.min():.3f} to {one.max():.3f})" for one in mse]
        rows.append([f"{data}, MSE: mean, range", *spread, below])
        for key in ("median λ_max", "median norm of the gradient"):
            rows.append(
                [
                    f"{data}, {key}",
                    *(
                        f"{row[key]:,.0f}" if row[key] >= 100 else f"{row[key]:.2g}"
                        for row in found.values()
                    ),
                    "",
                ]
            )
    return rows


def plot(figures: dict, plan: dict, path: Path) -> None:
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for (data, found), (left, right) in zip(figures["attacked"].items(), axes, strict=True):
        for name, values in figures["spectrum"][data].items():
            left.plot([int(at) for at in values], list(values.values()), label=name)
        left.set(
            yscale="log",
            xlabel="rank",
            ylabel="eigenvalue of J Jᵀ",
            title=f"{data}: the first image",
        )
        left.legend()
        right.boxplot(
            [row["mse"] for row in found.values()],
            tick_labels=[name.split()[0].strip(",") for name in found],
        )
        right.set(
            yscale="log",
            ylabel="MSE of DLG",
            title=f"{data}: noise of variance {plan['variance']:g}",
        )
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
