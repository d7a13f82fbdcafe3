"""Private names of other libraries: all are listed, and a version without one is refused."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from helpers import make_task
from transformers import Trainer

import hf_gradguard
from hf_gradguard import GradGuardConfig, GradGuardTrainer
from hf_gradguard.training import seams
from hf_gradguard.training.seams import READINGS, SEAMS, Seam, check_seams, read

PACKAGE = Path(hf_gradguard.__file__).parent
NAMES = {seam.name for seam in SEAMS}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_every_private_name_of_another_library_is_listed() -> None:
    """Whatever private attribute the package uses and does not define itself."""
    used: dict[str, Path] = {}
    own: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and private(node.attr):
                of_base = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
                if of_base and hasattr(Trainer, node.attr):
                    assert node.attr in NAMES, f"{path}: {node.attr}"
                elif isinstance(node.ctx, ast.Load):
                    used[node.attr] = path
                elif ast.unparse(node.value) == "self":
                    own.add(node.attr)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                own |= {target.id for target in targets if isinstance(target, ast.Name)}
    named_tuples = {"_asdict", "_replace", "_fields"}  # public, in spite of their names
    missing = {name: path for name, path in used.items() if name not in own | named_tuples}
    assert not {name: path for name, path in missing.items() if name not in NAMES}


def test_files_that_use_a_name_are_the_ones_listed() -> None:
    for seam in SEAMS:
        files = [word for word in seam.used.split() if word.endswith(".py")]
        assert files
        for file in files:
            assert seam.name in (PACKAGE / file).read_text(), f"{file}: {seam.name}"


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.name)
def test_a_version_that_lacks_a_name_is_refused(
    seam: Seam, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert seam.holds()
    monkeypatch.setattr(seams.pkgutil, "resolve_name", lambda owner: type("Another", (), {}))
    library = re.split(r"[.:]", seam.owner)[0]
    with pytest.raises(ImportError, match=rf"{library} \S+ has no {seam.name} in .*Install a ver"):
        check_seams([seam])


def test_a_version_without_the_class_is_refused() -> None:
    with pytest.raises(ImportError, match=r"has no _x in transformers:NoSuchTrainer.*file\.py"):
        check_seams([Seam("transformers:NoSuchTrainer", "_x", "file.py does y")])


def test_the_trainer_refuses_before_it_touches_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Trainer, "_save_rng_state")
    args = GradGuardConfig(str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(ImportError, match="has no _save_rng_state in transformers:Trainer"):
        GradGuardTrainer(make_task("bert")[0], args, defense="none")
    assert not list(tmp_path.iterdir())


# What not every version has


@pytest.mark.parametrize("name", READINGS)
def test_files_that_read_an_attribute_are_the_ones_listed(name: str) -> None:
    file = READINGS[name].used.split()[0].rstrip(":")
    assert f'"{name}")' in (PACKAGE / file).read_text()
    assert f".{name}" not in (PACKAGE / file).read_text()


@pytest.mark.parametrize("name", READINGS)
def test_an_attribute_is_read_by_its_older_name_or_taken_as_it_was(name: str) -> None:
    reading = READINGS[name]
    newest = type("Newest", (), {name: "new", **dict.fromkeys(reading.older, "old")})
    assert read(newest(), name) == "new"
    for older in reading.older:
        assert read(type("Older", (), {older: "old"})(), name) == "old"
    nothing = type("Nothing", (), {})()
    if reading.default is ...:
        with pytest.raises(ImportError, match=f"has no {name}, which .*Install a version"):
            read(nothing, name)
    else:
        assert read(nothing, name) == reading.default


def test_the_installed_version_has_them() -> None:
    """A release that takes one away, and gives it no older name, has to be looked at."""
    model, _ = make_task("bert")
    trainer = Trainer(model, GradGuardConfig("out", use_cpu=True, report_to="none"))
    for name, reading in READINGS.items():
        owner = trainer if reading.used.startswith("training/weights") else trainer.args
        if name != "loss_is_scaled_for_ga":  # came with 5.20 or so
            assert any(hasattr(owner, known) for known in (name, *reading.older)), name
