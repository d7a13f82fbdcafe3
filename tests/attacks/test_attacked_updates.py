"""Attacks on weights that were trained for several steps before they were sent."""

from __future__ import annotations

from itertools import cycle, islice
from typing import Any

import pytest
import torch
from helpers import flat, make_task, randomize, torch_rng
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.defenses.mechanism import Mechanism
from hf_gradguard.gradient_map import GradientMap
from recipes.small_networks import LeakageLeNetConfig, LeakageLeNetForImageClassification

WORDS = 60
OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


def client() -> tuple[nn.Module, dict[str, Tensor]]:
    """A BERT that is wide enough for its texts, and four texts of five tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=64, max_position_embeddings=8, num_labels=2,
        )  # fmt: skip
        model = BertForSequenceClassification(config).eval()
    ids = torch.randint(1, WORDS, (4, 5), generator=torch_rng(1))
    return model, {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.tensor([0, 1, 1, 0]),
    }


def trained(
    model: nn.Module,
    batch: dict[str, Tensor],
    size: int,
    steps: int,
    rate: float,
    optimizer: str = "sgd",
    **settings: Any,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights before and after ordinary local training without the word embeddings; the model is
    left as it was.
    """
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    trainable = [p for name, p in model.named_parameters() if "word_embeddings" not in name]
    made = OPTIMIZERS[optimizer](trainable, lr=rate, **settings)
    count = len(batch["labels"])
    pieces = [
        {key: value[first : first + size] for key, value in batch.items()}
        for first in range(0, count, size)
    ]
    for piece in islice(cycle(pieces), steps):
        made.zero_grad()
        model(**piece).loss.backward()
        made.step()
        model.zero_grad()
    after = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(before)
    return before, after


def test_one_step_is_the_gradient() -> None:
    model, batch = make_task("bert")
    before, after = trained(model, batch, 2, 1, 0.1)
    seen = Observation.from_update(
        model, before, after, input_shape=(2, 5), learning_rate=0.1, labels=batch["labels"]
    )
    gradient = GradientMap(model, batch).gradient()
    assert seen.gradient.keys() <= gradient.keys()
    for name, found in seen.gradient.items():
        torch.testing.assert_close(found, gradient[name], rtol=1e-6, atol=1e-10)
    assert seen.model is model


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [("sgd", {"momentum": 0.9, "weight_decay": 0.1}), ("adamw", {"weight_decay": 0.1})],
)
def test_the_truth_matches_exactly(optimizer: str, settings: dict[str, Any]) -> None:
    """Through all the steps, at the client's own data; a single step does not match it."""
    model, batch = make_task("bert", batch_size=4)
    before, after = trained(model, batch, 2, 3, 0.1, optimizer, **settings)
    seen = Observation.from_update(
        model, before, after, input_shape=(4, 5), learning_rate=0.1, steps=3, batch_size=2,
        optimizer=optimizer, optimizer_kwargs=settings, labels=batch["labels"],
        attention_mask=batch["attention_mask"],
    )  # fmt: skip
    truth = GradientMap(model, batch).input
    there = seen.gradient_map(batch["labels"]).gradient_at(truth)
    for name, found in seen.gradient.items():
        if "key.bias" not in name:  # zero but for rounding, which Adam makes large
            torch.testing.assert_close(there[name], found, rtol=1e-6, atol=1e-7)
    single = GradientMap(model, batch).gradient()
    error = flat({name: single[name] - g for name, g in seen.gradient.items()}).norm()
    assert error > 0.05 * flat(dict(seen.gradient)).norm()


@pytest.mark.long
def test_span_reads_several_steps() -> None:
    """Four epochs on one text: every token, as from one gradient; and of four texts, one a step, no
    fewer than from their gradient, but for a few.
    """
    model, batch = client()
    randomize(model, 2)
    one = {key: value[:1] for key, value in batch.items()}
    before, after = trained(model, one, 1, 4, 0.001)
    seen = Observation.from_update(
        model, before, after, input_shape=(1, 5), learning_rate=0.001, steps=4, batch_size=1
    )
    assert make_attack("span")(seen).token_ids == one["input_ids"].tolist()

    before, after = trained(model, batch, 1, 8, 0.001)
    several = Observation.from_update(
        model, before, after, input_shape=(4, 5), learning_rate=0.001, steps=8, batch_size=1
    )
    gradient = GradientMap(model, batch).gradient()
    plain = Observation(model=model, gradient=gradient, input_shape=(4, 5))
    counts = []
    for seen in (several, plain):
        found = make_attack("span")(seen).token_ids or []
        true = [set(place) for place in batch["input_ids"].T.tolist()]
        read = [set(place) & own for place, own in zip(zip(*found, strict=True), true, strict=True)]
        counts.append(sum(map(len, read)))
    assert counts[0] >= counts[1] - 3


@pytest.mark.long
def test_matching_goes_through_the_steps() -> None:
    """From a start near the truth, so that the distance decides and not the search."""
    torch.manual_seed(0)
    config = LeakageLeNetConfig(image_size=12, num_labels=2)
    model = LeakageLeNetForImageClassification(config).double().eval()
    x = torch.rand(2, 3, 12, 12, generator=torch_rng(1), dtype=torch.float64)
    batch = {"pixel_values": x, "labels": torch.tensor([0, 1])}
    before, after = trained(model, batch, 1, 3, 0.3)
    settings: Any = {"input_shape": x.shape, "labels": batch["labels"]}
    through = Observation.from_update(
        model, before, after, learning_rate=0.3, steps=3, batch_size=1, **settings
    )
    single = Observation(model=model, gradient=through.gradient, **settings)
    start = x + 0.2 * torch.randn(x.shape, generator=torch_rng(3), dtype=x.dtype)
    attack = make_attack("dlg", steps=8, optimizer="lbfgs", start=start.clamp(0, 1))
    errors = [float((attack(seen).input - x).norm()) for seen in (through, single)]
    assert errors[0] < 0.5 * errors[1]


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_candidates_go_through_the_steps(optimizer: str) -> None:
    """One text, four epochs at a high rate: among texts that differ in one word the true one has
    the whole posterior, where noise as large as the mean gradient lies on the update.
    """
    model, batch = client()
    randomize(model, 2)
    one = {key: value[:1] for key, value in batch.items()}
    rate = 0.3 if optimizer == "sgd" else 0.01
    before, after = trained(model, one, 1, 4, rate, optimizer)
    scale = 0.02 * rate
    noisy = {
        name: tensor + scale * torch.randn(tensor.shape, generator=torch_rng(5))
        if tensor.is_floating_point() and "word_embeddings" not in name
        else tensor
        for name, tensor in after.items()
    }
    seen = Observation.from_update(
        model, before, noisy, input_shape=(1, 5), learning_rate=rate, steps=4, batch_size=1,
        optimizer=optimizer, labels=one["labels"], noise_variance=scale**2,
    )  # fmt: skip
    listed = []
    for word in range(1, 30):
        ids = one["input_ids"].clone()
        ids[0, 2] = word
        listed.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    truth = int(one["input_ids"][0, 2])
    if truth >= 30:
        listed.append({k: one[k] for k in ("input_ids", "attention_mask")})
        truth = 30
    found: Any = make_attack("candidates", candidates=listed)(seen)
    assert int(found.ranking[0]) == truth - 1
    assert float(found.posterior[truth - 1]) > 0.99


def test_a_model_with_other_weights_is_copied() -> None:
    model, batch = make_task("bert")
    before, after = trained(model, batch, 2, 1, 0.1)
    model.load_state_dict(after)
    seen = Observation.from_update(model, before, after, input_shape=(2, 5), learning_rate=0.1)
    assert seen.model is not model
    name = "classifier.bias"
    assert torch.equal(seen.model.get_parameter(name), before[name])
    assert torch.equal(model.get_parameter(name), after[name])


def test_noise_is_known_in_the_gradients_unit() -> None:
    model, batch = make_task("bert")
    before, after = trained(model, batch, 2, 2, 0.1)
    seen = Observation.from_update(
        model, before, after, input_shape=(2, 5), learning_rate=0.1, steps=2, noise_variance=0.04,
        mechanism=Mechanism(clip_norm=3.0, noise="gaussian", variance=0.04, relative_to=0.4),
    )  # fmt: skip
    assert seen.noise_variance == pytest.approx(1.0)  # (0.1 + 0.1)²
    assert seen.mechanism is not None
    assert seen.mechanism.variance == pytest.approx(1.0)
    assert seen.mechanism.clip_norm == pytest.approx(15.0)
    assert seen.mechanism.relative_to == pytest.approx(10.0)


def test_refusals_say_why() -> None:
    model, batch = make_task("bert")
    before, after = trained(model, batch, 2, 1, 0.1)
    settings: Any = {"input_shape": (2, 5), "learning_rate": 0.1}
    with pytest.raises(ValueError, match="No weight changed"):
        Observation.from_update(model, before, before, **settings)
    with pytest.raises(ValueError, match="'other'"):
        Observation.from_update(model, before, after | {"other": torch.ones(1)}, **settings)
    with pytest.raises(ValueError, match="has shape"):
        Observation.from_update(
            model, before, after | {"classifier.bias": torch.ones(1)}, **settings
        )
    with pytest.raises(ValueError, match="2 learning rates for 3 steps"):
        Observation.from_update(
            model, before, after, input_shape=(2, 5), learning_rate=[0.1, 0.1], steps=3
        )
