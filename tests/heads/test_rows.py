"""Rows of texts, images or words become rows of features, once, and a Trainer trains on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Value
from examples import example_names
from torch import Tensor, nn
from transformers import BertTokenizer

from hf_gradguard import GradGuardConfig, GradGuardTrainer, make_defense
from hf_gradguard.gradient_map import GradientMap
from hf_gradguard.gradient_map.per_sample.clipping import clipped_sum
from hf_gradguard.heads import PrivateHead, private_head
from hf_gradguard.heads.head import collate_tokens

PUBLIC = ["a good film", "a bad film", "the plot is slow", "it is a joke", "very warm", "dull"]
TEXTS = ["a fine film", "the plot is long and dull", "a joke", "slow and warm"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_head(**settings: Any) -> PrivateHead:
    names = example_names("model tokenizer")
    settings = {"processing_class": names["tokenizer"], "num_labels": 2} | settings
    return private_head(names["model"], settings.pop("public", PUBLIC), **settings)


def rows_of(texts: list[str] = TEXTS, **columns: Any) -> list[dict[str, Any]]:
    labels = [place % 2 for place in range(len(texts))]
    return [{"text": text, "label": label} for text, label in zip(texts, labels, strict=True)]


class Counted:
    """How many samples a head's encoder has seen."""

    def __init__(self, head: PrivateHead) -> None:
        self.samples = 0
        head.encoder.register_forward_pre_hook(self._count, with_kwargs=True)  # type: ignore[union-attr]

    def _count(self, _module: nn.Module, _inputs: Any, named: dict[str, Tensor]) -> None:
        self.samples += len(named["input_ids"])


def test_features_and_labels_are_those_of_the_rows() -> None:
    head = make_head()
    prepared = head.prepare_dataset(rows_of())
    assert prepared.column_names == ["features", "labels"]
    torch.testing.assert_close(prepared[:]["features"], head.features_of(TEXTS))
    assert prepared[:]["labels"].tolist() == [0, 1, 0, 1]
    assert head.prepare_dataset(prepared) is prepared


@pytest.mark.parametrize("change", ["weights", "directions", "length", "tokenizer", "texts"])
def test_features_are_made_once_for_what_decides_them(change: str) -> None:
    head = make_head()
    counted = Counted(head)
    head.prepare_dataset(rows_of())
    assert counted.samples == len(TEXTS)
    others = [{"text": text, "label": 1, "more": "x"} for text in TEXTS]
    again = head.prepare_dataset(others)  # labels and other columns decide nothing
    assert (counted.samples, again[:]["labels"].tolist()) == (len(TEXTS), [1] * 4)
    if change == "weights":
        next(head.encoder.parameters()).data[5] += 1e-3  # type: ignore[union-attr]
    elif change == "directions":
        head.set_directions(nn.Linear(head.config.num_features, 2))
    elif change == "length":
        head.config.max_length = 3
    elif change == "tokenizer":
        head.processing_class.backend_tokenizer.no_padding()
        head.processing_class.backend_tokenizer.enable_truncation(4)
    else:
        others[0]["text"] = "a plot"
    head.prepare_dataset(others)
    assert counted.samples == 2 * len(TEXTS)


def test_a_trained_head_makes_the_same_features() -> None:
    head = make_head()
    counted = Counted(head)
    head.prepare_dataset(rows_of())
    nn.init.normal_(head.head.weight)
    head.prepare_dataset(rows_of())
    assert counted.samples == len(TEXTS)


def test_a_cache_of_texts_has_neither_texts_nor_other_names(cache: Path) -> None:
    make_head().prepare_dataset(rows_of())
    (file,) = (cache / "gradguard_heads").iterdir()
    assert len(file.stem) == 64
    assert b"film" not in file.read_bytes()


@pytest.mark.parametrize(
    ("first", "second"),
    [("sentence1", "sentence2"), ("question", "sentence"), ("premise", "hypothesis")],
)
def test_pairs_are_found_by_their_columns(first: str, second: str) -> None:
    tokenizer = BertTokenizer(vocab=example_names("tokenizer")["tokenizer"].get_vocab())
    head = make_head(pairs=True, processing_class=tokenizer)
    pairs = list(zip(TEXTS[:2], TEXTS[2:], strict=True))
    rows = [{"idx": 0, second: b, first: a, "label": 1} for a, b in pairs]
    prepared = head.prepare_dataset(Dataset.from_list(rows))
    torch.testing.assert_close(prepared[:]["features"], head.features_of(pairs))
    with pytest.raises(ValueError, match="single texts"):
        make_head().prepare_dataset(rows)
    with pytest.raises(ValueError, match="pairs of texts"):
        head.prepare_dataset(rows_of())


def test_labels_by_name_by_class_and_several() -> None:
    head = make_head(labels=["bad", "good"], num_labels=None)
    named = [
        {"sentence": text, "label": name}
        for text, name in zip(TEXTS, ["good", "bad"] * 2, strict=True)
    ]
    assert head.prepare_dataset(named)[:]["labels"].tolist() == [1, 0, 1, 0]
    with pytest.raises(ValueError, match="classes"):
        head.prepare_dataset([{"text": "a film", "label": "fine"}])
    features = Features({"text": Value("string"), "label": ClassLabel(names=["bad", "good"])})
    table = Dataset.from_dict({"text": TEXTS, "label": ["bad"] * 4}, features=features)
    assert head.prepare_dataset(table)[:]["labels"].tolist() == [0] * 4
    several = make_head(labels=["x", "y", "z"], num_labels=None,
                        problem_type="multi_label_classification")  # fmt: skip
    rows = [
        {"text": text, "labels": labels}
        for text, labels in zip(TEXTS, [[], ["x", "z"], ["y"], [1]], strict=True)
    ]
    expected = [[0, 0, 0], [1, 0, 1], [0, 1, 0], [0, 1, 0]]
    assert several.prepare_dataset(rows)[:]["labels"].tolist() == expected
    rows = [{"text": text, "labels": row} for text, row in zip(TEXTS, expected, strict=True)]
    assert several.prepare_dataset(rows)[:]["labels"].tolist() == expected


def test_what_has_no_texts_or_no_length_is_refused() -> None:
    head = make_head()
    with pytest.raises(ValueError, match=r"No column of \['title', 'label'\] has texts"):
        head.prepare_dataset([{"title": "a film", "label": 1}])
    with pytest.raises(ValueError, match="stream"):
        head.prepare_dataset(iter(rows_of()))
    with pytest.raises(ValueError, match="lists of words"):
        make_head(task="token-classification").prepare_dataset(rows_of())


WORDS = [["a", "fine", "film"], ["the", "plot"], ["a", "joke", "and", "slow", "plot"]]
TAGS = [[0, 1, 2], [0, 1], [2, 2, 0, 1, 0]]


def tagged_rows() -> list[dict[str, Any]]:
    return [{"tokens": words, "ner_tags": tags} for words, tags in zip(WORDS, TAGS, strict=True)]


def test_words_have_features_of_their_first_tokens() -> None:
    head = make_head(task="token-classification", num_labels=3)
    prepared = head.prepare_dataset(tagged_rows())
    for place, words in enumerate(WORDS):
        encoded = head.processing_class([words], is_split_into_words=True, return_tensors="pt")
        row = prepared[place]
        torch.testing.assert_close(row["features"], head.encode(**encoded)[0, 1:-1])
        assert row["labels"].tolist() == TAGS[place]


def test_a_text_of_words_is_clipped_as_one_row() -> None:
    """Against backward passes text by text: its gradient is that of its words' mean loss."""
    head = make_head(task="token-classification", num_labels=3)
    rows = list(head.prepare_dataset(tagged_rows()))
    expected, norms = [], []
    for row in rows:
        loss = nn.functional.cross_entropy(head.head(row["features"]), row["labels"])
        expected.append(torch.autograd.grad(loss, head.head.weight)[0])
        norms.append(float(expected[-1].norm()))
    clip = sorted(norms)[1]
    batch = collate_tokens(rows)
    assert batch["features"].shape[:2] == (3, 5)
    gmap = GradientMap(head, batch, second_order=False, needs_input=False)
    (total,) = clipped_sum(gmap, clip).total.values()
    clipped = [row * min(1, clip / norm) for row, norm in zip(expected, norms, strict=True)]
    torch.testing.assert_close(total, torch.stack(clipped).sum(0).to(total), rtol=1e-4, atol=1e-6)


def arguments(head: PrivateHead, folder: Path, rows: int, **settings: Any) -> GradGuardConfig:
    quiet = {"use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 2}
    args: GradGuardConfig = head.training_arguments(str(folder), num_rows=rows, **quiet | settings)
    return args


def test_a_trainer_asks_the_model_for_its_rows(tmp_path: Path) -> None:
    """For training, evaluation and prediction, each sample once."""
    head = make_head()
    counted = Counted(head)
    texts = [f"a {word} film" for word in [*TEXTS[1].split(), "fine", "joke"]]
    args = arguments(head, tmp_path, 8)
    trainer = GradGuardTrainer(
        head, args, train_dataset=rows_of(texts), eval_dataset={"some": rows_of()},
        processing_class=head.processing_class,
    )  # fmt: skip
    trainer.train()
    assert counted.samples == len(texts) + len(TEXTS)
    assert bool(head.head.weight.any())
    first = trainer.evaluate()
    assert trainer.evaluate(rows_of())["eval_loss"] == first["eval_some_loss"]
    assert counted.samples == len(texts) + len(TEXTS)
    predicted = trainer.predict([{"text": "a plot"}])
    expected = head(features=head.features_of(["a plot"])).logits
    np.testing.assert_allclose(predicted.predictions, expected.detach().numpy(), rtol=1e-5)


def test_a_stock_training_loop_is_one_message_for_each_row(tmp_path: Path) -> None:
    """The defaults prove what they say: each row is in one message, a Gaussian mechanism."""
    head = make_head()
    trainer = GradGuardTrainer(
        head, arguments(head, tmp_path, 4), train_dataset=rows_of(),
        processing_class=head.processing_class,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 2
    assert trainer.private_rows is not None
    assert trainer.private_rows.epsilon == pytest.approx(2.754, abs=2e-3)
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert "a linear head of 6 numbers, on 2 directions" in card
    assert "6 samples of a list" in card
    assert "ε = 2.75" in card


def test_arguments_are_those_that_need_no_search(tmp_path: Path) -> None:
    head = make_head()
    args = head.training_arguments(str(tmp_path), num_rows=3200, use_cpu=True)
    assert args.defense_kwargs == {
        "per_sample": True, "correlated": True, "clip": 0.3, "delta": 1e-5,
        "noise_multiplier": 1.5, "participations": 1,
    }  # fmt: skip
    assert (args.optim, args.lr_scheduler_type, args.max_grad_norm) == ("sgd", "linear", 0.0)
    assert (args.per_device_train_batch_size, args.num_train_epochs) == (16, 1.0)
    defense = make_defense(args.defense, **args.defense_kwargs)
    assert defense.correlated  # type: ignore[attr-defined]


def test_arguments_may_be_others(tmp_path: Path) -> None:
    head = make_head()

    def made(**settings: Any) -> GradGuardConfig:
        args: GradGuardConfig = head.training_arguments(
            str(tmp_path), num_rows=3200, use_cpu=True, **settings
        )
        return args

    drawn = made(sampling="balls_in_bins", noise_multiplier=0.95, num_train_epochs=2.5)
    assert isinstance(drawn.defense_kwargs, dict)
    assert drawn.defense_kwargs["sampling"] == "balls_in_bins"
    assert drawn.defense_kwargs["participations"] == 3
    aimed = made(target_epsilon=2.0, learning_rate=3.0, warmup_steps=5).defense_kwargs
    assert isinstance(aimed, dict)
    assert "noise_multiplier" not in aimed
    stricter = made(target_epsilon=1.0).learning_rate
    assert stricter < made(target_epsilon=2.0).learning_rate < made().learning_rate
    assert made(max_steps=600).defense_kwargs["participations"] == 3  # type: ignore[index]
    independent = made(correlated=False).defense_kwargs
    assert isinstance(independent, dict)
    assert "participations" not in independent
    plain = made(noise_multiplier=0)
    assert (plain.defense, plain.defense_kwargs) == ("none", None)
    own = made(defense="gaussian_noise", defense_kwargs={"relative_scale": 5.0})
    assert (own.defense, own.defense_kwargs) == ("gaussian_noise", {"relative_scale": 5.0})
    with pytest.raises(ValueError, match="too few for messages of 16"):
        head.training_arguments(str(tmp_path), num_rows=10, use_cpu=True)
    with pytest.raises(TypeError, match="noise_multiplyer"):
        made(noise_multiplyer=2.0)
