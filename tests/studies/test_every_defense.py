"""Every defense against every attack, in quick mode on generated data."""

from __future__ import annotations

from hf_gradguard import DEFENSES
from recipes.studies import every_defense
from recipes.studies.every_defense import IMAGES, TEXT, cells_of


def test_all_defenses_are_in_the_tables():
    for defenses in (TEXT["defenses"], IMAGES["defenses"]):
        others = {"gradient_sketch"}  # these tables are of the papers' defenses
        others |= {name for name in DEFENSES if name.endswith("_published")}  # settings of theirs
        assert set(defenses) == set(DEFENSES) - others
        assert {len(some) for name, some in defenses.items() if name != "none"} == {3}


def test_a_new_defense_adds_cells_and_leaves_the_others(monkeypatch):
    before = cells_of(TEXT)
    more = {"toy": [{"strength": 1}], **TEXT["defenses"], "other": [{}]}
    after = cells_of(TEXT | {"defenses": more})
    assert {place: after[place] for place in before} == before
    assert {row.split()[0] for row, _ in after.keys() - before.keys()} == {"toy", "other"}


def adaptive(row: dict) -> set[str]:
    return {column for column in row if column.endswith(", adaptive")}


def test_texts(encoder, sst2, quick, small_networks, tmp_path):
    small_networks(every_defense)
    data = ("--tokenizer", encoder, "--data_dir", sst2)
    study = quick("text_defenses", *data, output=tmp_path / "text")
    figures = study.figures
    figures.pop("chance")
    tuned = {"tag", "inverting_gradients", "lamp"}
    for row, cells in figures.items():
        assert set(cells) - adaptive(cells) == {"span", *tuned}, row
        assert all(
            low <= mean <= high for scores in cells.values() for mean, low, high in scores.values()
        ), row
    # Undefended, span reads off everything.
    assert figures["none"]["span"]["token_f1"] == [1, 1, 1]
    knowing = {row.split()[0]: adaptive(cells) for row, cells in figures.items()}
    assert knowing["none"] == knowing["quantization"] == set()
    assert (
        knowing["optimal_noise"]
        == knowing["pruning"]
        == {f"{name}, adaptive" for name in {"span", *tuned}}
    )
    assert knowing["soteria"] == knowing["refiner"] == {f"{name}, adaptive" for name in tuned}
    header = (tmp_path / "text.md").read_text().splitlines()[0].split(" | ")
    (none,) = (row for row in study.rows() if row[0] == "none")
    assert none[header.index("span")] == "1.00 [1.00, 1.00]"


def test_images(cifar10, image_network, quick, tmp_path, capsys):
    data = ("--images", cifar10, "--evaluation_network", image_network)
    study = quick("image_defenses", *data, output=tmp_path / "images")
    figures = study.figures
    for row in ("none", "quantization bits=8"):
        assert adaptive(figures[row]) == {"inverting_gradients, adaptive"}
    assert adaptive(figures["soteria ratio=0.5"]) == {
        "inverting_gradients, adaptive",
        "idlg, adaptive",
    }

    # What is there is shown, and not computed again.
    figures["none"]["idlg"]["psnr"] = [12.25, 11.0, 13.0]
    study.overwrite(figures)
    capsys.readouterr()
    study.again(images=None)
    assert "| 12.2 [11.0, 13.0] |" in capsys.readouterr().out
    assert study.figures == figures
