"""One set of settings, for Python, files and flags; and its flags without a heavy import."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from test_audit import TEXTS, text_model

from hf_gradguard.audit import AuditSettings, audit
from hf_gradguard.audit.settings import CommandSettings, read_settings
from hf_gradguard.flags import FlagError, FlagParser
from hf_gradguard.registry import ESTIMATORS

NEEDED = ["--model", "m", "--dataset", "d", "--output", "o"]


def flags(*argv: str) -> dict[str, Any]:
    return FlagParser("audit", "", "", CommandSettings).values(argv)


@pytest.mark.parametrize("argv", [["--help"], ["audit", "--help"]])
def test_help_imports_nothing_heavy(argv: list[str]) -> None:
    code = (
        "import sys\nfrom hf_gradguard.cli import main\n"
        f"try:\n    main({argv})\nexcept SystemExit as done:\n    assert not done.code\n"
        "assert not {'torch', 'transformers', 'numpy', 'yaml'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage: gradguard" in done.stdout


def test_every_setting_is_a_flag_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        flags("--help")
    said = capsys.readouterr().out
    for field in fields(CommandSettings):
        assert f"--{field.name}" in said
        assert field.metadata["help"]
    given = flags(*NEEDED, "--no-labels_known", "--noise-known", "--seed", "3", "--attack", "a,b")
    settings = {"noise_known": True, "labels_known": False, "seed": 3, "attack": ["a,b"]}
    assert given == {"model": "m", "dataset": "d", "output": "o", **settings}


def test_flags_over_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "audit.json"
    file.write_text(json.dumps({"attack": "tag", "samples": 3, "seed": 5, "labels_known": False}))
    settings = read_settings(flags(*NEEDED, "--seed", "7", "--config", str(file)))
    assert (settings.seed, settings.samples, settings.repeats) == (7, 3, 1)
    assert not settings.labels_known
    assert settings.split == "train"
    with pytest.raises(FlagError, match="--output, --model, --dataset must be given"):
        flags("--config", str(file))


def test_what_audit_takes_are_the_fields(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"no setting batchsize\. It has: batch_size, repeats"):
        audit(*text_model(), TEXTS, "none", "tag", output=tmp_path, batchsize=2)
    for wrong in ({"batch_size": 0}, {"seed": -1}, {"repeats": 1.5}, {"max_length": "8"}):
        (name,) = wrong
        with pytest.raises(ValueError, match=f"{name} must be a whole number of at least"):
            audit(*text_model(), TEXTS, "none", "tag", output=tmp_path, **wrong)
    assert not list(tmp_path.iterdir())


def test_settings_are_kept_in_the_record(tmp_path: Path) -> None:
    result = audit(*text_model(), TEXTS[:1], "none", "tag:steps=1", output=tmp_path, seed=4)
    asked = asdict(AuditSettings(seed=4, max_length=8))
    assert asked.pop("estimators") == "all"
    assert asked.items() <= result.settings.items()
    assert list(result.settings["estimators"]) == list(ESTIMATORS)  # each with what it means


def test_misspelt_estimators_are_refused_before_any_work(tmp_path: Path) -> None:
    for wrong in ("dfil", "dfil_bound,", "None", ""):
        with pytest.raises(ValueError, match=r"no estimator .* The names are: i2f_lower_bound"):
            audit(*text_model(), TEXTS, "none", "tag", output=tmp_path, estimators=wrong)
    with pytest.raises(ValueError, match="estimators must be"):
        AuditSettings(estimators=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Did you mean 'dfil_bound'"):
        read_settings(flags(*NEEDED, "--estimators", "dfil_bounds"))
    assert not list(tmp_path.iterdir())


def test_a_file_may_leave_estimators_out(tmp_path: Path) -> None:
    file = tmp_path / "audit.yaml"
    file.write_text("estimators: none\n")
    assert read_settings(flags(*NEEDED, "--config", str(file))).chosen_estimators() == {}
    two = read_settings(flags(*NEEDED, "--estimators", "dfil_bound, label_bound"))
    assert list(two.chosen_estimators()) == ["dfil_bound", "label_bound"]
