"""`protect` in a loop of one's own, on one rank."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from helpers import make_task, refuses
from torch import Tensor, nn

from hf_gradguard import GradientMap, make_defense, protect
from hf_gradguard.randomness import Stream
from hf_gradguard.training.loop import _LOOPS


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_unprotected_it_is_backward() -> None:
    model, batch = make_task("bert")
    loss = protect(model, batch, "none")
    found = gradients(model)
    other, _ = make_task("bert")
    expected = other(**batch).loss
    expected.backward()
    assert torch.equal(loss, expected.detach())
    withheld = {"bert.embeddings.word_embeddings.weight"}
    assert {name for name, _ in other.named_parameters()} - found.keys() == withheld
    torch.testing.assert_close(found, {name: gradients(other)[name] for name in found})


def test_what_it_adds_is_the_defenses_message() -> None:
    model, batch = make_task("bert")
    expected = make_defense("pruning", ratio=0.5)(GradientMap(model, batch))
    protect(model, batch, make_defense("pruning", ratio=0.5))
    torch.testing.assert_close(gradients(model), dict(expected))
    protect(model, batch, make_defense("pruning", ratio=0.5))  # adds up, as backward does
    torch.testing.assert_close(gradients(model), {n: 2 * t for n, t in expected.items()})


def test_a_name_is_one_defense_as_long_as_the_model_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_gradguard.defenses.noise import OptimalNoise

    prepared: list[Any] = []
    monkeypatch.setattr(OptimalNoise, "prepare", lambda self, model: prepared.append(self))
    model, batch = make_task("bert")
    for _ in range(3):
        protect(model, batch, "optimal_noise")
    assert len(prepared) == 1
    assert prepared[0].state_dict()["calls"] == 3
    kept = weakref.ref(model)
    del model
    gc.collect()
    assert kept() is None
    assert len(_LOOPS) == len(list(_LOOPS))


def test_noise_is_new_every_time() -> None:
    model, batch = make_task("bert")
    protect(model, batch, "gaussian_noise")
    first = {name: tensor.clone() for name, tensor in gradients(model).items()}
    model.zero_grad()
    torch.manual_seed(0)
    protect(model, batch, "gaussian_noise")
    assert not any(torch.equal(tensor, first[n]) for n, tensor in gradients(model).items())


def test_a_loss_of_ones_own_and_accumulation() -> None:
    model, batch = make_task("bert")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    protect(model, batch, "none", accelerator, lambda model, batch: 8 * model(**batch).loss)
    found = {name: tensor.clone() for name, tensor in gradients(model).items()}
    model.zero_grad()
    protect(model, batch, "none")
    torch.testing.assert_close(found, {n: 2 * t for n, t in gradients(model).items()})


def test_wrappers_are_taken_off(caplog: pytest.LogCaptureFixture) -> None:
    class Wrapper(nn.parallel.DistributedDataParallel):
        def __init__(self, module: nn.Module) -> None:
            nn.Module.__init__(self)
            self.module = module

    model, batch = make_task("bert")
    protect(Wrapper(model), batch, "pruning")
    assert "whose reducer is not used" in caplog.text
    assert gradients(model)


def test_sounds_are_protected_by_first_order_defenses() -> None:
    layer = nn.Linear(4, 2)
    batch = {"input_features": torch.ones(3, 4)}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["input_features"]).square().mean()

    protect(layer, batch, "gaussian_noise", loss_fn=loss)
    assert layer.weight.grad is not None
    with pytest.raises(ValueError, match="neither `input_ids` nor `pixel_values`"):
        protect(layer, batch, "optimal_noise", loss_fn=loss)


def test_what_cannot_be_protected_is_refused() -> None:
    model, batch = make_task("bert")
    with refuses("wrapped-model"):
        protect(nn.DataParallel(model), batch, "pruning")
    with pytest.raises(ValueError, match="There is no defense 'prunning'"):
        protect(model, batch, "prunning")
    assert not gradients(model)
    noise = make_defense("gaussian_noise", scale=1.0)
    message = noise(GradientMap(model, batch), Stream.from_seeds(1))
    assert message.noise is not None
