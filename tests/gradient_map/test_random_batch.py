"""Random batches have a private batch's shapes and nothing of its content."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import LABELS, VOCABULARY, image_batch, make_task, rng, token_batch
from torch import Tensor, nn
from transformers import BertConfig, BertForTokenClassification

from hf_gradguard import GradientMap
from hf_gradguard.gradient_map.domain import IMAGE, TEXT, special_ids
from hf_gradguard.gradient_map.random_batch import random_batch

SPECIAL = [0, 1, 2, 3]


def made(model: nn.Module, batch: dict[str, Any], seed: int = 1) -> dict[str, Any]:
    domain = TEXT if "input_ids" in batch else IMAGE
    return random_batch(domain, model, batch, rng(seed), SPECIAL)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def private(length: int, padded: int, seed: int, left: bool = False) -> dict[str, Tensor]:
    """Two texts between 2 and 3, as BERT's are, of which one is shorter than the other."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCABULARY, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    ids[:, 0], ids[:, -1] = 2, 3
    if padded:
        text = torch.cat([ids[1, : length - padded - 1], torch.tensor([3])])
        fill = torch.zeros(padded, dtype=torch.long)
        ids[1] = torch.cat([fill, text] if left else [text, fill])
        mask[1] = (ids[1] != 0).long()
    labels = torch.randint(LABELS, (2,), generator=generator)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("left", [False, True])
def test_nothing_of_the_content_is_in_it(left: bool) -> None:
    """Two private batches of one shape: ids, padding and labels differ, what is drawn does not."""
    model, _ = make_task("bert")
    one, other = private(7, 0, 1), private(7, 3, 2, left)
    assert not same(one, other)
    found = made(model, one)
    assert same(found, made(model, other))
    assert not same(found, made(model, one, seed=2))
    assert {key: (t.shape, t.dtype) for key, t in found.items()} == {
        key: (t.shape, t.dtype) for key, t in one.items()
    }
    assert found["attention_mask"].all()
    assert found["input_ids"][:, 0].tolist() == [2, 2]
    assert found["input_ids"][:, -1].tolist() == [3, 3]  # and no padding
    assert not torch.isin(found["input_ids"][:, 1:-1], torch.tensor(SPECIAL)).any()
    assert found["input_ids"].max() < VOCABULARY


def test_private_batches_are_not_written_to() -> None:
    model, _ = make_task("bert")
    batch = private(7, 2, 1)
    before = {key: tensor.clone() for key, tensor in batch.items()}
    made(model, batch)
    assert same(batch, before)


def test_texts_without_special_ends_have_none() -> None:
    model, _ = make_task("gpt2")
    batch = token_batch()
    batch["input_ids"] = batch["input_ids"].clamp(min=4)
    ids = torch.cat([made(model, batch, seed)["input_ids"] for seed in range(20)])
    assert not torch.isin(ids, torch.tensor(SPECIAL)).any()
    assert len(ids.unique()) == VOCABULARY - len(SPECIAL)  # every ordinary word


def test_images_are_drawn_anew() -> None:
    model, batch = make_task("vit")
    other = {"pixel_values": batch["pixel_values"] + 5, "labels": (batch["labels"] + 1) % LABELS}
    found = made(model, batch)
    assert same(found, made(model, other))
    assert found["pixel_values"].shape == batch["pixel_values"].shape
    assert found["pixel_values"].dtype == batch["pixel_values"].dtype
    many = torch.stack([made(model, batch, seed)["pixel_values"] for seed in range(300)])
    assert many.mean().abs() < 0.05
    assert abs(float(many.std()) - 1) < 0.3


# ------------------------------------------------------------------------------------------- labels


def test_labels_of_a_causal_model_follow_its_words() -> None:
    model, _ = make_task("gpt2_lm")
    ids = token_batch()["input_ids"]
    batch = {"input_ids": ids, "labels": ids.clone()}
    found = made(model, batch)
    assert torch.equal(found["labels"], found["input_ids"])
    assert found["labels"] is not found["input_ids"]
    # A prompt without labels, and padding, are content: all words are to be written.
    prompted = {**batch, "labels": ids.masked_fill(torch.arange(5) < 2, -100)}
    assert same(made(model, prompted), found)


def test_labels_of_a_masked_model_are_words_at_places_that_are_drawn() -> None:
    model, batch = make_task("bert_mlm")
    other = {**batch, "labels": batch["labels"].flip(0).roll(1, 1)}
    found = made(model, batch)
    assert same(found, made(model, other))
    counted = torch.stack([made(model, batch, seed)["labels"] != -100 for seed in range(200)])
    assert counted[:, :, 0].all()
    assert abs(float(counted[:, :, 1:].double().mean()) - 0.15) < 0.03
    drawn = torch.stack([made(model, batch, seed)["labels"] for seed in range(200)])[counted]
    assert drawn.min() >= 0
    assert drawn.max() == VOCABULARY - 1


def test_labels_of_a_sequence_to_sequence_model_are_words() -> None:
    model, batch = make_task("t5")
    batch["labels"] = batch["labels"][:, :3]  # of another length than what is read
    found = made(model, batch)
    assert same(found, made(model, {**batch, "labels": batch["labels"].flip(0)}))
    assert found["labels"].shape == (2, 3)
    assert found["labels"].min() >= 0
    GradientMap(model, found, second_order=False).gradient()


def test_a_decoders_inputs_are_words() -> None:
    """As collators of sequence-to-sequence models make them."""
    model, batch = make_task("t5")
    given = torch.zeros(2, 5, dtype=torch.long)
    found = made(model, batch | {"decoder_input_ids": given})["decoder_input_ids"]
    assert found.shape == given.shape
    assert found.any()
    assert 0 <= int(found.min()) <= int(found.max()) < VOCABULARY
    assert torch.equal(
        found, made(model, batch | {"decoder_input_ids": given + 1})["decoder_input_ids"]
    )


def test_places_of_an_answer_are_places_of_the_text() -> None:
    model, _ = make_task("bert")
    batch = private(9, 0, 1) | {"start_positions": torch.tensor([2, 2])}
    drawn = torch.stack([made(model, batch, seed)["start_positions"] for seed in range(30)])
    assert set(drawn.flatten().tolist()) <= set(range(9))
    assert len(drawn.unique()) > 5


def test_labels_of_tokens() -> None:
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=12, num_labels=LABELS, max_position_embeddings=8,
    )  # fmt: skip
    model, batch = BertForTokenClassification(config), token_batch()
    batch["labels"] = torch.tensor([[-100, 1, 2, 0, 1], [-100, 0, 1, -100, -100]])
    found = made(model, batch)
    assert same(found, made(model, {**batch, "labels": torch.zeros_like(batch["labels"])}))
    drawn = torch.cat([made(model, batch, seed)["labels"] for seed in range(20)])
    assert drawn.unique().tolist() == list(range(LABELS))
    GradientMap(model, found, second_order=False).gradient()


def test_numbers_and_several_labels_at_once() -> None:
    model, batch = make_task("bert")
    model.config.num_labels, model.config.problem_type = 1, "regression"
    numbers = {**batch, "labels": torch.tensor([0.5, 100.0])}
    found = made(model, numbers)["labels"]
    assert torch.equal(found, made(model, {**batch, "labels": torch.zeros(2)})["labels"])
    assert found.dtype == torch.float32
    assert found.abs().max() < 6
    model.config.num_labels, model.config.problem_type = 3, "multi_label_classification"
    several = {**batch, "labels": torch.ones(2, 3)}
    drawn = torch.cat([made(model, several, seed)["labels"] for seed in range(50)])
    assert drawn.unique().tolist() == [0, 1]
    assert abs(float(drawn.mean()) - 0.5) < 0.15


# ----------------------------------------------------------------------------------- other entries


def test_other_entries_that_say_nothing() -> None:
    model, batch = make_task("bert")
    ids = batch["input_ids"]
    batch |= {
        "token_type_ids": (ids > 9).long(), "position_ids": ids % 5, "return_dict": True,
        "head_mask": None,
    }  # fmt: skip
    found = made(model, batch)
    assert not found["token_type_ids"].any()
    assert found["position_ids"].tolist() == [[0, 1, 2, 3, 4]] * 2
    assert (found["return_dict"], found["head_mask"]) == (True, None)


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("bbox", torch.zeros(2, 5, 4, dtype=torch.long)),
        ("next_words", torch.tensor([1, 2])),
        ("inputs_scores", torch.rand(2, 5)),
        ("words", ["what", "it was made from"]),
        ("extra", {"labels": torch.tensor([1, 2])}),
    ],
)
def test_what_is_not_known_is_refused_by_name(name: str, entry: Any) -> None:
    """Passed on as it is, it would be content."""
    model, batch = make_task("bert")
    with pytest.raises(ValueError, match=rf"'{name}' cannot be made up.*shape='past'"):
        made(model, {**batch, name: entry})


def test_labels_of_an_unknown_kind_are_refused() -> None:
    model, batch = make_task("bert")
    with pytest.raises(ValueError, match=r"labels of shape \(2, 2, 2\) cannot be made up"):
        made(model, {**batch, "labels": torch.zeros(2, 2, 2, dtype=torch.long)})
    boxes = [{"class_labels": torch.tensor([1])}, {"class_labels": torch.tensor([2])}]
    images = {**image_batch(), "labels": boxes}
    with pytest.raises(ValueError, match="'labels' cannot be made up"):
        made(make_task("vit")[0], images)


def test_special_tokens_are_the_tokenizers_or_the_configs() -> None:
    model, _ = make_task("gpt2")
    assert special_ids(model) == [0, 1]
    assert special_ids(model, SimpleNamespace(all_special_ids=[7, 3, 7])) == [3, 7]
    assert special_ids(nn.Linear(1, 1)) == []
