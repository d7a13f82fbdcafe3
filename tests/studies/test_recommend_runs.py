"""Runs of `gradguard recommend` in quick mode, and the data that they are given."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_gradguard.data.samples import load_texts
from hf_gradguard.heads import private_head
from hf_gradguard.testing.small import WORDS, small_text_task
from recipes.studies import recommend_runs as study
from recipes.studies.lib.results import Results
from recipes.studies.recommend_runs import DATA, not_tried, without_places


@pytest.fixture
def wikitext(tmp_path: Path) -> Path:
    """A folder with twelve articles, each of two sections, and as many public ones."""
    (folder := tmp_path / "wikitext").mkdir()
    names = [*study.SECTIONS, "Other"]
    for name in ("train", "valid"):
        parts = [
            f" = Article {name} {n} = \n An opening of {name}{n} here . \n "
            + "".join(
                f"= = {names[(n + k) % 6]} = = \n "
                + "".join(
                    f"The {names[(n + k) % 6]} has word {name}{n}x{i} in it . " for i in range(20)
                )
                + f"\n = = = A part = = = \n One more of {name}{n} in part {k} . \n "
                for k in range(2)
            )
            for n in range(12)
        ]
        (folder / f"{name}.txt").write_text("".join(parts))
    return folder


def test_no_row_is_public_or_in_both_parts(wikitext: Path, sst2: Path, tmp_path: Path) -> None:
    args = Namespace(wikitext=str(wikitext), data_dir=str(sst2), rows=100)
    for name in ("SST-2", "articles", "sections"):
        (folder := tmp_path / name).mkdir()
        files = DATA[name](args, folder)
        rows, public = load_texts(str(files.dataset)), set(load_texts(str(files.public)))
        assert len(rows) == 100
        assert files.others
        others = {text for text, _ in files.others}
        assert not sorted(public & {*rows, *others})
        if name == "articles":
            assert not others & set(rows)


def test_a_sentence_is_of_its_section(wikitext: Path, tmp_path: Path) -> None:
    """What stands below a heading of a lower level is of the section, too."""
    files = DATA["sections"](Namespace(wikitext=str(wikitext), rows=100), tmp_path)
    lines = files.dataset.read_text().splitlines()[1:]
    rows = [tuple(line.split("\t")) for line in lines] + files.others
    assert {label for _, label in rows} == set(study.SECTIONS)
    own = [text.split()[1] == label for text, label in rows if text.startswith("The ")]
    assert all(own)
    assert any(text.startswith("One more") for text, _ in rows)
    assert not any("opening" in text for text, _ in rows)


def test_images_are_large_enough_for_the_encoder(
    mnist: Path, cifar10: Path, tmp_path: Path
) -> None:
    args = Namespace(mnist=str(mnist), tiny_imagenet=str(cifar10), rows=40)
    files = DATA["MNIST"](args, tmp_path)
    stored, public = np.load(files.dataset), np.load(files.public)
    assert stored["image"].shape == (40, 32, 32, 3)
    assert public["image"].shape == (24, 32, 32, 3)
    assert np.ptp(public["image"], axis=-1).max() == 0  # gray
    assert len(files.others) == 56
    assert files.others[0][0].shape == (32, 32, 3)


def test_folders_of_this_machine_stay_here() -> None:
    args = Namespace(model="/a/mini", encoder="/b/large", models="/c")
    assert without_places("on /b/large, by proof: /a/mini", args) == "on large, by proof: mini"


def test_what_was_not_tried_is_counted() -> None:
    limits = (
        "Not tried, for lack of time (--budget_minutes): a:ratio=0.9,feedback=true (before "
        "training span recovers 10 % [0, 31]), head on b. Time ended some attacks on none, d."
    )
    assert not_tried(limits) == 2
    assert not_tried("Time ended some attacks.") == 0


def test_a_saved_model_is_judged_on_other_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: a head that says what one feature says, and another that says the opposite."""
    model, _, tokenizer = small_text_task()
    texts = [" ".join(WORDS[1 + (i * k) % 11] for k in (1, 2, 3)) for i in range(40)]
    head = private_head(model, texts, labels=["bad", "good"], processing_class=tokenizer)
    features = head.features_of(texts)[:, 0]
    others = [(text, "good" if x > 0 else "bad") for text, x in zip(texts, features, strict=True)]
    for sign, accuracy in ((1.0, 1.0), (-1.0, 0.0)):
        output = tmp_path / str(sign)
        with torch.no_grad():
            head.head.weight.zero_()[1, 0] = sign

        def run(command: str, flags: list[object], output: Path = output) -> dict[str, float]:
            assert (command, flags) == ("train", ["--use_cpu", "--output", output])
            head.save_pretrained(output)
            (output / "metrics.json").write_text(json.dumps({"accuracy": 0.75}))
            return {"minutes": 0.1}

        monkeypatch.setattr(study, "run_command", run)
        found = study.trained(["--use_cpu"], output, others)
        assert found["accuracy"][0] == accuracy
        assert (found["held out"], found["minutes"]) == (0.75, 0.1)


def test_the_command_is_run_again_where_there_was_no_time_for_a_head(tmp_path: Path) -> None:
    output = tmp_path / "recommend_runs"
    flags = ["--output", str(output), "--only", "SST-2", "articles"]
    asked = study.RecommendRuns.parse(flags).marked_cells()
    assert [place[1] for place in asked] == [study.RUN] * 2 + [study.WHOLE] * 2
    results = Results(output)
    for place, limits in (("SST-2", "--budget_minutes): pruning."), ("articles", "): head on b.")):
        results.add(asked[place, study.RUN], {"limits": f"Not tried (--budget_minutes{limits}"})
    again = study.RecommendRuns.parse(flags).marked_cells()
    assert again.keys() - asked.keys() == {("articles", study.AGAIN)}


@pytest.mark.long
def test_what_is_promised_and_kept(
    encoder: Path, sst2: Path, wikitext: Path, mnist: Path, cifar10: Path, quick, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(study, "OTHER_ROWS", 100)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    flags = ["--model", encoder, "--encoder", encoder, "--data_dir", sst2, "--wikitext", wikitext]
    flags += ["--models", tmp_path, "--mnist", mnist, "--tiny_imagenet", cifar10, "--only", "SST-2"]
    run = quick("recommend_runs", *flags, output=tmp_path / "recommend_runs")
    found, whole = run.figures["SST-2"].values()
    assert found["minutes"] < 15
    proved = [label for label, row in found["rows"].items() if "epsilon" in row]
    assert proved == ["head on encoder"]
    assert ("trained" in found) == bool(found["chosen"])
    assert whole["accuracy"][1] <= whole["accuracy"][0] <= whole["accuracy"][2]
    rows = {row[1]: row for row in run.rows()}
    assert list(rows) == [study.WHOLE, "head on encoder", "pruning:ratio=0.9"]
    assert rows["head on encoder"][5] == "2.8"
    assert rows[study.WHOLE][-1] != ""
    assert [row[0] for row in run.rows("_minutes")] == ["SST-2"]
