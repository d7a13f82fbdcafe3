"""Whether a message tells texts that differ in one word: where it must, and where it cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import make_task, word_tokenizer
from scipy.stats import binom

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Distinguishability
from hf_gradguard.attacks.likelihood import Pair, change, summarize_pairs
from hf_gradguard.audit import word_distinguishability
from hf_gradguard.defenses import Defense, Message
from hf_gradguard.randomness import Stream

SCALE = 0.25
"""Of noise that leaves between one and two standard deviations between both texts."""
WORDS = [f"w{i}" for i in range(20)]
TEXTS = ["w1 w2 w3 w7", "w2 w3 w4 w5", "w7 w8 w3 w3", "w1 w9 w10 w11"]


def measure(defense: Defense, pairs: int = 8, batch_size: int = 1) -> Distinguishability:
    model, _ = make_task("bert", dtype=torch.float32, num_hidden_layers=1)
    return word_distinguishability(
        model, word_tokenizer(WORDS), TEXTS, [1, 0, 2, 1], defense, pairs,
        batch_size=batch_size, generator=Stream.from_seeds(3),
    )  # fmt: skip


@pytest.mark.parametrize(
    "defense",
    [
        make_defense("none"),
        make_defense("gaussian_noise", relative_scale=0.1),
        make_defense("laplace_noise", relative_scale=0.1),
        make_defense("optimal_noise", relative_scale=0.1),
        make_defense("pruning", ratio=0.9),
        make_defense("quantization", bits=3),
        make_defense("dp_sgd", per_sample=True, clip=1.0, noise_multiplier=1e-3),
    ],
    ids=lambda defense: defense.name,
)
@pytest.mark.parametrize("batch_size", [1, 2])
def test_what_leaves_much_tells_every_word(defense: Defense, batch_size: int) -> None:
    found = measure(defense, 6, batch_size)
    assert found.rate == 1
    assert found.pairs == 24 // batch_size
    assert not found.is_at_chance
    assert found.relative_change > 0


@dataclass
class Constant(Defense):
    """A message that does not depend on the sample: small gradients are nearer to it."""

    name = "constant"

    def protect(self, gmap: GradientMap, generator: Stream) -> Message:
        return Message({name: p.detach() * 0.1 for name, p in gmap.parameters.items()})

    def mechanism(self, message: Any) -> Any:
        from hf_gradguard.defenses.mechanism import Mechanism

        return Mechanism(noise="gaussian", variance=1.0)


@pytest.mark.long
def test_a_message_of_nothing_is_at_chance() -> None:
    """The number of right answers is binomial by the coin, though one text is always likelier."""
    found = measure(Constant(), 60)
    low, high = binom.interval(0.999, found.pairs, 0.5)
    assert low <= found.correct <= high
    assert found.is_at_chance


@pytest.mark.long
def test_noise_beyond_all_is_at_chance_and_its_rate_is_by_the_formula() -> None:
    assert measure(make_defense("gaussian_noise", scale=1e6), 30).is_at_chance
    # Φ(‖g - g'‖/2σ) of pairs are told right, where noise does not follow the gradient's norm.
    found = measure(make_defense("gaussian_noise", scale=SCALE), 100)
    z = found.relative_change * found.direction_ratio
    expected = float(torch.distributions.Normal(0, 1).cdf(torch.tensor(z / 2)))
    assert abs(found.rate - expected) < 0.12, (found, expected)


def test_intervals_are_exact() -> None:
    found = Distinguishability(18.0, 30, 0.2, 10.0)
    low, high = found.interval
    assert binom.sf(17, 30, low) == pytest.approx(0.025)
    assert binom.cdf(18, 30, high) == pytest.approx(0.025)
    assert Distinguishability(30.0, 30, 0.2, 10.0).interval[1] == 1
    # Half an answer counts for chance, on either side.
    assert Distinguishability(18.5, 30, 0.2, 10.0).interval == found.interval
    assert Distinguishability(11.5, 30, 0.2, 10.0).interval[0] > 1 - high - 1e-9
    with pytest.raises(ZeroDivisionError):
        _ = Distinguishability(0.0, 0, 0.2, 10.0).rate
    assert summarize_pairs([Pair(1.0, 0.1, 2.0), Pair(0.0, 0.3, 4.0)]).direction_ratio == 3


def test_one_word_of_one_text_is_changed_and_a_language_models_label_with_it() -> None:
    tokenizer, stream = word_tokenizer(WORDS), Stream.from_seeds(0)
    ids = torch.tensor([[*tokenizer(TEXTS[0])["input_ids"]], [*tokenizer(TEXTS[1])["input_ids"]]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    for _ in range(20):
        changed = change(batch, tokenizer, stream)
        (place,) = (changed["input_ids"] != ids).nonzero()
        assert (changed["labels"] != ids).nonzero().tolist() == [place.tolist()]
        assert int(ids[tuple(place)]) not in tokenizer.all_special_ids
        assert int(changed["input_ids"][tuple(place)]) not in tokenizer.all_special_ids


def test_one_patch_of_one_image_is_changed() -> None:
    pixels = torch.rand(2, 3, 8, 8)
    changed = change({"pixel_values": pixels}, None, Stream.from_seeds(0))["pixel_values"]
    differs = (changed != pixels).any(1)
    assert differs.any((1, 2)).sum() == 1
    assert 1 <= differs.sum() <= 4


def test_no_text_or_no_word_is_refused() -> None:
    model, _ = make_task("bert", dtype=torch.float32, num_hidden_layers=1)
    with pytest.raises(ValueError, match="messages of 2"):
        word_distinguishability(
            model, word_tokenizer(WORDS), ["w1"], [1], make_defense("none"), batch_size=2
        )
    with pytest.raises(ValueError, match="no word"):
        word_distinguishability(model, word_tokenizer(WORDS), [""], [1], make_defense("none"))
