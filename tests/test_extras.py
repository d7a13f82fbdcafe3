"""What the package needs to protect, and what its other rooms say where a library is missing."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = [
    *("datasets", "dp_accounting", "evaluate", "jinja2", "lightning_fabric", "matplotlib", "nltk"),
    *("pandas", "peft", "PIL", "pyarrow", "rouge_score", "sacrebleu", "scipy", "sklearn"),
    *("sentence_transformers", "torchmetrics", "trl", "flwr", "nvflare"),
]
BLOCKED = f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL}))\n"
"""Python refuses to import what is there as `None`."""

TRAIN = """
import torch
from transformers import BertConfig, BertForSequenceClassification
from hf_gradguard import GradGuardConfig, GradGuardTrainer, protect
from hf_gradguard.cli import main
main(["defenses"])
sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
model = BertForSequenceClassification(BertConfig(vocab_size=20, intermediate_size=8, **sizes))
row = {"input_ids": torch.arange(1, 6), "labels": 1}
args = GradGuardConfig("out", max_steps=1, use_cpu=True, defense="optimal_noise", num_clients=2)
GradGuardTrainer(model, args, train_dataset=[row] * 8).train()
protect(model, {"input_ids": torch.ones(2, 5).long(), "labels": torch.ones(2).long()}, "pruning")
"""


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED + code], cwd=folder, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def test_protected_training_needs_none_of_the_extras(tmp_path: Path) -> None:
    done = run(TRAIN, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "defense/relative_error" in done.stdout


def test_rooms_name_what_is_missing_and_the_command(tmp_path: Path) -> None:
    rooms = {
        "attacks": "attacks",
        "metrics": "attacks",
        "audit.run": "attacks",
        "data.files": "data",
    }
    code = "import importlib\n" + "".join(
        f"try: importlib.import_module('hf_gradguard.{room}')\nexcept ImportError as e: print(e)\n"
        for room in rooms
    )
    lines = run(code, tmp_path).stdout.splitlines()
    for (room, extra), line in zip(rooms.items(), lines, strict=True):
        assert line.startswith(f"hf_gradguard.{room.split('.')[0]} needs ")
        assert line.endswith(f"not installed: pip install 'hf-gradguard[{extra}]'")
    assert "scipy" in lines[0]
    assert "rouge_score, sacrebleu, scipy, torchmetrics" in lines[1]


def test_federations_name_their_extra(tmp_path: Path) -> None:
    code = "import importlib\n" + "".join(
        f"try: importlib.import_module('hf_gradguard.federation.{name}')\n"
        "except ImportError as e: print(e)\n"
        for name in ("flower", "flare")
    )
    for extra, line in zip(
        ("flower", "flare"), run(code, tmp_path).stdout.splitlines(), strict=True
    ):
        assert line.startswith(f"hf_gradguard.federation.{extra} needs ")
        assert line.endswith(f"pip install 'hf-gradguard[{extra}]'")


@pytest.mark.parametrize("room", ["attacks", "metrics", "audit", "data"])
def test_each_module_that_is_missing_is_in_the_extra(room: str) -> None:
    import importlib
    import inspect

    source = inspect.getsource(importlib.import_module(f"hf_gradguard.{room}.installed"))
    _, extra, *modules = eval(source[source.index("need(") + 4 :])
    listed = {
        line.split(">")[0].replace("-", "_") for line in PROJECT["optional-dependencies"][extra]
    }
    names = {"PIL": "pillow"}
    assert {names.get(module, module) for module in modules} <= listed


def test_bounds_are_lower_ones_and_majors() -> None:
    for line in PROJECT["dependencies"]:
        bounds = line.split(",")
        assert ">=" in bounds[0]
        for upper in bounds[1:]:
            assert upper.startswith("<")
            assert "." not in upper
