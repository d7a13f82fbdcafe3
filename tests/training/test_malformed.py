"""Batches, settings and data of which nothing right could be made: each is refused, and the error
names the thing and the way out. Damaged checkpoints are in `test_checkpoints.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_task, refuses
from torch import Tensor, nn
from transformers import DataCollatorWithFlattening

from hf_gradguard import GradGuardConfig, GradGuardTrainer

Batch = dict[str, Any]


def trainer_of(
    folder: Path, task: str, collate: Any = None, model: nn.Module | None = None, **settings: Any
) -> GradGuardTrainer:
    made, batch = make_task(task, dtype=torch.float32, batch_size=4)
    data = [{key: value[k] for key, value in batch.items()} for k in range(4)]
    usual = {
        "max_steps": 1, "per_device_train_batch_size": 4, "use_cpu": True, "report_to": "none",
        "disable_tqdm": True, "save_strategy": "no", "defense": "pruning",
        "remove_unused_columns": False,
    }  # fmt: skip
    args = GradGuardConfig(str(folder), **{**usual, **settings})
    return GradGuardTrainer(model or made, args, train_dataset=data, data_collator=collate)


def stacked(rows: list[Batch]) -> Batch:
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def with_(**entries: Any) -> Callable[[Batch], Batch]:
    """Other entries, or entries made of the batch."""
    return lambda batch: (
        batch | {key: value(batch) if callable(value) else value for key, value in entries.items()}
    )


def without(*names: str) -> Callable[[Batch], Batch]:
    return lambda batch: {key: value for key, value in batch.items() if key not in names}


def only(**entries: Any) -> Callable[[Batch], Batch]:
    return lambda batch: with_(**entries)({"labels": batch["labels"]})


NEITHER = r"neither `input_ids` nor `pixel_values`.*Return one of them from the collator"
BATCHES: dict[str, tuple[str, Callable[[Batch], Any], str]] = {
    "no ids": ("bert", without("input_ids"), NEITHER),
    "no pixels": ("vit", without("pixel_values"), NEITHER),
    "no ids, causal": ("gpt2_lm", without("input_ids"), NEITHER),
    "no source": ("t5", without("input_ids"), NEITHER),
    "audio": (
        "bert", only(input_values=torch.ones(4, 50)),
        rf"'input_values', 'labels'.*{NEITHER}",
    ),
    "audio features": (
        "t5", only(input_features=torch.ones(4, 8, 5)),
        rf"'input_features'.*{NEITHER}",
    ),
    "labels alone": ("bert", only(), NEITHER),
    "embeddings": (
        "bert", only(inputs_embeds=torch.ones(4, 5, 8)),
        r"holds inputs_embeds:.*`input_ids`",
    ),
    "embeddings too": ("bert", with_(inputs_embeds=torch.ones(4, 5, 8)), "holds inputs_embeds"),
    "decoder embeddings": (
        "t5", with_(decoder_inputs_embeds=torch.ones(4, 5, 8)), "holds decoder_inputs_embeds",
    ),
    "pixels for a text model": (
        "bert", only(pixel_values=torch.ones(4, 3, 8, 8)), "BertForSeq.* takes `input_ids`, but",
    ),
    "text for a vision model": (
        "vit", only(input_ids=torch.ones(4, 5).long()), "ViTForImage.* takes `pixel_values`, but",
    ),
    "no batch": ("bert", lambda batch: None, "A batch is a NoneType, where a mapping"),
    "a list": ("bert", lambda batch: [1], "A batch is a list, where a mapping"),
    "a tuple": ("bert", lambda batch: tuple(batch.values()), "A batch is a tuple"),
    "a tensor": ("bert", lambda batch: batch["input_ids"], "A batch is a Tensor"),
    "a word": ("bert", lambda batch: "text", "A batch is a str"),
    "empty": ("bert", lambda batch: {}, "A batch is a dict without entries"),
    "ids of nothing": ("bert", with_(input_ids=None), r"`input_ids` of a batch are a NoneType"),
    "ids in lists": (
        "bert", with_(input_ids=lambda b: b["input_ids"].tolist()),
        "`input_ids` of a batch are a list",
    ),
    "ids in numpy": (
        "bert", with_(input_ids=lambda b: b["input_ids"].numpy()), "are a ndarray, where a tensor",
    ),
    "ids that are text": ("bert", with_(input_ids=["a", "b", "c", "d"]), "are a list"),
    "ids in floating point": (
        "bert", with_(input_ids=lambda b: b["input_ids"].float()),
        r"are torch\.float32, where whole",
    ),
    "one row of ids": (
        "bert", with_(input_ids=lambda b: b["input_ids"][0]),
        r"shape \(5,\), where a tensor \(B, T\)",
    ),
    "no rows": ("bert", lambda b: {k: v[:0] for k, v in b.items()}, r"shape \(0, 5\)"),
    "no rows of pixels": (
        "vit", lambda b: {k: v[:0] for k, v in b.items()},
        r"shape \(0, 3, 8, 8\)",
    ),
    "no tokens": (
        "bert", with_(input_ids=torch.ones(4, 0).long()), r"shape \(4, 0\)",
    ),
    "ids beyond the table": (
        "bert", with_(input_ids=lambda b: b["input_ids"] + 20),
        r"go from 20 to \d+, but Bert.* 0 to 23",
    ),
    "ids below zero": (
        "gpt2_lm", with_(input_ids=lambda b: b["input_ids"] - 9), r"go from -\d to .*resize_token",
    ),
    "source beyond the table": (
        "t5", with_(input_ids=lambda b: b["input_ids"] + 20), r"go from 20 to .*T5For",
    ),
    "short mask": (
        "bert", with_(attention_mask=lambda b: b["attention_mask"][:, :2]),
        r"`attention_mask` has shape \(4, 2\), but `input_ids` have \(4, 5\)",
    ),
    "mask of fewer rows": (
        "llama", with_(attention_mask=lambda b: b["attention_mask"][:2]), r"shape \(2, 5\), but",
    ),
    "whole pixels": (
        "vit", with_(pixel_values=lambda b: b["pixel_values"].byte()),
        r"torch\.uint8.*Convert them",
    ),
    "one image": (
        "vit", with_(pixel_values=lambda b: b["pixel_values"][0]), r"shape \(3, 8, 8\), where",
    ),
    "gray images": (
        "vit", with_(pixel_values=lambda b: b["pixel_values"][:, :1]),
        r"pixel_values \(4, 1, 8, 8\)",
    ),
    "large images": ("vit", with_(pixel_values=torch.ones(4, 3, 16, 16)), r"\(16\*16\).*\(8\*8\)"),
    "pixels that are not finite": (
        "vit", with_(pixel_values=torch.full((4, 3, 8, 8), torch.nan)),
        "is not finite, so nothing was",
    ),
    "no labels": ("bert", without("labels"), "did not return a loss"),
    "no labels, vision": ("vit", without("labels"), "did not return a loss"),
    "labels beyond the classes": (
        "bert", with_(labels=lambda b: b["labels"] + 7), r"labels \(4,\) of int64 from [789] to 9",
    ),
    "labels below zero": (
        "vit", with_(labels=lambda b: b["labels"] - 3), r"labels \(4,\) of int64 from -\d",
    ),
    "fewer labels": ("bert", with_(labels=lambda b: b["labels"][:2]), r"labels \(2,\) of int64"),
    "labels of a token each": (
        "bert", with_(labels=lambda b: b["input_ids"]), r"labels \(4, 5\) of int64",
    ),
    "labels in floating point": (
        "bert", with_(labels=lambda b: b["labels"].float()), r"labels \(4,\) of float32",
    ),
    "labels in lists": (
        "gpt2_lm", with_(labels=lambda b: b["labels"].tolist()), r"labels \(a list\)",
    ),
    "labels that are text": ("vit", with_(labels=["a", "b", "c", "d"]), r"labels \(a list\)"),
    "labels of nothing": ("bert", with_(labels=None), "labels|did not return a loss"),
    "one label": ("bert", with_(labels=torch.tensor(1)), r"labels \(\) of int64"),
    "tokens beyond the vocabulary": (
        "gpt2_lm", with_(labels=lambda b: b["labels"] + 99), r"labels \(4, 5\) of int64 from",
    ),
    "positions beyond the model's": (
        "bert", with_(position_ids=torch.arange(5)[None] + 50),
        r"position_ids \(1, 5\) of int64 from 50",
    ),
    "types beyond the model's": (
        "bert", with_(token_type_ids=torch.full((4, 5), 9)),
        r"token_type_ids \(4, 5\) of int64 from 9",
    ),
    "a text that is too long": (
        "bert", with_(input_ids=torch.ones(4, 30).long(), attention_mask=torch.ones(4, 30).long()),
        r"input_ids \(4, 30\)",
    ),
}  # fmt: skip


SAMPLE = {
    "no ids", "no pixels", "audio", "embeddings", "pixels for a text model", "no batch",
    "ids in lists", "no rows", "ids beyond the table", "short mask", "labels beyond the classes",
    "labels in lists",
}  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[] if c in SAMPLE else pytest.mark.slow) for c in BATCHES],
)
@pytest.mark.parametrize("clients", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_malformed_batches_are_named(tmp_path: Path, case: str, clients: int) -> None:
    task, spoil, says = BATCHES[case]
    trainer = trainer_of(
        tmp_path, task, lambda rows: spoil(stacked(rows)), clients_per_process=clients
    )
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    if clients > 1 and case == "fewer labels":
        says = "'labels' of a batch has 2 entries where the batch has 4 rows"
    if clients > 1 and case == "one row of ids":
        says = "A batch has 5 rows of 4 examples"
    with pytest.raises(Exception, match=f"(?s){says}") as error:
        trainer.train()
    assert not isinstance(error.value, KeyError)
    assert trainer.state.global_step == 0
    assert all(torch.equal(p, before[n]) for n, p in trainer.model.named_parameters())


def test_text_and_pixels_are_no_single_input(tmp_path: Path) -> None:
    """Which a defense of first order does not ask for."""
    both = with_(input_ids=torch.ones(4, 5).long())
    trainer = trainer_of(tmp_path, "vit", lambda rows: both(stacked(rows)), defense="optimal_noise")
    with pytest.raises(ValueError, match="both `input_ids` and `pixel_values`"):
        trainer.train()


def test_there_are_enough_of_them() -> None:
    assert len(BATCHES) >= 50


# Padding-free


def long_rows() -> list[dict[str, list[int]]]:
    return [{"input_ids": [1, 2, 3 + k], "labels": [1, 2, 3 + k]} for k in range(4)]


def flattened(**settings: Any) -> Any:
    return DataCollatorWithFlattening(**settings)


@pytest.mark.parametrize("more", [{"clients_per_process": 2}, {"num_clients": 2}])
def test_flattening_collators_are_refused_for_several_clients(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    with refuses("padding-free"):
        trainer_of(tmp_path, "gpt2_lm", flattened(), **more)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"return_position_ids": False, "return_seq_idx": True},
        {"return_position_ids": False, "return_flash_attn_kwargs": True},
    ],
)
@pytest.mark.parametrize("more", [{"clients_per_process": 2}, {"num_clients": 2}])
def test_padding_free_batches_are_refused_for_several_clients(
    tmp_path: Path, settings: dict[str, Any], more: dict[str, Any]
) -> None:
    """From a collator that is not known by its class. They used to be one client's."""

    def collate(rows: Any) -> Batch:
        return flattened(**settings)(rows)

    trainer = trainer_of(tmp_path, "gpt2_lm", collate, **more)
    trainer.train_dataset = long_rows()
    with refuses("padding-free"):
        trainer.train()


def test_padding_free_batches_of_one_client_train(tmp_path: Path) -> None:
    def collate(rows: Any) -> Batch:
        return flattened()(rows)

    trainer = trainer_of(tmp_path, "gpt2_lm", collate)
    trainer.train_dataset = [{"input_ids": [1, 2], "labels": [1, 2]}] * 4
    trainer.train()
    assert trainer.state.global_step == 1


def test_one_text_is_no_padding_free_batch(tmp_path: Path) -> None:
    """Fewer rows than clients: some are left out."""
    positions = with_(position_ids=lambda b: torch.arange(5)[None])
    trainer = trainer_of(
        tmp_path, "gpt2_lm", lambda rows: positions(stacked(rows)), clients_per_process=3,
        per_device_train_batch_size=1,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 1


def test_entries_that_cannot_be_cut_are_refused(tmp_path: Path) -> None:
    def collate(rows: list[Batch]) -> Batch:
        return stacked(rows) | {"position_ids": torch.arange(5).expand(3, 5)}

    with refuses("entries-of-no-row"):
        trainer_of(tmp_path, "bert", collate, clients_per_process=2).train()


def test_lists_of_one_entry_a_row_are_cut(tmp_path: Path) -> None:
    seen: list[tuple[int, list[int]]] = []

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(24, 8), nn.Linear(8, 3)

        def get_input_embeddings(self) -> nn.Module:
            return self.embed

        def forward(self, input_ids: Tensor, labels: Tensor, names: list[int], **_: Any) -> Any:
            seen.append((len(input_ids), names))
            logits = self.head(self.embed(input_ids).mean(1))
            return {"loss": nn.functional.cross_entropy(logits, labels)}

    def collate(rows: list[Batch]) -> Batch:
        return stacked(rows) | {"names": [10, 11, 12, 13]}

    trainer_of(tmp_path, "bert", collate, Named(), clients_per_process=2).train()
    assert {(rows, *names) for rows, names in seen} == {(2, 10, 11), (2, 12, 13)}


# Settings


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("share_input_embeddings", "perhaps", "true or false"),
        ("share_input_embeddings", 1, "true or false"),
        ("share_input_embeddings", None, "true or false"),
        ("share_input_embeddings", [], "true or false"),
        ("clients_per_process", "2", "a whole number"),
        ("clients_per_process", 2.0, "a whole number"),
        ("clients_per_process", True, "a whole number"),
        ("num_clients", "4", "a whole number"),
        ("noise_seed", 1.5, "a whole number"),
        ("leakage_logging_steps", "never", "a whole number"),
        ("leakage_limit", "0.1", "a number"),
        ("leakage_limit", True, "a number"),
        ("dirichlet_alpha", None, "a number"),
        ("batch_statistics", True, "text"),
        ("model_name_or_path", 3, "text"),
    ],
)
def test_settings_of_another_kind_are_named(
    tmp_path: Path, name: str, value: Any, says: str
) -> None:
    with pytest.raises(ValueError, match=f"{name} must be {says}, but is"):
        GradGuardConfig(str(tmp_path), use_cpu=True, report_to="none", **{name: value})


@pytest.mark.parametrize(
    ("value", "means"), [("false", False), ("False", False), ("no", False), ("true", True)]
)
def test_booleans_in_words_are_what_they_say(tmp_path: Path, value: str, means: bool) -> None:
    """As a quoted value in YAML or JSON. Every word used to count as true."""
    trainer = trainer_of(tmp_path, "bert", share_input_embeddings=value)
    assert trainer.args.share_input_embeddings is means
    assert ("bert.embeddings.word_embeddings.weight" in trainer.shared_names) is means
