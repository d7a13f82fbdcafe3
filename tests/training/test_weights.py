"""Losses of which only a part is divided by the number of items: a mixture of experts adds a router
loss, and a penalty that fades in comes later. Against the stock Trainer and closed forms.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import PAD, VOCABULARY, make_task, pad, ragged_rows, refuses
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_gradguard import GradGuardConfig, GradGuardTrainer
from hf_gradguard.training.message import LossWeights, Normalization, Spread, Weights

# --- closed forms


class Losses(nn.Module):
    """L(n) = a · Σ ids/n + b · mean(ids), counted in its passes."""

    passes = 0  # of the class: what a module holds is replayed

    def __init__(self, a: float, b: float) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(a)), nn.Parameter(torch.tensor(b))


def linear(model: Losses, batch: dict[str, Any], items: float | None) -> Tensor:
    Losses.passes += 1
    assert items is not None
    x = batch["input_ids"].float()
    return model.a * x.sum() / items + model.b * x.mean()


def batch_of(*rows: list[int]) -> dict[str, Tensor]:
    """Every id but 0 is an item."""
    ids = torch.tensor(rows)
    return {"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100)}


def normalization(items: float, ranks: float = 1.0, **more: Any) -> Normalization:
    settings = {"accumulation": 3, "accumulated": True, "shifts_labels": False, **more}
    return Normalization(items, ranks, **settings)


def totals(
    model: Losses,
    batches: list[dict[str, Tensor]],
    norm: Normalization,
    weigh: LossWeights | None = None,
) -> list[float]:
    """What all clients add to the gradients by a and b."""
    factors, spread = (weigh or LossWeights(linear))(model, batches, norm)
    total = sum(
        factor * norm.mean_loss(linear, spread, model, batch)
        for factor, batch in zip(factors, batches, strict=True)
    )
    return [float(g) for g in torch.autograd.grad(total, [model.a, model.b])]


@pytest.mark.parametrize("ranks", [1.0, 2.0])
@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (3e3, 1e-3), (1e-2, 50.0), (2.0, -2.0)])
def test_one_client_weighs_as_the_stock_trainer(a: float, b: float, ranks: float) -> None:
    """Its loss is (a Σ ids/N + b mean(ids)) times the ranks, for whatever A and B."""
    model, batch = Losses(a, b), batch_of([1, 2, 3], [4, 0, 0])
    found = totals(model, [batch], normalization(20, ranks))
    # by a: Σ ids = 10; by b: 10/6. The loss given the count is already multiplied by the ranks,
    # which is taken out and put back.
    assert found == pytest.approx([10 / 20, 10 / 6], rel=1e-5)


def test_clients_share_both_parts_by_their_items() -> None:
    one, two = batch_of([1, 2, 3]), batch_of([4, 0, 0])
    norm = normalization(20)
    factors, spread = LossWeights(linear)(Losses(1.0, 1.0), [one, two], norm)
    assert factors == [3 / 20, 1 / 20]
    assert spread == Spread(5, 5)  # the step has 20/4 micro-batches' worth of items
    # a client's mean loss is A/n + 5 B: what the scale of its noise is of
    assert float(norm.mean_loss(linear, spread, Losses(1.0, 1.0), one)) == pytest.approx(2 + 5 * 2)
    found = totals(Losses(1.0, 1.0), [one, two], norm)
    assert found == pytest.approx([10 / 20, (3 / 4) * 2 + (1 / 4) * (4 / 3)])


@pytest.mark.parametrize(
    ("a", "b", "weights"),
    [
        (1.0, 0.0, Weights([3 / 20, 1 / 20], Spread(5, 5))),  # a sum over items
        (0.0, 1.0, Weights([3 / 4, 1 / 4], Spread(5, 1))),  # a mean of the model's own
        (1.0, 1e-9, Weights([3 / 20, 1 / 20], Spread(5, 5))),  # so small a B still counts in full
        (1e-9, 1.0, Weights([3 / 4, 1 / 4], Spread(5, 1))),  # and so small an A
        (0.0, 0.0, Weights([3 / 20, 1 / 20], Spread(5, 5))),  # nothing to tell by
    ],
)
def test_forms(a: float, b: float, weights: Weights) -> None:
    batches = [batch_of([1, 2, 3]), batch_of([4, 0, 0])]
    assert LossWeights(linear)(Losses(a, b), batches, normalization(20)) == weights


def test_the_form_is_found_once_it_can_be() -> None:
    model, weigh, norm = Losses(0.0, 0.0), LossWeights(linear), normalization(20)
    batches, Losses.passes = [batch_of([1, 2, 3])], 0
    weigh(model, batches, norm)
    assert Losses.passes == 3
    with torch.no_grad():
        model.b += 1
    mean = Weights([1.0], Spread(20 / 3, 1))
    assert weigh(model, batches, norm) == mean
    assert weigh(model, batches, norm) == mean
    assert Losses.passes == 6


@pytest.mark.parametrize("ranks", [1.0, 2.0])
@pytest.mark.parametrize("later", [(0.5, 0.0), (0.0, 2.0), (0.5, 2.0)])
@pytest.mark.parametrize("first", [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.0, 0.0)])
def test_parts_may_come_and_go(
    first: tuple[float, float], later: tuple[float, float], ranks: float
) -> None:
    """The first batch does not fix which parts there are, and later ones are not asked."""
    model, weigh, norm = Losses(*first), LossWeights(linear), normalization(20, ranks)
    batches = [batch_of([1, 2, 3]), batch_of([4, 0, 0])]
    weigh(model, batches, norm)
    with torch.no_grad():
        model.a.fill_(later[0])
        model.b.fill_(later[1])
    found = totals(model, batches, norm, weigh)
    assert found == pytest.approx([10 / 20, (3 / 4) * 2 + (1 / 4) * (4 / 3)])


def test_noise_is_of_one_mean_where_a_model_takes_it_itself() -> None:
    """A scale of noise speaks of B, however many batches a step accumulates."""
    batch, norm = batch_of([1, 2, 3]), normalization(20)
    model, weigh = Losses(0.0, 1.0), LossWeights(linear)
    factors, spread = weigh(model, [batch], norm)
    assert factors == [1.0]
    assert float(norm.mean_loss(linear, spread, model, batch)) == 2.0


@pytest.mark.parametrize(
    "odd",
    [
        lambda x, n: x / n**2,
        lambda x, n: x / n**0.5,
        lambda x, n: x * n,
        lambda x, n: x / (n + 1),
        lambda x, n: x / n + 1e-6 * n,
    ],
)
def test_other_forms_are_refused(odd: Callable[[Tensor, float], Tensor]) -> None:
    def loss(model: nn.Module, batch: dict[str, Any], items: float | None) -> Tensor:
        assert items is not None
        return odd(batch["input_ids"].float().sum(), items)

    with refuses("loss-normalization"):
        LossWeights(loss)(Losses(0.0, 0.0), [batch_of([1, 2, 3])], normalization(20))


@pytest.mark.parametrize(("off", "is_refused"), [(0.009, False), (0.011, True), (0.05, True)])
@pytest.mark.parametrize("sign", [1, -1])
def test_one_hundredth_beside_the_form_is_refused(off: float, sign: int, is_refused: bool) -> None:
    """A loss of 1 by one item and 1/2 by two is a sum. By two it is `off` beside that."""

    def loss(model: nn.Module, batch: dict[str, Any], items: float | None) -> Tensor:
        assert items is not None
        return torch.tensor(1 / items + sign * off * (items == 2))

    def weigh() -> Weights:
        return LossWeights(loss)(Losses(0.0, 0.0), [batch_of([1, 2, 3])], normalization(20))

    if is_refused:
        with refuses("loss-normalization"):
            weigh()
    else:
        assert weigh() == Weights([3 / 20], Spread(20 / 3, 20 / 3))


@pytest.mark.parametrize(("of_tokens", "spread"), [(5e-7, 1.0), (2e-6, 20 / 3)])
def test_one_millionth_of_a_sum_counts(of_tokens: float, spread: float) -> None:
    """Beside a mean: less of it is nothing that float32 could tell."""

    def loss(model: nn.Module, batch: dict[str, Any], items: float | None) -> Tensor:
        assert items is not None
        return torch.tensor(1 + of_tokens / items, dtype=torch.float64)

    weights = LossWeights(loss)(Losses(0.0, 0.0), [batch_of([1, 2, 3])], normalization(20))
    assert weights.spread.loss == pytest.approx(spread)


# --- a mixture of experts


def mixtral(coefficient: float = 0.02) -> MixtralForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MixtralForCausalLM(
            MixtralConfig(
                vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=1, intermediate_size=12, max_position_embeddings=16,
                num_local_experts=3, num_experts_per_tok=2, pad_token_id=PAD,
                output_router_logits=True, router_aux_loss_coef=coefficient,
                attention_dropout=0.0, tie_word_embeddings=False,
            )
        )  # fmt: skip


class Gradients(TrainerCallback):
    """Keeps `.grad` as the optimizer finds it."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
        self.steps.append({n: p.grad.clone() for n, p in model.named_parameters()})


def gradients(
    folder: Path,
    data: list[Any],
    model: nn.Module,
    guarded: bool,
    kind: type | None = None,
    **more: Any,
) -> list[dict[str, Tensor]]:
    """Of a Trainer, or of a subclass that a mixin makes of it."""
    bases = (kind,) if kind else ()
    seen = Gradients()
    settings = {
        "output_dir": str(folder), "max_steps": 2, "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 3, "max_grad_norm": 0.0, "use_cpu": True, "optim": "sgd",
        "learning_rate": 0.1, "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
    }  # fmt: skip
    options = {"train_dataset": data, "data_collator": pad, "callbacks": [seen]}
    if guarded:
        args = GradGuardConfig(**settings, share_input_embeddings=True, defense="none", **more)
        made = type("Guarded", (*bases, GradGuardTrainer), {})(model, args, **options)
    else:
        made = type("Stock", (*bases, Trainer), {})(model, TrainingArguments(**settings), **options)
    made.train()
    return seen.steps


def long_rows(count: int, length: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (count, length), generator=generator)
    return [{"input_ids": i, "attention_mask": torch.ones_like(i), "labels": i} for i in ids]


@pytest.mark.parametrize("coefficient", [1e-4, 0.02, 30.0])
@pytest.mark.parametrize("rows", ["few tokens", "many tokens", "ragged"])
def test_router_losses_equal_the_stock_trainers(
    tmp_path: Path, coefficient: float, rows: str
) -> None:
    """It used to depend on the first batch's tokens whether this was refused, and the router's part
    was divided by the accumulation where it was not.
    """
    data = {"few tokens": long_rows(14, 2), "many tokens": long_rows(14, 16)}.get(rows)
    data = data or ragged_rows(14)
    stock, guarded = (
        gradients(tmp_path, data, mixtral(coefficient), guarded) for guarded in (False, True)
    )
    assert len(guarded) == len(stock) == 2
    router = [name for name in stock[0] if "gate.weight" in name and "experts" not in name]
    assert router
    for mine, theirs in zip(guarded, stock, strict=True):
        largest = max(float(g.abs().max()) for g in theirs.values())
        for name in theirs:  # float32 sums in another order
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-4, atol=1e-6 * largest)


def test_router_losses_of_clients_by_closed_form(tmp_path: Path) -> None:
    """Σ_j A_j/N + (c_j/C) B_j over the clients j of a micro-batch."""
    data = ragged_rows(9)
    model = mixtral()
    (found,) = gradients(
        tmp_path, data, mixtral(), True, clients_per_process=3, train_sampling_strategy="sequential"
    )[:1]
    names = [name for name, _ in model.named_parameters()]
    counts = [int((row["labels"][1:] != -100).sum()) for row in data]
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for start in (0, 3, 6):
        whole = pad(data[start : start + 3])
        for k in range(3):
            batch = {key: value[k : k + 1] for key, value in whole.items()}
            out = model(**{k: v for k, v in batch.items() if k != "labels"})
            logits, labels = out.logits[0, :-1], batch["labels"][0, 1:]
            summed = cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
            share = counts[start + k] / sum(counts[start : start + 3])
            loss = summed / sum(counts) + share * 0.02 * out.aux_loss
            for name, g in zip(
                names, torch.autograd.grad(loss, list(model.parameters())), strict=True
            ):
                expected[name] += g
    for name in names:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)


# --- parts of a loss that fade in


class PenaltyFadesIn:
    """A mean that a subclass adds, 0 at the first step."""

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss, out = super().compute_loss(model, inputs, True, **kwargs)  # type: ignore[misc]
        coefficient = self.state.global_step / 2  # type: ignore[attr-defined]
        loss = loss + coefficient * out["logits"].square().mean()
        return (loss, out) if args and args[0] else loss


class TokensFadeIn:
    """A mean at the first step, to which a sum over tokens is added."""

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss, out = super().compute_loss(model, inputs, True, **kwargs)  # type: ignore[misc]
        coefficient = self.state.global_step / 2  # type: ignore[attr-defined]
        loss = coefficient * loss + out["logits"].square().mean()
        return (loss, out) if args and args[0] else loss


@pytest.mark.parametrize("kind", [PenaltyFadesIn, TokensFadeIn])
def test_losses_that_change_equal_the_stock_trainers(tmp_path: Path, kind: type) -> None:
    """What the first batch's loss is made of used to be taken for all that there is."""
    stock, guarded = (
        gradients(
            tmp_path, ragged_rows(14), make_task("gpt2_lm", dtype=torch.float32)[0], own, kind
        )
        for own in (False, True)
    )
    assert len(guarded) == len(stock) == 2
    for mine, theirs in zip(guarded, stock, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
