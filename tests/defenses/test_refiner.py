"""Refiner, with evaluation networks of a few weights. The published networks have tests of their
own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import PAD, SmallNetwork, flat, make_task, reference_gradient, reference_input, rng
from torch import Tensor, nn

from hf_gradguard import GradientMap, chain, make_defense
from hf_gradguard.gradient_map.parameters import layer_numbers

SPECIAL = SmallNetwork.special_token_ids


def network_for(task: str) -> SmallNetwork:
    return SmallNetwork("image", 3) if task in ("vit", "convnext") else SmallNetwork("text", 8)


class Marks:
    """What Refiner asks of a tokenizer."""

    all_special_ids = SPECIAL
    pad_token_id, cls_token_id, sep_token_id = SPECIAL


def refiner(task: str = "bert", **settings: Any) -> Any:
    published = {"objective": "weighted", "evaluation_network": network_for(task)}
    defense = make_defense("refiner", **published | settings)
    defense.prepare(make_task("bert")[0], Marks())
    return defense


def text_task(**settings: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """The batch of `make_task("bert")` with a special token in front and one at the end of each
    sample.
    """
    model, batch = make_task("bert", **settings)
    batch["input_ids"][:, 0] = 1
    batch["input_ids"][0, -1] = 2
    batch["input_ids"][1:, -2] = 2
    return model, batch


# Against a computation that shares no code with the package


def _reference(
    task: str, model: nn.Module, batch: dict[str, Tensor], start: Tensor, free: Tensor, steps: int,
    rate: float, beta: float, tau: float, low: float = -torch.inf, high: float = torch.inf,
) -> Tensor:  # fmt: skip
    """x*, by Adam as its paper writes it, on Eq. 2 with the relative utility metric."""
    x0 = reference_input(task, model, batch)
    network = network_for(task)
    here = reference_gradient(task, model, batch, x0)
    parameters = dict(model.named_parameters())
    blocks = layer_numbers(here)
    weight = {n: (g * parameters[n].detach()).abs() * tau ** blocks[n] for n, g in here.items()}
    scale = sum((weight[n] * g).square().sum() for n, g in here.items())
    x, first, second = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for step in range(1, steps + 1):
        x.requires_grad_()
        there = reference_gradient(task, model, batch, x, create_graph=True)
        metric = sum((weight[n] * (there[n] - here[n])).square().sum() for n in here) / scale
        ratio = network.noise_ratio(x.float(), batch.get("attention_mask")).mean()
        (gradient,) = torch.autograd.grad(metric - beta * ratio, x)
        gradient = gradient * free
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient.square()
        change = rate * (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
        x = (x.detach() - change).clamp(low, high)
    return x


@pytest.mark.parametrize("tau", [0.95, 0.5])
def test_text_follows_the_equations(tau: float) -> None:
    model, batch = text_task(attn_implementation="eager")
    defense = refiner(alpha=0.0, iterations=4, learning_rate=0.02, beta=0.7, tau=tau)
    found = defense.refine(GradientMap(model, batch), rng())
    free = ~torch.isin(batch["input_ids"], torch.tensor(SPECIAL))[..., None]
    start = reference_input("bert", model, batch)
    expected = _reference("bert", model, batch, start, free, 4, 0.02, 0.7, tau)
    torch.testing.assert_close(found.input, expected, rtol=1e-5, atol=1e-6)  # D is in float32
    gradient = reference_gradient("bert", model, batch, found.input)
    torch.testing.assert_close(flat(found.gradient), flat(gradient))


def test_images_follow_the_equations() -> None:
    model, batch = make_task("vit", attn_implementation="eager")
    found = refiner("vit", alpha=0.0, iterations=4, learning_rate=0.05).refine(
        GradientMap(model, batch), rng()
    )
    free = torch.ones_like(batch["pixel_values"][:, :1])
    expected = _reference(
        "vit", model, batch, batch["pixel_values"], free, 4, 0.05, 1.0, 0.95, 0.0, 1.0
    )
    torch.testing.assert_close(found.input, expected, rtol=1e-5, atol=1e-6)  # D is in float32


def test_an_edge_device_takes_three_times_the_passes_that_appendix_o_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Refiner's Table 3 has two passes forward and back through the model, and one through the
    network, an iteration. Appendix O, by which a pass back takes as long as one forward, multiplies
    28.47 ms by 640 for ten iterations and 32 samples: a third of these.
    """
    counts = {"model": 0, "through the gradient": 0, "network": 0}
    gradient_at, input_gradient = GradientMap.gradient_at, GradientMap.input_gradient
    noise_ratio = SmallNetwork.noise_ratio

    def counted(key: str, function: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            counts[key] += 1
            return function(*given, **named)

        return call

    model, batch = make_task("vit", attn_implementation="eager")
    defense, gmap = refiner("vit", iterations=10), GradientMap(model, batch)
    monkeypatch.setattr(GradientMap, "gradient_at", counted("model", gradient_at))
    monkeypatch.setattr(
        GradientMap, "input_gradient", counted("through the gradient", input_gradient)
    )
    monkeypatch.setattr(SmallNetwork, "noise_ratio", counted("network", noise_ratio))
    defense.refine(gmap, rng())
    at_the_end = 1  # of what was found, without a step
    iterations = {"model": 10 + at_the_end, "through the gradient": 10, "network": 10 + at_the_end}
    assert counts == iterations
    passes = 10 * (2 + 2 + 2)  # forward and back of each
    printed = round(18.22 / 28.47e-3)  # passes
    assert passes * 32 == 3 * printed


def test_metric_as_printed_and_without_element_weights() -> None:
    """One iteration from x itself moves nothing UM measures, so the last value is UM at a known
    place.
    """
    model, batch = text_task()
    gmap = GradientMap(model, batch)
    here = gmap.gradient()
    blocks = layer_numbers(here)
    for element_wise in (True, False):
        for normalize in (True, False):
            found = refiner(
                alpha=0.0, iterations=1, normalize=normalize, element_wise=element_wise
            ).refine(gmap, rng())
            weight = {
                n: 0.95 ** blocks[n]
                * ((g * gmap.parameters[n]).abs() if element_wise else torch.ones_like(g))
                for n, g in here.items()
            }
            metric = sum(
                (weight[n] * (found.gradient[n] - g)).square().sum() for n, g in here.items()
            )
            size = sum((weight[n] * g).square().sum() for n, g in here.items()) if normalize else 1
            assert found.utility_metric == pytest.approx([0.0, float(metric / size)], rel=1e-6)


def test_start_is_blended_with_random_tokens() -> None:
    model, batch = text_task()
    gmap = GradientMap(model, batch)
    found = refiner(alpha=0.25, iterations=1, learning_rate=1e-12).refine(gmap, rng())
    noise = (found.input - 0.75 * gmap.input) / 0.25
    matrix = model.bert.embeddings.word_embeddings.weight.detach()
    words = ~torch.isin(batch["input_ids"], torch.tensor(SPECIAL))
    distance = torch.cdist(noise[words], matrix)
    nearest = distance.argmin(1)
    assert distance.min(1).values.max() < 1e-8
    assert not torch.isin(nearest, torch.tensor(SPECIAL)).any()
    assert len(nearest.unique()) > 1


def test_image_start_is_blended_with_uniform_noise() -> None:
    model, batch = make_task("vit", batch_size=16)
    gmap = GradientMap(model, batch)
    found = refiner("vit", alpha=0.5, iterations=1, learning_rate=1e-12).refine(gmap, rng())
    noise = (found.input - 0.5 * gmap.input) / 0.5
    assert noise.min() >= -1e-9
    assert noise.max() <= 1 + 1e-9
    # 3,072 uniform draws: the mean's standard error is 0.0052, the deviation's below 0.003.
    assert float(noise.mean()) == pytest.approx(0.5, abs=0.026)
    assert float(noise.std()) == pytest.approx(12**-0.5, abs=0.015)


# What stays and what moves


def test_padding_and_special_tokens_keep_their_embeddings() -> None:
    model, batch = text_task()
    gmap = GradientMap(model, batch)
    x = refiner().refine(gmap, rng()).input
    kept = torch.isin(batch["input_ids"], torch.tensor(SPECIAL))
    assert torch.equal(x[kept], gmap.input[kept])
    assert (x[~kept] != gmap.input[~kept]).any(1).all()


def test_images_stay_in_their_range() -> None:
    model, batch = make_task("vit")
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
    m, s = (torch.tensor(v, dtype=torch.float64).view(1, 3, 1, 1) for v in (mean, std))
    batch["pixel_values"] = (batch["pixel_values"] - m) / s
    x = (
        refiner("vit", learning_rate=5.0, image_mean=mean, image_std=std)
        .refine(GradientMap(model, batch), rng())
        .input
    )
    pixels = x * s + m
    assert pixels.min() == pytest.approx(0, abs=1e-9)
    assert pixels.max() == pytest.approx(1, abs=1e-9)


def test_model_and_global_generator_are_left_alone() -> None:
    model, batch = text_task(dropout=0.3)
    model.train()
    gmap = GradientMap(model, batch)
    before, state = [p.clone() for p in model.parameters()], torch.get_rng_state()
    refiner()(gmap, rng())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("task", ["bert", "gpt2", "t5", "bert_lora", "vit", "convnext", "llama"])
def test_every_kind_of_model(task: str) -> None:
    model, batch = make_task(task)
    gmap = GradientMap(model, batch)
    shared = refiner(task)(gmap, rng())
    gradient = gmap.gradient()
    assert {n: t.shape for n, t in shared.items()} == {n: t.shape for n, t in gradient.items()}
    assert not torch.equal(flat(shared), flat(gradient))


def test_checkpointed_layers_and_dropout() -> None:
    """Recomputed layers draw the same masks, so refining gives the same as without recomputing."""
    found = []
    for checkpointed in (False, True):
        model, batch = text_task(dropout=0.2)
        model.train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(3)
        found.append(refiner(iterations=3).refine(GradientMap(model, batch), rng()).input)
    torch.testing.assert_close(found[0], found[1])


def test_longer_descent_lowers_the_objective() -> None:
    model, batch = text_task()
    found = refiner(iterations=30, learning_rate=0.02).refine(GradientMap(model, batch), rng())
    objective = [u - d for u, d in zip(found.utility_metric, found.noise_ratio, strict=True)]
    assert len(objective) == 31
    assert objective[-1] < objective[0]
    assert found.noise_ratio[-1] > found.noise_ratio[0]
    # Where D is all there is to gain, UM may rise; by itself it falls.
    settings = {"iterations": 30, "learning_rate": 0.02, "beta": 0.0}
    alone = refiner(**settings).refine(GradientMap(model, batch), rng())
    assert alone.utility_metric[-1] < alone.utility_metric[0]


def test_noise_can_follow() -> None:
    model, batch = text_task()
    gmap = GradientMap(model, batch)
    both = chain(
        refiner(iterations=2), make_defense("optimal_noise", num_probes=1, relative_scale=0.5)
    )
    alone = refiner(iterations=2)(gmap, rng())
    shared = both(gmap, rng())
    assert not torch.equal(flat(shared), flat(alone))
    distance = float((flat(shared) - flat(alone)).norm() / flat(alone).norm())
    assert 0.1 < distance < 2


# Projection


@pytest.mark.parametrize("settings", [{"epsilon": 0.05}, {"relative_epsilon": 0.02}])
def test_projection_is_at_the_distance_asked_for(settings: dict[str, float]) -> None:
    gmap = GradientMap(*text_task())
    gradient, free = flat(gmap.gradient()), flat(refiner()(gmap, rng()))
    shared = flat(refiner(**settings)(gmap, rng()))
    bound = settings.get("epsilon", settings.get("relative_epsilon", 0) * float(gradient.norm()))
    assert float((free - gradient).norm()) > bound
    assert float((shared - gradient).norm()) == pytest.approx(bound, rel=1e-9)
    cosine = torch.nn.functional.cosine_similarity(shared - gradient, free - gradient, dim=0)
    assert float(cosine) == pytest.approx(1, abs=1e-9)


def test_projection_leaves_what_is_near_alone() -> None:
    gmap = GradientMap(*text_task())
    assert torch.equal(flat(refiner(epsilon=1e6)(gmap, rng())), flat(refiner()(gmap, rng())))


# Warm start


def _swapped(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.flip(0) for key, value in batch.items()}


def test_warm_start_goes_on_where_it_was() -> None:
    model, batch = text_task()
    defense = refiner(iterations=4, warm_start=10, alpha=0.5)
    first = defense.refine(GradientMap(model, batch), rng())
    assert len(first.utility_metric) == 5
    second = defense.refine(
        GradientMap(model, _swapped(batch)), rng()
    )  # known by content, not by place
    assert len(second.utility_metric) == 3
    assert second.utility_metric[0] == pytest.approx(first.utility_metric[-1])
    assert second.noise_ratio[0] == pytest.approx(first.noise_ratio[-1])


def test_new_example_beside_a_known_one_gets_all_iterations() -> None:
    model, batch = text_task()
    defense = refiner(iterations=4, warm_start=10)
    defense.refine(GradientMap(model, {k: v[:1] for k, v in batch.items()}), rng())
    assert len(defense.refine(GradientMap(model, batch), rng()).utility_metric) == 5
    assert len(defense.refine(GradientMap(model, batch), rng()).utility_metric) == 3


def test_known_text_is_known_at_any_padding() -> None:
    model, batch = text_task()
    defense = refiner(iterations=4, warm_start=10)
    defense.refine(GradientMap(model, batch), rng())
    second = {k: v[1:, :4] if v.dim() == 2 else v[1:] for k, v in batch.items()}
    assert not (batch["attention_mask"][1, 4:]).any()
    assert len(defense.refine(GradientMap(model, second), rng()).utility_metric) == 3


def test_memory_is_bounded_and_forgets_the_oldest() -> None:
    model, batch = text_task(batch_size=4)
    defense = refiner(iterations=2, warm_start=3)
    defense.refine(GradientMap(model, batch), rng())
    assert len(defense.state_dict()) == 3
    last = {k: v[1:] for k, v in batch.items()}
    assert len(defense.refine(GradientMap(model, last), rng()).utility_metric) == 2
    first = {k: v[:1] for k, v in batch.items()}
    assert len(defense.refine(GradientMap(model, first), rng()).utility_metric) == 3


def test_memory_is_saved_and_loaded_in_order() -> None:
    model, batch = text_task(batch_size=12)
    defense, other = refiner(iterations=2, warm_start=12), refiner(iterations=2, warm_start=12)
    defense.refine(GradientMap(model, batch), rng())
    other.load_state_dict(dict(sorted(defense.state_dict().items())))
    assert list(other.state_dict()) == list(defense.state_dict())
    one, two = (d.refine(GradientMap(model, batch), rng()) for d in (defense, other))
    assert torch.equal(one.input, two.input)
    assert one.utility_metric == two.utility_metric


def test_equal_sentences_in_a_batch() -> None:
    model, batch = text_task()
    batch = {key: value[:1].repeat_interleave(3, 0) for key, value in batch.items()}
    found = refiner(iterations=3, warm_start=5).refine(GradientMap(model, batch), rng())
    assert torch.isfinite(found.input).all()
    assert not torch.equal(found.input[0], found.input[1])  # each from a start of its own


# Edges


def test_sentence_of_one_word() -> None:
    model, batch = text_task(batch_size=1)
    batch["input_ids"][0, 1:] = torch.tensor([7, 2, PAD, PAD])
    batch["attention_mask"][0, 3:] = 0
    gmap = GradientMap(model, batch)
    found = refiner().refine(gmap, rng())
    assert (found.input != gmap.input).any(-1).nonzero().tolist() == [[0, 1]]


def test_batch_without_a_word_is_refused() -> None:
    model, batch = text_task()
    batch["input_ids"][:] = torch.tensor([1, 2, PAD, PAD, PAD])
    batch["attention_mask"][:, 2:] = 0
    with pytest.raises(ValueError, match=r"holds no word.*Leave empty texts out"):
        refiner()(GradientMap(model, batch), rng())


def test_row_without_a_word_stays_as_it_is() -> None:
    model, batch = text_task()
    batch["input_ids"][1] = torch.tensor([1, 2, PAD, PAD, PAD])
    batch["attention_mask"][1] = torch.tensor([1, 1, 0, 0, 0])
    gmap = GradientMap(model, batch)
    found = refiner().refine(gmap, rng())
    assert torch.equal(found.input[1], gmap.input[1])
    assert not torch.equal(found.input[0], gmap.input[0])


def test_batch_without_an_attention_mask() -> None:
    model, batch = text_task()
    del batch["attention_mask"]
    assert torch.isfinite(flat(refiner()(GradientMap(model, batch), rng()))).all()


@pytest.mark.parametrize("shift", [-0.5, 0.5])
def test_pixels_outside_their_range_are_refused(shift: float) -> None:
    model, batch = make_task("vit")
    batch["pixel_values"] = batch["pixel_values"] + shift
    with pytest.raises(
        ValueError,
        match=r"Pixels range from .* where \[0, 1\] is expected.*image_mean and image_std",
    ):
        refiner("vit")(GradientMap(model, batch), rng())


def test_missing_network_is_an_error() -> None:
    with pytest.raises(ValueError, match="refiner needs an evaluation network"):
        make_defense("refiner", objective="weighted")(GradientMap(*text_task()), rng())


def test_network_for_another_kind_of_input_is_an_error() -> None:
    with pytest.raises(
        ValueError, match="takes text input, but the evaluation network is a SmallNetwork"
    ):
        refiner("vit")(GradientMap(*text_task()), rng())


def test_network_of_another_space_is_an_error() -> None:
    defense = make_defense(
        "refiner", objective="weighted", evaluation_network=SmallNetwork("text", 5)
    )
    with pytest.raises(ValueError, match="another embedding space"):
        defense(GradientMap(*text_task()), rng())


def test_zero_gradient_stays_finite() -> None:
    model, batch = text_task()
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.zeros(3))
    gmap = GradientMap(
        model, batch, loss_fn=lambda model, batch: model(**batch).logits.square().sum()
    )
    assert not flat(gmap.gradient()).any()
    assert torch.isfinite(flat(refiner()(gmap, rng()))).all()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"alpha": 1.5}, "alpha must be a finite number at least 0 and at most 1"),
        ({"alpha": "half"}, "alpha must be"),
        ({"beta": -1}, "beta must be a finite number at least 0"),
        ({"tau": 0}, "tau must be a finite number above 0"),
        ({"learning_rate": 0}, "learning_rate must be a finite number above 0"),
        ({"iterations": 0}, "iterations must be a whole number of at least 1"),
        ({"iterations": 2.5}, "iterations must be a whole number"),
        ({"warm_start": -1}, "warm_start must be a whole number of at least 0"),
        ({"epsilon": 0}, "epsilon must be a finite number above 0"),
        ({"epsilon": 0.1, "relative_epsilon": 0.1}, "Give epsilon or relative_epsilon, not both"),
        ({"image_mean": [0.5]}, "Give image_mean and image_std together"),
    ],
)
def test_bad_settings_say_the_range(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_defense("refiner", **{"objective": "weighted", **settings})


def test_settings_name_the_network() -> None:
    settings = refiner(iterations=3).settings()
    assert settings["evaluation_network"] == "small-text"
    assert settings["iterations"] == 3
    assert "epsilon" not in settings


def test_a_network_of_a_class_of_ones_own_is_taken_as_it_is() -> None:
    class Own(torch.nn.Module):
        def noise_ratio(self, pixels: Tensor) -> Tensor:
            return pixels.std((1, 2, 3))

    model, batch = make_task("vit")
    batch["pixel_values"] = batch["pixel_values"].sigmoid()
    defense = make_defense("refiner", objective="weighted", evaluation_network=Own())
    message = defense(GradientMap(model, batch))
    assert message.keys() == GradientMap(model, batch).gradient().keys()
