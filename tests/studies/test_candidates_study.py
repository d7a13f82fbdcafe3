"""The study of candidates, in quick mode."""

from __future__ import annotations

from argparse import Namespace

from recipes.studies.candidates import Thousand


def test_text(encoder, sst2, quick, tmp_path):
    data = ("--model", encoder, "--data_dir", sst2)
    study = quick("candidates", *data, output=tmp_path / "candidates")
    found = {name: states["initial"]["1"] for name, states in study.figures.items()}
    assert found["none"]["|knows"]["top1"][0] == 1  # of six candidates
    assert found["quantization"]["bits=2|knows"]["rank"][0] == 1
    assert set(found) == {"none", "gaussian_noise", "optimal_noise", "pruning", "quantization"}
    assert all(1 <= one["rank"][0] <= 6 for rows in found.values() for one in rows.values())
    table = (tmp_path / "candidates.md").read_text()
    assert "| initial model, messages of 1 |" in table


def test_thousand(encoder, sst2, quick, tmp_path):
    data = ("--model", encoder, "--data_dir", sst2)
    study = quick("candidates_thousand", *data, output=tmp_path / "thousand")
    for state in ("initial", "trained"):
        found = study.figures[state]
        assert found["none"]["list, 1"]["|knows"]["top1"][0] == 1  # of six candidates
        assert found["pruning"]["list, 1"]["ratio=0.99|knows"]["tpr_0.1%"][0] == 1
        assert "ratio=0.99|does not" not in found["pruning"]["list, 1"]
        table = (tmp_path / f"thousand_{state}.md").read_text()
        assert "| defense | strength | candidates, message of 1 |" in table


def test_searches_beside_a_list(encoder, sst2, tmp_path):
    args = Namespace(
        model=str(encoder), data_dir=str(sst2), quick=True, all=True, output=tmp_path / "none"
    )
    study = Thousand(args)
    study.load()
    cells = study.cells()
    read = {
        attack: study.measure(cells["initial", "none", f"{attack} "])["token_f1"][0]
        for attack in ("span", "tag", "lamp")
    }
    assert read["span"] == 1  # undefended
    assert all(0 <= value <= 1 for value in read.values())
