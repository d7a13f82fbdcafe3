"""Passes that stock does not make see the draws that its own pass sees, and leave no trace: of
torch's generator, numpy's and Python's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import make_task
from torch import Tensor, nn
from transformers import MarianConfig, MarianMTModel, Trainer, TrainingArguments, set_seed

from hf_gradguard import GradGuardConfig, GradGuardMixin, GradGuardTrainer, GradientMap
from hf_gradguard.gradient_map import by_differences
from hf_gradguard.gradient_map.replay import DrawState, Replay
from hf_gradguard.leakage import inversion_influence_lower_bound

DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(1)),
    "numpy": lambda: float(np.random.beta(0.4, 0.4)),
    "random": random.random,
}


def trainer_of(kind: str) -> type[Trainer]:
    """Its loss is weighted by a draw, as mixup's is."""

    class Drawing(Trainer):
        def compute_loss(
            self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False,
            num_items_in_batch: Any = None,
        ) -> Any:  # fmt: skip
            weight = 0.5 + 0.5 * DRAWS[kind]()
            labels = inputs["labels"]
            logits = model(**{k: v for k, v in inputs.items() if k != "labels"}).logits
            return weight * nn.functional.cross_entropy(logits, labels)

    return Drawing


class Private(GradGuardMixin):
    """For classes made in a test."""


def train(
    folder: Path, base: type[Trainer], seed: int, steps: int = 4, defense: str | None = None
) -> dict[str, Tensor]:
    model, batch = make_task("bert", dtype=torch.float32, batch_size=8)
    rows = [{key: value[k] for key, value in batch.items()} for k in range(8)]
    settings: dict[str, Any] = {
        "max_steps": steps, "per_device_train_batch_size": 2, "use_cpu": True, "report_to": [],
        "disable_tqdm": True, "save_strategy": "no", "seed": seed, "learning_rate": 0.01,
        "output_dir": str(folder),
    }  # fmt: skip
    args = TrainingArguments(**settings)
    if defense is not None:
        args = GradGuardConfig(
            **settings, defense=defense, private_dropout=False, share_input_embeddings=True
        )
    set_seed(seed)
    base(model=model, args=args, train_dataset=rows).train()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", DRAWS)
def test_a_loss_that_draws_trains_as_stock(tmp_path: Path, kind: str) -> None:
    base = trainer_of(kind)
    ours = type("Ours", (Private, base), {})
    stock, shared = train(tmp_path, base, 3), train(tmp_path, ours, 3, defense="none")
    for name, weights in stock.items():
        assert torch.allclose(weights, shared[name], atol=1e-6), name


@pytest.mark.statistics
@pytest.mark.parametrize("kind", DRAWS)
def test_no_loss_is_refused_by_luck(tmp_path: Path, kind: str) -> None:
    """What a loss is of num_items_in_batch is tried out three times, and trains as stock."""
    base = trainer_of(kind)
    ours = type("Ours", (Private, base), {})
    for seed in range(20):
        stock = train(tmp_path, base, seed, steps=1)
        shared = train(tmp_path, ours, seed, steps=1, defense="none")
        for name, weights in stock.items():
            assert torch.allclose(weights, shared[name], atol=1e-6), (seed, name)


@pytest.mark.parametrize("kind", DRAWS)
def test_generators_are_as_they_were(kind: str) -> None:
    """Of what a map evaluates after its own pass."""
    model, batch = make_task("bert")

    def loss_fn(module: nn.Module, inputs: Any) -> Tensor:
        return (0.5 + DRAWS[kind]()) * module(**inputs)["loss"]

    gmap = GradientMap(model, batch, loss_fn=loss_fn)
    gradient = gmap.gradient()
    before = DrawState.now()
    again = gmap.gradient_at(gmap.input)
    for name, tensor in gradient.items():
        assert torch.allclose(again[name], tensor, rtol=1e-9, atol=1e-12), name
    gmap.vjp(gradient)
    gmap.squared_sensitivity(1)
    gmap.of_batch(batch).gradient()
    assert before.plain() == DrawState.now().plain()


MASKS: dict[str, Callable[[tuple[int, int]], Any]] = {
    "torch": lambda shape: torch.rand(shape).tolist(),
    "numpy": lambda shape: np.random.rand(*shape).tolist(),
    "random": lambda shape: [[random.random() for _ in range(shape[1])] for _ in range(shape[0])],
}


@pytest.mark.parametrize("kind", MASKS)
def test_influence_is_that_of_the_mask_that_was_drawn(kind: str) -> None:
    """As SpecAugment masks, by numpy. Of two masks the bound would be many times as high: their
    difference is no derivative.
    """
    model, batch = make_task("bert")
    drawn: list[Tensor] = []

    def masked(mask: Tensor, inputs: Any) -> Tensor:
        rest = {name: entry for name, entry in inputs.items() if name != "input_ids"}
        embedded = model.get_input_embeddings()(inputs["input_ids"])
        loss: Tensor = model(inputs_embeds=embedded * (mask > 0.5)[..., None], **rest).loss
        return loss

    def drawing(_: nn.Module, inputs: Any) -> Tensor:
        drawn.append(torch.tensor(MASKS[kind](tuple(inputs["input_ids"].shape))))
        return masked(drawn[-1], inputs)

    def bound(loss_fn: Callable[[nn.Module, Any], Tensor]) -> float:
        gmap = GradientMap(model, batch, loss_fn=loss_fn)
        delta = {n: torch.randn_like(g) for n, g in gmap.gradient().items()}
        return float(inversion_influence_lower_bound(gmap, delta))

    torch.manual_seed(1)
    found = bound(drawing)
    first = drawn[0]
    assert all(torch.equal(mask, first) for mask in drawn)
    torch.manual_seed(1)
    if kind == "torch":
        torch.rand(first.shape)  # as many draws before delta's
    assert found == pytest.approx(bound(lambda _, inputs: masked(first, inputs)), rel=0.02)


@pytest.mark.parametrize("kind", DRAWS)
def test_a_replay_draws_the_same_again(kind: str) -> None:
    replay = Replay(nn.Linear(1, 1), second_order=False)
    draws = []
    for _ in range(2):
        with replay.draws():
            draws.append(DRAWS[kind]())
    assert draws[0] == draws[1] == DRAWS[kind]()


def test_what_does_not_use_the_input_has_slope_zero() -> None:
    """As where LayerDrop drops all layers: no dependence is a derivative of zero."""
    model, batch = make_task("bert")

    def loss_fn(module: nn.Module, inputs: Any) -> Tensor:
        module(**inputs)  # embeds the texts, which the loss is not computed from
        positions = module.bert.embeddings.position_embeddings.weight
        return module.classifier.weight.square().sum() + positions.square().sum()

    gmap = GradientMap(model, batch, loss_fn=loss_fn, second_order=False)
    probed = by_differences(gmap)
    if probed is not None:
        assert not probed.vjp(gmap.gradient()).any()
    assert not gmap.twice().vjp(gmap.gradient()).any()


@pytest.mark.parametrize("defense", ["none", "pruning", "gaussian_noise", "dp_sgd"])
def test_a_step_that_drops_all_layers_is_no_error(tmp_path: Path, defense: str) -> None:
    """Head and embeddings are one tensor, which is withheld: the loss uses nothing that is shared,
    so its gradient is zero. By luck it is so at some steps of every model with LayerDrop.
    """
    torch.manual_seed(0)
    size = {f"{part}_{name}": 2 for part in ("encoder", "decoder")
            for name in ("layers", "attention_heads")}  # fmt: skip
    model = MarianMTModel(MarianConfig(
        vocab_size=20, d_model=8, encoder_ffn_dim=8, decoder_ffn_dim=8, pad_token_id=0,
        eos_token_id=1, decoder_start_token_id=0, max_position_embeddings=16,
        encoder_layerdrop=1.0, decoder_layerdrop=1.0, **size,
    ))  # fmt: skip
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    settings: dict[str, Any] = {"gaussian_noise": {"scale": 1e-3}, "dp_sgd": {
        "per_sample": True, "clip": 1.0, "noise_multiplier": 1e-3}}  # fmt: skip
    args = GradGuardConfig(
        str(tmp_path), defense=defense, defense_kwargs=settings.get(defense, {}), max_steps=2,
        per_device_train_batch_size=4, optim="sgd", learning_rate=1.0, use_cpu=True,
        report_to=[], disable_tqdm=True, save_strategy="no", max_grad_norm=0.0,
    )  # fmt: skip
    rows = [{"input_ids": torch.arange(2, 8) + n, "labels": torch.arange(2, 8)} for n in range(8)]
    trainer = GradGuardTrainer(model, args, train_dataset=rows)
    trainer.train()
    moved = {n: float((p.detach() - before[n]).abs().max()) for n, p in model.named_parameters()}
    assert trainer.state.global_step == 2
    assert all(moved[name] == 0 for name in moved if name not in trainer.shared_names)
    most = max(moved.values())
    assert 0 < most < 0.05 if "scale" in args.defense_kwargs or defense == "dp_sgd" else most == 0
