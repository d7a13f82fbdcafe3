"""The model card says what was protected, how, and what was not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_task, token_batch
from huggingface_hub import ModelCard

from hf_gradguard import GradGuardConfig, GradGuardTrainer, chain, make_defense


def card_of(
    folder: Path, task: str = "bert", calls: int = 1, defense: Any = None, **settings: Any
) -> str:
    """The card's text, loaded and checked for a header."""
    model, _ = make_task(task, dtype=torch.float32)
    args = GradGuardConfig(output_dir=str(folder), use_cpu=True, report_to="none", **settings)
    trainer = GradGuardTrainer(model, args, defense=defense, train_dataset=[{"labels": 0}])
    for _ in range(calls):
        trainer.create_model_card(model_name="tiny", license="mit")
    card = ModelCard.load(folder / "README.md")
    assert card.data.license == "mit"
    assert "# tiny" in card.text
    return card.text


def test_card_names_defense_and_settings(tmp_path: Path) -> None:
    text = card_of(
        tmp_path,
        defense="optimal_noise",
        defense_kwargs={"scale": 0.125, "num_probes": 7},
        clients_per_process=3,
    )
    assert "- Defense: `optimal_noise`" in text
    assert '"scale": 0.125' in text
    assert '"num_probes": 7' in text
    assert "relative_scale" not in text
    assert "1 rank(s) with 3 client(s) each" in text
    assert "### What is not protected" in text
    assert "Gradients were shared unprotected" not in text
    assert "fixed seed" not in text


@pytest.mark.parametrize(
    ("task", "names"),
    [
        ("bert", ["bert.embeddings.word_embeddings.weight"]),
        ("gpt2_lm", ["transformer.wte.weight"]),
        ("t5", ["shared.weight"]),
    ],
)
def test_card_names_what_was_withheld(tmp_path: Path, task: str, names: list[str]) -> None:
    text = card_of(tmp_path, task, defense="gaussian_noise")
    assert all(f"`{name}`" in text for name in names)
    assert "neither shared nor trained" in text


@pytest.mark.parametrize(
    ("task", "settings"),
    [("vit", {}), ("bert_lora", {}), ("bert", {"share_input_embeddings": True})],
)
def test_card_says_when_nothing_was_withheld(
    tmp_path: Path, task: str, settings: dict[str, Any]
) -> None:
    assert "No parameter was withheld." in card_of(
        tmp_path, task, defense="gaussian_noise", **settings
    )


def test_card_of_an_unprotected_run_is_loud(tmp_path: Path) -> None:
    text = card_of(tmp_path, defense="none")
    assert "**Gradients were shared unprotected.**" in text
    assert "protected before they left" not in text


def test_card_of_a_run_with_a_noise_seed_is_loud(tmp_path: Path) -> None:
    text = card_of(tmp_path, defense="gaussian_noise", noise_seed=0)
    assert "**The noise was drawn from a fixed seed" in text
    assert "new key" not in text


def test_card_of_a_chain_names_its_parts(tmp_path: Path) -> None:
    text = card_of(
        tmp_path,
        defense=chain(
            make_defense("pruning", ratio=0.5), make_defense("gaussian_noise", scale=2.0)
        ),
    )
    assert "`chain`" in text
    assert "Pruning(" in text
    assert "ratio=0.5" in text
    assert "GaussianNoise(scale=2.0" in text


def test_second_call_does_not_repeat_the_section(tmp_path: Path) -> None:
    text = card_of(tmp_path, defense="pruning", calls=2)
    assert text.count("## Privacy") == 1
    assert text.count("### What is not protected") == 1
    assert text.count("- Repetition: an attacker who sees many messages") == 1


def test_card_is_written_when_training_saves(tmp_path: Path) -> None:
    """Pushing to the Hub writes the card through the same method, so a trained model's card has the
    section too.
    """
    model, _ = make_task("bert", dtype=torch.float32)
    batch = token_batch(4)
    rows = [{key: value[index] for key, value in batch.items()} for index in range(4)]
    args = GradGuardConfig(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", max_steps=1, disable_tqdm=True
    )
    trainer = GradGuardTrainer(model, args, defense="quantization", train_dataset=rows)
    trainer.train()
    trainer.create_model_card()
    text = (tmp_path / "README.md").read_text()
    assert "## Training procedure" in text
    assert text.index("## Training procedure") < text.index("## Privacy")


def test_card_has_tag_start_and_figures(tmp_path: Path) -> None:
    model, batch = make_task("bert", dtype=torch.float32, batch_size=4)
    model.save_pretrained(tmp_path / "start")
    loaded = type(model).from_pretrained(tmp_path / "start")
    rows = [{key: value[k] for key, value in batch.items()} for k in range(4)]
    args = GradGuardConfig(str(tmp_path / "out"), use_cpu=True, report_to="none", disable_tqdm=True)
    trainer = GradGuardTrainer(
        loaded, args, defense="pruning", train_dataset=rows, eval_dataset=rows,
        compute_metrics=lambda found: {"accuracy": 0.625},
    )  # fmt: skip
    trainer.evaluate()
    trainer.create_model_card(model_name="tiny")
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert "gradguard" in card.data.tags
    assert card.data.metrics == ["accuracy"]
    assert "## Evaluation\n\n- accuracy: 0.625" in card.text
    assert "fine-tuned from `start`" in card.text
    assert "from scratch" not in card.text
    assert "One process trained, so nothing left it" in card.text


def test_card_of_a_new_model_is_of_no_other(tmp_path: Path) -> None:
    text = card_of(tmp_path, defense="pruning")
    assert "fine-tuned" not in text
    assert "was trained from scratch" in text
