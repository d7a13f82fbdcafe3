"""Noise is added in exact arithmetic: no low bit of a message says what the noise was added to.

The attacker of a sum of floats asks of every entry whether any noise that a generator can draw
leads from a guessed gradient to what was shared. Of the right guess it always does.
"""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from helpers import flat, make_task, reachable, small_convolution
from scipy import stats
from torch import Tensor

from hf_gradguard import GradientMap, chain, make_defense
from hf_gradguard.defenses import Defense
from hf_gradguard.defenses.dp import DPSGD
from hf_gradguard.defenses.noise import add_noise
from hf_gradguard.gradient_map.views import ZeroGradient
from hf_gradguard.randomness import GRID, Distribution, Stream

ENTRIES = 200_000
STRENGTHS = (20.0, 1_000.0, 100_000.0)
ALIKE = 64  # entries whose noise is about as wide


def noise_in_floats(values: Tensor, deviation: float) -> Tensor:
    """The control: what a sum of floats shares."""
    return values + deviation * torch.randn(values.shape, generator=torch.manual_seed(0))


def excess(shared: Tensor, gradient: Tensor, deviation: Tensor | float) -> float:
    """How much more often the right guess is reached than a wrong one of equal law: entries in
    another order, each in the place of one whose noise is as wide.
    """
    order = torch.argsort(torch.as_tensor(deviation).expand_as(gradient), stable=True)
    blocks = torch.arange(len(order)) // ALIKE
    shuffled = torch.randperm(len(order), generator=torch.manual_seed(1))
    within = shuffled[blocks[shuffled].argsort(stable=True)]
    wrong = torch.empty_like(gradient)
    wrong[order] = gradient[order[within]]
    right, other = (reachable(shared, guess, deviation) for guess in (gradient, wrong))
    return float(right.double().mean() - other.double().mean())


@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_no_guess_is_reached_more_often_than_another(noise: Distribution, strength: float) -> None:
    """± 0.2 %, which is three standard errors of 200,000 entries. The control is above it."""
    gradient = torch.randn(ENTRIES, generator=torch.manual_seed(2)) * 1e-3
    deviation = strength * 1e-3
    shared = Stream().noisy(gradient, torch.tensor(deviation), ENTRIES, noise)
    assert abs(excess(shared, gradient, deviation)) < 2e-3
    assert excess(noise_in_floats(gradient, deviation), gradient, deviation) > 2e-3


DEFENSES: dict[str, tuple[str, dict[str, Any]]] = {
    "gaussian": ("gaussian_noise", {}),
    "laplace": ("laplace_noise", {}),
    "optimal": ("optimal_noise", {"shape": "public"}),
    "optimal_past": ("optimal_noise", {"shape": "past"}),
    "dp_client": ("dp_sgd", {"clip": 1e6}),
    "optimal_dp": ("optimal_dp_sgd", {"clip": 1e6}),
}


def in_spacings(message: Tensor, deviations: Tensor, entries: int) -> Tensor:
    """What each entry of a tensor is, in spacings of its grid."""
    fineness = GRID / 2 ** math.ceil(math.log2(entries) / 2)
    finest = max(float(deviations.min()), 2.0**-16 * float(deviations.max()))
    return message.double() / (2.0 ** math.floor(math.log2(finest)) * fineness)


@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("kind", DEFENSES)
def test_messages_of_defenses_lie_on_a_grid_that_is_no_gradients(
    kind: str, strength: float
) -> None:
    """In a model of float64, where the message is not rounded afterwards: every entry is a whole
    number of spacings, whose last bits are even and odd alike.
    """
    name, settings = DEFENSES[kind]
    gmap = GradientMap(*make_task("bert"))
    scale = strength * float(flat(gmap.gradient()).norm()) / math.sqrt(len(flat(gmap.gradient())))
    with patch("hf_gradguard.defenses.noise._SHARED_DRAW", 0):  # a grid for each tensor
        message = make_defense(name, scale=scale, **settings)(gmap, Stream())
    assert flat(message).dtype == torch.float64
    tensors = []
    for parameter, tensor in message.items():
        deviations = torch.full_like(tensor, scale)
        if message.noise is not None and message.noise.added is not None:
            deviations = message.noise.added[parameter].sqrt()
        tensors.append(in_spacings(tensor, deviations, len(flat(message))).flatten())
    whole = torch.cat(tensors)
    assert torch.equal(whole, whole.round())
    for bits in (1, 2, 4):
        ones = float(((whole / bits).floor() % 2).mean())
        assert abs(ones - 0.5) < 4 * 0.5 / math.sqrt(len(whole))


@pytest.mark.statistics
@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("kind", [*DEFENSES, "dp_sample"])
def test_messages_of_defenses_are_reached_by_no_guess_more_often(
    kind: str, strength: float
) -> None:
    """In float32, as they leave. 400,000 entries have a standard error of 0.07 %."""
    gmap = GradientMap(*make_task("bert", dtype=torch.float32))
    if kind == "dp_sample":
        settings = {"per_sample": True, "clip": 0.5, "expected_batch_size": 4.0}
        silent = make_defense("dp_sgd", noise_multiplier=1e-9, **settings)
        truth = flat(silent(gmap, Stream())).float() * 4
        scale = strength * float(truth.square().mean().sqrt())
        defense = make_defense("dp_sgd", noise_multiplier=scale / 0.5, **settings)
    else:
        truth = flat(gmap.gradient()).float()
        scale = strength * float(truth.square().mean().sqrt())
        name, settings = DEFENSES[kind]
        defense = make_defense(name, scale=scale, **settings)
    total, counted = 0.0, 0
    while counted < 2 * ENTRIES:
        message = defense(gmap, Stream())
        deviation: Tensor | float = scale
        if message.noise is not None and message.noise.added is not None:
            deviation = flat({n: message.noise.added[n] for n in message}).sqrt().float()
        shared = flat(message).float() * (4 if kind == "dp_sample" else 1)
        total += len(truth) * excess(shared, truth, deviation)
        counted += len(truth)
    assert abs(total / counted) < 2e-3


def test_rows_of_zeros_say_nothing_of_themselves() -> None:
    """Unused words, idle units: no guess was needed to tell them in a sum of floats."""
    rows, width, deviation = 2_000, 64, 0.02
    gradient = torch.zeros(rows, width)
    used = torch.arange(0, rows, 10)
    gradient[used] = 1e-3 * torch.randn(len(used), width, generator=torch.manual_seed(3))

    def unreached_rows(shared: Tensor) -> tuple[float, float]:
        is_bare = reachable(shared, torch.zeros_like(shared), deviation).all(1)
        is_used = torch.zeros(rows, dtype=torch.bool).index_fill(0, used, True)
        return float(is_bare[is_used].double().mean()), float(is_bare[~is_used].double().mean())

    shared = Stream().noisy(gradient.flatten(), torch.tensor(deviation), gradient.numel())
    is_used, is_unused = unreached_rows(shared.view(rows, width))
    assert abs(is_used - is_unused) < 0.05
    is_used, is_unused = unreached_rows(noise_in_floats(gradient, deviation))
    assert is_unused == 1
    assert is_used < 0.9


@pytest.mark.long
def test_words_of_a_shared_table_are_not_named() -> None:
    """All of MiniLM's kind of table: rows of words that occur are told from others by no bit."""
    gmap = GradientMap(*make_task("bert"), share_input_embeddings=True)
    table = next(name for name in gmap.gradient() if "word_embeddings" in name)
    gradient = gmap.gradient()[table]
    is_used = gradient.abs().sum(1) > 0
    assert 0 < int(is_used.sum()) < len(gradient)
    spread = []
    defense = make_defense("gaussian_noise", scale=1e3 * float(gradient.std()))
    for _ in range(200):
        message = defense(gmap, Stream())[table].float()
        reached = reachable(message, torch.zeros_like(message), defense.scale).double().mean(1)
        spread.append(float(reached[is_used].mean() - reached[~is_used].mean()))
    error = np.std(spread) / math.sqrt(len(spread))
    assert abs(np.mean(spread)) < 4 * error + 1e-9


@pytest.mark.long
def test_a_list_of_gradients_does_not_name_the_right_one() -> None:
    """Of 200 gradients the one whose entries are reached most often: the first by chance only. The
    control names it every time.
    """
    gradients = 1e-3 * torch.randn(200, 5_000, generator=torch.manual_seed(4))
    deviation, named, controls = 0.02, 0, 0
    for truth in range(20):
        for is_control in (False, True):
            values = gradients[truth]
            shared = (
                noise_in_floats(values, deviation)
                if is_control
                else Stream().noisy(values, torch.tensor(deviation), len(values))
            )
            reached = reachable(shared.expand_as(gradients), gradients, deviation)
            first = int(reached.sum(1).argmax())
            controls += is_control and first == truth
            named += not is_control and first == truth
    assert controls == 20
    assert named <= 2  # P(more) < 2e-4 at 1/200 each


@pytest.mark.parametrize("strength", STRENGTHS)
def test_a_peer_of_two_ranks_reads_no_more_from_the_mean(strength: float) -> None:
    """It takes its own message off the mean, in the float32 that ranks exchange."""
    gradient = torch.randn(ENTRIES, generator=torch.manual_seed(6)) * 1e-3
    deviation = torch.tensor(strength * 1e-3)
    other, own = (Stream().noisy(gradient, deviation, ENTRIES) for _ in range(2))
    shared = 2 * ((other + own) / 2) - own
    assert abs(excess(shared, gradient, deviation)) < 2e-3


def per_sample(gmap: GradientMap, multiplier: float) -> tuple[Tensor, Tensor]:
    """A message of DP-SGD by samples, and the sum that its noise was added to."""
    defense = DPSGD(per_sample=True, clip=0.5, noise_multiplier=multiplier, expected_batch_size=4.0)
    silent = DPSGD(per_sample=True, clip=0.5, noise_multiplier=1e-12, expected_batch_size=4.0)
    return flat(defense(gmap, Stream())) * 4, flat(silent(gmap, Stream())) * 4


@pytest.mark.long
@pytest.mark.statistics
@pytest.mark.parametrize("multiplier", [5.0, 500.0, 5_000.0])
def test_a_member_leaves_no_bit_in_dp_sgd(multiplier: float) -> None:
    model, batch = small_convolution()
    gmap = GradientMap(model, batch, second_order=False)
    counted, reached = 0, 0.0
    for _ in range(300):
        message, total = per_sample(gmap, multiplier)
        message, total = message.float(), total.float()
        right = reachable(message, total, multiplier * 0.5).double().mean()
        others = total[torch.randperm(len(total))]
        wrong = reachable(message, others, multiplier * 0.5).double().mean()
        reached += float(right - wrong)
        counted += len(total)
    assert abs(reached / 300) < 4 * 0.5 / math.sqrt(counted) + 2e-3


def test_an_empty_batch_shares_noise_of_the_same_grid() -> None:
    model, batch = small_convolution()
    gmap = GradientMap(model, batch, second_order=False)
    defense = DPSGD(per_sample=True, clip=0.5, noise_multiplier=2.0, expected_batch_size=4.0)
    shared = flat(defense(ZeroGradient(gmap.parameters), Stream())).double() * 4
    whole = in_spacings(shared, torch.ones_like(shared), len(shared))
    if shared.dtype == torch.float64:
        assert torch.allclose(whole, whole.round(), rtol=0, atol=1e-3 * whole.abs().max())


# -------------------------------------------------------------------------------------------------
# the law


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_the_discrete_law_on_a_coarse_grid(noise: Distribution, monkeypatch: Any) -> None:
    """Each whole number's probability is that of what is rounded to it, to a χ² of 400,000."""
    monkeypatch.setattr("hf_gradguard.randomness.GRID", 0.5)
    size, std = 400_000, 1.5
    drawn = Stream().noisy(torch.zeros(size), torch.tensor(std), 1, noise)
    spacing = 0.5  # the power of two at or below 1.5, times GRID
    whole = (drawn / spacing).round()
    assert torch.equal(whole * spacing, drawn)
    law = stats.norm(scale=std) if noise == "gaussian" else stats.laplace(scale=std / math.sqrt(2))
    ends = np.arange(-8.5, 9) * spacing
    expected = np.diff(law.cdf(np.concatenate([[-np.inf], ends, [np.inf]]))) * size
    counts = np.bincount(whole.clamp(-9, 9).long().numpy() + 9, minlength=19)
    assert stats.chisquare(counts, expected).pvalue > 1e-3


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_the_sum_has_the_law_of_real_numbers(noise: Distribution) -> None:
    values = torch.linspace(-3, 3, 100_000)
    shared = Stream().noisy(values, torch.tensor(0.7), len(values), noise)
    law = stats.norm(scale=0.7) if noise == "gaussian" else stats.laplace(scale=0.7 / math.sqrt(2))
    assert stats.kstest((shared - values).double().numpy(), law.cdf).pvalue > 1e-3


@pytest.mark.parametrize("entries", [1, 10, 1_000, 22_000_000])
@pytest.mark.parametrize("std", [1e-30, 3e-4, 1.0, 1.99, 7e5])
def test_rounding_moves_all_values_by_less_than_half_a_grid(entries: int, std: float) -> None:
    """Two gradients move apart by at most GRID · σ, over all entries: what ε counts."""
    fineness = GRID / 2 ** math.ceil(math.log2(entries) / 2)
    spacing = 2.0 ** math.floor(math.log2(std)) * fineness
    assert spacing * math.sqrt(entries) <= GRID * std
    values = std * torch.randn(50, dtype=torch.float64, generator=torch.manual_seed(5))
    shared = Stream().noisy(values, torch.tensor(std, dtype=torch.float64), entries)
    whole = shared / spacing
    assert torch.equal(whole, whole.round())


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("count", [1, 9])
def test_a_broken_deviation_never_leaves_values_bare(broken: float, count: int) -> None:
    """What is not finite is refused as a message; values without noise would go out."""
    deviation = torch.full((9,), 0.5)
    deviation[:count] = broken
    values = torch.linspace(1.0, 2.0, 9)
    for stds in (deviation, torch.tensor(broken)):
        try:
            shared = Stream().noisy(values, stds, 9)
        except (OverflowError, ValueError):
            continue
        assert not torch.isfinite(shared).all()


def test_entries_without_noise_stay_as_they_are() -> None:
    values, deviation = torch.randn(100), torch.rand(100).round()
    shared = Stream().noisy(values, deviation, 100)
    assert torch.equal(shared[deviation == 0], values[deviation == 0])
    assert bool((shared[deviation > 0] != values[deviation > 0]).all())


def test_noise_is_the_same_whatever_it_is_added_to() -> None:
    """Drawn twice from one key: messages differ by values on the grid, exactly."""
    values = torch.randn(1_000, dtype=torch.float64)
    key, std = bytes(range(32)), torch.tensor(0.3)
    shared = Stream(key).noisy(values, std, 1_000)
    noise = Stream(key).noisy(torch.zeros_like(values), std, 1_000)
    spacing = 0.25 * GRID / 2**5
    assert torch.equal(shared - noise, (values / spacing).round() * spacing)


def test_one_draw_whatever_the_threads() -> None:
    values, key = torch.randn(300_000), bytes(32)
    threads = torch.get_num_threads()
    try:
        shared = []
        for count in (1, 2):
            torch.set_num_threads(count)
            shared.append(Stream(key).noisy(values, torch.tensor(2.0), len(values)))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*shared)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_a_function_of_the_exact_sum(dtype: torch.dtype) -> None:
    """Rounded once more, from the float32 that others see."""
    values = {"w": torch.randn(1_000).to(dtype).float()}
    one = torch.tensor(1.0)
    ((_, shared),) = add_noise(values, lambda name: one.expand_as(values[name]), 1_000, Stream())
    whole = in_spacings(shared, torch.ones(1_000), 1_000)
    assert torch.equal(whole, whole.round())


def test_in_a_chain_what_was_pruned_stays_zero() -> None:
    model, batch = small_convolution()
    gmap = GradientMap(model, batch, second_order=False)
    both: Defense = chain(
        make_defense("pruning", ratio=0.7), make_defense("gaussian_noise", scale=0.1)
    )
    message = both(gmap, Stream())
    assert message.transmitted is not None
    for name, mask in message.transmitted.items():
        assert not message[name][~mask].any()
        assert bool((message[name][mask] != 0).all())
