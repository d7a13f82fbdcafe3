"""Losses of hidden states, which Transformers collects by hooks that it registers once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_task

from hf_gradguard import GradGuardConfig, GradGuardTrainer, GradientMap


def collected(counts: list[int]) -> Any:
    """A loss of all hidden states, which writes down how many a pass returned."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        output = model(**batch, output_hidden_states=True)
        counts.append(len(output.hidden_states))
        return output.loss + sum(state.square().mean() for state in output.hidden_states)

    return loss


def test_passes_of_a_map_collect_the_same_states() -> None:
    """The note that hooks are there is no state of a pass: else each pass registers them again."""
    model, batch = make_task("bert")
    counts: list[int] = []
    gmap = GradientMap(model, batch, loss_fn=collected(counts))
    gmap.gradient()
    for _ in range(2):
        with gmap.replay.run():
            gmap.evaluate(gmap.input.detach() + 1e-3)
    assert len(counts) >= 2
    assert set(counts) == {model.config.num_hidden_layers + 1}


@pytest.mark.parametrize("defense", ["none", "gaussian_noise", "optimal_noise", "dp_sgd"])
def test_trainings_collect_the_same_states(tmp_path: Path, defense: str) -> None:
    model, batch = make_task("bert")
    counts: list[int] = []

    class Trainer(GradGuardTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return collected(counts)(model, inputs)

    settings: dict[str, Any] = {}
    if defense == "dp_sgd":
        settings = {"per_sample": True, "clip": 1.0, "noise_multiplier": 1.0}
    args = GradGuardConfig(
        str(tmp_path), defense=defense, defense_kwargs=settings, max_steps=3, use_cpu=True,
        per_device_train_batch_size=2, report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    rows = [{name: entry[i] for name, entry in batch.items()} for i in range(2)] * 4
    Trainer(model, args, train_dataset=rows).train()
    assert len(counts) >= 3
    assert set(counts) == {model.config.num_hidden_layers + 1}
