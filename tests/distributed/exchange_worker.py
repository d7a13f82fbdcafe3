"""What leaves this rank while it trains, and the noise it draws. Writes tensors; the tests judge
them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import recording
import torch
from cases import IN_ORDER, make_model, marked_rows, rows
from helpers import WIDTH, SmallNetwork
from launcher import begin, finish
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_gradguard import GradGuardConfig, GradGuardTrainer, make_defense
from hf_gradguard.defenses.noise import GaussianNoise
from hf_gradguard.randomness import Stream

STEPS = 3
# Strong noise: a tensor whose gradient is large, or that optimal noise spares, resembles its
# gradient at scale 1 by right. What leaves a rank unprotected is found whatever the noise
# elsewhere.
STRONG, STRONGER = {"relative_scale": 10}, {"relative_scale": 40}
RUNS: dict[str, dict[str, Any]] = {
    "stock": {},
    "none": {"defense": "none"},
    "gaussian_noise": {"defense": "gaussian_noise", "defense_kwargs": STRONG},
    "shared embeddings": {
        "defense": "gaussian_noise",
        "defense_kwargs": STRONG,
        "share_input_embeddings": True,
    },
    "optimal_noise": {"defense": "optimal_noise", "defense_kwargs": STRONGER},
    "dp_sgd": {"defense": "dp_sgd", "defense_kwargs": {"clip": 0.1, **STRONG}},
    "2 clients": {"defense": "dp_sgd", "defense_kwargs": STRONG, "clients_per_process": 2},
    "refiner": {"noise_seed": 3},  # the defense by its object, see `exchanged`
    "pruning": {
        "defense": "pruning",
        "defense_kwargs": {"ratio": 0.9},
        "gradient_accumulation_steps": 1,
    },
}
NOISE_RUNS: dict[str, dict[str, Any]] = {
    "private": {}, "private again": {}, "seeded": {"noise_seed": 7},
    "seeded again": {"noise_seed": 7},
}  # fmt: skip


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "out"), "max_steps": STEPS, "per_device_train_batch_size": 4,
        "learning_rate": 1e-2, "use_cpu": True, "report_to": "none", "disable_tqdm": True,
        "save_strategy": "no", "logging_steps": 1, "gradient_accumulation_steps": 2, **more,
    }  # fmt: skip


class Watch:
    """Before every training step, works out the true local gradient by itself, on a copy of the
    model.
    """

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *rest: Any) -> Tensor:
        module = copy.deepcopy(self.accelerator.unwrap_model(model)).train()  # type: ignore[attr-defined]
        inputs = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
        half = len(inputs["labels"]) // 2
        self.truths.append([  # type: ignore[attr-defined]
            _gradient(module, {key: value[part] for key, value in inputs.items()})
            for part in (slice(None), slice(half), slice(half, None))
        ])  # fmt: skip
        return super().training_step(model, inputs, *rest)  # type: ignore[misc]


def _gradient(module: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    names, parameters = zip(
        *[(n, p) for n, p in module.named_parameters() if p.requires_grad], strict=True
    )
    gradients = torch.autograd.grad(
        module(**batch).loss, parameters, allow_unused=True, materialize_grads=True
    )
    return dict(zip(names, gradients, strict=True))


class WatchedTrainer(Watch, Trainer):
    pass


class WatchedGuard(Watch, GradGuardTrainer):
    pass


class Switch(TrainerCallback):
    """Records while there are steps: not the weights that rank 0 sends before the first one."""

    def __init__(self, group: recording.Recorder) -> None:
        self.group = group

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        self.group.on = True

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.group.on = False


def exchanged(group: recording.Recorder, folder: Path, name: str) -> dict[str, Any]:
    """One run: the tensors that left this rank, and the true gradients of its micro-batches and
    steps.
    """
    group.sent = []
    model = make_model("bert", dropout=0.0)
    if name != "stock":
        refiner = (
            make_defense(
                "refiner", objective="weighted", evaluation_network=SmallNetwork("text", WIDTH)
            )
            if name == "refiner"
            else None
        )
        args = GradGuardConfig(**settings(folder, **RUNS[name]))
        options = {"train_dataset": rows("bert"), "callbacks": [Switch(group)]}
        trainer: Any = WatchedGuard(model, args, defense=refiner, **options)
        shared = trainer.shared_names
    else:
        args = TrainingArguments(**settings(folder))
        trainer = WatchedTrainer(model, args, train_dataset=rows("bert"), callbacks=[Switch(group)])
        shared = [name for name, _ in model.named_parameters()]
    trainer.truths = []
    trainer.train()
    each = args.gradient_accumulation_steps
    whole = [truths[0] for truths in trainer.truths]
    steps = [
        {name: sum(truth[name] for truth in whole[start : start + each]) for name in whole[0]}
        for start in range(0, len(whole), each)
    ]
    messages = [truth for truths in trainer.truths for truth in truths]
    return {"sent": group.sent, "messages": messages, "steps": steps, "shared": shared}


@dataclass
class WatchedNoise(GaussianNoise):
    """Keeps what it added."""

    log: ClassVar[list[Tensor]] = []

    def protect(self, gmap: Any, generator: Stream) -> dict[str, Tensor]:
        shared = super().protect(gmap, generator)
        self.log.append(torch.cat([(shared[n] - g).flatten() for n, g in gmap.gradient().items()]))
        return shared


def noises(folder: Path, chosen: dict[str, Any]) -> dict[str, Any]:
    """The noise of every message in order, the shapes it was drawn in, and the global generator's
    first state.
    """
    WatchedNoise.log.clear()
    args = GradGuardConfig(**settings(folder, clients_per_process=2, **chosen))
    trainer = GradGuardTrainer(
        make_model("bert", dropout=0.1),
        args,
        defense=WatchedNoise(scale=100.0),
        train_dataset=rows("bert"),
    )
    parameters = dict(trainer.model.named_parameters())
    state = torch.get_rng_state()
    trainer.train()
    shapes = [tuple(parameters[name].shape) for name in trainer.shared_names]
    return {
        "noise": torch.stack(WatchedNoise.log),
        "shapes": shapes,
        "global": state,
        "seed": args.seed,
    }


def branches(folder: Path) -> list[float]:
    """Final weights of a model of which each rank uses another half."""
    args = GradGuardConfig(
        **settings(folder, **IN_ORDER, gradient_accumulation_steps=1), noise_seed=1
    )
    model = make_model("branching")
    GradGuardTrainer(model, args, defense="gaussian_noise", train_dataset=marked_rows()).train()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def started_apart(folder: Path) -> list[float]:
    """Final weights of a model whose first weights differ between ranks by 1."""
    model = make_model("plain")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.distributed.get_rank()
    args = GradGuardConfig(**settings(folder))
    GradGuardTrainer(model, args, defense="gaussian_noise", train_dataset=rows("bert")).train()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def asked_apart(folder: Path) -> dict[str, str]:
    """Why ranks do not begin a training that was not asked for alike."""
    rank, found = torch.distributed.get_rank(), {}
    for name, chosen in {
        "max_steps": {"max_steps": STEPS + rank},
        "leakage_action": {"leakage_limit": 1e-9, "leakage_action": ["skip", "stop"][rank]},
        "frozen": {},
    }.items():
        model = make_model("plain")
        if name == "frozen":
            next(model.parameters()).requires_grad_(rank == 0)
        args = GradGuardConfig(**settings(folder, **chosen))
        trainer = GradGuardTrainer(
            model, args, defense="gaussian_noise", train_dataset=rows("bert")
        )
        try:
            trainer.train()
        except ValueError as error:
            found[name] = str(error)
    return found


def main() -> None:
    folder, _ = begin()
    group = recording.initialize()
    runs = {name: exchanged(group, folder, name) for name in RUNS}
    noise = {name: noises(folder, chosen) for name, chosen in NOISE_RUNS.items()}
    torch.save({"runs": runs, "noise": noise}, folder / f"tensors{group.rank()}.pt")
    found = {"branching": branches(folder), "started apart": started_apart(folder)}
    finish(folder, {**found, "asked apart": asked_apart(folder)})


if __name__ == "__main__":
    main()
