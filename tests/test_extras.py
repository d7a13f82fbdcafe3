"""What the package needs to protect, and what its other rooms say where a library is missing."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = [
    *("evaluate", "jinja2", "lightning_fabric", "matplotlib", "nltk", "numba"),
    *("peft", "PIL", "rouge_score", "sacrebleu", "sklearn"),
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


ROOMS = {"metrics": "attacks", "audit:audit": "attacks", "attacks.learned_inversion": "attacks"}
"""Rooms, or what is asked of one, with the extra that brings what they need."""
FEDERATIONS = ("flower", "flare")
IMPORT = f"""
import importlib
print("THEN")
for room in {[*ROOMS, *(f"federation.{name}" for name in FEDERATIONS)]}:
    module, _, name = room.partition(":")
    try:
        found = importlib.import_module(f"hf_gradguard.{{module}}")
        if name:
            getattr(found, name)("rows.tsv")
    except ImportError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """By one process without them: what training prints, and why rooms are not imported."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED + TRAIN + IMPORT], cwd=tmp_path_factory.mktemp("bare"),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    trained, _, then = done.stdout.partition("THEN\n")
    return trained, then.splitlines()


@pytest.mark.long
def test_protected_training_needs_none_of_the_extras(said: tuple[str, list[str]]) -> None:
    assert "defense/relative_error" in said[0]


def test_rooms_name_what_is_missing_and_the_command(said: tuple[str, list[str]]) -> None:
    lines = said[1][: -len(FEDERATIONS)]
    for (room, extra), line in zip(ROOMS.items(), lines, strict=True):
        assert line.startswith(f"hf_gradguard.{room.split(':')[0].split('.')[0]} needs ")
        assert line.endswith(f"not installed: pip install 'hf-gradguard[{extra}]'")
    assert "rouge_score, sacrebleu, torchmetrics" in lines[0]


def test_federations_name_their_extra(said: tuple[str, list[str]]) -> None:
    for extra, line in zip(FEDERATIONS, said[1][-len(FEDERATIONS) :], strict=True):
        assert line.startswith(f"hf_gradguard.federation.{extra} needs ")
        assert line.endswith(f"pip install 'hf-gradguard[{extra}]'")


@pytest.mark.parametrize("room", ["attacks.learned_inversion", "metrics", "audit"])
def test_each_module_that_is_missing_is_in_the_extra(room: str) -> None:
    import importlib
    import inspect

    source = inspect.getsource(importlib.import_module(f"hf_gradguard.{room}"))
    _, extra, *modules = eval(re.search(r"need(\(.*?\))", source, re.DOTALL)[1])
    listed = {
        line.split(">")[0].replace("-", "_") for line in PROJECT["optional-dependencies"][extra]
    }
    names = {"PIL": "pillow", "sklearn": "scikit_learn"}
    assert {names.get(module, module) for module in modules} <= listed


def test_bounds_are_lower_ones_and_majors() -> None:
    for line in PROJECT["dependencies"]:
        bounds = line.split(",")
        assert ">=" in bounds[0]
        for upper in bounds[1:]:
            assert upper.startswith("<")
            assert "." not in upper
