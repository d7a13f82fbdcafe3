"""A perturbation of one size along four eigenvectors of J Jᵀ, and what DLG makes of it: Zhang et
al. (2023), Figure 6.

    python recipes/reproductions/influence_directions.py --mnist MNIST.npz --cifar10 LOSSLESS.npz \
        --output docs/results/influence_directions

For a unit eigenvector u with eigenvalue λ, δ = size · Jᵀu/√λ has the norm `size` and moves the
input by I(δ) = size/√λ along u: an MSE of size²/(λm). Eigenvalues are taken at equal ratios from
the largest to the smallest. The leakage papers' LeNet before training, one image a gradient, label
known, DLG by L-BFGS from one random start. The MSE is that of the attack's own input; clipped to
the pixel range, which first order knows nothing of, it is smaller. Below what is left undefended
nothing can be seen.
"""

from pathlib import Path

import matplotlib
import numpy as np
import torch
from lenet import lenet_for, parser_of_images, single_images
from reporting import Results, named, write_table
from scipy.stats import spearmanr
from transformers import set_seed

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.leakage import smallest_directions

matplotlib.use("agg")
from matplotlib import pyplot as plt

PLAN = {"samples": 3, "side": 32, "size": 0.3, "steps": 60}  # the gradient's norm is about 30
QUICK = {"samples": 2, "side": 6, "size": 0.3, "steps": 1}


def main() -> None:
    args = parser_of_images(__doc__).parse_args()
    plan = QUICK if args.quick else PLAN
    results = Results(args.output, plan)
    for data, path in (("MNIST", args.mnist), ("CIFAR-10", args.cifar10)):
        batches = single_images(path, plan["samples"], plan["side"])
        set_seed(0)
        model = lenet_for(batches[0])
        for sample, batch in enumerate(batches):
            results.get((data, str(sample)), attacked, plan, model, batch)
    report(results.figures, args.output)


def attacked(plan: dict, model, batch: dict[str, torch.Tensor]) -> list[dict]:
    """One image, its gradient perturbed in four directions."""
    image, gmap = batch["pixel_values"], GradientMap(model, batch)
    gradient, start = (
        gmap.gradient(),
        torch.rand(image.shape, generator=torch.Generator().manual_seed(0)),
    )
    dlg = make_attack("dlg", steps=plan["steps"], start=start)

    def found(shared: dict[str, torch.Tensor]) -> torch.Tensor:
        # As if pixels came from -50 to 50: this attacker does not know their range.
        unbounded = {"image_mean": [0.5], "image_std": [0.01]}
        seen = Observation(model, shared, tuple(image.shape), labels=batch["labels"], **unbounded)
        return dlg(seen, torch.Generator().manual_seed(0)).input

    spectrum = smallest_directions(gmap, image.numel())
    logarithms = spectrum.eigenvalues.clamp_min(1e-12).log()
    wanted = torch.linspace(float(logarithms[-1]), float(logarithms[0]), 4)
    undefended, points = (found(gradient) - image).square().mean(), []
    for at in (logarithms[:, None] - wanted).abs().argmin(0):
        direction = gmap.jvp(spectrum.vectors[at])
        # The eigenvalue once more, as ‖Jᵀu‖²: the smallest of a large matrix carry the rounding of
        # the largest.
        root = torch.cat([d.flatten() for d in direction.values()]).norm()
        guess = found(
            {name: g + plan["size"] / root * direction[name] for name, g in gradient.items()}
        )
        mse, clipped = ((x - image).square().mean() for x in (guess, guess.clamp(0, 1)))
        point = {"eigenvalue": root**2, "predicted": plan["size"] ** 2 / root**2 / image.numel()}
        point |= {"undefended": undefended, "mse": mse, "clipped": clipped}
        points.append({key: float(f"{float(value):.4g}") for key, value in point.items()})
    return points


def report(figures: dict, output: Path) -> None:
    """Table and picture."""
    rows, picture, axes = [], *plt.subplots(1, 2, figsize=(11, 4.3), layout="constrained")
    for axis, (data, samples) in zip(axes, figures.items(), strict=True):
        points = [point for points in samples.values() for point in points]
        columns = {key: np.array([point[key] for point in points]) for key in points[0]}
        plot(axis, data, columns)
        above = columns["predicted"] > columns["undefended"]
        ratios = np.sqrt(columns["mse"] / columns["predicted"])[above]
        low, middle, high = np.quantile(ratios, (0, 0.5, 1)) if above.any() else [float("nan")] * 3
        rank = spearmanr(columns["eigenvalue"], columns["mse"]).statistic
        undefended = f"{np.median(columns['undefended']):.1e}"
        rows.append([data, f"{rank:.2f}", undefended, f"{above.sum()} of {len(points)}"])
        rows[-1].append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
    header = ["", "Spearman of λ and MSE", "MSE undefended, median", "points predicted above that"]
    write_table(output, [*header, "their RMSE over predicted: median, range"], rows)
    picture.savefig(named(output, ".png"), dpi=80)


def plot(axis, data: str, columns: dict[str, np.ndarray]) -> None:
    eigenvalues, order = columns["eigenvalue"], columns["eigenvalue"].argsort()
    axis.plot(eigenvalues[order], columns["predicted"][order], color="black", label="size² / λm")
    axis.scatter(eigenvalues, columns["mse"], s=18, label="DLG")
    axis.scatter(
        eigenvalues,
        columns["clipped"],
        s=18,
        facecolors="none",
        edgecolors="tab:blue",
        label="clipped",
    )
    axis.axhline(
        np.median(columns["undefended"]), color="gray", linestyle="--", label="undefended, median"
    )
    axis.set(xscale="log", yscale="log", xlabel="eigenvalue λ of J Jᵀ", ylabel="MSE", title=data)
    axis.legend()


if __name__ == "__main__":
    main()
