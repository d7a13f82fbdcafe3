"""Points at which a loss that couples rows looks like one that does not: rows' outputs are equal,
labels are alike, or all different, or what couples them acts while the model draws. A trial of the
first batch at the model's own weights alone sees nothing there, and ε rests on what it sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_task
from torch import Tensor, nn

from hf_gradguard import GradGuardConfig, GradGuardTrainer, GradientMap, make_defense
from hf_gradguard.gradient_map.parameters import SamplePlan, cache_of
from hf_gradguard.gradient_map.per_sample import clipping
from hf_gradguard.gradient_map.per_sample.clipping import SampleMap, clipped_sum
from hf_gradguard.gradient_map.per_sample.random_weights import random_weights
from hf_gradguard.gradient_map.replay import DrawState

COUPLED = "no mean of its samples' own losses"
LABELS = [0, 1, 2, 0, 1, 2]
Loss = Callable[[Tensor, dict[str, Tensor]], Tensor]


def own(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(logits, batch["labels"])


def spread(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Asks for outputs that differ: differences of rows, squared."""
    return own(logits, batch) - 0.1 * (logits - logits.mean(0)).square().mean()


def temperature(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Divides by the batch's own spread, as some losses of a contrast do."""
    return own(logits / (1 + (logits - logits.mean(0)).square().mean()), batch)


def in_batch_contrast(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Rows are compared with each other: with itself each is most alike."""
    likeness = logits @ logits.T
    return own(logits, batch) + nn.functional.cross_entropy(likeness, torch.arange(len(logits)))


def same_labels_contrast(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Pulls together rows of one label, and nothing else: Khosla et al. (2020)."""
    alone = torch.eye(len(logits), dtype=torch.bool)
    likeness = (logits @ logits.T).masked_fill(alone, -math.inf).log_softmax(1)
    positives = (batch["labels"][:, None] == batch["labels"]) & ~alone
    count = positives.sum().clamp(min=1)
    return own(logits, batch) - likeness.masked_fill(~positives, 0.0).sum() / count


def ranking(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Compares pairs of rows whose labels, which are numbers, differ."""
    scores, labels = logits[:, 0], batch["labels"]
    pairs = (labels[:, None] > labels).float()
    margins = nn.functional.softplus(scores - scores[:, None])
    return (scores - labels).square().mean() + (pairs * margins).sum() / len(labels)


def weighed_rows(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """A mean that is weighed by an entry of the batch."""
    losses = nn.functional.cross_entropy(logits, batch["labels"], reduction="none")
    return (batch["weight"] * losses).sum() / batch["weight"].sum()


def weighed_classes(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Labels are in an entry of another name than `labels`."""
    weights = torch.tensor([1.0, 1.0, 9.0])
    return nn.functional.cross_entropy(logits, batch["target"], weight=weights)


class Net(nn.Module):
    """Two layers, the last of which may begin at zero."""

    def __init__(self, zero_head: bool = True, body: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = body or nn.Linear(4, 8), nn.Linear(8, 3)
        if zero_head:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor, **_: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def batch_of(labels: Any = LABELS, **entries: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    entries = {"labels": labels, **entries}
    tensors = {n: torch.tensor(values) for n, values in entries.items() if values is not None}
    return {
        "x": torch.randn(6, 4, generator=generator)[: len(next(iter(tensors.values())))],
        **tensors,
    }


def summed(
    model: nn.Module, loss: Loss, batch: dict[str, Tensor], kind: type[GradientMap] = GradientMap
) -> clipping.ClippedSum:
    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return loss(model(**batch), batch)

    gmap = kind(model, batch, loss_fn=loss_fn, second_order=False, needs_input=False)
    return clipped_sum(gmap, 1.0)


def plan(model: nn.Module) -> SamplePlan:
    (found,) = cache_of(model).sample_plans.values()
    return found


@pytest.mark.parametrize("kind", [GradientMap, SampleMap])
@pytest.mark.parametrize("loss", [spread, temperature, in_batch_contrast, same_labels_contrast])
def test_outputs_that_are_equal_hide_no_coupling(loss: Loss, kind: type[GradientMap]) -> None:
    """A head that begins at zero gives every row the same output, so differences are zero."""
    with pytest.raises(NotImplementedError, match=COUPLED):
        summed(Net(), loss, batch_of(), kind)


def test_labels_that_all_differ_hide_no_coupling() -> None:
    """No pair of rows has one label: a loss over such pairs has no term."""
    with pytest.raises(NotImplementedError, match=COUPLED):
        summed(Net(zero_head=False), same_labels_contrast, batch_of([0, 1, 2]))


@pytest.mark.parametrize(
    ("loss", "alike", "unlike"),
    [
        (ranking, {"labels": [0.5] * 6}, {"labels": [0.5, 0.5, 0.5, 0.5, 0.1, 0.9]}),
        (weighed_rows, {"weight": [1.0] * 6}, {"weight": [1.0, 1.0, 1.0, 1.0, 5.0, 1.0]}),
        (
            weighed_classes,
            {"labels": None, "target": [0] * 6},
            {"labels": None, "target": [0, 0, 0, 0, 0, 2]},
        ),
    ],
)
def test_entries_that_are_alike_hide_no_coupling(
    loss: Loss, alike: dict[str, Any], unlike: dict[str, Any]
) -> None:
    with pytest.raises(NotImplementedError, match=COUPLED):
        summed(Net(zero_head=False), loss, batch_of(**unlike))
    model = Net(zero_head=False)
    summed(model, loss, batch_of(**alike))
    assert not plan(model).reason  # a batch of such rows alone couples none
    found = summed(model, loss, batch_of(**unlike))
    assert "its loss couples rows" in plan(model).reason  # after a message left: no refusal
    for row, norm in enumerate(found.norms.tolist()):
        one = {name: entry[row : row + 1] for name, entry in batch_of(**unlike).items()}
        alone = torch.autograd.grad(loss(model(**one), one), list(model.parameters()))
        assert norm == pytest.approx(float(nn.utils.get_total_norm(alone)), rel=1e-4)


def test_rows_that_are_equal_hide_no_coupling() -> None:
    """Equal rows have equal outputs at any weights. Rows that differ are tried when they come."""
    model, equal = Net(zero_head=False), batch_of([0] * 6)
    equal["x"][:] = equal["x"][0]
    summed(model, spread, equal)
    assert not plan(model).reason
    unlike = {**equal, "x": equal["x"].clone()}
    unlike["x"][3] += 1  # in the middle of a batch of equal rows
    found = summed(model, spread, unlike)
    assert "its loss couples rows" in plan(model).reason
    assert len(set(found.norms.tolist())) == 2


class Residual(nn.Module):
    """A branch that begins at zero, and mixes rows before its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        nn.init.zeros_(self.last.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        branch = self.inner(x)
        return x + self.last(branch - branch.mean(0))


class Scaled(nn.Module):
    """A branch whose scale of each channel begins at 10⁻⁶, as in ConvNeXt, and mixes rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(4, 8), nn.Parameter(torch.full((8,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + self.scale * (x - x.mean(0))


@pytest.mark.parametrize("body", [Residual, Scaled])
def test_branches_that_begin_at_zero_hide_no_coupling(body: type[nn.Module]) -> None:
    """No slope reaches a branch behind a head of zeros, and nothing of it the head."""
    with pytest.raises(NotImplementedError, match=COUPLED):
        summed(Net(body=body()), own, batch_of())


class Transposed(nn.Module):
    """A layer that sees rows along its second dimension, of as many places as are tried."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        places = x[None].expand(len(x), -1, -1) * torch.arange(1.0, 1 + len(x))[:, None, None]
        return self.layer(places).sum(0)


class Positions(nn.Module):
    """Attends to padding, by a product that begins at zero, behind a head that does, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.mix = nn.Embedding(9, 8).requires_grad_(False), nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)
        for layer in (self.mix, self.head):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Tensor) -> Tensor:
        states = self.table(input_ids)
        states = states + self.mix(states.mean(1, keepdim=True))  # also of the padding
        real = attention_mask[..., None]
        return self.head((states * real).sum(1) / real.sum(1))


def test_weights_of_zero_hide_no_padding_that_is_read() -> None:
    ids = torch.arange(24).reshape(4, 6) % 9
    mask = (torch.arange(6) < torch.tensor([6, 4, 3, 5])[:, None]).long()
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1, 2, 1])}
    with pytest.raises(NotImplementedError, match="reads the padding"):
        summed(Positions(), own, batch)


class DropsAndCenters(nn.Module):
    """Draws, and normalizes by the batch, in training alone."""

    def __init__(self, centers: bool = True) -> None:
        super().__init__()
        self.layer, self.centers = nn.Linear(4, 8), centers

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.layer(x), 0.3, self.training)
        return x - x.mean(0) if self.training and self.centers else x


@pytest.mark.parametrize("centers", [True, False])
def test_draws_hide_no_coupling(centers: bool) -> None:
    """A model that draws is compared with single rows without its draws, so not as it trains. Rows
    of such a model take a pass each, which no other row has a part in.
    """
    model = Net(zero_head=False, body=DropsAndCenters(centers)).train()
    summed(model, own, batch_of())
    assert ("while it draws" in plan(model).reason) == centers


def test_a_loss_that_couples_rows_later_is_found_now_and_then() -> None:
    """A term may be weighed by the step, from zero on."""
    weight = [0.0]

    def warmed_up(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return own(logits, batch) + weight[0] * in_batch_contrast(logits, batch)

    model = Net(zero_head=False)
    for number in range(clipping.RETRIED):
        weight[0] = float(number > 0)
        summed(model, warmed_up, batch_of([0, 1]))
        assert not plan(model).reason
    summed(model, warmed_up, batch_of([0, 1]))
    assert "its loss couples rows" in plan(model).reason


# --- the weights that are tried


def parameters() -> dict[str, nn.Parameter]:
    return {
        "matrix": nn.Parameter(torch.zeros(64, 256)),
        "filters": nn.Parameter(torch.ones(32, 4, 5, 5)),
        "gains": nn.Parameter(torch.ones(64)),
        "scales": nn.Parameter(torch.full((64,), 1e-6)),
        "biases": nn.Parameter(torch.zeros(64)),
        "temperature": nn.Parameter(torch.tensor(0.07)),
    }


def test_random_weights_are_as_large_as_usual_ones() -> None:
    """One output of a layer has about the size of one input: Σ w² over its inputs is about one,
    as after the initializations of LeCun, Glorot and He, within a factor of two.
    """
    drawn = parameters()
    with torch.no_grad(), random_weights(drawn, seed=0):
        for name in ("matrix", "filters"):
            sizes = drawn[name].flatten(1).square().sum(1)
            assert 0.5 < float(sizes.mean()) < 2
            assert float(sizes.min()) > 0
        gains = drawn["gains"]
        assert float((gains - 1).abs().max()) < 1  # a normalization keeps its sign
        assert float(gains.std()) > 0
        for name in ("scales", "biases"):  # far from what hides a branch
            assert 0.01 < float(drawn[name].abs().mean()) < 1
        assert 0 < float(drawn["temperature"]) < 1


def test_weights_and_generators_are_put_back(tmp_path: Path) -> None:
    drawn = parameters()
    before = {name: (p.data_ptr(), p._version, p.detach().clone()) for name, p in drawn.items()}
    state = DrawState.now().plain()

    def unchanged() -> Iterator[bool]:
        for name, p in drawn.items():
            place, version, values = before[name]
            yield p.data_ptr() == place
            yield p._version == version
            yield torch.equal(p, values)

    with random_weights(drawn, seed=0):
        assert not any(list(unchanged())[::3])
    assert all(unchanged())
    with pytest.raises(KeyboardInterrupt), random_weights(drawn, seed=0):
        raise KeyboardInterrupt
    assert all(unchanged())
    assert DrawState.now().plain() == state


class Picky(nn.Module):
    """Takes no other weights than those that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 8)
        self.known = self.layer.weight.detach().clone()

    def forward(self, x: Tensor) -> Tensor:
        if not torch.equal(self.layer.weight, self.known):
            raise ValueError("other weights")
        return self.layer(x)


class Exploding(nn.Module):
    """Has finite outputs for few weights alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 8)
        nn.init.zeros_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.layer(x)
        return outputs * (outputs * 1e4).exp() if outputs.abs().max() > 1 else outputs


@pytest.mark.parametrize("body", [Picky, Exploding])
def test_what_cannot_be_tried_at_other_weights_takes_a_pass_per_row(body: type[nn.Module]) -> None:
    model = Net(body=body())
    before = [p.detach().clone() for p in model.parameters()]
    assert len(summed(model, own, batch_of()).norms) == 6
    assert "at random weights" in plan(model).reason
    assert all(map(torch.equal, before, model.parameters()))


def test_a_trial_at_other_weights_leaves_a_pass_that_was_made_before() -> None:
    """A map may have run before the model is tried out; its graph is of the weights as they are."""
    model, batch = Net(zero_head=False), batch_of()

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return own(model(**batch), batch)

    gmap = SampleMap(model, batch, loss_fn=loss_fn, second_order=False, needs_input=False)
    expected = torch.autograd.grad(loss_fn(model, batch), list(model.parameters()))
    clipped_sum(gmap, 1.0)
    for found, gradient in zip(gmap.gradient().values(), expected, strict=True):
        torch.testing.assert_close(found, gradient)


# --- through the Trainer


def task_trainer(folder: Path, **settings: Any) -> GradGuardTrainer:
    model, batch = make_task("bert", batch_size=24, dtype=torch.float32)
    nn.init.zeros_(model.classifier.weight)
    nn.init.zeros_(model.classifier.bias)
    rows = [{key: value[row] for key, value in batch.items()} for row in range(24)]

    def contrast(outputs: Any, labels: Tensor, **_: Any) -> Tensor:
        return in_batch_contrast(outputs["logits"], {"labels": labels})

    args = GradGuardConfig(
        str(folder), report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no",
        per_device_train_batch_size=6, **{"max_steps": 3, **settings},
    )  # fmt: skip
    defense = make_defense("dp_sgd", per_sample=True, noise_multiplier=1.0, delta=1e-5)
    return GradGuardTrainer(
        model=model, args=args, defense=defense, train_dataset=rows, compute_loss_func=contrast
    )


def test_a_trainer_refuses_a_fresh_head_and_a_loss_that_will_couple_rows(tmp_path: Path) -> None:
    trainer = task_trainer(tmp_path)
    with pytest.raises(NotImplementedError, match=COUPLED):
        trainer.train()
    assert trainer.state.global_step == 0
