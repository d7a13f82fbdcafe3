"""Products with samples' gradients, beside gradients that were written out in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import tiny_model
from helpers import make_task
from torch import Tensor, nn

from hf_gradguard.gradient_map.per_sample.products import GradientProducts, Products
from hf_gradguard.gradient_map.vectorized import ManyGradients


def compare(model: nn.Module, batches: list[dict[str, Any]], tolerance: float = 1e-9) -> Any:
    """Products of all parameters beside each batch's own gradient, with two messages and with
    squares that weigh entry by entry, and by one number a tensor. Returns the plan.
    """
    shared = {n: p for n, p in model.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(1)
    messages = [
        {n: torch.randn(p.shape, generator=generator).to(p) for n, p in shared.items()}
        for _ in range(2)
    ]
    entrywise = {n: torch.rand(p.shape, generator=generator).to(p) for n, p in shared.items()}
    numbers = {n: torch.rand((), generator=generator).to(p) for n, p in shared.items()}
    products = GradientProducts(ManyGradients(model, list(shared)))
    for weights in (None, numbers, entrywise):
        rows_met = []
        for rows, found in products(batches, messages, weights):
            rows_met += rows
            assert set(found.inner) == set(found.squares) == set(shared)
            for place, row in enumerate(rows):
                check_row(model, batches[row], found, place, messages, weights, tolerance)
        assert sorted(rows_met) == list(range(len(batches)))
    plans = list(products._plans.values())
    return plans[0]


def check_row(
    model: nn.Module, batch: dict[str, Any], found: Products, place: int,
    messages: list[dict[str, Tensor]], weights: dict[str, Tensor] | None, tolerance: float,
) -> None:  # fmt: skip
    shared = {n: p for n, p in model.named_parameters() if p.requires_grad}
    loss = model(**batch)
    loss = loss["loss"] if isinstance(loss, dict) else loss
    gradients = torch.autograd.grad(
        loss, list(shared.values()), allow_unused=True, materialize_grads=True
    )
    for name, g in zip(shared, gradients, strict=True):
        size = float(g.norm()) + 1e-8
        for number, message in enumerate(messages):
            inner = float((g * message[name]).sum())
            assert abs(float(found.inner[name][place, number]) - inner) <= tolerance * size * 10
        square = float((g.square() * (1.0 if weights is None else weights[name])).sum())
        assert abs(float(found.squares[name][place]) - square) <= tolerance * size**2 + 1e-20, name


def texts(kind: str = "SEQUENCE_CLASSIFICATION", count: int = 3) -> list[dict[str, Tensor]]:
    """Texts of one sample, two of them with padding; a word comes twice in each."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for number in range(count):
        ids = torch.randint(10, 100, (1, 7), generator=generator)
        ids[0, 3] = ids[0, 1]
        mask = torch.ones_like(ids)
        if number:
            ids[0, -2:], mask[0, -2:] = 0, 0
            ids[0, -3] = 2
        labels = torch.tensor([number % 2])
        if kind != "SEQUENCE_CLASSIFICATION":
            labels = ids.masked_fill(mask == 0, -100)
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return batches


@pytest.mark.parametrize(
    "name", ["bert", "distilbert", "gpt2", "llama", "albert", "deberta-v2", "modernbert"]
)
def test_products_are_those_of_written_gradients(name: str) -> None:
    model = tiny_model("SEQUENCE_CLASSIFICATION", name).double()
    plan = compare(model, texts())
    if name in ("bert", "gpt2", "modernbert"):  # Linear, Conv1D, LayerNorm, Embedding
        assert not plan.reason
        assert len(plan.by_products) == len(list(model.parameters()))


@pytest.mark.parametrize("name", ["gpt_neox", "qwen3", "roberta"])
def test_language_models_weigh_tokens(name: str) -> None:
    kind = "SEQUENCE_CLASSIFICATION" if name == "gpt_neox" else "CAUSAL_LM"
    compare(tiny_model(kind, name).double(), texts(kind))


@pytest.mark.long
def test_tied_parameters_are_written_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("CAUSAL_LM", "qwen3", tie_word_embeddings=True).double()
    plan = compare(model, texts("CAUSAL_LM"))
    tied = "model.embed_tokens.weight"
    assert plan.reason == f"{tied} is held by several modules"
    assert set(plan.by_products) == {n for n, _ in model.named_parameters()} - {tied}


@pytest.mark.parametrize("name", ["vit", "convnext", "t5", "gpt2_lm"])
def test_images_and_tied_heads(name: str) -> None:
    model, batch = make_task(name)
    compare(model, [{k: v[row : row + 1] for k, v in batch.items()} for row in range(2)], 1e-8)


class Pictures(nn.Module):
    """Convolutions of all kinds, a module of its own kind, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=2)
        self.mirrored = nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")
        self.line = nn.Conv1d(4, 4, 3, dilation=2)
        self.norm = nn.GroupNorm(2, 4)
        self.twice = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.rand(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.norm(self.mirrored(self.groups(x))).flatten(2)
        hidden = self.line(hidden).mT
        hidden = self.twice(torch.tanh(self.twice(hidden))) * self.scale
        return {"loss": nn.functional.cross_entropy(self.head(hidden.mean(1)), labels)}


def test_layers_without_products_take_their_own_gradient() -> None:
    torch.manual_seed(0)
    batches = [
        {"x": torch.randn(1, 4, 8, 8).double(), "labels": torch.tensor([row])} for row in range(3)
    ]
    compare(Pictures().double(), batches)


class Coupled(nn.Module):
    """A sample's gradient depends on the others of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.head(x - x.mean(0) / 2), labels)}


def test_coupled_samples_are_written_out() -> None:
    torch.manual_seed(0)
    batches = [{"x": torch.randn(1, 4).double(), "labels": torch.tensor([row])} for row in range(3)]
    plan = compare(Coupled().double(), batches)
    assert not plan.by_products
    assert "no mean" in plan.reason


def test_adapters() -> None:
    peft = pytest.importorskip("peft")
    model = tiny_model("SEQUENCE_CLASSIFICATION", "bert")
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS")
    model = peft.get_peft_model(model, config).double().eval()
    with torch.no_grad():  # as after some steps
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    plan = compare(model, texts())
    assert not plan.reason


def test_dropout_draws_for_all_alike() -> None:
    model = tiny_model("SEQUENCE_CLASSIFICATION", "bert").double().train()
    products = GradientProducts(ManyGradients(model, ["classifier.weight"], seeds=(1, 2)))
    batches = texts()[:1]
    ((_, found),) = products(batches, [{"classifier.weight": torch.ones(2, 16).double()}])
    ((_, dense),) = ManyGradients(model, ["classifier.weight"], seeds=(1, 2))(batches)
    torch.testing.assert_close(
        found.inner["classifier.weight"][0, 0], dense["classifier.weight"].sum()
    )
