"""Secure aggregation on three ranks and more: what leaves this rank, what comes of it, what is
refused; and the dropout that it draws. Writes tensors; the tests judge them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import recording
import torch
from accelerate import Accelerator
from cases import Plain, make_model, rows
from exchange_worker import Switch, settings
from helpers import pad, ragged_rows, token_batch
from launcher import begin, finish
from torch import Tensor, nn

from hf_gradguard import GradGuardConfig, GradGuardTrainer, protect
from hf_gradguard.secure.aggregation import SecureAggregation
from hf_gradguard.training.exchange.gradients import average

BOUND = 4.0
LORA = {"defense": "gaussian_noise", "defense_kwargs": {"scale": 0.01}}
RUNS: dict[str, dict[str, Any]] = {
    "bert": {"defense": "none"},
    "bf16": {"defense": "none"},
    "bert_lora": {**LORA, "leakage_logging_steps": 1},
    "gpt2_lm": {"defense": "gaussian_noise", "include_num_input_tokens_seen": "all"},
    # a small step: after a large one in a direction of noise, its gradient can leave the range
    "resnet": {**LORA, "batch_statistics": "shared", "learning_rate": 1e-5},
    "plain exchange": {
        "defense": "gaussian_noise", "include_num_input_tokens_seen": "all",
        "secure_aggregation": False,
    },
}  # fmt: skip
# a first message of relative noise runs random inputs as well
STATED: dict[str, Any] = {"defense": "gaussian_noise", "defense_kwargs": {"scale": 0.1}}
DROPOUT: dict[str, dict[str, Any]] = {
    "none": {"defense": "none"},
    "private": STATED,
    "private again": STATED,
    "seeded": {**STATED, "noise_seed": 3},
    "seeded again": {**STATED, "noise_seed": 3},
}


def messages(rank: int) -> list[Tensor]:
    """Two types, so two buckets."""
    generator = torch.Generator().manual_seed(rank)
    sizes = [(60, 50), (7,), (1000,), ()]
    tensors = [0.3 * torch.randn(size, generator=generator) for size in sizes]
    return [*tensors, *[(0.3 * torch.randn(900, generator=generator)).bfloat16()]]


def says(call: Callable[[], Any]) -> str:
    try:
        call()
    except (OverflowError, RuntimeError, ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def direct(group: recording.Recorder, folder: Path) -> dict[str, Any]:
    """`average` by itself."""
    accelerator, rank = Accelerator(cpu=True), group.rank()
    secure = SecureAggregation(accelerator, BOUND, str(folder / "keys"))
    found: dict[str, Any] = {"own": messages(rank)}
    secure.agree()
    group.on, group.sent = True, []

    found["mean"] = messages(rank)
    average(found["mean"], accelerator, secure, bits=32)
    found["sent"], group.sent = group.sent, []

    found["figure"] = [torch.tensor(1e6 + rank, dtype=torch.float64), torch.tensor(1e-6 * rank)]
    average(found["figure"], accelerator, secure)

    large = [torch.full((3,), BOUND * (1.01 if rank == 1 else -1))]
    broken = [torch.tensor([1.0, torch.nan if rank == 2 else 1.0])]
    group.sent = []
    found["refusals"] = [
        says(functools.partial(average, one, accelerator, secure, bits=32))
        for one in (large, broken)
    ]
    found["sent when refused"] = [len(tensor) for _, tensor in group.sent]
    found["large figure"] = says(lambda: average([torch.tensor(1e11)], accelerator, secure))
    found["apart"] = [
        says(lambda: average([torch.zeros(rank % 2 + 3)], accelerator, secure, bits=32))
    ]
    secure.bound = BOUND * (1 + rank)
    found["apart"].append(says(lambda: average([torch.zeros(3)], accelerator, secure, bits=32)))
    secure.bound = BOUND

    group.sent = []
    for starts in (False, False, True):  # the last one after new keys, as a resumed run has
        if starts:
            secure.agree()
            group.sent = [sent for sent in group.sent if sent[1].dtype != torch.uint8]
        average([torch.zeros(5000)], accelerator, secure, bits=32)
    found["same"] = [tensor for _, tensor in group.sent if len(tensor) == 5000]
    found["after all"] = messages(rank)
    average(found["after all"], accelerator, secure, bits=32)
    group.on = False
    whose = "keys" if rank != 1 else "other keys"  # rank 1 is not who the others know
    wrong = SecureAggregation(accelerator, BOUND, str(folder / whose))
    return {**found, "wrong key": says(wrong.agree)}


class Watched(GradGuardTrainer):
    """Keeps the gradients that it sends and gets, and the figures."""

    def _exchange(self, module: nn.Module) -> None:
        self.own.append(_gradients(module))
        super()._exchange(module)
        self.means.append(_gradients(module))

    def average_over_ranks(self, figure: Tensor) -> None:
        own = float(figure)
        super().average_over_ranks(figure)
        self.figures.append((own, float(figure)))


def _gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def trained(group: recording.Recorder, folder: Path, name: str) -> dict[str, Any]:
    """A run of two steps."""
    task = {"bf16": "bert", "plain exchange": "gpt2_lm"}.get(name, name)
    model = make_model(task, dropout=0.0)
    if name == "bf16":
        model = model.bfloat16()
    chosen = {"secure_aggregation": True, "gradient_accumulation_steps": 1, **RUNS[name]}
    args = GradGuardConfig(**settings(folder, **chosen) | {"max_steps": 2})
    data = {"gpt2_lm": ragged_rows(60), "resnet": rows("vit", 60)}.get(task) or rows("bert", 60)
    collator = pad if task == "gpt2_lm" else None
    group.sent, group.received = [], []
    trainer = Watched(
        model, args, train_dataset=data, data_collator=collator, callbacks=[Switch(group)]
    )
    trainer.own, trainer.means, trainer.figures = [], [], []
    trainer.train()
    found = {
        "own": trainer.own, "means": trainer.means, "figures": trainer.figures,
        "sent": group.sent, "received": group.received,
        "statistics": [b.clone() for n, b in model.named_buffers() if "running" in n],
        "tokens": trainer.state.num_input_tokens_seen,
    }  # fmt: skip
    if "leakage_logging_steps" in RUNS[name]:
        own = [e for e in trainer.state.log_history if "leakage/dfil_mean" in e][-1]
        found["leakage"] = own["leakage/dfil_mean"]
    return found


def looped(group: recording.Recorder) -> dict[str, Any]:
    """A step of a loop of one's own, with `protect`."""
    accelerator, model = Accelerator(cpu=True), make_model("bert", dropout=0.0)
    batch = {key: entry[group.rank() :][:1] for key, entry in token_batch(4, 5).items()}
    shared = [p for n, p in model.named_parameters() if "embeddings.word" not in n]
    own = torch.autograd.grad(model(**batch).loss, shared)
    secure = SecureAggregation(accelerator, BOUND)
    secure.agree()
    group.on, group.sent = True, []
    protect(model, batch, "none", accelerator, secure=secure)
    group.on = False
    other = says(lambda: protect(model, batch, "none", Accelerator(cpu=True), secure=secure))
    means = [torch.zeros_like(p) if p.grad is None else p.grad for p in shared]
    return {"own": list(own), "means": means, "sent": group.sent, "another": other}


def stopped(folder: Path, rank: int) -> int:
    """Steps of a run that rank 1's limit stops."""
    limit = 1e30 if rank == 1 else 1e-30
    args = GradGuardConfig(**settings(
        folder, **LORA, secure_aggregation=True, leakage_limit=limit, leakage_action="stop"
    ))  # fmt: skip
    trainer = GradGuardTrainer(make_model("bert_lora"), args, train_dataset=rows("bert", 60))
    trainer.train()
    return trainer.state.global_step


def apart(folder: Path, rank: int) -> str:
    """What a run says that hides sums on rank 1 only."""
    args = GradGuardConfig(**settings(folder, **LORA, secure_aggregation=rank == 1))
    trainer = GradGuardTrainer(make_model("bert_lora"), args, train_dataset=rows("bert", 60))
    return says(trainer.train)


class Dropping(Plain):
    """Keeps what its dropout leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.masks = nn.Dropout(0.5), []

    def body(self, hidden: Tensor, input_ids: Tensor) -> Tensor:
        kept = self.dropout(torch.ones(200))
        if self.training:
            self.masks.append((kept != 0).tolist())
        return super().body(hidden, input_ids) * kept.mean()


def dropped(folder: Path, chosen: dict[str, Any]) -> list[list[bool]]:
    args = GradGuardConfig(**settings(folder, **chosen))
    model = Dropping()
    GradGuardTrainer(model, args, train_dataset=rows("bert", 60)).train()
    return model.masks


def main() -> None:
    folder, _ = begin()
    group = recording.initialize()
    rank = group.rank()
    found = {
        "direct": direct(group, folder),
        "runs": {name: trained(group, folder, name) for name in RUNS},
        "looped": looped(group),
        "stopped": stopped(folder, rank),
        "apart": apart(folder, rank),
        "dropout": {name: dropped(folder, chosen) for name, chosen in DROPOUT.items()},
    }
    torch.save(found, folder / f"tensors{rank}.pt")
    finish(folder, {})


if __name__ == "__main__":
    main()
