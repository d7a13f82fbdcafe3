"""What the leakage meter does where ranks differ: logs, a message that one rank keeps back, and one
that stops all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import recording
import torch
from cases import SGD, make_model
from exchange_worker import Switch
from helpers import pad, ragged_rows
from launcher import begin, finish
from torch import Tensor
from transformers import TrainerCallback

from hf_gradguard import GradGuardConfig, GradGuardTrainer, GradientMap, make_defense
from hf_gradguard.randomness import Stream

STEPS, SEED = 3, 6


class Watched(GradGuardTrainer):
    """Keeps its batches."""

    def training_step(self, model: Any, inputs: dict[str, Any], *rest: Any) -> Tensor:
        self.batches.append(dict(self._prepare_inputs(inputs)))
        return super().training_step(model, inputs, *rest)


class Gradients(TrainerCallback):
    """Keeps the gradient of every optimizer step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, *args: Any, model: Any, **kwargs: Any) -> None:
        self.steps.append(
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        )


def train(folder: Path, group: recording.Recorder, **more: Any) -> tuple[Watched, Gradients]:
    """A language model on texts of different lengths, whose loss is divided by the tokens of all
    ranks.
    """
    group.sent = []
    args = GradGuardConfig(
        output_dir=str(folder / "out"), max_steps=STEPS, per_device_train_batch_size=4,
        use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", logging_steps=1,
        noise_seed=SEED, max_grad_norm=0.0, **SGD, **more,
    )  # fmt: skip
    gradients = Gradients()
    trainer = Watched(
        make_model("gpt2_lm", dropout=0.0), args,
        defense=make_defense("gaussian_noise", scale=0.01),
        train_dataset=ragged_rows(40), data_collator=pad, callbacks=[gradients, Switch(group)],
    )  # fmt: skip
    trainer.batches = []
    trainer.train()
    return trainer, gradients


def figures(trainer: GradGuardTrainer) -> list[dict[str, float]]:
    entries = [
        {k: v for k, v in entry.items() if k.startswith("leakage/")}
        for entry in trainer.state.log_history
    ]
    return [entry for entry in entries if entry]


def error_of_skipped_step(trainer: Watched, gradients: Gradients, rank: int) -> float:
    """‖G - n₀ s₀/(n₀ + n₁)‖/‖G‖ of the first step, s₀ what rank 0 would have shared, n the ranks'
    tokens.
    """
    batch = trainer.batches[0]
    count = torch.tensor(float((batch["labels"][:, 1:] != -100).sum()))
    total = count.clone()
    torch.distributed.all_reduce(total)
    gmap = GradientMap(make_model("gpt2_lm", dropout=0.0).train(), batch)
    shared = make_defense("gaussian_noise", scale=0.01)(gmap, Stream.from_seeds(SEED, rank, 0, 0))
    expected = {
        name: tensor * (count / total if rank == 0 else 0.0) for name, tensor in shared.items()
    }
    for tensor in expected.values():
        torch.distributed.all_reduce(tensor)
    found = gradients.steps[0]
    difference = sum(float((found[name] - g).square().sum()) for name, g in expected.items())
    return (difference / sum(float(g.square().sum()) for g in expected.values())) ** 0.5


def weights(trainer: GradGuardTrainer) -> list[float]:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).tolist()


def main() -> None:
    folder, _ = begin()
    group = recording.initialize()
    rank = group.rank()
    plain, _ = train(folder, group)
    unmeasured = [(kind, len(tensor)) for kind, tensor in group.sent]
    logged, _ = train(folder, group, leakage_logging_steps=1)
    measured = [(kind, len(tensor)) for kind, tensor in group.sent]
    sent = torch.cat(
        [tensor.flatten().double() for kind, tensor in group.sent if tensor.is_floating_point()]
    )
    apart = [
        min(float((sent - value).abs().min()) / value for value in step.values())
        for step in figures(logged)
    ]

    # Rank 1 admits nothing, rank 0 everything: a client's limit is its own affair.
    limit = 1e30 if rank else 1e-30
    skipped, gradients = train(folder, group, leakage_limit=limit)
    stopped, last = train(folder, group, leakage_limit=limit, leakage_action="stop")
    finish(
        folder,
        {
            "figures": figures(logged),
            "exchanged": [unmeasured, measured],
            "apart": apart,
            "plain": weights(plain),
            "logged": weights(logged),
            "skipped": weights(skipped),
            "steps": [trainer.state.global_step for trainer in (plain, logged, skipped, stopped)],
            "counts": [entry["leakage/skipped"] for entry in figures(skipped)],
            "error": error_of_skipped_step(skipped, gradients, rank),
            "stopped": weights(stopped),
            "last_error": error_of_skipped_step(stopped, last, rank),
        },
    )


if __name__ == "__main__":
    main()
