"""`gradguard train` on tiny models: what is written, and the line that a mistake ends with."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from helpers import write_images
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from hf_gradguard.cli import main
from hf_gradguard.leakage import membership_power
from hf_gradguard.leakage.accountant import gaussian_epsilon
from hf_gradguard.models import load_model
from hf_gradguard.testing.small import WORDS, small_tokenizer

SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                         "intermediate_size": 16}  # fmt: skip
QUICK = ["--use_cpu", "--report_to", "none", "--disable_tqdm", "--max_steps", "2"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("models"), small_tokenizer()
    torch.manual_seed(0)
    wide = BertConfig(vocab_size=len(tokenizer), initializer_range=0.3, **SIZES)
    BertModel(wide).save_pretrained(folder / "encoder")
    BertForMaskedLM(wide).save_pretrained(folder / "masked")
    names = {"id2label": {0: "good", 1: "bad"}, "label2id": {"good": 0, "bad": 1}}
    config = BertConfig(vocab_size=len(tokenizer), **SIZES, **names)
    BertForSequenceClassification(config).save_pretrained(folder / "named")
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "pad_token_id": 0}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder / "gpt2")
    for name in ("encoder", "masked", "named", "gpt2"):
        tokenizer.save_pretrained(folder / name)
    image_config = ViTConfig(image_size=8, patch_size=4, **SIZES)
    ViTForImageClassification(image_config).save_pretrained(folder / "images")
    ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(folder / "images")
    return folder


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Texts of which one word says the class, under its name."""
    kinds = [("good", WORDS[1]), ("bad", WORDS[2])]
    rows = [f"{WORDS[3 + i % 9]} {word} {WORDS[3 + i % 7]},{kind}"
            for i in range(40) for kind, word in kinds]  # fmt: skip
    (tmp_path / "rows.csv").write_text("\n".join(["text,label", *rows]))
    return tmp_path / "rows.csv"


def train(*flags: Any) -> dict[str, Any]:
    argv = [*map(str, flags), *QUICK]
    assert main(["train", *argv]) == 0
    output = Path(argv[argv.index("--output") + 1]) if "--output" in argv else Path("out")
    metrics: dict[str, Any] = json.loads((output / "metrics.json").read_text())
    return metrics


def fails(capsys: pytest.CaptureFixture[str], *flags: Any) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        train(*flags)
    said = capsys.readouterr().err
    assert ended.value.code == 1
    assert "Traceback" not in said
    lines = [line for line in said.splitlines() if line.startswith("gradguard train: ")]
    assert lines == said.splitlines()[-1:]
    return lines[0]


def test_a_file_of_flags_trains_an_encoder(models: Path, table: Path, tmp_path: Path) -> None:
    flags = {
        "model": str(models / "encoder"), "dataset": str(table), "output": str(tmp_path / "out"),
        "defense": "gaussian_noise", "defense_kwargs": {"relative_scale": 0.01},
        "learning_rate": "1e-2", "per_device_train_batch_size": 16,
        "share_input_embeddings": True,
    }  # fmt: skip
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(flags))
    main(["train", "--config", str(tmp_path / "train.yaml"), *QUICK, "--max_steps", "40"])
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert (metrics["defense"], metrics["steps"], metrics["ranks"]) == ("gaussian_noise", 40, 1)
    assert metrics["settings"]["relative_scale"] == 0.01
    assert (metrics["eval_sentences"], metrics["accuracy"]) == (8, 1.0)
    model, tokenizer = load_model(str(tmp_path / "out"))
    assert model.config.label2id == {"bad": 0, "good": 1}
    text = tokenizer(f"{WORDS[3]} {WORDS[1]} {WORDS[3]}", return_tensors="pt")
    assert model.config.id2label[model(**text).logits.argmax().item()] == "good"
    assert "## Privacy" in (tmp_path / "out" / "README.md").read_text()


def test_a_head_of_the_datas_classes_is_kept(models: Path, table: Path, tmp_path: Path) -> None:
    out, frozen = tmp_path / "out", ["--defense", "none", "--learning_rate", "0"]
    train("--model", models / "named", "--dataset", table, "--output", out, *frozen)
    kept = AutoModelForSequenceClassification.from_pretrained(out)
    start = AutoModelForSequenceClassification.from_pretrained(models / "named")
    assert kept.config.label2id == {"good": 0, "bad": 1}
    torch.testing.assert_close(kept.classifier.weight, start.classifier.weight, rtol=0, atol=0)
    table.write_text(table.read_text().replace(",good", ",fine"))
    train("--model", models / "named", "--dataset", table, "--output", out, *frozen)
    other = AutoModelForSequenceClassification.from_pretrained(out)
    assert other.config.label2id == {"bad": 0, "fine": 1}


def test_a_language_model_with_adapters(models: Path, table: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    peft = ["--use_peft", "--lora_r", "2", "--learning_rate", "1e-2", "--defense", "pruning"]
    metrics = train("--model", models / "gpt2", "--dataset", table, "--output", out, *peft)
    assert 0 <= metrics["accuracy"] < 0.5
    assert json.loads((out / "adapter_config.json").read_text())["r"] == 2
    model, _ = load_model(str(out))
    assert type(model).__name__ == "PeftModelForCausalLM"


def test_images_are_read_by_workers(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write_images(tmp_path / "colors", 8), tmp_path / "out"
    flags = ["--model", models / "images", "--dataset", data, "--output", out]
    flags += ["--defense", "none", "--dataloader_num_workers", "1"]
    assert train(*flags)["eval_images"] == 3
    model = AutoModelForImageClassification.from_pretrained(out)
    assert list(model.config.label2id) == ["blue", "green", "red"]
    for file in (data / "red").glob("*.png"):
        file.write_bytes(file.read_bytes()[:40])
    assert ".png): no image of 8 or 16 bits" in fails(capsys, *flags)


@pytest.mark.long
def test_an_npz_of_images(models: Path, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (20, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", x_train=pixels, y_train=np.arange(20) % 2)
    data = ["--dataset", tmp_path / "images.npz", "--output", tmp_path / "out"]
    metrics = train("--model", models / "images", *data, "--defense", "none")
    assert metrics["eval_images"] == 2


PUBLIC = [" ".join(WORDS[1 + (i * k) % 11] for k in (1, 2, 3)) for i in range(60)]


@pytest.fixture
def public(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Public texts; features of heads go to a cache of this test's own."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "public.csv").write_text("\n".join(["text", *PUBLIC]))
    return tmp_path / "public.csv"


def test_a_head_by_proof_from_a_file_of_flags(
    models: Path, table: Path, public: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {
        "head": True, "encoder": str(models / "encoder"), "dataset": str(table),
        "public": str(public), "output": str(tmp_path / "out"), "noise_multiplier": 2.0,
        "per_device_train_batch_size": 4, "learning_rate": 2.0,
    }  # fmt: skip
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(flags))
    assert main(["train", "--config", str(tmp_path / "train.yaml"), "--use_cpu"]) == 0
    said = capsys.readouterr().out
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert (metrics["defense"], metrics["steps"], metrics["eval_sentences"]) == ("dp_sgd", 18, 8)
    assert metrics["settings"]["correlated"] is True
    assert metrics["settings"]["per_sample"] is True
    assert metrics["noise_multiplier"] == 2.0
    assert metrics["epsilon"] == pytest.approx(gaussian_epsilon(2.0, 1e-5), rel=1e-3)
    assert metrics["members_found_at_most"] == pytest.approx(membership_power(2.0))
    assert metrics["encoder"] == str(models / "encoder")
    assert "proved for each row: of all messages together at most 3.4% of the members" in said
    assert "are found at 1 % false alarms" in said
    assert "Load it by pipeline('text-classification', " in said
    card = (tmp_path / "out" / "README.md").read_text()
    assert "## Privacy" in card
    assert f"{metrics['epsilon']:.3g}" in card
    head = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert head.config.label2id == {"bad": 0, "good": 1}


def test_a_head_on_the_encoder_of_a_masked_language_model(
    models: Path, table: Path, public: Path, tmp_path: Path
) -> None:
    """As all-mpnet-base-v2 and most pretrained encoders are saved: no flag says the task."""
    flags = ["--encoder", str(models / "masked"), "--dataset", str(table), "--use_cpu"]
    flags += ["--public", str(public), "--output", str(tmp_path / "out")]
    assert main(["train", "--head", *flags, "--per_device_train_batch_size", "4"]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["task"] == (
        "text-classification"
    )


@pytest.mark.long
def test_a_head_is_loaded_by_a_pipeline_in_another_process(
    models: Path, table: Path, public: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    undefended = ["--head", "--encoder", models / "encoder", "--dataset", table, "--public", public]
    undefended += ["--output", out, "--noise_multiplier", "0", "--learning_rate", "20"]
    metrics = train(*undefended, "--per_device_train_batch_size", "4", "--max_steps", "18")
    assert (metrics["defense"], "epsilon" in metrics) == ("none", False)
    program = (
        "import sys, transformers, hf_gradguard.heads\n"
        "classify = transformers.pipeline('text-classification', sys.argv[1], device='cpu')\n"
        "print(classify(sys.argv[2:]))"
    )
    texts = [f"{WORDS[3]} {WORDS[1]} {WORDS[4]}", f"{WORDS[3]} {WORDS[2]} {WORDS[4]}"]
    said = subprocess.run(
        [sys.executable, "-c", program, str(out), *texts],
        check=True, capture_output=True, text=True, timeout=300,
    ).stdout  # fmt: skip
    found = ast.literal_eval(said.strip().splitlines()[-1])
    assert [set(one) for one in found] == [{"label", "score"}] * 2
    assert {one["label"] for one in found} <= {"good", "bad"}


@pytest.mark.long
def test_a_head_of_images_in_secret_messages(models: Path, public: Path, tmp_path: Path) -> None:
    data, out = write_images(tmp_path / "colors", 16), tmp_path / "out"
    others = write_images(tmp_path / "others", 8)
    metrics = train(
        "--head", "--model", models / "images", "--dataset", data, "--public", others, "--output",
        out, "--target_epsilon", "8", "--sampling", "balls_in_bins", "--defense", "dp_sgd",
        "--per_device_train_batch_size", "4",
    )  # fmt: skip
    assert metrics["epsilon"] == pytest.approx(8.0, rel=2e-2)
    assert metrics["epsilon_secret_positions"] <= metrics["epsilon"]
    assert metrics["settings"]["sampling"] == "balls_in_bins"
    assert metrics["eval_images"] == 5
    model = AutoModelForImageClassification.from_pretrained(out)
    assert list(model.config.label2id) == ["blue", "green", "red"]


def test_help_of_heads_has_its_own_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    said = capsys.readouterr().out
    group = said.partition("a linear head by proof:")[2]
    for name in ("--head", "--encoder", "--public", "--noise_multiplier", "--sampling"):
        assert name in group.partition("\n\n")[0]


# Flags that replace others, and what the line says.
HEAD = {"--head": "true", "--defense": "dp_sgd"}
MISTAKES: dict[str, tuple[dict[str, str], str]] = {
    "a mistyped model": ({"--model": "./nowhere"}, "There is no folder ./nowhere"),
    "a file as model": ({"--model": "rows.csv"}, "is a file, not the folder of a model"),
    "a file as output": ({"--output": "rows.csv"}, "rows.csv is a file: give a folder"),
    "no model": ({"--model": ""}, "--model must be given"),
    "a mistyped file": ({"--dataset": "rwos.csv"}, "no file or folder rwos.csv"),
    "an unknown defense": ({"--defense": "gausian_noise"}, "Did you mean 'gaussian_noise'"),
    "an unknown setting": ({"--defense_kwargs": '{"ration": 1}'}, "no setting ration"),
    "settings that are no JSON": ({"--defense_kwargs": "{ratio: 1}"}, "no JSON"),
    "no such column": ({"--column": "txet"}, "has no txet. It has: text, label"),
    "no such label": ({"--label_column": "lable"}, "has no lable"),
    "the text as label": ({"--label_column": "text"}, "cannot be input and label"),
    "an unknown task": ({"--task": "classification"}, "There is no task 'classification'"),
    "another task": ({"--task": "fill-mask"}, "is fill-mask"),
    "a number that is none": ({"--learning_rate": "fast"}, "invalid float value"),
    "an unknown schedule": ({"--lr_scheduler_type": "cosin"}, "cosin"),
    "too many ranks": ({"--num_ranks": "2"}, "2 ranks were asked for, but 1 started"),
    "a missing file of flags": ({"--config": "nowhere.yaml"}, "nowhere.yaml cannot be read"),
    "a split that is not there": ({"--split": "dev", "--dataset": "folder"}, "no split 'dev'"),
    "no defense": ({"--defense": ""}, "--defense must be given (none must be said), or --head"),
    "a flag of heads without one": ({"--noise_multiplier": "2"}, "noise_multiplier is for --head"),
    "a head behind another defense": ({"--head": "true"}, "--head is behind dp_sgd"),
    "a head without an encoder": ({**HEAD, "--model": ""}, "--head needs an encoder"),
    "a head with adapters": ({**HEAD, "--use_peft": "true"}, "so --use_peft has nothing to do"),
    "a head from nothing": ({**HEAD, "--from_scratch": "bert"}, "so --from_scratch has nothing"),
    "a head of a language model": ({**HEAD, "--model": "gpt2"}, "Give --task text-classification"),
    "two strengths": (
        {**HEAD, "--noise_multiplier": "1", "--target_epsilon": "3"}, "one of both"
    ),
    "public texts that are no file": ({**HEAD, "--public": "nowhere.txt"}, "nowhere.txt"),
    "adapters of no module": (
        {"--use_peft": "true", "--lora_target_modules": "nowhere"}, "No modules"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_one_line(
    kind: str, models: Path, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.csv").write_text(table.read_text())
    (tmp_path / "gpt2").symlink_to(models / "gpt2")
    flags = {"--model": str(models / "encoder"), "--dataset": "rows.csv", "--output": "out"}
    replaced, line = MISTAKES[kind]
    flags |= {"--defense": "pruning"} | replaced
    assert line in fails(capsys, *(token for flag in flags.items() for token in flag))
    assert not list(tmp_path.glob("out/*.safetensors"))
