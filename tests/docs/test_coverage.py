"""The page of published claims."""

from __future__ import annotations

import ast
import copy
import re
from pathlib import Path

import pytest

from recipes import coverage

ROOT = Path(__file__).resolve().parents[2]
PAPERS = {paper["title"]: paper for paper in coverage.papers()}


KINDS = ("Figure", "Table", "Theorem", "Lemma", "Remark", "Proposition", "Corollary")


def _numbers(text: str) -> set[str]:
    """`Figures 1 and 2, Theorem A.1` as `Figure 1`, `Figure 2`, `Theorem A.1`."""
    found, kind = set(), ""
    for word in re.findall(r"[A-Z][a-z]+|(?:[A-Z]\.)?\d[\d.]*(?: to \d+)?", text):
        if word[1:2].isalpha():
            kind = word.removesuffix("s")
        elif kind in KINDS:
            first, _, last = word.rstrip(".").partition(" to ")
            numbers = range(int(first), int(last) + 1) if last else [first]
            found |= {f"{kind} {number}" for number in numbers}
    return found


def test_the_page_is_made_of_the_data():
    assert coverage.page() == coverage.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("title", PAPERS)
def test_every_table_figure_and_theorem_is_there(title):
    paper = PAPERS[title]
    expected = {f"Figure {n + 1}" for n in range(paper["figures"])}
    expected |= {f"Table {n + 1}" for n in range(paper["tables"])}
    expected |= _numbers(paper["theorems"])
    claiming = {pair for item in paper["items"] for pair in _numbers(item["where"])}
    silent = _numbers(re.sub(r"\(.*?\)", "", paper["silent"]))
    assert claiming | silent == expected
    assert not claiming & silent


@pytest.mark.parametrize("title", PAPERS)
def test_every_verdict_says_on_what_it_rests(title):
    for item in PAPERS[title]["items"]:
        assert item["state"] in coverage.STATES, item
        judged = item["state"] != coverage.NOT_ATTEMPTED
        assert judged == ("found" in item) == ("link" in item or bool(item["tests"])), item
        assert "{" not in re.sub(r"{seeds\(\d+, \d+, \d+\)}", "", item.get("found", "")), item


EXPERIMENTS = [
    item for paper in PAPERS.values() for item in paper["items"] if "link" in item
]  # fmt: skip


def test_reproduced_is_refused_under_other_conditions():
    same = [item for item in EXPERIMENTS if not coverage.differences(item)]
    assert any(item["state"] == coverage.REPRODUCED for item in same)
    for item in EXPERIMENTS:
        if coverage.differences(item):
            with pytest.raises(ValueError, match="differ, so it is direction"):
                coverage.check_conditions(item | {"state": coverage.REPRODUCED, "exact": "so"})
    for name in coverage.CONDITIONS:
        item = copy.deepcopy(same[0]) | {"state": coverage.REPRODUCED}
        item["ours"][name] = "another"
        if name in coverage.EQUAL_CONDITIONS:
            with pytest.raises(ValueError, match=f"{name} differ"):
                coverage.check_conditions(item)
        else:  # how much was looked at may differ
            coverage.check_conditions(item)


@pytest.mark.parametrize("state", coverage.JUDGED)
def test_a_verdict_without_an_interval_is_refused(state):
    (same, *_) = [item for item in EXPERIMENTS if not coverage.differences(item)]
    for found in ("as much as without", "0.9 against 0.7", "on 20 images"):
        item = {k: v for k, v in same.items() if k != "exact"} | {"state": state, "found": found}
        with pytest.raises(ValueError, match="without an interval"):
            coverage.check_conditions(item)
        coverage.check_conditions(item | {"exact": "computed"})
        coverage.check_conditions(item | {"state": "cannot tell"})
    for found in ("0.1 ± 0.2", "0.9 [-0.1, 1.2]", "3 of 5", "p = 0.03", "from 0.2 to 0.3"):
        coverage.check_conditions(same | {"state": state, "found": found})


def test_an_experiment_says_all_its_conditions():
    for side in ("paper", "ours"):
        item = copy.deepcopy(EXPERIMENTS[0])
        del item[side]["seeds"]
        with pytest.raises(ValueError, match=f"{side} must have model, data, n, seeds"):
            coverage.check_conditions(item)


def test_a_theorem_is_not_reproduced_by_cases():
    (item, *_) = [
        item for paper in PAPERS.values() for item in paper["items"]
        if item["tests"] and "link" not in item
    ]  # fmt: skip
    with pytest.raises(ValueError, match="tests alone"):
        coverage.check_conditions(item | {"state": coverage.REPRODUCED})


TESTS = {test for paper in PAPERS.values() for item in paper["items"] for test in item["tests"]}


@pytest.mark.parametrize("test", sorted(TESTS))
def test_every_cited_test_is_there(test):
    file, name = test.split("::")
    found = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    assert name in {node.name for node in found if isinstance(node, ast.FunctionDef)}


def test_every_cited_page_is_there():
    pages = {page.name for page in (ROOT / "docs" / "findings").glob("*.md")}
    links = {item["link"] for paper in PAPERS.values() for item in paper["items"] if "link" in item}
    assert links <= pages


def test_numbers():
    assert _numbers("Tables 1 to 3, Theorems 2 and A.1; Appendix J, Lemma 3.8.") == {
        *("Table 1", "Table 2", "Table 3", "Theorem 2", "Theorem A.1", "Lemma 3.8")
    }


def test_seeds_that_decide():
    # half-width 20 over 3 seeds is a standard deviation of 20 √3/4.303 = 8.05; of 22 seeds each,
    # 2.018 · 8.05 √(2/22) = 4.90 is within 5, of 21 it is 5.02
    assert coverage.seeds(20, 3, effect=5) == 22
