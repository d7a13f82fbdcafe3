"""A contract for the Trainer's hooks: each that a user may override is called where the stock
Trainer calls it, or replaced, or refused when overridden. One test a cell: hook × how rows are
drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_task, refuses
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler
from transformers import Trainer, TrainingArguments

from hf_gradguard import GradGuardConfig, GradGuardMixin, GradGuardTrainer, make_defense
from hf_gradguard.leakage import FisherAccountant

ROWS = 24
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "num_clients": {"num_clients": 2},
    "samples": {},
    "accountant": {},
}
# What a user overrides, also by a name that Transformers calls private: its documentation tells to.
HOOKS = (
    "get_train_dataloader", "_get_train_sampler", "get_eval_dataloader", "_get_eval_sampler",
    "create_optimizer", "create_scheduler", "get_decay_parameter_names", "get_batch_samples",
    "compute_loss", "compute_loss_context_manager", "training_step", "_prepare_inputs",
    "floating_point_ops", "log", "evaluate", "evaluation_loop", "prediction_step", "save_model",
    "_save", "_save_checkpoint", "create_accelerator_and_postprocess", "_wrap_model",
    "_get_num_items_in_batch", "_get_output_dir", "store_flos", "_inner_training_loop",
    "_maybe_log_save_evaluate", "_load_best_model",
)  # fmt: skip
REFUSED = {
    ("_get_train_sampler", "num_clients"), ("_get_train_sampler", "samples"),
    ("get_train_dataloader", "samples"),
}  # fmt: skip
REPLACED = {
    # by samples a loss is each row's own mean, so no labels are counted over ranks
    ("_get_num_items_in_batch", "samples"),
}


def data() -> list[dict[str, Any]]:
    batch = make_task("bert", batch_size=ROWS)[1]
    return [{key: value[row] for key, value in batch.items()} for row in range(ROWS)]


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "use_cpu": True, "report_to": "none", "disable_tqdm": True,
        "max_steps": 2, "per_device_train_batch_size": 4, "logging_steps": 1, "save_steps": 1,
        "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, **more,
    }  # fmt: skip


def protected(kind: type, mode: str, folder: Path, **more: Any) -> Any:
    model = make_task("bert", dtype=torch.float32)[0]
    defense = make_defense("gaussian_noise", scale=0.1)
    if mode == "samples":
        defense = make_defense("dp_sgd", per_sample=True, noise_multiplier=1.0, delta=1e-3)
    rows = more.pop("rows", None) or data()
    account = FisherAccountant() if mode == "accountant" else None
    args = GradGuardConfig(**settings(folder, **MODES[mode], **more))
    return kind(
        model=model, args=args, defense=defense, accountant=account, train_dataset=rows,
        eval_dataset=data()[:4],
    )  # fmt: skip


def counting(base: type, names: tuple[str, ...]) -> type:
    """A subclass that counts how often each hook is called, and does as before."""
    calls = dict.fromkeys(names, 0)

    def counted(name: str) -> Callable[..., Any]:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return getattr(super(kind, self), name)(*args, **kwargs)

        return hook

    methods = {name: counted(name) for name in names}
    kind = type(f"Counting{base.__name__}", (base,), {**methods, "calls": calls})
    return kind


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """How often each hook is called in a training, by the stock Trainer and in every mode."""
    folder = tmp_path_factory.mktemp("hooks")
    stock = counting(Trainer, HOOKS)
    args = TrainingArguments(**settings(folder / "stock"))
    model = make_task("bert", dtype=torch.float32)[0]
    stock(model=model, args=args, train_dataset=data(), eval_dataset=data()[:4]).train()
    found = {"stock": stock.calls}
    for mode in MODES:
        names = tuple(name for name in HOOKS if (name, mode) not in REFUSED)
        kind = counting(GradGuardTrainer, names)
        protected(kind, mode, folder / mode).train()
        found[mode] = kind.calls
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_is_called_or_replaced_or_refused(
    called: dict[str, dict[str, int]], hook: str, mode: str, tmp_path: Path
) -> None:
    assert called["stock"][hook], "the stock Trainer does not call it"
    if (hook, mode) in REFUSED:
        with pytest.raises(NotImplementedError, match=hook):
            protected(counting(GradGuardTrainer, (hook,)), mode, tmp_path)
    elif (hook, mode) not in REPLACED:
        assert called[mode][hook], "it is dropped"


# Samplers


class Noted(Dataset):
    """Notes which rows are read in training."""

    def __init__(self) -> None:
        self.rows, self.read = data(), list[int]()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        self.read.append(row)
        return self.rows[row]


class Weighted(GradGuardTrainer):
    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> WeightedRandomSampler:
        return WeightedRandomSampler([0.0] * 18 + [1.0] * 6, ROWS)


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_a_sampler_excludes_are_not_trained_on(mode: str, tmp_path: Path) -> None:
    rows = Noted()
    if (("_get_train_sampler", mode)) in REFUSED:
        with refuses("own-sampler"):
            protected(Weighted, mode, tmp_path, rows=rows)
        return
    trainer = protected(Weighted, mode, tmp_path, rows=rows, max_steps=4, save_strategy="no",
                        load_best_model_at_end=False)  # fmt: skip
    trainer.train()
    assert set(rows.read) <= set(range(18, ROWS))
    if mode == "accountant":
        assert set(trainer.accountant) <= set(range(18, ROWS))


@pytest.mark.parametrize("mode", ["num_clients", "samples"])
def test_a_sampler_of_one_trainer_alone_is_no_less_a_sampler(mode: str, tmp_path: Path) -> None:
    """Assigned to the object, before the first training or between two."""
    trainer = protected(GradGuardTrainer, mode, tmp_path)
    for _ in range(2):
        trainer._get_train_sampler = lambda *_: WeightedRandomSampler([1.0] * 6, 6)
        with refuses("own-sampler"):
            trainer.train()
        del trainer._get_train_sampler
        trainer.train()


def test_lengths_do_not_order_what_clients_draw(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="train_sampling_strategy"):
        protected(GradGuardTrainer, "num_clients", tmp_path, train_sampling_strategy="sequential")


class OwnLoader(GradGuardTrainer):
    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_dataset, batch_size=4, collate_fn=self.data_collator)


def test_batches_that_do_not_say_whose_they_are_are_refused(tmp_path: Path) -> None:
    """Rows would be whichever client's."""
    trainer = protected(OwnLoader, "num_clients", tmp_path)
    with refuses("rows-of-no-client"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("mode", MODES)
def test_batch_sizes_are_not_looked_for_where_rows_are_drawn(mode: str, tmp_path: Path) -> None:
    """A smaller batch would be another sampling rate, and other clients' shares."""
    if mode in ("num_clients", "samples"):
        with refuses("auto-batch-size"):
            protected(GradGuardTrainer, mode, tmp_path, auto_find_batch_size=True)
        return
    tried = []

    class Full(GradGuardTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            tried.append(len(args[1]["labels"]))
            if tried[-1] > 2:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(*args, **kwargs)

    trainer = protected(Full, mode, tmp_path, auto_find_batch_size=True, save_strategy="no",
                        load_best_model_at_end=False)  # fmt: skip
    trainer.train()
    assert tried[0] == 4
    assert tried[-1] <= 2
    assert trainer.state.global_step == 2


# Optimizers

NOISE = {
    "defense": "gaussian_noise", "defense_kwargs": {"relative_scale": 3.0},
    "scale_learning_rate": True,
}  # fmt: skip
RATE, RAISED = 1e-3, 1e-3 * 10**0.5


class MakesOptimizer(Trainer):
    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE)
        return self.optimizer


class ReturnsNothing(Trainer):
    def create_optimizer(self, *args: Any, **kwargs: Any) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE)


KINDS: dict[str, type] = {
    "the Trainer's": GradGuardTrainer,
    "a base's": type("OfBase", (GradGuardMixin, MakesOptimizer), {}),
    "a subclass's": type(
        "Sub", (GradGuardTrainer,), {"create_optimizer": MakesOptimizer.create_optimizer}
    ),
    "a base's that returns nothing": type("NoReturn", (GradGuardMixin, ReturnsNothing), {}),
    "a subclass's that returns nothing": type(
        "SubNoReturn", (GradGuardTrainer,), {"create_optimizer": ReturnsNothing.create_optimizer}
    ),
}  # fmt: skip


def rated(kind: type, folder: Path, args_kind: type = GradGuardConfig, **more: Any) -> Any:
    noise = NOISE | more.pop("settings", {}) if args_kind is GradGuardConfig else {}
    plain = settings(folder, save_strategy="no", eval_strategy="no", load_best_model_at_end=False)
    args = args_kind(**plain, learning_rate=RATE, lr_scheduler_type="constant", **noise)
    model = make_task("bert", dtype=torch.float32)[0]
    if more.pop("given", False):
        more["optimizers"] = (torch.optim.AdamW(model.parameters(), lr=RATE), None)
    return kind(model=model, args=args, train_dataset=data(), **more)


@pytest.mark.parametrize("case", KINDS)
def test_rates_are_scaled_whoever_makes_the_optimizer(case: str, tmp_path: Path) -> None:
    trainer = rated(KINDS[case], tmp_path)
    for _ in range(2):  # the second training has the same optimizer
        trainer.train()
        rates = [e["learning_rate"] for e in trainer.state.log_history if "learning_rate" in e]
        assert rates == pytest.approx([RAISED] * 2)


def test_an_optimizer_that_is_given_keeps_its_rate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    off = {"scale_learning_rate": False}
    trainer = rated(GradGuardTrainer, tmp_path, given=True, settings=off)
    trainer.train()
    assert trainer.optimizer.param_groups[0]["lr"] == RATE
    assert "learning rate stays 0.001" in caplog.text


# Defaults


@pytest.mark.parametrize("kind", ["TrainingArguments", "SFTConfig", "DPOConfig"])
def test_defaults_hold_for_every_kind_of_arguments(kind: str, tmp_path: Path) -> None:
    if kind == "TrainingArguments":
        args_kind: Any = TrainingArguments
    else:
        args_kind = getattr(pytest.importorskip("trl"), kind)
    from hf_gradguard.training.config import setting

    args = args_kind(output_dir=str(tmp_path), use_cpu=True)
    ours = GradGuardConfig(str(tmp_path), use_cpu=True)
    for name in GradGuardConfig.__annotations__:
        if not name.startswith("_"):
            assert setting(args, name) == getattr(ours, name), name
    noise = make_defense("gaussian_noise", relative_scale=3.0)
    trainer = rated(GradGuardTrainer, tmp_path, args_kind, defense=noise)
    trainer.train()
    assert trainer.optimizer.param_groups[0]["lr"] == RATE


def test_no_default_stands_in_two_places() -> None:
    import hf_gradguard

    names = [name for name in GradGuardConfig.__annotations__ if not name.startswith("_")]
    for path in (Path(hf_gradguard.__file__).parent / "training").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        for name in names:
            assert f'args, "{name}", ' not in source or f'setting(args, "{name}")' in source, (
                path.name, name,
            )  # fmt: skip
