"""Heads by proof at messages of 16: each sentence in one of them, noise that cancels in the
weights, features of all layers, half-whitened by public text.
"""

import functools
import random
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel

from hf_gradguard import GradGuardConfig, GradGuardTrainer
from hf_gradguard.heads import FeatureHead, LayerFeatures, head_of
from hf_gradguard.leakage import gaussian_epsilon, membership_power

from ..study import Study
from . import frontier_clients as clients
from . import frontier_tables as tables
from .frontier_heads import FeaturesTask
from .frontier_rows import DELTA, RATES_SEED
from .lib.device import DEVICE
from .lib.results import Results
from .lib.tables import write_table
from .lib.text import load_tokenizer, sst2

NONE, CORRELATED, INDEPENDENT = "none", "correlated", "independent"
NOISE = {NONE: None, CORRELATED: 1.5, INDEPENDENT: 1.5}
CLIP, BATCH, SEEDS = 0.3, 16, 5
GRID = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
MIDDLE = {NONE: 30.0, CORRELATED: 10.0, INDEPENDENT: 3.0}


class Row(NamedTuple):
    """Trainings of one length.

    Args:
        steps: Messages of 16.
        kinds: Of noise.
    """

    steps: int
    kinds: tuple[str, ...] = (NONE, CORRELATED, INDEPENDENT)


ROWS = [Row(1590, (NONE, CORRELATED))]
MORE_ROWS = [Row(1590, (INDEPENDENT,)), Row(200), Row(4090, (NONE, CORRELATED))]  # with --all


class HeadTask(FeaturesTask):
    """Trainings of a head on features of sentences, which are made once and kept in `folder`."""

    HELD_OUT, LENGTH, PUBLIC, DIRECTIONS = 500, 64, 4000, 1400
    TEST = ("dev", "test_labelled_sst")

    def __init__(self, model: str, data_dir: str, folder: str, public: str, steps: int) -> None:
        super().__init__(Path(folder) / "correlated-heads")
        self._name, self._data_dir, self._public = model, data_dir, public
        self._count = self.HELD_OUT + BATCH * steps

    def sentences(self, name: str) -> tuple[list[str], Tensor]:
        """Texts and labels; those to train on in a fixed, random order."""
        if name == "public":
            texts = sentences_of(self._public)
            random.Random(0).shuffle(texts)
            return texts[: self.PUBLIC], torch.zeros(min(len(texts), self.PUBLIC)).long()
        splits = self.TEST if name == "test" else ("train",)
        rows = [row for split in splits for row in sst2(self._data_dir, split)]
        if name == "train":
            random.Random(0).shuffle(rows)
            rows = rows[: self._count]
        labels = torch.tensor([row["label"] for row in rows])
        return [row["sentence"].strip() for row in rows], labels

    @functools.cached_property
    def full_head(self) -> FeatureHead:
        """With its encoder, which features are made by."""
        encoder = AutoModel.from_pretrained(self._name, trust_remote_code=False).to(DEVICE)
        tokenizer = load_tokenizer(self._name)
        public, _ = self.sentences("public")
        return head_of(encoder, public, self.DIRECTIONS, 2, tokenizer, self.LENGTH)

    def rows_of(self, name: str) -> dict[str, Tensor]:
        """`features` (N, directions) and `labels` (N,)."""
        size = f"-{self._count}" if name == "train" else ""
        assert self.folder is not None
        path = self.folder / f"features-{name}{size}.safetensors"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            texts, labels = self.sentences(name)
            save_file({"features": self.full_head.features_of(texts), "labels": labels}, path)
        return load_file(path)

    def start(self, seed: int) -> FeatureHead:
        """At zero, without the encoder: features are made."""
        width = self.train_rows["features"].shape[1] - 1  # and a constant
        return FeatureHead(LayerFeatures(nn.Identity()), nn.Linear(width, width), 2)

    def trainer(self, model: nn.Module, rows: Any, cell: dict) -> GradGuardTrainer:
        """One client, by SGD with a rate that falls to zero."""
        args = GradGuardConfig(
            self._scratch.name, defense=cell["defense"], defense_kwargs=cell["strength"],
            learning_rate=cell["learning_rate"], max_steps=cell["steps"], optim="sgd",
            lr_scheduler_type="linear", max_grad_norm=0.0, seed=cell["seed"],
            per_device_train_batch_size=cell["batch"], noise_seed=cell["seed"],
            save_strategy="no", logging_steps=cell["steps"], report_to="none", disable_tqdm=True,
            remove_unused_columns=False,
        )  # fmt: skip
        return GradGuardTrainer(model, args, train_dataset=rows)

    def learned(self, cell: dict) -> dict:
        """Accuracies, which test rows are right, and what a proof says."""
        model = self.train(cell)
        right, held_out = (self.right(model, r) for r in (self.test_rows, self.held_out()))
        metrics = {
            "accuracy": float(right.mean()), "held_out": float(held_out.mean()),
            "right": np.packbits(right).tobytes().hex(), "of": len(right),
        }  # fmt: skip
        noise = cell["strength"].get("noise_multiplier")
        if noise is not None:  # a sentence is in one message, known to the attacker
            metrics["epsilon"] = gaussian_epsilon(noise, DELTA)
            metrics["members_found_at_most"] = membership_power(noise)
        return metrics


def sentences_of(path: str) -> list[str]:
    """Of 4 to 30 words, of a text with a paragraph a line and headings between `=`."""
    lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").split("\n")]
    pieces = (re.split(r"(?<=[.!?]) ", line) for line in lines if line and line[0] != "=")
    return [piece for line in pieces for piece in line if 4 <= len(piece.split()) <= 30]


class Texts(Study):
    """Accuracy on SST-2 of a head on features of all layers, trained by messages of 16 sentences,
    each in one of them, with correlated noise, independent noise and none.

    Conditions and figures: docs/findings/correlated_heads.md.
    """

    ARGUMENTS = (
        Study.ALL
        | clients.TEXT_FLAGS
        | {
            "--models": "folder that keeps features",
            "--public": "a public text, WikiText-2's training part, a paragraph a line",
        }
    )

    def cells(self) -> dict:
        """Rates first, then what takes the best of them."""
        cells: dict = {}
        for row in self._rows():
            for kind in row.kinds:
                name = f"{kind}, {row.steps:,} messages of {BATCH}"
                search = self._search(row, kind)
                cells |= {(name, tables.RATES, rate): cell for rate, cell in search.items()}
                rate = MIDDLE[kind] if self.quick else self._chosen(search)
                if rate is None:
                    continue
                cell = self._cell(row, kind) | {"learning_rate": rate}
                for seed in range(1 if self.quick else SEEDS):
                    cells[name, tables.ACCURACY, str(seed)] = cell | {"seed": seed}
        # Rates first, then seed by seed: runs that are compared are there together.
        return dict(sorted(cells.items(), key=lambda cell: _seed_order(cell[0])))

    def _rows(self) -> list[Row]:
        if self.quick:
            return [Row(2, (NONE, CORRELATED))]
        return ROWS + MORE_ROWS * self.args.all

    def _cell(self, row: Row, kind: str) -> dict:
        noise = NOISE[kind]
        strength: dict[str, Any] = {}
        if noise is not None:
            strength = {"per_sample": True, "clip": CLIP, "noise_multiplier": noise}
            if kind == CORRELATED:
                strength["correlated"] = True
        defense = NONE if noise is None else "dp_sgd"
        return {"defense": defense, "strength": strength, "steps": row.steps, "batch": BATCH,
                "features": "all layers"}  # fmt: skip

    def _search(self, row: Row, kind: str) -> dict[str, dict]:
        middle = GRID.index(MIDDLE[kind])
        start = GRID[middle - 1 : middle + 2]
        common = self._cell(row, kind) | {"seed": RATES_SEED}
        results = Results(self.output)
        rates = start[1:2] if self.quick else clients.rates_so_far(results, common, start, GRID)
        return clients.cells_by_rate(common, rates)

    def _chosen(self, search: dict[str, dict]) -> float | None:
        return clients.chosen_rate(Results(self.output), search)

    def load(self) -> None:
        args = self.args
        steps = max(row.steps for row in self._rows())
        self.task = HeadTask(args.model, args.data_dir, args.models, args.public, steps)

    def measure(self, cell: dict) -> dict:
        return self.task.trained(cell)

    def report(self, metrics: dict) -> None:
        rows = []
        for row, cells in metrics.items():
            runs, rates = cells.get(tables.ACCURACY, {}), cells.get(tables.RATES, {})
            plain = metrics.get(f"{NONE}, {row.partition(', ')[2]}", {}).get(tables.ACCURACY, {})
            first = next(iter(runs.values()), {})
            proof = [f"{first[n]:.2g}" if n in first else "" for n in PROOF]
            rate = f"{clients.best_rates({row: rates})[row]:g}" if rates else ""
            shown = [row, rate, tables.accuracy_text(runs), tables.lost(runs, plain)]
            rows.append(shown + proof)
        header = ["", "rate", "accuracy", "less than none", "ε", "members found at most"]
        write_table(self.output, header, rows)


def _seed_order(place: tuple[str, ...]) -> tuple[bool, str]:
    is_rate = place[1] == tables.RATES
    return not is_rate, "" if is_rate else place[2]


PROOF = ("epsilon", "members_found_at_most")
