"""Sums of clipped gradients against a loop over samples, each a batch of its own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import make_task, randomize
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
)

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.defenses import Message, chain
from hf_gradguard.defenses.dp import DPSGD
from hf_gradguard.gradient_map.parameters import SamplePlan, cache_of
from hf_gradguard.gradient_map.per_sample import clipping
from hf_gradguard.gradient_map.per_sample.clipping import SampleMap, clipped_sum
from hf_gradguard.randomness import Stream

CLIP = 0.5
ROWS = 4
TOGETHER = [
    "bert", "bert_lora", "distilbert", "electra", "gpt2", "gpt2_lm", "llama", "vit", "convnext",
]  # fmt: skip
ONE_BY_ONE = ["bert_mlm", "t5"]  # a bias in two modules; a table of positions that rows share


def looped(
    model: nn.Module, batch: dict[str, Tensor], parameters: dict[str, nn.Parameter], clip: float
) -> tuple[dict[str, Tensor], Tensor]:
    """The definition, in plain autograd."""
    total = {name: torch.zeros_like(p).detach() for name, p in parameters.items()}
    norms = []
    for row in range(len(batch["labels"])):
        loss = model(**{name: entry[row : row + 1] for name, entry in batch.items()}).loss
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        gradient = [
            torch.zeros_like(p) if g is None else g
            for g, p in zip(found, parameters.values(), strict=True)
        ]
        norm = torch.cat([g.flatten() for g in gradient]).norm()
        norms.append(norm)
        for name, g in zip(parameters, gradient, strict=True):
            total[name] += g * min(1.0, clip / float(norm))
    return total, torch.stack(norms)


def check(model: nn.Module, batch: dict[str, Tensor], clip: float = CLIP, **sharing: Any) -> None:
    """A map that has a pass for clipping, and then one that keeps what samples add."""
    sharing |= {"second_order": False, "needs_input": False}
    gmap = GradientMap(model, batch, **sharing)
    total, norms = looped(model, batch, gmap.parameters, clip)
    size = torch.cat([tensor.flatten() for tensor in total.values()]).norm()
    for one in (gmap, SampleMap(model, batch, **sharing)):
        found = clipped_sum(one, clip)
        assert torch.allclose(found.norms, norms.double(), rtol=1e-5)
        for name, tensor in total.items():
            assert found.total[name].shape == tensor.shape
            assert (found.total[name] - tensor).norm() < 1e-5 * size, name
            assert (one.gradient()[name] - gmap.gradient()[name]).norm() < 1e-5 * size, name


def plan(model: nn.Module) -> SamplePlan:
    (found,) = cache_of(model).sample_plans.values()
    return found


def uneven(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rows with different numbers of labels."""
    if batch["labels"].dim() > 1:
        batch["labels"][0, 1:4] = -100
    return batch


@pytest.mark.parametrize("name", TOGETHER + ONE_BY_ONE)
def test_agrees_with_a_loop_over_samples(name: str) -> None:
    model, batch = make_task(name, batch_size=ROWS)
    check(model, uneven(batch))
    assert bool(plan(model).reason) == (name in ONE_BY_ONE)
    if batch["labels"].dim() > 1:
        assert plan(model).rules == (("shifted tokens",) if name == "gpt2_lm" else ("tokens",))


def test_some_are_clipped_and_some_are_not() -> None:
    model, batch = make_task("bert", batch_size=ROWS)
    gmap = GradientMap(model, batch, second_order=False)
    norms = clipped_sum(gmap, 1e9).norms
    clip = float(norms.median())
    assert norms.min() < clip < norms.max()
    check(model, batch, clip)


def test_nothing_clipped_is_the_gradient() -> None:
    model, batch = make_task("vit", batch_size=ROWS)
    gmap = GradientMap(model, batch, second_order=False)
    total = clipped_sum(gmap, 1e9).total
    for name, gradient in gmap.gradient().items():
        assert torch.allclose(total[name] / ROWS, gradient, atol=1e-12)


def test_llama_with_a_head_of_its_own_and_shared_embeddings() -> None:
    config = LlamaConfig(
        vocab_size=24, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=12, max_position_embeddings=8, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = randomize(LlamaForCausalLM(config)).double().eval()
    batch = uneven(make_task("gpt2_lm", batch_size=ROWS)[1])
    check(model, batch, share_input_embeddings=True)
    assert plan(model)[:2] == (("shifted tokens",), "")


def test_long_texts_and_short_ones_take_both_ways() -> None:
    """Two T² against the size of the weight decides how a linear layer's norms are found."""
    model, batch = make_task("bert", batch_size=3)
    ids = torch.randint(1, 24, (3, 8), generator=torch.Generator().manual_seed(1))
    check(model, {**batch, "input_ids": ids, "attention_mask": torch.ones_like(ids)})
    check(model, {**batch, "input_ids": ids[:, :2], "attention_mask": torch.ones(3, 2).long()})


def test_samples_that_are_cut_into_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_gradguard.gradient_map import layers

    monkeypatch.setattr(layers, "CACHED_ENTRIES", 40)
    for name in ("convnext", "bert"):
        model, batch = make_task(name, batch_size=ROWS)
        check(model, batch)


def test_frozen_and_withheld_parameters_count_nowhere() -> None:
    model, batch = make_task("bert", batch_size=ROWS)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layer.1" in name or "classifier" in name)
    check(model, batch, withhold=["classifier.bias"])


def test_a_samples_share_does_not_depend_on_the_others() -> None:
    """Its own normalization: the other rows have other numbers of labels, and other contents."""
    model, batch = make_task("gpt2_lm", batch_size=ROWS)
    first = {name: entry[:2] for name, entry in uneven(batch).items()}
    other = {name: entry.clone() for name, entry in first.items()}
    other["input_ids"][1], other["labels"][1, 2:] = 3, -100
    one, two = (
        clipped_sum(GradientMap(model, b, second_order=False), CLIP).norms[0]
        for b in (first, other)
    )
    assert torch.allclose(one, two, rtol=1e-6)


def test_a_sample_without_labels_adds_nothing() -> None:
    model, batch = make_task("gpt2_lm", batch_size=ROWS)
    whole = {name: entry[1:] for name, entry in batch.items()}
    batch["labels"][0] = -100
    with_it, without = (
        clipped_sum(GradientMap(model, b, second_order=False), CLIP) for b in (batch, whole)
    )
    assert with_it.norms[0] == 0
    for name, tensor in without.total.items():
        assert torch.allclose(with_it.total[name], tensor, atol=1e-7)


def test_dropout_masks_are_those_of_the_map() -> None:
    """The unclipped sum is the gradient under the very masks of the message's own pass."""
    model, batch = make_task("bert", batch_size=ROWS, dropout=0.3)
    model.train()
    for kind in (GradientMap, SampleMap):
        gmap = kind(model, batch, second_order=False, needs_input=False)
        total = clipped_sum(gmap, 1e9).total
        for name, gradient in gmap.gradient().items():
            assert torch.allclose(total[name] / ROWS, gradient, atol=1e-10), name
    assert model.training
    assert all(module.training for module in model.modules())


def test_norms_are_never_too_small_by_rounding() -> None:
    """Tokens whose products cancel: a norm below the true one would clip too little."""
    from hf_gradguard.gradient_map.layers import ghost_squares

    generator = torch.Generator().manual_seed(0)
    slopes = torch.randn(6, 2, 50, generator=generator).repeat_interleave(2, 1)
    features = torch.randn(6, 4, 50, generator=generator)
    features[:, 1::2] = -features[:, ::2] * (1 + 1e-4 * torch.rand(6, 2, 1, generator=generator))
    true = (slopes.double().mT @ features.double()).square().sum((1, 2))
    found = ghost_squares(slopes, features)
    assert (found >= true).all()
    assert (found < 2 * true + 1e-2).all()


def test_checkpointed_layers_are_taken_one_by_one() -> None:
    model, batch = make_task("bert", batch_size=ROWS)
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    check(model, batch)
    assert "a second time" in plan(model).reason


def test_batch_statistics_are_refused() -> None:
    config = ResNetConfig(
        embedding_size=4, hidden_sizes=[4], depths=[1], layer_type="basic", num_labels=3
    )
    torch.manual_seed(0)
    model = ResNetForImageClassification(config).double()
    batch = make_task("vit", batch_size=ROWS)[1]
    with pytest.raises(NotImplementedError, match="statistics of the batch"):
        clipped_sum(GradientMap(model.train(), batch, second_order=False), CLIP)
    check(model.eval(), batch)
    assert not plan(model).reason


class Coupled(BertForSequenceClassification):
    """A loss between samples, as contrastive ones are."""

    def forward(self, labels: Tensor, **inputs: Any) -> Any:
        output = super().forward(**inputs)
        logits = nn.functional.normalize(output.logits, dim=-1)
        target = torch.arange(len(labels), device=labels.device)
        output.loss = nn.functional.cross_entropy(logits @ logits.mT, target)
        return output


def test_coupled_samples_are_refused() -> None:
    config = BertConfig(
        vocab_size=24, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=12, max_position_embeddings=8, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Coupled(config).double().eval()
    batch = make_task("bert", batch_size=ROWS)[1]
    with pytest.raises(NotImplementedError, match="coupled"):
        clipped_sum(GradientMap(model, batch, second_order=False), CLIP)


def test_nothing_may_come_before_it() -> None:
    model, batch = make_task("bert", batch_size=ROWS)
    private = make_defense("dp_sgd", per_sample=True, noise_multiplier=1.0)
    with pytest.raises(NotImplementedError, match="first in a chain"):
        chain(make_defense("pruning", ratio=0.5), private)(GradientMap(model, batch))


def test_modules_that_did_not_run_in_the_trial_are_not_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An expert that no token had been routed to."""
    model, batch = make_task("bert", batch_size=ROWS)
    check(model, batch)
    ((key, found),) = cache_of(model).sample_plans.items()
    cache_of(model).sample_plans[key] = found._replace(modules=found.modules - {"classifier"})
    looked = []
    one_by_one = clipping._one_by_one
    monkeypatch.setattr(clipping, "_one_by_one", lambda *a: looked.append(a) or one_by_one(*a))
    check(model, batch)
    assert len(looked) == 2  # by either map


def test_one_pass_is_enough() -> None:
    model, batch = make_task("bert_lora", batch_size=ROWS)
    check(model, batch)
    passes = []
    model.register_forward_hook(lambda *_: passes.append(1))
    gmap = SampleMap(model, batch, second_order=False, needs_input=False)
    clipped_sum(gmap, CLIP)
    assert gmap._gradient is None  # clipped samples are summed once
    gmap.gradient()
    assert len(passes) == 1


def test_a_defense_that_clips_samples_is_checked_without_their_sum() -> None:
    model, batch = make_task("bert", batch_size=ROWS)
    defense = make_defense("dp_sgd", per_sample=True, clip=CLIP, noise_multiplier=1.0)
    defense(defense.gradient_map(model, batch))  # tries the model out
    gmap = defense.gradient_map(model, batch)
    message = defense(gmap)
    assert gmap._gradient is None
    assert [(t.shape, t.dtype) for t in message.values()] == [
        (g.shape, g.dtype) for g in gmap.gradient().values()
    ]


def test_rows_whose_class_does_not_count() -> None:
    """A mean over rows leaves out those labeled -100."""
    model, batch = make_task("bert", batch_size=ROWS)
    batch["labels"][1] = -100
    counted = {name: entry[[0, 2, 3]] for name, entry in batch.items()}
    found, expected = (
        clipped_sum(GradientMap(model, b, second_order=False), CLIP) for b in (batch, counted)
    )
    assert found.norms[1] == 0
    for name, tensor in expected.total.items():
        assert torch.allclose(found.total[name], tensor, atol=1e-12)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_under_autocast_norms_are_of_what_is_added_up(name: str) -> None:
    """Whatever half precision makes of a gradient, no sample adds more than the bound."""
    model, batch = make_task(name, batch_size=ROWS, dtype=torch.float32)

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(**batch).loss

    same = {key: entry[:1].expand(ROWS, *entry.shape[1:]) for key, entry in batch.items()}
    clip = 1e-2
    total = clipped_sum(GradientMap(model, same, loss_fn=loss, second_order=False), clip).total
    assert "half precision" in plan(model).reason
    size = torch.cat([tensor.flatten() for tensor in total.values()]).double().norm()
    assert float(size) == pytest.approx(ROWS * clip, rel=1e-5)  # all in one direction


class Written(DPSGD):
    """Writes to what it reads."""

    facts = DPSGD.facts

    def protect(self, gmap: GradientMap, generator: Stream) -> Message:
        gmap.gradient()["classifier.bias"].mul_(2)
        return super().protect(gmap, generator)


class Moved(DPSGD):
    facts = DPSGD.facts

    def protect(self, gmap: GradientMap, generator: Stream) -> Message:
        with torch.no_grad():
            gmap.parameters["classifier.bias"].add_(1e-3)
        return super().protect(gmap, generator)


@pytest.mark.parametrize("is_at_hand", [False, True])
@pytest.mark.parametrize(("kind", "what"), [(Written, "the true gradient"), (Moved, "parameter")])
def test_writes_are_found_though_the_gradient_is_not_asked_for(
    kind: type[DPSGD], what: str, is_at_hand: bool
) -> None:
    model, batch = make_task("bert", batch_size=ROWS)
    defense = kind(per_sample=True, noise_multiplier=1.0)
    clipped_sum(GradientMap(model, batch, second_order=False), CLIP)  # tries the model out
    gmap = defense.gradient_map(model, batch)
    if is_at_hand:
        gmap.gradient()
    with pytest.raises(RuntimeError, match=rf"wrote to .*{what} .*classifier\.bias"):
        defense(gmap)


def test_a_model_without_a_finite_gradient_is_refused_by_name() -> None:
    """Also while a model is tried out: no number is near NaN, but samples are not coupled."""
    model, batch = make_task("bert", batch_size=ROWS)
    defense = make_defense("dp_sgd", per_sample=True, noise_multiplier=1.0)
    name = "bert.embeddings.token_type_embeddings.weight"

    def spoil(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
        if output.requires_grad:
            output.register_hook(lambda slope: torch.full_like(slope, math.nan))
        return output

    model.bert.embeddings.token_type_embeddings.register_forward_hook(spoil)
    with pytest.raises(FloatingPointError, match=rf"gradient of {name} is not finite"):
        defense(defense.gradient_map(model, batch))


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("kind", ["bert", "vit", "shared table", "one by one", "one row"])
@pytest.mark.parametrize("is_tried", [False, True])
def test_a_row_that_is_not_finite_adds_nothing(kind: str, value: float, is_tried: bool) -> None:
    """Whatever a row holds, the others add what they add without it: to the first message, on which
    a model is tried out, and to later ones.
    """
    model, batch = make_task("vit" if kind == "vit" else "bert", batch_size=ROWS)
    bad, shares_table = 1, kind == "shared table"
    if kind != "vit":
        batch["input_ids"][batch["input_ids"] == 7] = 8
        batch["input_ids"][bad, 2] = 7
    if kind == "one row":
        batch, bad = {n: entry[1:2] for n, entry in batch.items()}, 0
    if kind == "one by one":
        model.gradient_checkpointing_enable()
        model.train()
    rest = {n: entry[[r for r in range(len(entry)) if r != bad]] for n, entry in batch.items()}

    def clipped(rows: dict[str, Tensor]) -> Any:
        about: Any = {"second_order": False, "share_input_embeddings": shares_table}
        return clipped_sum(GradientMap(model, rows, **about), CLIP)

    if is_tried:
        clipped(batch)
    with torch.no_grad():  # that row alone has the word
        if kind == "vit":
            batch["pixel_values"][bad] = value
        else:
            model.get_input_embeddings().weight[7] = value
    found = clipped(batch)
    assert all(tensor.isfinite().all() for tensor in found.total.values())
    expected = {n: torch.zeros_like(t) for n, t in found.total.items()}
    if kind != "one row":
        expected = clipped(rest).total
    off = {n: float((found.total[n] - t).double().square().sum()) for n, t in expected.items()}
    is_finite = math.isfinite(float(found.norms[bad]))
    assert not (is_finite and math.isnan(value))
    assert math.sqrt(sum(off.values())) <= (CLIP * (1 + 1e-9) if is_finite else 1e-9)


def test_a_pass_is_differentiated_before_the_model_is_tried_out_again() -> None:
    """Large buffers are not put back, so another pass may write to what this one has saved."""

    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(3, 3, dtype=torch.float64)
            self.register_buffer("mask", torch.ones(2**20 + 5, dtype=torch.float64))

        def forward(self, pixel_values: Tensor, labels: Tensor) -> Any:
            self.mask.fill_(1.0)
            logits = self.inner(pixel_values.flatten(1)[:, :3]) * self.mask[:3]
            return {"loss": torch.nn.functional.cross_entropy(logits, labels)}

    model, pixels = Masked(), torch.rand(ROWS, 3, 2, 2, dtype=torch.float64)
    defense = make_defense("dp_sgd", per_sample=True, noise_multiplier=1.0)
    for labels in ([0, 1, 0, 1], [1, 0, 1, 0], [2, 1, 0, 2]):
        batch = {"pixel_values": pixels, "labels": torch.tensor(labels)}
        defense(defense.gradient_map(model, batch))
