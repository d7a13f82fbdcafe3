"""Learning rates follow noise, where Adam would divide by it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_task

from hf_gradguard import GradGuardConfig, GradGuardTrainer, make_defense
from hf_gradguard.defenses import Defense, chain
from hf_gradguard.training.learning_rate import rate_factor

RATE = 1e-3


def trainer(folder: Path, defense: Any, *, given: bool = False, **settings: Any) -> Any:
    model, batch = make_task("bert")
    model = model.float()
    args = GradGuardConfig(
        str(folder), max_steps=2, learning_rate=RATE, lr_scheduler_type="constant", use_cpu=True,
        save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=1, **settings,
    )  # fmt: skip
    rows = [{name: entry[i] for name, entry in batch.items()} for i in range(2)]
    own = (torch.optim.AdamW(model.parameters(), lr=RATE), None) if given else (None, None)
    return GradGuardTrainer(model, args, defense=defense, train_dataset=rows, optimizers=own)


def rates(made: Any) -> list[float]:
    return [one["learning_rate"] for one in made.state.log_history if "learning_rate" in one]


@pytest.mark.parametrize(
    ("defense", "ratio"),
    [
        (make_defense("none"), 0.0),
        (make_defense("gaussian_noise", relative_scale=3.0), 3.0),
        (make_defense("laplace_noise", relative_scale=3.0), 3.0),
        (make_defense("optimal_noise", relative_scale=20.0), 20.0),
        (make_defense("pruning", ratio=0.5), 0.0),
        (chain(make_defense("pruning"), make_defense("gaussian_noise", relative_scale=5.0)), 5.0),
        (
            chain(
                make_defense("gaussian_noise", relative_scale=3.0),
                make_defense("gaussian_noise", relative_scale=2.0),
            ),
            7.0,  # 3² + (1 + 3²) · 2²
        ),
    ],
    ids=str,
)  # fmt: skip
def test_the_factor(defense: Defense, ratio: float) -> None:
    assert rate_factor(defense) == pytest.approx(math.sqrt(1 + ratio**2))


def test_a_message_has_the_ratio_that_settings_say() -> None:
    """Two noises after each other: ‖noise‖ over ‖g‖ is 7, but for chance."""
    from hf_gradguard import GradientMap
    from hf_gradguard.randomness import Stream

    model, batch = make_task("bert")
    gmap = GradientMap(model, batch)
    noises = [make_defense("gaussian_noise", relative_scale=r) for r in (3.0, 2.0)]
    message = chain(*noises)(gmap, Stream.from_seeds(1))
    pairs = [(message[name] - g, g) for name, g in gmap.gradient().items()]
    noise, gradient = (
        math.hypot(*(float(t.norm()) for t in some)) for some in zip(*pairs, strict=True)
    )
    assert noise / gradient == pytest.approx(7.0, rel=0.1)


@pytest.mark.parametrize("optimizer", ["adamw_torch", "adamw_torch_fused"])
def test_adam_follows(tmp_path: Path, optimizer: str, caplog: pytest.LogCaptureFixture) -> None:
    noise = make_defense("gaussian_noise", relative_scale=20.0)
    made = trainer(tmp_path, noise, optim=optimizer)
    made.train()
    assert rates(made) == pytest.approx([RATE * math.sqrt(401)] * 2)


def test_others_do_not_follow(tmp_path: Path) -> None:
    noise = make_defense("gaussian_noise", relative_scale=20.0)
    for settings in ({"optim": "sgd"}, {"scale_learning_rate": False}, {"given": True}):
        made = trainer(tmp_path, noise, **settings)
        made.train()
        assert rates(made) == pytest.approx([RATE] * 2)


def test_noise_that_depends_on_the_gradient_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = trainer(tmp_path, make_defense("gaussian_noise", scale=1e-3))
    made.train()
    assert rates(made) == pytest.approx([RATE] * 2)
    assert "State the noise as relative_scale" in caplog.text


def test_another_training_under_another_defense(tmp_path: Path) -> None:
    made = trainer(tmp_path, make_defense("gaussian_noise", relative_scale=20.0))
    made.train()
    made.defense = make_defense("gaussian_noise", relative_scale=3.0)
    made.train()
    assert rates(made)[-1] == pytest.approx(RATE * math.sqrt(10))
    made.defense = "none"
    made.train()
    assert rates(made)[-1] == pytest.approx(RATE)


def test_a_resumed_run_goes_on_at_its_rate(tmp_path: Path) -> None:
    noise = make_defense("gaussian_noise", relative_scale=20.0)
    made = trainer(tmp_path, noise)
    made.args.save_strategy, made.args.save_steps = "steps", 1
    made.train()
    again = trainer(tmp_path, noise)
    again.args.max_steps = 4
    again.train(resume_from_checkpoint=True)
    assert rates(again) == pytest.approx([RATE * math.sqrt(401)] * 4)
