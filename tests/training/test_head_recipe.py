"""`recipes/head.py` as a user runs it, in this process."""

from __future__ import annotations

import gzip
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from datasets import DatasetDict, load_dataset
from helpers import save_encoder, word_tokenizer
from safetensors.torch import load_file

import hf_gradguard
from hf_gradguard.leakage import dp_sgd_epsilon, membership_power
from recipes import compare
from recipes.head import Encoder, Head, public_texts, whitening_of

SENTIMENT = Path(hf_gradguard.__file__).parent / "data" / "sentiment"
SCRIPT = Path(__file__).resolve().parents[2] / "recipes" / "head.py"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    texts = (SENTIMENT / "train.tsv").read_text() + (SENTIMENT / "dev.tsv").read_text()
    folder = tmp_path_factory.mktemp("encoder")
    return str(save_encoder(folder, word_tokenizer(sorted(set(texts.split()))), hidden_size=16))


@pytest.fixture
def recipe(encoder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def run(*flags: str) -> dict:
        argv = [str(SCRIPT), "--model_name_or_path", encoder, "--data_dir", str(SENTIMENT)]
        argv += ["--layers", "2", "--output_dir", str(tmp_path), "--use_cpu", "--max_steps", "5"]
        argv += ["--per_device_train_batch_size", "32", "--report_to", "none", *flags]
        monkeypatch.setattr(sys, "argv", argv)
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return json.loads((tmp_path / "metrics.json").read_text())

    return run


def test_what_is_saved_gives_the_accuracy_and_what_is_said_is_proved(
    recipe, encoder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "public.txt"
    lines = (SENTIMENT / "dev.tsv").read_text().splitlines()[1:]
    text.write_text("\n\n".join(line.split("\t")[0] for line in lines[:100]) + "\n")
    found = recipe("--public_text", str(text))
    data = {split: str(SENTIMENT / f"{split}.tsv") for split in ("train", "dev")}
    rows = load_dataset("csv", data_files=data, delimiter="\t", quoting=3)

    whitening = torch.nn.Linear(32, 32)
    model, embed = Head(32, 2, whitening), Encoder(encoder, 2, 64, torch.device("cpu"))
    saved = load_file(tmp_path / "model.safetensors")
    model.load_state_dict(saved)
    with torch.no_grad():
        classes = model(embed(rows["dev"]["sentence"]))["logits"].argmax(1)
        white = model.whitening(embed([line.split("\t")[0] for line in lines[:100]]))
    right = classes == torch.tensor(rows["dev"]["label"])
    assert found["accuracy"] == pytest.approx(float(right.double().mean()), abs=1e-6)
    torch.testing.assert_close(white.mean(0), torch.zeros(32), atol=1e-2, rtol=0)

    epsilon = dp_sgd_epsilon(2.0, 32 / len(rows["train"]), 5, 1e-5)
    assert (found["steps"], found["epsilon"]) == (5, pytest.approx(epsilon, rel=1e-6))
    assert found["members_found_in_a_message_at_most"] == membership_power(2.0)
    assert "of a message at most 3.4% of the members" in capsys.readouterr().out
    assert "noise multiplier 2" in (tmp_path / "README.md").read_text()
    compare.main([str(tmp_path / "metrics.json")])
    assert "| dp_sgd " in capsys.readouterr().out


def test_without_public_text_or_proof(
    recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = recipe("--defense", "none")
    assert set(load_file(tmp_path / "model.safetensors")) == {"head.weight", "head.bias"}
    assert "epsilon" not in found
    assert "members_found_in_a_message_at_most" not in found
    assert "without a proof" in capsys.readouterr().out


def test_labels_may_be_words(recipe, tmp_path: Path) -> None:
    for split in ("train", "dev"):
        lines = (SENTIMENT / f"{split}.tsv").read_text().splitlines()
        words = [line[:-1] + {"0": "bad", "1": "good"}.get(line[-1], line[-1]) for line in lines]
        (tmp_path / f"{split}.tsv").write_text("\n".join(words))
    seeds = ["--noise_seed", "3", "--seed", "3"]
    numbers, words = recipe(*seeds), recipe(*seeds, "--data_dir", str(tmp_path))
    assert (numbers["classes"], words["classes"]) == (["0", "1"], ["bad", "good"])
    assert numbers["accuracy"] == words["accuracy"]


def test_what_cannot_be_meant_is_refused_before_texts_are_embedded(
    recipe, encoder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DatasetDict, "map", None)
    with pytest.raises(SystemExit, match=r"--layers is 4, .* has 3 layers.*Take 1 to 3"):
        recipe("--layers", "4")
    with pytest.raises(SystemExit, match="--layers is 0"):
        recipe("--layers", "0")
    Encoder(encoder, 3, 64, torch.device("cpu"))
    with pytest.raises(SystemExit, match=r"440 of the 440 texts .* it is not public"):
        recipe("--public_text", str(SENTIMENT / "train.tsv"))
    with pytest.raises(SystemExit, match=r"no\.txt is no file"):
        recipe("--public_text", str(tmp_path / "no.txt"))


@pytest.mark.parametrize(
    ("name", "content", "count"),
    [
        ("empty.txt", b"", 0),
        ("one.txt", b"a fine film\n\na fine film\n", 1),
        ("cut.txt.gz", gzip.compress(b"a fine film\na poor play\n", mtime=0)[:20], 0),
        ("numbers.jsonl", b'{"number": 1}\n{"number": 2}\n', 0),
    ],
)
def test_public_text_that_cannot_whiten_is_refused(
    tmp_path: Path, name: str, content: bytes, count: int
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit, match=f"gives {count} different.*UTF-8.*a column text"):
        public_texts(str(tmp_path / name), [])


def test_public_text_is_not_mostly_training_sentences(tmp_path: Path) -> None:
    table, text = tmp_path / "text.jsonl", tmp_path / "text.txt"
    table.write_text('{"text": "a fine film"}\n{"text": "a poor play"}\n')
    text.write_text("a poor play\n\nA fine  film\n a fine film\n")
    assert public_texts(str(table), ["a fine"]) == ["a fine film", "a poor play"]
    packed = tmp_path / "text.txt.gz"
    packed.write_bytes(gzip.compress("caf\xe9\nfilm\n".encode()))  # two words are sure of no other
    assert public_texts(str(packed), []) == ["caf\xe9", "film"]
    with pytest.raises(SystemExit, match=r"2 of the 3 texts .* it is not public"):
        public_texts(str(text), ["a fine film ", "a film"])
    text.write_text("a poor play\na fine film\na plain book\na fine film\n")
    kept = public_texts(str(text), ["a fine film"])
    assert kept.count("a fine film") == 2  # leaving it out would tell that it was trained on


def test_whitened_rows_have_no_mean_and_covariance_one():
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(6, 6, generator=generator) + 3
    rows = torch.randn(500, 6, generator=generator) @ mixed + torch.arange(6.0)
    with torch.no_grad():
        white = whitening_of(rows, 0.0)(rows)
        half = whitening_of(rows, 0.5)(rows)
        scaled = whitening_of(rows, 1.0)(rows)
    torch.testing.assert_close(white.mean(0), torch.zeros(6), atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.cov(white.T), torch.eye(6), atol=1e-4, rtol=0)
    # Shrunk by half, an eigenvalue v of rows whose mean eigenvalue is m becomes 2v / (v + m).
    values = torch.linalg.eigvalsh(torch.cov(rows.T))
    expected = 2 * values / (values + values.mean())
    torch.testing.assert_close(
        torch.linalg.eigvalsh(torch.cov(half.T)), expected, atol=1e-4, rtol=1e-3
    )
    # Shrunk all the way, nothing turns.
    centered = rows - rows.mean(0)
    torch.testing.assert_close(scaled, centered / values.mean().sqrt(), atol=1e-4, rtol=1e-4)
