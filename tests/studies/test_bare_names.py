"""The study of defenses by their names alone, in quick mode on generated sentences."""

from __future__ import annotations

import random
from pathlib import Path

from hf_gradguard import DEFENSES, make_defense
from recipes.studies.bare_names import BareNames


def test_members_are_counted_over_blocks(encoder, sst2, quick, tmp_path: Path) -> None:
    words = sorted(set((sst2 / "train.tsv").read_text().split()) - {"sentence", "label"})
    words = [word for word in words if not word.isdigit()]
    stream = random.Random(0)
    rows = [f"{' '.join(stream.choices(words, k=9))}\t{number % 2}" for number in range(12)]
    (tmp_path / "train.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    data = ("--model", encoder, "--data_dir", tmp_path, "--work_dir", tmp_path / "work")
    study = quick("bare_names", *data, output=tmp_path / "names")
    assert study.figures["noise"]["0"]["none"] == {"found": 1, "of": 1}
    assert study.rows()[0] == ["`none`", "1 of 1", "1.00 [0.03, 1.00]"]


def test_words_behind_a_bare_name(encoder, sst2, quick, tmp_path: Path) -> None:
    data = ("--model", encoder, "--data_dir", sst2, "--work_dir", tmp_path / "work")
    study = quick("bare_names_words", *data, output=tmp_path / "words")
    (name, score, _), *others = study.rows()
    figures = study.figures["gradient_sketch"]["0"]
    assert name == "`gradient_sketch`"
    assert not others
    assert score.startswith(f"{figures['mean']:.2f} [")
    assert figures["over_chance"]["mean"] <= figures["mean"]


def test_every_name_is_made_without_settings() -> None:
    flags = ["--all", "--model", "m", "--data_dir", "d", "--output", "o"]
    cells = BareNames.parse(flags).cells().values()
    for names in {tuple(cell["defenses"]) for cell in cells}:
        firsts = [cell["first"] for cell in cells if tuple(cell["defenses"]) == names]
        assert sorted(firsts) == [0, 5]
        assert set(names) <= set(DEFENSES)
        assert all(make_defense(name).name == name for name in names)
