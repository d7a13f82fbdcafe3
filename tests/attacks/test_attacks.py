"""Gradient-matching attacks: their objectives, what they may see, and that they find what the
gradient determines.
"""

from __future__ import annotations

import copy
import gc
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import TASKS, flat, image_batch, make_task, rng, torch_rng, word_tokenizer
from torch import Tensor

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import ATTACKS, Observation, average, make_attack, recover_labels
from hf_gradguard.attacks.matching.matching_attacks import Tag
from hf_gradguard.attacks.matching.objectives import (
    TagDistance,
    batch_norm_distance,
    cosine_distance,
    embedding_length,
    squared_distance,
    total_variation,
)
from hf_gradguard.attacks.matching.problem import Problem
from hf_gradguard.attacks.matching.space import Vocabulary
from hf_gradguard.defenses.mechanism import Mechanism
from recipes.small_networks import (
    DeepConvNetConfig,
    DeepConvNetForImageClassification,
    LeakageLeNetConfig,
    LeakageLeNetForImageClassification,
)


def observe(
    model: torch.nn.Module, batch: dict[str, Tensor], gradient: Any = None, **grants: Any
) -> Observation:
    key = "input_ids" if "input_ids" in batch else "pixel_values"
    gradient = GradientMap(model, batch).gradient() if gradient is None else gradient
    return Observation(
        model=model, gradient=gradient, input_shape=tuple(batch[key].shape), **grants
    )


def small_lenet(**settings: Any) -> LeakageLeNetForImageClassification:
    torch.manual_seed(0)
    config = {
        "image_size": 8,
        "hidden_channels": 6,
        "strides": [1, 2],
        "num_labels": 3,
        "initializer_range": 0.3,
    }
    return (
        LeakageLeNetForImageClassification(LeakageLeNetConfig(**config | settings)).double().eval()
    )


def text_task(words: int = 5) -> tuple[torch.nn.Module, dict[str, Tensor], Any]:
    """A tiny BERT whose tokenizer frames texts by [CLS] and [SEP], with one sample."""
    tokenizer = word_tokenizer([f"w{i}" for i in range(20)])
    model, _ = make_task("bert", batch_size=1, num_hidden_layers=1)
    batch = dict(tokenizer(" ".join(f"w{3 * i % 20}" for i in range(words)), return_tensors="pt"))
    return model, {**batch, "labels": torch.tensor([1])}, tokenizer


def psnr(found: Tensor, true: Tensor) -> float:
    return float(-10 * torch.log10((found - true).square().mean()))


# --- objectives and priors


def some_gradients() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    shapes = {"layer.0.weight": (4, 3), "layer.1.weight": (2, 4), "head.bias": (2,)}
    draw = torch_rng()
    candidate, shared = (
        {n: torch.randn(s, generator=draw, dtype=torch.float64) for n, s in shapes.items()}
        for _ in range(2)
    )
    return candidate, shared


def test_objectives_are_their_formulas() -> None:
    candidate, shared = some_gradients()
    difference = {name: candidate[name] - shared[name] for name in shared}
    torch.testing.assert_close(
        squared_distance(candidate, shared),
        torch.stack([d.square().sum() for d in difference.values()]).sum(),
    )
    cosine = torch.nn.functional.cosine_similarity
    torch.testing.assert_close(
        cosine_distance(candidate, shared), 1 - cosine(flat(candidate), flat(shared), dim=0)
    )
    # Three layers: weights 1, 2/3 and 1/3.
    expected = sum(
        0.5 * d.square().sum() + 0.1 * weight * d.abs().sum()
        for weight, d in zip((1, 2 / 3, 1 / 3), difference.values(), strict=True)
    )
    torch.testing.assert_close(TagDistance(0.1)(candidate, shared), expected)


@pytest.mark.parametrize(
    "objective",
    [squared_distance, cosine_distance, TagDistance(0.1)],
    ids=["squared", "cosine", "tag"],
)
def test_objectives_have_their_derivatives(objective: Any) -> None:
    candidate, shared = some_gradients()
    names = list(candidate)
    assert torch.autograd.gradcheck(
        lambda *tensors: objective(dict(zip(names, tensors, strict=True)), shared),
        [tensor.requires_grad_() for tensor in candidate.values()],
    )


def test_cosine_distance_sees_what_float32_subtraction_would_lose() -> None:
    g = torch.randn(10_000, generator=torch_rng())
    step = torch.randn(10_000, generator=torch_rng(1))
    step -= g * (step * g).sum() / g.square().sum()
    there = g + 1e-4 * step * g.norm() / step.norm()
    expected = 0.5e-8  # 1 - cos of an angle of 1e-4
    assert cosine_distance({"w": there}, {"w": g}).item() == pytest.approx(expected, rel=0.02)


def test_priors_by_hand() -> None:
    x = torch.tensor([[0.0, 1.0], [3.0, 3.0]]).view(1, 1, 1, 2, 2)
    assert total_variation(x).item() == (3 + 2) / 2 + (1 + 0) / 2
    assert (
        embedding_length(torch.tensor([[[[3.0, 4.0], [0.0, 1.0]]]]), torch.tensor(2.0)).item()
        == 1.0
    )


def test_batch_norm_distance_is_zero_where_statistics_agree() -> None:
    model = torch.nn.Module()
    model.norm = torch.nn.BatchNorm2d(3).eval()
    model.forward = lambda pixel_values: model.norm(pixel_values)  # type: ignore[method-assign]
    x = torch.rand(1, 4, 3, 5, 5, generator=torch_rng())
    model.norm.running_mean.copy_(x[0].mean((0, 2, 3)))
    model.norm.running_var.copy_(x[0].var((0, 2, 3), unbiased=False))
    assert batch_norm_distance(model, x).item() < 1e-10
    assert batch_norm_distance(model, x + 1).item() == pytest.approx(3.0, rel=1e-5)


# --- what an attack may see


def reachable(root: object) -> list[Tensor]:
    """Every tensor that can be reached from an object, short of modules of code."""
    seen: set[int] = set()
    found, stack = [], [root]
    while stack:
        item = stack.pop()
        if id(item) in seen or type(item).__name__ in (
            "module",
            "type",
            "function",
            "builtin_function_or_method",
        ):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            found.append(item)
        stack.extend(gc.get_referents(item))
    return found


@pytest.mark.parametrize("task", ["bert", "vit"])
def test_the_private_batch_cannot_be_reached(task: str) -> None:
    model, batch = make_task(task)
    key = "input_ids" if task == "bert" else "pixel_values"
    gmap = GradientMap(model, batch)
    seen = observe(model, batch, gmap.gradient(), labels=batch["labels"])
    private = batch[key].double()
    problem = make_attack("tag" if task == "bert" else "dlg").problem([seen])  # type: ignore[attr-defined]
    for root in (seen, problem):
        for tensor in reachable(root):
            assert tensor.data_ptr() != batch[key].data_ptr()
            assert tensor.shape != private.shape or not torch.equal(tensor.double(), private)
            assert tensor.shape != gmap.input.shape or not torch.equal(tensor, gmap.input)
    # The search itself finds what is there.
    assert any(t is batch[key] for t in reachable({"nested": [batch]}))


@pytest.mark.parametrize("task", TASKS)
def test_the_placeholder_runs_every_model(task: str) -> None:
    model, batch = make_task(task)
    seen = observe(model, batch)
    gmap = seen.gradient_map(batch["labels"])
    assert gmap.input.shape == GradientMap(model, batch).input.shape
    assert gmap.parameters.keys() == GradientMap(model, batch).parameters.keys()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda g: {**g, "nonsense": torch.zeros(2)}, ValueError, "no parameter"),
        (lambda g: {**g, "classifier.bias": torch.ones(7)}, ValueError, "shape"),
        (
            lambda g: {**g, "classifier.bias": torch.full((3,), torch.nan)},
            FloatingPointError,
            "classifier.bias",
        ),
        (lambda g: {n: torch.zeros_like(t) for n, t in g.items()}, ValueError, "zero"),
    ],
)
def test_unusable_gradients_are_refused(change: Any, error: type[Exception], words: str) -> None:
    model, batch = make_task("bert")
    with pytest.raises(error, match=words):
        observe(model, batch, change(GradientMap(model, batch).gradient()))


@pytest.mark.parametrize("grant", ["noise_variance", "mechanism"])
def test_variances_that_lack_a_parameter_are_refused(grant: str) -> None:
    model, batch = make_task("bert")
    seen = observe(model, batch)
    variance = {name: torch.ones_like(g) for name, g in seen.gradient.items()}
    del variance["classifier.bias"]
    mechanism = Mechanism(noise="gaussian", variance=variance)
    with pytest.raises(ValueError, match=r"no variance for 'classifier\.bias'"):
        replace(seen, **{grant: mechanism if grant == "mechanism" else variance})
    # Of what was not shared it may have one.
    less = {"classifier.weight": seen.gradient["classifier.weight"]}
    assert replace(seen, gradient=less, noise_variance=variance).noise_variance is variance


@pytest.mark.parametrize("labels", [torch.tensor([0, 3]), torch.tensor([-1, 0]), torch.tensor([0])])
def test_labels_out_of_range_are_refused(labels: Tensor) -> None:
    model, batch = make_task("bert")
    with pytest.raises(ValueError, match=r"[Ll]abels"):
        observe(model, batch, labels=labels)


def test_several_uploads_average() -> None:
    model, batch = make_task("bert", batch_size=1)
    gmap = GradientMap(model, batch)
    noise = make_defense("gaussian_noise", scale=0.1)
    uploads = [observe(model, batch, noise(gmap, rng(i)), noise_variance=0.01) for i in range(16)]
    mean = average(uploads)
    error = torch.cat([(mean.gradient[n] - g).flatten() for n, g in gmap.gradient().items()])
    assert float(error.std()) == pytest.approx(
        0.1 / 4, rel=0.1
    )  # 16 draws: a quarter of the noise, 800 coordinates
    assert mean.noise_variance == pytest.approx(0.01 / 16)
    with pytest.raises(ValueError, match="at least one"):
        average([])


# --- labels


@pytest.mark.parametrize(
    "task", ["bert", "distilbert", "electra", "gpt2", "llama", "vit", "convnext"]
)
@pytest.mark.parametrize("label", range(3))
def test_the_label_of_one_sample_is_exact(task: str, label: int) -> None:
    model, batch = make_task(task, batch_size=1)
    batch["labels"] = torch.tensor([label])
    assert recover_labels(observe(model, batch)).tolist() == [label]


def test_the_labels_of_a_batch_are_counted() -> None:
    torch.manual_seed(0)
    model = LeakageLeNetForImageClassification(LeakageLeNetConfig(initializer_range=None)).eval()
    labels = torch.tensor([3, 3, 7, 0, 9, 3])
    batch = {"pixel_values": torch.rand(6, 3, 32, 32, generator=torch_rng()), "labels": labels}
    assert recover_labels(observe(model, batch)).tolist() == sorted(labels.tolist())


def test_labels_that_cannot_be_read_are_refused() -> None:
    model, batch = make_task("bert")
    gradient = {
        n: t
        for n, t in GradientMap(model, batch).gradient().items()
        if not n.startswith("classifier")
    }
    with pytest.raises(ValueError, match="not shared"):
        recover_labels(observe(model, batch, gradient))
    model, batch = make_task("bert_mlm")
    with pytest.raises(ValueError, match="labels"):
        recover_labels(observe(model, batch))


@pytest.mark.parametrize(
    ("task", "settings", "labels"),
    [
        ("bert", {"problem_type": "multi_label_classification"}, torch.eye(3)[:2].double()),
        ("bert", {"num_labels": 1}, torch.tensor([2.5, -1.0]).double()),
        ("gpt2_lm", {}, None),
    ],
    ids=["several classes", "numbers", "text"],
)
def test_dlg_matches_no_other_loss_than_the_models(
    task: str, settings: dict[str, Any], labels: Tensor | None
) -> None:
    """Logits that it optimizes are those of one class a sample."""
    model, batch = make_task(task, **settings)
    batch["labels"] = batch["labels"] if labels is None else labels
    seen = observe(model, batch)
    dlg = make_attack("dlg", steps=1)
    with pytest.raises(ValueError, match=r"abels.*Pass labels|labels are its text"):
        dlg(seen, torch_rng())
    assert dlg(replace(seen, labels=batch["labels"]), torch_rng()).objective > 0


# --- decoding


def test_zero_rows_and_special_tokens_are_never_decoded_to() -> None:
    model, batch, tokenizer = text_task()
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        weight[0] = 0  # padding, as many models have it
        weight[9] = 0
    vocabulary = Vocabulary(observe(model, batch, tokenizer=tokenizer))
    x = torch.randn(50, *batch["input_ids"].shape, 8, generator=torch_rng(), dtype=torch.float64)
    ids = vocabulary.nearest(x)
    assert (ids[..., 0] == 2).all()
    assert (ids[..., -1] == 3).all()
    assert ids[..., 1:-1].min() >= 4
    assert not (ids == 9).any()


def test_true_embeddings_decode_to_their_tokens() -> None:
    model, batch, tokenizer = text_task()
    vocabulary = Vocabulary(observe(model, batch, tokenizer=tokenizer))
    assert torch.equal(vocabulary.nearest(GradientMap(model, batch).input), batch["input_ids"])


def test_padding_of_a_known_mask_is_left_out() -> None:
    model, batch, tokenizer = text_task(3)
    ids = torch.cat([batch["input_ids"], torch.zeros(1, 2, dtype=torch.long)], 1)
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0]])
    padded = {"input_ids": ids, "attention_mask": mask, "labels": batch["labels"]}
    seen = observe(model, padded, tokenizer=tokenizer, attention_mask=mask)
    assert seen.known_ids().tolist() == [[2, -1, -1, -1, 3, 0, 0]]
    found = make_attack("tag", steps=2)(seen, torch_rng())
    assert [len(row) for row in found.token_ids or []] == [5]


# --- attacks


@pytest.mark.long
def test_dlg_recovers_pixels_and_the_label() -> None:
    model = small_lenet()
    batch = {"pixel_values": image_batch(1)["pixel_values"], "labels": torch.tensor([2])}
    found = make_attack("dlg", steps=60, start="uniform")(observe(model, batch), torch_rng())
    assert found.labels is not None
    assert found.labels.tolist() == [2]
    assert found.input is not None
    assert psnr(found.input, batch["pixel_values"]) > 30


LBFGS = {
    "steps": 60,
    "optimizer": "lbfgs",
    "learning_rate": 1.0,
    "schedule": "constant",
    "start": "uniform",
}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("idlg", {"steps": 60, "start": "uniform"}),
        ("inverting_gradients", LBFGS | {"signed": False, "total_variation": 0.0}),
        ("grad_inversion", LBFGS | {"total_variation": 0.0, "squared_norm": 0.0}),
    ],
)
def test_image_attacks_recover_pixels(name: str, settings: dict[str, Any]) -> None:
    model = small_lenet()
    batch = {"pixel_values": image_batch(1)["pixel_values"], "labels": torch.tensor([2])}
    found = make_attack(name, **settings)(observe(model, batch), torch_rng())
    assert found.input is not None
    assert psnr(found.input, batch["pixel_values"]) > 30


@pytest.mark.long
def test_lbfgs_of_several_candidates_is_that_of_each() -> None:
    """Evaluated together, each goes its own way: as many evaluations, the same values, the same
    end.
    """
    model = small_lenet()
    start = torch.rand(1, 3, 8, 8, generator=torch_rng(), dtype=torch.float64)
    settings = {
        "optimizer": "lbfgs",
        "learning_rate": 1.0,
        "schedule": "constant",
        "signed": False,
        "tolerance": 1e-7,
    }
    attack = make_attack("inverting_gradients", steps=12, start=start, **settings)
    pixels = image_batch(3)["pixel_values"].split(1)
    seen = [
        observe(model, {"pixel_values": x, "labels": torch.tensor([k])})
        for k, x in enumerate(pixels)
    ]
    alone = [attack(one, torch_rng()) for one in seen]
    assert len({len(one.history) for one in alone}) > 1  # they do not end at once
    for one, other in zip(alone, attack.reconstruct_many(seen, torch_rng()), strict=True):
        assert other.history == pytest.approx(one.history, rel=1e-6, abs=1e-12)
        torch.testing.assert_close(other.input, one.input, rtol=1e-5, atol=1e-7)


@pytest.mark.long
def test_lbfgs_together_weighs_each_by_its_own_gradient() -> None:
    """Coordinates that a pruning left differ between messages."""
    model, pixels = small_lenet(), image_batch(2)["pixel_values"].split(1)
    maps = [
        GradientMap(model, {"pixel_values": x, "labels": torch.tensor([k])})
        for k, x in enumerate(pixels)
    ]
    seen = [observe(model, gmap.batch, make_defense("pruning", ratio=0.2)(gmap)) for gmap in maps]
    start = torch.rand(1, 3, 8, 8, generator=torch_rng(), dtype=torch.float64)
    settings = {
        "optimizer": "lbfgs",
        "learning_rate": 1.0,
        "schedule": "constant",
        "signed": False,
        "steps": 4,
    }
    attack = make_attack("inverting_gradients", start=start, match_nonzero=True, **settings)
    for one, other in zip(
        [attack(one, torch_rng()) for one in seen],
        attack.reconstruct_many(seen, torch_rng()),
        strict=True,
    ):
        assert other.history == pytest.approx(one.history, rel=1e-6, abs=1e-12)


@pytest.mark.long
def test_dlg_finds_the_labels_of_several_restarts_too() -> None:
    model, batch = (
        small_lenet(),
        {"pixel_values": image_batch(1)["pixel_values"], "labels": torch.tensor([2])},
    )
    found = make_attack("dlg", steps=60, start="uniform", restarts=2)(
        observe(model, batch), torch_rng()
    )
    assert found.labels is not None
    assert found.labels.tolist() == [2]
    assert found.input is not None
    assert psnr(found.input, batch["pixel_values"]) > 30


def test_lbfgs_on_a_model_that_cannot_run_vectorized(few_evaluations: None) -> None:
    """Candidates are then evaluated one by one: batch normalization in training mode."""
    torch.manual_seed(0)
    model = DeepConvNetForImageClassification(DeepConvNetConfig(width=4)).train()
    batch = {"pixel_values": torch.rand(2, 3, 32, 32), "labels": torch.tensor([0, 1])}
    seen = observe(model, batch, labels=batch["labels"])
    settings = {
        "optimizer": "lbfgs",
        "learning_rate": 1.0,
        "schedule": "constant",
        "signed": False,
        "steps": 2,
    }
    with pytest.raises(RuntimeError):
        make_attack("inverting_gradients_published", restarts=2, steps=1)(seen, torch_rng())
    found = make_attack("inverting_gradients", restarts=2, **settings)(seen, torch_rng())
    assert found.objective < found.history[0]


@pytest.mark.long
def test_lbfgs_where_gradients_come_with_channels_last() -> None:
    model, batch = make_task("convnext", batch_size=1)
    found = make_attack("inverting_gradients", steps=2)(observe(model, batch), torch_rng())
    assert found.objective < found.history[0]


@pytest.mark.parametrize("name", ["inverting_gradients", "inverting_gradients_published"])
def test_the_usual_start_is_that_of_the_domain(name: str) -> None:
    """Uniform in the range of pixels, normal on texts; published normal on both."""
    model, batch, tokenizer = text_task()
    text = observe(model, batch, labels=batch["labels"], tokenizer=tokenizer)
    pixels = {"pixel_values": image_batch(1)["pixel_values"], "labels": torch.tensor([2])}
    image = observe(small_lenet(), pixels)
    attack: Any = make_attack(name)
    starts = [attack.problem([seen]).start(attack.start, torch_rng()) for seen in (text, image)]
    named = ["normal", "uniform" if name == "inverting_gradients" else "normal"]
    for seen, kind, start in zip((text, image), named, starts, strict=True):
        assert torch.equal(attack.problem([seen]).start(kind, torch_rng()), start)


@pytest.mark.long
def test_lamp_by_lbfgs_scores_each_candidate_by_its_own_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch, tokenizer = text_task()
    other = {**batch, "input_ids": batch["input_ids"].flip(1)}
    seen = [
        observe(model, one, labels=one["labels"], tokenizer=tokenizer) for one in (batch, other)
    ]
    distance, asked = Problem.distance, []

    def spy(problem: Problem, x: Tensor, candidate: int) -> Tensor:
        asked.append(candidate)
        return distance(problem, x, candidate)

    monkeypatch.setattr(Problem, "distance", spy)
    settings = {
        "optimizer": "lbfgs",
        "learning_rate": 1.0,
        "schedule": "constant",
        "every": 1,
        "moves": 1,
    }
    make_attack("lamp", steps=1, **settings).reconstruct_many(seen, torch_rng())
    assert sorted(asked) == [0, 0, 1, 1]


def test_recovered_pixels_are_in_range() -> None:
    model = small_lenet()
    batch = {
        "pixel_values": image_batch(1)["pixel_values"].round(),
        "labels": torch.tensor([2]),
    }  # at the range's ends
    shared = make_defense("gaussian_noise", relative_scale=0.1)(
        GradientMap(model, batch), generator=rng()
    )
    attack = make_attack(
        "inverting_gradients",
        steps=1,
        optimizer="lbfgs",
        signed=False,
        learning_rate=1.0,
        start="uniform",
    )
    found = attack(
        observe(model, batch, shared), torch_rng()
    ).input  # many evaluations, and no step after them
    assert found is not None
    assert (float(found.min()), float(found.max())) == (0.0, 1.0)


@pytest.mark.long
@pytest.mark.parametrize("name", ["inverting_gradients", "lamp"])
def test_text_attacks_recover_words(name: str) -> None:
    model, batch, tokenizer = text_task()
    settings = {"inverting_gradients": {"signed": False}, "lamp": {"every": 5, "moves": 5}}[name]
    attack = make_attack(
        name, steps=15, optimizer="lbfgs", learning_rate=1.0, schedule="constant", **settings
    )
    found = attack(observe(model, batch, labels=batch["labels"], tokenizer=tokenizer), torch_rng(1))
    assert found.token_ids == batch["input_ids"].tolist()
    assert found.text == [" ".join(f"w{3 * i % 20}" for i in range(5))]


@pytest.mark.long
def test_tag_leads_a_blurred_text_back() -> None:
    model, batch, tokenizer = text_task()
    true = GradientMap(model, batch).input
    blurred = true + true.std() * torch.randn(true.shape, generator=torch_rng(), dtype=true.dtype)
    seen = observe(model, batch, labels=batch["labels"], tokenizer=tokenizer)
    assert Vocabulary(seen).nearest(blurred).tolist() != batch["input_ids"].tolist()
    found = make_attack("tag", steps=150, start=blurred)(seen, torch_rng())
    assert found.token_ids == batch["input_ids"].tolist()


def test_the_true_input_is_a_fixed_point() -> None:
    model, batch, tokenizer = text_task()
    seen = observe(model, batch, labels=batch["labels"], tokenizer=tokenizer)
    found = make_attack("tag", start=GradientMap(model, batch).input, steps=3)(seen, torch_rng())
    assert found.objective < 1e-12
    assert found.token_ids == batch["input_ids"].tolist()


@pytest.mark.long
@pytest.mark.parametrize("task", ["bert", "convnext"])
def test_observations_attacked_together_end_as_by_themselves(task: str) -> None:
    model, batch = make_task(task, batch_size=3)
    key = "input_ids" if task == "bert" else "pixel_values"
    one = [{name: tensor[i : i + 1] for name, tensor in batch.items()} for i in range(3)]
    if task == "bert":
        one = [
            {**sample, "attention_mask": torch.ones_like(sample["attention_mask"])}
            for sample in one
        ]
    seen = [observe(model, sample, labels=sample["labels"]) for sample in one]
    start = torch.rand(
        GradientMap(model, one[0]).input.shape, generator=torch_rng(), dtype=torch.float64
    )
    attack = make_attack("tag" if task == "bert" else "grad_inversion", steps=12, start=start)
    together = attack.reconstruct_many(seen, torch_rng())  # type: ignore[attr-defined]
    for result, single in zip(together, seen, strict=True):
        alone = attack(single, torch_rng())
        torch.testing.assert_close(result.input, alone.input)
        assert result.objective == pytest.approx(alone.objective)
        assert result.history == pytest.approx(alone.history)
    assert one[0][key].shape[0] == 1


@pytest.mark.long
def test_restarts_return_the_best_match() -> None:
    model, batch, tokenizer = text_task()
    seen = observe(model, batch, labels=batch["labels"], tokenizer=tokenizer)
    singles = make_attack("tag", steps=20).reconstruct_many([seen] * 4, torch_rng(3))  # type: ignore[attr-defined]
    best = make_attack("tag", steps=20, restarts=4)(seen, torch_rng(3))
    assert best.objective == pytest.approx(min(single.objective for single in singles))
    assert len({round(single.objective, 9) for single in singles}) == 4


def test_an_attack_leaves_the_model_as_it_found_it() -> None:
    model, batch = make_task("bert", dropout=0.1)
    model.train()
    before = copy.deepcopy(model.state_dict())
    seen = observe(model, batch, labels=batch["labels"])
    state = torch.get_rng_state()
    for name in ("tag", "lamp"):
        make_attack(name, steps=3, **({"every": 2, "moves": 2} if name == "lamp" else {}))(
            seen, torch_rng()
        )
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(not module._forward_hooks for module in model.modules())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_attacks_run_without_dropout() -> None:
    model, batch = make_task("bert", dropout=0.5)
    plain = observe(model, batch, labels=batch["labels"])
    model.train()
    start = torch.zeros(*batch["input_ids"].shape, 8, dtype=torch.float64)
    attack = make_attack("tag", steps=2, start=start)
    while_training = attack(
        observe(model, batch, plain.gradient, labels=batch["labels"]), torch_rng()
    )
    model.eval()
    assert while_training.history == pytest.approx(attack(plain, torch_rng()).history)


# --- adaptive attackers


def test_matching_only_what_pruning_left_explains_it_exactly() -> None:
    model, batch, tokenizer = text_task()
    gmap = GradientMap(model, batch)
    pruned = make_defense("pruning", ratio=0.7)(gmap)
    seen = observe(model, batch, pruned, labels=batch["labels"], tokenizer=tokenizer)
    blind = make_attack("tag", steps=1, start=gmap.input)(seen, torch_rng())
    adaptive = make_attack("tag", steps=1, start=gmap.input, match_nonzero=True)(seen, torch_rng())
    assert adaptive.objective < 1e-12 < 1e-4 < blind.objective


def test_known_noise_covariance_weighs_the_squared_distance() -> None:
    model = small_lenet()
    batch = {"pixel_values": image_batch(1)["pixel_values"], "labels": torch.tensor([2])}
    gmap = GradientMap(model, batch)
    draw = torch_rng()
    variance = {
        n: 0.1 + torch.rand(g.shape, generator=draw, dtype=g.dtype)
        for n, g in gmap.gradient().items()
    }
    noisy = {
        n: g + variance[n].sqrt() * torch.randn(g.shape, generator=draw, dtype=g.dtype)
        for n, g in gmap.gradient().items()
    }
    seen = observe(model, batch, noisy, labels=batch["labels"], noise_variance=variance)
    found = make_attack("idlg", steps=1, start=gmap.input)(seen, torch_rng())
    mean = torch.cat([v.flatten() for v in variance.values()]).mean()
    likelihood = sum(
        ((noisy[n] - g).square() / variance[n]).sum() for n, g in gmap.gradient().items()
    )
    assert found.history[0] == pytest.approx(float(mean * likelihood))


def test_layers_can_be_left_out() -> None:
    model, batch, tokenizer = text_task()
    gmap = GradientMap(model, batch)
    spoiled = {
        n: torch.randn_like(g) if n.startswith("classifier") else g
        for n, g in gmap.gradient().items()
    }
    seen = observe(model, batch, spoiled, labels=batch["labels"], tokenizer=tokenizer)
    assert (
        make_attack("tag", steps=1, start=gmap.input, leave_out=["classifier"])(
            seen, torch_rng()
        ).objective
        < 1e-12
    )
    with pytest.raises(ValueError, match="leave_out"):
        make_attack("tag", leave_out=["bert", "classifier"])(seen, torch_rng())


@pytest.mark.parametrize("attack", ["tag", "idlg", "inverting_gradients"])
def test_candidates_are_clipped_by_norm_as_the_defense_does(attack: str) -> None:
    model, batch, tokenizer = text_task()
    gmap = GradientMap(model, batch)
    size = torch.cat([g.flatten() for g in gmap.gradient().values()]).norm()
    clip = float(size) / 3
    clipped = {n: g / 3 for n, g in gmap.gradient().items()}
    seen = observe(model, batch, clipped, labels=batch["labels"], tokenizer=tokenizer)
    assert (
        make_attack(attack, steps=1, start=gmap.input, clip_norm=clip)(seen, torch_rng()).objective
        < 1e-12
    )
    whole = observe(model, batch, gmap.gradient(), labels=batch["labels"], tokenizer=tokenizer)
    assert (
        make_attack(attack, steps=1, start=gmap.input, clip_norm=4 * clip)(
            whole, torch_rng()
        ).objective
        < 1e-12
    )
    without = {
        "leave_out": ["classifier"],
        "clip_norm": clip,
    }  # the norm is that of all that was shared
    assert (
        make_attack(attack, steps=1, start=gmap.input, **without)(seen, torch_rng()).objective
        < 1e-12
    )
    if attack != "inverting_gradients":  # which compares directions
        assert make_attack(attack, steps=1, start=gmap.input)(seen, torch_rng()).objective > 1e-6


def test_coordinates_at_the_bound_match_whatever_lies_beyond() -> None:
    model = small_lenet()
    batch = {"pixel_values": image_batch(1)["pixel_values"], "labels": torch.tensor([2])}
    gmap = GradientMap(model, batch)
    clip = float(torch.cat([g.flatten() for g in gmap.gradient().values()]).abs().quantile(0.8))
    clipped = {n: g.clamp(-clip, clip) for n, g in gmap.gradient().items()}
    seen = observe(model, batch, clipped, labels=batch["labels"])
    assert make_attack("idlg", steps=1, start=gmap.input)(seen, torch_rng()).history[0] > 1e-6
    assert (
        make_attack("idlg", steps=1, start=gmap.input, clip_coordinate=clip)(
            seen, torch_rng()
        ).history[0]
        < 1e-12
    )

    elsewhere = torch.rand(gmap.input.shape, generator=torch_rng(), dtype=gmap.input.dtype)
    pairs = zip(gmap.gradient_at(elsewhere).values(), clipped.values(), strict=True)
    by_hand = 0.0  # one-sided at either bound
    for ours, theirs in pairs:
        missing = torch.where(theirs >= clip, (clip - ours).clamp(min=0), ours - theirs)
        by_hand += float(
            torch.where(theirs <= -clip, (ours + clip).clamp(min=0), missing).square().sum()
        )
    found = make_attack("idlg", steps=1, start=elsewhere, clip_coordinate=clip)(seen, torch_rng())
    assert found.history[0] == pytest.approx(by_hand)


# --- lamp's moves


def test_lamp_moves_words_and_nothing_else() -> None:
    model, batch, tokenizer = text_task()
    seen = observe(model, batch, labels=batch["labels"], tokenizer=tokenizer)
    attack = make_attack("lamp")
    problem = attack.problem([seen])  # type: ignore[attr-defined]
    x = GradientMap(model, batch).input
    orders = set()
    draw = torch_rng()
    for _ in range(60):
        ids = problem.space.vocabulary.nearest(attack._rearranged(problem, x, draw))[0].tolist()  # type: ignore[union-attr, attr-defined]
        assert sorted(ids) == sorted(batch["input_ids"][0].tolist())
        assert (ids[0], ids[-1]) == (2, 3)
        orders.add(tuple(ids))
    assert len(orders) > 15


@pytest.mark.long
def test_lamp_puts_words_in_the_order_that_matches() -> None:
    model, batch, tokenizer = text_task()
    seen = observe(model, batch, labels=batch["labels"], tokenizer=tokenizer)
    x = GradientMap(model, batch).input
    shuffled = x[:, [0, 3, 2, 1, 4, 5, 6]]
    attack = make_attack("lamp", steps=2, every=1, moves=60, learning_rate=1e-9, start=shuffled)
    found = attack(seen, torch_rng())
    assert found.token_ids == batch["input_ids"].tolist()


def test_lamp_does_not_move_to_where_nothing_can_be_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A score that is no number is no best one."""
    model, batch, tokenizer = text_task()
    seen = observe(model, batch, labels=batch["labels"], tokenizer=tokenizer)
    attack = make_attack("lamp", steps=1, every=1, moves=4)
    problem = attack.problem([seen])  # type: ignore[attr-defined]
    scores = iter([2.0, math.nan, 1.0, math.nan, 3.0])
    monkeypatch.setattr(
        type(attack), "_score", lambda *_: torch.tensor(next(scores), dtype=torch.float64)
    )
    x = GradientMap(model, batch).input[None]
    orders = [torch.roll(x[0], k, 1) for k in range(4)]
    left = iter(orders)
    monkeypatch.setattr(type(attack), "_rearranged", lambda *_: next(left))
    attack.between_steps(problem, 0, x, 0, torch_rng())  # type: ignore[attr-defined]
    assert torch.equal(x[0], orders[1])


def test_a_language_model_tells_orders_apart() -> None:
    model, batch, tokenizer = text_task()
    seen = observe(model, batch, labels=batch["labels"], tokenizer=tokenizer)
    language, _ = make_task("gpt2_lm", batch_size=1)
    attack = make_attack("lamp", language_model=language, language_weight=2.0)
    problem = attack.problem([seen])  # type: ignore[attr-defined]
    x = GradientMap(model, batch).input
    with torch.no_grad():
        plain = make_attack("lamp")._score(problem, x, 0)  # type: ignore[attr-defined]
        scored = attack._score(problem, x, 0)  # type: ignore[attr-defined]
        expected = language(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
    assert float(scored - plain) == pytest.approx(2 * float(expected), rel=1e-6)


# --- refusals


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 0}, "at least 1"),
        ({"optimizer": "sgd"}, "adamw"),
        ({"schedule": "cosine"}, "linear"),
        ({"start": "zeros"}, "tokens"),
        ({"learning_rate": 0}, "above 0"),
        ({"signed": True, "optimizer": "lbfgs"}, "signed=False"),
        ({"leave_out": "classifier"}, "list"),
        ({"clip_norm": 0.0}, "clip_norm must be above 0"),
        ({"clip_coordinate": -1.0}, "clip_coordinate must be above 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_attack("tag", **settings)


def test_wrong_names_list_the_right_ones() -> None:
    with pytest.raises(ValueError, match=r"tagg.*Did you mean 'tag'.*inverting_gradients"):
        make_attack("tagg")
    with pytest.raises(TypeError, match=r"no setting step\. It has: steps"):
        make_attack("tag", step=3)
    assert all(name == attack.name for name, attack in ATTACKS.items())


def test_observations_that_differ_are_not_attacked_together() -> None:
    model, batch = make_task("bert")
    other, _ = make_task("bert")
    seens = [
        observe(model, batch, labels=batch["labels"]),
        observe(other, batch, labels=batch["labels"]),
    ]
    with pytest.raises(ValueError, match="of one model"):
        make_attack("tag").reconstruct_many(seens)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("task", "start"), [("bert", "uniform"), ("vit", "tokens")])
def test_starts_of_the_other_kind_are_refused(task: str, start: str) -> None:
    model, batch = make_task(task)
    with pytest.raises(ValueError, match="Take start="):
        make_attack("grad_inversion", start=start)(observe(model, batch, labels=batch["labels"]))


def test_lamp_is_for_text() -> None:
    model, batch = make_task("vit")
    with pytest.raises(ValueError, match="for text"):
        make_attack("lamp", steps=1)(observe(model, batch, labels=batch["labels"]))


def test_an_attack_stops_early() -> None:
    model, batch, _ = text_task()
    seen = observe(model, batch, labels=batch["labels"])
    assert len(make_attack("tag", steps=50, seconds=0.0)(seen, torch_rng()).history) == 1
    assert len(make_attack("tag", steps=50, tolerance=1e9)(seen, torch_rng()).history) == 1
    stuck = make_attack("tag", steps=50, learning_rate=1e-300, patience=4)(seen, torch_rng())
    assert len(stuck.history) == 5


class Diverging(Tag):
    """Whose starts of these numbers diverge."""

    lost: frozenset[int] = frozenset()

    def between_steps(
        self, problem: Any, step: int, x: Tensor, first: int, generator: torch.Generator
    ) -> None:
        for k in self.lost & set(range(first, first + len(x))):
            x[k - first] = torch.nan


@pytest.mark.parametrize("optimizer", ["adamw", "lbfgs"])
def test_a_start_that_diverges_does_not_stop_the_others(
    optimizer: str, few_evaluations: None
) -> None:
    def run(*lost: int, **settings: Any) -> list[Any]:
        attack = Diverging(**{"steps": 3, "restarts": 2, "optimizer": optimizer} | settings)
        attack.lost = frozenset(lost)
        return attack.reconstruct_many([seen, seen], torch_rng())

    model, batch, _ = text_task()
    seen = observe(model, batch, labels=batch["labels"])
    whole, some = run(), run(0, 1)
    assert len(some[1].history) == len(whole[1].history) > 1
    assert some[1].objective == pytest.approx(whole[1].objective, rel=1e-6)
    assert some[0].objective <= whole[0].history[0]
    # What is gone does not keep the others from stopping.
    if optimizer == "adamw":
        assert len(run(0, learning_rate=1e-300, patience=2)[1].history) == 3
        assert len(run(0, 1, 2, 3)[1].history) == 1


def test_a_start_that_was_never_finite_does_not_hide_what_others_reach() -> None:
    class Endless(Tag):
        def penalty(self, problem: Any, x: Tensor) -> Tensor:
            return torch.tensor([torch.inf, 0.0]) + 0 * x.flatten(1).sum(1)

    class Broken(Tag):
        def penalty(self, problem: Any, x: Tensor) -> Tensor:
            return torch.tensor([torch.nan, 0.0]) * x.flatten(1).sum(1)

    model, batch, _ = text_task()
    seen = observe(model, batch, labels=batch["labels"])
    for kind in (Endless, Broken):
        found = kind(steps=8, restarts=2, patience=2)(seen, torch_rng())
        assert len(found.history) == 8
    assert len(Broken(steps=8, restarts=2, tolerance=1e9)(seen, torch_rng()).history) == 1


def test_restarts_are_drawn_to_the_mean_of_those_that_did_not_diverge() -> None:
    attack = make_attack("grad_inversion", restarts=3, group_consistency=0.5)
    x = torch.rand((6, 1, 2, 2, 2), generator=torch_rng())
    model = small_lenet()
    batch = {"pixel_values": image_batch(1)["pixel_values"], "labels": torch.tensor([2])}
    problem = attack.problem([observe(model, batch, labels=batch["labels"])])
    gone = x.clone()
    gone[1] = torch.nan
    gone.requires_grad_()
    two, both = attack.penalty(problem, gone), attack.penalty(problem, x)
    assert torch.equal(two[3:], both[3:])
    pair = make_attack("grad_inversion", restarts=2, group_consistency=0.5)
    torch.testing.assert_close(two[[0, 2]], pair.penalty(problem, x[[0, 2]]))
    (slope,) = torch.autograd.grad(two.sum(), gone)
    assert torch.isfinite(slope.flatten(1)).all(1).tolist() == [True, False, *[True] * 4]
