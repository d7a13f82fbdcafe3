"""The fixed point and the masks, on their own: sums of ranks that live in one process."""

from __future__ import annotations

import copy
import hmac
import math
import pickle
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from helpers import make_task, reachable, refuses
from scipy import stats
from torch import Tensor, nn

from hf_gradguard import GradGuardConfig, GradGuardTrainer
from hf_gradguard.defenses import chain, make_defense
from hf_gradguard.randomness import Stream
from hf_gradguard.secure.aggregation import FixedPoint, SecureAggregation
from hf_gradguard.training.exchange.secure import rounding_of_sum, share_of_noise
from hf_gradguard.training.message import is_summed

WORDS = {32: torch.int32, 64: torch.int64}


def ranks_of(count: int) -> list[SecureAggregation]:
    """Ranks that have agreed: the key of a pair is its two numbers."""
    found = []
    for rank in range(count):
        one = SecureAggregation(SimpleNamespace(process_index=rank, num_processes=count))
        one._keys = {
            peer: bytes([min(rank, peer), max(rank, peer)] * 16)
            for peer in range(count)
            if peer != rank
        }
        found.append(one)
    return found


def sent(ranks: list[SecureAggregation], words: list[Tensor], layout: str = "x") -> list[Tensor]:
    """What each of them would send."""
    hidden = [own.clone() for own in words]
    for rank, own in zip(ranks, hidden, strict=True):
        rank.masks(layout).hide(own)
    return hidden


def hand_made_mask(one: int, two: int, exchange: int, layout: str, count: int) -> list[int]:
    """From the pair's key, by HMAC and ChaCha20: RFC 5869, Section 2.3, and RFC 8439."""
    key = bytes([one, two] * 16)
    label = b"hf-gradguard: secure aggregation, "
    for _ in range(exchange):
        key = hmac.digest(key, label + b"next key\x01", "sha256")
    key = hmac.digest(key, label + f"masks of {layout}".encode() + b"\x01", "sha256")
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor().update(bytes(4 * count))
    return [int.from_bytes(stream[i : i + 4], "little") for i in range(0, 4 * count, 4)]


def test_masks_worked_by_hand() -> None:
    """Three ranks and two exchanges: the lower rank of two adds, the higher one subtracts."""
    ranks, words = ranks_of(3), torch.tensor([7, -3], dtype=torch.int32)
    for exchange, layout in enumerate(("weights", "loss")):
        first, second, third = sent(ranks, [words] * 3, layout)
        m01, m02, m12 = (
            hand_made_mask(*pair, exchange, layout, 2) for pair in combinations(range(3), 2)
        )
        for i, plain in enumerate(words.tolist()):
            modulus = 2**32
            assert int(first[i]) % modulus == (plain + m01[i] + m02[i]) % modulus
            assert int(second[i]) % modulus == (plain - m01[i] + m12[i]) % modulus
            assert int(third[i]) % modulus == (plain - m02[i] - m12[i]) % modulus


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("count", [3, 4, 7])
def test_masks_are_gone_from_the_sum(count: int, bits: int) -> None:
    generator = torch.Generator().manual_seed(count)
    words = [
        torch.randint(-1000, 1000, (70_001,), generator=generator).to(WORDS[bits])
        for _ in range(count)
    ]
    hidden = sent(ranks_of(count), words)
    assert torch.equal(torch.stack(hidden).sum(0, dtype=WORDS[bits]), sum(words))
    for some in range(1, count):  # and from no smaller sum
        for chosen in combinations(range(count), some):
            partial = sum(hidden[rank] for rank in chosen) - sum(words[rank] for rank in chosen)
            share = float((partial == 0).double().mean())
            assert share < 1e-3


def test_no_mask_comes_twice() -> None:
    """Not in two exchanges, two buckets, two pairs, or in two that are described differently."""
    ranks, zeros = ranks_of(4), torch.zeros(1000, dtype=torch.int32)
    seen = []
    for _ in range(3):
        masks = [rank.masks("same") for rank in ranks]
        for _ in range(2):
            hidden = [zeros.clone() for _ in ranks]
            for own, words in zip(masks, hidden, strict=True):
                own.hide(words)
            seen += hidden
    seen += sent(ranks_of(4), [zeros] * 4, "another")
    for one, two in combinations(seen, 2):
        assert int((one == two).sum()) < 3
        assert int((one == -two).sum()) < 3


def test_ranks_that_describe_an_exchange_differently_get_noise() -> None:
    words = [torch.zeros(1000, dtype=torch.int32)] * 3
    ranks = ranks_of(3)
    hidden = [own.clone() for own in words]
    for layout, rank, own in zip(("a", "a", "b"), ranks, hidden, strict=True):
        rank.masks(layout).hide(own)
    assert int((sum(hidden) == 0).sum()) < 3


def test_a_key_read_later_takes_no_mask_off() -> None:
    """Its own masks, and those of a rank that keeps all it ever sees, are other ones."""
    ranks, zeros = ranks_of(3), torch.zeros(1000, dtype=torch.int32)
    first = sent(ranks, [zeros] * 3)
    stolen = copy.copy(ranks[0].__dict__)
    again = SecureAggregation(stolen["_accelerator"])
    again._keys = stolen["_keys"]
    second = zeros.clone()
    again.masks("x").hide(second)
    assert int((first[0] == second).sum()) < 3


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_keys_are_not_copied(copied: Any) -> None:
    with pytest.raises(TypeError, match="two exchanges would have one mask"):
        copied(ranks_of(3)[0])


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("count", [3, 4, 5, 64, 1000])
@pytest.mark.parametrize("bound", [16.0, 1.0, 3.0, 1e-3, 2.0**20])
def test_the_largest_sum_has_room(bits: Any, count: int, bound: float) -> None:
    point = FixedPoint(bound, count, bits)
    for sign in (1, -1):
        word = int(point.encode(torch.tensor([sign * bound], dtype=torch.float64)))
        assert abs(count * word) < 2 ** (bits - 1)
        assert math.log2(point.unit) == int(math.log2(point.unit))
    # and no more than two bits of it are given away
    assert count * bound / point.unit > 2 ** (bits - 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rounding_is_to_half_a_unit(dtype: torch.dtype) -> None:
    point = FixedPoint(16.0, 3, 32)
    values = (torch.randn(10_000, dtype=torch.float64) * 0.01).to(dtype)
    error = point.encode(values).double() * point.unit - values.double()
    assert float(error.abs().max()) <= point.unit / 2
    if dtype == torch.float32:  # above 2²⁴ units it has no digits left to round
        large = values[values.abs() > 2**24 * point.unit]
        assert torch.equal(point.encode(large) * point.unit, large)


def test_mean_of_words() -> None:
    for bits in (32, 64):
        point = FixedPoint(16.0, 3, bits)  # type: ignore[arg-type]
        total = torch.tensor([3, -6], dtype=point.word)
        expected = torch.tensor([point.unit, -2 * point.unit])
        assert torch.equal(point.mean(total).float(), expected)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_within_a_bound(value: float) -> None:
    point = FixedPoint(16.0, 3, 32)
    tensors = [torch.ones(5), torch.tensor([1.0, value]), torch.empty(0)]
    assert not point.largest(tensors) <= point.bound
    assert point.largest([torch.tensor([1.0, -3.0]), torch.tensor([2.0]).bfloat16()]) == 3
    assert point.largest([]) == 0


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_than_three_ranks_are_refused(count: int) -> None:
    accelerator: Any = SimpleNamespace(process_index=0, num_processes=count)
    with pytest.raises(NotImplementedError, match=r"the mean and its own\. Take three ranks"):
        SecureAggregation(accelerator)


def test_the_trainer_refuses_one_rank(tmp_path: Any) -> None:
    args = GradGuardConfig(
        str(tmp_path), use_cpu=True, report_to="none", defense="none", secure_aggregation=True
    )
    with pytest.raises(NotImplementedError, match=r"secure_aggregation on 1 rank\(s\)"):
        GradGuardTrainer(make_task("bert", dtype=torch.float32)[0], args)


# Noise of the sum


def config(**settings: Any) -> GradGuardConfig:
    return GradGuardConfig("out", use_cpu=True, **settings)


def summed(**settings: Any) -> GradGuardConfig:
    return config(secure_aggregation=True, noise_for="sum", **settings)


def test_noise_of_the_sum_is_of_the_scale_stated() -> None:
    """Four ranks of two clients: the messages' noise added up, over 10⁵ entries."""
    stated = make_defense("gaussian_noise", scale=0.5)
    own = share_of_noise(stated, summed(clients_per_process=2), ranks=4)
    assert stated.scale == 0.5  # the caller's object is as it was
    gmap: Any = _constant_map(100_000)
    noise = sum(own(gmap)["x"] - 1 for _ in range(8))
    assert float(noise.std()) == pytest.approx(0.5, rel=0.02)  # 9 standard errors
    variance = own(gmap).noise.variance["x"]  # what figures count: one message's own
    assert float(variance.mean()) == pytest.approx(0.5**2 / 8)


def _constant_map(size: int) -> Any:
    gradient = {"x": torch.ones(size)}
    return SimpleNamespace(
        gradient=lambda: gradient, form=lambda: gradient, restrict=lambda tensors: tensors,
        transmitted=None, versions=lambda: {}, parameters=gradient, shards=None,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["optimal_noise", "dp_sgd", "optimal_dp_sgd"])
def test_noise_of_the_sum_keeps_the_other_settings(name: str) -> None:
    more = {"clip": 0.3} if "sgd" in name else {}
    own = share_of_noise(make_defense(name, scale=0.9, **more), summed(), ranks=9)
    assert own.settings() == make_defense(name, scale=own.scale, **more).settings()
    assert own.scale == pytest.approx(0.3)


@pytest.mark.parametrize(
    "defense",
    [
        make_defense("gaussian_noise", relative_scale=1.0),
        make_defense("gaussian_noise", utility_budget=1.0),
        make_defense("laplace_noise", scale=1.0),
        make_defense("pruning"),
        make_defense("none"),
        chain(make_defense("pruning"), make_defense("gaussian_noise", scale=1.0)),
    ],
    ids=str,
)
def test_noise_of_the_sum_needs_a_stated_gaussian(defense: Any) -> None:
    with refuses("sum-of-unknown-noise"):
        share_of_noise(defense, summed(), ranks=3)
    assert not is_summed(defense, config())


def test_noise_of_the_sum_needs_every_message() -> None:
    defense = make_defense("gaussian_noise", scale=1.0)
    with refuses("sum-with-limit"):
        share_of_noise(defense, summed(leakage_limit=0.1), ranks=3)


@pytest.mark.parametrize("settings", [{"noise_for": "sum"}, {"secure_aggregation_keys": "keys"}])
def test_what_needs_secure_aggregation_says_so(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="need secure_aggregation=True"):
        config(**settings)


@pytest.mark.parametrize("bound", [0.0, -1.0, math.inf, math.nan])
def test_a_range_is_a_finite_number_above_0(bound: float) -> None:
    with pytest.raises(ValueError, match="secure_aggregation_range must be a finite number"):
        config(secure_aggregation_range=bound)


@pytest.mark.statistics
@pytest.mark.parametrize("strength", [20.0, 1_000.0])
def test_a_guess_is_reached_by_the_sums_of_others_as_often(strength: float) -> None:
    """Three ranks' noise of a third of the power, rounded to the grid of the sum. A guess of the
    mean gradient is reached by the mean that all get as often where it is right as where gradients
    are off by a ten thousandth of the noise.
    """
    deviation, point = strength * 1e-3, FixedPoint(bound=16.0 * strength, ranks=3, bits=32)
    share, generator = torch.tensor(deviation / math.sqrt(3)), torch.manual_seed(1)

    def summed_words(gradients: Tensor) -> Tensor:
        return sum(point.encode(Stream().noisy(g, share, g.numel())) for g in gradients)  # type: ignore[return-value]

    excesses = []
    for _ in range(4):
        gradients = 1e-3 * torch.randn(3, 200_000, generator=generator)
        others = gradients + 1e-4 * deviation * torch.randn(3, 200_000, generator=generator)
        words, guess = summed_words(gradients), gradients.mean(0)
        means = point.mean(words), point.mean(summed_words(others))
        right, other = (reachable(m, guess, deviation / 3).double().mean() for m in means)
        excesses.append(float(right - other))
    assert abs(sum(excesses) / 4) < 1.6e-3  # four standard errors
    # whole steps, whose last bits are even and odd alike, whatever the gradients' were
    for bits in (1, 2, 4):
        odd = float(((words // bits) % 2).double().mean())
        assert abs(odd - 0.5) < 4 * 0.5 / math.sqrt(len(guess))
    noise = (means[0].double() - guess.double()) * 3 / deviation
    assert stats.kstest(noise.numpy(), "norm").pvalue > 1e-3


def test_noise_finer_than_the_grid_of_the_sum_is_refused() -> None:
    """Of the message's noise, which is 1/√3 of the sum's, four steps of the grid are the least."""
    step = math.sqrt(3) * FixedPoint(16.0, 3, 32).unit
    with pytest.raises(ValueError, match="secure_aggregation_range"):
        share_of_noise(make_defense("gaussian_noise", scale=3.99 * step), summed(), ranks=3)
    noise = make_defense("gaussian_noise", scale=4.01 * step)
    assert share_of_noise(noise, summed(), ranks=3).scale == pytest.approx(noise.scale / 3**0.5)


def test_rounding_of_a_sum_counts_in_epsilon() -> None:
    """What a rank sends moves by √d steps of the grid more than a row's clipped gradient does."""
    model = nn.Linear(1_000, 1_000, bias=False)
    step = FixedPoint(16.0, 3, 32).unit
    assert rounding_of_sum(summed(), model, 3, 1.0) == pytest.approx(1_000 * step)
    one = torch.randn(50_000, generator=torch.manual_seed(3))
    moved = one + 1e-3 * torch.randn(50_000, generator=torch.manual_seed(4))
    words = [FixedPoint(16.0, 3, 32).encode(v).double() * step for v in (one, moved)]
    apart, exact = float((words[0] - words[1]).norm()), float((one - moved).norm())
    assert apart <= exact + math.sqrt(50_000) * step
