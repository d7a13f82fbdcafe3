"""Lists of candidates: what may be in them, where each stands, and how clients pad them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import make_task, torch_rng, word_tokenizer
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.attacks.candidates.candidate_inputs import make_entries
from hf_gradguard.defenses.mechanism import Mechanism

TOKENIZER = word_tokenizer([f"w{i}" for i in range(20)])
BERT = {
    "vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16, "max_position_embeddings": 12, "pad_token_id": 0, "num_labels": 3,
}  # fmt: skip
GPT2 = {
    "vocab_size": 24, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 12, "num_labels": 3,
    "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
T5 = {
    "vocab_size": 24, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2,
    "pad_token_id": 0, "decoder_start_token_id": 0,
}  # fmt: skip


def built(model: type[nn.Module], config: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model(config).eval()


def texts(lengths: list[int]) -> list[list[int]]:
    draw = torch_rng(1)
    return [torch.randint(4, 24, (n,), generator=draw).tolist() for n in lengths]


def left(rows: list[list[int]], labels: Any = None) -> dict[str, Tensor]:
    """A client's batch, with padding on the left; a language model's where there are no labels."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = (ids != 0).long()
    own = ids.masked_fill(mask == 0, -100) if labels is None else torch.as_tensor(labels)
    return {"input_ids": ids, "attention_mask": mask, "labels": own}


def seen_by(model: nn.Module, batch: dict[str, Tensor], **granted: Any) -> Observation:
    main = batch["pixel_values"] if "pixel_values" in batch else batch["input_ids"]
    gradient = GradientMap(model, batch).gradient()
    return Observation(model, gradient, tuple(main.shape), **{"mechanism": Mechanism(), **granted})


def one_text(labels: Any = 1, **more: Any) -> dict[str, Tensor]:
    ids = torch.tensor([[2, 5, 9, 7, 3]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more,
            "labels": torch.as_tensor(labels)[None]}  # fmt: skip


# --- padding on the left


@pytest.mark.parametrize(
    "kind", [(GPT2ForSequenceClassification, GPT2Config(**GPT2)),
             (BertForSequenceClassification, BertConfig(**BERT))], ids=["gpt2", "bert"],
)  # fmt: skip
def test_members_of_messages_padded_on_the_left_are_found(kind: Any) -> None:
    """Positions count from the padding. What is shown is the text without it."""
    model = built(*kind)
    rows = texts([4, 9, 6, 3] * 6)
    batch = left(rows[:4], [0, 2, 1, 0])
    seen = seen_by(
        model, batch, labels=batch["labels"], attention_mask=batch["attention_mask"],
        tokenizer=TOKENIZER, mechanism=Mechanism() if "bert" in str(kind[0]).lower() else None,
    )  # fmt: skip
    found = make_attack("candidates", candidates=rows)(seen, torch_rng())
    assert set(found.ranking[:4].tolist()) == {0, 1, 2, 3}
    assert sorted(found.token_ids) == sorted(rows[:4])


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_candidates_are_padded_as_the_message_is(known: bool, causal: bool) -> None:
    """By the mask, or the tokenizer. Of a language model padding predicts the first token."""
    kind = GPT2LMHeadModel if causal else GPT2ForSequenceClassification
    model = built(kind, GPT2Config(**GPT2))
    rows = texts([3, 6])
    batch = left(rows, None if causal else [1, 2])
    tokenizer = word_tokenizer([f"w{i}" for i in range(20)])
    tokenizer.padding_side = "right" if known else "left"
    grants = {"attention_mask": batch["attention_mask"]} if known else {"tokenizer": tokenizer}
    seen = seen_by(model, batch, labels=None if causal else batch["labels"], **grants)
    made = make_entries(seen, rows, None if causal else [1, 2])
    for row, one in enumerate(made.batches):
        assert {k: v.tolist() for k, v in one.items()} == {
            k: v[row : row + 1].tolist() for k, v in batch.items()
        }
    assert [one.tolist() for one in made.inputs] == [[row] for row in rows]


def test_what_is_of_tokens_is_padded_and_nothing_else() -> None:
    """Three labels are not labels of three words, nor is a target of three."""
    types = {"input_ids": [5, 6, 7], "token_type_ids": [0, 1, 1]}
    grants = {"labels": None, "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])}
    for model, labels, expected in (
        (built(BertForTokenClassification, BertConfig(**BERT)), [0, 1, 2], [-100, 0, 1, 2]),
        (built(T5ForConditionalGeneration, T5Config(**T5)), [8, 9, 3], [8, 9, 3]),
        (built(BertForSequenceClassification,
               BertConfig(**BERT, problem_type="multi_label_classification")),
         [1, 0, 1], [1.0, 0.0, 1.0]),
    ):  # fmt: skip
        rows = labels if expected != [-100, 0, 1, 2] else [[0, *labels]] * 2
        rows = rows if isinstance(rows[0], list) else [labels] * 2
        like = torch.tensor(rows, dtype=torch.float if expected == [1.0, 0.0, 1.0] else None)
        batch = left([[5, 6, 7], [5, 6, 7, 8]], like)
        seen = seen_by(model, batch, **grants)
        (one,) = make_entries(seen, [{**types, "labels": labels}], None).batches
        assert one["input_ids"].tolist() == [[0, 5, 6, 7]]
        assert one["attention_mask"].tolist() == [[0, 1, 1, 1]]
        assert one["token_type_ids"].tolist() == [[0, 0, 1, 1]]
        assert one["labels"].tolist() == [expected]


# --- rows of data sets, and what tokenizers return


@pytest.mark.parametrize("labels", ["labels", "label"])
def test_numbers_and_lists_of_a_row_count(labels: str) -> None:
    model = built(BertForSequenceClassification, BertConfig(**BERT))
    seen = seen_by(model, one_text(2))
    ids = [2, 5, 9, 7, 3]
    rows = [{"input_ids": ids, "attention_mask": [1] * 5, labels: k} for k in range(3)]
    found = make_attack("candidates", candidates=rows)(seen)
    assert found.ranking[0] == 2
    assert found.posterior[2] > 0.99
    types = [[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]]
    seen = seen_by(
        model, one_text(token_type_ids=torch.tensor(types[1:])), labels=torch.ones(1).long()
    )
    rows = [{"input_ids": ids, "token_type_ids": one} for one in types]
    assert make_attack("candidates", candidates=rows)(seen).ranking.tolist() == [1, 0]


@pytest.mark.parametrize("kind", ["token", "several", "number"])
def test_labels_of_every_head(kind: str) -> None:
    """As lists and as rows of tensors."""
    head = BertForTokenClassification if kind == "token" else BertForSequenceClassification
    more = {"several": {"problem_type": "multi_label_classification"}, "number": {"num_labels": 1}}
    model = built(head, BertConfig(**{**BERT, **more.get(kind, {})}))
    options: list[Any] = {
        "token": [[-100, 0, 1, 2, -100], [-100, 2, 1, 0, -100]],
        "several": [[1, 0, 1], [0, 1, 1]],
        "number": [2, -1],
    }[kind]
    true = torch.tensor(options[1], dtype=torch.long if kind == "token" else torch.float)
    seen = seen_by(model, one_text(true))
    for form in (list, torch.tensor):
        ids = form([2, 5, 9, 7, 3])
        rows = [
            {"input_ids": ids, "labels": torch.tensor(one) if form is not list else one}
            for one in options
        ]
        assert make_attack("candidates", candidates=rows)(seen).ranking.tolist() == [1, 0]


def test_images_as_arrays_and_rows() -> None:
    model, _ = make_task("vit")
    pixels = list(torch.rand((4, 3, 8, 8), generator=torch_rng(), dtype=torch.float64))
    batch = {"pixel_values": pixels[2][None], "labels": torch.tensor([1])}
    seen = seen_by(model, batch)
    for listed in (
        pixels,
        [one.numpy() for one in pixels],
        [{"pixel_values": one, "labels": 1} for one in pixels],
        [{"pixel_values": one.tolist(), "labels": [1]} for one in pixels],
    ):
        assert make_attack("candidates", candidates=listed)(seen).ranking[0] == 2
    listed = [pixels[0], (255 * pixels[1]).byte()]
    with pytest.raises(
        ValueError, match=r"Candidate 1 holds pixels as whole numbers \(torch.uint8"
    ):
        make_attack("candidates", candidates=listed)(seen)


def test_ranks_are_of_the_callers_list() -> None:
    """Images among texts are passed over, and keep their place, as their labels do."""
    model = built(BertForSequenceClassification, BertConfig(**BERT))
    seen = seen_by(model, one_text(), labels=torch.tensor([1]), tokenizer=TOKENIZER)
    ids = [2, 5, 9, 7, 3]
    listed = [torch.rand(3, 8, 8), "w1 w2 w3", torch.tensor(ids), np.array([2, 4, 5, 6, 3])]
    for labels in (None, [0, 2, 1, 1]):
        found = make_attack("candidates", candidates=listed, labels=labels)(seen)
        assert found.ranking[0] == 2
        assert found.ranking[-1] == 0
        assert found.scores[0] == -torch.inf
        assert found.posterior[0] == 0
        assert found.token_ids == [ids]
        assert len(found.scores) == len(found.posterior) == 4


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (None, "Candidate 1 is a NoneType"),
        ({"labels": 1}, r"Candidate 1 is a dict of \['labels'\]"),
        ([], "Candidate 1 has ids of shape"),
        (torch.rand(5), "Candidate 1 has ids of shape"),
        (torch.ones(2, 5).long(), "Candidate 1 has ids of shape"),
        ({"input_ids": [5, 6], "text": "w1 w2"}, "Candidate 1 has a str under 'text'"),
        ({"input_ids": [5, 6], "labels": [0, 1]}, "Candidate 1 has labels of shape"),
    ],
)
def test_what_is_no_candidate_is_named(one: Any, message: str) -> None:
    model = built(BertForSequenceClassification, BertConfig(**BERT))
    seen = seen_by(model, one_text(), tokenizer=TOKENIZER)
    with pytest.raises(ValueError, match=message):
        make_attack("candidates", candidates=["w1 w2 w3", one])(seen)


def test_labels_of_words_are_asked_for() -> None:
    """Those of the message are of its own text: another one has other words."""
    model = built(BertForTokenClassification, BertConfig(**BERT))
    labels = [-100, 0, 1, 2, -100]
    seen = seen_by(
        model, one_text(labels), labels=torch.tensor([labels]), tokenizer=TOKENIZER
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"Candidate 1 has 4 tokens.* Give labels"):
        make_attack("candidates", candidates=["w1 w5 w3", "w1 w2"])(seen)
    fitting = make_attack("candidates", candidates=["w2 w2 w2", "w1 w5 w3"])(seen)
    assert fitting.ranking[0] == 1


# --- labels of padding


def test_padding_of_a_language_model_is_no_label() -> None:
    model = built(GPT2LMHeadModel, GPT2Config(**GPT2))
    rows = texts([4, 4, 4])
    ids = torch.tensor([rows[1]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    padded = [
        {"input_ids": [*row, 0, 0, 0], "attention_mask": [1] * 4 + [0] * 3} for row in rows
    ]  # fmt: skip
    seen = seen_by(model, {k: nn.functional.pad(v, (0, 3), value=-100 if k == "labels" else 0)
                           for k, v in batch.items()})  # fmt: skip
    tensors = [{k: torch.tensor([v]) for k, v in row.items()} for row in padded]
    for listed in (padded, tensors):
        made = make_entries(seen, listed, None)
        assert [one["labels"].tolist() for one in made.batches] == [
            [[*row, -100, -100, -100]] for row in rows
        ]
        assert made.items.tolist() == [3, 3, 3]
    found = make_attack("candidates", candidates=padded)(seen)
    assert found.ranking[0] == 1
    assert found.token_ids == [rows[1]]
