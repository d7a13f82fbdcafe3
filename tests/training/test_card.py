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


def trainer_of(folder: Path, defense: Any, task: str = "bert", **settings: Any) -> Any:
    """Of two steps, each of two micro-batches."""
    model, batch = make_task(task, dtype=torch.float32, batch_size=8)
    args = GradGuardConfig(
        str(folder), use_cpu=True, report_to="none", disable_tqdm=True,
        **{"max_steps": 2, "gradient_accumulation_steps": 2, "save_strategy": "no",
           "per_device_train_batch_size": 4, **settings},
    )  # fmt: skip
    rows = [{key: value[k] for key, value in batch.items()} for k in range(8)]
    return GradGuardTrainer(model, args, defense=defense, train_dataset=rows)


def written(trainer: Any) -> str:
    trainer.create_model_card()
    return (Path(trainer.args.output_dir) / "README.md").read_text()


def test_card_of_an_unprotected_run_is_loud(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, "none")
    trainer.train()
    text = written(trainer)
    assert "**Gradients were shared unprotected in 4 of 4 messages of rank 0.**" in text
    assert "protected before they left" not in text


def test_a_defense_that_was_assigned_later_protected_nothing(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, "none")
    trainer.train()
    trainer.defense = "pruning"
    text = written(trainer)
    assert "**Gradients were shared unprotected in 4 of 4 messages of rank 0.**" in text
    assert "`none`, with hf-gradguard: 4 of 4 messages of rank 0" in text
    assert "pruning" not in text


def test_card_has_every_defense_and_what_changed_with_it(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, "none")
    trainer.train()
    trainer.defense = make_defense("pruning", ratio=0.5)
    trainer.args.noise_seed, trainer.args.clients_per_process = 1, 2
    trainer.args.share_input_embeddings = True
    trainer.train()
    text = written(trainer)
    assert "shared unprotected in 4 of 12 messages of rank 0" in text
    for line in (
        "- Defense: `none`, with hf-gradguard: 4 of 12 messages of rank 0",
        "- Defense: `pruning`, with hf-gradguard: 8 of 12 messages of rank 0",
        "- In 4 of 12 messages: Clients: 1 rank(s) with 1 client(s) each; every",
        "- In 8 of 12 messages: Clients: 1 rank(s) with 2 client(s) each; every",
        "- In 4 of 12 messages: Input embeddings (`bert.embeddings.word_embeddings.weight`)",
        "- In 8 of 12 messages: No parameter was withheld.",
        "- In 4 of 12 messages: The noise was drawn by ChaCha20",
        "- In 8 of 12 messages: **The noise was drawn from a fixed seed",
        '\nIn 8 of 12 messages: \n\n```json\n{\n  "defense": "pruning",\n',
        "\n- One process trained",
    ):
        assert line in text


@pytest.mark.parametrize("clients", [1, 3])
def test_one_message_is_counted_for_each_client_and_micro_batch(
    tmp_path: Path, clients: int
) -> None:
    trainer = trainer_of(tmp_path, "pruning", clients_per_process=clients)
    trainer.train()
    assert trainer.shared_messages.by("defense") == {"pruning": 4 * clients}
    trainer.train()
    assert trainer.shared_messages.total == 8 * clients


@pytest.mark.parametrize("case", ["kept back", "nothing counts"])
def test_counts_say_nothing_of_the_data(tmp_path: Path, case: str) -> None:
    if case == "kept back":
        trainer = trainer_of(tmp_path, "gaussian_noise", leakage_limit=1e9)
    else:
        trainer = trainer_of(tmp_path, "pruning", "gpt2_lm", per_device_train_batch_size=2)
        for row in trainer.train_dataset[:6]:
            row["labels"][:] = -100
    trainer.train()
    assert trainer.state.log_history[-1].get("leakage/skipped", 4) == 4
    assert trainer.shared_messages.total == 4


def test_a_message_that_was_refused_is_not_counted(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, "pruning")
    trainer.model.classifier.weight.data.fill_(torch.nan)
    with pytest.raises(FloatingPointError):
        trainer.train()
    assert "Nothing was shared: this Trainer has not trained." in written(trainer)


def test_card_of_an_untrained_trainer_says_so(tmp_path: Path) -> None:
    for defense in ("none", "pruning"):
        text = card_of(tmp_path, defense=defense)
        assert "Nothing was shared: this Trainer has not trained." in text
        assert f"- Defense: `{defense}`, with hf-gradguard\n" in text
        assert "unprotected" not in text
        assert "only protected gradients" not in text


def test_resuming_takes_what_was_shared_before(tmp_path: Path) -> None:
    first = trainer_of(tmp_path, "none", save_strategy="steps", save_steps=1)
    first.train()
    saved = tmp_path / "checkpoint-1"
    file = saved / "gradguard_private_rank0.safetensors"
    assert file.stat().st_mode & 0o777 == 0o600
    other = trainer_of(tmp_path / "other", "pruning")
    other.train(resume_from_checkpoint=str(saved))
    assert other.shared_messages.by("defense") == {"none": 2, "pruning": 2}
    assert "shared unprotected in 2 of 4 messages" in written(other)
    first.train(resume_from_checkpoint=str(saved))  # shares the second step's once more
    assert first.shared_messages.by("defense") == {"none": 6}
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"gradguard_private_rank0\.safetensors is cut off"):
        trainer_of(tmp_path, "pruning").train(resume_from_checkpoint=str(saved))


def test_what_a_checkpoint_does_not_say_is_not_called_protected(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 1}
    trainer_of(tmp_path, "none", **settings).train()
    (tmp_path / "checkpoint-1" / "gradguard_private_rank0.safetensors").unlink()
    for step in (1, 2):  # the second has what the first has not said
        trainer = trainer_of(tmp_path, "pruning", **settings, **{"max_steps": step + 1})
        trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        text = written(trainer)
        assert "leaves out what was shared before a checkpoint that does not say how" in text


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
    (result,) = card.data.eval_results  # the model-index
    assert (result.task_type, result.metric_type) == ("text-classification", "accuracy")
    assert result.metric_value == 0.625
    assert card.data.model_name == "tiny"
    assert "## Evaluation\n\n- accuracy: 0.625" in card.text
    assert "fine-tuned from `start`" in card.text
    assert "from scratch" not in card.text
    assert "One process trained, so nothing left it" in card.text


def test_card_of_a_new_model_is_of_no_other(tmp_path: Path) -> None:
    text = card_of(tmp_path, defense="pruning")
    assert "fine-tuned" not in text
    assert "was trained from scratch" in text
