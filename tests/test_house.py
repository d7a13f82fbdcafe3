"""How far a reader walks: the files that one training step runs through, names that say what they
hold, and imports without a circle.

The bounds are what was reached. They may fall, and do not rise.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from examples import example_names
from helpers import make_task

import hf_gradguard
from hf_gradguard import GradGuardConfig, GradGuardTrainer, randomness
from hf_gradguard.audit import audit, summarize
from hf_gradguard.defenses import Defense

PACKAGE = Path(hf_gradguard.__file__).parent
FILES_OF_A_STEP = {
    "none": 7, "gaussian_noise": 9, "optimal_noise": 10, "refiner": 16, "per_sample": 14,
    "correlated": 16,
}  # fmt: skip
PER_SAMPLE = {"per_sample": True, "noise_multiplier": 1.0, "delta": 1e-3}
SETTINGS_OF_A_STEP: dict[str, dict[str, Any]] = {
    "per_sample": {"defense": "dp_sgd", "defense_kwargs": PER_SAMPLE, "noise_seed": 0},
    "correlated": {
        "defense": "dp_sgd", "defense_kwargs": PER_SAMPLE | {"correlated": True}, "optim": "sgd",
        "max_grad_norm": 0.0, "noise_seed": 0,
    },
}  # fmt: skip
"""With a seed, which draws several rows for the first two steps: the model is tried out on several
rows once.
"""
FILES_OF_A_CONSTRUCTOR, FILES_OF_A_TRAINING = 18, 26
FILES_OF_AN_AUDIT = 35  # of two texts, by span, undefended and behind pruning
EMPTY_NAMES = 0.005  # as a share of all names that are bound
EMPTY = {
    *("found", "seen", "told", "asked", "said", "known", "given", "made", "kept", "held", "left"),
    *("one", "own", "other", "others", "some", "several", "few", "many", "each", "every", "rest"),
    *("part", "parts", "whole", "like", "alike", "apart", "beside", "together", "drawn", "thing"),
    *("at", "of", "before", "after", "first", "last", "here", "there", "what", "who", "whose"),
}


class Files:
    """The package's files whose functions run inside."""

    def __init__(self) -> None:
        self.names = set[str]()

    def _call(self, frame: FrameType, event: str, argument: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(PACKAGE):
            self.names.add(str(file.relative_to(PACKAGE)))

    def __enter__(self) -> Files:
        sys.setprofile(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


@pytest.fixture(autouse=True)
def _in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no earlier test decide whether noise is made by compiled loops, which are a file more."""
    monkeypatch.setattr(randomness, "_numbers_made", 0)


@pytest.mark.parametrize("name", FILES_OF_A_STEP)
def test_a_step_is_a_short_walk(name: str, tmp_path: Path) -> None:
    """The second one: what is looked at once a training is no part of a step."""
    model, batch = make_task("bert", dtype=torch.float32)
    rows = [{name: entry[0] for name, entry in batch.items()}] * 12
    args = GradGuardConfig(
        str(tmp_path), max_steps=3, per_device_train_batch_size=4, use_cpu=True,
        save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=100,
        **SETTINGS_OF_A_STEP.get(name, {"defense": name}),
    )  # fmt: skip
    files = Files()

    class Watched(GradGuardTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            if self.state.global_step != 1:
                return super().training_step(*args, **kwargs)
            with files:
                return super().training_step(*args, **kwargs)

    Watched(model, args, train_dataset=rows).train()
    assert len(files.names) <= FILES_OF_A_STEP[name], sorted(files.names)


def test_a_trainer_is_made_and_trained_on_a_short_walk(tmp_path: Path) -> None:
    model, batch = make_task("bert", dtype=torch.float32)
    rows = [{name: entry[0] for name, entry in batch.items()}] * 12
    args = GradGuardConfig(
        str(tmp_path), defense="gaussian_noise", max_steps=3, per_device_train_batch_size=2,
        use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=100,
    )  # fmt: skip
    constructor, training = Files(), Files()
    with constructor:
        trainer = GradGuardTrainer(model, args, train_dataset=rows)
    with training:
        trainer.train()
    assert len(constructor.names) <= FILES_OF_A_CONSTRUCTOR, sorted(constructor.names)
    assert len(training.names) <= FILES_OF_A_TRAINING, sorted(training.names)


@pytest.mark.long
def test_an_audit_is_a_short_walk(tmp_path: Path) -> None:
    names, files = example_names("model tokenizer samples"), Files()
    audited = names["model"], names["tokenizer"], names["samples"]
    with files:
        summarize(audit(*audited, "pruning", "span", output=tmp_path))
    assert len(files.names) <= FILES_OF_AN_AUDIT, sorted(files.names)


def test_classes_under_the_trainer() -> None:
    order = [
        kind for kind in GradGuardTrainer.__mro__ if kind.__module__.startswith("hf_gradguard")
    ]
    assert [kind.__name__ for kind in order] == ["GradGuardTrainer", "GradGuardMixin"]


def test_who_writes_a_defense_has_these_members_to_know() -> None:
    annotated = set(Defense.__annotations__)
    members = {n for n in vars(Defense) | dict.fromkeys(annotated) if not n.startswith("_")}
    settings, contract = {"name", "facts", "settings"}, {"protect", "prepare", "at_step"}
    state = {"apply", "state", "with_state", "remember", "state_readers"}
    checkpoints = {"flatten", "unflatten", "state_dict", "load_state_dict"}
    maps_and_attackers = {"gradient_map", "mechanism", "informed"}
    assert members == settings | contract | state | checkpoints | maps_and_attackers


def _bound_names(source: ast.Module) -> list[str]:
    names = []
    for node in ast.walk(source):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        elif isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
            names.append(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.append(node.attr)
    return names


def test_names_say_what_they_hold() -> None:
    names = [name for path in PACKAGE.rglob("*.py") for name in _bound_names(_tree(path))]
    empty = [name for name in names if name.strip("_").lower() in EMPTY]
    assert len(empty) <= EMPTY_NAMES * len(names), len(empty) / len(names)


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


SWAPPED = {
    "training/checkpoints/complete.py": {"trainer.hf_api"},
    "testing/flower.py": {f"TaskIdentity.{name}" for name in ("task_id", "run_id", "node_id")},
}
"""What is put in the place of another library's function for a while, since no method of it can be
overridden; and what a process of Flower's knows of itself, where one plays them all.
"""


def test_no_module_of_others_is_written_to() -> None:
    for path in PACKAGE.rglob("*.py"):
        tree, modules = _tree(path), set[str]()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules |= {alias.asname or alias.name for alias in node.names}
        written = {
            ast.unparse(node) for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            and ast.unparse(node).split(".")[0] in modules
        }  # fmt: skip
        assert written <= SWAPPED.get(str(path.relative_to(PACKAGE)), set()), path


def test_nothing_stands_in_front_of_imports() -> None:
    hooks = [type(finder).__module__ for finder in sys.meta_path]
    assert not [module for module in hooks if module.startswith("hf_gradguard")]
    assert not [p for p in PACKAGE.rglob("*.py") if "import dis\n" in p.read_text(encoding="utf-8")]
