"""Synthetic samples, fitted to what is wanted (`gradient_sketch`), and moved (`refiner`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import PAD, SmallNetwork, flat, make_task, rng
from torch import Tensor
from transformers import BartConfig, BartForConditionalGeneration

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks.candidates.fitted import make_synthetic
from hf_gradguard.defenses.sketch import SyntheticSamples
from hf_gradguard.gradient_map.layers import Pass, layers_of
from hf_gradguard.gradient_map.per_sample import span as sample_span
from hf_gradguard.gradient_map.per_sample.span import Granularity
from hf_gradguard.gradient_map.random_batch import synthetic_samples, text_length
from hf_gradguard.randomness import Stream

SPECIAL = SmallNetwork.special_token_ids


class Marks:
    """What Refiner asks of a tokenizer."""

    all_special_ids = SPECIAL
    pad_token_id, cls_token_id, sep_token_id = SPECIAL


def text_map(**settings: Any) -> GradientMap:
    model, batch = make_task("bert", **settings)
    batch["input_ids"][:, 0] = 1
    batch["input_ids"][0, -1] = 2
    batch["input_ids"][1:, -2] = 2
    return GradientMap(model, batch, second_order=False)


def sketch(**settings: Any) -> Any:
    """It sends its first message as well."""
    return prepared("gradient_sketch", settings)


def refiner(**settings: Any) -> Any:
    return prepared("refiner", {"objective": "cosine"} | settings)


def prepared(name: str, settings: dict[str, Any]) -> Any:
    defense = make_defense(name, **{"min_batches": 1} | settings)
    defense.prepare(make_task("bert")[0], Marks())
    return defense


def power(tensors: dict[str, Tensor]) -> float:
    return float(flat(tensors).square().sum())


# What is shared


@pytest.mark.parametrize(
    ("factors", "iterations"),
    [
        ("message", 0),
        ("message", 2),
        ("sample", 0),
        ("sample", 2),
        ("parameter", 0),
        ("token", 0),
    ],
)
@pytest.mark.parametrize("task", ["bert", "vit"])
def test_what_is_left_out_is_the_rest_of_the_power(
    task: str, factors: str, iterations: int
) -> None:
    """‖e‖² = (1 - cos²) ‖v‖², over messages that feed it back."""
    model, batch = make_task(task)
    gmap = GradientMap(model, batch, second_order=False)
    settings: dict[str, Any] = {"factors": factors, "samples": 4}
    defense = refiner(iterations=iterations, **settings) if iterations else sketch(**settings)
    left, total, sent = dict.fromkeys(gmap.gradient(), 0.0), 0, 0
    for seed in range(3):
        wanted = {name: g + left[name] for name, g in gmap.gradient().items()}
        message = defense(gmap, Stream.from_seeds(seed))
        left = {name: v - message[name] for name, v in wanted.items()}
        cosine = float(torch.nn.functional.cosine_similarity(flat(message), flat(wanted), dim=0))
        assert cosine == pytest.approx(message.metrics["fit"], rel=1e-6)
        assert 0 < cosine < 1
        assert power(left) == pytest.approx((1 - cosine**2) * power(wanted), rel=1e-9)
        assert message.metrics["left_out"] == pytest.approx(
            (power(left) / power(gmap.gradient())) ** 0.5, rel=1e-6
        )
        total, sent = total + flat(gmap.gradient()), sent + flat(message)
    torch.testing.assert_close(sent + flat(left), total)


@pytest.mark.parametrize("name", ["gradient_sketch", "refiner", "refiner_published"])
@pytest.mark.parametrize("count", [2, 3])
def test_what_is_sent_is_of_enough_batches(name: str, count: int) -> None:
    """The first one that says something is that of the sum of the gradients until then."""
    model, batch = make_task("vit")
    gmap = GradientMap(model, batch)
    settings: dict[str, Any] = {"samples": 4}
    if name == "refiner_published":
        settings = {"evaluation_network": SmallNetwork("image", 3), "iterations": 1}
    defense = make_defense(name, **settings, error_feedback=True, min_batches=count)
    assert defense.facts.warmup_messages == count - 1
    for _ in range(count - 1):
        empty = defense(gmap, rng())
        assert not flat(empty).any()
        assert not any(mask.any() for mask in empty.transmitted.values())
        assert not empty.exact
    whole = {name: count * g for name, g in gmap.gradient().items()}
    plain = make_defense(name, **settings, error_feedback=False)
    wanted = plain(gmap.corrected(whole), rng())
    torch.testing.assert_close(flat(defense(gmap, rng())), flat(wanted))


def test_a_batch_that_says_nothing_does_not_count() -> None:
    """The next message would be one batch's own."""
    gmap, defense = text_map(), sketch(min_batches=2)
    nothing = gmap.corrected({n: torch.zeros_like(g) for n, g in gmap.gradient().items()})
    sent = [bool(flat(defense(one, rng())).any()) for one in (nothing, gmap, gmap, nothing)]
    assert sent == [False, False, True, True]


def test_who_comes_too_seldom_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """What it left out is dropped, and all its messages are empty."""
    gmap, defense = text_map(), sketch(min_batches=2)
    for visit in range(3):
        defense.at_step(30 * visit)
        assert not flat(defense(gmap, rng())).any()
    assert "more than 20 optimizer steps old" in caplog.text
    assert "give min_batches=1" in caplog.text


def test_what_is_held_is_resumed() -> None:
    gmap, one, two = text_map(), sketch(min_batches=2), sketch(min_batches=2)
    one(gmap, rng())
    two.load_state_dict(one.state_dict())
    assert flat(two(gmap, rng())).any()


@pytest.mark.parametrize("value", [0, 256, 1.5, True])
def test_batches_are_a_number_that_can_be_counted(value: Any) -> None:
    with pytest.raises(ValueError, match="min_batches must be"):
        sketch(min_batches=value)
    with pytest.raises(ValueError, match="min_batches must be"):
        refiner(min_batches=value)


def test_one_factor_is_the_published_scale() -> None:
    """a = ⟨g(x*), v⟩/‖g(x*)‖², of the samples' gradient as a whole."""
    gmap = text_map()
    wanted = gmap.gradient()
    made = synthetic_samples(gmap, 3, rng())
    there = made.gradient()
    scale = float(torch.dot(flat(there), flat(wanted))) / power(there)
    fit = SyntheticSamples(made, wanted, "message").fit(made.input)
    torch.testing.assert_close(flat(fit.nearest), scale * flat(there))


def test_more_factors_are_never_farther() -> None:
    gmap = text_map()
    made = synthetic_samples(gmap, 6, rng())
    found = [
        SyntheticSamples(made, gmap.gradient(), factors).fit(made.input).cosine
        for factors in ("message", "sample", "parameter", "token")
    ]
    assert found == sorted(found)
    assert len(set(found)) == 4


@pytest.mark.parametrize("most", [256, 3])
def test_factors_of_tokens_are_least_squares(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every weight the nearest matrix to the wanted one among sums of tokens' products, by a
    dense solver; with few factors, among sums of neighbors'.
    """
    monkeypatch.setattr(sample_span, "TERMS", most)
    gmap = text_map()
    made = synthetic_samples(gmap, 2, rng())
    wanted = gmap.gradient()
    nearest = SyntheticSamples(made, wanted, "token").fit(made.input).nearest
    layers = layers_of(made.model, made.parameters)
    told = Pass.evaluate(made, made.input, layers)
    checked, directions = 0, []
    for name, layer in layers.items():
        if layer.weight is None or not isinstance(layer.module, torch.nn.Linear):
            continue
        ((slopes, features),) = told.rows(name, 2) or [(None, None)]
        size = 1 if most == 256 or slopes.shape[1] == 1 else 6  # 16 tokens in 3 groups at most
        groups = [
            slopes[one, i : i + size].T @ features[one, i : i + size]
            for one in range(2)
            for i in range(0, slopes.shape[1], size)
        ]
        basis = torch.stack([group.flatten() for group in groups], 1)
        target = wanted[layer.weight].flatten()
        expected = basis @ torch.linalg.lstsq(basis, target[:, None], driver="gelsd").solution[:, 0]
        found = nearest[layer.weight].flatten()
        if expected.norm() > 1e-8 * flat(wanted).norm():
            directions.append(float(expected.norm() / found.norm()))
            cosine = torch.nn.functional.cosine_similarity(found, expected, dim=0)
            assert cosine > 1 - 1e-4
            checked += 1
    assert checked > 5
    assert max(directions) < 1.001 * min(directions)  # one factor more, for all of it


@pytest.mark.parametrize("length", [3, 5, 7, 8])
@pytest.mark.parametrize("padding", [0, 2])
def test_nothing_of_the_batch_is_in_synthetic_samples(length: int, padding: int) -> None:
    """Another batch, of other texts and labels, more of them, of any length, with padding on any
    side, gives the same samples.
    """
    gmap, stream = text_map(), Stream.from_seeds
    other = {**gmap.batch, "labels": (gmap.batch["labels"] + 1) % 3}
    ids = torch.full((2, 8), PAD)
    begin = min(padding, 8 - length)
    ids[0, begin : begin + length] = torch.tensor([1, *[7] * (length - 2), 2])
    ids[1, :3] = torch.tensor([1, 9, 2])
    other |= {"input_ids": ids, "attention_mask": (ids != PAD).to(other["attention_mask"])}
    other = {name: torch.cat([value, value]) for name, value in other.items()}
    two = GradientMap(gmap.model, other, second_order=False)
    found = [synthetic_samples(one, 5, stream(3), SPECIAL) for one in (gmap, two)]
    for name in found[0].batch:
        assert torch.equal(found[0].batch[name], found[1].batch[name])
    assert found[0].batch["input_ids"].shape == (5, 8)  # all that the model takes
    assert bool(found[0].batch["attention_mask"].all())
    assert not (found[0].batch["input_ids"] == PAD).any()
    assert found[0].batch["input_ids"][:, 0].eq(1).all()
    assert found[0].batch["input_ids"][:, -1].eq(2).all()


@pytest.mark.parametrize(
    ("task", "settings", "samples", "length"),
    [
        ("bert", {"hidden_size": 96, "max_position_embeddings": 200}, 16, 16),
        ("bert", {"hidden_size": 96, "max_position_embeddings": 200}, 4, 32),  # 128 tokens
        ("bert", {"hidden_size": 96, "max_position_embeddings": 200}, 2, 64),
        ("bert", {"hidden_size": 96, "max_position_embeddings": 200}, 1, 100),  # half of all
        ("bert", {"hidden_size": 96, "max_position_embeddings": 20}, 1, 16),
        ("bert_lora", {"hidden_size": 96, "max_position_embeddings": 200}, 1, 16),  # of rank 2
        ("bert_mlm", {"hidden_size": 96, "max_position_embeddings": 200}, 4, 32),
    ],
)
def test_texts_have_more_tokens_than_a_gradient_tells_apart(
    task: str, settings: dict[str, Any], samples: int, length: int
) -> None:
    model, batch = make_task(task, **settings)
    gmap = GradientMap(model, batch, second_order=False)
    assert text_length(gmap, samples) == length
    assert synthetic_samples(gmap, samples, rng()).input.shape[:2] == (samples, length)


@pytest.mark.parametrize(("task", "samples"), [("bert", 4), ("vit", 16)])
def test_of_texts_few_are_made_up_and_of_images_more(task: str, samples: int) -> None:
    """By the defense, and by whoever knows its mechanism."""
    gmap = GradientMap(*make_task(task), second_order=False)
    settings: dict[str, Any] = {"error_feedback": False}
    usual, stated = (
        make_defense("gradient_sketch", **settings | more) for more in ({}, {"samples": samples})
    )
    one, other = (defense(gmap, Stream.from_seeds(1)) for defense in (usual, stated))
    torch.testing.assert_close(dict(one), dict(other), rtol=0, atol=0)
    mechanism = usual.mechanism(one)
    assert mechanism is not None
    assert mechanism.fitted is not None
    draw = torch.Generator()
    made = make_synthetic(mechanism.fitted, gmap.batch, gmap.model, list(gmap.parameters), draw)
    assert len(made.input) == samples


def test_messages_differ_and_repeat_with_the_stream() -> None:
    gmap = text_map()
    one, again, other = (
        flat(sketch(error_feedback=False)(gmap, Stream.from_seeds(seed))) for seed in (1, 1, 2)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("task", ["bert", "vit"])
def test_refining_brings_the_message_nearer(task: str) -> None:
    """The same samples, with and without steps."""
    gmap = GradientMap(*make_task(task), second_order=False)
    fits = [
        defense(gmap, Stream.from_seeds(3)).metrics["fit"]
        for defense in (sketch(samples=4, factors="sample"), refiner(samples=4))
    ]
    assert fits[0] < fits[1] < 1


# The descent


@pytest.mark.parametrize("factors", ["message", "sample"])
def test_the_slope_is_that_of_the_objective(factors: Granularity) -> None:
    """Against central differences of 1 - cos in float64, factors fitted anew at each end. LoRA has
    no parameters but those of layers.
    """
    model, batch = make_task("bert_lora", batch_size=3)
    with torch.no_grad():  # LoRA starts at zero, where nothing depends on the input
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.linspace(-1, 1, p.numel(), dtype=p.dtype).view_as(p))
    gmap = GradientMap(model, batch, second_order=False)
    made = synthetic_samples(gmap, 3, Stream.from_seeds(4))
    search = SyntheticSamples(made, gmap.gradient(), factors)
    x = made.input
    slope = search.slope(x, search.fit(x))
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        direction = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        step = 1e-4
        ends = [1 - search.fit(x + sign * step * direction).cosine for sign in (1, -1)]
        expected = (ends[0] - ends[1]) / (2 * step)
        assert float((slope * direction).sum()) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("factors", ["message", "sample"])
def test_steps_bring_it_nearer_and_marks_stay(factors: Granularity) -> None:
    gmap = text_map()
    found = refiner(iterations=6, factors=factors, samples=2).refine(gmap, Stream.from_seeds(2))
    assert len(found.utility_metric) == 7
    assert found.utility_metric[-1] < found.utility_metric[0]
    assert found.noise_ratio == []
    made = synthetic_samples(gmap, 2, Stream.from_seeds(2), SPECIAL)
    marks = torch.isin(made.batch["input_ids"], torch.tensor(SPECIAL))
    assert torch.equal(found.input[marks], made.input[marks])
    assert (found.input[~marks] != made.input[~marks]).any(1).all()


def test_a_brake_raises_what_looks_like_noise() -> None:
    network = SmallNetwork("text", 8)
    ratios = []
    for beta in (0.0, 50.0):
        defense = refiner(evaluation_network=network, iterations=4, beta=beta)
        found = defense.refine(text_map(), Stream.from_seeds(1))
        ratios.append(found.noise_ratio)
    assert ratios[0][0] == ratios[1][0]
    assert ratios[1][1] > ratios[0][1]


# Settings


def test_no_evaluation_network_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("a network was asked for")

    monkeypatch.setattr("hf_gradguard.networks.network_for", never)
    monkeypatch.setattr("hf_gradguard.networks.load_network", never)
    for defense in (sketch(), refiner()):
        assert not defense.facts.needs_second_order
        defense(text_map(), rng())
    with pytest.raises(AssertionError, match="a network was asked for"):
        refiner(beta=1.0, iterations=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "cosines"}, "objective must be 'cosine' or 'weighted'"),
        ({"alpha": 0.5}, "alpha is a setting of objective='weighted'"),
        ({"warm_start": 5}, "warm_start is a setting of objective='weighted'"),
        ({"epsilon": 0.1}, "epsilon is a setting of objective='weighted'"),
        ({"objective": "weighted", "samples": 3}, "samples is a setting of objective='cosine'"),
        ({"optimizer": "sgd"}, "optimizer is a setting of objective='weighted'"),
        ({"objective": "weighted", "optimizer": "adagrad"}, "optimizer must be 'adam' or 'sgd'"),
        ({"factors": "word"}, "factors must be 'message' or 'sample'"),
        ({"factors": "token"}, "factors must be 'message' or 'sample'"),
        ({"samples": 0}, "samples must be a whole number of at least 1"),
        ({"iterations": 0}, "stay where they were drawn are gradient_sketch"),
        ({"iterations": -1}, "iterations must be a whole number of at least 1"),
    ],
)
def test_settings_of_the_other_form_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_defense("refiner", **{"objective": "cosine", **settings})


def test_settings_of_a_sketch_are_checked() -> None:
    with pytest.raises(ValueError, match="factors must be 'message' or 'sample' or 'parameter'"):
        sketch(factors="word")
    with pytest.raises(ValueError, match="samples must be a whole number"):
        sketch(samples=0)
    with pytest.raises(TypeError, match="gradient_sketch has no setting iterations"):
        sketch(iterations=2)


def test_published_settings_are_the_papers() -> None:
    """Sections 3 and 5.1, Figure 5: α, β, ι, τ, the rate, and UM as it is printed."""
    published = make_defense("refiner_published")
    names = ("alpha", "beta", "iterations", "tau", "learning_rate", "optimizer", "normalize")
    assert [getattr(published, name) for name in names] == [0.5, 1.0, 10, 0.95, 1.0, "sgd", False]
    assert published.element_wise
    assert not published.error_feedback
    assert published.epsilon is None


@pytest.mark.parametrize(
    ("settings", "objective", "factors", "iterations"),
    [
        ({}, "cosine", "sample", 2),
        ({"error_feedback": False}, "cosine", "sample", 2),
        ({"iterations": 3}, "cosine", "sample", 3),
        ({"beta": 0.5, "factors": "message"}, "cosine", "message", 2),
        ({"samples": 4, "evaluation_network": "somewhere"}, "cosine", "sample", 2),
        ({"evaluation_network": "somewhere"}, "weighted", None, 10),
        ({"alpha": 0.5}, "weighted", None, 10),
        ({"warm_start": 5}, "weighted", None, 10),
        ({"normalize": False}, "weighted", None, 10),
    ],
)
def test_settings_say_which_form_is_meant(
    settings: dict[str, Any], objective: str, factors: str | None, iterations: int
) -> None:
    """Whoever names nothing that is only of the published form gets the one that teaches."""
    found = make_defense("refiner", **settings)
    assert (found.objective, found.factors, found.iterations) == (objective, factors, iterations)


def test_shared_embeddings_are_refused() -> None:
    model, batch = make_task("bert")
    gmap = GradientMap(model, batch, share_input_embeddings=True, second_order=False)
    for defense in (sketch(), refiner()):
        with pytest.raises(ValueError, match=f"{defense.name} never shares the token embeddings"):
            defense(gmap, rng())


@pytest.mark.parametrize("task", ["gpt2_lm", "llama", "convnext", "bert_mlm", "bert_lora"])
def test_every_kind_of_model(task: str) -> None:
    model, batch = make_task(task)
    gmap = GradientMap(model, batch, second_order=False)
    for defense in (sketch(samples=3), refiner(samples=3, iterations=1)):
        assert 0 < defense(gmap, rng()).metrics["fit"] < 1


@pytest.mark.parametrize("length", [5, 31])
def test_synthetic_targets_are_not_as_long_as_the_batchs(length: int) -> None:
    """Position tables of a decoder would show how long the longest target is."""
    sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 40}
    layers = {"encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 40}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    ends = {"pad_token_id": 1, "decoder_start_token_id": 2}
    model = BartForConditionalGeneration(BartConfig(**sizes, **layers, **heads, **ends)).eval()
    ids = torch.randint(4, 40, (2, 9))
    batch = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids),
        "labels": torch.randint(4, 40, (2, length)),
        "decoder_attention_mask": torch.ones(2, length, dtype=torch.long),
    }  # fmt: skip
    made = synthetic_samples(GradientMap(model, batch, second_order=False), 3, rng()).batch
    assert made["labels"].shape == made["decoder_attention_mask"].shape == (3, 16)
