"""dp_sgd by samples: what it shares, what it says of it, and that a row's trace in it is as small
as its ε allows.
"""

from __future__ import annotations

import math

import pytest
import torch
from helpers import make_task

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.defenses import Message
from hf_gradguard.gradient_map.per_sample.clipping import clipped_sum
from hf_gradguard.gradient_map.views import ZeroGradient
from hf_gradguard.leakage import gaussian_epsilon
from hf_gradguard.randomness import GRID, Stream
from hf_gradguard.testing import check_defense

ROWS, CLIP = 4, 0.5


def task(name: str = "bert") -> GradientMap:
    model, batch = make_task(name, batch_size=ROWS)
    return GradientMap(model, batch, second_order=False, needs_input=False)


@pytest.mark.long
def test_keeps_the_contract() -> None:
    check_defense(make_defense("dp_sgd", per_sample=True, clip=0.1, noise_multiplier=0.5))


@pytest.mark.parametrize("expected", [None, 10.0])
def test_shares_the_clipped_sum_with_its_noise(expected: float | None) -> None:
    gmap = task()
    size, clipped = expected or ROWS, clipped_sum(gmap, CLIP).total
    defense = make_defense(
        "dp_sgd", per_sample=True, clip=CLIP, noise_multiplier=2.0, expected_batch_size=expected
    )
    draws = []
    for seed in range(20):
        message = defense(gmap, Stream.from_seeds(seed))
        draws += [((m - clipped[n] / size) / (2.0 * CLIP / size)).flatten()
                  for n, m in message.items()]  # fmt: skip
    drawn = torch.cat(draws)  # standard normal
    assert abs(float(drawn.mean())) < 5 / math.sqrt(len(drawn))
    assert abs(float(drawn.var()) - 1) < 5 * math.sqrt(2 / len(drawn))


def test_says_only_what_holds() -> None:
    gmap = task()
    defense = make_defense("dp_sgd", per_sample=True, clip=1e-3, noise_multiplier=1.0)
    message = defense(gmap)
    assert message.noise is None
    assert not defense.facts.adds_gaussian_noise
    assert not message.exact
    assert message.transmitted is None
    assert message.metrics == {"clipped_samples": 1.0, "samples": ROWS}
    assert not defense.facts.needs_second_order
    assert not defense.facts.needs_input
    mechanism = defense.mechanism(message)
    assert mechanism is not None
    assert mechanism.variance == pytest.approx((1e-3 / ROWS) ** 2)
    assert (mechanism.clip_sample, mechanism.scale, mechanism.clip_norm) == (1e-3, 1.0, None)


def test_no_sample_is_noise_alone() -> None:
    gmap = task()
    private = make_defense(
        "dp_sgd", per_sample=True, clip=CLIP, noise_multiplier=2.0, expected_batch_size=8.0
    )
    message = private(ZeroGradient(gmap.parameters), Stream.from_seeds(1))
    other = private(ZeroGradient(task("bert").parameters), Stream.from_seeds(1))
    values = torch.cat([tensor.flatten() for tensor in message.values()]) / (2.0 * CLIP / 8)
    assert abs(float(values.var()) - 1) < 5 * math.sqrt(2 / len(values))
    assert all(torch.equal(message[name], other[name]) for name in message)
    assert not private.facts.needs_input


def test_as_before_without_per_sample() -> None:
    """The batch's mean gradient, clipped, and a client's own multiplier beside it."""
    gmap = task()
    message = make_defense("dp_sgd", clip=CLIP, scale=0.01)(gmap, Stream.from_seeds(1))
    assert message.noise is not None
    assert message.metrics == {"client_noise_multiplier": pytest.approx(0.01 / (2 * CLIP))}
    for settings in ({"relative_scale": 1.0}, {"scale": 0.1, "clip_by": "coordinate"}):
        metrics = make_defense("dp_sgd", clip=CLIP, **settings)(gmap).metrics
        assert metrics.keys() <= {"noise_scale"}


def test_a_clients_multiplier_is_the_worst_case() -> None:
    """Two batches whose clipped gradients are opposite differ by 2C, over noise of `scale` along
    that line.
    """
    defense = make_defense("dp_sgd", clip=CLIP, scale=0.1)
    gradient = {"weight": torch.tensor([3.0, 4.0], dtype=torch.float64)}
    one = defense.clipped(gradient, None)["weight"]
    other = defense.clipped({"weight": -gradient["weight"]}, None)["weight"]
    assert float((one - other).norm()) == pytest.approx(2 * CLIP)
    assert defense.client_noise_multiplier == pytest.approx(0.1 / float((one - other).norm()))


def statistic(message: Message, direction: dict[str, torch.Tensor]) -> float:
    return sum(float((message[name] * d).sum()) for name, d in direction.items())


@pytest.mark.long
@pytest.mark.statistics
def test_a_rows_trace_is_what_epsilon_allows() -> None:
    """The best test there is (Neyman and Pearson's) between a batch with and without a row, which
    is clipped to C exactly: its power is that of a Gaussian mechanism, and within (ε, δ).
    """
    model, batch = make_task("bert", batch_size=ROWS)
    rest = {name: entry[1:] for name, entry in batch.items()}
    clip, sigma, tries = 1e-2, 2.0, 800  # every row is longer than the bound
    private = make_defense(
        "dp_sgd", per_sample=True, clip=clip, noise_multiplier=sigma, expected_batch_size=1.0
    )
    whole, without = (
        clipped_sum(GradientMap(model, b, second_order=False), clip).total for b in (batch, rest)
    )
    row = {name: whole[name] - without[name] for name in whole}
    length = torch.cat([tensor.flatten() for tensor in row.values()]).norm()
    assert float(length) == pytest.approx(clip)  # no more, no less

    # A message's noise along the row's direction is all that a test can use.
    maps = [GradientMap(model, b, second_order=False) for b in (batch, rest)]
    direction = {name: tensor / length for name, tensor in row.items()}
    centers = [statistic(private(gmap, Stream.from_seeds(0)), direction) for gmap in maps]
    # The same noise under one seed, and sums on its grid.
    assert centers[0] - centers[1] == pytest.approx(clip, abs=GRID * sigma * clip)

    empty = ZeroGradient(maps[1].parameters)
    drawn = torch.tensor(
        [statistic(private(empty, Stream.from_seeds(7, k)), direction) for k in range(tries)]
    )
    true_rate = float((drawn + clip > clip / 2).double().mean())
    false_rate = float((drawn > clip / 2).double().mean())
    expected = 0.5 * math.erfc(1 / (2 * sigma) / math.sqrt(2))  # Φ(-1/2σ)
    error = 4 * math.sqrt(0.25 / tries)
    assert false_rate == pytest.approx(expected, abs=error)
    assert true_rate == pytest.approx(1 - expected, abs=error)
    delta = 1e-2
    assert true_rate <= math.exp(gaussian_epsilon(sigma, delta)) * false_rate + delta + 2 * error


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"per_sample": True}, "needs noise_multiplier, or target_epsilon"),
        ({"per_sample": True, "noise_multiplier": 1.0, "target_epsilon": 1.0}, "one of both"),
        ({"per_sample": True, "target_epsilon": 1.0}, "needs delta"),
        ({"per_sample": True, "noise_multiplier": 1.0, "delta": 1.0}, "between 0 and 1"),
        ({"per_sample": True, "noise_multiplier": 1.0, "relative_scale": 1.0}, "takes no relative"),
        ({"per_sample": True, "scale": 1.0}, "takes no scale"),
        ({"per_sample": True, "noise_multiplier": 1.0, "clip_by": "coordinate"}, "by norm"),
        ({"per_sample": True, "noise_multiplier": 0.0}, "above 0"),
        ({"noise_multiplier": 1.0}, "set per_sample=True"),
        ({"target_epsilon": 8.0, "delta": 1e-5}, "set per_sample=True"),
    ],
)
def test_settings_that_cannot_be_meant(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make_defense("dp_sgd", **settings)


def test_a_target_needs_somebody_who_counts() -> None:
    defense = make_defense("dp_sgd", per_sample=True, target_epsilon=8.0, delta=1e-5)
    with pytest.raises(ValueError, match="calibrated by a Trainer"):
        defense(task())
