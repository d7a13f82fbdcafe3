"""The study of the packaged evaluation networks, in quick mode on generated images and
texts.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModel, AutoTokenizer

from hf_gradguard.networks import load_network, train_text_network
from recipes.studies import evaluation_networks

IMAGE, TEXT = "image-evaluation-network-32", "text-evaluation-network-minilm-l6"
CARDS = Path(__file__).resolve().parents[2] / "model_cards"


@pytest.fixture
def data(mnist: Path, sst2: Path, tmp_path: Path) -> Path:
    """The four data sets: smooth images as CIFAR-10, noise as MNIST."""
    folder = tmp_path / "data"
    for name in ("cifar10", "mnist", "wikitext2"):
        (folder / name).mkdir(parents=True)
    shutil.copy(mnist, folder / "mnist" / "mnist.npz")
    shutil.copytree(sst2, folder / "sst2")
    (folder / "wikitext2" / "test.txt").write_text((sst2 / "train.tsv").read_text())
    slope = np.linspace(40, 200, 32)[None, :, None, None] + np.arange(8)[:, None, None, None]
    images = np.broadcast_to(slope, (8, 32, 32, 3)).astype(np.uint8)
    np.savez(folder / "cifar10" / "cifar10_lossless_train4k.npz", x=images)
    return folder


def test_figures_and_cards(data: Path, encoder: Path, quick, monkeypatch, tmp_path: Path) -> None:
    # The packaged network for texts judges MiniLM's embeddings only: another takes its place.
    embedding, tokenizer = (
        AutoModel.from_pretrained(encoder).get_input_embeddings(),
        AutoTokenizer.from_pretrained(encoder),
    )
    texts = (data / "sst2" / "train.tsv").read_text().splitlines()
    small = train_text_network(
        embedding, tokenizer, texts, steps=2, max_length=12, progress=False, width=16, num_layers=1
    )
    monkeypatch.setattr(
        evaluation_networks,
        "load_network",
        lambda name: small if name == TEXT else load_network(name),
    )
    output, cards = (
        tmp_path / "evalnets",
        shutil.copytree(CARDS, tmp_path / "cards", ignore=shutil.ignore_patterns("*.safetensors")),
    )
    arguments = ["--data", data, "--model", encoder, "--cards", cards]
    study = quick("evalnets", *arguments, output=output)
    figures = study.figures
    smooth, noise = figures[IMAGE].values()
    assert smooth["samples"] == noise["samples"] == 6
    assert smooth["mean_predictions"][0] < 0.3 < 0.8 < smooth["mean_predictions"][-1]
    assert noise["mean_predictions"][0] > 0.8  # where there is nothing but noise to begin with
    assert smooth["spearman"] > 0.9 > noise["spearman"]

    # Again: what is there stays, what is missing comes back, and table and card follow.
    lost = figures[TEXT].pop("SST-2 dev, blended")
    smooth["spearman"] = 0.125
    study.overwrite(figures)
    study.again()
    assert study.figures[TEXT]["SST-2 dev, blended"] == lost
    assert f"| {IMAGE} | CIFAR-10 (lossless) | yes | 0.125 | " in Path(f"{output}.md").read_text()
    for network in (IMAGE, TEXT):
        published, filled = (
            (folder / network / "README.md").read_text() for folder in (CARDS, cards)
        )
        before, after = (text.split("<!-- figures -->")[0] for text in (published, filled))
        assert before == after
        assert published.split("<!-- /figures -->")[1] == filled.split("<!-- /figures -->")[1]
        assert Path(f"{output}_{network}.md").read_text() in filled
    assert "| CIFAR-10 (lossless) | 6 | " in (cards / IMAGE / "README.md").read_text()
