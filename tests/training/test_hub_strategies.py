"""What each `hub_strategy` uploads of a private training: the model, and public files beside it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import make_task, refuses
from huggingface_hub.utils import filter_repo_objects
from transformers import TrainerCallback

from hf_gradguard import GradGuardConfig, GradGuardTrainer
from hf_gradguard.training.card import _shares_counts, privacy_section
from hf_gradguard.training.privacy.proofs import NO_EPSILON

PUBLIC = {
    "config.json", "model.safetensors", "training_args.bin", "README.md", "trainer_state.json",
    "all_results.json", "train_results.json",
}  # fmt: skip


class Hub:
    """Takes uploads as the real one does, and keeps their bytes by path."""

    def __init__(self) -> None:
        self.uploads: list[dict[str, bytes]] = []

    def create_repo(self, *args: Any, **kwargs: Any) -> SimpleNamespace:
        return SimpleNamespace(repo_id="me/net")

    def upload_folder(
        self, folder_path: str, ignore_patterns: list[str] | None = None, path_in_repo: str = "",
        **kwargs: Any,
    ) -> SimpleNamespace:  # fmt: skip
        paths = {p.relative_to(folder_path).as_posix(): p for p in Path(folder_path).rglob("*")}
        names = list(filter_repo_objects(paths, ignore_patterns=ignore_patterns))
        files = {name: paths[name] for name in names if paths[name].is_file()}
        self.uploads.append(
            {f"{path_in_repo}/{name}".strip("/"): p.read_bytes() for name, p in files.items()}
        )
        return SimpleNamespace(is_done=lambda: True, done=lambda: True, result=lambda: None)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: hub)
    return hub


def trainer(folder: Path, **settings: Any) -> GradGuardTrainer:
    model, batch = make_task("bert", dtype=torch.float32, batch_size=12)
    rows = [{name: value[k] for name, value in batch.items()} for k in range(12)]
    args = GradGuardConfig(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, max_steps=4,
        save_strategy="steps", save_steps=1, per_device_train_batch_size=4, push_to_hub=True,
        defense="dp_sgd", hub_token="x", hub_model_id="me/net", hub_always_push=True,
        defense_kwargs={"per_sample": True, "noise_multiplier": 1.0, "delta": 1e-3},
        **settings,
    )  # fmt: skip
    return GradGuardTrainer(model, args, train_dataset=rows)


@pytest.mark.parametrize("strategy", ["end", "every_save"])
def test_no_private_file_is_uploaded(strategy: str, tmp_path: Path, hub: Hub) -> None:
    trained = trainer(tmp_path, hub_strategy=strategy, noise_seed=7)
    output = trained.train()
    trained.save_metrics("train", output.metrics)
    trained.save_state()
    trained.push_to_hub()
    names = {name for upload in hub.uploads for name in upload}
    assert (tmp_path / "checkpoint-4" / "optimizer.pt").is_file()
    assert (tmp_path / "gradguard_account_rank0.jsonl").is_file()
    assert names <= PUBLIC, names - PUBLIC
    assert {"model.safetensors", "README.md", "trainer_state.json"} <= names
    assert len(hub.uploads) > 1 if strategy == "every_save" else hub.uploads
    for upload in hub.uploads:
        if "training_args.bin" in upload:
            saved = torch.load(io.BytesIO(upload["training_args.bin"]), weights_only=False)
            assert saved.noise_seed is None
    history = json.loads(hub.uploads[-1]["trainer_state.json"])["log_history"]
    assert not [entry for entry in history if "loss" in entry or "defense/epsilon" in entry]
    assert NO_EPSILON in hub.uploads[-1]["README.md"].decode()


@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints"])
def test_strategies_that_push_checkpoints_are_refused(
    strategy: str, tmp_path: Path, hub: Hub
) -> None:
    with refuses("pushed-checkpoints"):
        trainer(tmp_path, hub_strategy=strategy)
    trained = trainer(tmp_path, hub_strategy="end")
    trained.args.hub_strategy = strategy
    with refuses("pushed-checkpoints"):
        trained.train()

    class Changes(TrainerCallback):
        def on_step_begin(self, args: Any, *_: Any, **kwargs: Any) -> None:
            args.hub_strategy = strategy

    late = trainer(tmp_path, hub_strategy="end")
    late.add_callback(Changes())
    with refuses("pushed-checkpoints"):
        late.train()
    assert not hub.uploads


def test_the_card_names_counts_where_they_are_shared(tmp_path: Path, hub: Hub) -> None:
    """One process adds none up, nor does a private run, whose counts tell of rows."""
    trained = trainer(tmp_path, hub_strategy="end")
    assert "label tokens" not in privacy_section(trained)
    assert "a tokenizer's words" in privacy_section(trained)
    shared = SimpleNamespace(
        counts_items=True, model_accepts_loss_kwargs=True, compute_loss_func=None,
        args=SimpleNamespace(average_tokens_across_devices=True, world_size=2),
    )  # fmt: skip
    assert _shares_counts(shared)
    for name, value in (("counts_items", False), ("model_accepts_loss_kwargs", False)):
        assert not _shares_counts(SimpleNamespace(**{**vars(shared), name: value}))
    shared.args.world_size = 1
    assert not _shares_counts(shared)
