"""What does each defense cost on images, and leave to attackers, each at its own best learning
rate?
"""

import functools
import itertools
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import gelu
from transformers import PreTrainedModel, ViTConfig, ViTForImageClassification, set_seed

from recipes.small_networks import SmallImageClassifier, SmallImageClassifierConfig

from ..study import Study
from . import frontier_clients as clients
from . import frontier_rows as plan
from . import frontier_tables as tables
from .frontier_attacks import GRAY, attack_images
from .lib.results import Results, named
from .lib.tables import plt, save
from .rate_search import cells_by_rate, chosen_rate, rates_so_far, rates_to_try


def gray_cell() -> tuple[str, dict]:
    """Where it is shown, and the cell."""
    messages = plan.IMAGE_ATTACKS[plan.INVERTING][0]
    return tables.place_of(plan.INVERTING, "end"), {"attack": GRAY, "messages": messages}


def quick_cells(rows: list, **sizes_added: Any) -> dict:
    attacks, sizes = plan.QUICK_IMAGE_ATTACKS, plan.QUICK | sizes_added
    stages = {attack: ["end"] for attack in attacks}
    return tables.fitting(tables.cells_of(rows, 1, stages, attacks, sizes, None, plan.IMAGE_RATE))


def cells_of_rows(results: Results, rows: list, attacks: Iterable, sizes: dict) -> dict:
    """The rates of every row, and then what takes the best of them."""
    cells, best = {}, {}
    for defense, strength in rows:
        row, search = (
            clients.row_of(defense, strength),
            search_of(results, defense, strength, sizes),
        )
        cells |= {(row, tables.RATES, rate): cell for rate, cell in search.items()}
        if (rate := chosen_rate(results, search)) is not None:
            best[row] = rate
    stages = plan.at_all_stages(attacks)
    return cells | tables.fitting(
        tables.cells_of(rows, plan.SEEDS, stages, plan.IMAGE_ATTACKS, sizes, best)
    )


def search_of(results: Results, defense: str, strength: dict, sizes: dict) -> dict[str, dict]:
    """Cells of a row's rates, so far."""
    common = {"defense": defense, "strength": strength, "seed": plan.RATES_SEED, **sizes}
    start = rates_to_try(strength, plan.SPREAD, plan.IMAGE_RATE, plan.IMAGE_GRID)
    return cells_by_rate(common, rates_so_far(results, common, start, plan.IMAGE_GRID))


START, END = (tables.place_of(plan.INVERTING, stage) for stage in ("start", "end"))
ALIKE = [
    (f"optimal_noise relative_scale={r}", f"gaussian_noise relative_scale={r}") for r in (1, 5, 20)
]
OTHERS = [
    ("gaussian_noise relative_scale=5", "pruning ratio=0.99 error_feedback=True"),
    ("gradient_sketch", "gaussian_noise relative_scale=20"),
]
GROWING = (*ALIKE[0], "gaussian_noise relative_scale=5", "pruning ratio=0.99")
PAIRS: list[tuple[str, ...]] = [
    *ALIKE, *OTHERS, *((*rows, END, END) for rows in (*ALIKE, OTHERS[0])),
    (*ALIKE[0], tables.place_of(plan.UNAWARE, "end"), END),
    *((row, row, END, START) for row in GROWING),
]  # fmt: skip
"""Rows whose difference docs/findings/images.md speaks of."""


class Images(Study):
    """Accuracy on CIFAR-10 of each defense at its own best learning rate, and what attackers
    recover at the start, in the middle and at the end of its own training.

    Conditions and figures: docs/findings/images.md.
    """

    ARGUMENTS = clients.IMAGE_FLAGS | Study.ALL | plan.FOLDER
    LOOK = tables.Look("psnr", "PSNR in dB of the best reconstruction (less is better)", -25)

    def cells(self) -> dict:
        if self.quick:
            return quick_cells(plan.QUICK_ROWS)
        place, gray = gray_cell()
        results = Results(self.output)
        rows = cells_of_rows(results, plan.IMAGE_ROWS, plan.IMAGE_ATTACKS, plan.IMAGE_SIZES)
        return self.published({(GRAY, place, "0"): gray} | rows)

    def load(self) -> None:
        self.task = clients.ImageTask(self.args.train, self.args.test, self.args.models)

    def measure(self, cell: dict) -> dict:
        if "attack" in cell:
            return attack_images(cell, self.task, self.args.images)
        return self.task.trained(cell)

    def report(self, metrics: dict) -> None:
        # Without rows whose search for a rate has not ended
        metrics = {row: cells for row, cells in metrics.items() if set(cells) != {tables.RATES}}
        columns = {"rates (held out)": tables.pop_rates(metrics)}
        tables.write_frontier(metrics, plan.IMAGE_ATTACKS, self.output, columns)
        tables.write_lists(metrics, plan.IMAGE_ATTACKS, self.output)
        tables.write_pairs(metrics, PAIRS, self.output)
        tables.picture(metrics, self.output, self.LOOK)


class ResNet(SmallImageClassifier):
    """ResNet10 with group normalization, whose means are of one image, and GELU, which gradient
    matching inverts better than ReLU. 308,618 parameters.
    """

    config_class = SmallImageClassifierConfig
    WIDTHS = (16, 32, 64, 128)  # of its four stages

    def __init__(self, config: SmallImageClassifierConfig) -> None:
        super().__init__(config)
        first_width, *_, last_width = self.WIDTHS
        # Made before the blocks: seeds give every layer its weights in this order.
        entry = nn.Conv2d(config.num_channels, first_width, 3, stride=2, padding=1)
        blocks = [Block(first_width, first_width, 1)]
        blocks += [Block(inputs, outputs, 2) for inputs, outputs in itertools.pairwise(self.WIDTHS)]
        self.layers = nn.Sequential(
            entry, nn.GroupNorm(8, first_width), nn.GELU(), *blocks, nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(last_width, config.num_labels),
        )  # fmt: skip

    def logits(self, pixel_values: Tensor) -> Tensor:
        logits: Tensor = self.layers(2 * pixel_values - 1)
        return logits


class Block(nn.Module):
    """Two convolutions beside a short cut (He et al., 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.long = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.GroupNorm(8, outputs),
            nn.GELU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(8, outputs),
        )  # fmt: skip
        same = inputs == outputs and stride == 1
        self.short = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return gelu(self.long(x) + self.short(x))


VIT = {
    "hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 192,
    "patch_size": 8, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def network(name: str, channels: int, side: int, classes: int) -> PreTrainedModel:
    """`"convolutions"` is the frontier's own, `"vit"` has 320,554 parameters for CIFAR-10."""
    shape = {"num_channels": channels, "image_size": side, "num_labels": classes}
    if name == "vit":
        return ViTForImageClassification(ViTConfig(**VIT, **shape))
    kind = {"convolutions": clients.Network, "resnet": ResNet}[name]
    return kind(SmallImageClassifierConfig(**shape))


class ElsewhereTask(clients.ImageTask):
    """A network and images, by their name in the settings.

    Args:
        name: Of `ELSEWHERE`.
        files: Of each data set, of training and of test images; one npz may hold both.
        folder: That keeps what is trained.
    """

    def __init__(self, name: str, files: dict[str, tuple[str, str]], folder: str) -> None:
        self._network, self.images = plan.ELSEWHERE[name]
        super().__init__(*files[self.images], folder=f"{folder}/{name}")
        self.flips = self.images != "mnist"
        self.judged = "val" if self.images == "tiny_imagenet" else "test"

    def start(self, seed: int) -> PreTrainedModel:
        pixels, labels = self.train_rows
        set_seed(seed)
        return network(self._network, *pixels.shape[1:3], int(labels.max()) + 1)


class Elsewhere(Study):
    """The frontier on images once more, by other networks and on other images.

    Conditions and figures: docs/findings/images.md.
    """

    ARGUMENTS = clients.IMAGE_FLAGS | plan.FOLDER | {
        "--mnist": "npz with x_train, y_train, x_test and y_test",
        "--tiny_imagenet": "npz with x_train, y_train, x_val and y_val",
    } | Study.ALL  # fmt: skip
    PAIRS = [("gradient_sketch", "gaussian_noise relative_scale=20")]
    LABEL = "TPR at 1 % FPR of members of 16 (candidate set; less is better)"
    QUICK_ROWS = plan.QUICK_ROWS

    def cells(self) -> dict:
        """Place by place."""
        results, cells = Results(self.output), {}
        for name in plan.ELSEWHERE:
            if self.quick:
                place_cells = quick_cells(self.QUICK_ROWS, place=name)
            else:
                (place, gray), sizes = gray_cell(), plan.IMAGE_SIZES | {"place": name}
                rows, attacks = plan.ELSEWHERE_ROWS, plan.ELSEWHERE_ATTACKS
                place_cells = {(GRAY, place, "0"): gray | {"place": name}}
                place_cells |= cells_of_rows(results, rows, attacks, sizes)
            cells |= {(name, *place): cell for place, cell in place_cells.items()}
        return self.published(cells)

    def load(self) -> None:
        args = self.args
        self.attacked = {
            "cifar10": args.images, "mnist": args.mnist, "tiny_imagenet": args.tiny_imagenet
        }  # fmt: skip
        files = {name: (path, path) for name, path in self.attacked.items()}
        files["cifar10"] = args.train, args.test
        self.task = functools.cache(lambda name: ElsewhereTask(name, files, args.models))

    def measure(self, cell: dict) -> dict:
        task = self.task(cell["place"])
        if "attack" in cell:
            return attack_images(cell, task, self.attacked[task.images])
        return task.trained(cell)

    def report(self, metrics: dict) -> None:
        figure, panels = plt.subplots(2, 2, figsize=(13, 10), layout="constrained")
        for axes, (name, rows) in zip(panels.flat, metrics.items(), strict=True):
            columns = {"rates (held out)": tables.pop_rates(rows)}
            ending = "_" + name.lower().replace(" ", "_")
            tables.write_frontier(rows, plan.IMAGE_ATTACKS, named(self.output, ending), columns)
            tables.write_pairs(rows, self.PAIRS, named(self.output, ending))
            runs = [
                places[tables.ACCURACY] for places in rows.values() if tables.ACCURACY in places
            ]
            most = max(
                tables.accuracy_lost(run, rows["none"][tables.ACCURACY]).mean for run in runs
            )
            tables.draw(axes, rows, tables.Look(tables.TPR, self.LABEL, -110 * max(most, 0.01)))
            axes.set_title(name)
        for axes in panels.flat[:-1]:
            axes.get_legend().remove()
        save(figure, self.output)
