"""Audits of every head that people train, from folders and from Trainers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
)

from hf_gradguard import GradGuardConfig, GradGuardTrainer
from hf_gradguard.audit import audit, summarize
from hf_gradguard.audit.client import Client, Shared, Upload
from hf_gradguard.audit.text_samples import with_labels
from hf_gradguard.cli import main
from hf_gradguard.data.samples import load_samples
from hf_gradguard.defenses import make_defense
from hf_gradguard.models import label_kind, load_model, task_of
from hf_gradguard.testing.small import small_tokenizer

pytestmark = pytest.mark.usefixtures("few_probes")

TOKENIZER = small_tokenizer()
TOKENIZER.add_special_tokens({"mask_token": "[MASK]"})
SIZE = len(TOKENIZER)
ENCODER = {
    "vocab_size": SIZE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 40, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
TEXTS = [" ".join(f"word{(7 * k + 3 * place) % 60}" for place in range(6)) for k in range(6)]


def gpt2() -> nn.Module:
    config = GPT2Config(
        vocab_size=SIZE, n_embd=32, n_layer=2, n_head=2, n_positions=32,
        bos_token_id=2, eos_token_id=3, pad_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def bart() -> nn.Module:
    config = BartConfig(
        vocab_size=SIZE, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=40, decoder_ffn_dim=40,
        max_position_embeddings=32, pad_token_id=0, bos_token_id=2, eos_token_id=3,
        decoder_start_token_id=3, forced_eos_token_id=3,
    )  # fmt: skip
    return BartForConditionalGeneration(config)


HEADS: dict[str, Any] = {
    "text-generation": (gpt2, lambda text: (text, None)),
    "fill-mask": (lambda: BertForMaskedLM(BertConfig(**ENCODER)), lambda text: (text, None)),
    "token-classification": (
        lambda: BertForTokenClassification(BertConfig(**ENCODER, num_labels=4)),
        lambda text: (text.split(), [int(word[4:]) % 4 for word in text.split()]),
    ),
    "text2text-generation": (bart, lambda text: (text, " ".join(text.split()[::-2]))),
    "several": (
        lambda: BertForSequenceClassification(
            BertConfig(**ENCODER, num_labels=4, problem_type="multi_label_classification")
        ),
        lambda text: (text, [1.0, 0.0, float(len(text) % 2), 0.0]),
    ),
    "number": (
        lambda: BertForSequenceClassification(BertConfig(**ENCODER, num_labels=1)),
        lambda text: (text, len(text) / 40),
    ),
}


def made(head: str) -> tuple[nn.Module, list[Any]]:
    build, sample = HEADS[head]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model, [sample(text) for text in TEXTS]


@pytest.mark.parametrize("head", HEADS)
def test_every_head_is_read(head: str, tmp_path: Path) -> None:
    """Span reads the undefended text, candidates names it, and who cannot be told labels says
    so.
    """
    model, samples = made(head)
    assert (task := task_of(model)) is not None
    assert task.name == (head if "-" in head else "text-classification")
    result = audit(
        model, TOKENIZER, samples[:2], "none", "span,tag:steps=2",
        candidates=samples, output=tmp_path / "out",
    )  # fmt: skip
    summary = summarize(result)
    rows = {row.attack.split(":")[0]: row for row in summary.rows}
    assert rows["span"].scores["token_f1"].mean == 1
    assert rows["candidates"].scores["percentile"].mean == 1
    assert not summary.crashes
    if head in ("text-generation", "fill-mask", "text2text-generation"):
        (reason,) = rows["tag"].reasons
        assert "labels are its text" in reason
        assert "so they are not granted" in " ".join(result.settings["threat_model"])
        assert result.messages[0]["labels"] == [None]
    else:
        assert rows["tag"].scores
    # labels that are no classes are not read off as if they were
    assert all("no_labels" in row and "labels" not in row for row in result.shared)


@pytest.mark.parametrize("head", ["several", "number", "token-classification"])
def test_labels_that_nobody_grants_are_asked_for(head: str, tmp_path: Path) -> None:
    model, samples = made(head)
    result = audit(
        model, TOKENIZER, samples[:1], "none", "span,tag:steps=2",
        labels_known=False, output=tmp_path / "out",
    )  # fmt: skip
    cells = {cell["attack"].split(":")[0]: cell for cell in result.cells}
    assert cells["span"]["scores"]["token_f1"] == [1.0]
    assert "Pass labels" in cells["tag"]["reason"]


def test_candidates_without_their_words_labels_are_refused(tmp_path: Path) -> None:
    model, samples = made("token-classification")
    with pytest.raises(ValueError, match="give a list of words and a list of as many"):
        audit(model, TOKENIZER, samples[:1], "none", candidates=TEXTS, output=tmp_path / "out")


def test_labels_of_heads() -> None:
    """Against labels worked out by hand."""
    model, _ = made("token-classification")
    encoded = TOKENIZER([["word1", "word2"]], is_split_into_words=True, return_tensors="pt")
    batch = with_labels(model, TOKENIZER, encoded, [(["word1", "word2"], [3, 1])])
    assert batch["labels"].tolist() == [[-100, 3, 1, -100]]
    with pytest.raises(ValueError, match="1 labels for 2 words"):
        with_labels(model, TOKENIZER, encoded, [(["word1", "word2"], [3])])

    config = BertConfig(**ENCODER, label2id={"bad": 0, "good": 1}, id2label={0: "bad", 1: "good"})
    model = BertForSequenceClassification(config)
    named = [("word1", "good"), ("word2", 0), ("word3", "bad")]
    assert with_labels(model, TOKENIZER, {}, named)["labels"].tolist() == [1, 0, 0]
    with pytest.raises(ValueError, match="classes are: bad, good"):
        with_labels(model, TOKENIZER, {}, [("word1", "fine")])

    model, _ = made("text-generation")
    encoded = TOKENIZER(["word1", "word2 word3"], padding=True, return_tensors="pt")
    labels = with_labels(model, TOKENIZER, encoded, [("", None)] * 2)["labels"]
    assert labels.tolist() == [[2, 5, 3, -100], [2, 6, 7, 3]]

    model, _ = made("fill-mask")
    encoded = TOKENIZER(TEXTS, return_tensors="pt")
    one, again = (with_labels(model, TOKENIZER, encoded, TEXTS, seed=3) for _ in range(2))
    assert torch.equal(one["input_ids"], again["input_ids"])
    hidden = one["labels"] != -100
    assert hidden.sum(1).tolist() == [1] * len(TEXTS)  # 15 % of six words
    assert torch.equal(one["labels"][hidden], encoded["input_ids"][hidden])
    assert torch.equal(one["input_ids"][~hidden], encoded["input_ids"][~hidden])

    model, _ = made("several")
    with pytest.raises(ValueError, match="one 0 or 1 for each of 4 classes"):
        with_labels(model, TOKENIZER, encoded, [("", [0, 2])] * len(TEXTS))


def test_columns_of_labels(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    rows = [
        {"text": "a b", "labels": ["y", "x"], "label": 0.25, "tokens": ["a", "b"],
         "ner_tags": ["x", "z"], "target": "b a"},
        {"text": "c d", "labels": ["z"], "label": 1.5, "tokens": ["c", "d"],
         "ner_tags": ["z", "z"], "target": "d c"},
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, rows)))
    classes = {"x": 0, "y": 1, "z": 2}

    def drawn(labels: str | None) -> list[Any]:
        found = load_samples(str(path), kind="text", count=2, labels=labels, classes=classes)
        return sorted(found, key=str)

    assert drawn("several") == [("a b", [1.0, 1.0, 0.0]), ("c d", [0.0, 0.0, 1.0])]
    assert drawn("number") == [("a b", 0.25), ("c d", 1.5)]
    assert drawn("token") == [(["a", "b"], [0, 2]), (["c", "d"], [2, 2])]
    assert drawn("text") == [("a b", "b a"), ("c d", "d c")]
    assert drawn(None) == [("a b", None), ("c d", None)]


def test_the_command_takes_adapters_of_a_language_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _ = made("text-generation")
    base, folder = tmp_path / "base", tmp_path / "adapters"
    model.save_pretrained(base)
    TOKENIZER.save_pretrained(base)
    own, _ = load_model(str(base))
    assert type(own) is GPT2LMHeadModel  # by its own head, and not a classifier
    assert label_kind(load_model(str(base), "text-classification")[0]) == "class"
    with pytest.raises(ValueError, match=r"no model for fill-mask"):
        load_model(str(base), "fill-mask")
    adapted = get_peft_model(own, LoraConfig(task_type="CAUSAL_LM", r=16, init_lora_weights=False))
    adapted.save_pretrained(folder)
    (tmp_path / "texts.csv").write_text("text\n" + "\n".join(TEXTS))
    arguments = ["--model", folder, "--dataset", tmp_path / "texts.csv", "--samples", 1]
    arguments += ["--decoys", 4, "--output", tmp_path / "out"]
    assert main(["audit", *map(str, arguments)]) == 0
    assert "\nnone     100 %" in capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert result["settings"]["task"] == "text-generation"
    scores = {cell["attack"]: cell.get("scores") for cell in result["cells"]}
    assert scores["candidates"]["token_f1"] == [1.0]


def test_the_trainings_own_sizes(tmp_path: Path) -> None:
    from hf_gradguard.audit.settings import read_settings

    given = {"model": str(tmp_path), "dataset": "d", "output": "o"}
    assert read_settings(given).batch_size == 1
    (tmp_path / "trainer_state.json").write_text(json.dumps({"train_batch_size": 4}))
    assert read_settings(given).batch_size == 4
    file = tmp_path / "training.yaml"
    file.write_text(
        "per_device_train_batch_size: 2\ngradient_accumulation_steps: 3\nlearning_rate: 0.1\n"
        "defense: pruning\ndefense_kwargs: {ratio: 0.9}\n"
    )
    found = read_settings({**given, "training": str(file)})
    assert (found.batch_size, found.accumulation) == (2, 3)
    assert found.defense == {"pruning": {"ratio": 0.9}}
    assert read_settings({**given, "training": str(file), "batch_size": 8}).batch_size == 8


def trainer_of(tmp_path: Path, **settings: Any) -> GradGuardTrainer:
    model, _ = made("text-generation")
    rows = Dataset.from_list([{"input_ids": TOKENIZER(text)["input_ids"]} for text in TEXTS])
    weak = {"defense": "gaussian_noise", "defense_kwargs": {"scale": 1e-4}}
    args = GradGuardConfig(
        str(tmp_path), use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
        max_steps=1, **(weak | settings),
    )  # fmt: skip
    return GradGuardTrainer(
        model=model, args=args, train_dataset=rows, processing_class=TOKENIZER,
        data_collator=DataCollatorForLanguageModeling(TOKENIZER, mlm=False),
    )  # fmt: skip


def test_a_trainer_is_audited_as_it_trains(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=2)
    trainer.model.eval()
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    result = audit(trainer, samples=2, attacks=(), output=tmp_path / "out")
    assert result.settings["batch_size"] == 1
    assert result.settings["accumulation"] == 2
    assert result.settings["training_mode"]
    assert not trainer.model.training  # left as it was
    assert all(torch.equal(before[n], p) for n, p in trainer.model.named_parameters())
    assert list(result.defenses) == ["none", "gaussian_noise:scale=0.0001"]
    cells = {(cell["defense"], cell["attack"]): cell for cell in result.cells}
    assert cells["none", "candidates"]["scores"]["token_f1"] == [1.0, 1.0]
    assert len(result.messages[0]["labels"]) == 2
    with pytest.raises(ValueError, match="do not fill messages of 2"):
        audit(trainer, samples=3, output=tmp_path / "out")
    with pytest.raises(ValueError, match="leave lengths_known"):
        audit(trainer, samples=2, lengths_known=False, output=tmp_path / "out")
    with pytest.raises(ValueError, match="not both"):
        audit(trainer.model, trainer=trainer, output=tmp_path / "out")


def test_a_trainers_defense_remembers(tmp_path: Path) -> None:
    """Error feedback adds what was left out before: the audited message holds it."""
    kept = {"ratio": 0.9, "error_feedback": True}
    trainer = trainer_of(
        tmp_path, per_device_train_batch_size=1, defense="pruning", defense_kwargs=kept
    )
    trainer.train()
    (client,) = trainer._clients
    state = client.defense.flatten(client.state)
    assert state
    few = {"samples": 1, "attacks": "embedding_rows", "candidates": []}
    result = audit(trainer, output=tmp_path / "out", **few)
    label = next(one for one in result.defenses if one.startswith("pruning"))
    (row,) = (row for row in result.shared if row["defense"] == label)
    alone = {"other": make_defense("pruning", ratio=0.9)}
    forgetful = audit(trainer, defenses=alone, output=tmp_path / "other", **few)
    (other,) = (row for row in forgetful.shared if row["defense"] == "other")
    assert abs(row["relative_error"] - other["relative_error"]) > 1e-3
    now = trainer._clients[0].state
    assert now is client.state
    assert client.defense.flatten(now).keys() == state.keys()  # nothing was added by looking


def test_accumulated_messages() -> None:
    """The mean of what is shared of the parts: their mean gradient, and half the noise's variance
    of two.
    """
    model, samples = made("several")
    texts = [text for text, _ in samples[:4]]
    batch = dict(TOKENIZER(texts, return_tensors="pt"))
    batch["labels"] = torch.tensor([label for _, label in samples[:4]])
    whole = Client(model, batch, Shared(), (0,)).gmap.gradient()
    client = Client(model, batch, Shared(micro_batches=2), (0,))
    upload = Upload(client, make_defense("gaussian_noise", scale=0.1))
    for name, mean in client.gradient().items():
        assert torch.allclose(mean, whole[name], atol=1e-5)
    assert upload.message.noise is not None
    assert upload.message.noise.added is not None
    added = upload.message.noise.added["classifier.bias"]
    assert torch.allclose(added, torch.tensor(0.005))
    noise = torch.cat([(upload.message[n] - g).flatten() for n, g in client.gradient().items()])
    # 10,000 entries and more: 1 % is the standard error of a deviation at 5,000
    assert len(noise) > 10_000
    assert float(noise.std()) == pytest.approx(0.1 / 2**0.5, rel=0.05)
