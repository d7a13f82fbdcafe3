"""A defense that is named alone does what docs/choose.md recommends, and says what is known."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers import SmallNetwork, make_task

from hf_gradguard import DEFENSES, GradGuardConfig, GradGuardTrainer, make_defense
from hf_gradguard.defenses import measured
from hf_gradguard.defenses.measured import Recovered, recovered_behind

ROOT = Path(__file__).parents[2]
NOISES = {"relative_scale": 20.0}
RECOMMENDED: dict[str, dict[str, Any]] = {
    "gaussian_noise": NOISES, "laplace_noise": NOISES, "optimal_noise": NOISES, "dp_sgd": NOISES,
    "optimal_dp_sgd": NOISES, "optimal_noise_published": NOISES, "optimal_dp_sgd_published": NOISES,
    "pruning": {"ratio": 0.99, "error_feedback": True, "min_batches": 2},
    "optimal_pruning": {"ratio": 0.99, "error_feedback": True, "min_batches": 8},
    "gradient_sketch": {"samples": None, "error_feedback": True},
    "refiner": {"samples": 16, "iterations": 2, "error_feedback": True},
    "quantization": {"bits": 1},
    "soteria": {"ratio": 0.9},
}  # fmt: skip
OF_PAPERS = {"refiner_published", "optimal_pruning_published"}


def test_every_name_alone_is_what_is_recommended() -> None:
    assert set(DEFENSES) - {"none"} == RECOMMENDED.keys() | OF_PAPERS
    for name, settings in RECOMMENDED.items():
        defense = make_defense(name)
        assert {key: getattr(defense, key) for key in settings} == settings, name


def test_the_page_says_the_same() -> None:
    page = (ROOT / "docs" / "choose.md").read_text(encoding="utf-8")
    table = page.partition("## Default strengths")[2].partition("\n## ")[0]
    rows = [row.split("|")[1:3] for row in table.splitlines() if row.startswith("| `")]
    said = 0
    for names, strength in rows:
        settings = dict(re.findall(r"`(\w+)=([\w.]+)`", strength))
        for name in re.findall(r"`(\w+)`", names):
            defense: Any = make_defense(name)
            for key, text in settings.items():
                value = getattr(defense, key) or 4  # a sketch of None samples has 4 texts
                assert str(value) == text or float(value) == float(text), (name, key)
                said += 1
    assert said > 15


@pytest.mark.parametrize("name", ["pruning", "optimal_pruning"])
def test_a_ratio_comes_as_papers_have_it(name: str) -> None:
    for settings in ({"ratio": 0.9}, {"utility": 0.5}):
        defense = make_defense(name, **settings)
        assert (defense.error_feedback, defense.min_batches) == (False, 2)
    assert make_defense(name, error_feedback=False).ratio == 0.99
    assert make_defense(name, ratio=0.5, error_feedback=True, min_batches=4).min_batches == 4


@pytest.mark.parametrize("name", DEFENSES)
def test_the_log_and_the_card_say_what_is_known(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, batch = make_task("bert")
    settings = {"evaluation_network": SmallNetwork("text", 8)} if "refiner_p" in name else {}
    rows = [{key: entry[0] for key, entry in batch.items()}] * 2
    args = GradGuardConfig(str(tmp_path), use_cpu=True, report_to="none")
    defense = make_defense(name, **settings)
    trainer = GradGuardTrainer(model, args, defense=defense, train_dataset=rows)
    known, of_texts = recovered_behind(trainer.defense), recovered_behind(trainer.defense, "text")
    lines = [text for text in caplog.messages if text.startswith(f"Behind {name}: ")]
    assert [of_texts in line for line in lines] == ([] if name == "none" else [True])
    if "refiner" not in name:  # whose figures are one sentence
        assert not any("image" in line for line in lines)  # the model takes texts
    GradGuardTrainer(model, args, defense=defense, train_dataset=rows)  # once a process
    assert sum(text.startswith("Behind ") for text in caplog.messages) == len(lines)
    trainer.create_model_card()
    assert known in (tmp_path / "README.md").read_text(encoding="utf-8")
    pages = re.findall(r"docs/[\w/.]+", known)
    assert pages
    assert all((ROOT / page).exists() for page in pages)


def test_a_weaker_strength_says_what_comes_back() -> None:
    weak = recovered_behind(make_defense("gaussian_noise", relative_scale=1.0))
    assert "at relative_scale=1," in weak
    assert "76% of a sentence's words" in weak
    assert "at relative_scale=5," in recovered_behind(
        make_defense("optimal_noise", relative_scale=9.0)
    )
    assert "bits=4" in recovered_behind(make_defense("quantization", bits=3))
    assert "nothing was measured" in recovered_behind(make_defense("gaussian_noise", scale=0.1))
    assert "gradient_sketch" in recovered_behind(make_defense("refiner"))


def test_what_concerns_texts_says_nothing_of_images() -> None:
    defense = make_defense("gaussian_noise", relative_scale=20)
    of_texts, of_images = (recovered_behind(defense, kind) for kind in ("text", "image"))
    assert "words" in of_texts
    assert "image" not in of_texts
    assert "12.1 dB" in of_images
    assert "sentence" not in of_images
    never = recovered_behind(make_defense("gradient_sketch", samples=256), "text")
    assert "nothing was measured at this strength" in never


TABLES: dict[str, tuple[dict[float, Recovered], dict[str, Any]]] = {
    "gaussian_noise": (measured.UNIFORM_NOISE, {}),
    "optimal_noise": (measured.OPTIMAL_NOISE, {}),
    "pruning": (measured.PRUNING, {}),
    "optimal_pruning": (
        measured.OPTIMAL_PRUNING_OF_EIGHT, {"error_feedback": True, "min_batches": 8}
    ),
    "gradient_sketch": (measured.SKETCH, {}),
    "quantization": (measured.BITS, {}),
}  # fmt: skip
STRENGTHS = {
    "gaussian_noise": "relative_scale", "optimal_noise": "relative_scale", "pruning": "ratio",
    "optimal_pruning": "ratio", "gradient_sketch": "samples", "quantization": "bits",
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_figures_are_those_of_the_frontier(name: str) -> None:
    """Words, by the cells of docs/results/frontier_text.json at the end of training."""
    rows, extra = TABLES[name]
    cells = json.loads((ROOT / "docs/results/frontier_text.json").read_text(encoding="utf-8"))
    checked = 0
    for strength, recovered in rows.items():
        wanted = {STRENGTHS[name]: abs(strength), **extra}
        scores = [
            score
            for cell in cells
            if cell["settings"].get("attack") == "span"
            and cell["settings"]["size"] == 1
            and cell["settings"]["stage"] == "end"
            and cell["settings"]["defense"] == name
            and cell["settings"]["strength"] == wanted
            for score in cell["figures"]["token_f1"]
        ]
        if scores and recovered.words is not None:
            assert sum(scores) / len(scores) == pytest.approx(recovered.words, abs=0.02)
            checked += 1
    assert checked >= 2
