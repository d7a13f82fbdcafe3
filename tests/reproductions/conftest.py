"""Generated data in the formats that the reproductions' scripts read, and a way to run one in quick
mode.
"""

from __future__ import annotations

import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from helpers import save_encoder, word_tokenizer
from transformers import AutoModelForSequenceClassification

import hf_gradguard
from hf_gradguard.networks import (
    TextEvaluationNetwork,
    TextEvaluationNetworkConfig,
    embedding_fingerprint,
)

SCRIPTS = Path(__file__).resolve().parents[2] / "recipes" / "reproductions"
SENTIMENT = Path(hf_gradguard.__file__).parent / "data" / "sentiment"


@pytest.fixture(scope="session")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw, path = np.random.default_rng(0), tmp_path_factory.mktemp("data") / "mnist.npz"
    images = {
        f"x_{split}": draw.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        for split, n in (("train", 96), ("test", 9))
    }
    labels = {
        f"y_{split}": draw.integers(0, 10, n, dtype=np.uint8)
        for split, n in (("train", 96), ("test", 9))
    }
    np.savez(path, **images, **labels)
    return path


@pytest.fixture(scope="session")
def cifar10(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw, path = np.random.default_rng(0), tmp_path_factory.mktemp("data") / "cifar10.npz"
    np.savez(
        path, x=draw.integers(0, 256, (24, 32, 32, 3), dtype=np.uint8), y=draw.integers(0, 10, 24)
    )
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
    return save_encoder(
        tmp_path_factory.mktemp("data") / "encoder", word_tokenizer(words), hidden_size=16
    )


@pytest.fixture
def network(tmp_path: Path, encoder: Path) -> Path:
    """A folder with a random evaluation network for the embeddings of `encoder`."""
    embedding = (
        AutoModelForSequenceClassification.from_pretrained(encoder).get_input_embeddings().weight
    )
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    config = TextEvaluationNetworkConfig(
        embedding_size=embedding.shape[1],
        embedding_fingerprint=embedding_fingerprint(embedding),
        special_token_ids=[0, 1, 2, 3],
        **sizes,
    )
    torch.manual_seed(0)
    made = TextEvaluationNetwork(config)
    made.set_embedding_statistics(embedding)
    made.save_pretrained(tmp_path / "network")
    return tmp_path / "network"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a script of the reproductions in quick mode, or with `full=True` in full."""

    def run(script: str, *arguments: object, full: bool = False) -> None:
        monkeypatch.setattr(
            sys, "argv", [script, *map(str, arguments), *([] if full else ["--quick"])]
        )
        path = (SCRIPTS / script).resolve()
        monkeypatch.syspath_prepend(path.parent)
        runpy.run_path(str(path), run_name="__main__")
        plt.close("all")  # a script ends with its process, a test does not

    return run
