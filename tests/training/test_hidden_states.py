"""Losses of hidden states, which Transformers collects by hooks that it registers once.

A note on the model says that they are registered. It must outlive a pass as the hooks do: else
each pass registers them again, and a later one collects each state several times.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_task

from hf_gradguard import GradGuardConfig, GradGuardTrainer, GradientMap


def loss_of_states(model: Any, batch: Any) -> torch.Tensor:
    """A loss of all hidden states, each of which there is once."""
    output = model(**batch, output_hidden_states=True)
    assert len(output.hidden_states) == model.config.num_hidden_layers + 1
    return output.loss + sum(state.square().mean() for state in output.hidden_states)


def test_passes_of_a_map_collect_each_state_once() -> None:
    model, batch = make_task("bert")
    gmap = GradientMap(model, batch, loss_fn=loss_of_states)
    gmap.gradient()
    for _ in range(2):
        with gmap.replay.run():
            gmap.evaluate(gmap.input.detach() + 1e-3)


@pytest.mark.parametrize("defense", ["none", "gaussian_noise", "optimal_noise", "dp_sgd"])
def test_trainings_collect_each_state_once(tmp_path: Path, defense: str) -> None:
    class Trainer(GradGuardTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return loss_of_states(model, inputs)

    model, batch = make_task("bert")
    settings: dict[str, Any] = {}
    if defense == "dp_sgd":
        settings = {"per_sample": True, "clip": 1.0, "noise_multiplier": 1.0}
    args = GradGuardConfig(
        str(tmp_path), defense=defense, defense_kwargs=settings, max_steps=3, use_cpu=True,
        per_device_train_batch_size=2, report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    rows = [{name: entry[i] for name, entry in batch.items()} for i in range(2)] * 4
    Trainer(model, args, train_dataset=rows).train()
