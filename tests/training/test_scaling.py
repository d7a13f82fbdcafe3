"""fp16: gradients are unscaled before they are protected, and an overflow shares nothing.

Accelerate has fp16 on GPUs alone, so the scaler is given to its accelerator here; with float32
models everything else is as there, and a scale that is a power of two changes no bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_task, refuses
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from hf_gradguard import GradGuardConfig, GradGuardTrainer, GradientMap, make_defense
from hf_gradguard.defenses import Message
from hf_gradguard.defenses.pruning import Pruning
from hf_gradguard.gradient_map.scaled import ScaledMap, ScaleOverflow
from hf_gradguard.training.refusals import Measured, check_accelerator, check_leakage


class WithScaler:
    """A Trainer whose accelerator has a scaler."""

    scale = 2.0**12
    overflows: tuple[int, ...] = ()

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=self.scale)


class InHalf(WithScaler):
    """In fp16, as Accelerate runs models on GPUs."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.float16):
            return super().compute_loss(*args, **kwargs)  # type: ignore[misc]


class StockInHalf(InHalf, Trainer):
    pass


class OursInHalf(InHalf, GradGuardTrainer):
    pass


class Scaled(WithScaler, GradGuardTrainer):
    """Overflows at the steps `overflows`: there the gradient of a scaled loss is not finite."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        is_due = self.state.global_step in self.overflows and loss.requires_grad
        return loss + _Large.apply(loss) if is_due else loss


class _Large(torch.autograd.Function):
    """Zero, with a derivative that float32 has and a thousand times that it has not."""

    @staticmethod
    def forward(context: Any, loss: Tensor) -> Tensor:
        return torch.zeros_like(loss)

    @staticmethod
    def backward(context: Any, slope: Tensor) -> Tensor:
        return slope * 1e37


def trainer_of(
    folder: Path,
    kind: type[Trainer],
    overflows: Any = (),
    made: Any = None,
    **own: Any,
) -> Any:
    model, batch = make_task("bert", dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    rows = [{name: entry[k % 2] for name, entry in batch.items()} for k in range(16)]
    config = TrainingArguments if issubclass(kind, StockInHalf) else GradGuardConfig
    own = {"max_steps": 4, "per_device_train_batch_size": 2, "max_grad_norm": 0.0, **own}
    args = config(
        str(folder), learning_rate=1e-2, use_cpu=True, save_strategy="no", report_to="none",
        disable_tqdm=True, lr_scheduler_type="constant", **own,
    )  # fmt: skip
    named = {} if made is None else {"defense": made}
    trainer = kind(model, args, train_dataset=rows, **named)
    trainer.overflows = overflows
    return trainer


def weights(trainer: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def trained(folder: Path, kind: type[Trainer], **own: Any) -> dict[str, Tensor]:
    trainer = trainer_of(folder, kind, **own)
    trainer.train()
    return weights(trainer)


def largest(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    return max(float((one[name] - two[name]).abs().max()) for name in two)


@pytest.mark.parametrize(
    ("defense", "settings", "more"),
    [
        ("none", {}, {}),
        ("gaussian_noise", {}, {"max_grad_norm": 0.01}),
        ("gaussian_noise", {"scale": 0.01}, {"gradient_accumulation_steps": 2}),
        ("pruning", {"ratio": 0.9, "error_feedback": True, "min_batches": 1}, {}),
        ("quantization", {"bits": 4}, {"clients_per_process": 2}),
        ("dp_sgd", {"clip": 0.1, "scale": 0.01}, {}),
    ],
)
def test_the_scale_changes_no_bit(
    tmp_path: Path, defense: str, settings: dict[str, Any], more: dict[str, Any]
) -> None:
    """Noise, thresholds, bounds and clipping are of the unscaled gradient."""
    own = {"defense": defense, "defense_kwargs": settings, "noise_seed": 3, **more}
    plain = trained(tmp_path, GradGuardTrainer, **own)
    scaled = trained(tmp_path, Scaled, **own)
    assert all(torch.equal(scaled[name], plain[name]) for name in plain)
    start = make_task("bert", dtype=torch.float32)[0].state_dict()
    assert largest(scaled, {name: start[name] for name in scaled}) > 1e-3


def test_in_half_precision_it_is_the_stock_training(tmp_path: Path) -> None:
    own = {"defense": "none", "share_input_embeddings": True}
    stock, ours = trained(tmp_path, StockInHalf), trained(tmp_path, OursInHalf, **own)
    assert all(torch.equal(ours[name], stock[name]) for name in stock)
    plain = trained(tmp_path, GradGuardTrainer, **own)
    assert largest(ours, plain) > 0  # it was in half precision


# Overflows


class Counting(Pruning):
    """Remembers what it left out, and counts its messages."""

    facts = Pruning.facts
    calls = 0

    def protect(self, gmap: GradientMap, generator: Any) -> Message:
        type(self).calls += 1
        return super().protect(gmap, generator)


def counting() -> Counting:
    Counting.calls = 0
    return Counting(ratio=0.9, error_feedback=True, min_batches=1)


def test_an_overflow_shares_nothing(tmp_path: Path) -> None:
    """The step is skipped, the scale is halved, and weights, messages and what the client remembers
    are those of a training without that step.
    """
    with_overflow = trainer_of(tmp_path, Scaled, overflows=(2,), made=counting())
    states: list[Any] = []

    steps: list[dict[str, Tensor]] = []
    step = with_overflow.training_step

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        steps.append(weights(with_overflow))
        client = with_overflow._clients[0]
        states.append(client.defense.flatten(client.state))
        result: Tensor = step(*args, **kwargs)
        return result

    with_overflow.training_step = watched
    with_overflow.train()
    assert Counting.calls == 3  # of four steps
    assert with_overflow.shared_messages.total == 3
    assert all(torch.equal(steps[3][name], steps[2][name]) for name in steps[2])
    assert states[2]
    assert all(torch.equal(states[3][name], states[2][name]) for name in states[2])
    assert with_overflow.accelerator.scaler.get_scale() == 2.0**11
    assert largest(weights(with_overflow), steps[3]) > 1e-3  # the next step trains
    assert all(bool(torch.isfinite(p).all()) for p in weights(with_overflow).values())


def test_an_overflow_takes_the_whole_step_back(tmp_path: Path) -> None:
    """Of two accumulated messages the second overflows: the first leaves no trace either."""
    trainer = trainer_of(
        tmp_path, Scaled, made=counting(), gradient_accumulation_steps=2, max_steps=1
    )
    start, passes = weights(trainer), [0]
    compute = trainer.compute_loss

    def second(*args: Any, **kwargs: Any) -> Tensor:
        passes[0] += torch.is_grad_enabled()
        trainer.overflows = (0,) if passes[0] == 2 else ()
        loss: Tensor = compute(*args, **kwargs)
        return loss

    trainer.compute_loss = second
    trainer.train()
    assert Counting.calls == 1
    assert trainer.shared_messages.total == 0
    assert not trainer._clients[0].state
    assert all(torch.equal(p, start[name]) for name, p in weights(trainer).items())


def test_a_map_says_that_it_overflowed() -> None:
    model, batch = make_task("bert", dtype=torch.float32)
    plain = GradientMap(model, batch, second_order=False)
    scaled = ScaledMap(model, batch, second_order=False, loss_scale=2.0**10)
    assert all(torch.equal(scaled.gradient()[n], g) for n, g in plain.gradient().items())

    def larger(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return 1e6 * model(**batch).loss

    large = ScaledMap(model, batch, loss_fn=larger, second_order=False, loss_scale=1e37)
    with pytest.raises(ScaleOverflow, match="loss scale of 1e"):
        large.gradient()
    other = scaled.of_batch(batch)  # as the first message of relative noise runs it
    assert all(torch.equal(other.gradient()[n], g) for n, g in plain.gradient().items())


# Refused


def accelerator_in(precision: str) -> Any:
    from test_refusals import make_accelerator

    return make_accelerator(mixed_precision=precision)


@pytest.mark.parametrize(
    ("defense", "settings"),
    [
        ("optimal_noise", {}),
        ("soteria", {}),
        ("dp_sgd", {"clip": 1.0, "noise_multiplier": 1.0, "per_sample": True}),
    ],
)
def test_what_asks_for_more_is_refused(defense: str, settings: dict[str, Any]) -> None:
    made = make_defense(defense, **settings)
    with refuses("fp16-defense"):
        check_accelerator(accelerator_in("fp16"), defense=made)
    check_accelerator(accelerator_in("fp16"), defense=make_defense("pruning"))
    with refuses("fp8"):
        check_accelerator(accelerator_in("fp8"), defense=make_defense("pruning"))


@pytest.mark.parametrize(
    ("own", "rule"),
    [({"leakage_logging_steps": 5}, "fp16-leakage"), ({"noise_for": "sum"}, "fp16-summed-noise")],
)
def test_what_cannot_be_scaled_is_refused(tmp_path: Path, own: dict[str, Any], rule: str) -> None:
    args = GradGuardConfig(str(tmp_path), use_cpu=True, report_to="none")
    for name, value in ({"fp16": True} | own).items():
        setattr(args, name, value)
    with refuses(rule):
        check_leakage(Measured(args, make_defense("gaussian_noise", scale=0.1)))
