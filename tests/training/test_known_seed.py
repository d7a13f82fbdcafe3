"""With a `noise_seed` nobody is told an ε, wherever figures are shown; the account goes on."""

from __future__ import annotations

import json
import re
from math import comb
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_task

from hf_gradguard import GradGuardConfig, GradGuardTrainer, make_defense
from hf_gradguard.training.privacy.labels import UNIT_OF_LABELS, keep_probability
from hf_gradguard.training.privacy.proofs import FIXED_SEED, NO_EPSILON

PRIVATE: dict[str, Any] = {"per_sample": True, "noise_multiplier": 1.0, "delta": 1e-3}
DEFENSES: dict[str, dict[str, Any]] = {
    "poisson": PRIVATE,
    "target": {"per_sample": True, "target_epsilon": 2.0, "delta": 1e-3},
    "correlated": PRIVATE | {"correlated": True},
    "balls in bins": PRIVATE | {"correlated": True, "sampling": "balls_in_bins"},
    "batches": {"correlated": True, "scale": 2.0, "clip": 1.0, "delta": 1e-3},
    "client": {"scale": 2.0, "clip": 1.0},
}
FIGURE = re.compile(r"""ε = \d|noise_multiplier["']?: '?\d|members found|epsilon\W+\d""")


def trainer(folder: Path, defense: Any, **settings: Any) -> Any:
    model, batch = make_task("bert", dtype=torch.float32, batch_size=24)
    rows = [{name: value[k] for name, value in batch.items()} for k in range(24)]
    args = GradGuardConfig(
        str(folder), report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1, optim="sgd",
        max_grad_norm=0, per_device_train_batch_size=6,
        **{"max_steps": 2, "save_strategy": "no", **settings},
    )  # fmt: skip
    return GradGuardTrainer(model, args, defense=defense, train_dataset=rows)


def texts_of(run: Any, folder: Path, caplog: pytest.LogCaptureFixture, out: str) -> str:
    """All that is shown of a run, but for the settings that it was asked for and its account."""
    run.save_state()
    run.create_model_card()
    card = re.sub(r"```json.*?```", "", (folder / "README.md").read_text(), flags=re.S)
    history = json.dumps(run.state.log_history)
    state = (folder / "trainer_state.json").read_text()
    return "\n".join([*caplog.messages, out, card, history, state])


@pytest.mark.parametrize("settings", DEFENSES.values(), ids=DEFENSES)
def test_no_figure_of_a_proof_is_shown(
    settings: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for seed in (None, 3):
        caplog.clear()
        run = trainer(tmp_path / str(seed), make_defense("dp_sgd", **settings), noise_seed=seed)
        run.train()
        shown = texts_of(run, tmp_path / str(seed), caplog, capsys.readouterr().out)
        assert bool(FIGURE.search(shown)) == (seed is None), FIGURE.findall(shown)
        claims = [n for e in run.state.log_history for n in e if "epsilon" in n or "client_" in n]
        assert bool(claims) == (seed is None)
        assert (NO_EPSILON in shown) == (seed is not None and "delta" in settings)
        card = (tmp_path / str(seed) / "README.md").read_text().replace("\n", " ")
        assert (FIXED_SEED in card) == (seed is not None)
        if seed is not None:
            assert "gives no differential privacy" in card
    if "delta" in settings:
        assert sum(run.private_rows.account.messages.values()) in (1, 2)  # it counts all the same
        assert run.private_rows.epsilon is None


@pytest.mark.parametrize("order", [(3, None), (None, 3)])
def test_a_seed_of_an_earlier_training_is_not_forgotten(
    order: tuple[int | None, int | None], tmp_path: Path
) -> None:
    run = trainer(tmp_path, make_defense("dp_sgd", **PRIVATE), noise_seed=order[0])
    run.train()
    run.args.noise_seed = order[1]
    run.train()
    assert run.private_rows.epsilon is None
    run.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert "ε =" not in card.partition("## Privacy")[2]
    assert NO_EPSILON in card


def test_a_seed_of_the_run_that_is_resumed_is_not_forgotten(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 1}
    trainer(tmp_path, make_defense("dp_sgd", **PRIVATE), noise_seed=3, **settings).train()
    run = trainer(tmp_path, make_defense("dp_sgd", **PRIVATE), **settings)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert not any("defense/epsilon" in entry for entry in run.state.log_history)
    assert run.private_rows.epsilon is None


def test_what_is_said_of_texts_that_stand_in_several_rows() -> None:
    """By the majority of nine draws."""
    kept = keep_probability(1.0, classes=2)
    found = sum(comb(9, k) * kept**k * (1 - kept) ** (9 - k) for k in range(5, 10))
    assert f"{kept:.1%} of".replace("%", " %") in UNIT_OF_LABELS
    assert f"{found:.1%} of".replace("%", " %") in UNIT_OF_LABELS


def test_labels_of_a_known_seed_have_no_epsilon(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same seed draws the labels."""
    asked = {"protect_labels": "randomized_response", "label_epsilon": 1.0}
    for seed in (None, 3):
        caplog.clear()
        run = trainer(tmp_path, "pruning", noise_seed=seed, **asked)
        run.train()
        run.create_model_card()
        card = (tmp_path / "README.md").read_text()
        assert ("with ε = 1 (randomized response)" in card) == (seed is None)
        assert (f"for each row and rank. {NO_EPSILON}" in card) == (seed is not None)
        said = [text for text in caplog.messages if text.startswith("protect_labels")]
        assert said
        assert all(("ε = 1 protects" in text) == (seed is None) for text in said)
        assert all("The unit is a row" in text for text in said)
        assert ("The unit is a row" in card) == (seed is None)
