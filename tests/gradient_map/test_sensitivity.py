"""Sensitivities by differences and by samples, against exact products and dense Jacobians."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from statistics import fmean
from typing import Any

import pytest
import torch
from helpers import (
    LABELS,
    VOCABULARY,
    dense_reference,
    flat,
    image_batch,
    make_task,
    randomize,
    rng,
    small_convolution,
    token_batch,
)
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    ResNetConfig,
    ResNetForImageClassification,
    SwinConfig,
    SwinForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_gradguard import GradientMap
from hf_gradguard.gradient_map.layers import layers_of
from hf_gradguard.gradient_map.sensitivity import TOLERANCE, plan_of

Task = tuple[nn.Module, dict[str, Tensor]]


def built(make: Callable[[], nn.Module], batch: dict[str, Tensor], dtype: torch.dtype) -> Task:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = randomize(make()).to(dtype).eval()
    cast = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    return model, cast


def albert(dtype: torch.dtype, **_: Any) -> Task:
    """One layer that is called three times."""
    config = AlbertConfig(
        vocab_size=VOCABULARY, embedding_size=6, hidden_size=8, num_hidden_layers=3,
        num_attention_heads=2, intermediate_size=12, max_position_embeddings=8, pad_token_id=0,
        num_labels=LABELS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
    )  # fmt: skip
    return built(lambda: AlbertForSequenceClassification(config), token_batch(), dtype)


def swin(dtype: torch.dtype, **_: Any) -> Task:
    """Windows, in which rows of several samples take turns."""
    config = SwinConfig(
        image_size=8, patch_size=2, embed_dim=8, depths=[2], num_heads=[2], window_size=2,
        num_labels=LABELS, drop_path_rate=0.0,
    )  # fmt: skip
    return built(lambda: SwinForImageClassification(config), image_batch(), dtype)


def resnet(dtype: torch.dtype, activation: str = "relu") -> Task:
    config = ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic",
        hidden_act=activation, num_labels=LABELS,
    )  # fmt: skip
    return built(lambda: ResNetForImageClassification(config), image_batch(3), dtype)


def t5_relu(dtype: torch.dtype) -> Task:
    config = T5Config(
        vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2,
        pad_token_id=0, decoder_start_token_id=0, feed_forward_proj="relu", dropout_rate=0.0,
    )  # fmt: skip
    return built(lambda: T5ForConditionalGeneration(config), token_batch(labels="token"), dtype)


OTHERS: dict[str, Callable[..., Task]] = {"albert": albert, "swin": swin}
SMOOTH = (
    "bert", "bert_lora", "electra", "gpt2", "gpt2_lm", "llama", "t5", "vit",
    "convnext", "albert", "swin",
)  # fmt: skip


def task(name: str, dtype: torch.dtype, **settings: Any) -> Task:
    if name in OTHERS:
        return OTHERS[name](dtype=dtype)
    return make_task(name, dtype=dtype, **settings)


def compared(gmap: GradientMap, seed: int = 5) -> tuple[Tensor, Tensor]:
    """The same probes by differences, not split, and exactly."""
    found = gmap.squared_sensitivity(3, rng(seed), split=False, method="difference")
    return flat(found), flat(gmap.squared_sensitivity(3, rng(seed), method="exact"))


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# ------------------------------------------------------------------------- differences and products


@pytest.mark.parametrize("name", SMOOTH)
def test_differences_equal_exact_products(name: str) -> None:
    """T5 curves strongly, so probes differ: of it the mean over eight seeds (.004 to .016)."""
    gmap, seeds = GradientMap(*task(name, torch.float32)), range(8 if name == "t5" else 1)
    pairs = [compared(gmap, seed) for seed in seeds]
    assert fmean(error(found.sqrt(), exact.sqrt()) for found, exact in pairs) < 0.01
    assert fmean(error(found, exact) for found, exact in pairs) < 0.02


@pytest.mark.parametrize("name", ["bert", "bert_lora", "electra", "gpt2", "albert", "swin"])
def test_differences_in_float64_are_much_closer(name: str) -> None:
    found, exact = compared(GradientMap(*task(name, torch.float64)))
    assert error(found, exact) < 1e-5


@pytest.mark.parametrize("name", ["bert", "bert_lora", "gpt2", "vit", "electra"])
def test_dropout_is_one_function(name: str) -> None:
    """In training mode all passes have the masks of the first."""
    model, batch = make_task(name, dtype=torch.float32, dropout=0.2)
    model.train()
    gmap = GradientMap(model, batch)
    found, exact = compared(gmap)
    assert error(found.sqrt(), exact.sqrt()) < 0.01
    other = flat(GradientMap(model, batch).squared_sensitivity(3, rng(), method="exact"))
    assert error(other, exact) > 0.05  # its masks do matter


@pytest.mark.parametrize("seed", range(3))
def test_what_curves_strongly_takes_shorter_steps(seed: int) -> None:
    """T5 with dropout divides by the size of few units: at the first step squares are off by up to
    56 %.
    """
    torch.manual_seed(seed)
    model, batch = make_task("t5", dtype=torch.float32, dropout=0.2)
    model.train()
    found, exact = compared(GradientMap(model, batch))
    assert error(found.sqrt(), exact.sqrt()) < 0.08


class Kinked(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.activation = nn.Linear(12, 6), nn.Linear(6, 4), activation

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.activation(self.first(pixel_values.flatten(1)))
        return {"loss": nn.functional.cross_entropy(self.last(hidden), labels)}


F = nn.functional
KINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "relu6": F.relu6, "leaky_relu": F.leaky_relu, "abs": torch.abs,
    "hardswish": F.hardswish, "prelu": nn.PReLU(dtype=torch.float64),
    "threshold": nn.Threshold(0.1, 0),
    "max_pool": lambda x: F.max_pool1d(x[:, None], 2)[:, 0].repeat(1, 2),
    "topk": lambda x: x.topk(6, -1).values, "amax": lambda x: x - x.amax(1, keepdim=True),
    "sort": lambda x: x.sort(-1).values, "clamp": lambda x: x.clamp(-0.3, 0.2), "selu": F.selu,
}  # fmt: skip
KINKED_MODELS: dict[str, Callable[[], Task]] = {
    "resnet": lambda: resnet(torch.float32),
    "t5": lambda: t5_relu(torch.float32),
    "distilbert": lambda: make_task("distilbert", dtype=torch.float32),  # ReLU in its head
}


def medians(x: Tensor) -> Tensor:
    return x - x.median(1, keepdim=True).values


@pytest.mark.long
@pytest.mark.parametrize("name", KINKED_MODELS)
def test_units_keep_their_sides_in_models(name: str) -> None:
    """A step over a kink is off by the jump over the step: one probe in eight of this ResNet was
    100,000 times the squares, where two trials differed by one per cent.
    """
    gmap = GradientMap(*KINKED_MODELS[name]())
    pairs = [compared(gmap, seed) for seed in range(12)]
    errors = [error(found.sqrt(), exact.sqrt()) for found, exact in pairs]
    assert fmean(errors) < (0.02 if name == "t5" else 0.003)  # T5 curves strongly
    assert max(errors) < 0.05


@pytest.mark.parametrize("kink", KINKS)
def test_kinks_of_every_kind_are_kept(kink: str) -> None:
    torch.manual_seed(1)
    gmap = GradientMap(Kinked(KINKS[kink]).double(), contrastive_batch())
    found, exact = compared(gmap)
    assert plan_of(gmap).keeps_pattern
    assert error(found, exact) < 1e-6


def test_what_keeps_no_sides_takes_the_exact_way() -> None:
    gmap = GradientMap(Kinked(medians).double(), contrastive_batch())
    assert plan_of(gmap).error > TOLERANCE
    with pytest.raises(RuntimeError, match=r"derivatives jump.*Take method='exact'"):
        gmap.squared_sensitivity(1, rng(), method="difference")
    found = flat(gmap.squared_sensitivity(2, rng()))
    assert torch.equal(found, flat(gmap.squared_sensitivity(2, rng(), method="exact")))


@pytest.mark.parametrize("name", ["gelu", "silu", "tanh", "softplus", "mish", "elu", "logsigmoid"])
def test_smooth_activations_are_not_taken_for_kinks(name: str) -> None:
    torch.manual_seed(1)
    gmap = GradientMap(Kinked(getattr(F, name, torch.tanh)).double(), contrastive_batch())
    assert plan_of(gmap).error <= TOLERANCE
    found, exact = compared(gmap)
    assert error(found, exact) < 1e-4


def test_first_order_maps_have_sensitivities() -> None:
    model, batch = make_task("bert")
    full, first = GradientMap(model, batch), GradientMap(model, batch, second_order=False)
    expected = flat(full.squared_sensitivity(2, rng()))
    assert error(flat(first.squared_sensitivity(2, rng())), expected) < 1e-5
    exact = flat(full.squared_sensitivity(2, rng(), method="exact"))
    assert error(flat(first.squared_sensitivity(2, rng(), method="exact")), exact) < 1e-9


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_autocast_is_left_for_differences(name: str) -> None:
    """bf16 has 8 bits: a small step drowns in them. Differences are of float32 passes."""
    model, batch = make_task(name, dtype=torch.float32)
    exact = flat(GradientMap(model, batch).squared_sensitivity(2, rng(), split=False))
    with torch.autocast("cpu", torch.bfloat16):
        gmap = GradientMap(model, batch, second_order=False)
        found = gmap.squared_sensitivity(2, rng(), split=False, method="difference")
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")
    assert error(flat(found), exact) < 0.01


@pytest.mark.long
def test_half_precision_takes_second_derivatives() -> None:
    model, batch = make_task("bert", dtype=torch.bfloat16)
    gmap = GradientMap(model, batch)
    with pytest.raises(RuntimeError, match="its arithmetic is too coarse"):
        gmap.squared_sensitivity(1, method="difference")
    found = flat(gmap.squared_sensitivity(50, rng()))
    expected = flat(GradientMap(*make_task("bert")).squared_sensitivity(50, rng()))
    assert float((found.sum() / expected.sum()).log().abs()) < math.log(2)


# ------------------------------------------------------------------------------ sample by sample


def estimates(gmap: GradientMap, seeds: int, **settings: Any) -> Tensor:
    return torch.stack(
        [flat(gmap.squared_sensitivity(1, rng(seed), **settings)).double() for seed in range(seeds)]
    )


def assert_unbiased(found: Tensor, exact: Tensor) -> None:
    """Their sums within 4 standard errors, and each within 7: squares have heavier tails."""
    spread = found.std(0) / len(found) ** 0.5
    total, deviation = found.sum(1), found.sum(1).std() / len(found) ** 0.5
    assert abs(float(total.mean() - exact.sum())) < 4 * float(deviation)
    depends = exact > 1e-9 * exact.max()
    off = ((found.mean(0) - exact).abs() / spread.clamp(min=1e-30))[depends]
    assert off.max() < 7
    assert (off > 4).double().mean() < 0.01
    assert found[:, ~depends].sum() <= 1e-6 * exact.sum() * len(found)


@pytest.mark.long
@pytest.mark.statistics
@pytest.mark.parametrize("name", ["bert", pytest.param("vit", marks=pytest.mark.slow)])
def test_split_estimates_are_unbiased(name: str) -> None:
    """200 seeds against s² of the dense Jacobian in float64."""
    model, batch = make_task(name)
    gmap = GradientMap(model, batch)
    layers = layers_of(model, gmap.parameters)
    assert plan_of(gmap).split_layers == set(layers)
    weighty = {name for layer in layers.values() for name in (layer.weight, layer.bias) if name}
    assert len(weighty) > 0.8 * len(gmap.parameters)
    assert_unbiased(estimates(gmap, 200), dense_reference(name)[1].square().sum(0))


def dense(gmap: GradientMap) -> Tensor:
    """J of any small map, `(m, d)`, row by row through `gradient_at`."""
    x = gmap.input.clone().requires_grad_()
    g = flat(gmap.gradient_at(x, create_graph=True))
    rows = []
    with gmap.replay.kernels():
        for one in g:
            (row,) = torch.autograd.grad(one, x, retain_graph=True, allow_unused=True)
            rows.append(torch.zeros_like(x).flatten() if row is None else row.flatten())
    return torch.stack(rows, 1)


@pytest.mark.long
def test_splitting_four_samples_takes_three_quarters_of_the_variance() -> None:
    """Relative variance 2/k, over the number of samples where those matter alike."""
    gmap = GradientMap(*small_convolution(4))
    exact = dense(gmap).square().sum(0)
    split, whole = estimates(gmap, 400), estimates(gmap, 400, split=False)
    for found in (split, whole):
        assert_unbiased(found, exact)
    depends = exact > 0
    relative = [(found.var(0) / exact.square())[depends] for found in (split, whole)]
    assert abs(float(relative[1].mean()) / 2 - 1) < 0.2
    # 1/B for samples that matter alike, Σ s_b⁴/(Σ s_b²)² where they do not.
    parts = torch.stack([rows.square().sum(0) for rows in dense(gmap).chunk(4)])[:, depends]
    expected = 2 * parts.square().sum(0) / parts.sum(0).square()
    assert 0.25 <= float(expected.mean()) / 2 < 0.7
    assert abs(float(relative[0].mean() / expected.mean()) - 1) < 0.2


class Contrastive(nn.Module):
    """Each image is told from the others of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 6), nn.Linear(6, 4)

    def embed(self, pixel_values: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(pixel_values.flatten(1))))

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.embed(pixel_values), labels)}


def against_the_others(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found = model.embed(batch["pixel_values"])  # type: ignore[operator]
    return nn.functional.cross_entropy(found @ found.T, torch.arange(len(found)))


def contrastive_batch(samples: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    pixels = torch.randn(samples, 3, 2, 2, generator=generator, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.arange(samples) % 4}


@pytest.mark.long
def test_samples_that_a_loss_couples_are_not_split() -> None:
    """Also where the same model was tried out with a loss that does not."""
    torch.manual_seed(1)
    model, batch = Contrastive().double(), contrastive_batch()
    plain, coupled = (
        GradientMap(model, batch),
        GradientMap(model, batch, loss_fn=against_the_others),
    )
    assert plan_of(plain).split_layers == {"first", "last"}
    assert plan_of(coupled).split_layers == set()
    assert_unbiased(estimates(plain, 200), dense(plain).square().sum(0))
    assert_unbiased(estimates(coupled, 200), dense(coupled).square().sum(0))


@pytest.mark.long
def test_samples_that_batch_statistics_couple_are_not_split() -> None:
    model, batch = small_convolution(4, batch_norm=True)
    gmap = GradientMap(model, batch)
    assert plan_of(gmap).split_layers == set()
    assert_unbiased(estimates(gmap, 200), dense(gmap).square().sum(0))
    model.eval()  # with fixed statistics they are apart, and tried out anew
    fixed = GradientMap(model, batch)
    assert plan_of(fixed).split_layers == {"convolution", "head"}
    assert_unbiased(estimates(fixed, 200), dense(fixed).square().sum(0))


@pytest.mark.long
def test_what_stands_still_is_as_the_others_are() -> None:
    """LoRA starts with a product of zero: its first factor's gradient is zero, so that its samples
    seem apart. They are not, once it has moved.
    """

    class Adapted(Contrastive):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(12, 2, bias=False), nn.Linear(2, 6, bias=False)
            nn.init.zeros_(self.up.weight)

        def embed(self, pixel_values: Tensor) -> Tensor:
            flat = pixel_values.flatten(1)
            return self.last(torch.tanh(self.first(flat) + self.up(self.down(flat))))

    torch.manual_seed(1)
    model, batch = Adapted().double(), contrastive_batch()
    gmap = GradientMap(model, batch, loss_fn=against_the_others)
    assert not gmap.gradient()["down.weight"].any()
    assert plan_of(gmap).split_layers == set()
    assert plan_of(GradientMap(model, batch)).split_layers == {"first", "last", "down", "up"}
    nn.init.normal_(model.up.weight)
    moved = GradientMap(model, batch, loss_fn=against_the_others)
    assert_unbiased(estimates(moved, 200), dense(moved).square().sum(0))


class Sequences(nn.Module):
    """Time first, as recurrent models had it, and a weight that is used without its layer."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.inner, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = pixel_values.flatten(1).reshape(len(labels), self.steps, 4).transpose(0, 1)
        hidden = torch.tanh(self.inner(x)).cumsum(0).mean(0)
        logits = nn.functional.linear(hidden, self.head.weight, self.head.bias)
        return {"loss": nn.functional.cross_entropy(logits, labels)}


@pytest.mark.long
def test_other_layouts_and_uses_stay_unbiased() -> None:
    """Rows that are steps seem to be samples where there are as many of both; a fused loss's head
    does not run.
    """
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(2)
    pixels = torch.randn(3, 3, 2, 2, generator=generator, dtype=torch.float64)
    batch = {"pixel_values": pixels, "labels": torch.arange(3)}
    gmap = GradientMap(Sequences(3).double(), batch)
    exact = dense(gmap).square().sum(0)
    assert exact.all()
    assert plan_of(gmap).split_layers == set()
    assert_unbiased(estimates(gmap, 200), exact)


@pytest.mark.slow
def test_windows_stay_unbiased() -> None:
    gmap = GradientMap(*swin(torch.float64))
    exact = estimates(gmap, 300, method="exact")
    found = estimates(gmap, 300)
    assert plan_of(gmap).split_layers
    gap = found.sum(1).mean() - exact.sum(1).mean()
    spread = (found.sum(1).var() + exact.sum(1).var()).sqrt() / 300**0.5
    assert abs(float(gap)) < 4 * float(spread)
    by_name = (found.mean(0) - exact.mean(0)).abs() / (
        ((found.var(0) + exact.var(0)) / 300).sqrt().clamp(min=1e-30)
    )
    depends = exact.mean(0) > 1e-9 * exact.mean(0).max()
    assert (by_name[depends] > 4).double().mean() < 0.01


def test_layers_that_others_hold_are_no_samples_products() -> None:
    """A head tied to the embeddings is both: neither is split."""
    model, batch = make_task("gpt2_lm", dtype=torch.float32)
    gmap = GradientMap(model, batch, share_input_embeddings=True)
    assert "lm_head" not in layers_of(model, gmap.parameters)
    found, exact = compared(gmap)
    assert error(found.sqrt(), exact.sqrt()) < 0.01


# ----------------------------------------------------------------------------- nothing else changes


def test_model_and_generators_are_as_before() -> None:
    model, batch = make_task("bert", dtype=torch.float32, dropout=0.1)
    model.train()
    norm = nn.BatchNorm1d(8)
    model.register_module("norm", norm)
    for number, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, 0.5) if number % 2 else None

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        hidden = model.bert(batch["input_ids"], batch["attention_mask"]).last_hidden_state[:, 0]
        return nn.functional.cross_entropy(model.classifier(model.norm(hidden)), batch["labels"])

    gmap = GradientMap(model, batch, loss_fn=loss_fn)
    gmap.gradient()
    before = copy.deepcopy(model.state_dict())
    state, versions = torch.get_rng_state(), gmap.versions()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    for settings in ({}, {"split": False}, {"method": "exact"}):
        gmap.squared_sensitivity(2, rng(), **settings)
    assert torch.equal(torch.get_rng_state(), state)
    assert gmap.versions() == versions
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert all(module.training for module in model.modules())
    for number, p in enumerate(model.parameters()):
        assert (p.grad == 0.5).all() if number % 2 else p.grad is None
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks


@pytest.mark.parametrize("first", [False, True])
def test_activation_checkpointing_is_not_split(first: bool) -> None:
    """Layers run twice there. Also for a model that was tried out before it was switched on."""
    model, batch = make_task("bert", dtype=torch.float32, dropout=0.1)
    model.train()
    torch.manual_seed(9)
    plain = GradientMap(model, batch, second_order=False)
    expected = flat(plain.squared_sensitivity(2, rng(), split=False))
    if not first:
        model = make_task("bert", dtype=torch.float32, dropout=0.1)[0].train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    torch.manual_seed(9)
    gmap = GradientMap(model, batch, second_order=False)
    assert plan_of(gmap).split_layers == set()
    found = flat(gmap.squared_sensitivity(2, rng()))
    assert error(found, expected) < 0.01


def test_reentrant_checkpointing_is_refused_by_torch() -> None:
    """It is refused before training, too: it cannot run under `torch.autograd.grad`."""
    model, batch = make_task("bert", dtype=torch.float32)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        GradientMap(model, batch, second_order=False).squared_sensitivity(1)


def test_parameters_without_derivatives_do_not_count_in_trials() -> None:
    """A softmax hides what is added to all keys: of a key's bias, steps differ by rounding alone,
    as much as by what they change.
    """
    model, batch = make_task("bert", dtype=torch.float32)
    model.train().gradient_checkpointing_enable({"use_reentrant": False})  # parameters only
    gmap = GradientMap(model, {key: value[:1] for key, value in batch.items()})
    plan = plan_of(gmap)
    assert gmap.replay.recomputes()
    assert plan.error < 0.01
    assert plan.shrink == 1.0


def test_a_loss_without_second_backward_has_sensitivities() -> None:
    """Fused kernels and chunked losses have none."""

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return torch.tanh(x)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, slope: Tensor) -> Tensor:
            return slope * (1 - torch.tanh(ctx.saved_tensors[0]) ** 2)

    class Model(Contrastive):
        def embed(self, pixel_values: Tensor) -> Tensor:
            return self.last(Fused.apply(self.first(pixel_values.flatten(1))))

    torch.manual_seed(1)
    model, plain = Model().double(), Contrastive().double()
    plain.load_state_dict(model.state_dict())
    batch = contrastive_batch()
    gmap = GradientMap(model, batch)
    expected = flat(GradientMap(plain, batch).squared_sensitivity(2, rng()))
    assert error(flat(gmap.squared_sensitivity(2, rng())), expected) < 1e-5
