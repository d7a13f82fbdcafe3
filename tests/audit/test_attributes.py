"""What messages tell of attributes: all of it undefended, nothing where nothing depends on them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import make_task, word_tokenizer
from scipy.stats import binom
from test_words import Constant

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.audit import InferredAttribute, infer_attributes
from hf_gradguard.audit.attributes import _batch, _contrasts, _directions
from hf_gradguard.defenses import Defense
from hf_gradguard.randomness import Stream

WORDS = [f"w{i}" for i in range(20)]
ATTRIBUTES = {
    "label": lambda text, label: label,
    "w3": lambda text, label: "w3" in text.split(),
    "length": lambda text, label: "short" if len(text.split()) < 5 else "long",
}


def draw_samples(count: int, seed: int) -> list[tuple[str, int]]:
    """Distinct texts of 3 to 6 words, of which half have w3, with labels of no relation."""
    draw = np.random.default_rng(seed)
    samples: dict[str, int] = {}
    while len(samples) < count:
        others = [f"w{i}" for i in draw.integers(4, 20, size=draw.integers(2, 6))]
        words = [*others, "w3" if draw.integers(2) else "w1"]
        samples[" ".join(draw.permutation(words))] = int(draw.integers(3))
    return list(samples.items())


MORE_SAMPLES = draw_samples(900, 0)
SAMPLES = MORE_SAMPLES[:300]


def infer(defense: Defense, names: str, messages: int = 300) -> dict[str, InferredAttribute]:
    model, _ = make_task("bert", dtype=torch.float32, num_hidden_layers=1)
    return infer_attributes(
        model, word_tokenizer(WORDS), SAMPLES[:60], MORE_SAMPLES[60:messages],
        {name: ATTRIBUTES[name] for name in names.split()}, defense,
        directions=8, generator=Stream.from_seeds(1),
    )  # fmt: skip


@pytest.mark.long
def test_an_undefended_message_tells_label_words_and_length() -> None:
    found = infer(make_defense("none"), "label w3 length", messages=900)
    assert found["label"].accuracy == 1
    assert found["label"].prior == pytest.approx(1 / 3)
    assert found["w3"].accuracy >= 0.7
    assert found["length"].accuracy >= 0.7
    for inferred in found.values():
        assert inferred.verdict == "beyond the prior"
        assert inferred.messages == 60
        assert inferred.correct_share > inferred.most_frequent_share
        assert inferred.advantage == inferred.accuracy - inferred.prior


@pytest.mark.long
def test_a_message_of_nothing_is_at_the_prior() -> None:
    """A classifier that gets the same features for all says one value, which is right once in
    so many values.
    """
    for inferred in infer(Constant(), "label w3", 180).values():
        assert inferred.accuracy == pytest.approx(inferred.prior)
        assert inferred.verdict == "cannot tell"


@pytest.mark.long
def test_noise_beyond_all_is_at_the_prior_and_seeds_repeat() -> None:
    """Of 60 independent guesses, whatever the classifier learned from noise."""
    first, again = (infer(make_defense("gaussian_noise", scale=1e3), "w3", 180) for _ in range(2))
    assert first == again
    for inferred in first.values():
        low, high = binom.interval(0.999, 60, inferred.prior)
        assert low / 60 - 0.1 <= inferred.accuracy <= high / 60 + 0.1  # values are not as frequent
        assert inferred.verdict == "cannot tell"


@pytest.mark.long
def test_an_interval_covers_as_often_as_it_says() -> None:
    """Beside draws of two values' shares, of unlike numbers of messages."""
    draw, covered = np.random.default_rng(0), []
    for _ in range(500):
        shares, counts = draw.uniform(0.3, 1, 2), (20, 80)
        right = [int(draw.binomial(n, p)) for n, p in zip(counts, shares, strict=True)]
        recall = dict(enumerate(zip(right, counts, strict=True)))
        low, high = InferredAttribute(recall, sum(right), max(counts)).interval
        covered.append(low <= shares.mean() <= high)
    assert 0.95 <= np.mean(covered) <= 0.995


def test_directions_hold_what_values_differ_by() -> None:
    """Beside gradients written out one by one."""
    model, _ = make_task("bert", dtype=torch.float32, num_hidden_layers=1)
    samples = SAMPLES[:24]
    batches = [_batch(model, word_tokenizer(WORDS), sample) for sample in samples]
    is_there = [ATTRIBUTES["w3"](*sample) for sample in samples]
    bases = _directions(model, batches, [_contrasts(is_there)], 4, Stream.from_seeds(0))
    gradients = [GradientMap(model, batch).gradient() for batch in batches]
    size = sum(float(g.square().sum()) for g in gradients[0].values()) ** 0.5
    for name, basis in bases.items():
        torch.testing.assert_close(basis @ basis.T, torch.eye(len(basis)), atol=2e-3, rtol=0)
        both = [
            torch.stack([g[name].flatten() for g, b in zip(gradients, is_there, strict=True)
                         if b == value]).mean(0)
            for value in (True, False)
        ]  # fmt: skip
        difference = both[0] - both[1]
        missed = difference - basis.T @ (basis @ difference)
        assert missed.norm() <= 1e-4 * size, name


@pytest.mark.long
def test_images_have_attributes_too() -> None:
    model, batch = make_task("vit", dtype=torch.float32)
    draw = torch.Generator().manual_seed(0)
    shape = batch["pixel_values"].shape[1:]
    samples = [
        (torch.rand(shape, generator=draw) * (0.3 if number % 3 else 1.0), number % 2)
        for number in range(160)
    ]
    found = infer_attributes(
        model, None, samples[:40], samples[40:],
        {"bright": lambda pixels, label: bool(pixels.mean() > 0.3)}, make_defense("none"),
        directions=4, generator=Stream.from_seeds(0),
    )  # fmt: skip
    assert found["bright"].accuracy >= 0.9


@pytest.mark.parametrize(
    ("private", "public", "attribute", "named"),
    [
        (SAMPLES[:9], SAMPLES[8:], "label", "in common"),
        (SAMPLES[:9], SAMPLES[9:30], "label", "too few public"),
        ([s for s in SAMPLES[:60] if s[1]], SAMPLES[60:], "label", "no private"),
        (SAMPLES[:9], [s for s in SAMPLES[9:] if s[1]], "label", "too few public"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    private: list, public: list, attribute: str, named: str
) -> None:
    model, _ = make_task("bert", dtype=torch.float32, num_hidden_layers=1)
    with pytest.raises(ValueError, match=named):
        infer_attributes(
            model, word_tokenizer(WORDS), private, public, {attribute: ATTRIBUTES[attribute]},
            make_defense("none"),
        )  # fmt: skip


def test_one_value_is_no_attribute() -> None:
    model, _ = make_task("bert", dtype=torch.float32, num_hidden_layers=1)
    with pytest.raises(ValueError, match="one value only"):
        infer_attributes(
            model, word_tokenizer(WORDS), SAMPLES[:9], SAMPLES[9:],
            {"text": lambda text, label: True}, make_defense("none"),
        )  # fmt: skip
