"""`examples/space`: what the page shows of a sentence, and the page itself where Gradio is."""

from __future__ import annotations

import importlib
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from recipes.figures import published
from tests.helpers import save_encoder, word_tokenizer

ROOT = Path(__file__).resolve().parents[1]
SENTENCE = "my favourite chair is comfortable and well made ."
NOISE = "gaussian_noise:relative_scale=20"


@pytest.fixture
def leak(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The page's function with a tiny encoder in the place of MiniLM."""
    monkeypatch.syspath_prepend(str(ROOT / "examples/space"))
    module = importlib.import_module("leak")
    words = [*SENTENCE.split(), *(f"w{i}" for i in range(40))]
    encoder = save_encoder(tmp_path / "encoder", word_tokenizer(words), 48)
    monkeypatch.setattr(module, "packaged_encoder", lambda: str(encoder))
    monkeypatch.setattr(module, "PAIRS", 2)
    module.encoder.cache_clear()
    module.head.cache_clear()
    return module


def test_every_word_is_read_unprotected_and_none_behind_noise(leak: ModuleType) -> None:
    shown = leak.reconstruct(f"  {SENTENCE} ", NOISE)
    assert shown.words["none"] == [(word, leak.AT_PLACE) for word in SENTENCE.split()]
    assert shown.recovered["none"] == 1
    assert shown.distinguished["none"] == (2, 2)
    assert len(shown.words[NOISE]) == len(SENTENCE.split())
    assert shown.recovered[NOISE] < 0.5
    assert shown.guess in {SENTENCE, *(text for text, _ in leak.LISTED)}
    right = [verdict for _, verdict in shown.words[NOISE] if verdict != leak.WRONG]
    assert len(right) <= len(SENTENCE.split()) / 2
    assert shown.distinguished[NOISE][1] == 2


def test_a_word_elsewhere_in_the_sentence_is_not_at_its_place(leak: ModuleType) -> None:
    _, tokenizer = leak.encoder()
    sent, found = (tokenizer(text)["input_ids"] for text in ("chair is made", "is w1 made"))
    assert list(leak._judged(tokenizer, found, sent)) == [
        ("is", leak.ELSEWHERE), ("w1", leak.WRONG), ("made", leak.AT_PLACE),
    ]  # fmt: skip


@pytest.mark.parametrize("sentence", ["", "   ", "a" * 201])
def test_no_sentence_and_a_long_one_are_refused(leak: ModuleType, sentence: str) -> None:
    with pytest.raises(ValueError, match="1 to 200 characters"):
        leak.reconstruct(sentence, NOISE)


def test_prices_are_those_of_the_published_table(leak: ModuleType) -> None:
    table = published()["frontier_text"].text()
    assert "`gaussian_noise relative_scale=20` | 0.811 ± 0.007 | 0.025 [0.016, 0.035]" in table
    assert leak.PRICES[NOISE] == [2.5, 1.6, 3.5]
    assert leak.price(NOISE).startswith("2.5 points of accuracy, 95 % interval [1.6, 3.5]")
    for label, (lost, low, high) in leak.PRICES.items():
        row = f"`{label.replace(':', ' ')}` | "
        (line,) = (line for line in table.splitlines() if row in line)
        numbers = [float(n) for n in re.findall(r"-?[\d.]+", line.split("|")[3])]
        assert numbers == pytest.approx([lost / 100, low / 100, high / 100])
    (plain,) = (line for line in table.splitlines() if line.startswith("| `none`"))
    assert f"{100 * float(plain.split('|')[2].split()[0]):.1f} % unprotected" in leak.price(NOISE)
    strengths = leak.choices()["gaussian_noise"]
    assert strengths == [f"relative_scale={scale}" for scale in (1, 5, 10, 20, 50, 100)]


def test_the_page_in_a_browser(leak: ModuleType) -> None:
    """By the keyboard alone: a sentence, another defense, and the words of both."""
    pytest.importorskip("gradio")
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium")
    page_module = importlib.import_module("app")
    blocks = page_module.build()
    _, address, _ = blocks.launch(prevent_thread_lock=True, quiet=True)
    try:
        with playwright.sync_playwright() as tools:
            browser = tools.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 390, "height": 844})
            page.goto(address)
            page.get_by_label("Your sentence").fill(SENTENCE)
            tab_to(page, "optimal_noise")
            page.keyboard.press("Space")
            page.get_by_role("radio", name="optimal_noise", checked=True).wait_for()
            tab_to(page, "relative_scale=50")
            page.keyboard.press("Space")
            tab_to(page, "Share its gradient")
            page.keyboard.press("Enter")
            page.get_by_text("optimal_noise:relative_scale=50").wait_for(timeout=60_000)
            shown = page.inner_text("body")
            assert "100%" in shown
            assert "by proof: no attacker says which of two sentences" in shown
            assert leak.price("optimal_noise:relative_scale=50") in shown
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= 390
            browser.close()
    finally:
        blocks.close()


def tab_to(page: Any, wanted: str) -> None:
    """By the keyboard to the control of that value or text."""
    for _ in range(20):
        page.keyboard.press("Tab")
        active = "[document.activeElement.value, document.activeElement.innerText]"
        if wanted in page.evaluate(active):
            return
    raise AssertionError(f"no control {wanted}")
