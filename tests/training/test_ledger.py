"""Nothing reaches another rank or the optimizer but what was protected: each way around the defense
that used to train unprotected is an error that says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_task, refuses
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from hf_gradguard import GradGuardConfig, GradGuardTrainer
from hf_gradguard.training.exchange.gradients import Ledger

NAME = "classifier.weight"
WAY_OUT = r"super\(\)\.training_step"


def trainer_of(
    folder: Path,
    kind: type[GradGuardTrainer] = GradGuardTrainer,
    callback: TrainerCallback | None = None,
    **settings: Any,
) -> GradGuardTrainer:
    model, batch = make_task("bert", dtype=torch.float32, batch_size=8)
    usual = {
        "max_steps": 2, "per_device_train_batch_size": 4, "use_cpu": True, "report_to": "none",
        "disable_tqdm": True, "save_strategy": "no", "defense": "gaussian_noise",
    }  # fmt: skip
    args = GradGuardConfig(str(folder), **{**usual, **settings})
    data = [{key: value[k] for key, value in batch.items()} for k in range(8)]
    return kind(model, args, train_dataset=data, callbacks=[callback] if callback else None)


def loss_of(trainer: GradGuardTrainer, inputs: Any = None) -> Tensor:
    inputs = inputs or next(iter(trainer.get_train_dataloader()))
    return trainer.model(**inputs).loss


def refused(trainer: GradGuardTrainer, match: str) -> None:
    """No weight moved, and the error says what to do."""
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    with pytest.raises(RuntimeError, match=match) as error:
        trainer.train()
    assert "super().training_step" in str(error.value)
    assert all(torch.equal(p, before[n]) for n, p in trainer.model.named_parameters())


class Stock(GradGuardTrainer):
    """What many recipes do: a `training_step` of one's own around the stock one."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        return Trainer.training_step(self, *args, **kwargs)


class OwnBackward(GradGuardTrainer):
    def training_step(self, model: nn.Module, inputs: Any, num_items: Any = None) -> Tensor:
        loss = loss_of(self, inputs)
        loss.backward()
        return loss.detach()


class OwnGradients(GradGuardTrainer):
    def training_step(self, model: nn.Module, inputs: Any, num_items: Any = None) -> Tensor:
        loss = loss_of(self, inputs)
        named = [p for p in self.model.parameters() if p.requires_grad]
        for p, g in zip(named, torch.autograd.grad(loss, named), strict=True):
            p.grad = g
        return loss.detach()


class Nothing(GradGuardTrainer):
    def training_step(self, model: nn.Module, inputs: Any, num_items: Any = None) -> Tensor:
        return torch.zeros(())


class OwnStep(GradGuardTrainer):
    """Steps once too often, on a gradient of its own."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss_of(self).backward()
        self.optimizer.step()
        return torch.zeros(())


class AfterOurs(GradGuardTrainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        loss_of(self).backward()
        return loss


class BeforeOurs(GradGuardTrainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss_of(self).backward()
        return super().training_step(*args, **kwargs)


class InTheLoss(GradGuardTrainer):
    """Adversarial training, say, as it is often written."""

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if loss.requires_grad:
            loss.backward(retain_graph=True)
        return loss


TRAINERS: dict[str, tuple[type[GradGuardTrainer], dict[str, Any], str]] = {
    "stock": (Stock, {}, r"accelerator\.backward\(\) would add the true gradient"),
    "own backward": (OwnBackward, {}, r"will not clip: the .grad of bert\.\S+ is not its own"),
    "not clipped": (OwnBackward, {"max_grad_norm": 0.0}, r"will not clip"),
    "own gradients": (OwnGradients, {}, r"will not clip"),
    "nothing": (Nothing, {}, "will not step: nothing was exchanged"),
    "own step": (OwnStep, {}, r"will not step: the .grad of \S+ is not its own work"),
    "after": (AfterOurs, {}, "will not clip"),
    "before": (BeforeOurs, {}, "will not share a message"),
    "in the loss": (InTheLoss, {"defense_kwargs": {"scale": 1e-3}}, "will not share a message"),
}


@pytest.mark.parametrize("case", TRAINERS)
def test_a_training_step_around_the_defense_is_refused(tmp_path: Path, case: str) -> None:
    kind, settings, match = TRAINERS[case]
    refused(trainer_of(tmp_path, kind, **settings), match)


class At(TrainerCallback):
    """Does something at an event of the first step."""

    def __init__(self, event: str, act: Callable[[Any], None]) -> None:
        self.act = act
        self.trainer: Any = None
        setattr(self, event, self._once)

    def _once(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.act(self.trainer)


def backward(trainer: GradGuardTrainer) -> None:
    loss_of(trainer).backward()


def write(trainer: GradGuardTrainer) -> None:
    trainer.model.get_parameter(NAME).grad.mul_(2)


def replace(trainer: GradGuardTrainer) -> None:
    p = trainer.model.get_parameter(NAME)
    p.grad = torch.ones_like(p)


def from_nothing(trainer: GradGuardTrainer) -> None:
    """The same numbers of writes, at the same addresses as often as not."""
    trainer.model.zero_grad()
    loss_of(trainer).backward()


def freeze(trainer: GradGuardTrainer) -> None:
    """Part of the step's gradient, protected but of this rank alone, would be trained on."""
    trainer.model.get_parameter(NAME).requires_grad_(False)


CALLBACKS: dict[str, tuple[str, Callable[[Any], None], str]] = {
    "backward before": ("on_step_begin", backward, "will not share a message"),
    "backward between": ("on_substep_end", backward, "will not share a message"),
    "backward after": ("on_pre_optimizer_step", backward, "will not step"),
    "all anew": ("on_pre_optimizer_step", from_nothing, "will not step"),
    "write between": ("on_substep_end", write, f"will not share a message: the .grad of {NAME}"),
    "write after": ("on_pre_optimizer_step", write, f"will not step: the .grad of {NAME}"),
    "replace": ("on_pre_optimizer_step", replace, f"will not step: the .grad of {NAME}"),
    "freeze": ("on_substep_end", freeze, f"will not clip: the .grad of {NAME}"),
}


@pytest.mark.parametrize("case", CALLBACKS)
def test_a_callback_around_the_defense_is_refused(tmp_path: Path, case: str) -> None:
    event, act, match = CALLBACKS[case]
    callback = At(event, act)
    callback.trainer = trainer = trainer_of(
        tmp_path, callback=callback, gradient_accumulation_steps=2
    )
    refused(trainer, match)


def test_backward_after_a_step_is_refused_at_the_next(tmp_path: Path) -> None:
    callback = At("on_epoch_end", lambda trainer: None)
    callback.on_step_end = lambda *args, **kwargs: backward(trainer) or None  # type: ignore[method-assign]
    trainer = trainer_of(tmp_path, callback=callback)
    with pytest.raises(RuntimeError, match="will not share a message"):
        trainer.train()
    assert trainer.state.global_step == 1


def test_the_same_steps_again_are_fine(tmp_path: Path) -> None:
    """Hooks stay on one optimizer once; a training that was broken off leaves nothing behind."""
    callback = At("on_substep_end", backward)
    callback.trainer = trainer = trainer_of(
        tmp_path, callback=callback, gradient_accumulation_steps=2
    )
    refused(trainer, "will not share a message")
    trainer.remove_callback(callback)
    trainer.train()
    trainer.train()
    assert trainer.state.global_step == 2


def test_reading_and_differentiating_elsewhere_are_fine(tmp_path: Path) -> None:
    seen: list[float] = []

    def look(trainer: GradGuardTrainer) -> None:
        p = trainer.model.get_parameter(NAME)
        seen.append(float(p.grad.norm()))
        torch.autograd.grad(loss_of(trainer), [p])

    class Own(GradGuardTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            return super().training_step(*args, **kwargs)

        def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
            if self.optimizer is None:
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            return self.optimizer

    callback = At("on_pre_optimizer_step", look)
    callback.trainer = trainer = trainer_of(tmp_path, Own, callback)
    trainer.train()
    assert trainer.state.global_step == 2
    assert seen


def test_the_model_is_free_again(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.train()
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model(**batch).loss.backward()
    torch.optim.SGD(trainer.model.parameters(), lr=0.1).step()


def test_it_costs_next_to_nothing() -> None:
    """400 parameters, five looks a step: well under a millisecond each, of a step of some
    hundred.
    """
    ledger, parameters = Ledger(), [nn.Parameter(torch.zeros(2)) for _ in range(400)]
    for p in parameters:
        p.grad = torch.zeros(2)
    ledger.write(parameters)
    start = time.perf_counter()
    for _ in range(20):
        ledger.check(parameters, "step")
    assert (time.perf_counter() - start) / 20 < 5e-3


def test_layerwise_optimizers_are_refused(tmp_path: Path) -> None:
    with refuses("layerwise-optimizer"):
        trainer_of(tmp_path, optim="galore_adamw_layerwise", optim_target_modules=["query"])
