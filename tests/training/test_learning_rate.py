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
from hf_gradguard.training.learning_rate import rate_factor, scale_learning_rate

RATE = 1e-3


def trainer(
    folder: Path,
    defense: Any,
    *,
    given: bool = False,
    kind: type[GradGuardTrainer] = GradGuardTrainer,
    **settings: Any,
) -> Any:
    model, batch = make_task("bert")
    model = model.float()
    args = GradGuardConfig(
        str(folder), learning_rate=RATE, use_cpu=True, report_to="none", disable_tqdm=True,
        logging_steps=1,
        **{"max_steps": 2, "lr_scheduler_type": "constant", "save_strategy": "no", **settings},
    )  # fmt: skip
    rows = [{name: entry[i] for name, entry in batch.items()} for i in range(2)]
    own = (torch.optim.AdamW(model.parameters(), lr=RATE), None) if given else (None, None)
    data = {"train_dataset": rows, "eval_dataset": rows}
    return kind(model, args, defense=defense, optimizers=own, **data)


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


CHECKPOINTS = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1}


class WarmsUp(GradGuardTrainer):
    """By one scheduler, after which another goes on."""

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        own, make = self.optimizer, torch.optim.lr_scheduler
        parts = [make.LinearLR(own, total_iters=2), make.ExponentialLR(own, gamma=0.9)]
        self.lr_scheduler = make.SequentialLR(own, parts, milestones=[3])
        return self.lr_scheduler


@pytest.mark.parametrize(
    ("settings", "before", "after"),
    [
        ({}, 3.0, 20.0), ({}, 20.0, None), ({}, None, 3.0),
        ({"lr_scheduler_type": "linear"}, 3.0, 20.0),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}, 20.0, None),
        ({"kind": WarmsUp}, None, 3.0),
    ],
    ids=["constant", "constant, off", "constant, on", "linear", "plateau", "sequential"],
)  # fmt: skip
def test_a_run_that_resumes_under_other_noise_has_its_rates(
    tmp_path: Path, settings: dict[str, Any], before: float | None, after: float | None
) -> None:
    """It used to keep the old ones, and say the new ones."""

    def run(folder: str, ratio: float | None) -> Any:
        noise = make_defense("gaussian_noise", relative_scale=ratio or 3.0)
        more = {**CHECKPOINTS, **settings, "scale_learning_rate": ratio is not None}
        return trainer(tmp_path / folder, noise, **more)

    straight, resumed = run("straight", after), run("resumed", after)
    straight.train()
    run("resumed", before).train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "resumed" / "checkpoint-2"))
    assert rates(resumed)[2:] == pytest.approx(rates(straight)[2:])
    assert rates(resumed)[:2] != pytest.approx(rates(straight)[:2])


def test_a_run_that_was_given_its_optimizer_resumes_with_its_rate(tmp_path: Path) -> None:
    for ratio in (3.0, 20.0):
        noise = make_defense("gaussian_noise", relative_scale=ratio)
        made = trainer(tmp_path, noise, given=True, **CHECKPOINTS)
        made.train(str(tmp_path / "checkpoint-2") if ratio == 20.0 else None)
        assert rates(made) == pytest.approx([RATE] * 4)


@pytest.mark.parametrize("kind", ["Adafactor", "RMSprop", "Adagrad"])
def test_other_optimizers_that_normalize_keep_their_rate_and_are_told(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = getattr(torch.optim, kind)([weight], lr=1e-2)
    noise = make_defense("gaussian_noise", relative_scale=3.0)
    assert scale_learning_rate(optimizer, noise, GradGuardConfig("out")) == [1.0]
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert f"{kind} divides its steps" in caplog.text
