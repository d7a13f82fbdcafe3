"""Which files of an output folder are never uploaded, and which of a checkpoint are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects
from transformers import trainer

from hf_gradguard.training.checkpoints.complete import (
    begin_checkpoint,
    list_checkpoint,
    missing_from,
    without_private_files,
)

PRIVATE = [
    "metrics.json", "gradguard_account_rank0.jsonl", "gradguard_private_rank0.safetensors",
    "run-1/gradguard_account_rank3.jsonl", "run-1/checkpoint-3/model.safetensors",
    "run-1/checkpoint-3/trainer_state.json", "a/run-2/checkpoint-30/gradguard_complete.json",
]  # fmt: skip
PUBLIC = ["model.safetensors", "config.json", "README.md", "trainer_state.json", "run-1/README.md",
          "tokenizer.json", "all_results.json"]  # fmt: skip


def test_private_files_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those at the top that are checkpoints the Trainer leaves out by itself."""
    uploads: list[dict[str, Any]] = []

    class Hub:
        def upload_folder(self, **kwargs: Any) -> None:
            uploads.append(kwargs)

    monkeypatch.setattr(trainer, "hf_api", Hub)
    with without_private_files():
        trainer.hf_api().upload_folder(folder_path="out", ignore_patterns=["_*"])
    (upload,) = uploads
    patterns = upload["ignore_patterns"]
    sent = list(filter_repo_objects([*PRIVATE, *PUBLIC, "_log"], ignore_patterns=patterns))
    assert sent == PUBLIC


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "pytorch_model.bin", "optimizer.pt", "scheduler.pt", "rng_state_1.pth",
     "inner/adapter_model.safetensors"],
)  # fmt: skip
def test_what_resuming_reads_is_compared(name: str, tmp_path: Path) -> None:
    begin_checkpoint(tmp_path)
    (tmp_path / "inner").mkdir()
    for file in {name, "model.safetensors"}:
        (tmp_path / file).write_bytes(b"as saved")
    list_checkpoint(tmp_path)
    (tmp_path / "trainer_state.json").write_text("{}")
    assert missing_from(tmp_path, checks_content=True) == ""
    (tmp_path / name).write_bytes(b"as given")
    assert missing_from(tmp_path, checks_content=True).startswith(f"{name} is cut off or was chang")
    (tmp_path / name).unlink()
    assert missing_from(tmp_path) == f"{name} is missing"


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_weights_of_either_form_are_weights(name: str, tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text("{}")
    assert missing_from(tmp_path) == "it holds no weights"
    (tmp_path / name).touch()
    assert missing_from(tmp_path) == ""
