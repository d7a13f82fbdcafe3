"""The page of published claims."""

from __future__ import annotations

import re

import pytest

from recipes import coverage

PAPERS = {paper["title"]: paper for paper in coverage.papers()}


def _numbers(text: str) -> set[tuple[str, int]]:
    """`Figures 1 and 2, Tables 1 to 4` as pairs of kind and number."""
    found, kind = set(), ""
    for word in re.findall(r"Figures?|Tables?|\d+ to \d+|\d+", text):
        if word[0] in "FT":
            kind = word[0]
        else:
            ends = [int(end) for end in word.split(" to ")]
            found |= {(kind, number) for number in range(ends[0], ends[-1] + 1)}
    return found


def test_the_page_is_made_of_the_data():
    assert coverage.page() == coverage.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("title", PAPERS)
def test_every_table_and_figure_is_there(title):
    paper = PAPERS[title]
    expected = {("F", n + 1) for n in range(paper["figures"])}
    expected |= {("T", n + 1) for n in range(paper["tables"])}
    claiming = {pair for item in paper["items"] for pair in _numbers(item["where"])}
    silent = _numbers(re.sub(r"\(.*?\)", "", paper["silent"]))
    assert claiming | silent == expected
    assert not claiming & silent


@pytest.mark.parametrize("title", PAPERS)
def test_every_verdict_says_on_what_it_rests(title):
    for item in PAPERS[title]["items"]:
        assert item["state"] in coverage.STATES, item
        judged = item["state"] != coverage.NOT_ATTEMPTED
        assert judged == ("found" in item) == ("link" in item), item
        assert "{" not in re.sub(r"{seeds\(\d+, \d+, \d+\)}", "", item.get("found", "")), item


def test_seeds_that_decide():
    # half-width 20 over 3 seeds is a standard deviation of 20 √3/4.303 = 8.05; of 22 seeds each,
    # 2.018 · 8.05 √(2/22) = 4.90 is within 5, of 21 it is 5.02
    assert coverage.seeds(20, 3, effect=5) == 22
