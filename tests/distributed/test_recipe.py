"""`recipes/sst2.py` and `gradguard train` as a user runs them on two ranks."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import save_encoder, word_tokenizer
from launcher import environment
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
)

from hf_gradguard.cli import main
from hf_gradguard.heads import PrivateHeadForSequenceClassification

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "recipes/sst2.py"
DEMO = ["--config", "recipes/configs/demo.yaml"]
pytestmark = pytest.mark.distributed


def recipe(*flags: str) -> subprocess.CompletedProcess[str]:
    return on_two_ranks(SCRIPT, *flags)


def on_two_ranks(*command: str) -> subprocess.CompletedProcess[str]:
    launch = ["-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    return subprocess.run(
        [sys.executable, *launch, "--multi_gpu", *command],
        cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=240, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One epoch of the demo on two ranks."""
    folder = tmp_path_factory.mktemp("demo")
    settings = '{"relative_scale": 0.5, "strength": "own", "refresh_every": 7}'
    flags = ["--defense", "optimal_noise", "--defense_kwargs", settings, "--num_train_epochs", "1"]
    done = recipe(*DEMO, *flags, "--output_dir", str(folder))
    assert done.returncode == 0, done.stdout[-4000:]
    assert "ranks: 2\n" in done.stdout
    return folder


def test_metrics(demo: Path) -> None:
    metrics = json.loads((demo / "metrics.json").read_text())
    assert (metrics["defense"], metrics["ranks"], metrics["steps"]) == (
        "optimal_noise",
        2,
        14,
    )  # 440 / 2 / 16, rounded up
    assert metrics["settings"]["relative_scale"] == 0.5
    assert metrics["settings"]["refresh_every"] == 7
    assert metrics["eval_sentences"] == 120
    assert 0.3 < metrics["accuracy"] < 1
    assert metrics["defense/relative_error"] == pytest.approx(
        0.5, rel=0.05
    )  # of some 10⁵ draws a message
    assert metrics["seconds_per_step"] > metrics["defense/seconds"] > 0


def test_model_and_tokenizer_load(demo: Path) -> None:
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(demo),
        AutoTokenizer.from_pretrained(demo),
    )
    logits = model(
        **tokenizer(["a fine book", "the food was cold"], padding=True, return_tensors="pt")
    ).logits
    assert logits.shape == (2, 2)
    assert torch.isfinite(logits).all()


def test_card_has_a_privacy_section(demo: Path) -> None:
    card = (demo / "README.md").read_text()
    assert "## Privacy" in card
    assert "Defense: `optimal_noise`" in card
    assert "2 rank(s) with 1 client(s) each" in card


def test_a_file_of_flags_trains_on_two_ranks_as_on_one(tmp_path: Path) -> None:
    """`accelerate launch -m hf_gradguard train --config FILE`, on tables whose labels are words.
    Undefended, two ranks of four rows average to the gradient of all eight.
    """
    words = [f"w{i}" for i in range(12)]
    rows = [f"w{i} w{i + 1} w{i % 3},{'good' if i % 2 else 'bad'}" for i in range(8)]
    (tmp_path / "rows").mkdir()
    for split in ("train", "dev"):
        (tmp_path / "rows" / f"{split}.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    encoder = save_encoder(tmp_path / "encoder", word_tokenizer(words), 16)
    settings = json.loads((encoder / "config.json").read_text())
    settings |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    settings |= {"id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1}}
    (encoder / "config.json").write_text(json.dumps(settings))
    config = tmp_path / "train.yaml"
    config.write_text(
        f"model: {encoder}\ndataset: {tmp_path / 'rows'}\ndefense: none\nmax_steps: 3\n"
        "per_device_train_batch_size: 4\nlearning_rate: 0.5\noptim: sgd\nuse_cpu: true\n"
        "lr_scheduler_type: constant\nlogging_steps: 1\n"
        # Otherwise the stock Trainer multiplies a classifier's mean loss by the number of ranks.
        "average_tokens_across_devices: false\n"
    )
    flags = ["train", "--config", str(config)]
    two = tmp_path / "two"
    done = on_two_ranks("-m", "hf_gradguard", *flags, "--num_ranks", "2", "--output", str(two))
    assert done.returncode == 0, done.stdout[-4000:]
    assert done.stdout.count("ranks: 2\n") == 1
    metrics = json.loads((two / "metrics.json").read_text())
    assert (metrics["ranks"], metrics["steps"], metrics["defense"]) == (2, 3, "none")
    assert metrics["eval_sentences"] == 8
    assert "2 rank(s) with 1 client(s) each" in (two / "README.md").read_text()
    flags += ["--per_device_train_batch_size", "8", "--output", str(tmp_path / "one")]
    assert main(flags) == 0
    start, one, both = (
        AutoModelForSequenceClassification.from_pretrained(folder).state_dict()
        for folder in (encoder, tmp_path / "one", two)
    )
    # The gradient of a key's bias is zero but for rounding.
    names = [name for name in one if not name.endswith("key.bias")]
    moved = [name for name in names if not torch.equal(start[name], one[name])]
    assert "bert.encoder.layer.0.attention.self.value.weight" in moved
    for name in moved:
        assert (both[name] - one[name]).norm() < 0.01 * (one[name] - start[name]).norm(), name


def test_a_head_by_proof_on_two_ranks(tmp_path: Path) -> None:
    """`accelerate launch -m hf_gradguard train --head`: each rank is a client with its own rows."""
    words = [f"w{i}" for i in range(12)]
    rows = [f"w{i % 10} w{i % 7} w{i % 3},{'good' if i % 2 else 'bad'}" for i in range(24)]
    public = [f"w{i % 12} w{i % 5} w{i % 4}" for i in range(30)]
    (tmp_path / "rows").mkdir()
    for split in ("train", "dev"):
        (tmp_path / "rows" / f"{split}.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    (tmp_path / "public.csv").write_text("\n".join(["text", *public]) + "\n")
    encoder = save_encoder(tmp_path / "encoder", word_tokenizer(words), 16)
    out = tmp_path / "out"
    done = on_two_ranks(
        "-m", "hf_gradguard", "train", "--head", "--encoder", str(encoder), "--dataset",
        str(tmp_path / "rows"), "--public", str(tmp_path / "public.csv"), "--output", str(out),
        "--per_device_train_batch_size", "4", "--use_cpu", "--num_ranks", "2",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    metrics = json.loads((out / "metrics.json").read_text())
    assert (metrics["ranks"], metrics["steps"], metrics["defense"]) == (2, 3, "dp_sgd")
    assert metrics["noise_multiplier"] == 1.5
    assert metrics["eval_sentences"] == 24
    assert done.stdout.count("Load it by pipeline(") == 1
    head = PrivateHeadForSequenceClassification.from_pretrained(out)
    assert head.config.label2id == {"bad": 0, "good": 1}
    assert float(head.head.weight.abs().sum()) > 0


def test_wrong_number_of_ranks_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: one rank, without accelerate's own command."""
    out = tmp_path / "out"
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [SCRIPT, *DEMO, "--defense", "none", "--output_dir", str(out)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(SCRIPT, run_name="__main__")
    said = capsys.readouterr()
    assert ended.value.code == 1
    assert "2 ranks were asked for, but 1 started" in said.err
    assert "ranks: 1\n" in said.out
    assert not out.exists()


def test_a_vocabulary_of_private_rows_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    settings = '{"per_sample": true, "clip": 1.0, "noise_multiplier": 2.0, "delta": 1e-5}'
    flags = ["--num_ranks", "1", "--defense", "dp_sgd", "--defense_kwargs", settings]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [SCRIPT, *DEMO, *flags, "--output_dir", str(out)])
    with pytest.raises(SystemExit):
        runpy.run_path(SCRIPT, run_name="__main__")
    assert "--from_scratch learns its vocabulary" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.needs_data
def test_real_sentences_and_a_model_of_ones_own(demo: Path, data_dir: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    model = BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), **sizes))
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    done = recipe(
        "--model_name_or_path", str(tmp_path / "model"), "--dataset", str(data_dir / "sst2"),
        "--output_dir", str(tmp_path / "out"), "--defense", "optimal_pruning", "--max_steps", "2",
        "--use_cpu", "--logging_steps", "1",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert (metrics["eval_sentences"], metrics["ranks"], metrics["steps"]) == (872, 2, 2)
    assert metrics["settings"]["ratio"] == 0.9
