"""The sentence on top says what the numbers say, and the worst case is the worst."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import pytest
from test_audit import HIGH, LOW, MIDDLE, made

from hf_gradguard.audit import run, summarize
from hf_gradguard.audit.report.page import headline, html_report, worst_sample
from hf_gradguard.audit.run import make_defenses, read_metrics
from hf_gradguard.audit.text_samples import _UNUSED_TOKEN
from hf_gradguard.defenses import make_defense


@pytest.mark.parametrize(
    ("scores", "metrics", "words"),
    [
        (
            {"none/tag": HIGH},
            {},
            "Without a defense a server recovers 92 % [86, 99] of the words (tag).",
        ),
        (
            {"none/tag": HIGH, "a/tag": MIDDLE, "b/tag": LOW},
            {"none": 0.9, "b": 0.85},
            "Without a defense a server recovers 92 % [86, 99] of the words (tag). Under b, the "
            "best of 2 defenses tried, it recovers 20 % [12, 29] of the words (tag); a guess has "
            "20 %. Training reaches 0.85 with it, and 0.9 without.",
        ),
        ({"none/tag": HIGH, "a/tag": MIDDLE}, {}, "Its price was not measured: give --metrics"),
        ({"none/tag": HIGH, "a/tag": MIDDLE}, {"a": 0.8}, "Training reaches 0.8."),
        ({"none/tag": LOW, "a/tag": LOW}, {}, "no better than a guess (20 %) even without"),
    ],
)
def test_headline(scores: dict[str, list[float]], metrics: dict[str, float], words: str) -> None:
    audit = made(scores)
    audit.settings["metrics"] = metrics
    assert words in headline(summarize(audit))


def test_the_worst_case_is_the_worst() -> None:
    audit = made({"none/tag": HIGH, "a/tag": MIDDLE, "b/tag": [0.1, 0.2, 0.4, 0.1, 0.2]})
    found = worst_sample(summarize(audit))
    assert found is not None
    assert (found.message, found.index) == (2, 0)
    assert found.shown == [("none", "tag"), ("b", "tag")]


def test_metrics_are_numbers(tmp_path: Any) -> None:
    (tmp_path / "m.json").write_text('{"none": 0.9}')
    assert read_metrics(tmp_path / "m.json") == {"none": 0.9}
    with pytest.raises(ValueError, match="one number for each defense"):
        read_metrics({"none": "high"})  # type: ignore[dict-item]


def test_runs_are_of_the_defense_with_their_settings(tmp_path: Any) -> None:
    """What a recipe writes of a training, beside what is audited."""

    def trained(name: str, accuracy: float, **settings: Any) -> Any:
        own = make_defense(name, **settings).settings()
        path = tmp_path / f"{name}{accuracy}.json"
        path.write_text(json.dumps({"defense": name, "settings": own, "accuracy": accuracy}))
        return path

    audited = make_defenses(["none", "pruning:ratio=0.9", "pruning:ratio=0.99", "gaussian_noise"])
    plain, weak = trained("none", 0.9), trained("pruning", 0.8, ratio=0.9)
    strong = trained("gaussian_noise", 0.7, relative_scale=5)
    with mock.patch.object(run.logger, "warning") as warning:
        found = read_metrics([plain, weak, strong], audited)
    assert found == {"none": 0.9, "pruning:ratio=0.9": 0.8}
    assert "gaussian_noise differs in relative_scale" in warning.call_args[0][0]
    assert read_metrics(plain, audited) == {"none": 0.9}
    with pytest.raises(ValueError, match="is the second to say what none reaches"):
        read_metrics([plain, trained("none", 0.91)], audited)


def test_places_that_a_vocabulary_keeps_free_are_no_words() -> None:
    for text in ("[unused299]", "<extra_id_7>", "<|reserved_special_token_3|>", "<unused12>"):
        assert _UNUSED_TOKEN.sub("□", f" {text}") == " □"
    assert _UNUSED_TOKEN.sub("□", "[a reserved seat]") == "[a reserved seat]"


def test_the_page_has_both(tmp_path: Any) -> None:
    audit = made({"none/tag": HIGH, "a/tag": MIDDLE})
    audit.settings |= {
        "model": "m", "versions": {"hf-gradguard": "0"}, "special_ids": [], "threat_model": [],
    }  # fmt: skip
    page = html_report(summarize(audit))
    top, rest = page.split("<h2>Verdicts</h2>")
    assert "Without a defense a server recovers" in top
    assert "The worst case" in top
    assert "chart" in rest
