"""Whether samples are told apart is found out by trial; what a first trial cannot see."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import make_task
from torch import Tensor, nn

from hf_gradguard import GradientMap
from hf_gradguard.gradient_map import sensitivity as plans
from hf_gradguard.gradient_map.parameters import SamplePlan, cache_of, find_tables, forget
from hf_gradguard.gradient_map.per_sample import clipping as apart
from hf_gradguard.gradient_map.per_sample.clipping import ClippedSum, SampleMap, clipped_sum

FIRST_ORDER = {"second_order": False, "needs_input": False}


class Head(nn.Module):
    """A linear classifier whose loss weighs classes, as is usual where one is rare."""

    def __init__(self, weights: list[float], between: nn.Module | None = None) -> None:
        super().__init__()
        self.between, self.head = between or nn.Identity(), nn.Linear(4, len(weights))
        self.register_buffer("weights", torch.tensor(weights))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.between(x))
        return nn.functional.cross_entropy(logits, labels, weight=self.weights)


def summed(model: nn.Module, labels: list[int], kind: type = GradientMap) -> ClippedSum:
    torch.manual_seed(len(labels))
    batch = {"x": torch.randn(len(labels), 4), "labels": torch.tensor(labels)}
    loss = lambda model, batch: model(**batch)  # noqa: E731
    return clipped_sum(kind(model, batch, loss_fn=loss, **FIRST_ORDER), 1.0)


@pytest.mark.parametrize("kind", [GradientMap, SampleMap])
@pytest.mark.parametrize(
    ("weights", "batches"),
    [
        ([1.0, 50.0], [[0, 0, 0, 0, 0, 1]]),  # a rare class, beside many rows
        ([1.0, 50.0], [[0] * 6, [1] * 6, [0, 0, 0, 0, 0, 1]]),  # and in no batch at first
        ([1.0, 1.0, 2.0, 2.0], [[0, 1] * 3, [2, 3] * 3, [0, 2] * 3]),  # alike in pairs
        ([9.0, *[1.0] * 9], [list(range(10))] * 4),  # more classes than samples are tried
    ],
)
def test_a_loss_that_weighs_classes_is_found_out(
    weights: list[float], batches: list[list[int]], kind: type
) -> None:
    model = Head(weights)
    for number, labels in enumerate(batches):
        if number == 0 and len(batches) in (1, 4):  # before a message has left
            with pytest.raises(NotImplementedError, match="classes that are weighed"):
                summed(model, labels, kind)
            return
        found = summed(model, labels, kind)
        # Afterwards a refusal would tell of the rare class: rows are taken by themselves.
        assert_rows_are_by_themselves(model, labels, found)
    (plan,) = cache_of(model).sample_plans.values()
    assert "its loss couples rows" in plan.reason


def assert_rows_are_by_themselves(model: Head, labels: list[int], found: ClippedSum) -> None:
    """Of each row the gradient of its own loss is added, clipped to 1."""
    torch.manual_seed(len(labels))
    rows = torch.randn(len(labels), 4)
    expected: dict[str, Tensor] = {}
    for row, label in zip(rows, labels, strict=True):
        loss = model(row[None], torch.tensor([label]))
        names, parameters = zip(*model.named_parameters(), strict=True)
        gradient = torch.autograd.grad(loss, parameters)
        factor = 1 / max(1.0, float(nn.utils.get_total_norm(gradient)))
        for name, part in zip(names, gradient, strict=True):
            expected[name] = expected.get(name, torch.zeros(())) + factor * part
    for name, part in expected.items():
        torch.testing.assert_close(found.total[name], part, rtol=1e-4, atol=1e-5)


def test_a_run_that_is_gone_on_with_is_not_stopped_by_its_first_batch() -> None:
    model, labels = Head([1.0, 50.0]), [0, 0, 0, 0, 0, 1]
    cache_of(model).is_underway = True
    assert_rows_are_by_themselves(model, labels, summed(model, labels))
    broken = Head([1.0, 1.0], Breaking())
    cache_of(broken).is_underway = True
    found = summed(broken, [0, 1])
    assert not any(part.any() for part in found.total.values())


class Breaking(nn.Module):
    """Gives back no numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x * math.nan


@pytest.mark.parametrize(("tried", "is_tried"), [(2, True), (64, True), (65, False)])
def test_labels_are_tried_beside_each_other_until_65_were(tried: int, is_tried: bool) -> None:
    plan = SamplePlan(("rows",), labels={"labels": (frozenset(range(tried)),)})
    assert apart._has_untried(plan, {"labels": torch.tensor([0, tried])}) == is_tried


def test_classes_that_count_alike_are_tried_only_until_each_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried, try_out = [], apart._try_out
    monkeypatch.setattr(apart, "_try_out", lambda *a: tried.append(a) or try_out(*a))
    model = Head([1.0] * 10)
    for _ in range(9):
        summed(model, list(range(10)))
    (plan,) = cache_of(model).sample_plans.values()
    assert plan.labels == {"labels": (frozenset(range(10)),)}
    assert len(tried) <= 5  # two or three more each time
    summed(model, [3] * 5)
    summed(model, [3, 7] * 3)
    assert len(tried) <= 5


class OfTheBatch(nn.Module):
    """By the batch's own scale in training, by a running one otherwise, as some norms do it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x / self.running
        scale = x.abs().mean(0)
        self.running.mul_(0.9).add_(0.1 * scale.detach())
        return x / (1 + scale)


class Dropping(nn.Module):
    """Dropout by hand."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, self.training)


def test_what_couples_samples_in_training_alone_is_found_out() -> None:
    model, once = Head([1.0, 1.0], OfTheBatch()), OfTheBatch()
    with pytest.raises(NotImplementedError, match="coupled"):
        summed(model.train(), [0, 1] * 3)
    torch.manual_seed(6)
    once(torch.randn(6, 4))
    assert torch.equal(model.between.running, once.running)  # by the training's own pass
    summed(model.eval(), [0, 1] * 3)


def test_dropout_by_hand_is_no_coupling() -> None:
    model = Head([1.0, 1.0], Dropping()).train()
    assert len(summed(model, [0, 1] * 3).norms) == 6
    assert model.between.training


class Unpadded(nn.Module):
    """Its layer sees the tokens that are no padding, as encoders without padding do."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(50, 8).requires_grad_(False), nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        heard = attention_mask.bool()
        states = torch.tanh(self.layer(self.table(input_ids)[heard]))
        whole = torch.zeros(*heard.shape, 8).masked_scatter(heard[..., None], states)
        logits = self.head(whole.sum(1) / heard.sum(1, keepdim=True))
        return nn.functional.cross_entropy(logits, labels)


@pytest.mark.parametrize("kind", [GradientMap, SampleMap])
@pytest.mark.parametrize("lengths", [[8, 2, 8, 2], [8, 8, 8, 3]])
def test_tokens_that_were_picked_are_not_taken_for_rows(lengths: list[int], kind: type) -> None:
    """20 tokens of four samples are five each by chance; a first batch was cut to one length."""
    model = Unpadded()

    def of(lengths: list[int]) -> GradientMap:
        mask = torch.arange(8) < torch.tensor(lengths)[:, None]
        batch = {"input_ids": torch.randint(50, mask.shape), "attention_mask": mask.long(),
                 "labels": torch.arange(len(lengths)) % 2}  # fmt: skip
        return kind(model, batch, loss_fn=lambda model, b: model(**b), **FIRST_ORDER)

    clipped_sum(of([8] * 6), 1.0)
    (plan,) = cache_of(model).sample_plans.values()
    assert not plan.reason
    gmap = of(lengths)
    found = clipped_sum(gmap, 1.0)
    for row, norm in enumerate(found.norms):
        alone = {key: entry[row : row + 1] for key, entry in gmap.batch.items()}
        loss = model(**alone)
        parts = torch.autograd.grad(loss, list(gmap.parameters.values()))
        assert float(norm) == pytest.approx(float(nn.utils.get_total_norm(parts)), rel=1e-5)


def test_a_model_is_tried_out_anew_once_it_is_forgotten() -> None:
    model, batch = make_task("bert", batch_size=4)
    clipped_sum(GradientMap(model, batch, second_order=False), 1.0)
    assert cache_of(model).sample_plans
    forget(model)
    assert not cache_of(model).sample_plans


def test_all_that_a_loss_was_tried_for_is_forgotten() -> None:
    """A loss may change without its code. So every training asks anew."""

    class Loss:
        together, seen = False, 0

        def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            self.seen += 1
            logits = model(**batch).logits
            loss = nn.functional.cross_entropy(logits, batch["labels"])
            return loss + logits.sum(0).square().sum() if self.together else loss

    model, batch = make_task("bert")
    loss = Loss()

    def split() -> frozenset[str]:
        return plans.plan_of(GradientMap(model, batch, loss_fn=loss)).split_layers

    found = find_tables(model, batch, loss)
    assert split()
    loss.together = True
    assert split()
    seen = loss.seen
    assert find_tables(model, batch, loss) == found
    assert loss.seen == seen
    forget(model)
    assert find_tables(model, batch, loss) == found
    assert loss.seen > seen
    assert not split()
