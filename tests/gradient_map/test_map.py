"""The gradient map against models that are fed their continuous input directly and differentiated
densely.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    TASKS,
    VOCABULARY,
    WITHHELD,
    dense_reference,
    flat,
    image_batch,
    make_task,
    reference_gradient,
    reference_input,
    rng,
    small_convolution,
    token_batch,
    torch_rng,
)
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_gradguard import GradientMap
from hf_gradguard.gradient_map.inputs import model_loss
from hf_gradguard.gradient_map.parameters import find_tables

DENSE = ("bert", "gpt2", "vit")

# These compute a part in float32 also when the model is float64: GPT-2's LM loss and T5's their
# logits, Llama's and T5's layer norms their variance, the reference's eager Llama and ViT their
# softmax. A step of h leaves an error of the order of 1e-7/h in a central difference, so the steps
# are larger, and the tolerance is 1e-3 where it is 1e-8 for the others.
FLOAT32_INSIDE = {"gpt2_lm": 1e-3, "llama": 1e-3, "t5": 3e-4, "vit": 1e-3}


class Embedder(nn.Module):
    """Takes token ids and embeds them as often as it is told."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.embedding, self.head, self.times = nn.Embedding(VOCABULARY, 4), nn.Linear(4, 3), times

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
        hidden = torch.zeros(len(input_ids), 4)
        for _time in range(self.times):
            hidden = hidden + self.embedding(input_ids).mean(1)
        return {"loss": nn.functional.cross_entropy(self.head(hidden), labels)}


def direction(gmap: GradientMap, seed: int = 5) -> Tensor:
    return torch.randn(gmap.input.shape, generator=torch_rng(seed), dtype=gmap.input.dtype)


def parameter_direction(gmap: GradientMap, seed: int = 6) -> dict[str, Tensor]:
    generator = torch_rng(seed)
    return {
        n: torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for n, p in gmap.parameters.items()
    }


def relative_error(value: Tensor, reference: Tensor) -> float:
    return float((value - reference).norm() / reference.norm())


def central_difference(
    g: Callable[[Tensor], dict[str, Tensor]], x: Tensor, v: Tensor, step: float
) -> Tensor:
    """d/dα g(x + αv) at 0, to fourth order in the step."""

    def difference(step: float) -> Tensor:
        return (flat(g(x + step * v)) - flat(g(x - step * v))) / (2 * step)

    return (4 * difference(step) - difference(2 * step)) / 3


def step_and_tolerance(name: str) -> tuple[float, float]:
    """Of a central difference on `make_task(name)`."""
    return (FLOAT32_INSIDE[name], 1e-3) if name in FLOAT32_INSIDE else (3e-4, 1e-8)


# ------------------------------------------------------------------------------------------
# gradient, vjp, jvp


@pytest.mark.parametrize("name", TASKS)
def test_input_is_the_embedding_output_or_the_pixels(name: str) -> None:
    model, batch = make_task(name)
    assert torch.equal(GradientMap(model, batch).input, reference_input(name, model, batch))


@pytest.mark.parametrize("name", TASKS)
def test_gradient_equals_the_reference_at_this_and_at_another_input(name: str) -> None:
    """1e-5: ViT's and Llama's eager softmax in the reference is float32 (1e-7); the others agree to
    1e-15.
    """
    model, batch = make_task(name)
    reference, _ = make_task(name, attn_implementation="eager")
    gmap = GradientMap(model, batch)
    moved = gmap.input + 0.3 * direction(gmap)
    for x, gradient in ((gmap.input, gmap.gradient()), (moved, gmap.gradient_at(moved))):
        expected = reference_gradient(name, reference, batch, x)
        assert list(gradient) == list(expected)
        assert relative_error(flat(gradient), flat(expected)) < 1e-5
    assert relative_error(flat(gmap.gradient_at(moved)), flat(gmap.gradient())) > 1e-2


@pytest.mark.long
@pytest.mark.parametrize("name", DENSE)
def test_products_equal_the_dense_jacobian(name: str) -> None:
    _, jacobian = dense_reference(name)
    model, batch = make_task(name)
    gmap = GradientMap(model, batch)
    v, delta = direction(gmap), parameter_direction(gmap)
    assert relative_error(flat(gmap.jvp(v)), v.flatten() @ jacobian) < 1e-5
    assert relative_error(gmap.vjp(delta).flatten(), jacobian @ flat(delta)) < 1e-5


@pytest.mark.parametrize("name", DENSE)
def test_vjp_of_some_parameters_takes_the_others_as_zero(name: str) -> None:
    gradient, jacobian = dense_reference(name)
    model, batch = make_task(name)
    gmap = GradientMap(model, batch)
    delta = parameter_direction(gmap)
    some = list(delta)[3:9:2]
    chosen = flat({n: torch.full_like(g, n in some) for n, g in gradient.items()})
    product = gmap.vjp({n: delta[n] for n in some})
    assert relative_error(product.flatten(), jacobian @ (chosen * flat(delta))) < 1e-5
    assert torch.equal(gmap.vjp({}), torch.zeros_like(gmap.input))


@pytest.mark.parametrize("name", TASKS)
def test_products_equal_central_differences(name: str) -> None:
    model, batch = make_task(name)
    reference, _ = make_task(name, attn_implementation="eager")
    gmap = GradientMap(model, batch)
    step, tolerance = step_and_tolerance(name)
    v, delta = direction(gmap), parameter_direction(gmap)
    expected = central_difference(
        lambda x: reference_gradient(name, reference, batch, x), gmap.input, v, step
    )
    assert relative_error(flat(gmap.jvp(v)), expected) < tolerance
    # One number of Jδ, ⟨v, Jδ⟩; in units of ‖Jᵀv‖‖δ‖/√d, which is its size for a random δ.
    size = expected.norm() * flat(delta).norm() / len(expected) ** 0.5
    assert abs((v * gmap.vjp(delta)).sum() - expected @ flat(delta)) < tolerance * size


@pytest.mark.parametrize("name", TASKS)
def test_products_are_adjoint(name: str) -> None:
    """⟨v, Jδ⟩ = ⟨Jᵀv, δ⟩ to 1e-5: products of float32 parts (see above) are equal to rounding
    only.
    """
    model, batch = make_task(name)
    gmap = GradientMap(model, batch)
    v, delta = direction(gmap), parameter_direction(gmap)
    left, right = (v * gmap.vjp(delta)).sum(), flat(gmap.jvp(v)) @ flat(delta)
    assert (
        abs(left - right)
        < 1e-5 * flat(gmap.jvp(v)).norm() * flat(delta).norm() / len(flat(delta)) ** 0.5
    )
    assert abs(left) > 0


@pytest.mark.parametrize("name", ["bert", "gpt2_lm", "vit", "t5"])
def test_gradient_at_with_a_graph_differentiates_to_the_vjp(name: str) -> None:
    model, batch = make_task(name)
    gmap = GradientMap(model, batch)
    delta = parameter_direction(gmap)
    x = gmap.input.requires_grad_()
    gradient = gmap.gradient_at(x, create_graph=True)
    (product,) = torch.autograd.grad(flat(gradient) @ flat(delta), x)
    assert relative_error(product, gmap.vjp(delta)) < 1e-5  # float32 parts, as above
    assert not any(tensor.requires_grad for tensor in gmap.gradient_at(x).values())


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("training", [False, True])
def test_sharing_the_embeddings_gives_what_backward_gives(name: str, training: bool) -> None:
    """1e-5: the fused attention of the plain backward computes Llama's and T5's float32 parts in
    another order.
    """
    model, batch = make_task(name)
    model.train(training)
    gradient = GradientMap(model, batch, share_input_embeddings=True).gradient()
    model.zero_grad()
    model(**batch).loss.backward()
    expected = {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()
    }
    assert list(gradient) == [n for n, p in model.named_parameters() if p.requires_grad]
    for parameter, tensor in gradient.items():
        torch.testing.assert_close(tensor, expected[parameter], rtol=1e-5, atol=1e-7)


def test_loss_and_a_loss_function() -> None:
    model, batch = make_task("bert")
    assert torch.allclose(GradientMap(model, batch).loss, model(**batch).loss, rtol=1e-12)
    gmap, double = (
        GradientMap(model, batch, loss_fn=lambda model, batch, k=k: k * model(**batch).loss)
        for k in (1.0, 2.0)
    )
    torch.testing.assert_close(flat(double.gradient()), 2 * flat(gmap.gradient()))
    assert not gmap.loss.requires_grad
    assert not gmap.input.requires_grad


def test_parameters_that_the_loss_does_not_use_get_zeros() -> None:
    model, batch = small_convolution()
    gmap = GradientMap(model, batch)
    v, delta = direction(gmap), parameter_direction(gmap)
    products = (
        gmap.gradient(),
        gmap.gradient_at(gmap.input),
        gmap.jvp(v),
        gmap.squared_sensitivity(3),
        gmap.squared_sensitivity(3, method="exact"),
    )
    for tensors in products:
        assert torch.equal(tensors["unused"], torch.zeros(3, dtype=torch.float64))
        assert tensors["head.weight"].abs().min() > 0
    assert torch.equal(gmap.vjp({"unused": delta["unused"]}), torch.zeros_like(gmap.input))
    used = {n: d for n, d in delta.items() if n != "unused"}
    assert torch.equal(gmap.vjp(delta), gmap.vjp(used))


def test_gradient_that_does_not_depend_on_the_input_has_no_jacobian() -> None:
    """A loss linear in x and in θ apart: g is constant in x."""

    class Separate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, dtype=torch.float64))

        def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": pixel_values.sum() + self.weight.square().sum()}

    gmap = GradientMap(Separate(), image_batch())
    assert torch.equal(gmap.gradient()["weight"], torch.full((2,), 2.0, dtype=torch.float64))
    assert not gmap.jvp(direction(gmap))["weight"].any()
    assert not gmap.vjp({"weight": torch.ones(2)}).any()
    for method in (None, "exact"):
        assert not gmap.squared_sensitivity(4, method=method)["weight"].any()


# ---------------------------------------------------------------------------------------- squared
# sensitivity


@pytest.mark.long
@pytest.mark.statistics
@pytest.mark.parametrize("method", ["difference", "exact"])
@pytest.mark.parametrize("name", DENSE)
def test_squared_sensitivity_is_unbiased(name: str, method: str) -> None:
    """Of k exact probes, k·estimate/s² is χ² with k degrees of freedom: its mean has standard error
    sqrt(2/k).

    Each parameter within 6 of them (χ²'s tail is heavier than a normal one), and the sum over all
    parameters, an estimate of Tr(JJᵀ) with standard error sqrt(2/k)·‖JJᵀ‖_F, within 4. Those of
    differences err by no more: sums over samples of such squares.
    """
    _, jacobian = dense_reference(name)
    model, batch = make_task(name)
    probes = 199
    estimate = flat(GradientMap(model, batch).squared_sensitivity(probes, rng(), method=method))
    exact = jacobian.square().sum(0)
    depends = (
        exact > 1e-12 * exact.max()
    )  # key biases cancel in the softmax: s = 0 up to (float32) rounding
    assert depends.double().mean() > 0.9
    ratio = estimate[depends] / exact[depends]
    assert (ratio - 1).abs().max() < 6 * (2 / probes) ** 0.5
    assert (estimate[~depends] <= 1e-12 * exact.max()).all()
    assert (
        abs(estimate.sum() - exact.sum()) < 4 * (2 / probes) ** 0.5 * (jacobian @ jacobian.T).norm()
    )


@pytest.mark.long
@pytest.mark.statistics
def test_exact_squared_sensitivity_has_relative_variance_two_over_k() -> None:
    """From n = 800 estimates with k = 4, of one parameter in each of three tensors; s² from a dense
    Jacobian.

    k·estimate/s² is χ²_k, with mean k and kurtosis 3 + 12/k. So the mean of the estimates has
    relative standard error sqrt(2/(kn)) = 0.025 and their variance sqrt((2 + 12/k)/n) = 0.08.
    Within 5 of them.
    """
    model, batch = small_convolution()
    gmap, generator, k, n = GradientMap(model, batch), rng(), 4, 800
    draws = [gmap.squared_sensitivity(k, generator, method="exact") for _ in range(n)]
    for name in ("convolution.weight", "head.weight", "head.bias"):
        parameter = dict(model.named_parameters())[name]

        def first(x: Tensor, parameter: Tensor = parameter) -> Tensor:
            loss = model(x, batch["labels"])["loss"]
            return torch.autograd.grad(loss, parameter, create_graph=True)[0].flatten()[0]

        exact = torch.autograd.functional.jacobian(first, batch["pixel_values"]).square().sum()
        ratio = torch.stack([draw[name].flatten()[0] for draw in draws]) / exact
        assert abs(ratio.mean() - 1) < 5 * (2 / (k * n)) ** 0.5
        assert abs(ratio.var() / (2 / k) - 1) < 5 * ((2 + 12 / k) / n) ** 0.5


def test_squared_sensitivity_takes_its_randomness_from_the_generator() -> None:
    model, batch = make_task("bert")
    gmap = GradientMap(model, batch)
    one, again, other = (flat(gmap.squared_sensitivity(2, rng(seed))) for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    # Without one it uses fresh entropy, whatever the global generator's seed.
    torch.manual_seed(0)
    first = flat(gmap.squared_sensitivity(2))
    torch.manual_seed(0)
    assert not torch.equal(first, flat(gmap.squared_sensitivity(2)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_probes": 0}, "num_probes must be at least 1, but is 0"),
        ({"num_probes": -1}, "num_probes must be at least 1, but is -1"),
        ({"method": "dense"}, "method must be 'difference' or 'exact', but is 'dense'"),
    ],
)
def test_squared_sensitivity_refuses(settings: dict[str, Any], message: str) -> None:
    gmap = GradientMap(*small_convolution())
    with pytest.raises(ValueError, match=message):
        gmap.squared_sensitivity(**settings)


# -------------------------------------------------------------------- one function: dropout, batch
# statistics


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit", "convnext", "t5"])
def test_one_dropout_mask(name: str) -> None:
    """In train mode all evaluations replay the first one's draws, and none but the first disturbs
    the generator.
    """
    model, batch = make_task(name, dropout=0.3)
    model.train()
    torch.manual_seed(7)
    model(**batch)
    after_one_forward = torch.get_rng_state()
    torch.manual_seed(7)
    gmap = GradientMap(model, batch)
    assert torch.equal(torch.get_rng_state(), after_one_forward)

    v, delta = direction(gmap), parameter_direction(gmap)
    calls: dict[str, Callable[[], Tensor]] = {
        "gradient": lambda: flat(gmap.gradient()),
        "gradient_at": lambda: flat(gmap.gradient_at(gmap.input)),
        "jvp": lambda: flat(gmap.jvp(v)),
        "vjp": lambda: gmap.vjp(delta),
        "squared_sensitivity": lambda: flat(gmap.squared_sensitivity(3, rng())),
        "exact": lambda: flat(gmap.squared_sensitivity(3, rng(), method="exact")),
    }
    first = {call: run() for call, run in calls.items()}
    assert torch.equal(torch.get_rng_state(), after_one_forward)
    torch.randn(100)  # somebody else draws in between
    for call, run in calls.items():
        state = torch.get_rng_state()
        assert torch.allclose(run(), first[call], rtol=1e-12, atol=1e-15), call
        assert torch.equal(torch.get_rng_state(), state), call

    assert relative_error(first["gradient_at"], first["gradient"]) < 1e-12
    step, tolerance = step_and_tolerance(name)
    expected = central_difference(gmap.gradient_at, gmap.input, v, step)
    assert relative_error(first["jvp"], expected) < tolerance
    size = expected.norm() * flat(delta).norm() / len(expected) ** 0.5
    assert abs((v * first["vjp"]).sum() - expected @ flat(delta)) < tolerance * size
    # The mask matters: another forward pass has another.
    assert relative_error(flat(GradientMap(model, batch).gradient()), first["gradient"]) > 1e-2


def test_batch_statistics_change_once() -> None:
    """Construction updates them as a forward pass does; nothing else does, and the map stays
    usable.
    """
    model, batch = small_convolution(batch_norm=True)
    plain, _ = small_convolution(batch_norm=True)
    plain(**batch)
    gmap = GradientMap(model, batch)
    statistics = {n: b.clone() for n, b in model.named_buffers()}
    assert statistics.keys() == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    for n, buffer in plain.named_buffers():
        assert torch.equal(statistics[n], buffer)

    gmap.gradient()
    gmap.vjp(gmap.gradient())
    gmap.jvp(direction(gmap))
    for x in (gmap.input, gmap.input + 5):
        gmap.gradient_at(x)
        gmap.gradient_at(x, create_graph=True)
    for n, buffer in model.named_buffers():
        assert torch.equal(buffer, statistics[n]), n


@pytest.mark.parametrize("call", ["gradient", "vjp", "jvp"])
def test_batch_statistics_let_products_follow_gradient_at(call: str) -> None:
    """Evaluating elsewhere must not spoil the graph that the products are taken from."""
    model, batch = small_convolution(batch_norm=True)
    gmap, fresh = GradientMap(model, batch), GradientMap(*small_convolution(batch_norm=True))
    v, delta = direction(gmap), parameter_direction(gmap)
    gmap.gradient_at(gmap.input + 5)
    arguments = {"gradient": (), "vjp": (delta,), "jvp": (v,)}[call]
    value, expected = (getattr(g, call)(*arguments) for g in (gmap, fresh))
    if call != "vjp":
        value, expected = flat(value), flat(expected)
    assert torch.equal(value, expected)


def test_products_follow_batch_statistics() -> None:
    """Batch normalization in train mode is part of the function: its statistics are those of the
    moved input.
    """
    gmap = GradientMap(*small_convolution(batch_norm=True))
    v, delta = direction(gmap), parameter_direction(gmap)
    jvp, vjp = flat(gmap.jvp(v)), gmap.vjp(delta)
    expected = central_difference(gmap.gradient_at, gmap.input, v, 3e-4)
    assert relative_error(jvp, expected) < 1e-6
    assert (
        abs((v * vjp).sum() - expected @ flat(delta)) < 1e-6 * expected.norm() * flat(delta).norm()
    )


def test_batch_statistics_with_a_graph_can_be_differentiated() -> None:
    gmap = GradientMap(*small_convolution(batch_norm=True))
    delta = parameter_direction(gmap)
    expected = gmap.vjp(delta)
    x = gmap.input.requires_grad_()
    (product,) = torch.autograd.grad(flat(gmap.gradient_at(x, create_graph=True)) @ flat(delta), x)
    assert relative_error(product, expected) < 1e-12


# -------------------------------------------------------------------------------------- the model
# is untouched


def state_of(model: nn.Module) -> dict[str, Any]:
    """All that a call could leave behind in a model, in comparable form."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        "training": [m.training for m in model.modules()],
        "hooks": [[list(getattr(m, kind)) for kind in hooks] for m in model.modules()],
        "attention": [
            m.config._attn_implementation for m in model.modules() if isinstance(m, PreTrainedModel)
        ],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "grad": [None if p.grad is None else p.grad.tolist() for p in model.parameters()],
        "values": [p.tolist() for p in model.state_dict().values()],
    }


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("grads", ["none", "set"])
def test_model_is_untouched_by_every_call(training: bool, attention: str, grads: str) -> None:
    model, batch = make_task("bert", dropout=0.1, attn_implementation=attention)
    model.train(training)
    model.get_input_embeddings().register_forward_hook(lambda *_: None)
    if grads == "set":
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.5)
    before = state_of(model)
    gmap = GradientMap(model, batch)
    assert state_of(model) == before
    for call in (
        gmap.gradient,
        lambda: gmap.gradient_at(gmap.input),
        lambda: gmap.gradient_at(gmap.input, create_graph=True),
        lambda: gmap.vjp(gmap.gradient()),
        lambda: gmap.jvp(gmap.input),
        lambda: gmap.squared_sensitivity(2),
        lambda: gmap.squared_sensitivity(2, method="exact"),
    ):
        call()
        assert state_of(model) == before


def test_model_is_untouched_after_an_exception() -> None:
    class Switch:  # no variable of the loss, which would be replayed
        fails = False

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss = model(**batch).loss
        if Switch.fails:
            raise ArithmeticError("on purpose")
        return loss

    AttentionInterface.register("counting", sdpa_attention_forward)
    model, batch = make_task("bert", dropout=0.1, attn_implementation="counting")
    model.train()
    before = state_of(model)
    assert set(before["attention"]) == {"counting"}
    gmap = GradientMap(model, batch, loss_fn=loss_fn)
    random_state = torch.get_rng_state()
    Switch.fails = True
    for call in (
        lambda: gmap.gradient_at(gmap.input),
        lambda: gmap.gradient_at(gmap.input, create_graph=True),
    ):
        with pytest.raises(ArithmeticError, match="on purpose"):
            call()
        assert state_of(model) == before
        assert torch.equal(torch.get_rng_state(), random_state)
    for wrong in (lambda: gmap.jvp(torch.ones(1)), lambda: gmap.vjp({"no": torch.ones(1)})):
        with pytest.raises(ValueError, match=r"v has shape|is no shared parameter"):
            wrong()
        assert state_of(model) == before
    with pytest.raises(ArithmeticError, match="on purpose"):
        GradientMap(model, batch, loss_fn=loss_fn)
    assert state_of(model) == before
    for wrong in ({"input_ids": batch["input_ids"] + 99}, {"position_ids": torch.full((2, 5), 99)}):
        with pytest.raises(
            (IndexError, RuntimeError), match="out of"
        ):  # inside the model: in the input embedding, and after it
            GradientMap(model, {**batch, **wrong})
        assert state_of(model) == before


def test_works_without_grad_mode() -> None:
    model, batch = make_task("bert")
    expected = GradientMap(model, batch)
    with torch.no_grad():
        gmap = GradientMap(model, batch)
        assert torch.equal(flat(gmap.gradient()), flat(expected.gradient()))
        assert torch.equal(flat(gmap.gradient_at(gmap.input)), flat(expected.gradient()))
        assert torch.equal(flat(gmap.jvp(gmap.input)), flat(expected.jvp(gmap.input)))
        assert torch.equal(gmap.vjp(gmap.gradient()), expected.vjp(expected.gradient()))
        assert not torch.is_grad_enabled()


# ---------------------------------------------------------------------------------------- attention


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", DENSE)
def test_sdpa_has_second_derivatives(name: str, training: bool) -> None:
    """Also in train mode with attention dropout 0, where fused kernels are chosen."""
    _, jacobian = dense_reference(name)
    model, batch = make_task(name, attn_implementation="sdpa")
    assert model.config._attn_implementation == "sdpa"
    model.train(training)
    gmap = GradientMap(model, batch)
    v, delta = direction(gmap), parameter_direction(gmap)
    assert relative_error(flat(gmap.jvp(v)), v.flatten() @ jacobian) < 1e-5
    assert relative_error(gmap.vjp(delta).flatten(), jacobian @ flat(delta)) < 1e-5


def test_custom_attention_is_restored() -> None:
    calls = 0

    def custom(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("custom_attention", custom)
    model, batch = make_task(
        "bert", attn_implementation="custom_attention", batch_size=1
    )  # one sample: no padding
    eager, _ = make_task("bert", attn_implementation="eager")
    gmap, expected = GradientMap(model, batch), GradientMap(eager, batch)
    v = direction(gmap)
    assert torch.equal(flat(gmap.gradient()), flat(expected.gradient()))
    assert torch.equal(flat(gmap.jvp(v)), flat(expected.jvp(v)))
    assert torch.equal(flat(gmap.gradient_at(v)), flat(expected.gradient_at(v)))
    assert calls == 0
    assert model.config._attn_implementation == "custom_attention"
    model(**batch)
    assert calls == 2  # layers
    GradientMap(model, batch, second_order=False)
    assert calls == 4


@pytest.mark.parametrize("name", TASKS)
def test_first_order_maps_give_the_same_gradient_and_refuse_the_rest(name: str) -> None:
    model, batch = make_task(name)
    full, first = GradientMap(model, batch), GradientMap(model, batch, second_order=False)
    for value, expected in (
        (first.gradient(), full.gradient()),
        (first.gradient(), full.gradient()),
        (first.gradient_at(full.input + 0.1), full.gradient_at(full.input + 0.1)),
    ):
        assert (
            relative_error(flat(value), flat(expected)) < 1e-6
        )  # other kernels, float32 inside some models
    for call in (
        lambda: first.vjp(full.gradient()),
        lambda: first.jvp(first.input),
        lambda: first.gradient_at(first.input, create_graph=True),
    ):
        with pytest.raises(RuntimeError, match="second_order=False"):
            call()


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit"])
def test_activation_checkpointing_changes_nothing(name: str, dropout: float) -> None:
    """Non-reentrant; the recomputed forward passes must have the same dropout masks and
    attention.
    """
    maps, passes = [], list[int]()

    def count(*_: Any) -> None:
        passes.append(1)

    for checkpointing in (False, True):
        model, batch = make_task(name, dropout=dropout)
        model.train()
        model.config.use_cache = False
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            (layer,) = (
                m
                for n, m in model.named_modules()
                if re.search(r"\.0\.(attention|attn|self_attn)$", n)
            )
            find_tables(model, batch, model_loss)  # so that the map below runs the model once
            layer.register_forward_pre_hook(count)
        torch.manual_seed(9)
        maps.append(GradientMap(model, batch))
    plain, checkpointed = maps
    assert len(passes) == 1
    v, delta = direction(plain), parameter_direction(plain)
    state = torch.get_rng_state()
    for call, tolerance in (
        (lambda gmap: flat(gmap.gradient()), 1e-12),
        (lambda gmap: flat(gmap.jvp(v)), 1e-12),
        (lambda gmap: gmap.vjp(delta), 1e-12),
        (lambda gmap: flat(gmap.gradient_at(v)), 1e-12),
        (lambda gmap: flat(gmap.squared_sensitivity(2, rng(), method="exact")), 1e-12),
    ):
        assert relative_error(call(checkpointed), call(plain)) < tolerance
    assert len(passes) > 2  # it did recompute
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["bert", "gpt2_lm", "vit", "t5"])
def test_bfloat16_autocast(name: str) -> None:
    """Finite, and close in direction to full precision: bf16 has 8 bits, so about 1 % error in
    every product.
    """
    model, batch = make_task(name, dtype=torch.float32)
    exact = GradientMap(model, batch)
    v = direction(exact)
    with torch.autocast("cpu", torch.bfloat16):
        gmap = GradientMap(model, batch)
        delta = exact.gradient()
        pairs = (
            (flat(gmap.gradient()), flat(exact.gradient())),
            (flat(gmap.gradient_at(gmap.input)), flat(exact.gradient())),
            (flat(gmap.jvp(v)), flat(exact.jvp(v))),
            (gmap.vjp(delta).flatten(), exact.vjp(delta).flatten()),
        )
    for value, expected in pairs:
        assert torch.isfinite(value).all()
        assert torch.cosine_similarity(value, expected, dim=0) > 0.99
        assert not torch.equal(value, expected)


def test_bfloat16_parameters() -> None:
    model, batch = make_task("bert", dtype=torch.bfloat16)
    gmap = GradientMap(model, batch)
    assert {t.dtype for t in gmap.gradient().values()} == {torch.bfloat16}
    assert {t.dtype for t in gmap.jvp(gmap.input).values()} == {torch.bfloat16}
    assert gmap.vjp(gmap.gradient()).dtype == torch.bfloat16
    # Sums of squares need more digits.
    assert {t.dtype for t in gmap.squared_sensitivity(3).values()} == {torch.float32}


# ------------------------------------------------------------------------------------------ what is
# not shared


@pytest.mark.parametrize("name", TASKS)
def test_token_embeddings_are_withheld(name: str) -> None:
    model, batch = make_task(name)
    trainable = [n for n, p in model.named_parameters() if p.requires_grad]
    gmap = GradientMap(model, batch)
    assert (
        list(gmap.gradient())
        == list(gmap.parameters)
        == [n for n in trainable if n not in WITHHELD[name]]
    )
    for parameter, tensor in gmap.gradient().items():
        assert tensor.shape == gmap.parameters[parameter].shape
    shares_all = GradientMap(model, batch, share_input_embeddings=True)
    assert list(shares_all.gradient()) == trainable
    for embedding in WITHHELD[name]:
        rows = shares_all.gradient()[embedding].any(1)
        assert (
            rows[batch["input_ids"].unique()].sum() > 1
        )  # this is what would give the tokens away


@pytest.mark.parametrize(
    ("name", "aliases", "tied"),
    [
        ("bert", ["bert.embeddings.word_embeddings.weight"], False),
        (
            "bert_mlm",
            ["bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"],
            True,
        ),
        ("gpt2_lm", ["lm_head.weight", "transformer.wte.weight"], True),
        (
            "t5",
            [
                "decoder.embed_tokens.weight",
                "encoder.embed_tokens.weight",
                "lm_head.weight",
                "shared.weight",
            ],
            True,
        ),
    ],
)
def test_withholding_warns_once_and_names_the_parameter(
    name: str, aliases: list[str], tied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, batch = make_task(name)
    for _ in range(3):
        GradientMap(model, batch)
    (message,) = [r.getMessage() for r in caplog.records if r.name.startswith("hf_gradguard")]
    assert message.startswith(f"Withheld, neither shared nor trained: {', '.join(aliases)}. ")
    assert ("output head is the same tensor" in message) == tied
    assert "share_input_embeddings=True" in message


@pytest.mark.parametrize("name", ["bert_lora", "vit", "convnext"])
def test_nothing_withheld_nothing_said(name: str, caplog: pytest.LogCaptureFixture) -> None:
    GradientMap(*make_task(name))
    GradientMap(*make_task("bert"), share_input_embeddings=True)
    assert not [r for r in caplog.records if r.name.startswith("hf_gradguard")]


def test_untied_embeddings_of_encoder_and_decoder_are_both_withheld() -> None:
    model, batch = make_task("t5")
    model.decoder.embed_tokens = nn.Embedding.from_pretrained(
        model.shared.weight.detach().clone(), freeze=False
    )
    model.lm_head.weight = nn.Parameter(model.shared.weight.detach().clone())
    names = set(GradientMap(model, batch).gradient())
    assert not names & {
        "shared.weight",
        "encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
    }
    assert "lm_head.weight" in names
    assert "decoder.block.0.layer.0.SelfAttention.q.weight" in names


@pytest.mark.parametrize("name", ["bert", "gpt2_lm"])
def test_lora_on_the_embedding_is_withheld(name: str) -> None:
    base, batch = make_task(name)
    targets = ["query", "word_embeddings"] if name == "bert" else ["c_attn", "wte"]
    model = get_peft_model(
        base, LoraConfig(r=2, target_modules=targets, fan_in_fan_out=name != "bert")
    ).double()
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "lora_" in n:
                p.normal_(generator=torch_rng())
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    embedding = {n for n in trainable if "lora_embedding" in n}
    assert len(embedding) == 2
    gmap = GradientMap(model, batch)
    assert set(gmap.gradient()) == trainable - embedding
    assert flat(gmap.gradient()).any()
    assert torch.equal(gmap.input, model.get_input_embeddings()(batch["input_ids"]))
    v = direction(gmap)
    step, tolerance = step_and_tolerance(name)
    assert (
        relative_error(flat(gmap.jvp(v)), central_difference(gmap.gradient_at, gmap.input, v, step))
        < tolerance
    )

    shares_all = GradientMap(model, batch, share_input_embeddings=True).gradient()
    model(**batch).loss.backward()
    assert shares_all.keys() == trainable
    for n, p in model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(shares_all[n], p.grad, rtol=1e-5, atol=1e-8)


def test_sequence_to_sequence_input_is_the_encoders() -> None:
    model, batch = make_task("t5")
    batch["labels"] = batch["labels"][:, :3].clone()
    gmap = GradientMap(model, batch)
    assert gmap.input.shape == (2, 5, 8)
    assert torch.equal(gmap.input, model.shared(batch["input_ids"]))
    # Moving it moves what the encoder's first layer gets, and nothing of the decoder's input.
    seen: dict[str, Tensor] = {}
    for part in ("encoder", "decoder"):
        getattr(model, part).block[0].register_forward_pre_hook(
            lambda _, args, part=part: seen.__setitem__(part, args[0].detach())
        )
    gmap.gradient_at(gmap.input)
    still = dict(seen)
    gmap.gradient_at(gmap.input + 1)
    torch.testing.assert_close(seen["encoder"], still["encoder"] + 1)
    assert torch.equal(seen["decoder"], still["decoder"])


# ------------------------------------------------------------------------------------------- a
# chain's views


def test_a_view_has_the_gradient_before_and_the_jacobian_of_the_model() -> None:
    gmap = GradientMap(*make_task("bert"))
    gradient = {n: g.clone() for n, g in gmap.gradient().items()}
    first = next(iter(gradient))
    shared = {n: 2 * g for n, g in gradient.items()}
    shared[first] = torch.zeros_like(shared[first])
    view = gmap.masked(shared)
    assert all(torch.equal(view.gradient()[n], shared[n]) for n in shared)
    assert all(torch.equal(gmap.gradient()[n], gradient[n]) for n in gradient)
    v = direction(gmap)
    assert torch.equal(flat(view.jvp(v)), flat(gmap.jvp(v)))
    assert torch.equal(view.vjp(gradient), gmap.vjp(gradient))

    ones = {n: torch.ones_like(g) for n, g in gradient.items()}
    assert gmap.restrict(ones) is ones
    kept = view.restrict(ones)
    for n, g in gradient.items():  # withheld: zero now and not before
        assert torch.equal(
            kept[n].bool(), (g == 0) if n == first else torch.ones_like(g, dtype=torch.bool)
        )


def test_views_of_views_keep_what_was_withheld_earlier() -> None:
    model, batch = small_convolution()
    gmap = GradientMap(model, batch)
    ones = {n: torch.ones_like(g) for n, g in gmap.gradient().items()}

    def without(gradient: dict[str, Tensor], name: str) -> dict[str, Tensor]:
        return {n: torch.zeros_like(g) if n == name else g for n, g in gradient.items()}

    once = without(gmap.gradient(), "head.weight")
    view = gmap.masked(once)
    twice = view.masked(without(once, "head.bias"))
    kept = {n: bool(t.any()) for n, t in twice.restrict(ones).items()}
    expected = {
        "convolution.weight",
        "convolution.bias",
        "unused",
    }  # an unused parameter was zero from the start
    assert {n for n, k in kept.items() if k} == expected
    assert {n for n, t in view.restrict(ones).items() if t.any()} == expected | {"head.bias"}


# --------------------------------------------------------------------------------------------------
# refusals


def test_shape_errors() -> None:
    gmap = GradientMap(*make_task("bert"))
    for wrong in (torch.ones(2, 4, 8), torch.ones(80), torch.ones(1, 5, 8)):
        for call in (gmap.gradient_at, gmap.jvp):
            with pytest.raises(ValueError, match=r"has shape .*\(2, 5, 8\)"):
                call(wrong)
    with pytest.raises(
        ValueError, match=r"delta\['classifier.bias'\] has shape \(4,\), the parameter \(3,\)"
    ):
        gmap.vjp({"classifier.bias": torch.ones(4)})


def test_a_wrong_name_lists_the_right_ones() -> None:
    gmap = GradientMap(*make_task("bert"))
    with pytest.raises(
        ValueError,
        match=r"'classifier.bia' is no shared parameter.*classifier\.weight, classifier\.bias",
    ):
        gmap.vjp({"classifier.bia": torch.ones(3)})
    with pytest.raises(ValueError, match="word_embeddings"):  # withheld, so not shared
        gmap.vjp({"bert.embeddings.word_embeddings.weight": torch.ones(VOCABULARY, 8)})


@pytest.mark.parametrize("name", ["bert", "gpt2_lm", "vit"])
def test_no_labels(name: str) -> None:
    model, batch = make_task(name)
    del batch["labels"]
    with pytest.raises(ValueError, match=r"returned no loss.*`labels`"):
        GradientMap(model, batch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tokens, pixels: {**tokens, **pixels}, "both `input_ids` and `pixel_values`"),
        (
            lambda tokens, pixels: {"labels": tokens["labels"]},
            "neither `input_ids` nor `pixel_values`",
        ),
        (
            lambda tokens, pixels: {**pixels, "pixel_values": pixels["pixel_values"].int()},
            "torch.int32.*floating point",
        ),
        (
            lambda tokens, pixels: {**pixels, "pixel_values": pixels["pixel_values"].byte()},
            "torch.uint8",
        ),
    ],
)
def test_batches_without_one_continuous_input(
    change: Callable[..., dict[str, Tensor]], message: str
) -> None:
    model, _ = make_task("bert")
    with pytest.raises(ValueError, match=message):
        GradientMap(model, change(token_batch(), image_batch()))


def test_nothing_to_share() -> None:
    model, batch = make_task("bert")
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="every parameter of the model is frozen"):
        GradientMap(model, batch)
    model.get_input_embeddings().requires_grad_(True)
    with pytest.raises(ValueError, match="every trainable parameter is an input embedding"):
        GradientMap(model, batch)
    gmap = GradientMap(model, batch, share_input_embeddings=True)
    assert list(gmap.gradient()) == ["bert.embeddings.word_embeddings.weight"]


def test_model_without_get_input_embeddings() -> None:
    with pytest.raises(
        ValueError, match=r"Embedder names no input embedding.*get_input_embeddings"
    ):
        GradientMap(Embedder(), token_batch())


def test_embedding_that_does_not_run() -> None:
    model = Embedder(0)
    model.get_input_embeddings = lambda: model.embedding
    with pytest.raises(ValueError, match="Embedding of Embedder ran 0 times"):
        GradientMap(model, token_batch())
    assert not model.embedding._forward_hooks


def test_embedding_that_runs_once() -> None:
    model = Embedder()
    model.get_input_embeddings = lambda: model.embedding
    gmap = GradientMap(model, token_batch())
    assert gmap.input.shape == (2, 5, 4)
    assert list(gmap.gradient()) == ["head.weight", "head.bias"]


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda model, batch: model(**batch).logits.sum(1),
        lambda model, batch: model(**batch).loss.detach(),
    ],
)
def test_loss_must_be_a_differentiable_scalar(loss_fn: Callable[..., Tensor]) -> None:
    with pytest.raises(ValueError, match="must be a differentiable scalar"):
        GradientMap(*make_task("bert"), loss_fn=loss_fn)


def sum_of_squares(gradient: dict[str, Tensor], extras: dict[str, Tensor]) -> Tensor:
    return torch.stack([(t - extras[name]).square().sum() for name, t in gradient.items()]).sum()


@pytest.mark.parametrize("task", TASKS)
def test_several_inputs_at_once_are_as_one_by_one(task: str) -> None:
    model, batch = make_task(task, dropout=0.2)
    model.train()
    gmap = GradientMap(model, batch)
    xs = gmap.input + 0.1 * torch.randn(
        3, *gmap.input.shape, generator=torch_rng(), dtype=torch.float64
    )
    labels = torch.stack([batch["labels"], batch["labels"].flip(0), batch["labels"].roll(1, 0)])
    extras = {
        name: torch.randn(3, *p.shape, generator=torch_rng(), dtype=torch.float64)
        for name, p in gmap.parameters.items()
    }
    values, slopes, _ = gmap.slopes_at(sum_of_squares, xs, extras, labels=labels)
    for k in range(3):
        x = xs[k].clone().requires_grad_()
        own = {name: tensor[k] for name, tensor in extras.items()}
        value = sum_of_squares(gmap.gradient_at(x, create_graph=True, labels=labels[k]), own)
        torch.testing.assert_close(values[k], value.detach())
        torch.testing.assert_close(slopes[k], gmap.input_gradient(value, x)[0])


def test_slopes_are_finite_differences() -> None:
    gmap = GradientMap(*make_task("bert"))
    extras = {
        name: torch.zeros(2, *p.shape, dtype=torch.float64) for name, p in gmap.parameters.items()
    }
    step = 1e-5 * torch.randn(gmap.input.shape, generator=torch_rng(), dtype=torch.float64)
    values, slopes, _ = gmap.slopes_at(
        sum_of_squares, torch.stack([gmap.input + step, gmap.input - step]), extras
    )
    torch.testing.assert_close(
        values[0] - values[1], ((slopes[0] + slopes[1]) * step).sum(), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("count", [1, 2])
def test_slopes_by_soft_labels(count: int) -> None:
    model, batch = make_task("bert")

    def soft(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        batch = dict(batch)
        return -(batch.pop("labels") * model(**batch).logits.log_softmax(-1)).sum(-1).mean()

    labels = torch.rand(count, 2, 3, generator=torch_rng(), dtype=torch.float64)
    gmap = GradientMap(model, {**batch, "labels": labels[0]}, loss_fn=soft)
    xs = gmap.input + 0.1 * torch.randn(
        count, *gmap.input.shape, generator=torch_rng(), dtype=torch.float64
    )
    extras = {
        name: torch.zeros(count, *p.shape, dtype=torch.float64)
        for name, p in gmap.parameters.items()
    }
    _, slopes, others = gmap.slopes_at(sum_of_squares, xs, extras, labels=labels)
    for k in range(count):
        x, own = xs[k].clone().requires_grad_(), labels[k].clone().requires_grad_()
        value = sum(
            t.square().sum() for t in gmap.gradient_at(x, create_graph=True, labels=own).values()
        )
        for found, expected in zip(
            (slopes[k], others["labels"][k]), gmap.input_gradient(value, x, own), strict=True
        ):
            torch.testing.assert_close(found, expected)


def test_several_inputs_of_another_shape_are_refused() -> None:
    gmap = GradientMap(*make_task("bert"))
    with pytest.raises(ValueError, match=r"\(K, 2, 5, 8\)"):
        gmap.slopes_at(sum_of_squares, torch.zeros(2, 5, 8), {})
