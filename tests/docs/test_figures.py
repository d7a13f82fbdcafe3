"""Figures of pages come from docs/results/*.json: none is typed by hand, and what is committed with
figures in it is current.

On a page of findings every digit stands in a placeholder (`{{ text.none }}`), in a block `table`,
in code, in a table headed `conditions`, or in words that docs/settings.yml declares to be no
measurement. On other pages, which also teach, this holds for digits in the form of a measurement:
an interval, a half-width, points, decibels, percent, one count of another.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from recipes import figures

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FINDINGS = sorted((DOCS / "findings").glob("*.md"))
OTHERS = [page for page in sorted(DOCS.glob("*.md")) if page.name != "coverage.md"]
SETTINGS = yaml.safe_load((DOCS / "settings.yml").read_text(encoding="utf-8"))
NUMBER_WORDS = (
    r"\b(?:one|two|three|four|five|six|seven|eight|nine|ten) (?:points|dB|percent)\b"
    r"|\b(?:half|third|quarter|fifth|tenth) of the (?:words|members|sentences|images|pairs)\b"
)
MEASURED = rf"\[-?\d[\d.,]*, -?\d[\d.,]*\]|±|\d (?:points|dB|%)|\d+ of \d+|{NUMBER_WORDS}"
pytestmark = pytest.mark.docs


@pytest.fixture(scope="module")
def tables() -> figures.Tables:
    return figures.published()


def said(page: str) -> str:
    """A page without code, blocks, placeholders, links' targets and tables of conditions."""
    text = re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S)
    text = re.sub(r"^\| *conditions *\|.*?(?:^\s*$|\Z)", "", text, flags=re.M | re.S)
    text = re.sub(r"\[\w+\]\([\w./]*results/\w+\.json\)", "", text)
    return " ".join(re.sub(r"{{.+?}}|`[^`\n]+`|\]\([^)]*\)|</?\w[^>]*>", " ", text).split())


def typed(page: str, name: str, pattern: str) -> list[str]:
    """Where a page has that pattern once its settings are taken out, with the words around it."""
    text = said(page)
    for words in SETTINGS["pages"].get(name, []):
        text = text.replace(said(words), "")
    for expression in SETTINGS["everywhere"].values():
        text = re.sub(expression, "", text)
    return [text[max(0, m.start() - 40) : m.end() + 40] for m in re.finditer(pattern, text)]


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).with_suffix("").as_posix()


@pytest.mark.parametrize("page", FINDINGS, ids=lambda page: page.stem)
def test_no_figure_of_a_finding_is_typed(page: Path) -> None:
    assert typed(page.read_text(encoding="utf-8"), name_of(page), rf"\d|{NUMBER_WORDS}") == []


@pytest.mark.parametrize("page", OTHERS, ids=lambda page: page.stem)
def test_no_measurement_on_another_page_is_typed(page: Path) -> None:
    assert typed(page.read_text(encoding="utf-8"), name_of(page), MEASURED) == []


def test_no_measurement_in_readme_is_typed() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert typed(re.sub(r"<!-- figure: .+? -->.*?<!-- -->", "", text), "README", MEASURED) == []


def test_no_interval_of_a_published_claim_is_typed() -> None:
    read = yaml.safe_load((ROOT / "recipes" / "coverage.yaml").read_text(encoding="utf-8"))
    found = [item.get("found", "") for paper in read["papers"] for item in paper["items"]]
    text = " ".join(re.sub(r"{{.+?}}|{seeds.+?}", "", " | ".join(found)).split())
    for words in SETTINGS["coverage"]:
        assert words in text
        text = text.replace(words, "")
    intervals = r"-?\d[\d.]* ± [\d.]+|\[-?\d[\d.]*, -?\d[\d.]*\]"
    assert re.findall(rf".{{40}}{intervals}", text) == []


def test_a_typed_figure_is_noticed() -> None:
    for words in ("It costs 3.6 points.", "In 33 of 40 pairs.", "[0.2, 0.7]", "reaches 83.6 %"):
        assert typed(words, "findings/text", r"\d")
        assert typed(words, "audit", MEASURED)
    assert typed("It finds 17 sentences.", "findings/text", r"\d")
    assert typed("It costs seven points.", "audit", MEASURED)
    declared = "`ratio=0.99`, {{ text.none }}, 20× noise, σ = 1.5, SST-2, messages of 16, at 0.99"
    assert not typed(declared, "findings/text", r"\d")
    conditions = "| conditions | |\n|---|---|\n| n | 2,693 sentences |\n"
    assert not typed(conditions, "findings/text", r"\d")


def test_every_declared_setting_is_on_its_page() -> None:
    for name, words in SETTINGS["pages"].items():
        text = said((DOCS / f"{name}.md").read_text(encoding="utf-8"))
        assert [phrase for phrase in words if said(phrase) not in text] == [], name


@pytest.mark.parametrize("page", [*FINDINGS, *OTHERS], ids=lambda page: page.stem)
def test_every_placeholder_and_block_is_filled(page: Path, tables: figures.Tables) -> None:
    shown = figures.render(page.read_text(encoding="utf-8"), tables)
    assert "{{" not in re.sub(r"^```.*?^```$", "", shown, flags=re.M | re.S)
    assert not re.search(r"^```(table|runs)$", shown, re.M)


def test_every_named_figure_stands_in_a_table_and_is_used(tables: figures.Tables) -> None:
    texts = [page.read_text(encoding="utf-8") for page in (*FINDINGS, *OTHERS, ROOT / "README.md")]
    used = set(
        re.findall(
            r"\b(\w+\.\w+)\b",
            " ".join(re.findall(r"(?:{{|figure:) (.+?) (?:}}|-->)", "".join(texts))),
        )
    )
    for group, entries in figures.specifications().items():
        for name, where in entries.items():
            assert figures.look_up(where, tables).full
            assert group == "package" or f"{group}.{name}" in used, f"{group}.{name}"


def test_what_is_committed_is_current(tables: figures.Tables) -> None:
    for file, text in figures.committed(tables).items():
        assert file.read_text(encoding="utf-8") == text, f"run recipes/figures.py: {file.name}"


def test_a_quoted_figure_is_written_anew(tables: figures.Tables) -> None:
    stale = "It has <!-- figure: text.none -->12 %<!-- --> of it."
    assert figures.quoted(stale, tables) == "It has <!-- figure: text.none -->83.6 %<!-- --> of it."


@pytest.mark.parametrize(
    ("cell", "form", "alone", "full"),
    [
        ("0.025 [0.016, 0.035]", "points", "2.5", "2.5 [1.6, 3.5]"),
        ("-0.002 [-0.017, 0.013]", "points", "-0.2", "-0.2 [-1.7, 1.3]"),
        ("0.833 ± 0.001", "percent1", "83.3 %", "83.3 ± 0.1 %"),
        ("0.81 [0.61, 0.95]", "percent", "81 %", "81 % [61, 95]"),
        ("39 (45) of 48", "count", "39 of 48", "39 of 48"),
        ("39 (45) of 48", "count10", "45 of 48", "45 of 48"),
        ("33 of 40: 0.82 [0.67, 0.93]", "count", "33 of 40", "33 of 40"),
        ("20.0 [17.7, 22.2]", "whole", "20", "20 [18, 22]"),
        ("1 (0.41), **2** (0.43)", "bold", "2", "2"),
        ("5.7e+02", "short", "570", "570"),
        ("1.40", "", "1.40", "1.40"),
    ],
)
def test_a_figure_is_shown_in_its_form(cell: str, form: str, alone: str, full: str) -> None:
    figure = figures.Figure(cell, form)
    assert (str(figure), figure.full) == (alone, full)


def test_what_is_not_there_is_refused(tables: figures.Tables) -> None:
    with pytest.raises(KeyError, match=r"no figure text\.typo"):
        figures.render("{{ text.typo }}", tables)
    with pytest.raises(KeyError, match=r"no figure for 'typo\.none'"):
        figures.render("{{ typo.none }}", tables)
    with pytest.raises(KeyError, match="0 rows 'typo'"):
        figures.look_up("words_apart | typo | told apart, start", tables)
    with pytest.raises(KeyError, match="no column 'typo'"):
        figures.look_up("words_apart | none | typo", tables)
    with pytest.raises(KeyError, match="No study writes a table 'typo'"):
        figures.look_up("typo | none | accuracy", tables)
    with pytest.raises(ValueError, match="has no figure"):
        figures.look_up("frontier_text | none | accumulated, 16, end", tables)
    with pytest.raises(KeyError, match="block `table` has no row"):
        figures.render("```table\nof: words_apart\nrow: [none]\n```\n", tables)


def test_a_row_that_two_cells_name_is_found_by_both(tables: figures.Tables) -> None:
    table = tables["frontier_batches"]
    assert table.row("optimal_pruning & 8")[1] == "8"
    with pytest.raises(KeyError, match="5 rows 'optimal_pruning'"):
        table.row("optimal_pruning")


def test_the_package_says_what_was_found_last() -> None:
    read = json.loads(figures.PACKAGE.read_text(encoding="utf-8"))
    assert read["strengths"]["uniform_noise"]["20"][:2] == [0.0, 0.81]


def test_every_run_has_a_page_with_its_tables(tables: figures.Tables) -> None:
    for run in figures.published_runs():
        shown = figures.result_page(run, tables)
        assert shown.count("|---") >= 1, run.output
        assert f"make results ONLY={run.output}`" in shown
