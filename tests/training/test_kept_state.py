"""Nothing that a module makes of private rows leaves in the model, nor reaches a later message,
where something is proved.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import make_task
from safetensors.torch import load_file
from torch import Tensor, nn

from hf_gradguard import GradGuardConfig, GradGuardTrainer, make_defense, protect
from hf_gradguard.defenses import Defense
from hf_gradguard.training.card import sharing

ROWS = 12
SEEN: list[float] = []
"""What `Attributes` keeps around its forward."""
LAST = 0.0


class Plain(nn.Module):
    """A linear classifier, of which subclasses keep something."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 2)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        inputs = pixel_values.flatten(1)
        self.keep(inputs)
        return {"loss": nn.functional.cross_entropy(self.linear(inputs), labels)}

    def keep(self, rows: Tensor) -> None:
        """Nothing."""


class Buffered(Plain):
    """Keeps the mean of its batch in a buffer."""

    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6), persistent=persistent)

    def keep(self, rows: Tensor) -> None:
        self.mean = 0.9 * self.mean + 0.1 * rows.detach().mean(0)


class InPlace(Buffered):
    """Writes where no version is counted."""

    def keep(self, rows: Tensor) -> None:
        self.mean.data.mul_(0.9).add_(0.1 * rows.detach().mean(0))


class Large(Buffered):
    """Keeps a queue of rows that is larger than what a replay copies."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros((1 << 20) + 6)

    def keep(self, rows: Tensor) -> None:
        self.mean.data[:6] += rows.detach().mean(0)


class FromTheThird(Buffered):
    """Begins late, so that the first message shows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def keep(self, rows: Tensor) -> None:
        self.passes += 1
        if self.passes > 2:
            super().keep(rows)


class Extra(Plain):
    """Adds what it keeps to its state."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(6)

    def keep(self, rows: Tensor) -> None:
        self.total = self.total + rows.detach().sum(0)

    def get_extra_state(self) -> Tensor:
        return self.total

    def set_extra_state(self, state: Tensor) -> None:
        self.total = state


class Statistics:
    """An object of the user's own."""

    __slots__ = ("total",)

    def __init__(self) -> None:
        self.total = 0.0


class Hooked(Plain):
    """Adds what an object keeps that nobody can look into."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = Statistics()
        self.register_state_dict_post_hook(self._add)

    @staticmethod
    def _add(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        state["kept"] = torch.tensor(module.statistics.total)

    def keep(self, rows: Tensor) -> None:
        self.statistics.total += float(rows.sum())


class FrozenWeight(Plain):
    """Keeps the mean in a weight that nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(6), requires_grad=False)

    def keep(self, rows: Tensor) -> None:
        self.mean.data.copy_(rows.detach().mean(0))


class SetsGlobal(Plain):
    """Keeps the mean in a variable around it, which nobody puts back."""

    def keep(self, rows: Tensor) -> None:
        global LAST
        LAST = float(rows.mean())


class Attributes(Plain):
    """Keeps what no `state_dict` has, and lets later rows' gradients follow it."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.means, self.norms = torch.zeros(6), [0.0], {"last": np.zeros(1)}

    def keep(self, rows: Tensor) -> None:
        self.shift.add_(rows.detach().mean(0))
        self.means.append(float(rows.mean()))
        self.norms["last"][:] = float(rows.norm())
        SEEN.append(float(rows.mean()))


class Counter(Plain):
    """Counts its passes, whatever the batch is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def keep(self, rows: Tensor) -> None:
        self.passes += 1


class Tracked(Plain):
    """Keeps statistics of each sample for itself, which couple none."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(1, track_running_stats=True)

    def keep(self, rows: Tensor) -> None:
        self.norm(rows[:, None])


PRIVATE: dict[str, Any] = {"per_sample": True, "noise_multiplier": 1.0, "delta": 1e-3}
CORRELATED: dict[str, Any] = PRIVATE | {"correlated": True}


def rows() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    inputs = 5 + torch.rand(ROWS, 1, 2, 3, generator=draw)
    return [{"pixel_values": inputs[k], "labels": torch.tensor(k % 2)} for k in range(ROWS)]


def trainer(
    model: nn.Module, folder: Path, defense: Defense | None = None, **settings: Any
) -> GradGuardTrainer:
    args = GradGuardConfig(
        str(folder), use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
        optim="sgd", max_grad_norm=0, per_device_train_batch_size=4,
        **{"max_steps": 3, **settings},
    )  # fmt: skip
    return GradGuardTrainer(
        model, args, defense=defense or make_defense("dp_sgd", **PRIVATE), train_dataset=rows()
    )


def state_of(model: nn.Module) -> bytes:
    own = {name for name, _ in model.named_parameters() if name.startswith("linear")}
    return pickle.dumps([v for name, v in model.state_dict().items() if name not in own])


def attributes_of(model: nn.Module) -> str:
    names = ("shift", "means", "norms")
    attributes = {name: vars(model)[name] for name in names if name in vars(model)}
    return str((attributes, dict(model.named_buffers())))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "buffer": (Buffered, "writes to mean as it runs"),
    "in place": (InPlace, "writes to mean as it runs"),
    "large": (Large, "writes to mean as it runs"),
    "extra state": (Extra, "writes to _extra_state as it runs"),
    "hook": (Hooked, "writes to kept as it runs"),
    "weight": (FrozenWeight, "passes write to mean"),
    "global": (SetsGlobal, "passes write to LAST"),
    "instance norm": (Tracked, "writes to norm.running_mean, norm.running_var as it runs"),
}


@pytest.mark.parametrize("asked", [PRIVATE, CORRELATED], ids=["independent", "correlated"])
@pytest.mark.parametrize(("kind", "says"), REFUSED.values(), ids=REFUSED)
def test_what_is_saved_of_a_batch_is_refused_where_something_is_proved(
    kind: Callable[[], nn.Module], says: str, asked: dict[str, Any], tmp_path: Path
) -> None:
    model = kind()
    before = state_of(model)
    with pytest.raises(NotImplementedError, match=says):
        trainer(model, tmp_path, make_defense("dp_sgd", **asked)).train()
    if kind not in (Hooked, FrozenWeight):  # which nobody can put back
        assert state_of(model) == before


@pytest.mark.parametrize("kind", [Buffered, InPlace, Large, Extra, Tracked])
def test_frozen_modules_keep_nothing_and_the_saved_model_is_public(
    kind: Callable[[], nn.Module], tmp_path: Path
) -> None:
    model = kind()
    before, weight = state_of(model), model.linear.weight.detach().clone()
    trained = trainer(model, tmp_path, batch_statistics="frozen")
    trained.train()
    trained.save_model()
    assert not torch.equal(model.linear.weight, weight)
    assert state_of(model) == before
    saved, start = load_file(tmp_path / "model.safetensors"), kind().state_dict()
    for name in [name for name in saved if not name.startswith("linear.")]:
        assert torch.equal(saved[name], start[name]), name


@pytest.mark.parametrize("kind", [lambda: Buffered(persistent=False), FromTheThird, Attributes])
def test_what_is_not_saved_reaches_no_later_message(
    kind: Callable[[], nn.Module], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else one row would move the gradients of all rows that come after it."""
    SEEN.clear()
    model = kind()
    before = attributes_of(model)
    trainer(model, tmp_path, max_steps=5).train()
    assert attributes_of(model) == before
    assert not SEEN
    (said,) = [text for text in caplog.messages if "Each message puts that back" in text]
    assert type(model).__name__ in said


def test_a_count_that_follows_no_batch_goes_on(tmp_path: Path) -> None:
    model = Counter()
    trainer(model, tmp_path).train()
    assert model.passes == 3


def test_a_norm_of_weights_goes_on(tmp_path: Path) -> None:
    """Spectral normalization writes estimates of its weight's singular vectors to buffers."""
    model = Plain()
    nn.utils.parametrizations.spectral_norm(model.linear)
    before = model.linear.parametrizations.weight[0]._u.clone()
    trainer(model, tmp_path).train()
    assert not torch.equal(model.linear.parametrizations.weight[0]._u, before)


def test_a_configuration_is_saved_as_without_a_proof(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A classifier notes its kind of problem in its first pass, which is the same for any batch."""
    model, batch = make_task("bert", dtype=torch.float32, batch_size=ROWS)
    trained = trainer(model, tmp_path)
    trained.train_dataset = [{n: v[k] for n, v in batch.items()} for k in range(ROWS)]
    trained.train()
    assert model.config.problem_type == "single_label_classification"
    assert "puts that back" not in caplog.text


def test_without_a_proof_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for kind, name in ((Buffered, "mean"), (Extra, "_extra_state")):
        caplog.clear()
        trained = trainer(kind(), tmp_path, make_defense("gaussian_noise", scale=0.1))
        trained.train()
        (said,) = [text for text in caplog.messages if "writes to buffers" in text]
        assert f"runs: {name}." in said
        assert f"wrote to `{name}` as it ran" in sharing(trained)["state"]
    model = Buffered()
    trainer(
        model, tmp_path, make_defense("gaussian_noise", scale=0.1), batch_statistics="frozen"
    ).train()
    assert not model.mean.any()


def test_a_loop_of_ones_own_refuses_it_too() -> None:
    batch = {name: torch.stack([row[name] for row in rows()]) for name in rows()[0]}
    with pytest.raises(NotImplementedError, match=r"writes to mean as it runs.*in eval mode"):
        protect(Buffered(), batch, make_defense("dp_sgd", **PRIVATE))


def test_looking_for_tables_leaves_no_row_in_a_large_buffer(tmp_path: Path) -> None:
    """It runs the model before the first message."""
    model = Large()
    with pytest.raises(NotImplementedError):
        trainer(model, tmp_path).train()
    assert not model.mean.any()


def test_a_trained_model_holds_nothing_else(tmp_path: Path) -> None:
    """No gradient, no hook and no cache of ours stays where pickling would take it along."""
    model = Plain()
    names = {name: set(vars(module)) for name, module in model.named_modules()}
    trained = trainer(model, tmp_path)
    trained.train()
    assert all(p.grad is None for p in model.parameters())
    assert all(not p._backward_hooks and not vars(p) for p in model.parameters())
    for name, module in model.named_modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert set(vars(module)) - names[name] <= {"forward", "_is_accelerate_prepared"}
    assert b"gradguard" not in pickle.dumps(model.state_dict())
