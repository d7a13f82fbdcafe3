"""`gradguard evalnet`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from test_networks import make_texts, make_tokenizer
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    DistilBertForMaskedLM,
    PreTrainedModel,
)

from hf_gradguard.cli import main
from hf_gradguard.models import classifier_head, load_model
from hf_gradguard.networks import TextEvaluationNetwork, embedding_fingerprint, load_network


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    tokenizer = make_tokenizer()
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    BertModel(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_text_network_from_a_file(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(make_texts(20)))
    output = tmp_path / "network"
    data = [
        "--model",
        str(model),
        "--dataset",
        str(tmp_path / "texts.txt"),
        "--output",
        str(output),
    ]
    settings = ["--steps", "2", "--batch_size", "4", "--max_length", "8", "--learning_rate", "1e-3"]
    assert main(["evalnet", "train", *data, *settings]) == 0
    printed = capsys.readouterr().out
    assert str(output) in printed
    assert "On 2 held-out texts the mean absolute error is" in printed
    assert "The packaged network has 0.042 and 0.979" in printed  # after two steps
    network = load_network(output)
    assert isinstance(network, TextEvaluationNetwork)
    assert network.config.base_model == ""  # a folder's name is nobody else's business
    weight = BertModel.from_pretrained(model).get_input_embeddings().weight
    assert network.config.embedding_fingerprint == embedding_fingerprint(weight)
    card = (output / "README.md").read_text()
    assert printed.splitlines()[-1] in card
    assert {score.metric_type for score in ModelCard(card).data.eval_results} == {
        "mae",
        "spearmanr",
    }
    assert "texts.txt" in card
    for text in (card, (output / "config.json").read_text()):
        assert str(tmp_path) not in text


@pytest.mark.parametrize("kind", [BertForMaskedLM, DistilBertForMaskedLM], ids=["bert", "distil"])
def test_local_weights_as_the_hub_has_them(
    kind: type[PreTrainedModel], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """BERT and DistilBERT come with the head of their pre-training. One command gives the network
    by which a classifier of these weights is refined.
    """
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    names = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    if kind is DistilBertForMaskedLM:
        names = {"dim": 8, "n_layers": 1, "n_heads": 2}
    pretrained = kind(kind.config_class(vocab_size=len(tokenizer), **names))
    weights = tmp_path / "weights"
    pretrained.save_pretrained(weights)
    tokenizer.save_pretrained(weights)
    (tmp_path / "texts.txt").write_text("\n".join(make_texts(20)))
    output = tmp_path / "network"
    argv = ["--model", str(weights), "--dataset", str(tmp_path / "texts.txt")]
    argv += ["--output", str(output), "--steps", "2", "--max_length", "8"]
    assert main(["evalnet", "train", *argv]) == 0
    assert "On 2 held-out texts" in capsys.readouterr().out
    classifier, _ = load_model(str(weights), "text-classification", classifier_head(["a", "b"]))
    table = classifier.get_input_embeddings().weight
    assert torch.equal(table, pretrained.get_input_embeddings().weight)
    network = load_network(output)
    assert isinstance(network, TextEvaluationNetwork)
    network.check_embedding(table)
    other = kind(kind.config_class(vocab_size=len(tokenizer), **names))
    with pytest.raises(ValueError, match="fingerprint"):  # weights of another pre-training
        network.check_embedding(other.get_input_embeddings().weight)


def test_image_network_from_an_array(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(
        tmp_path / "images.npz",
        x=np.random.default_rng(0).integers(0, 256, (8, 8, 8), dtype=np.uint8),
    )
    data = ["--dataset", str(tmp_path / "images.npz"), "--output", str(tmp_path / "network")]
    assert main(["evalnet", "train", *data, "--epochs", "1", "--batch_size", "4"]) == 0
    assert "none was held out" in capsys.readouterr().out  # of eight images
    network = load_network(tmp_path / "network")
    assert network.noise_ratio(torch.rand(2, 1, 8, 8)).shape == (2,)
    assert "images.npz" in (tmp_path / "network" / "README.md").read_text()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--steps", "3"], "--steps is for text"),
        (["--model", "m", "--epochs", "1"], "--epochs is for images"),
    ],
)
def test_settings_of_the_other_kind(
    extra: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        main(["evalnet", "train", "--dataset", "x.npz", "--output", str(tmp_path), *extra])
    assert done.value.code == 1
    assert message in capsys.readouterr().err


def test_mistakes_are_said_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").write_text("words\none\n")
    for argv, message in [
        (
            ["train", "--dataset", str(tmp_path / "a.csv"), "--output", str(tmp_path / "o")],
            "It has: words",
        ),
        (["push", str(tmp_path / "nowhere"), "me/net"], "is no folder"),
        (["push", str(tmp_path), "me/net"], "no config.json"),
    ]:
        with pytest.raises(SystemExit) as done:
            main(["evalnet", *argv])
        assert done.value.code == 1
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["evalnet"], ["evalnet", "sell"]])
def test_wrong_action_says_which_there_are(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        main(argv)
    assert done.value.code == 2
    assert "ACTION" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["file", "model"])
def test_where_it_goes_is_seen_to_before_the_training(
    what: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "file" if what == "file" else model
    (tmp_path / "file").write_text("mine")
    before = (model / "config.json").read_bytes()
    data = ["--model", str(model), "--dataset", str(tmp_path / "nowhere.txt")]
    with pytest.raises(SystemExit):
        main(["evalnet", "train", *data, "--output", str(output)])
    assert {"file": "is a file", "model": "holds another model"}[what] in capsys.readouterr().err
    assert (model / "config.json").read_bytes() == before


def test_sizes_of_an_array_are_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "images.npz", image=np.zeros((4, 8, 8), np.uint8))
    data = ["--dataset", str(tmp_path / "images.npz"), "--output", str(tmp_path / "network")]
    with pytest.raises(SystemExit):
        main(["evalnet", "train", *data, "--image_size", "32"])
    assert "leave --num_channels and --image_size out" in capsys.readouterr().err
