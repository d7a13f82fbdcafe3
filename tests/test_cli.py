"""The command line `gradguard`."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from hf_gradguard import DEFENSES, __version__
from hf_gradguard.cli import main


def test_every_defense_is_listed_with_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["defenses"]) == 0
    paragraphs = capsys.readouterr().out.strip().split("\n\n")
    assert [paragraph.split("\n")[0] for paragraph in paragraphs] == list(DEFENSES)
    for paragraph, defense in zip(paragraphs, DEFENSES.values(), strict=True):
        summary, settings = paragraph.split("\n")[1:]
        assert summary.endswith(".")
        assert all(field.name in settings for field in fields(defense))  # type: ignore[arg-type]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out.strip() == f"gradguard {__version__}"


@pytest.mark.parametrize("argv", [[], ["defenze"]])
def test_wrong_command_says_which_there_are(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        main(argv)
    assert done.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "flag", "name"),
    [("audit", "--defense", "nois"), ("audit", "--attack", "spam"),
     ("recommend", "--defense", "nois"), ("recommend", "--attack", "spam")],
)  # fmt: skip
def test_a_misspelt_name_is_said_before_a_download(
    command: str, flag: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--model", "nowhere/at-all", "--dataset", "nowhere.tsv"]
    with pytest.raises(SystemExit):
        main([command, *files, flag, name, "--output", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert repr(name) in error
    assert "nowhere" not in error
