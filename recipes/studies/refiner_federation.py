"""The Refiner paper's federation on CIFAR-10 in small: the utility of a LeNet that clients train,
and what an attack recovers from their messages.

Ten clients; two, drawn at random, answer each round with a protected gradient of 16 images; the
server averages and takes a step of Adam (the paper: all ten, 128 images, 8,000 rounds). PMM is the
accuracy relative to that without a defense, same seed. PSNR is what Inverting Gradients (cosine,
total variation, L-BFGS) makes of single lossless images' protected gradients at the initial
weights; the label is recovered from the gradient.
"""

import copy
import statistics
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import set_seed
from transformers.utils import logging

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.metrics import score_images
from hf_gradguard.randomness import Stream
from hf_gradguard.training.clients.partition import partition_dirichlet
from recipes.small_networks import LeakageLeNetConfig, LeakageLeNetForImageClassification

from ..study import Study
from .lib.defenses import published
from .lib.images import (
    INVERTING,
    QUICK_SMOOTHING,
    SMOOTHING,
    flat,
    parquet_images,
    predicted_classes,
    single_images,
    smoothed,
)
from .lib.tables import interval, plt, save, write_table
from .lib.training import take_mean

CLIENTS, CLIENTS_PER_ROUND, BATCH, LEARNING_RATE = 10, 2, 16, 5e-3
TRAINING = {"--train": "parquet with img and label, to train on", "--test": "the same, to test on"}
SEEDS, QUICK_SEEDS = 3, 2
BASE = {"alpha": 0.5}  # the paper's; beta 1, tau 0.95, ten iterations
ABLATIONS: dict[str, dict] = {
    "none": {},
    **{f"alpha={a}": {"alpha": a} for a in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)},
    **{f"tau={t}": BASE | {"tau": t} for t in (0.91, 0.93, 0.97, 1.0)},
    "element_wise=False": BASE | {"element_wise": False},
    **{f"epsilon={e}": BASE | {"epsilon": e} for e in (0.05, 0.1, 1.0)},
    **{f"beta={b}": BASE | {"beta": b} for b in (0.001, 0.1, 10.0, 1000.0)},
    **{f"iterations={i}": BASE | {"iterations": i} for i in (5, 20)},
}
QUICK_ABLATIONS = ("none", "alpha=0.9", "epsilon=0.05", "beta=1000.0")
# What the rows of ε show is their PSNR; twenty iterations take their time.
ONE_SEED = ("epsilon", "iterations=20")
PAPER_ABLATIONS = {  # PMM and PSNR of Tables 5 to 8 and 10
    "none": (100, ""),
    "alpha=0.0": (98.52, 21.24), "alpha=0.1": (95.45, 16.52), "alpha=0.3": (92.61, 14.99),
    "alpha=0.5": (90.69, 13.20), "alpha=0.7": (90.08, 12.53), "alpha=0.9": (89.34, 10.52),
    "tau=0.91": (90.98, 12.93), "tau=0.93": (90.82, 13.05), "tau=0.97": (90.46, 13.25),
    "tau=1.0": (89.28, 15.44), "element_wise=False": (85.32, 13.15),
    "beta=0.001": (91.93, 13.89), "beta=0.1": (91.06, 13.44), "beta=10.0": (90.00, 13.08),
    "beta=1000.0": (88.90, 12.04),
    "iterations=5": (85.61, 13.05), "iterations=20": (92.17, 13.45),
}  # fmt: skip

PARTITIONS = ("iid", "dirichlet")
FRONTIER: dict[str, list[dict]] = {
    "none": [{}],
    "refiner": [{"alpha": a} for a in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)],
    "gaussian_noise": [{"relative_scale": s} for s in (0.01, 0.03, 0.1, 0.3, 1.0)],
    "laplace_noise": [{"relative_scale": s} for s in (0.01, 0.03, 0.1, 0.3, 1.0)],
    "optimal_noise": [{"relative_scale": s, "refresh_every": 10} for s in (0.03, 0.1, 0.3)],
    "pruning": [{"ratio": r} for r in (0.5, 0.7, 0.9, 0.99)],
    "quantization": [{"bits": b} for b in (8, 4, 2)],
    "soteria": [{"ratio": 0.5}],
}
KNOWLEDGE_SETTINGS: dict[
    str, dict
] = {  # what an attacker that knows the defense sets, beside the smoothing
    "pruning": {"match_nonzero": True},
    "soteria": {"leave_out": ["classifier"]},
}
FEWER_SEEDS = {("soteria", "iid"): 1, ("soteria", "dirichlet"): 0}


class Federation(Study):
    """Defenses, what clients learn behind them, and what an attack recovers."""

    ARGUMENTS: dict[str, Any] = TRAINING | {
        "--images": "npz with x (N, 32, 32, 3) and y: images to attack",
        "--evaluation_network": "a smaller one trains faster; see docs/results.md",
    }

    def training_cell(self, defense: str, strength: dict, partition: str, seed: int) -> dict:
        return {
            "measure": "accuracy", "defense": defense, "strength": strength, "partition": partition,
            "rounds": 1 if self.quick else 500, "seed": seed,
        }  # fmt: skip

    def attack_cell(self, defense: str, strength: dict, knowledge: dict | None = None) -> dict:
        """The attacker knows the defense if there is `knowledge`: further settings of Inverting
        Gradients; of several values of `total_variation` it takes the one that is best on images of
        its own.
        """
        settings = {"steps": 1 if self.quick else 60} | INVERTING | (knowledge or {})
        settings |= QUICK_SMOOTHING if self.quick and knowledge else {}
        own_images = {"own": 1 if self.quick else 4} if knowledge else {}
        samples = {"samples": 2 if self.quick else 16}
        cell = {"measure": "attack", "defense": defense, "strength": strength}
        return cell | {"settings": settings} | samples | own_images

    def load(self) -> None:
        self.train, self.test = parquet_images(self.args.train), parquet_images(self.args.test)

    def measure(self, cell: dict) -> float | dict:
        defense = published(cell["defense"], self.args.evaluation_network, **cell["strength"])
        if cell["measure"] == "accuracy":
            return self.accuracy(cell, defense)
        return attack_images(
            cell, defense, single_images(self.args.images, cell["samples"] + cell.get("own", 0))
        )

    def accuracy(self, cell: dict, defense) -> float:
        """On test images, after training on clients with equal shares, or of labels drawn from a
        Dirichlet distribution.
        """
        (images, labels), seed, rounds = self.train, cell["seed"], cell["rounds"]
        draw, noise = torch.Generator().manual_seed(seed), Stream.from_seeds(seed + 1000)
        if cell["partition"] == "iid":
            client_rows = torch.randperm(len(images), generator=draw).chunk(CLIENTS)
        else:
            shares = partition_dirichlet(labels.numpy(), CLIENTS, 1.0, np.random.default_rng(seed))
            client_rows = [torch.from_numpy(share) for share in shares]
        model = lenet(seed)
        defenses = [copy.deepcopy(defense) for _ in client_rows]  # each remembers its own batches
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / rounds)
        title = f"{defense.name}, {cell['partition']}, seed {seed}"
        for _ in logging.tqdm(range(rounds), desc=title):
            messages = []
            for client in torch.randperm(CLIENTS, generator=draw)[:CLIENTS_PER_ROUND]:
                rows = client_rows[client][
                    torch.randint(len(client_rows[client]), (BATCH,), generator=draw)
                ]
                batch = {"pixel_values": images[rows].float() / 255, "labels": labels[rows]}
                second_order = defense.facts.needs_second_order
                gmap = GradientMap(model, batch, second_order=second_order)
                messages.append(defenses[client](gmap, generator=noise))
            take_mean(model, messages)
            optimizer.step()
            schedule.step()
        return test_accuracy(model, self.test)


def attack_images(cell: dict, defense, batches: list[dict]) -> dict:
    """Scores of the reconstructions, and what the defense did to the gradients that they are from.

    Args:
        cell: Settings.
        defense: Copied for each message.
        batches: Those attacked, and then the attacker's own.
    """
    model, count = lenet(seed=0), cell["samples"]
    observations, cosines, distances, norms = [], [], [], []
    images = [batch["pixel_values"] for batch in batches]
    for number, batch in enumerate(batches):
        gmap = GradientMap(model, batch)
        shared = copy.deepcopy(defense)(gmap, generator=Stream.from_seeds(number))
        true, sent = flat(gmap.gradient()), flat(shared)
        cosines.append(float(cosine_similarity(true, sent, dim=0)))
        distances.append(float((true - sent).norm()))
        norms.append(float(true.norm()))
        observations.append(Observation(model, shared, input_shape=tuple(images[0].shape)))
    settings = smoothed(cell["settings"], observations[count:], images[count:])
    attack = make_attack("inverting_gradients", **settings)
    results = attack.reconstruct_many(observations[:count], torch.Generator().manual_seed(0))
    psnr = score_images([result.input for result in results], images[:count]).per_sample["psnr"]
    means = {"cosine": cosines, "distance": distances, "norm": norms}
    means = {name: statistics.mean(values[:count]) for name, values in means.items()}
    return {"psnr": psnr, "total_variation": settings["total_variation"], **means}


def lenet(seed: int) -> LeakageLeNetForImageClassification:
    set_seed(seed)
    return LeakageLeNetForImageClassification(LeakageLeNetConfig()).eval()


def test_accuracy(model, test: tuple[Tensor, Tensor]) -> float:
    pixels, labels = test
    return float((predicted_classes(model, pixels) == labels).float().mean())


def pmm(accuracies: dict[str, float], plain: dict[str, float]) -> list[float]:
    """Accuracies relative to those without a defense, in %, seed by seed."""
    return [100 * accuracy / plain[seed] for seed, accuracy in accuracies.items()]


def percent(accuracies: dict[str, float]) -> str:
    return interval([100 * accuracy for accuracy in accuracies.values()], 1)


class Ablations(Federation):
    """Refiner's ablations on CIFAR-10 with the leakage papers' LeNet: what each setting costs and
    what it hides.

    Conditions and figures: docs/findings/refiner.md.
    """

    def cells(self) -> dict:
        cells = {}
        for row in QUICK_ABLATIONS if self.quick else ABLATIONS:
            defended = ("none" if row == "none" else "refiner", ABLATIONS[row])
            cells[row, "attack"] = self.attack_cell(*defended)
            seeds = 1 if row.startswith(ONE_SEED) else QUICK_SEEDS if self.quick else SEEDS
            for seed in range(seeds):
                cells[row, "accuracy", str(seed)] = self.training_cell(*defended, "iid", seed)
        return cells

    def report(self, metrics: dict) -> None:
        rows: list[list[object]] = []
        for row, cells in metrics.items():
            accuracies, attack = cells["accuracy"], cells["attack"]
            shown = [interval(pmm(accuracies, metrics["none"]["accuracy"]), 0), percent(accuracies)]
            shown += [interval(attack["psnr"], 1)]
            shown += [f"{attack['cosine']:.3f}", f"{attack['distance']:.2f}"]
            rows.append([row, *shown, *PAPER_ABLATIONS.get(row, ("", ""))])
        header = ["", "PMM", "accuracy", "PSNR", "cosine", "distance to the true gradient"]
        write_table(self.output, [*header, "paper: PMM", "paper: PSNR"], rows)


class Frontier(Federation):
    """Refiner against the other defenses on CIFAR-10: what each strength costs in accuracy, and
    what it hides.

    Conditions and figures: docs/findings/refiner.md.
    """

    def cells(self) -> dict:
        cells = {}
        for name, strengths in FRONTIER.items():
            for strength in strengths[: 1 if self.quick else None]:
                shown = [f"{k}={v}" for k, v in strength.items() if k != "refresh_every"]
                row, defended = " ".join([name, *shown]), (name, strength)
                cells[row, "attack"] = self.attack_cell(*defended)
                knowledge_settings = SMOOTHING | KNOWLEDGE_SETTINGS.get(name, {})
                cells[row, "known"] = self.attack_cell(*defended, knowledge_settings)
                for partition in PARTITIONS:
                    seeds = QUICK_SEEDS if self.quick else SEEDS
                    for seed in range(FEWER_SEEDS.get((name, partition), seeds)):
                        cell = self.training_cell(*defended, partition, seed)
                        cells[row, partition, str(seed)] = cell
        return cells

    def report(self, metrics: dict) -> None:
        rows, plain = [], metrics["none"]
        for row, cells in metrics.items():
            shown = [interval(cells[attacker]["psnr"], 1) for attacker in ("attack", "known")]
            shown += [f"{cells['attack']['cosine']:.3f}"]
            for partition in PARTITIONS:
                if runs := cells.get(partition, {}):
                    shown += [interval(pmm(runs, plain[partition]), 0), percent(runs)]
                else:
                    shown += ["", ""]
            rows.append([row, *shown])
        columns = [
            f"{quantity}, {partition}"
            for partition in PARTITIONS
            for quantity in ("PMM", "accuracy")
        ]
        write_table(self.output, ["", "PSNR", "PSNR, known", "cosine", *columns], rows)
        plot_frontier(metrics, self.output)


def plot_frontier(metrics: dict, output) -> None:
    """PMM over PSNR, with standard errors."""
    size = {"figsize": (13, 4.8), "layout": "constrained"}
    figure, panels = plt.subplots(1, len(PARTITIONS), sharey=True, **size)
    names = list(dict.fromkeys(row.split()[0] for row in metrics))
    for axes, partition in zip(panels, PARTITIONS, strict=True):
        curves: dict[tuple[str, str], list] = {}
        for row, cells in metrics.items():
            if partition not in cells:
                continue
            relative = pmm(cells[partition], metrics["none"][partition])
            error = np.std(relative, ddof=1) / len(relative) ** 0.5 if len(relative) > 1 else 0.0
            for attacker in ("attack", "known"):
                point = (np.mean(cells[attacker]["psnr"]), np.mean(relative), error)
                curves.setdefault((row.split()[0], attacker), []).append(point)
        for color, name in enumerate(names):
            for attacker, title, style in (("attack", name, "o-"), ("known", None, "x--")):
                if points := curves.get((name, attacker)):
                    x, y, errors = zip(*sorted(points), strict=True)
                    look = {"fmt": style, "color": f"C{color}", "capsize": 2, "label": title}
                    axes.errorbar(x, y, errors, **look)
        axes.set(title=partition, xlabel="PSNR of Inverting Gradients in dB (left: hidden)")
    panels[0].set(ylabel="PMM in % (up: useful)")
    handles, titles = panels[0].get_legend_handles_labels()
    figure.legend(handles, titles, loc="outside right upper", title="dashed: known")
    save(figure, output, dpi=110)
