r"""Four initializations under the same noise: Zhang et al. (2023), Figures 5 and 8.

    python -m recipes.studies.leakage.run initializations --mnist MNIST.npz \
        --cifar10 LOSSLESS.npz --output docs/results/influence_initializations

The leakage papers' LeNet before training, with weights and biases uniform in ±0.5 or normal of
variance 0.5, or weights after Kaiming or Xavier (uniform, PyTorch's defaults) and no biases; new
weights for every image, one image a gradient, label known, Gaussian noise of one variance for all,
DLG by L-BFGS, pixels clipped to their range. Beside the MSE: the eigenvalues of J Jᵀ, drawn for the
first image, and the norm of the gradient, which one noise drowns or does not. About half an hour of
one core.
"""

import numpy as np
import torch
from scipy.stats import wilcoxon
from torch import Tensor, nn
from transformers import set_seed

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.leakage import largest_eigenvalue, smallest_directions
from hf_gradguard.randomness import Stream

from ..lib.images import SINGLE_IMAGES, lenet_for, single_images
from ..lib.tables import plt, save, write_table
from .directions import DATA
from .settings import INITIALIZATIONS, NOISY, QUICK_NOISY, SPECTRUM

ARGUMENTS = SINGLE_IMAGES


def cells(args) -> dict:
    settings, found = QUICK_NOISY if args.quick else NOISY, {}
    for data in DATA:
        for name in INITIALIZATIONS:
            one = {"data": data, "initialization": name}
            found["attacked", data, name] = {"measure": "attacked", **one, **settings}
            spectrum = {"measure": "spectrum", **one, "side": settings["side"], "values": SPECTRUM}
            found["spectrum", data, name] = spectrum
    return found


def prepare(args):
    def measure(cell: dict) -> dict:
        path, name = getattr(args, DATA[cell["data"]]), cell["initialization"]
        if cell["measure"] == "spectrum":
            return spectrum(name, *single_images(path, 1, cell["side"]))
        return attacked(cell, name, single_images(path, cell["samples"], cell["side"]))

    return measure


def report(figures: dict, args) -> None:
    header = ["", *INITIALIZATIONS, "uniform below Xavier"]
    write_table(args.output, header, table(figures["attacked"]))
    plot(figures, QUICK_NOISY if args.quick else NOISY, args.output)


def draw(name: str, parameter: Tensor) -> None:
    """A start in place."""
    if name.startswith("uniform"):
        nn.init.uniform_(parameter, -0.5, 0.5)
    elif name.startswith("normal"):
        nn.init.normal_(parameter, 0, 0.5**0.5)
    elif parameter.dim() == 1:
        nn.init.zeros_(parameter)
    else:
        {"Kaiming": nn.init.kaiming_uniform_, "Xavier": nn.init.xavier_uniform_}[name](parameter)


def started(name: str, sample: int, batch: dict[str, Tensor]) -> nn.Module:
    """The weights that this sample gets."""
    set_seed(sample)
    model = lenet_for(batch)
    for parameter in model.parameters():
        draw(name, parameter.data)
    return model


def attacked(cell: dict, name: str, batches: list[dict[str, Tensor]]) -> dict:
    noise = make_defense("gaussian_noise", scale=cell["variance"] ** 0.5)
    dlg = make_attack("dlg", steps=cell["steps"], start="uniform", patience=5)
    mse, norms, largest = [], [], []
    for sample, batch in enumerate(batches):
        image, model = batch["pixel_values"], started(name, sample, batch)
        gmap = GradientMap(model, batch)
        shared = noise(gmap, generator=Stream.from_seeds(sample))
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


def plot(figures: dict, plan: dict, output) -> None:
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
    save(figure, output, dpi=80)
