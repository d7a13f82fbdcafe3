"""Four initialisations under the same noise: Zhang et al. (2023), Figures 5 and 8.

    python recipes/reproductions/influence_initializations.py --mnist MNIST.npz --cifar10 LOSSLESS.npz \
        --output docs/results/influence_initializations

The leakage papers' LeNet before training, with weights and biases uniform in ±0.5 or normal of variance 0.5, or weights after
Kaiming or Xavier (uniform, PyTorch's defaults) and no biases; new weights for every image, one image a gradient, label known,
Gaussian noise of one variance for all, DLG by L-BFGS, pixels clipped to their range. Beside the MSE: the eigenvalues of J Jᵀ
for the first image, and the norm of the gradient, which one noise drowns or does not.

Writes OUTPUT.json and OUTPUT.png.
"""

import argparse
import json
from pathlib import Path

import matplotlib
import numpy as np
import torch
from scipy.stats import wilcoxon
from torch import nn
from transformers import set_seed
from transformers.utils import logging

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.leakage import largest_eigenvalue, smallest_directions
from hf_gradguard.models import LeakageLeNetConfig, LeakageLeNetForImageClassification

matplotlib.use("agg")
from matplotlib import pyplot as plt

INITIALIZATIONS = {
    "uniform": lambda p: nn.init.uniform_(p, -0.5, 0.5),
    "normal": lambda p: nn.init.normal_(p, 0, 0.5**0.5),
    "kaiming": lambda p: nn.init.kaiming_uniform_(p) if p.dim() > 1 else nn.init.zeros_(p),
    "xavier": lambda p: nn.init.xavier_uniform_(p) if p.dim() > 1 else nn.init.zeros_(p),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", help="npz with x_train and y_train")
    parser.add_argument("--cifar10", help="npz with x and y")
    parser.add_argument("--samples", type=int, default=6, help="images of each data set")
    parser.add_argument("--variance", type=float, default=1e-4, help="of the noise")
    parser.add_argument("--steps", type=int, default=60, help="steps of L-BFGS")
    parser.add_argument("--output", default="docs/results/influence_initializations")
    args = parser.parse_args()
    report: dict = {"arguments": {name: getattr(args, name) for name in ("samples", "variance", "steps")}}
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    sources = (("mnist", args.mnist, ("x_train", "y_train")), ("cifar10", args.cifar10, ("x", "y")))
    for (data, path, names), (left, right) in zip(sources, axes, strict=True):
        if path is None:
            continue
        with np.load(path) as file:
            pixels, labels = (torch.from_numpy(file[name][: args.samples]) for name in names)
        images = (pixels[:, None] if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2)).float() / 255
        report[data] = {}
        for name in logging.tqdm(INITIALIZATIONS, desc=data):
            report[data][name], spectrum = attacked(args, name, images, labels.long())
            left.plot(spectrum.flip(0).clamp_min(1e-12), label=name)
        mse = {name: row["mse"] for name, row in report[data].items()}
        report[data] |= {
            "p that uniform and xavier are alike (Wilcoxon)": wilcoxon(mse["uniform"], mse["xavier"]).pvalue
        }
        left.set(yscale="log", xlabel="rank", ylabel="eigenvalue of J Jᵀ", title=f"{data}: the first image")
        left.legend()
        right.boxplot(list(mse.values()), tick_labels=list(mse))
        right.set(yscale="log", ylabel="MSE of DLG", title=f"{data}: noise of variance {args.variance:g}")
    print(json.dumps(report, indent=2))
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    Path(f"{args.output}.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    figure.savefig(f"{args.output}.png", dpi=80)


def attacked(
    args: argparse.Namespace, name: str, images: torch.Tensor, labels: torch.Tensor
) -> tuple[dict, torch.Tensor]:
    """The attack's MSE on every image, and the spectrum of the first."""
    config = LeakageLeNetConfig(num_channels=images.shape[1], image_size=images.shape[2])
    noise = make_defense("gaussian_noise", scale=args.variance**0.5)
    dlg = make_attack("dlg", steps=args.steps, start="uniform", patience=5)
    mse, norms, largest = [], [], []
    for sample, (image, label) in enumerate(zip(images.split(1), labels.split(1), strict=True)):
        set_seed(sample)
        model = LeakageLeNetForImageClassification(config).eval()
        for parameter in model.parameters():
            INITIALIZATIONS[name](parameter.data)
        gmap = GradientMap(model, {"pixel_values": image, "labels": label})
        if sample == 0:
            spectrum = smallest_directions(gmap, image.numel()).eigenvalues
        shared = noise(gmap, generator=torch.Generator().manual_seed(sample))
        found = dlg(Observation(model, shared, tuple(image.shape), labels=label), torch.Generator().manual_seed(sample))
        mse.append(float((found.input.clamp(0, 1) - image).square().mean()))
        norms.append(float(torch.cat([g.flatten() for g in gmap.gradient().values()]).norm()))
        largest.append(float(largest_eigenvalue(gmap)))
    row = {
        "mean MSE": np.mean(mse),
        "median norm of the gradient": np.median(norms),
        "median λ_max": np.median(largest),
    }
    row |= {"median eigenvalue, first image": float(spectrum.median()), "mse": mse}
    return {k: np.vectorize(lambda v: float(f"{v:.3g}"))(value).tolist() for k, value in row.items()}, spectrum


if __name__ == "__main__":
    main()
