"""What a private logistic regression leaks: Fisher information in closed form."""

import functools

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

from hf_gradguard.leakage import mse_bound_from_dfil, mse_bound_from_rdp, rdp_of_order_two

from ..study import Study
from .lib.tables import draw_images, plt, save, significant, write_table

LOGISTIC = {
    "regularization": 1e-2, "std": 1e-2, "attacked_std": 1e-5, "trials": 1000, "targets": 400,
    "records": 60000,
}  # fmt: skip
QUICK_LOGISTIC = LOGISTIC | {"trials": 3, "targets": 8, "records": 400}


class Logistic(Study):
    """What a private logistic regression on MNIST 0 against 1 leaks: Guo et al. (2022), Section 7.1
    and 7.2.

    Output perturbation: the minimizer w* of the mean logistic loss + λ/2 ‖w‖² is released with
    noise N(0, σ²I). By the implicit function theorem ∂w*/∂x_j = -H⁻¹B_j/n with B_j = (p-y)I +
    p(1-p) x wᵀ, so that FIM_j = B_jᵀH⁻²B_j/(σn)² in closed form. The attack is Balle et al.'s on
    generalized linear models, with the label given as well: whoever knows all other records reads
    c·x off the stationarity of w*, with c = p - y. It is run on the 8 records of highest and of
    lowest dFIL and on `targets` evenly over its ranks.
    """

    ARGUMENTS = {
        "--data": "npz with x_train, y_train, x_test, y_test in uint8",
        "--pictures": {"help": "PNG of Figure 4 to write; holds images of the data set"},
    }

    def cells(self) -> dict:
        return {("regression",): QUICK_LOGISTIC if self.quick else LOGISTIC}

    def regression(self, cell: dict) -> tuple[Tensor, ...]:
        return fitted(self.args.data, cell["records"], cell["regularization"])

    def measure(self, cell: dict) -> dict:
        x, y, w, hessian = self.regression(cell)
        test = zeros_and_ones(self.args.data, "test")
        (n, m), generator = x.shape, torch.Generator().manual_seed(0)
        # Figure 2: the private model and its two bounds.
        bounds = mse_bound_from_dfil(dfil(x, y, w, hessian, cell["std"]))
        draws = w + cell["std"] * torch.randn(10, m, generator=generator, dtype=w.dtype)
        accuracy = (((test[0] @ draws.T) > 0) == test[1][:, None].bool()).double().mean()
        # Replacing a record moves w* by up to 2 max‖x‖/(nλ). The paper's figure takes max‖x‖ = 1,
        # which raw pixels exceed.
        norms = {"1": 1.0, "largest": float(x.norm(dim=1).max())}
        epsilons = {
            k: rdp_of_order_two(cell["std"] * n * cell["regularization"] / (2 * v))
            for k, v in norms.items()
        }
        edges = np.geomspace(float(bounds.min()), float(bounds.max()), 60)
        edges[[0, -1]] = float(bounds.min()), float(bounds.max())
        # Figures 3 and 4: the attack on a model with hardly any noise.
        leakage = dfil(x, y, w, hessian, cell["attacked_std"])
        order = leakage.argsort(descending=True)
        evenly = torch.linspace(0, n - 1, cell["targets"]).long()
        attacked = order[torch.cat([torch.arange(8), torch.arange(n - 8, n), evenly])]
        realized = torch.zeros(len(attacked), dtype=torch.float64)
        for _ in range(cell["trials"]):
            released = w + cell["attacked_std"] * torch.randn(m, generator=generator, dtype=w.dtype)
            guesses = glm_attack(released, x, y, attacked, cell["regularization"])
            realized += (guesses - x[attacked]).square().mean(1) / cell["trials"]
        return {
            "accuracy": float(accuracy),
            "norms": rounded(norms.values()),
            "epsilons": rounded(epsilons.values()),
            "rdp_bounds": rounded(map(mse_bound_from_rdp, epsilons.values())),
            "dfil_bounds": {
                "count": n,
                "above 1": int((bounds > 1).sum()),
                "least, median": rounded([bounds.min(), bounds.median()]),
            },
            "histogram": {
                "edges": rounded(edges),
                "counts": np.histogram(bounds, edges)[0].tolist(),
            },
            "attacked": {
                "bound": rounded(mse_bound_from_dfil(leakage[attacked])),
                "mse": rounded(realized),
            },
        }

    def report(self, metrics: dict) -> None:
        metrics = metrics["regression"]
        write_table(self.output, ["", "here", "paper"], rows_of(metrics))
        plot(metrics, self.output)
        if self.args.pictures:
            self.draw(*self.cells().values())

    def draw(self, cell: dict) -> None:
        """Figure 4: the 8 samples of highest and of lowest dFIL over their reconstructions from one
        noisy model.
        """
        x, y, w, hessian = self.regression(cell)
        std, generator = cell["attacked_std"], torch.Generator().manual_seed(0)
        order = dfil(x, y, w, hessian, std).argsort(descending=True)
        ends = torch.cat([order[:8], order[-8:]])
        released = w + std * torch.randn(len(w), generator=generator, dtype=w.dtype)
        guesses = glm_attack(released, x, y, ends, cell["regularization"])
        rows = [[(row.view(1, 28, 28), "") for row in images] for images in (x[ends], guesses)]
        draw_images(self.args.pictures, rows, (11, 1.6), dpi=110)


@functools.cache
def fitted(path: str, records: int, regularization: float) -> tuple[Tensor, ...]:
    return fit(*zeros_and_ones(path, "train", records), regularization)


def rounded(values) -> list[float]:
    return [significant(value, 5) for value in values]


def zeros_and_ones(path: str, split: str, records: int | None = None) -> tuple[Tensor, Tensor]:
    """Pixels in [0, 1], flat, in float64, of the first records."""
    with np.load(path) as file:
        images, labels = (file[f"{name}_{split}"][:records] for name in "xy")
    binary = labels < 2
    return torch.tensor(images[binary] / 255.0).flatten(1), torch.tensor(
        labels[binary].astype(float)
    )


def fit(x: Tensor, y: Tensor, regularization: float) -> tuple[Tensor, ...]:
    """The data, w* and the Hessian there, by Newton's method to machine precision."""
    w = torch.zeros(x.shape[1], dtype=x.dtype)
    while True:
        p = torch.sigmoid(x @ w)
        gradient = x.T @ (p - y) / len(x) + regularization * w
        hessian = (x.T * (p * (1 - p))) @ x / len(x) + regularization * torch.eye(len(w))
        if gradient.norm() < 1e-13:
            return x, y, w, hessian
        w = w - torch.linalg.solve(hessian, gradient)


def dfil(x: Tensor, y: Tensor, w: Tensor, hessian: Tensor, std: float) -> Tensor:
    """Tr FIM_j / m = ‖H⁻¹B_j‖_F² / (m σ²n²) for every record."""
    inverse, p = torch.linalg.inv(hessian), torch.sigmoid(x @ w)
    error, curvature, moved = p - y, p * (1 - p), x @ inverse
    squares = error.square() * inverse.square().sum()
    squares += 2 * error * curvature * (moved @ (inverse @ w))
    squares += curvature.square() * moved.square().sum(1) * w.square().sum()
    return squares / (x.shape[1] * (std * len(x)) ** 2)


def glm_attack(w: Tensor, x: Tensor, y: Tensor, targets: Tensor, regularization: float):
    """Each target from the released w, all other records and its label: (targets, m)."""
    residual = torch.sigmoid(x @ w) - y
    # what the records but the target contribute
    remainder = x.T @ residual - (residual[:, None] * x)[targets]
    v = -len(x) * regularization * w - remainder  # = c x of the target
    # c = σ(a) - y with c a = w·v. In a' = ±a it reads a'σ(a') = w·v: one root above the minimum,
    # one below if negative. Of two, take the one whose image is about as bright as the other
    # records of that label.
    value, sign = v @ w, 1 - 2 * y[targets]
    lowest = -1.2784645427610738
    brightness = [x[y == label].norm(dim=1).log().mean() for label in (0, 1)]
    usual = torch.stack(brightness)[y[targets].long()]
    best, least = torch.zeros_like(v), torch.full_like(value, torch.inf)
    for low, high, rising in ((lowest, 1e4, True), (-700.0, lowest, False)):
        a, b = torch.full_like(value, low), torch.full_like(value, high)
        for _ in range(80):
            middle = (a + b) / 2
            is_left = (middle * torch.sigmoid(middle) < value) == rising
            a, b = torch.where(is_left, middle, a), torch.where(is_left, b, middle)
        guess = v / (sign * torch.sigmoid(a))[:, None]
        distance = (guess.norm(dim=1).log() - usual).abs()
        better = distance < least
        least = torch.where(better, distance, least)
        best[better] = guess[better]
    return best


def rows_of(metrics: dict) -> list[list[str]]:
    """The paper's figures: Sections 7.1 and 7.2."""
    dfil_bounds, (bound, mse) = metrics["dfil_bounds"], map(np.array, metrics["attacked"].values())
    below, (norm_bound, honest) = bound < 1, metrics["rdp_bounds"]
    least, median = dfil_bounds["least, median"]
    return [
        ["test accuracy", f"{metrics['accuracy']:.2%}", "99.95%"],
        ["ε₂, norms at most 1", f"{metrics['epsilons'][0]:.3f}", "2.49"],
        ["RDP bound on the MSE, norms at most 1", f"{norm_bound:.4f}", "≈ 0.02"],
        [f"ε₂, norms at most {metrics['norms'][1]:.1f}", f"{metrics['epsilons'][1]:.0f}", ""],
        [f"RDP bound, norms at most {metrics['norms'][1]:.1f}", f"{honest:.2g}", ""],
        [
            "records with a dFIL bound above 1",
            f"{dfil_bounds['above 1']:,} of {dfil_bounds['count']:,}",
            "all",
        ],
        ["dFIL bounds: least, median", f"{least:.2f}, {median:,.0f}", ""],
        ["attacked", f"{len(mse)}", "all"],
        [
            "of these with a bound below 1: MSE above it",
            f"{(mse >= bound)[below].sum()} of {below.sum()}",
            "all",
        ],
        ["their least MSE over bound", f"{(mse / bound)[below].min(initial=np.inf):.2f}", ""],
        ["Spearman of bound and MSE", f"{spearmanr(bound, mse).statistic:.3f}", ""],
    ]


def plot(metrics: dict, output) -> None:
    figure, (left_axis, right_axis) = plt.subplots(1, 2, figsize=(11, 5.5), layout="constrained")
    left_axis.stairs(metrics["histogram"]["counts"], metrics["histogram"]["edges"], fill=True)
    bound = metrics["rdp_bounds"][0]
    left_axis.axvline(bound, color="tab:red", label=f"RDP bound {bound:.4f} (norm 1)")
    left_axis.axvline(1, color="black", linestyle="--", label="perfect privacy")
    left_axis.set(
        xscale="log", ylabel="training samples", title=f"σ = {LOGISTIC['std']:g} (Figure 2)"
    )
    left_axis.margins(y=0.2)  # room for the legend
    bounds, mse = map(np.array, metrics["attacked"].values())
    right_axis.scatter(bounds, mse, s=8, c=np.where(mse < bounds, "tab:red", "tab:blue"))
    right_axis.plot([bounds.min(), 1], [bounds.min(), 1], color="black", label="MSE = bound")
    right_axis.axvline(1, color="black", linestyle="--")
    right_axis.set(xscale="log", yscale="log", ylabel="MSE of the GLM attack")
    right_axis.set_title(f"σ = {LOGISTIC['attacked_std']:g} (Figure 3); red: below the bound")
    for axis, place in ((left_axis, "upper right"), (right_axis, "upper left")):
        axis.set_xlabel("lower bound on MSE from dFIL")
        axis.legend(loc=place)
    save(figure, output, dpi=110)
