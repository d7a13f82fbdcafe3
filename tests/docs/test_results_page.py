"""docs/results.md and docs/findings: what they link is there, each run's tables are made of its
figures and shown, and old addresses lead to where their text is now.
"""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
import subprocess
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import yaml

from recipes import figures, results
from recipes.studies.evaluation_networks import IMAGE, TEXT
from recipes.study import Study

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "docs" / "results"
MOVED = yaml.load(
    (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("plugins:")[0], yaml.SafeLoader
)["extra"]["moved"]
PAGES = [ROOT / "docs" / "results.md", *sorted((ROOT / "docs" / "findings").glob("*.md"))]


@pytest.mark.parametrize("run", figures.published_runs(), ids=lambda run: run.output)
def test_tables_and_pictures_are_made_of_the_figures(run, tmp_path):
    family = run.output.split("_")[0]  # a part may read what another one found
    for found in PUBLISHED.glob(f"{family}*.json"):
        shutil.copy(found, tmp_path)
    run.make_tables(tmp_path)
    plt.close("all")
    made = list(tmp_path.glob("*.md"))
    assert made
    for file in made:
        table = figures.Table.parse(file.stem, file.read_text(encoding="utf-8"))
        assert figures.run_of(file.stem) is run
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.header)}
    assert (tmp_path / f"{run.output}.png").exists() == (PUBLISHED / f"{run.output}.png").exists()


def test_cards_hold_the_tables_of_their_networks():
    for network in (IMAGE, TEXT):
        card = (ROOT / "model_cards" / network / "README.md").read_text()
        assert figures.published()[f"evalnets_{network}"].text() in card


def test_no_table_is_committed():
    tracked = subprocess.run(
        ["git", "ls-files", "docs/results"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert tracked
    assert [name for name in tracked if name.endswith(".md")] == []


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


def test_every_run_and_picture_is_on_a_page():
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    assert [
        run.output
        for run in figures.published_runs()
        if not any(figures.shows(text, run) for text in texts)
    ] == []
    links = {
        (page.parent / link).resolve()
        for page, text in zip(PAGES, texts, strict=True)
        for link in re.findall(r"\]\(([^#)]+?)(?:#[^)]*)?\)", text)
        if not link.startswith("http")
    }
    assert not [link for link in links if not link.exists()]
    assert {*PUBLISHED.glob("*.png")} <= links
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


def test_there_are_few_pages_and_each_has_its_subject():
    assert len(PAGES[1:]) <= 14


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.stem)
def test_a_page_answers_questions_a_section_each(page):
    text = page.read_text(encoding="utf-8")
    assert text.splitlines()[0].endswith("?")
    assert text.splitlines()[2].startswith("**")  # the answer first
    for section in re.split(r"^## ", text, flags=re.M):
        assert len(prose(section).split()) <= 300, section.splitlines()[0]


@pytest.mark.parametrize("old", MOVED)
def test_an_old_address_leads_to_where_its_text_is(old):
    page, _, section = MOVED[old].partition("#")
    assert not (ROOT / "docs" / "findings" / f"{old}.md").exists()
    assert not section or section in headings(ROOT / "docs" / "findings" / f"{page}.md")


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
        "default_rates",
        "encoder_choice",
        "frontier_elsewhere",
        "learning_rates",
        "recommend_runs",
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
