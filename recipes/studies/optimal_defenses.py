"""Optimal noise and optimal pruning against plain ones: Chen, Gürsoy and Lei (2024, 2025)."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
from transformers import set_seed
from transformers.utils import logging

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation
from hf_gradguard.defenses import Message
from hf_gradguard.metrics import score_images
from hf_gradguard.randomness import Stream
from recipes.small_networks import (
    MODELS,
    LeakyConvNetConfig,
    LeakyConvNetForImageClassification,
)

from ..study import Study
from .lib.attacks import attack_of, observe
from .lib.defenses import published
from .lib.images import array_images, flat, predicted_classes
from .lib.tables import interval, plt, save, write_table
from .lib.training import take_mean

PRUNINGS = {
    f"{name} {r}": {"ratio": r}
    for r in (0.5, 0.7, 0.8, 0.9, 0.99)
    for name in ("pruning", "optimal_pruning")
}
FEWER = {row: strength for row, strength in PRUNINGS.items() if strength["ratio"] in (0.7, 0.9)}
NOISES = {
    f"{name} {std}": {"scale": std, **clip}
    for std in (0.001, 0.01, 0.1)
    for name, clip in (("dp_sgd", {"clip_by": "coordinate"}), ("optimal_dp_sgd", {}))
}
LARGER = {
    f"{name} {std}": {"scale": std, **clip}
    for std in (0.01, 0.1, 1.0)
    for name, clip in (("dp_sgd", {"clip_by": "coordinate"}), ("optimal_dp_sgd", {}))
}
SEEDS = {"mnist": 16, "cifar10": 6, "noise": 4, "losses": 4}
ROWS = {
    "mnist": {"none": {}, **PRUNINGS, **NOISES},
    "cifar10": {"none": {}, **FEWER},
    "noise": {"none": {}, **LARGER},
    "losses": {
        "none": {}, "pruning 0.7": {"ratio": 0.7}, "pruning 0.9": {"ratio": 0.9},
        "optimal_pruning 0.7": {"ratio": 0.7},
    },
}  # fmt: skip
SETTINGS = {
    "mnist": {
        "network": ["gradguard_leaky_convnet", {}],
        "learning_rate": 1e-3, "steps": 5, "client_batch": 16, "attacked": 4, "updates": 400,
    },
    "cifar10": {
        "network": ["gradguard_deep_convnet", {"width": 32, "batch_norm": False}],
        "learning_rate": 5e-4, "steps": 5, "client_batch": 2, "attacked": 2, "updates": 200,
    },
    "noise": {
        "network": ["gradguard_leaky_convnet", {"num_channels": 3, "image_size": 32}],
        "learning_rate": 1e-3, "steps": 5, "client_batch": 2, "attacked": 2, "updates": 200,
    },
    "losses": {
        "network": ["gradguard_deep_convnet", {}],
        "learning_rate": 5e-5, "steps": 5, "client_batch": 2, "attacked": 0, "updates": 0,
    },
}  # fmt: skip
QUICK = {"steps": 1, "client_batch": 2, "attacked": 2, "updates": 3}
QUICK_NETWORKS = {
    "mnist": ["gradguard_leaky_convnet", {}],
    **{name: ["gradguard_deep_convnet", {"width": 4}] for name in ("cifar10", "losses")},
    "noise": ["gradguard_leaky_convnet", {"num_channels": 3, "image_size": 32}],
}
QUICK_SEEDS, QUICK_PROBES = 2, 3
AGAINST = {
    row: [row.removeprefix("optimal_")] for row in NOISES | LARGER if row.startswith("optimal_")
}
AGAINST |= {
    "optimal_pruning 0.7": ["pruning 0.7", "pruning 0.9"],
    "optimal_pruning 0.8": ["pruning 0.8", "pruning 0.9"],
}
CLIENTS = 4
SCORES = {
    "loss": "loss after five steps", "mse": "MSE", "psnr": "PSNR", "mse known": "MSE, known",
    "psnr known": "PSNR, known",
}  # fmt: skip
SIDES = ("leakage", "cost")


def step(model, clients: list[dict], defense, noise: Stream) -> tuple[list[GradientMap], list]:
    """Gradients become the mean of what the clients share. Their maps and messages."""
    second_order = defense.facts.needs_second_order
    maps = [GradientMap(model, batch, second_order=second_order) for batch in clients]
    messages = [defense(gmap, generator=noise) for gmap in maps]
    take_mean(model, messages)
    return maps, messages


class AttackedMnist(Study):
    """What an attack recovers of a batch behind them, and how well the batch is learned.

    The scatter plots of Section 4 and Appendix C. As there: the loss of a batch after five steps of
    Adam on it (MNIST: 64 images, learning rate 1e-3; CIFAR-10: 8 images), whose gradients four
    clients defend one by one; and Inverting Gradients on a gradient at the same initial weights,
    the same for every row, labels known. Here with 4 images a message and 400 updates (MNIST;
    paper: 16 and 2,000), 2 and 200 (CIFAR-10; paper: 2 and 1,000) and total variation 1e-2. That
    was chosen on the undefended gradient at seed 0's start, after seven and eleven tries with other
    batches, optimizers and weights: of 16 images of MNIST 400 updates showed nothing, and nothing
    of CIFAR-10 through batch normalization in training mode. So CIFAR-10's network is without it,
    half as wide (732,000 parameters; paper: 2.9 M), and learns at 5e-4 (paper: 5e-5, at which five
    steps hardly move this one's loss). Clipping: every coordinate to ±1. "Known" is the same attack
    by one that knows the defense, and matches only what a pruning left, or weighs coordinates by
    optimal noise's covariance.

    `scale` is the root mean square of the noise's standard deviation: rows of equal scale add equal
    noise power. A seed is a start, a batch, the attack's start and a draw of noise. Leakage and
    cost are the two sides of the paper's theorems. With noise: Σ s²/Σ_ii and Σ g²Σ_ii, as multiples
    of those of uniform noise. With pruning: the shares of Σ s² that is sent and of Σ g² that is
    not.
    """

    ARGUMENTS = {"--data": "npz: x_train (N, 28, 28) and y_train, or x (N, 32, 32, 3) and y"}
    DATA = PLAN = "mnist"

    def cells(self) -> dict:
        seeds, settings, fast = SEEDS[self.PLAN], SETTINGS[self.PLAN], {}
        if self.quick:
            seeds, fast = QUICK_SEEDS, {"num_probes": QUICK_PROBES}
            smaller = {name: size for name, size in QUICK.items() if settings[name]}
            settings = settings | smaller | {"network": QUICK_NETWORKS[self.PLAN]}
        return {
            (row, str(seed)): {
                "data": self.DATA, "defense": row.split()[0],
                "strength": strength | (fast if "optimal" in row else {}), **settings,
                "seed": seed,
            }
            for seed in range(seeds)
            for row, strength in ROWS[self.PLAN].items()
        }  # fmt: skip

    def load(self) -> None:
        torch.set_num_threads(1)
        pixels, self.labels = array_images(self.args.data)
        self.images = pixels.float() / 255

    def measure(self, cell: dict) -> dict[str, float]:
        name, seed = cell["defense"], cell["seed"]
        set_seed(seed)
        network, shape = cell["network"]
        model = MODELS[network](MODELS[network].config_class(**shape)).train()
        defense = published(name, **cell["strength"])
        draw = torch.Generator().manual_seed(seed)
        noise, probes = (Stream.from_seeds(seed + 1000 * k) for k in (1, 2))
        rows = torch.randperm(len(self.images), generator=draw)[: CLIENTS * cell["client_batch"]]
        clients = [
            {"pixel_values": self.images[client_rows], "labels": self.labels[client_rows]}
            for client_rows in rows.chunk(CLIENTS)
        ]
        scores = self.attacked(cell, model, clients[0], defense, noise, probes)
        optimizer = torch.optim.Adam(model.parameters(), lr=cell["learning_rate"])
        for _ in range(cell["steps"]):
            step(model, clients, defense, noise)
            optimizer.step()
        with torch.no_grad():
            scores["loss"] = np.mean([float(model(**batch).loss) for batch in clients])
        return {key: round(float(score), 6) for key, score in scores.items()}

    def attacked(self, cell: dict, model, batch: dict, defense, noise, probes) -> dict:
        """What is recovered of the first samples, and the two sides of the theorems."""
        batch = {key: tensor[: cell["attacked"]] for key, tensor in batch.items()}
        gmap = GradientMap(model, batch)
        shared = defense(gmap, generator=noise)
        scores = both_sides(gmap, defense, shared, probes)
        observation = observe(model, batch, shared)
        scores |= (attack_scores := attack_batch(cell, batch, observation))
        if defense.name == "optimal_dp_sgd":  # variance is infinite where clipping left no noise
            variance = {key: v.where(v.isfinite(), 0.0) for key, v in shared.noise.variance.items()}
            observation = replace(observation, noise_variance=variance)
            attack_scores = attack_batch(cell, batch, observation)
        elif "pruning" in defense.name:
            attack_scores = attack_batch(cell, batch, observation, match_nonzero=True)
        return scores | {f"{key} known": score for key, score in attack_scores.items()}

    def report(self, metrics: dict) -> None:
        rows, scores = [], {row: columns_of(runs, SCORES) for row, runs in metrics.items()}
        for row, values in scores.items():
            sides = columns_of(metrics[row], SIDES).T
            rows.append([row, *score_texts(values), *map(interval, sides)])
            rows += [
                [f"{row} less {plain}", *score_texts(values - scores[plain]), *[""] * len(SIDES)]
                for plain in AGAINST.get(row, ())
            ]
        write_table(self.output, ["", *SCORES.values(), *SIDES], rows)
        plot_attacked(metrics, self.output)


class AttackedCifar10(AttackedMnist):
    __doc__ = AttackedMnist.__doc__
    DATA = PLAN = "cifar10"


class LargerNoise(AttackedMnist):
    """Larger noise on CIFAR-10, with shapes of the batch's own: Figures 4, 12 and 13. The network
    is MNIST's, at the rate there, so that one core does it in minutes; all else is as in
    `AttackedCifar10`.
    """

    DATA, PLAN = "cifar10", "noise"


class Losses(AttackedMnist):
    """What the paper's own network of 2.9 M parameters learns behind pruning, at the paper's rate:
    the loss of 8 images before five steps of Adam on them, and after. Nothing is attacked.
    """

    DATA, PLAN = "cifar10", "losses"

    def attacked(self, cell: dict, model, batch: dict, defense, noise, probes) -> dict:
        return {}

    def report(self, metrics: dict) -> None:
        losses = {row: columns_of(runs, ("loss",))[:, 0] for row, runs in metrics.items()}
        rows = [[row, interval(values, 4)] for row, values in losses.items()]
        rows += [
            [f"{row} less {plain}", interval(losses[row] - losses[plain], 4)]
            for row, others in AGAINST.items()
            for plain in others
            if row in losses and plain in losses
        ]
        write_table(self.output, ["", SCORES["loss"]], rows)


def attack_batch(cell: dict, batch: dict, observation: Observation, **knowledge) -> dict:
    settings = {"steps": cell["updates"], "total_variation": 1e-2} | knowledge
    attack = attack_of("inverting_gradients", **settings)
    generator = torch.Generator().manual_seed(cell["seed"] + 3000)
    guess = attack(observation, generator=generator).input.clamp(0, 1)
    scores = score_images([guess], [batch["pixel_values"]], bootstrap=0).mean
    return {"mse": scores["mse"], "psnr": scores["psnr"]}


def both_sides(gmap: GradientMap, defense, shared: Message, probes: Stream) -> dict:
    """What the defense leaks and what it costs, to first order; by probes of its own."""
    variance = shared.noise.variance if shared.noise is not None else {}
    squares = gmap.squared_sensitivity(10, probes, method="exact")
    s2, g, sent = (flat(tensors).double() for tensors in (squares, gmap.gradient(), shared))
    if not variance:
        return {
            "leakage": s2[sent != 0].sum() / s2.sum(),
            "cost": g[sent == 0].square().sum() / g.square().sum(),
        }
    v = flat(variance).double()  # no noise: insensitive, or clipped
    v = torch.where((v > 0) & v.isfinite(), v, torch.nan) / defense.scale**2
    return {
        "leakage": (s2 / v).nansum() / s2.sum(),
        "cost": (g.square() * v).nansum() / g.square().sum(),
    }


def columns_of(runs: dict, names: Iterable[str]) -> np.ndarray:
    return np.array([[run[name] for name in names] for run in runs.values()])


def score_texts(seeds: np.ndarray) -> list[str]:
    pairs = zip(SCORES, seeds.T, strict=True)
    return [interval(values, 1 if "psnr" in name else 3) for name, values in pairs]


def plot_attacked(metrics: dict, output) -> None:
    families = [
        family for family in ("dp_sgd", "pruning") if any(row.startswith(family) for row in metrics)
    ]
    figure, axes = plt.subplots(
        1, len(families), figsize=(6.5 * len(families), 5), layout="constrained", squeeze=False
    )
    for axis, family in zip(axes[0], families, strict=True):
        colors = {family: "tab:blue", f"optimal_{family}": "tab:orange", "none": "black"}
        for name, color in colors.items():
            rows = {row: runs for row, runs in metrics.items() if row.split()[0] == name}
            means = [columns_of(r, ("mse", "mse known", "loss")).mean(0) for r in rows.values()]
            x, mse_known, y = np.array(means).T
            axis.plot(x, y, "o-", color=color, label=name)
            if name.startswith(("optimal", "pruning")):
                axis.plot(mse_known, y, "x--", color=color, label=f"{name}, known")
            for row, *place in zip(rows, x, y, strict=True):
                style = {"textcoords": "offset points", "xytext": (5, 5), "color": color}
                axis.annotate(row.split()[-1], place, **style)
        axis.set_xscale("log")
        axis.set_xlabel("reconstruction MSE (right: hides more)")
        axis.set_ylabel("training loss (down: learns more)")
        axis.legend()
    save(figure, output, dpi=110)


EPOCH = 64  # steps
EQUAL = {"scale": 0.1, "clip": 1.0}
TRAININGS = {
    "noise": {
        "rows": {"none": {}, "dp_sgd": {**EQUAL, "clip_by": "coordinate"}, "optimal_dp_sgd": EQUAL},
        "learning_rate": 1e-3,
        "steps": 8 * EPOCH,
    },
    "pruning": {
        "rows": {
            "none": {},
            "pruning 0.8": {"ratio": 0.8},
            "pruning 0.9": {"ratio": 0.9},
            "optimal_pruning 0.8": {"ratio": 0.8},
        },
        "learning_rate": 5e-4,
        "steps": 3 * EPOCH,
    },
}
TRAINED_SEEDS = 5
PAPER = {"noise: dp_sgd": 0.886, "noise: optimal_dp_sgd": 0.910}  # Appendix D.2: test accuracies
TRAINED_AGAINST = {
    "optimal_dp_sgd": ["dp_sgd"],
    "optimal_pruning 0.8": ["pruning 0.8", "pruning 0.9"],
}
TRAINED_ON, BATCH, WINDOW, SPLITS = 4096, 16, 8, ("train", "test")


class Training(Study):
    """What a network learns of MNIST with them, and where the noise goes.

    Conditions and figures: docs/findings/reproductions.md.
    """

    ARGUMENTS = {"--data": "npz with x_train, y_train, x_test, y_test in uint8"}

    def cells(self) -> dict:
        seeds, fast = (2, {"steps": 1}) if self.quick else (TRAINED_SEEDS, {})
        return {
            (training, row, str(seed)): {
                "defense": row.split()[0], "strength": strength,
                "learning_rate": settings["learning_rate"], "steps": settings["steps"],
                "seed": seed,
            }
            | fast
            for training, settings in TRAININGS.items()
            for seed in range(seeds)
            for row, strength in settings["rows"].items()
        }  # fmt: skip

    def load(self) -> None:
        torch.set_num_threads(1)
        splits = [array_images(self.args.data, split) for split in SPLITS]
        self.data, self.test = ((pixels.float() / 255, labels) for pixels, labels in splits)

    def measure(self, cell: dict) -> dict:
        (images, labels), seed = self.data, cell["seed"]
        defense = published(cell["defense"], **cell["strength"])
        set_seed(seed)
        model = LeakyConvNetForImageClassification(LeakyConvNetConfig())
        optimizer = torch.optim.Adam(model.parameters(), lr=cell["learning_rate"])
        draw, noise = torch.Generator().manual_seed(seed), Stream.from_seeds(seed + 1000)
        shares = torch.randperm(len(images), generator=draw)[:TRAINED_ON].chunk(CLIENTS)
        losses, stds, remaining = [], [], []
        for _ in logging.tqdm(range(cell["steps"]), desc=f"{cell['defense']}, seed {seed}"):
            if not remaining:  # an epoch is over
                orders = [s[torch.randperm(len(s), generator=draw)].split(BATCH) for s in shares]
                remaining = list(zip(*orders, strict=True))[::-1]
            rows_by_client = remaining.pop()
            batches = [
                {"pixel_values": images[rows], "labels": labels[rows]} for rows in rows_by_client
            ]
            maps, messages = step(model, batches, defense, noise)
            optimizer.step()
            losses.append(float(np.mean([float(gmap.loss) for gmap in maps])))
            if (added := messages[-1].noise) is not None:
                finite = {name: v[v.isfinite()] for name, v in added.variance.items()}
                stds.append({name: float(v.sqrt().mean()) for name, v in finite.items()})
        layers = {name: smooth([s[name] for s in stds]) for name in (stds[0] if stds else ())}
        right = predicted_classes(model, self.test[0]) == self.test[1]
        return {
            "accuracy": float(right.float().mean()), "loss": float(np.mean(losses[-EPOCH:])),
            "losses": smooth(losses), "stds": layers,
        }  # fmt: skip

    def report(self, metrics: dict) -> None:
        rows: list[list[object]] = []
        for training in TRAININGS:
            scores = {
                r: columns_of(runs, ("accuracy", "loss")) for r, runs in metrics[training].items()
            }
            for row, values in scores.items():
                title = f"{training}: {row}"
                rows.append([title, *map(interval, values.T), PAPER.get(title, "")])
                rows += [
                    [f"{row} less {plain}, same seeds",
                     *map(interval, (values - scores[plain]).T), ""]
                    for plain in TRAINED_AGAINST.get(row, ())
                ]  # fmt: skip
        header = ["", "test accuracy", "training loss, last epoch", "paper: test accuracy"]
        write_table(self.output, header, rows)
        plot_trained(metrics, self.output)


def smooth(values: list[float]) -> list[float]:
    """Means of successive windows."""
    return [round(float(np.mean(values[i : i + WINDOW])), 6) for i in range(0, len(values), WINDOW)]


def plot_trained(metrics: dict, output) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")

    def draw(axis, curves: list[list[float]], label: str) -> None:
        mean = np.mean(curves, axis=0)
        style = "--" if "bias" in label else "-"
        axis.plot(WINDOW * np.arange(1, len(mean) + 1), mean, style, marker=".", label=label)

    for axis, training in zip(axes, TRAININGS, strict=False):
        for row, runs in metrics[training].items():
            draw(axis, [run["losses"] for run in runs.values()], row)
        axis.set(
            title=f"{training}, mean over seeds", ylabel=f"training loss, mean of {WINDOW} steps"
        )
    runs = metrics["noise"]["optimal_dp_sgd"].values()
    for name in next(iter(runs))["stds"]:
        draw(axes[2], [run["stds"][name] for run in runs], name)
    axes[2].set_yscale("log")
    axes[2].set(title="optimal noise by layer", ylabel="standard deviation, mean over the layer")
    for axis in axes:
        axis.set(xlabel="step")
        axis.legend(fontsize=8)
    save(figure, output, dpi=110)
