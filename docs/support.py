"""Makes the page of what trains, what is proved and what is refused, by trying it.

Each cell is one message of a tiny model, which a defense either makes or refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from mkdocs.structure.files import File, Files
from torch import Tensor, nn
from transformers.utils import logging

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.heads.making import HEADS
from hf_gradguard.models import TASKS, label_kind, task_of
from hf_gradguard.recommend.head_trials import why_no_head
from hf_gradguard.recommend.recommendation import check_accuracies
from hf_gradguard.recommend.trial_settings import TrialSettings
from hf_gradguard.registry import DEFENSES
from hf_gradguard.testing.small import small_tokenizer
from hf_gradguard.train import check_task

PAGE = "support.md"
HEAD = """# What is supported

This page is made by trying it: each cell is one message of a tiny model.

- **proved**: it trains, and every row is protected by proof.
- **trains**: it trains. What protects, and how far, was [measured](choose.md).
- **refused**: with the reason, and the way out. [What else is refused](refused.md).

"""
PRIVATE = {"per_sample": True, "noise_multiplier": 1.5}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "`dp_sgd` with `per_sample=True`": ("dp_sgd", PRIVATE),
    "the same with `correlated=True`": ("dp_sgd", {**PRIVATE, "correlated": True, "messages": 4}),
    **{f"`{name}`": (name, {}) for name in DEFENSES if not name.endswith("_published")},
}
"""Rows of the table: defenses with their settings."""

Task = tuple[nn.Module, dict[str, Tensor]]


def on_files(files: Files, config: Any) -> Files:
    files.append(File.generated(config, PAGE, content=page()))
    return files


def page() -> str:
    """The page, as Markdown."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        tasks = tiny_tasks()
        lines = [HEAD + "## Defenses\n", *_header(tasks, "defense")]
        for row, (name, settings) in ROWS.items():
            cells = [message(name, settings, *task) for task in tasks.values()]
            lines.append(f"| {row} | {' | '.join(cells)} |")
        lines += ["\n## Heads and commands\n", *_header(tasks, "what")]
        for row, takes in COMMANDS.items():
            cells = [takes(model) for model, _ in tasks.values()]
            lines.append(f"| {row} | {' | '.join(cells)} |")
    finally:
        logging.set_verbosity(verbosity)
    return "\n".join(lines) + "\n"


def _header(tasks: dict[str, Task], first: str) -> list[str]:
    return [f"| {first} | {' | '.join(tasks)} |", "|---" * (1 + len(tasks)) + "|"]


def message(name: str, settings: dict[str, Any], model: nn.Module, batch: dict[str, Tensor]) -> str:
    """Whether a defense makes a message of a batch, and proves something of each row."""
    defense = make_defense(name, **settings)
    try:
        is_text = "input_ids" in batch
        defense.prepare(model, small_tokenizer() if is_text else None)
        needs = defense.facts.needs_second_order
        defense(GradientMap(model, batch, second_order=needs))
    except (ValueError, NotImplementedError):
        return "refused"
    return "**proved**" if getattr(defense, "per_sample", False) else "trains"


def _by_check(check: Callable[[nn.Module], None]) -> Callable[[nn.Module], str]:
    def takes(model: nn.Module) -> str:
        try:
            check(model)
        except ValueError:
            return "refused"
        return "trains"

    return takes


def _head(model: nn.Module) -> str:
    return "**proved**" if _task(model) in HEADS else "refused"


def _task(model: nn.Module) -> str:
    task = task_of(model)
    assert task is not None
    return task.name


def _tries_head(model: nn.Module) -> str:
    return "refused" if why_no_head(model, ["public samples"], TrialSettings()) else "**proved**"


def _trains(model: nn.Module) -> None:
    task = TASKS[_task(model)]
    check_task(task.name, None if task.own_labels else label_kind(model))


def _trains_head(model: nn.Module) -> str:
    return _head(model) if _by_check(_trains)(model) == "trains" else "refused"


COMMANDS: dict[str, Callable[[nn.Module], str]] = {
    "[`private_head`](head.md)": _head,
    "[`gradguard train --head`](train.md#a-head-by-proof)": _trains_head,
    "[`gradguard train --defense`](train.md)": _by_check(_trains),
    "[`gradguard recommend`](choose.md): heads": _tries_head,
    "`gradguard recommend`: whole models": _by_check(check_accuracies),
}
"""Rows of the second table, and what each says of a model."""


def tiny_tasks() -> dict[str, Task]:
    """A tiny model with a batch for each task."""
    torch.manual_seed(0)
    tokenizer, t = small_tokenizer(), transformers
    batch = dict(tokenizer(["word3 word1 word9", "word2 word5"], padding=True, return_tensors="pt"))
    batch.pop("token_type_ids", None)
    ids = batch["input_ids"]
    words = ids.masked_fill(batch["attention_mask"] == 0, -100)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = {**sizes, "vocab_size": len(tokenizer), "intermediate_size": 40, "pad_token_id": 0}
    bert["max_position_embeddings"] = 16
    gpt2 = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16, "pad_token_id": 0}
    t5 = {"d_model": 32, "d_kv": 16, "d_ff": 40, "num_layers": 1, "num_heads": 2}
    t5 |= {"vocab_size": len(tokenizer), "decoder_start_token_id": 0, "pad_token_id": 0}
    several = t.BertConfig(num_labels=3, problem_type="multi_label_classification", **bert)
    models = {
        "text, one class": t.BertForSequenceClassification(t.BertConfig(num_labels=3, **bert)),
        "text, several classes": t.BertForSequenceClassification(several),
        "text, a number": t.BertForSequenceClassification(t.BertConfig(num_labels=1, **bert)),
        "words": t.BertForTokenClassification(t.BertConfig(num_labels=3, **bert)),
        "language model": t.GPT2LMHeadModel(t.GPT2Config(vocab_size=len(tokenizer), **gpt2)),
        "masked words": t.BertForMaskedLM(t.BertConfig(**bert)),
        "text to text": t.T5ForConditionalGeneration(t.T5Config(**t5)),
        "image, one class": t.ViTForImageClassification(
            t.ViTConfig(image_size=8, patch_size=4, num_labels=3, intermediate_size=40, **sizes)
        ),
    }
    labels = [
        torch.tensor([2, 0]), torch.tensor([[1.0, 0, 1], [0, 0, 1]]), torch.tensor([0.2, -0.5]),
        words.where(words < 0, words % 3), words, words, words, torch.tensor([2, 0]),
    ]  # fmt: skip
    tasks = {
        name: (model.eval(), {**batch, "labels": label})
        for (name, model), label in zip(models.items(), labels, strict=True)
    }
    images, label = tasks["image, one class"]
    tasks["image, one class"] = images, {"pixel_values": torch.rand(2, 3, 8, 8), **label}
    for name in batch:
        del tasks["image, one class"][1][name]
    return tasks
