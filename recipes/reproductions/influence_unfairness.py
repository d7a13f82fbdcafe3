"""The same noise protects some samples and classes and not others: Zhang et al. (2023), Figure 7.

    python recipes/reproductions/influence_unfairness.py --mnist MNIST.npz --output docs/results/influence_unfairness

The leakage papers' LeNet, trained on MNIST, and single test images' gradients with Gaussian noise of variance 1e-3. Label known, DLG
by L-BFGS, pixels clipped to their range. Beside the realised MSE: E I² = σ² Σ 1/λ (Eq. 6; eigenvalues below 1e-6 λ_max, where
float32 ends, count as that), and λ_max.

Writes OUTPUT.json and OUTPUT.png.
"""

import argparse
import json
from pathlib import Path

import matplotlib
import numpy as np
import torch
from scipy.stats import kruskal, spearmanr
from torch import Tensor
from transformers import set_seed
from transformers.utils import logging

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.leakage import smallest_directions
from hf_gradguard.models import LeakageLeNetConfig, LeakageLeNetForImageClassification

matplotlib.use("agg")
from matplotlib import pyplot as plt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", required=True, help="npz with x_train, y_train, x_test and y_test")
    parser.add_argument("--per_class", type=int, default=5, help="test images of each class")
    parser.add_argument("--variance", type=float, default=1e-3, help="of the noise")
    parser.add_argument("--training_steps", type=int, default=5000, help="of Adam, 64 images each")
    parser.add_argument("--steps", type=int, default=60, help="steps of L-BFGS")
    parser.add_argument(
        "--pictures", help="PNG of the best and worst reconstructions to write; holds images of the data set"
    )
    parser.add_argument("--output", default="docs/results/influence_unfairness")
    args = parser.parse_args()
    with np.load(args.mnist) as file:
        x_train, x_test = (torch.from_numpy(file[f"x_{part}"])[:, None] for part in ("train", "test"))
        y_train, y_test = (torch.from_numpy(file[f"y_{part}"]).long() for part in ("train", "test"))
    model, accuracy = trained(args, x_train, y_train, x_test, y_test)
    rows = torch.cat([(y_test == c).nonzero().flatten()[: args.per_class] for c in range(10)])
    images, labels = x_test[rows].float() / 255, y_test[rows]

    spectra, found = [], []
    noise = make_defense("gaussian_noise", scale=args.variance**0.5)
    dlg = make_attack("dlg", steps=args.steps, start="uniform", patience=5)
    for number, (image, label) in enumerate(logging.tqdm(list(zip(images.split(1), labels.split(1), strict=True)))):
        gmap = GradientMap(model, {"pixel_values": image, "labels": label})
        spectra.append(smallest_directions(gmap, image.numel()).eigenvalues.clamp_min(0))
        shared = noise(gmap, generator=torch.Generator().manual_seed(number))
        seen = Observation(model, shared, tuple(image.shape), labels=label)
        found.append(dlg(seen, torch.Generator().manual_seed(number)).input.clamp(0, 1))
    spectrum = torch.stack(spectra).double()
    guesses = torch.cat(found)
    mse = (guesses - images).square().flatten(1).mean(1).double()
    expected = args.variance * (1 / spectrum.clamp_min(1e-6 * spectrum[:, -1:])).sum(1)
    report = {
        "arguments": {k: v for k, v in vars(args).items() if k not in ("mnist", "output", "pictures")},
        "accuracy": accuracy,
    }
    report |= summary(mse, labels, expected, spectrum[:, -1]) | {"mse": [round(float(v), 4) for v in mse]}
    print(json.dumps(report, indent=2))
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    Path(f"{args.output}.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    plot(args, mse, labels)
    if args.pictures:
        pictures(args.pictures, mse, images, guesses)


def trained(args: argparse.Namespace, x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor) -> tuple:
    """A LeNet in evaluation mode, and its accuracy on the test set."""
    set_seed(0)
    model = LeakageLeNetForImageClassification(LeakageLeNetConfig(num_channels=1, image_size=28))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / args.training_steps)
    for _ in logging.tqdm(range(args.training_steps), desc="training"):
        batch = torch.randint(len(x), (64,))
        optimizer.zero_grad()
        model(pixel_values=x[batch].float() / 255, labels=y[batch]).loss.backward()
        optimizer.step()
        decay.step()
    model.eval()
    with torch.no_grad():
        guesses = torch.cat([model(pixel_values=part.float() / 255).logits.argmax(1) for part in x_test.split(1000)])
    return model, float((guesses == y_test).double().mean())


def summary(mse: Tensor, labels: Tensor, expected: Tensor, largest: Tensor) -> dict:
    classes = [mse[labels == c] for c in range(10)]
    low, middle, high = np.quantile(mse, (0.05, 0.5, 0.95))
    rounded = {
        "mean MSE": mse.mean(),
        "quantiles 5, 50, 95 %": (low, middle, high),
        "share below half the mean": (mse < mse.mean() / 2).double().mean(),
        "mean of each class": [part.mean() for part in classes],
        "share of the variance between classes": sum(len(part) * (part.mean() - mse.mean()) ** 2 for part in classes)
        / (mse - mse.mean()).square().sum(),
        "p that classes are alike (Kruskal-Wallis)": kruskal(*classes).pvalue,
        "Spearman of MSE and E I²": spearmanr(mse, expected).statistic,
        "Spearman of MSE and λ_max": spearmanr(mse, largest).statistic,
    }
    return {key: np.vectorize(lambda v: float(f"{float(v):.3g}"))(value).tolist() for key, value in rounded.items()}


def plot(args: argparse.Namespace, mse: Tensor, labels: Tensor) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.5), layout="constrained")
    figure.suptitle(f"noise of variance {args.variance:g}")
    left.hist(mse, bins=20)
    left.axvline(mse.mean(), color="purple")
    left.set(xlabel="MSE", ylabel="samples")
    right.boxplot([mse[labels == c] for c in range(10)], tick_labels=range(10))
    right.axhline(mse.mean(), color="purple")
    right.set(xlabel="class", ylabel="MSE")
    figure.savefig(f"{args.output}.png", dpi=80)


def pictures(path: str, mse: Tensor, images: Tensor, guesses: Tensor) -> None:
    """Originals over reconstructions, the four best and the four worst. Holds images of the data set."""
    figure, axes = plt.subplots(2, 8, figsize=(8, 2.2), layout="constrained")
    order = mse.argsort()
    for column, at in enumerate(torch.cat([order[:4], order[-4:]])):
        for axis, picture in zip(axes[:, column], (images[at], guesses[at]), strict=True):
            axis.imshow(picture[0], cmap="gray", vmin=0, vmax=1)
            axis.axis("off")
        axes[1, column].set_title(f"{mse[at]:.2g}", fontsize=8)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
