"""Tables that the input indexes are found by what the model does, and withheld."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from families import EOS, FAMILIES, RECTIFIED, disjoint_batches, telling_matrices, tiny_model
from helpers import VOCABULARY, make_task, randomize, token_batch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_gradguard import GradientMap
from hf_gradguard.gradient_map.inputs import model_loss
from hf_gradguard.gradient_map.parameters import (
    find_tables,
    known_tables,
    shared_parameters,
    withheld_parameters,
)

DEFAULT = {
    "bart", "deberta-v2", "gemma4_text", "gpt_oss", "layoutlm", "mixtral", "roberta",
    "xlnet",
}  # fmt: skip
"""Families of the default suite; all of them are in the slow tests."""


def shared_gradient(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What would be shared of a batch, by ordinary backpropagation."""
    parameters = shared_parameters(model)
    model.zero_grad()
    model(**batch)["loss"].backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in parameters.items()
    }


def check_nothing_tells(
    model: nn.Module, batches: list[dict[str, Tensor]], allowed: Callable[[str], bool]
) -> None:
    """No shared matrix has rows that are zero in one batch and not in the other, beside those that
    show something else (experts, dead units).
    """
    gradients = [shared_gradient(model, batch) for batch in batches]
    assert any(bool(tensor.any()) for tensor in gradients[0].values())
    telling = telling_matrices(gradients)
    assert not {name: rows for name, rows in telling.items() if not allowed(name)}
    ids = [set(batch["input_ids"].flatten().tolist()) for batch in batches if "input_ids" in batch]
    for rows in (pair for several in telling.values() for pair in several):
        assert not (ids and rows[0] <= ids[0] and rows[1] <= ids[1])


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, id=name, marks=[] if name in DEFAULT else pytest.mark.slow)
        for kind, name in FAMILIES
    ],
)
def test_no_family_shares_a_table_of_its_tokens(kind: str, name: str) -> None:
    model, batches = tiny_model(kind, name), disjoint_batches(kind)
    find_tables(model, batches[0], model_loss)
    check_nothing_tells(
        model,
        batches,
        lambda parameter: (
            name in RECTIFIED or any(word in parameter for word in ("expert", "router", "gate"))
        ),
    )
    # positions and token types do not follow the words
    withheld = " ".join(withheld_parameters(model))
    assert name == "cpmant" or not any(word in withheld for word in ("position", "type"))


def test_by_names_alone_a_second_table_was_shared() -> None:
    """What used to succeed: the rows are the words."""
    kind = "CAUSAL_LM"
    model, batches = tiny_model(kind, "gemma4_text"), disjoint_batches(kind)
    telling = telling_matrices([shared_gradient(model, batch) for batch in batches])
    rows = telling["model.embed_tokens_per_layer.weight"][0]
    words = set(batches[0]["input_ids"].flatten().tolist()) - {EOS}  # the last place predicts none
    assert rows[0] == words
    gmap = GradientMap(model, batches[0])
    assert "model.embed_tokens_per_layer.weight" not in gmap.gradient()
    shared = GradientMap(model, batches[0], share_input_embeddings=True).gradient()
    assert "model.embed_tokens_per_layer.weight" in shared


# ---------------------------------------------------------------------- inputs beside token ids


def test_boxes_of_layoutlm() -> None:
    model = tiny_model("SEQUENCE_CLASSIFICATION", "layoutlm")
    batches = disjoint_batches("SEQUENCE_CLASSIFICATION")
    for shift, batch in enumerate(batches):
        corner = torch.arange(16).view(2, 8, 1) + 20 * shift
        batch["bbox"] = torch.cat([corner, corner, corner + 5, corner + 6], -1)
    find_tables(model, batches[0], model_loss)
    withheld = {name.rsplit(".", 2)[1] for name in withheld_parameters(model)}
    assert withheld >= {"word_embeddings", "x_position_embeddings", "y_position_embeddings"}
    assert "position_embeddings" not in withheld
    # width and height are the same in every box, and follow the boxes all the same
    assert withheld >= {"h_position_embeddings", "w_position_embeddings"}


@pytest.mark.parametrize("entities", [[[7, 9], [11, 3]], [[7, 7], [7, 7]], [[0, 0], [0, 0]]])
def test_entities_of_luke(entities: list[list[int]]) -> None:
    """Also where all are the same, and nothing can be varied."""
    model = tiny_model("SEQUENCE_CLASSIFICATION", "luke")
    batch = disjoint_batches("SEQUENCE_CLASSIFICATION")[0]
    batch["entity_ids"] = torch.tensor(entities)
    batch["entity_attention_mask"] = torch.ones(2, 2, dtype=torch.long)
    batch["entity_position_ids"] = torch.tensor([[[1, 2, -1], [3, -1, -1]]] * 2)
    assert sorted(find_tables(model, batch, model_loss)) == [
        "luke.embeddings.word_embeddings.weight",
        "luke.entity_embeddings.entity_embeddings.weight",
    ]


def vision_to_text() -> tuple[nn.Module, dict[str, Tensor]]:
    """An image model with a decoder of text, like TrOCR, whose two token tables are its own."""
    encoder = transformers.ViTConfig(
        image_size=8, patch_size=4, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=12,
    )  # fmt: skip
    decoder = transformers.TrOCRConfig(
        vocab_size=VOCABULARY, d_model=8, decoder_layers=1, decoder_attention_heads=2,
        decoder_ffn_dim=12, max_position_embeddings=16, cross_attention_hidden_size=8,
        pad_token_id=0,
    )  # fmt: skip
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    model = randomize(transformers.VisionEncoderDecoderModel(config)).eval()
    pixels = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[4, 5, 6, -100], [7, 8, 9, 3]])
    return model, {"pixel_values": pixels, "labels": labels}


def test_the_decoder_of_an_image_model() -> None:
    model, batch = vision_to_text()
    rows = shared_gradient(model, batch)["decoder.model.decoder.embed_tokens.weight"].any(1)
    assert rows.sum() > 2  # what used to be shared
    gmap = GradientMap(model, batch)
    withheld = set(dict(model.named_parameters())) - set(gmap.gradient())
    assert withheld == {"decoder.model.decoder.embed_tokens.weight"}


# ---------------------------------------------------------------------------- own ways to look up


class Own(nn.Module):
    """Token embeddings, and a table of its own that `look` reads."""

    def __init__(self, look: Callable[[Own, Tensor], Tensor], **parameters: Tensor) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, 4), nn.Embedding(16, 4)
        self.head, self.look = nn.Linear(4, 3), look
        self.table = nn.Parameter(torch.randn(VOCABULARY, 4))
        for name, value in parameters.items():
            setattr(self, name, nn.Parameter(value))

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
        places = torch.arange(input_ids.shape[1])
        hidden = self.embedding(input_ids) + self.position(places) + self.look(self, input_ids)
        hidden = hidden[torch.arange(len(hidden)), input_ids.argmax(1)]  # as some models pool
        return {"loss": nn.functional.cross_entropy(self.head(hidden), labels)}


def bigrams(ids: Tensor) -> Tensor:
    return (31 * ids + ids.roll(1, 1)) % VOCABULARY


def through_python(model: Own, ids: Tensor) -> Tensor:
    return model.table[torch.tensor([[(7 * i) % VOCABULARY for i in row] for row in ids.tolist()])]


def row_by_row(model: Own, ids: Tensor) -> Tensor:
    return torch.stack([torch.stack([model.table[i] for i in row]) for row in ids.tolist()])


def counts(ids: Tensor) -> Tensor:
    return nn.functional.one_hot(ids, VOCABULARY).float()


LOOKS: dict[str, Callable[[Own, Tensor], Tensor]] = {
    "functional": lambda m, ids: nn.functional.embedding(bigrams(ids), m.table),
    "index": lambda m, ids: m.table[bigrams(ids)],
    "index_select": lambda m, ids: m.table.index_select(0, ids.flatten()).view(*ids.shape, 4),
    "gather": lambda m, ids: m.table.gather(0, ids.view(-1, 1).expand(-1, 4)).view(*ids.shape, 4),
    "take_along": lambda m, ids: m.table.T.take_along_dim(ids.view(1, -1), 1).T.view(*ids.shape, 4),
    "scaled": lambda m, ids: nn.functional.embedding(ids, 2 * m.table.tanh()),
    "cast": lambda m, ids: m.table.double()[ids].float(),
    "bag": lambda m, ids: nn.functional.embedding_bag(ids, m.table)[:, None],
    "one_hot": lambda m, ids: counts(ids) @ m.table,
    "linear": lambda m, ids: nn.functional.linear(counts(ids).sum(1), m.table.T)[:, None],
    "einsum": lambda m, ids: torch.einsum("btv,vh->bth", counts(ids), m.table),
    "convolution": lambda m, ids: (
        nn.functional.conv1d(counts(ids).mT, m.table.T[..., None]).mT
    ),
    "mask": lambda m, ids: m.table[torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(
        0, ids.flatten(), True)].mean(0),
    "python": through_python,
    "row_by_row": row_by_row,
    "written": lambda m, ids: torch.zeros(*ids.shape, 4).copy_(m.table[ids]),
}  # fmt: skip


@pytest.mark.parametrize("look", LOOKS)
def test_own_tables(look: str) -> None:
    torch.manual_seed(0)
    model, batch = Own(LOOKS[look]), token_batch(2)
    assert find_tables(model, batch, model_loss) == {"embedding.weight", "table"}
    gradient = GradientMap(model, batch).gradient()
    assert set(gradient) == {"position.weight", "head.weight", "head.bias"}


class CountsOfWords(nn.Module):
    """No embeddings, so that nothing says how many words there are."""

    def __init__(self, count: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.words, self.head, self.count = nn.Linear(VOCABULARY, 4), nn.Linear(4, 3), count

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.words(self.count(input_ids)).relu())
        return {"loss": nn.functional.cross_entropy(logits, labels)}


COUNTS: dict[str, Callable[[Tensor], Tensor]] = {
    "one_hot": lambda ids: counts(ids).sum(1),
    "bincount": lambda ids: torch.stack([ids.bincount(minlength=VOCABULARY).float()
                                         for ids in ids]),
    "scatter": lambda ids: torch.zeros(len(ids), VOCABULARY).scatter_add(
        1, ids, torch.ones(ids.shape)),
    "equal": lambda ids: (ids[..., None] == torch.arange(VOCABULARY)).float().mean(1),
}  # fmt: skip


@pytest.mark.parametrize("ids", [[[4, 9, 2, 7], [5, 9, 3, 8]], [[5, 5], [5, 5]], [[3]]], ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_a_layer_of_counts_is_a_table(count: str, ids: list[list[int]]) -> None:
    """Counts of the same words in another order are the same: one word has to go."""
    torch.manual_seed(0)
    batch = {"input_ids": torch.tensor(ids), "labels": torch.arange(len(ids))}
    model = CountsOfWords(COUNTS[count])
    assert find_tables(model, batch, model_loss) == {"words.weight"}


NOT_TABLES: dict[str, Callable[[Own, Tensor], Tensor]] = {
    "positions": lambda m, ids: m.table[torch.arange(ids.shape[1])],
    "positions of padding": lambda m, ids: m.table[(ids != 0).long().cumsum(1)],
    "routing": lambda m, ids: m.table[(m.embedding(ids) @ m.table.T).argmax(-1)],
    "routing by item": lambda m, ids: m.table[(m.embedding(ids).sum().abs() * 100).long() % 9],
    "product": lambda m, ids: m.embedding(ids).relu() @ m.table[:4],
}


@pytest.mark.parametrize("look", NOT_TABLES)
def test_what_does_not_follow_the_words_stays_shared(look: str) -> None:
    torch.manual_seed(0)
    model, batch = Own(NOT_TABLES[look]), token_batch(2)
    batch["input_ids"] = batch["input_ids"].clamp_min(1)
    model.config = transformers.PreTrainedConfig(pad_token_id=0)
    assert find_tables(model, batch, model_loss) == {"embedding.weight"}


def test_the_first_layer_of_an_image_model_is_no_table() -> None:
    class Pixels(nn.Module):
        main_input_name = "pixel_values"

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(12, 3)

        def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.head(pixel_values.flatten(1))
            return {"loss": nn.functional.cross_entropy(logits, labels)}

    pixels = torch.rand(2, 3, 2, 2) * (torch.rand(2, 3, 2, 2) > 0.5)
    batch = {"pixel_values": pixels, "labels": torch.tensor([0, 1])}
    assert not find_tables(Pixels(), batch, model_loss)


def test_a_table_of_labels() -> None:
    """What is looked up by the label names the label."""

    class Conditional(Own):
        def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
            hidden = self.embedding(input_ids).mean(1) + self.table[labels]
            return {"loss": self.head(hidden).square().mean()}

    for labels in ([0, 1], [1, 1], [0, 0]):
        model = Conditional(LOOKS["index"])
        batch = {**token_batch(2), "labels": torch.tensor(labels)}
        assert find_tables(model, batch, model_loss) == {"embedding.weight", "table"}


def test_a_model_that_refuses_another_input_withholds_what_may_follow(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, batch = Own(LOOKS["index"]), token_batch(2)
    whole = batch["input_ids"].clone()

    def only_this(ids: Tensor) -> None:
        if not torch.equal(ids, whole):
            raise RuntimeError("not this one")

    model.register_forward_pre_hook(lambda _, args, kwargs: only_this(kwargs["input_ids"]),
                                    with_kwargs=True)  # fmt: skip
    assert find_tables(model, batch, model_loss) == {"embedding.weight", "table"}
    assert "does not run on another input" in caplog.text
    assert "not this one" in caplog.text


# ------------------------------------------------------------------------ adapters, and the rest

TARGETS = ["query", "word_embeddings"]
ADAPTERS: dict[str, peft.PeftConfig] = {
    "lora": peft.LoraConfig(r=2, target_modules=TARGETS),
    "dora": peft.LoraConfig(r=2, target_modules=TARGETS, use_dora=True),
    "rslora": peft.LoraConfig(r=2, target_modules=TARGETS, use_rslora=True),
    "modules_to_save": peft.LoraConfig(
        r=2, target_modules=["query"], modules_to_save=["word_embeddings"]
    ),
    "trainable_tokens": peft.TrainableTokensConfig(
        token_indices=list(range(2, VOCABULARY)), target_modules=["word_embeddings"]
    ),
    "lora_tokens": peft.LoraConfig(
        r=2, target_modules=["query"], trainable_token_indices={"word_embeddings": [3, 4, 5]}
    ),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_of_a_second_table_are_withheld(name: str) -> None:
    """As those of the token embeddings are: here the model does not say what its table is."""
    base, batch = make_task("bert", dtype=torch.float32)
    model = peft.get_peft_model(base, ADAPTERS[name])
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    expected = {n for n in trainable if "word_embeddings" in n}
    assert expected
    base.get_input_embeddings = lambda: None  # type: ignore[method-assign]
    model.get_input_embeddings = lambda: None  # type: ignore[method-assign]
    find_tables(model, batch, model_loss)
    assert set(withheld_parameters(model)) == expected


def test_a_tied_table_is_withheld_with_all_its_names() -> None:
    model, batch = make_task("gpt2_lm")
    model.get_input_embeddings = lambda: None  # type: ignore[method-assign]
    assert find_tables(model, batch, model_loss) == {"transformer.wte.weight"}
    assert list(withheld_parameters(model).values()) == [
        ["transformer.wte.weight", "lm_head.weight"]
    ]


def test_looking_leaves_everything_as_it_was() -> None:
    class Noisy(Own):
        def __init__(self) -> None:
            super().__init__(LOOKS["functional"])
            self.bounded = nn.Embedding(VOCABULARY, 4, max_norm=0.1)
            self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout()
            self.register_buffer("calls", torch.zeros(()))
            self.head.register_forward_hook(lambda *_: None)

        def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
            self.calls += 1
            hidden = self.drop(self.bounded(input_ids) + torch.rand(4)).mean(1)
            return {"loss": self.head(self.norm(hidden)).square().mean()}

    model, batch = Noisy().train(), token_batch(2)
    model.drop.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    entries = {name: tensor.clone() for name, tensor in batch.items()}
    state = torch.get_rng_state()
    assert find_tables(model, batch, model_loss) == {"bounded.weight"}
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(tensor, entries[name]) for name, tensor in batch.items())
    assert model.training
    assert not model.drop.training
    assert len(model.head._forward_hooks) == 1
    assert all(p.grad is None for p in model.parameters())


def test_a_model_is_looked_at_once_for_each_kind_of_batch() -> None:
    model, batch = Own(LOOKS["index"]), token_batch(2)
    runs, counted = np.zeros(1, int), []  # of a list the scan's runs are taken back

    def count(*_: Any) -> None:
        runs[:] += 1
        counted.append(1)

    model.register_forward_hook(count)
    assert known_tables(model) == frozenset()
    GradientMap(model, batch)
    assert runs == 3  # two of the scan, one of the map
    GradientMap(model, token_batch(1))
    assert runs == 4
    GradientMap(model, {**batch, "more": torch.tensor([1, 2])})
    assert runs == 7
    assert len(counted) == 3
    assert known_tables(model) == {"embedding.weight", "table"}


def test_withhold_by_pattern() -> None:
    model, batch = make_task("bert")
    gradient = GradientMap(model, batch, withhold=["classifier.*", "*.layer.1.*"]).gradient()
    assert gradient
    assert not [n for n in gradient if n.startswith("classifier.") or ".layer.1." in n]
    whole = GradientMap(model, batch, share_input_embeddings=True, withhold=["*.layer.1.*"])
    assert "bert.embeddings.word_embeddings.weight" in whole.gradient()
    with pytest.raises(ValueError, match=r"withhold='clasifier.\*' names no parameter"):
        GradientMap(model, batch, withhold=["clasifier.*"])
    with pytest.raises(ValueError, match="every trainable parameter is withheld"):
        GradientMap(model, batch, withhold=["*"])


def test_models_are_pretrained_models() -> None:
    """The families are Transformers' own classes."""
    assert isinstance(tiny_model("SEQUENCE_CLASSIFICATION", "bert"), PreTrainedModel)
