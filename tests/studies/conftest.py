"""Generated data in the formats that the studies read, and a way to run one in quick mode."""

from __future__ import annotations

import argparse
import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import matplotlib.pyplot as plt
import numpy as np
import pytest
from helpers import UNHEARD, save_encoder, word_tokenizer
from matplotlib.figure import Figure
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import hf_gradguard
from hf_gradguard.networks import save_network, train_image_network, train_text_network
from recipes.results import RUNS
from recipes.studies.lib.results import Results, nested
from recipes.study import Study

SENTIMENT = Path(hf_gradguard.__file__).parent / "data" / "sentiment"


@pytest.fixture(scope="session")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw, path = np.random.default_rng(0), tmp_path_factory.mktemp("data") / "mnist.npz"
    images = {
        f"x_{split}": draw.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        for split, n in (("train", 96), ("test", 10))
    }
    labels = {  # every class among the images to test on
        "y_train": draw.integers(0, 10, 96, dtype=np.uint8),
        "y_test": draw.permutation(10).astype(np.uint8),
    }
    np.savez(path, **images, **labels)
    return path


@pytest.fixture(scope="session")
def cifar10(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw, path = np.random.default_rng(0), tmp_path_factory.mktemp("data") / "cifar10.npz"
    # smooth, as pictures are: what looks like noise to an evaluation network is refused
    x = np.kron(draw.integers(0, 256, (24, 4, 4, 3)), np.ones((1, 8, 8, 1))).astype(np.uint8)
    np.savez(path, x=x, y=draw.integers(0, 10, 24))
    return path


@pytest.fixture(scope="session")
def sst2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.tsv and dev.tsv."""
    return Path(shutil.copytree(SENTIMENT, tmp_path_factory.mktemp("data") / "sst2"))


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory, sst2: Path) -> Path:
    """A folder with a random BERT of two layers and a tokenizer that knows the words of `sst2`."""
    words = sorted(
        {word for split in ("train", "dev") for word in (sst2 / f"{split}.tsv").read_text().split()}
    )
    words += [f"{UNHEARD}{index}" for index in range(2 * len(words))]
    folder = tmp_path_factory.mktemp("data") / "encoder"
    return save_encoder(folder, word_tokenizer(words), hidden_size=16)


@pytest.fixture(autouse=True)
def _quick(few_evaluations: None) -> None:
    """What quick parts read of a gradient is not looked at."""


@pytest.fixture(autouse=True)
def _pictures_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout draws every picture twice, which takes longer than most quick parts."""
    draw = Figure.savefig

    def savefig(figure: Figure, path: Path, **ignored: object) -> None:
        figure.set_layout_engine("none")
        draw(figure, path, dpi=20)

    monkeypatch.setattr(Figure, "savefig", savefig)


SMALL_NETWORK = {
    "steps": 500, "batch_size": 16, "learning_rate": 1e-2, "width": 16, "num_layers": 1,
    "max_length": 16, "progress": False,
}  # fmt: skip


@pytest.fixture
def small_networks(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType], None]:
    """Makes a part train small evaluation networks, whatever it asks for."""

    def small(embedding: object, tokenizer: object, texts: object, **ignored: object) -> object:
        return train_text_network(embedding, tokenizer, texts, **SMALL_NETWORK)

    return lambda part: monkeypatch.setattr(part, "train_text_network", small)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory, encoder: Path, sst2: Path) -> Path:
    """A folder with a small evaluation network for the embeddings of `encoder`."""
    model = AutoModelForSequenceClassification.from_pretrained(encoder)
    sentences = [line.split("\t")[0] for line in (sst2 / "train.tsv").read_text().splitlines()]
    made = train_text_network(
        model.get_input_embeddings(), AutoTokenizer.from_pretrained(encoder), sentences,
        **SMALL_NETWORK,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("data") / "network"
    save_network(made, folder)
    return folder


@pytest.fixture(scope="session")
def image_network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small evaluation network for 3 x 32 x 32 pixels, trained on smooth images."""
    coarse = np.random.default_rng(1).random((200, 4, 4, 3))
    made = train_image_network(
        np.kron(coarse, np.ones((1, 8, 8, 1))), epochs=20, batch_size=20, learning_rate=5e-3,
        augment=False, progress=False, filters=[8, 8],
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("data") / "image_network"
    save_network(made, folder)
    return folder


class QuickStudy:
    """A study in quick mode: `QuickStudy("refiner_ablations", "--train", ..., output=...)` runs it;
    once it ran, so does `again()`.
    """

    def __init__(self, name: str, *arguments: object, output: Path) -> None:
        (run,) = (run for run in RUNS if run.output == name)
        module, _, study = run.target.partition(":")
        self._study = getattr(importlib.import_module(f"recipes.studies.{module}"), study)
        flags = [*map(str, arguments), "--output", str(output), "--quick"]
        study = self._study.parse(flags)
        self.output, self.args, self.cells = output, study.args, study.marked_cells()
        self._run(study)

    def again(self, **changed: object) -> None:
        """Runs it, some of its arguments changed; its pictures are left as they were drawn."""
        with patch.object(Figure, "savefig"):
            self._run(self._study(argparse.Namespace(**vars(self.args) | changed)))

    @staticmethod
    def _run(study: Study) -> None:
        study.run()
        plt.close("all")

    @property
    def figures(self) -> dict:
        return nested(self.cells, Results(self.output))

    def overwrite(self, figures: dict) -> None:
        """Puts these figures in the file, and no others."""
        Path(f"{self.output}.json").unlink()
        results = Results(self.output)
        for place, settings in self.cells.items():
            found = figures
            for name in place:
                found = found.get(name, {}) if isinstance(found, dict) else {}
            if found != {}:
                results.add(settings, found)

    def rows(self, ending: str = "") -> list[list[str]]:
        """Cells of OUTPUT.md, its header left out."""
        lines = Path(f"{self.output}{ending}.md").read_text().splitlines()[2:]
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.fixture
def quick() -> type[QuickStudy]:
    return QuickStudy
