"""What is said of a model's folder that is not there."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from hf_gradguard import GradGuardConfig, GradGuardTrainer
from hf_gradguard.attacks import make_attack
from hf_gradguard.cli import main
from hf_gradguard.models import ModelError, check_name, explain_missing_model, load_model
from recipes.studies.updates import Words

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
WAY_OUT = "Give the folder that `save_pretrained` wrote, .* or a name on the Hugging Face Hub"


@pytest.mark.parametrize("name", ["/no/model", "./model", "../model", "~/no/model", "a/b/c"])
def test_paths_that_lead_nowhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=rf"^There is no folder {name}\. {WAY_OUT}"):
        check_name(name)


@pytest.mark.parametrize("name", ["gpt2", "distilbert/distilbert-base-uncased", "runs.2/v1.0"])
def test_names_of_the_hub_pass(name: str) -> None:
    check_name(name)


def test_a_file_and_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(
        NotADirectoryError, match=r"model\.bin is a file, not the folder of a model"
    ):
        check_name(tmp_path / "model.bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    check_name(tmp_path / "model")
    with pytest.raises(FileNotFoundError, match=f"no folder ~/model: write {tmp_path}/model,"):
        check_name("~/model")


def test_errors_of_a_folder_that_is_there_are_kept(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"loaded: no weights$"), explain_missing_model(tmp_path):
        raise OSError("no weights")


NEITHER = r"There is no folder runs/model, and the Hub gave no model of that name \(.+\)\. "


@pytest.mark.parametrize("name", ["runs/model", "/no/model"])
def test_wherever_names_are_loaded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = (NEITHER if name == "runs/model" else r"There is no folder /no/model\. ") + WAY_OUT
    with pytest.raises(FileNotFoundError, match=said):
        load_model(name)
    with pytest.raises(FileNotFoundError, match=said):
        GradGuardTrainer(args=GradGuardConfig("out", model_name_or_path=name), defense="none")
    with pytest.raises(FileNotFoundError, match=said):
        make_attack("lamp", language_model=name)
    (tmp_path / "texts.txt").write_text("one text\nanother one\n")
    flags = ["--model", name, "--dataset", "texts.txt", "--output", "out"]
    for command in (["audit"], ["recommend"], ["evalnet", "train"]):
        with pytest.raises(SystemExit) as stopped:
            main([*command, *flags])
        error = capsys.readouterr().err
        assert stopped.value.code == 1
        assert f"gradguard {' '.join(command)}: There is no folder {name}" in error
        assert "or a name on the Hugging Face Hub" in error


@pytest.mark.parametrize(
    "recipe", ["sst2", "sst2 --head", "head", "image_classification", "image_head"]
)
def test_recipes_say_it_before_data_are_loaded(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    flags = ["--model_name_or_path", "/no/model", "--output_dir", str(tmp_path)]
    flags += ["--data_dir" if recipe == "head" else "--dataset", str(tmp_path)]
    recipe, *more = recipe.split()
    flags += more or ([] if "head" in recipe else ["--defense", "none"])
    monkeypatch.setattr(sys, "argv", ["recipe", *flags])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(RECIPES / f"{recipe}.py"), run_name="__main__")
    assert "There is no folder /no/model" in f"{stopped.value.code} {capsys.readouterr().err}"
    assert stopped.value.code not in (0, None)


def test_studies(tmp_path: Path) -> None:
    flags = ["--model", "/no/model", "--data_dir", str(tmp_path), "--output", str(tmp_path / "out")]
    with pytest.raises(FileNotFoundError, match="There is no folder /no/model"):
        Words.parse(flags).run()
