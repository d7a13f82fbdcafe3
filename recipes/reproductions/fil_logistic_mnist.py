"""Guo et al. (2022), Section 7.1 and 7.2: what a private logistic regression on MNIST 0 against 1 leaks.

    python recipes/reproductions/fil_logistic_mnist.py --data mnist.npz --output docs/results/fil_logistic_mnist

Output perturbation: the minimiser w* of the mean logistic loss + λ/2 ‖w‖² is released with noise N(0, σ²I). By the
implicit function theorem ∂w*/∂x_j = -H⁻¹B_j/n with B_j = (p-y)I + p(1-p) x wᵀ, so that FIM_j = B_jᵀH⁻²B_j/(σn)² in closed
form. The attack is Balle et al.'s on generalised linear models, with the label given as well: whoever knows all other
records reads c·x off the stationarity of w*, with c = p - y.

`--data` is an .npz with x_train, y_train, x_test, y_test in uint8. Writes OUTPUT.json and OUTPUT.png.
"""

import argparse
import json
from pathlib import Path

import matplotlib
import numpy as np
import torch

from hf_gradguard.leakage import mse_bound_from_dfil, mse_bound_from_rdp, rdp_of_order_two

matplotlib.use("agg")
from matplotlib import pyplot as plt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--regularization", type=float, default=1e-2, help="λ")
    parser.add_argument("--std", type=float, default=1e-2, help="σ of the private model")
    parser.add_argument("--attacked_std", type=float, default=1e-5, help="σ of the model that is attacked")
    parser.add_argument("--trials", type=int, default=1000, help="noise draws of the attack")
    parser.add_argument("--targets", type=int, default=400, help="samples attacked, evenly over the ranks of dFIL")
    parser.add_argument("--pictures", help="PNG of Figure 4 to write; holds images of the data set")
    parser.add_argument("--output", default="docs/results/fil_logistic_mnist")
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(0)

    data = np.load(args.data)
    x, y = zeros_and_ones(data["x_train"], data["y_train"])
    x_test, y_test = zeros_and_ones(data["x_test"], data["y_test"])
    n, m = x.shape
    w, hessian = fit(x, y, args.regularization)

    # Figure 2: the private model and its two bounds.
    leakage = dfil(x, y, w, hessian, args.std)
    bounds = mse_bound_from_dfil(leakage)
    draws = w + args.std * torch.randn(10, m, generator=generator, dtype=w.dtype)
    accuracy = (((x_test @ draws.T) > 0) == y_test[:, None].bool()).double().mean()
    # Replacing a record moves w* by up to 2 max‖x‖/(nλ). The paper's figure takes max‖x‖ = 1, which raw pixels exceed.
    largest = float(x.norm(dim=1).max())
    epsilon, honest = (rdp_of_order_two(args.std * n * args.regularization / (2 * norm)) for norm in (1.0, largest))
    report = {
        "n": n,
        "test_accuracy": float(accuracy),
        "epsilon_2": epsilon,
        "rdp_bound": mse_bound_from_rdp(epsilon),
        "largest_record_norm": largest,
        "epsilon_2_at_that_norm": honest,
        "rdp_bound_at_that_norm": mse_bound_from_rdp(honest),
        "dfil_bound_min": float(bounds.min()),
        "dfil_bound_median": float(bounds.median()),
        "share_of_dfil_bounds_above_1": float((bounds > 1).double().mean()),
    }

    # Figures 3 and 4: the attack on a model with hardly any noise.
    order = dfil(x, y, w, hessian, args.attacked_std).argsort(descending=True)
    ends = torch.cat([order[:8], order[-8:]])
    chosen = torch.cat([ends, order[torch.linspace(0, n - 1, args.targets).long()]])
    attacked = mse_bound_from_dfil(dfil(x, y, w, hessian, args.attacked_std)[chosen])
    realised = torch.zeros(len(chosen), dtype=torch.float64)
    for trial in range(args.trials):
        released = w + args.attacked_std * torch.randn(m, generator=generator, dtype=w.dtype)
        found = glm_attack(released, x, y, chosen, args.regularization)
        realised += (found - x[chosen]).square().mean(1) / args.trials
        if trial == 0:
            pictures = found[: len(ends)]
    low = attacked <= 1
    report |= {
        "trials": args.trials,
        "spearman_bound_and_mse": spearman(attacked, realised),
        "targets_with_bound_below_1": int(low.sum()),
        "share_of_those_at_or_above_the_bound": float((realised[low] >= attacked[low]).double().mean()),
        "least_mse_over_bound_of_those": float((realised[low] / attacked[low]).min()),
        "mse_of_8_highest_dfil": realised[:8].tolist(),
        "mse_of_8_lowest_dfil": realised[8:16].tolist(),
    }
    print(json.dumps(report, indent=2))
    arguments = {name: value for name, value in vars(args).items() if name not in ("data", "output", "pictures")}
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    Path(f"{args.output}.json").write_text(json.dumps({"arguments": arguments} | report, indent=2) + "\n")
    plot(args, bounds, report, attacked, realised)
    if args.pictures:
        show(args.pictures, x[ends], pictures)


def zeros_and_ones(images: np.ndarray, labels: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels in [0, 1], flat, in float64."""
    kept = labels < 2
    return torch.tensor(images[kept] / 255.0).flatten(1), torch.tensor(labels[kept].astype(float))


def fit(x: torch.Tensor, y: torch.Tensor, regularization: float) -> tuple[torch.Tensor, torch.Tensor]:
    """w* and the Hessian there, by Newton's method to machine precision."""
    w = torch.zeros(x.shape[1], dtype=x.dtype)
    while True:
        p = torch.sigmoid(x @ w)
        gradient = x.T @ (p - y) / len(x) + regularization * w
        hessian = (x.T * (p * (1 - p))) @ x / len(x) + regularization * torch.eye(len(w))
        if gradient.norm() < 1e-13:
            return w, hessian
        w = w - torch.linalg.solve(hessian, gradient)


def dfil(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, hessian: torch.Tensor, std: float) -> torch.Tensor:
    """Tr FIM_j / m = ‖H⁻¹B_j‖_F² / (m σ²n²) for every record."""
    inverse, p = torch.linalg.inv(hessian), torch.sigmoid(x @ w)
    error, curvature, moved = p - y, p * (1 - p), x @ inverse
    squares = error.square() * inverse.square().sum() + 2 * error * curvature * (moved @ (inverse @ w))
    squares += curvature.square() * moved.square().sum(1) * w.square().sum()
    return squares / (x.shape[1] * (std * len(x)) ** 2)


def glm_attack(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor, targets: torch.Tensor, regularization: float):
    """Each target from the released w, all other records and its label: (targets, m)."""
    residual = torch.sigmoid(x @ w) - y
    others = x.T @ residual - (residual[:, None] * x)[targets]  # what the records but the target contribute
    v = -len(x) * regularization * w - others  # = c x of the target
    # c = σ(a) - y with c a = w·v. In a' = ±a it reads a'σ(a') = w·v: one root above the minimum, one below if negative.
    # Of two, take the one whose image is about as bright as the other records of that label.
    value, sign = v @ w, 1 - 2 * y[targets]
    lowest = -1.2784645427610738
    usual = torch.stack([x[y == label].norm(dim=1).log().mean() for label in (0, 1)])[y[targets].long()]
    best, least = torch.zeros_like(v), torch.full_like(value, torch.inf)
    for low, high, rising in ((lowest, 1e4, True), (-700.0, lowest, False)):
        a, b = torch.full_like(value, low), torch.full_like(value, high)
        for _ in range(80):
            middle = (a + b) / 2
            left = (middle * torch.sigmoid(middle) < value) == rising
            a, b = torch.where(left, middle, a), torch.where(left, b, middle)
        found = v / (sign * torch.sigmoid(a))[:, None]
        distance = (found.norm(dim=1).log() - usual).abs()
        better = distance < least
        least = torch.where(better, distance, least)
        best[better] = found[better]
    return best


def spearman(a: torch.Tensor, b: torch.Tensor) -> float:
    ranks = torch.stack([t.argsort().argsort().double() for t in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


def plot(args, bounds, report, attacked, realised) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5.5), layout="constrained")
    left.hist(bounds, bins=np.geomspace(float(bounds.min()), float(bounds.max()), 60), color="tab:blue")
    left.axvline(report["rdp_bound"], color="tab:red", label=f"RDP bound {report['rdp_bound']:.4f} (norm 1)")
    left.axvline(1, color="black", linestyle="--", label="perfect privacy")
    left.set(
        xscale="log",
        xlabel="lower bound on MSE from dFIL",
        ylabel="training samples",
        title=f"σ = {args.std:g} (Figure 2)",
    )
    left.legend()
    right.scatter(attacked, realised, s=8, c=np.where(realised < attacked, "tab:red", "tab:blue"))
    span = [float(attacked.min()), 1.0]
    right.plot(span, span, color="black", label="MSE = bound")
    right.axvline(1, color="black", linestyle="--")
    right.set(xscale="log", yscale="log", xlabel="lower bound on MSE from dFIL", ylabel="MSE of the GLM attack")
    right.set_title(f"σ = {args.attacked_std:g} (Figure 3); red: below the bound")
    right.legend()
    figure.savefig(f"{args.output}.png", dpi=110)


def show(path: str, true: torch.Tensor, found: torch.Tensor) -> None:
    """Figure 4: samples over reconstructions, 8 of highest and 8 of lowest dFIL. Holds images of the data set."""
    figure, axes = plt.subplots(2, len(true), figsize=(11, 1.6), layout="constrained")
    for axis, image in zip(axes.flat, torch.cat([true, found]), strict=True):
        axis.imshow(image.view(28, 28), cmap="gray", vmin=0, vmax=1)
        axis.axis("off")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
