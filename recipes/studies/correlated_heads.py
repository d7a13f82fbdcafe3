"""Heads by proof at messages of 16: each sentence in one of them, noise that cancels in the
weights, features of all layers, half-whitened by public text.
"""

import functools
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel
from transformers.utils import logging

from hf_gradguard import GradGuardConfig, GradGuardTrainer
from hf_gradguard.defenses.correlated import make_factor
from hf_gradguard.heads import (
    PrivateHead,
    PrivateHeadConfig,
    PrivateHeadForSequenceClassification,
    private_head,
)
from hf_gradguard.leakage import (
    balls_in_bins_epsilon,
    balls_in_bins_power,
    gaussian_epsilon,
    membership_power,
)

from ..study import Study
from . import frontier_clients as clients
from . import frontier_tables as tables
from .efficientnet_features import standardized_means
from .frontier_heads import FeaturesTask, Rows
from .frontier_rows import DELTA, RATES_SEED
from .lib.device import DEVICE
from .lib.images import images_at, public_images
from .lib.linear_heads import (
    HeadSettings,
    cut,
    held_out_sentences,
    mean_accuracy,
    simulated_heads,
    with_constant,
)
from .lib.tables import write_table
from .lib.text import load_tokenizer, sst2
from .patch_features import PatchFeatures
from .rate_search import RateStudy

CLIP, BATCH, SEEDS = 0.3, 16, 5
GRID = tuple(0.625 * 2**power for power in range(10))
PLANNED = {"correlated": True, "falling_rate": True}  # as a Trainer does by its schedule
ORDERS, TRAININGS = 2, 4  # of samples, and in each of them, when a rate is chosen


class Kind(NamedTuple):
    """How a head is trained.

    Args:
        noise_multiplier: Of `dp_sgd`; `None`: no defense.
        correlated: Whether its noise cancels in the weights.
        middle_rate: Around which rates are tried.
        sampling: Of `dp_sgd`.
    """

    noise_multiplier: float | None
    correlated: bool
    middle_rate: float
    sampling: str | None = None

    @property
    def strength(self) -> dict[str, Any]:
        """The defense's settings."""
        if self.noise_multiplier is None:
            return {}
        strength = {"per_sample": True, "clip": CLIP, "noise_multiplier": self.noise_multiplier}
        if self.sampling is not None:
            strength["sampling"] = self.sampling
        return strength | (PLANNED if self.correlated else {})


NONE, CORRELATED, STRICTEST = "none", "σ 1.5 correlated", "σ 3 correlated"
SECRET = "σ 0.95 correlated (balls in bins)"
KINDS = {
    NONE: Kind(None, False, GRID[4]),
    CORRELATED: Kind(1.5, True, GRID[6]),
    STRICTEST: Kind(3.0, True, GRID[5]),
    SECRET: Kind(0.95, True, GRID[6], "balls_in_bins"),
    "σ 1.5 independent": Kind(1.5, False, GRID[2]),
}
ONE_AND_A_HALF = [NONE, CORRELATED, "σ 1.5 independent"]


class Row(NamedTuple):
    """Trainings of one length.

    Args:
        steps: Messages.
        kinds: Of `KINDS`.
        batch: Samples of a message.
        directions: Of features: one for each message, up to those that are kept.
    """

    steps: int
    kinds: Sequence[str] = ONE_AND_A_HALF
    batch: int = BATCH
    directions: int = 1400

    def place(self, name: str) -> str:
        """Of a kind's cells in the tables."""
        size = f"{self.steps:,} messages of {self.batch}, {self.directions:,} directions"
        return f"{name}, {size}"


ROWS = [
    Row(1590, [*ONE_AND_A_HALF, STRICTEST, SECRET]),
    Row(4209, [NONE, CORRELATED, STRICTEST, SECRET]),
    Row(200, directions=200),
]


def sgd_arguments(folder: str, cell: dict, **settings: Any) -> GradGuardConfig:
    """SGD with a rate that falls to zero, which logs at the end and keeps nothing."""
    return GradGuardConfig(
        folder, defense=cell["defense"], defense_kwargs=cell["strength"],
        learning_rate=cell["learning_rate"], max_steps=cell["steps"], optim="sgd",
        lr_scheduler_type="linear", max_grad_norm=0.0, seed=cell["seed"],
        per_device_train_batch_size=cell["batch"], noise_seed=cell["seed"],
        save_strategy="no", logging_steps=cell["steps"], report_to="none", disable_tqdm=True,
        **settings,
    )  # fmt: skip


class HeadTask(FeaturesTask):
    """Trainings of a head on features of sentences, which are made once and kept in `folder`.

    Rates are chosen on whole sentences that are held out with all of their phrases. What is judged
    on the test sentences is trained on all rows.
    """

    HELD_OUT, LENGTH, PUBLIC, DIRECTIONS = 2500, 64, 4000, Row(0).directions
    TEST = ("dev", "test_labelled_sst")
    folder: Path

    def __init__(self, model: str, data_dir: str, folder: str, public: str) -> None:
        super().__init__(Path(folder) / "correlated-heads")
        self._name, self._data_dir, self._public = model, data_dir, public

    def sentences(self, name: str) -> tuple[list[str], Tensor]:
        """Texts and labels."""
        if name == "public":
            texts = sentences_of(self._public)
            random.Random(0).shuffle(texts)
            return texts[: self.PUBLIC], torch.zeros(min(len(texts), self.PUBLIC)).long()
        splits = self.TEST if name == "test" else ("train",)
        rows = [row for split in splits for row in sst2(self._data_dir, split)]
        labels = torch.tensor([row["label"] for row in rows])
        return [row["sentence"].strip() for row in rows], labels

    @functools.cached_property
    def full_head(self) -> PrivateHead:
        """With its encoder, which features are made by."""
        encoder = AutoModel.from_pretrained(self._name, trust_remote_code=False).to(DEVICE)
        tokenizer = load_tokenizer(self._name)
        public, _ = self.sentences("public")
        return private_head(
            encoder, public, 2, directions=self.DIRECTIONS, processing_class=tokenizer,
            max_length=self.LENGTH,
        )  # fmt: skip

    def rows_of(self, name: str) -> dict[str, Tensor]:
        """`features` (N, directions + 1) and `labels` (N,)."""
        path = self.folder / f"features-{name}.safetensors"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(self.made(name), path)
        return load_file(path)

    def made(self, name: str) -> dict[str, Tensor]:
        """The same, by the encoder, sentences of a length together."""
        texts, labels = self.sentences(name)
        order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
        features = self.full_head.features_of([texts[row] for row in order])
        return {"features": features[torch.tensor(order).argsort()], "labels": labels}

    def start_of(self, rows: dict[str, Tensor]) -> PrivateHead:
        """At zero, without the encoder: features are made."""
        width, classes = rows["features"].shape[1] - 1, int(rows["labels"].max()) + 1
        config = PrivateHeadConfig(directions=width, num_labels=classes)
        return PrivateHeadForSequenceClassification(config)

    def train(self, cell: dict, keep: bool = False) -> nn.Module:
        """By the cell's directions, too."""
        tensors = cut(self.train_rows, cell["directions"])
        if "sampling" in cell["strength"]:  # no more rows than messages hold: each is in one
            generator = torch.Generator().manual_seed(cell["seed"])
            order = torch.randperm(len(tensors["labels"]), generator=generator)
            places = order[: cell["steps"] * cell["batch"]]
            tensors = {name: tensor[places] for name, tensor in tensors.items()}
        rows = Rows(tensors)
        trainer = self.trainer(self.start_of(rows.tensors), rows, cell)
        trainer.train()
        return trainer.model

    @functools.cached_property
    def split(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Rows that rates are tried on, and others to judge them on."""
        held_out, learned = self.places()
        rows = self.train_rows
        first, second = (
            {name: tensor[torch.tensor(places)] for name, tensor in rows.items()}
            for places in (learned, held_out)
        )
        return first, second

    def places(self) -> tuple[list[int], list[int]]:
        """Of rows that are held out, and of those to learn meanwhile."""
        return held_out_sentences(self.sentences("train")[0], self.HELD_OUT)

    def on_held_out(self, cell: dict) -> dict:
        """What a rate is chosen by: as many messages as there are rows for."""
        rows, judged = (cut(part, cell["directions"]) for part in self.split)
        if "constant" in cell:
            rows, judged = (with_constant(part, cell["constant"]) for part in (rows, judged))
        steps = min(cell["steps"], len(rows["labels"]) // cell["batch"])
        given = {name: cell[name] for name in GIVEN if name in cell}
        settings = HeadSettings(cell["learning_rate"], steps, cell["batch"], **given)
        trainings = TRAININGS if settings.noise_multiplier else 1
        heads = [
            simulated_heads(rows["features"], rows["labels"], settings, trainings, order)
            for order in range(ORDERS)
        ]
        scores = [mean_accuracy(weights, judged["features"], judged["labels"]) for weights in heads]
        return {"held_out": round(sum(scores) / ORDERS, 5), "messages": steps}

    def trainer(self, model: nn.Module, rows: Any, cell: dict) -> GradGuardTrainer:
        """One client."""
        args = sgd_arguments(self._scratch.name, cell, remove_unused_columns=False)
        return GradGuardTrainer(model, args, train_dataset=rows)

    def learned(self, cell: dict) -> dict:
        """Accuracy, which test rows are right, and what a proof says."""
        right = self.right(self.train(cell), cut(self.test_rows, cell["directions"]))
        metrics = clients.judgment(right)
        noise = cell["strength"].get("noise_multiplier")
        if noise is not None and cell["strength"].get("correlated"):
            metrics |= of_known_messages(noise)
        if "sampling" in cell["strength"]:  # and here unknown
            metrics |= of_unknown_messages(noise, cell["steps"])
        return metrics


def of_known_messages(noise: float) -> dict[str, float]:
    """What holds for whoever knows in which message a sentence is: it is in one."""
    return dict(zip(PROOF, (gaussian_epsilon(noise, DELTA), membership_power(noise)), strict=True))


def of_unknown_messages(noise: float, steps: int) -> dict[str, float]:
    """What holds for an attacker that does not know in which message a sentence is."""
    mechanism = make_factor("blt", steps, falling_rate=True).column(steps), noise, steps
    epsilon, power = balls_in_bins_epsilon(*mechanism, DELTA), balls_in_bins_power(*mechanism)
    return dict(zip(UNKNOWN, (epsilon, power), strict=True))


class ImagesTask(HeadTask):
    """The same on CIFAR-10, by features of patches of public images.

    Args:
        train: A parquet file of images to train on.
        test: The same, to judge on.
        folder: Keeps features.
        public: An npz of public images.
    """

    HELD_OUT, PUBLIC, DIRECTIONS, FILTERS = 2000, 3000, 800, 200

    def __init__(self, train: str, test: str, folder: str, public: str) -> None:
        super().__init__("", "", folder, public)
        self.folder = Path(folder) / "correlated-image-heads"
        self._files = {"train": train, "test": test}

    @functools.cached_property
    def full_head(self) -> PrivateHead:
        return private_head(self.encoder(), self.public, 10, directions=self.DIRECTIONS)

    @functools.cached_property
    def public(self) -> Tensor:
        """Images that are nobody's secret."""
        return public_images(self._public, self.PUBLIC)

    def encoder(self) -> nn.Module:
        """What features are made by."""
        return PatchFeatures(self.public, self.FILTERS, torch.Generator().manual_seed(0))

    def made(self, name: str) -> dict[str, Tensor]:
        pixels, labels = images_at(self._files[name], name)
        parts = logging.tqdm(pixels.split(1000), desc=f"thousands of images to {name}")
        features = [self.full_head.features_of(part.float() / 255) for part in parts]
        return {"features": torch.cat(features), "labels": labels}

    def places(self) -> tuple[list[int], list[int]]:
        order = list(range(len(self.train_rows["labels"])))
        random.Random(0).shuffle(order)
        return order[: self.HELD_OUT], order[self.HELD_OUT :]


class EfficientNetTask(ImagesTask):
    """The same, by features of all blocks of EfficientNet-Lite0.

    Args:
        network: The folder of its packages.
        train: A parquet file of images to train on.
        test: The same, to judge on.
        folder: Keeps features.
        public: An npz of public images.
    """

    PUBLIC, DIRECTIONS = 2000, 1400

    def __init__(self, network: str, train: str, test: str, folder: str, public: str) -> None:
        super().__init__(train, test, folder, public)
        self.folder = Path(folder) / "correlated-efficientnet-heads"
        self._network = network

    def encoder(self) -> nn.Module:
        return standardized_means(self._network, self.public.to(DEVICE))


# of `HeadSettings`, by a cell
GIVEN = ("clip", "noise_multiplier", "correlated", "momentum", "falling_rate")


def sentences_of(path: str) -> list[str]:
    """Of 4 to 30 words, of a text with a paragraph a line and headings between `=`."""
    lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").split("\n")]
    pieces = (re.split(r"(?<=[.!?]) ", line) for line in lines if line and line[0] != "=")
    return [piece for line in pieces for piece in line if 4 <= len(piece.split()) <= 30]


class Texts(RateStudy):
    """Accuracy on SST-2 of a head on features of all layers, trained by messages of 16 sentences,
    each in one of them, with correlated noise, independent noise and none.

    Conditions and figures: docs/findings/heads.md.
    """

    ARGUMENTS = (
        Study.ALL
        | clients.TEXT_FLAGS
        | {
            "--models": "folder that keeps features",
            "--public": "a public text, WikiText-2's training part, a paragraph a line",
        }
    )
    ROWS, QUICK_ROW = ROWS, Row(2, [NONE, CORRELATED, SECRET])
    MORE_ROWS: Sequence[Row] = ()
    FEATURES = "all layers"
    SEEDS = SEEDS
    FASTER = 0  # by how many steps of the grid its rates are higher

    def cells(self) -> dict:
        """Rates first, then what takes the best of them."""
        cells: dict = {}
        for row, name in self._trainings():
            kind, seeds = KINDS[name], range(1 if self.quick else self.SEEDS)
            search, trained = self.search_of(row, kind), self._trained(row, kind)
            cells |= self.rated_cells(row.place(name), search, trained, seeds)
        # Rates first, then seed by seed: runs that are compared are there together.
        return dict(sorted(cells.items(), key=lambda cell: _seed_order(cell[0])))

    def _trainings(self) -> list[tuple[Row, str]]:
        rows = [*self.ROWS, *(self.MORE_ROWS if self.args.all else ())]
        rows = [self.QUICK_ROW] if self.quick else rows
        return [(row, name) for row in rows for name in row.kinds]

    def search_of(self, row: Row, kind: Kind, **other: float) -> dict[str, dict]:
        """Cells of rates so far, which are simulated on rows that are held out; with other
        settings.
        """
        common: dict[str, Any] = {
            "simulated": True, "steps": row.steps, "batch": row.batch, "seed": RATES_SEED,
            "features": self.FEATURES, "directions": row.directions,
        }  # fmt: skip
        if kind.noise_multiplier is not None:
            common |= {"clip": CLIP, "noise_multiplier": kind.noise_multiplier}
            common |= PLANNED if kind.correlated else {"correlated": False}
        common |= other
        return self.search(common, GRID, self._middle(kind))

    def _middle(self, kind: Kind) -> float:
        """The rate around which others are tried."""
        return GRID[GRID.index(kind.middle_rate) + self.FASTER]

    def _trained(self, row: Row, kind: Kind) -> dict:
        defense = NONE if kind.noise_multiplier is None else "dp_sgd"
        return {"defense": defense, "strength": kind.strength, "steps": row.steps,
                "batch": row.batch, "features": self.FEATURES,
                "directions": row.directions}  # fmt: skip

    def load(self) -> None:
        args = self.args
        self.task = HeadTask(args.model, args.data_dir, args.models, args.public)

    def measure(self, cell: dict) -> dict:
        return self.task.trained(cell)

    def report(self, metrics: dict) -> None:
        rows, tried = [], tables.pop_rates(metrics)
        rates = {
            row.place(name): self.best(self.search_of(row, KINDS[name]))
            for row, name in self._trainings()
        }
        for row, cells in metrics.items():
            runs = cells.get(tables.ACCURACY, {})
            plain = metrics.get(f"{NONE}, {row.partition(', ')[2]}", {}).get(tables.ACCURACY, {})
            first = next(iter(runs.values()), {})
            proof = [f"{first[name]:.2g}" if name in first else "" for name in PROOF + UNKNOWN]
            shown = [row, tried[row], f"{rates[row]:g}", tables.accuracy_text(runs)]
            rows.append([*shown, "" if runs is plain else tables.lost(runs, plain), *proof])
        header = ["", "rates (held out)", "rate", "accuracy", "less than none", *BOUNDS]
        write_table(self.output, header, rows)


class TextsOfMPNet(Texts):
    """The same for a stronger encoder: all-mpnet-base-v2.

    Conditions and figures: docs/findings/heads.md.
    """

    ROWS = [
        Row(1590, [*ONE_AND_A_HALF, SECRET]),
        Row(400, [*ONE_AND_A_HALF, SECRET], directions=400),
        Row(200, [NONE, CORRELATED], directions=200),
    ]


class Choice(Texts):
    """What the settings of such heads were chosen by: simulated trainings on SST-2, judged on whole
    sentences that are held out with all of their phrases.

    Conditions and figures: docs/findings/heads.md.
    """

    OTHERS: dict[str, dict[str, float]] = {
        "as chosen": {}, "700 directions": {"directions": 700}, "no constant": {"constant": 0.0},
        "a bias beside norm 1": {"constant": 1.0}, "clipped to 0.1": {"clip": 0.1},
        "clipped to 1": {"clip": 1.0}, "momentum of 0.9": {"momentum": 0.9},
        "noise planned for the falling rate": {"falling_rate": True},
    }  # fmt: skip
    STEPS_UP = {  # of the grid, from the middle that correlated noise has now
        "clipped to 0.1": 1, "clipped to 1": -3, "momentum of 0.9": -4,
        "noise planned for the falling rate": 0,
    }  # fmt: skip

    def cells(self) -> dict:
        cells, kind = {}, KINDS[CORRELATED]
        for name, other in self.OTHERS.items():
            middle = GRID.index(kind.middle_rate) + self.STEPS_UP.get(name, -1)
            row = self.QUICK_ROW if self.quick else ROWS[0]
            other = {"falling_rate": False} | other  # the one row apart, all were chosen so
            search = self.search_of(row, kind._replace(middle_rate=GRID[middle]), **other)
            cells |= {(name, tables.RATES, rate): cell for rate, cell in search.items()}
        return cells

    def report(self, metrics: dict) -> None:
        header = [f"{CORRELATED}, {ROWS[0].steps:,} messages of {BATCH}", "rates (held out)"]
        write_table(self.output, header, list(tables.pop_rates(metrics).items()))


class Images(Texts):
    """The same on CIFAR-10, by features of patches.

    Conditions and figures: docs/findings/heads.md.
    """

    ARGUMENTS = Study.ALL | {
        "--train": "parquet with img and label, to train on", "--test": "the same, to judge on",
        "--models": "folder that keeps features",
        "--public": "npz with x_train: images that are nobody's secret, Tiny ImageNet",
    }  # fmt: skip
    ROWS = [
        Row(750, [NONE, CORRELATED, SECRET], 64, 800), Row(750, [NONE, CORRELATED], 64, 400)
    ]  # fmt: skip
    MORE_ROWS: Sequence[Row] = ()
    FEATURES, FASTER = "patches", 2

    def load(self) -> None:
        args = self.args
        self.task = ImagesTask(args.train, args.test, args.models, args.public)


class ImagesByEfficientNet(Images):
    """The same by a network that was trained on ImageNet: EfficientNet-Lite0 at 224 pixels.

    Conditions and figures: docs/findings/heads.md.
    """

    ARGUMENTS = Images.ARGUMENTS | {"--network": "folder of the packages of EfficientNet-Lite0"}
    ROWS = [
        Row(750, [*ONE_AND_A_HALF, SECRET], 64, 1400), Row(365, [NONE, CORRELATED], 64, 1400)
    ]  # fmt: skip
    FEATURES = "EfficientNet-Lite0"

    def load(self) -> None:
        args = self.args
        self.task = EfficientNetTask(
            args.network, args.train, args.test, args.models, args.public
        )  # fmt: skip


def _seed_order(place: tuple[str, ...]) -> tuple[bool, str]:
    is_rate = place[1] == tables.RATES
    return not is_rate, "" if is_rate else place[2]


PROOF = ("epsilon", "members_found_at_most")
UNKNOWN = ("epsilon_unknown", "members_found_unknown")  # to whom a row's message is unknown
BOUNDS = ("ε", "members found at most", "ε, message unknown", "members, message unknown")
