"""docs/results.md and docs/findings: what they link is there, their tables are those of the
figures, and `recipes/results.py` runs what they name.
"""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from recipes import results
from recipes.studies.evaluation_networks import IMAGE, TEXT
from recipes.study import Study

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "docs" / "results"
PAGES = [ROOT / "docs" / "results.md", *sorted((ROOT / "docs" / "findings").glob("*.md"))]


@pytest.mark.parametrize("run", results.RUNS, ids=lambda run: run.output)
def test_tables_are_those_of_the_figures(run, tmp_path):
    family = run.output.split("_")[0]  # a part may read what another one found
    for figures in PUBLISHED.glob(f"{family}*.json"):
        shutil.copy(figures, tmp_path)
    run.make_tables(tmp_path)
    plt.close("all")
    tables = list(tmp_path.glob("*.md"))
    assert tables
    for table in tables:
        assert table.read_text() == (PUBLISHED / table.name).read_text(), table.name
    assert (tmp_path / f"{run.output}.png").exists() == (PUBLISHED / f"{run.output}.png").exists()


def test_cards_hold_the_tables_of_their_networks():
    for network in (IMAGE, TEXT):
        card = (ROOT / "model_cards" / network / "README.md").read_text()
        assert (PUBLISHED / f"evalnets_{network}.md").read_text() in card


def test_every_study_and_benchmark_is_run():
    targets, found = {run.target for run in results.RUNS}, set()
    for path in (ROOT / "recipes" / "studies").glob("*.py"):
        module = importlib.import_module(f"recipes.studies.{path.stem}")
        for name, study in inspect.getmembers(module, inspect.isclass):
            if issubclass(study, Study) and study.__module__ == module.__name__:
                is_whole = study.report is not Study.report and not study.__subclasses__()
                if is_whole or f"{path.stem}:{name}" in targets:
                    found.add(f"{path.stem}:{name}")
    for path in (ROOT / "recipes" / "benchmarks").glob("*.py"):
        if "def table(" in path.read_text(encoding="utf-8"):
            found.add(path.stem)
    assert targets == found


def test_every_run_table_and_picture_is_on_a_page():
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    named = [name for text in texts for name in re.findall(r"make results ONLY=(\w+)", text)]
    assert {*named} - {"NAME"} == {run.output for run in results.RUNS}
    links = {
        (page.parent / link).resolve()
        for page, text in zip(PAGES, texts, strict=True)
        for link in re.findall(r"\]\(([^#)]+?)(?:#[^)]*)?\)", text)
    }
    assert not [link for link in links if not link.exists()]
    files = {*PUBLISHED.glob("*.md"), *PUBLISHED.glob("*.png")}
    cards = {PUBLISHED / f"evalnets_{network}.md" for network in (IMAGE, TEXT)}  # on their cards
    assert files - cards <= links
    assert {*PAGES[1:]} <= links


def headings(page: Path) -> set[str]:
    """Sections of a page, as links name them."""
    return {
        re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.startswith("#")
    }


def prose(text: str) -> str:
    """A page without its tables, code and link targets."""
    text = re.sub(r"^```.*?^```$|^ *\|[^\n]*$", "", text, flags=re.M | re.S)
    return re.sub(r"\]\([^)]*\)", "]", text)


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.stem)
def test_a_page_asks_one_question_in_one_sitting(page):
    text = page.read_text(encoding="utf-8")
    assert text.splitlines()[0].endswith("?")
    assert len(prose(text).split()) <= 600
    assert re.search(r"^make results ONLY=", text, flags=re.M)


LINKING = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_linked_sections_are_there(page):
    for link, section in re.findall(r"\]\(([^#)\s]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
        if not link.startswith("http"):
            target = (page.parent / link).resolve() if link else page
            assert section in headings(target), f"{link}#{section}"


def test_runs_are_chosen_by_output_or_by_what_they_mention():
    assert [run.output for run in results.named(["sst2"])] == ["sst2"]
    assert [run.output for run in results.named(["--tiny_imagenet"])] == [
        "frontier_elsewhere",
        "learning_rates",
    ]
    assert results.named([]) == results.RUNS


def test_commands_run(monkeypatch, tmp_path, capfd):
    monkeypatch.delenv("NOT_SET_ANYWHERE", raising=False)
    results.execute(["echo '| a |' > one.md"], tmp_path)
    assert (tmp_path / "one.md").read_text() == "| a |\n"
    with pytest.raises(SystemExit, match="Set NOT_SET_ANYWHERE"):
        results.execute(["echo $NOT_SET_ANYWHERE two"], tmp_path)
    monkeypatch.setenv("NOT_SET_ANYWHERE", "1")
    results.execute(["echo $NOT_SET_ANYWHERE two"], tmp_path)
    assert "1 two" in capfd.readouterr().out
