"""Noise changes no learning rate, and one line says what it does to an optimizer's steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_task
from transformers import TrainingArguments

from hf_gradguard import GradGuardConfig, GradGuardTrainer, GradientMap, make_defense, protect
from hf_gradguard.defenses import chain
from hf_gradguard.randomness import Stream
from hf_gradguard.training.learning_rate import rate_notice

RATE = 1e-3


def trainer(folder: Path, defense: Any, *, kind: Any = GradGuardConfig, **settings: Any) -> Any:
    model, batch = make_task("bert")
    model = model.float()
    given, own_trainer = settings.pop("given", False), settings.pop("trainer", GradGuardTrainer)
    args = kind(
        str(folder), learning_rate=RATE, use_cpu=True, report_to="none", disable_tqdm=True,
        logging_steps=1,
        **{"max_steps": 2, "lr_scheduler_type": "constant", "save_strategy": "no", **settings},
    )  # fmt: skip
    rows = [{name: entry[i] for name, entry in batch.items()} for i in range(2)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE) if given else None
    return own_trainer(
        model, args, defense=defense, optimizers=(optimizer, None), train_dataset=rows
    )


@pytest.mark.parametrize(
    "settings",
    [{}, {"given": True}, {"kind": TrainingArguments}, {"optim": "adafactor"}],
    ids=["ours", "optimizer given", "TrainingArguments", "Adafactor"],
)
def test_the_rate_stays_and_the_log_says_so(
    tmp_path: Path, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    noisy = trainer(tmp_path, make_defense("gaussian_noise", relative_scale=20.0), **settings)
    noisy.train()
    logged = [entry["learning_rate"] for entry in noisy.state.log_history if "loss" in entry]
    assert logged == pytest.approx([RATE] * 2)
    assert all(group["lr"] == RATE for group in noisy.optimizer.param_groups)
    assert "learning rate stays 0.001" in caplog.text
    assert "gaussian_noise:relative_scale=20 --learning_rate 0.001" in caplog.text


def _notice(kind: str, defense: Any, messages: int = 1, clip: float | None = 1.0) -> str | None:
    optimizer = getattr(torch.optim, kind)([torch.nn.Parameter(torch.ones(2))], lr=RATE)
    return rate_notice(optimizer, defense, messages, clip)


@pytest.mark.parametrize(
    "kind", ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adafactor", "RMSprop", "Adagrad"]
)
def test_optimizers_that_normalize(kind: str) -> None:
    notice = _notice(kind, make_defense("laplace_noise", relative_scale=3.0))
    assert notice is not None
    assert f"{kind}'s steps" in notice
    assert "0.001, 0.002, 0.004, 0.008" in notice


@pytest.mark.parametrize(
    "kind",
    ["Lamb", "Lion", "LARS", "SophiaG", "AdamWScheduleFree", "APOLLOAdamW", "APOLLO", "AdaLomo",
     "Muon", "SingleDeviceMuonWithAuxAdam", "GaLoreAdafactor", "Adagrad8bit", "RMSprop32bit",
     "AdaFactor"],
)  # fmt: skip
def test_optimizers_of_others_that_normalize(kind: str) -> None:
    made = type(kind, (torch.optim.SGD,), {})([torch.nn.Parameter(torch.ones(2))], lr=RATE)
    notice = rate_notice(made, make_defense("gaussian_noise", relative_scale=3.0), 1, None)
    assert notice is not None
    assert f"{kind}'s steps" in notice


TORCHS = {
    kind.__name__: kind.__name__ not in {"SGD", "ASGD", "LBFGS", "Rprop", "Adadelta"}
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and kind is not torch.optim.Optimizer
}


@pytest.mark.parametrize(("kind", "normalizes"), TORCHS.items())
def test_every_optimizer_of_torch_is_judged(kind: str, normalizes: bool) -> None:
    """One that a newer torch brings is taken to normalize until somebody has looked at it."""
    made = type(kind, (torch.optim.SGD,), {})([torch.nn.Parameter(torch.ones(2))], lr=RATE)
    notice = rate_notice(made, make_defense("gaussian_noise", relative_scale=3.0), 1, None)
    assert (notice is not None) == normalizes


@pytest.mark.parametrize(("ratio", "is_said"), [(0.99, False), (1.01, True)])
def test_noise_below_the_gradient_is_no_news(ratio: float, is_said: bool) -> None:
    noise = make_defense("gaussian_noise", relative_scale=ratio)
    assert (_notice("AdamW", noise) is not None) == is_said


def test_messages_are_averaged() -> None:
    noise = make_defense("gaussian_noise", relative_scale=20.0)
    notice = _notice("AdamW", noise, messages=16)
    assert notice is not None
    assert "noise of 5 times the gradient in the mean of 16 messages" in notice
    assert _notice("AdamW", noise, messages=500) is None


def test_a_trainer_counts_its_messages(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    noise = make_defense("gaussian_noise", relative_scale=20.0)
    settings = {"clients_per_process": 2, "per_device_train_batch_size": 2}
    trainer(tmp_path, noise, gradient_accumulation_steps=2, **settings).train()
    assert "noise of 10 times the gradient in the mean of 4 messages" in caplog.text


def test_two_noises_add_up() -> None:
    noises = [make_defense("gaussian_noise", relative_scale=r) for r in (3.0, 2.0)]
    notice = _notice("AdamW", chain(*noises))
    assert notice is not None
    assert "noise of 7 times" in notice  # 3² + (1 + 3²) · 2²


def test_sgd_is_told_of_clipping() -> None:
    noise = make_defense("gaussian_noise", relative_scale=3.0)
    notice = _notice("SGD", noise)
    assert notice is not None
    assert "max_grad_norm=1 counts noise" in notice
    assert "3.16" in notice
    assert _notice("SGD", noise, clip=0.0) is None


def test_clipping_shortens_steps_by_that_much() -> None:
    """What the line says, measured: the part of SGD's clipped step along the gradient."""
    g = torch.randn(100_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = 20 * torch.randn(100_000, generator=torch.Generator().manual_seed(1)).double()
    steps = []
    for message in (g, g + noise):
        weight = torch.nn.Parameter(torch.zeros_like(g))
        weight.grad = message.clone()
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
        torch.optim.SGD([weight], lr=1.0).step()
        steps.append(float(-weight.detach() @ g / g.norm()))
    assert steps[0] / steps[1] == pytest.approx(math.hypot(1, 20), rel=0.1)


@pytest.mark.parametrize("defense", ["none", "pruning", "quantization"])
def test_nothing_is_said_without_noise(defense: str) -> None:
    assert _notice("AdamW", make_defense(defense)) is None
    assert _notice("SGD", make_defense(defense)) is None


def test_noise_whose_ratio_settings_do_not_say() -> None:
    notice = _notice("AdamW", make_defense("gaussian_noise", scale=1e-3))
    assert notice is not None
    assert "settings do not say" in notice


def test_a_message_has_the_ratio_that_settings_say() -> None:
    """Two noises after each other, once the second knows what it is given: ‖noise‖ over ‖g‖ is 7,
    but for chance.
    """
    model, batch = make_task("bert")
    gmap = GradientMap(model, batch)
    noises = [make_defense("gaussian_noise", relative_scale=r) for r in (3.0, 2.0)]
    both = chain(*noises)
    for seed in range(40):
        message = both(gmap, Stream.from_seeds(seed))
    pairs = [(message[name] - g, g) for name, g in gmap.gradient().items()]
    noise, gradient = (
        math.hypot(*(float(t.norm()) for t in some)) for some in zip(*pairs, strict=True)
    )
    assert noise / gradient == pytest.approx(7.0, rel=0.1)


def test_a_loop_says_the_same(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = make_task("bert")
    protect(model, batch, make_defense("gaussian_noise", relative_scale=17.0))
    assert "protect() changes no learning rate. Under noise of 17 times" in caplog.text


NOISE = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1}


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
        ({"lr_scheduler_type": "linear"}, 3.0, 20.0), ({"trainer": WarmsUp}, None, 3.0),
    ],
    ids=["constant", "constant, off", "constant, on", "linear", "sequential"],
)  # fmt: skip
def test_scaled_on_request_and_after_resuming_under_other_noise(
    tmp_path: Path, settings: dict[str, Any], before: float | None, after: float | None
) -> None:
    def run(folder: str, ratio: float | None) -> Any:
        noise = make_defense("gaussian_noise", relative_scale=ratio or 3.0)
        more = {**NOISE, **settings, "scale_learning_rate": ratio is not None}
        return trainer(tmp_path / folder, noise, **more)

    def rates(noisy: Any) -> list[float]:
        return [entry["learning_rate"] for entry in noisy.state.log_history if "loss" in entry]

    straight, resumed = run("straight", after), run("resumed", after)
    straight.train()
    run("resumed", before).train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "resumed" / "checkpoint-2"))
    assert rates(resumed)[2:] == pytest.approx(rates(straight)[2:])
    assert rates(resumed)[:2] != pytest.approx(rates(straight)[:2])
    if not settings:
        assert rates(straight) == pytest.approx([RATE * math.hypot(1, after or 0)] * 4)


@pytest.mark.parametrize(
    ("noise", "given", "reason"),
    [({"scale": 1e-3}, False, "relative_scale"), ({"relative_scale": 3.0}, True, "optimizers=")],
)
def test_what_cannot_be_scaled_is_refused(
    tmp_path: Path, noise: dict[str, float], given: bool, reason: str
) -> None:
    defense = make_defense("gaussian_noise", **noise)
    with pytest.raises(ValueError, match=reason):
        trainer(tmp_path, defense, given=given, scale_learning_rate=True).train()
