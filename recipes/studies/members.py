"""Membership inference from the weights that a server ends up with, behind each defense.

References: Yeom et al., "Privacy Risk in Machine Learning" (2018), who threshold the loss; Watson
et al., "On the Importance of Difficulty Calibration in Membership Inference Attacks" (2022), who
take off it what other networks make of the image; Carlini et al., "Membership Inference Attacks
From First Principles" (2022), from whom the scale is, and that some of the others saw the image.
"""

import functools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_gradguard.metrics import score_candidates

from ..study import Study
from .frontier_clients import IMAGE_FLAGS, ImageRows, ImageTask
from .frontier_rows import FOLDER
from .frontier_tables import PROOF
from .lib.intervals import half_width
from .lib.results import named
from .lib.tables import interval, plt, save, write_table

STEPS = 600


def _training(defense: str, rate: float, steps: int = STEPS, **strength: Any) -> dict:
    return {"defense": defense, "strength": strength, "learning_rate": rate, "steps": steps}


NONE = _training("none", 4e-3)
NOISE = {  # by strength, the strongest last
    f"gaussian_noise relative_scale={scale:g}": _training(
        "gaussian_noise", rate, relative_scale=scale
    )
    for scale, rate in ((1.0, 4e-3), (5.0, 4e-3), (20.0, 4e-3), (100.0, 2e-3))
}
STOPPED = {  # nothing protected, and fewer messages
    f"none, {steps} messages": _training("none", 4e-3, steps)
    for steps in (300, 150, 100, 80, 60, 40)
}
ROWS: dict[str, dict] = {
    "none": NONE,
    **STOPPED,
    **NOISE,
    "gaussian_noise relative_scale=20, half the rate": _training(
        "gaussian_noise", 2e-3, relative_scale=20.0
    ),
    "optimal_noise relative_scale=1": _training("optimal_noise", 8e-3, relative_scale=1.0),
    "pruning ratio=0.99": _training("pruning", 2e-3, ratio=0.99),
    "pruning ratio=0.99 error_feedback=True": _training(
        "pruning", 2e-3, ratio=0.99, error_feedback=True
    ),
    "gradient_sketch": _training("gradient_sketch", 2e-3),
    "dp_sgd per_sample=True clip=1 noise_multiplier=0.5": _training(
        "dp_sgd", 4e-3, per_sample=True, clip=1.0, noise_multiplier=0.5
    ),
}
QUICK_ROWS = {
    row: ROWS[row] | {"steps": 2}
    for row in ("none", "none, 40 messages", "gaussian_noise relative_scale=20")
}

ATTACKERS = ("loss", "beside undefended networks", "beside networks behind the same defense")
BEST = ATTACKERS[-1]
TRAINED, INFERRED = "trained", "told"
SCORES = {"area": "area", "tpr_1%": "TPR at 1 % FPR"}
CURVES = {"no defense, stopped": ("none", *STOPPED), "gaussian_noise": ("none", *NOISE)}


@torch.no_grad()
def log_odds(model: nn.Module, pixels: Tensor, labels: Tensor) -> np.ndarray:
    """`(2, N)`: ln p/(1 - p) of the label's probability p, of each image and of its mirror image.

    Args:
        model: A classifier of `pixel_values`.
        pixels: `(N, 3, H, W)` in uint8.
        labels: `(N,)`.
    """
    views = []
    for view in (pixels, pixels.flip(-1)):
        logits = torch.cat([model(x.float() / 255).logits for x in view.split(500)]).double()
        true = logits.gather(1, labels[:, None])
        other_logits = logits.scatter(1, labels[:, None], -torch.inf)
        views.append(true[:, 0] - other_logits.logsumexp(1))
    return torch.stack(views).numpy()


def by_loss(odds: np.ndarray) -> np.ndarray:
    """`(N,)`: less the loss, the mean over views.

    Args:
        odds: `(2, N)`, of the network in question.
    """
    return -np.logaddexp(0, -odds).mean(0)


def by_difficulty(odds: np.ndarray, other_networks: np.ndarray, owned: np.ndarray) -> np.ndarray:
    """`(N,)`: how much higher the log odds are than is usual of the image, among networks that did
    not see it. Those that did have more; by how much on average, images tell that some saw and some
    did not.

    Args:
        odds: `(2, N)`, of the network in question.
        others: `(R, 2, N)`, of two networks or more that the attacker trained.
        owned: `(R, N)`: on which images it trained each.
    """
    means, centered = other_networks.mean(1), owned - owned.mean(0)
    means = means - means.mean(1, keepdims=True)
    gain = (centered * means).sum() / (centered**2).sum()
    return odds.mean(0) - (means - gain * owned).mean(0)


def membership_scores(scores: np.ndarray, owned: np.ndarray) -> dict[str, float]:
    """Area under the curve (0.5 is chance), and the TPR at 1 % FPR.

    Args:
        scores: `(N,)`: higher for what is rather a member.
        owned: `(N,)`: what is.
    """
    metrics = score_candidates([scores], [np.flatnonzero(owned)], bootstrap=0)
    return {"area": round(metrics.area, 4), "tpr_1%": metrics.mean["tpr_1%"]}


class Owner(ImageTask):
    """A client that owns half of a pool of images, and its training.

    Args:
        data: All images, loaded once for all clients.
        folder: Keeps what was trained.
        pool: How many images there are that a client may own.
        seed: Says which half it owns; others' halves say nothing of it.
    """

    def __init__(self, data: ImageTask, folder: str, pool: int, seed: int) -> None:
        super().__init__("", "", str(Path(folder) / f"members-{pool}"))
        self.train_rows, self.test_rows = data.train_rows, data.test_rows
        start = len(self.held_out()[1])
        self.pool = tuple(tensor[start : start + pool] for tensor in data.train_rows)
        draws = torch.Generator().manual_seed(seed)
        self.owned: Tensor = torch.randperm(pool, generator=draws) < pool // 2

    def rows_to_learn(self) -> ImageRows:
        """Its half of the pool."""
        return ImageRows(*(tensor[self.owned] for tensor in self.pool))

    def learned(self, cell: dict) -> dict:
        """Accuracies on images that nobody trained on and on its own, and what a proof says."""
        metrics, rows = super().learned(cell), self.rows_to_learn()
        right = self.right(self.stage(cell, "end").model, (rows.pixels, rows.labels))
        metrics_added = {key: metrics[key] for key in ("accuracy", "epsilon") if key in metrics}
        return {"trained_on": float(right.mean()), **metrics_added}


class Members(Study):
    """Which images a network was trained on, told from its last weights, behind each defense.

    Conditions and figures: docs/findings/membership.md.
    """

    ARGUMENTS = {flag: IMAGE_FLAGS[flag] for flag in ("--train", "--test")} | FOLDER
    # What makes a network, but for its seed
    TRAINING = ("defense", "strength", "learning_rate", "steps", "pool", "batch")

    def cells(self) -> dict:
        """Trainings first: attackers need those of the other seeds."""
        rows = QUICK_ROWS if self.quick else ROWS
        sizes, seeds = (
            {"pool": 16, "batch": 4} if self.quick else {"pool": 2000, "batch": 64},
            range(3),
        )
        trained = {
            (row, TRAINED, str(seed)): settings | sizes | {"seed": seed}
            for seed in seeds
            for row, settings in rows.items()
        }
        attacked = {
            (row, INFERRED, seed): cell
            | {"undefended": rows["none"], "others": [s for s in seeds if s != cell["seed"]]}
            for (row, _, seed), cell in trained.items()
        }
        return trained | attacked

    def load(self) -> None:
        data = ImageTask(self.args.train, self.args.test, self.args.models)
        self.owner = functools.cache(lambda pool, seed: Owner(data, self.args.models, pool, seed))
        self.odds: dict[str, np.ndarray] = {}  # a network is beside many others

    def odds_of(self, cell: dict, seed: int) -> np.ndarray:
        trained = {name: cell[name] for name in self.TRAINING} | {"seed": seed}
        key = json.dumps(trained, sort_keys=True)
        if key not in self.odds:
            owner = self.owner(cell["pool"], seed)
            self.odds[key] = log_odds(owner.stage(trained, "end").model, *owner.pool)
        return self.odds[key]

    def measure(self, cell: dict) -> dict:
        owner = self.owner(cell["pool"], cell["seed"])
        if "others" not in cell:
            return owner.learned(cell)
        seeds, odds = cell["others"], self.odds_of(cell, cell["seed"])
        owned = np.stack([self.owner(cell["pool"], seed).owned.numpy() for seed in seeds])
        scores = [by_loss(odds)]
        for networks in (cell | cell["undefended"], cell):
            other_odds = np.stack([self.odds_of(networks, seed) for seed in seeds])
            scores.append(by_difficulty(odds, other_odds, owned))
        metrics = [membership_scores(score, owner.owned.numpy()) for score in scores]
        return dict(zip(ATTACKERS, metrics, strict=True))

    def report(self, metrics: dict) -> None:
        write_members(metrics, self.output)
        write_beside(metrics, self.output)
        picture(metrics, self.output)


def write_members(metrics: dict, output: Path) -> None:
    """One row a defense: what it learned, and what each attacker tells."""
    header = ["", "accuracy", "less than none", "on its own images", PROOF]
    header += [f"{attacker}: {score}" for attacker in ATTACKERS for score in SCORES.values()]
    plain, rows = accuracies_of(metrics["none"]), []
    for row, cells in metrics.items():
        accuracies, runs = accuracies_of(cells), list(cells[TRAINED].values())
        lost = [
            plain_accuracy - own_accuracy
            for plain_accuracy, own_accuracy in zip(plain, accuracies, strict=True)
        ]
        shown = [interval(accuracies), "" if row == "none" else interval(lost)]
        shown += [interval([run["trained_on"] for run in runs])]
        shown += [f"{runs[0]['epsilon']:.2g}" if "epsilon" in runs[0] else ""]
        shown += [
            interval(scores_of(cells, attacker, name)) for attacker in ATTACKERS for name in SCORES
        ]
        rows.append([f"`{row}`", *shown])
    write_table(output, header, rows)


def write_beside(metrics: dict, output: Path) -> None:
    """How much more the best attacker tells of a row than of what learns as much."""
    header = ["more than behind", *(f"{c}: {score}" for c in CURVES for score in SCORES.values())]
    rows = [
        [f"`{row}`", *(_beyond(metrics, row, curve, name) for curve in CURVES.values()
                       for name in SCORES)]
        for row in metrics
        if row != "none" and row not in STOPPED
    ]  # fmt: skip
    write_table(named(output, "_beside"), header, rows)


def _beyond(metrics: dict, row: str, curve: Iterable[str], name: str) -> str:
    """Nothing for a row that is on the curve itself, or learns less, or more, than all that is."""
    if row in curve:
        return ""
    points = [metrics[curve_row] for curve_row in curve if curve_row in metrics]
    curve_accuracies = np.array([accuracies_of(point) for point in points])
    curve_scores = np.array([scores_of(point, BEST, name) for point in points])
    accuracies, scores = accuracies_of(metrics[row]), scores_of(metrics[row], BEST, name)
    middles = curve_accuracies.mean(1)
    if not middles.min() <= np.mean(accuracies) <= middles.max():
        return ""
    seeds = zip(accuracies, scores, curve_accuracies.T, curve_scores.T, strict=True)
    return interval([score - interpolated(x, y, accuracy) for accuracy, score, x, y in seeds])


def interpolated(x: np.ndarray, y: np.ndarray, place: float) -> float:
    """What a curve through points, in any order, has at a place: on a line between the two nearest,
    beyond its ends what the end has.

    Example:
        >>> at(np.array([0.5, 0.4]), np.array([0.9, 0.6]), place=0.45)
        0.75
    """
    order = np.argsort(x)
    return float(np.interp(place, x[order], y[order]))


def accuracies_of(cells: dict) -> list[float]:
    return [run["accuracy"] for run in cells[TRAINED].values()]


def scores_of(cells: dict, attacker: str, name: str) -> list[float]:
    return [run[attacker][name] for run in cells[INFERRED].values()]


def picture(metrics: dict, output: Path) -> None:
    """Area against accuracy: the curves, and the other rows."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    on_curves = set[str]()
    for number, (label, rows) in enumerate(CURVES.items()):
        points = [row for row in rows if row in metrics]
        points.sort(key=lambda row: float(np.mean(accuracies_of(metrics[row]))))
        _draw(axes, metrics, points, {"label": label, "color": f"C{number}", "linestyle": "-"})
        on_curves |= set(rows)
    for number, row in enumerate(row for row in metrics if row not in on_curves):
        style = {"label": row, "color": f"C{number + len(CURVES)}", "linestyle": ""}
        _draw(axes, metrics, [row], style | {"marker": "s^Dv<>pP*X"[number]})
    axes.axhline(0.5, color="gray", linestyle=":", label="chance")
    axes.set_xlabel("accuracy on images that nobody trained on (95 % intervals over seeds)")
    axes.set_ylabel("area under the ROC curve of membership inference (less is better)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save(figure, output)


def _draw(axes, metrics: dict, rows: Sequence[str], style: dict) -> None:
    points = [(accuracies_of(metrics[row]), scores_of(metrics[row], BEST, "area")) for row in rows]
    means, halves = (
        np.array([[statistic(values) for values in point] for point in points])
        for statistic in (np.mean, half_width)
    )
    marker = {"marker": "o", "markersize": 5, "capsize": 2, "elinewidth": 1}
    axes.errorbar(*means.T, halves[:, 1], halves[:, 0], **marker | style)
