"""On three and four ranks, secure aggregation gives the mean, and what leaves a rank says
nothing.
"""

from __future__ import annotations

import functools
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dead_worker import TIMEOUT
from identities import write_keys
from launcher import Running, launch
from secure_worker import BOUND, RUNS
from torch import Tensor

from hf_gradguard.secure.aggregation import FixedPoint

pytestmark = pytest.mark.distributed
SECURE = [name for name in RUNS if RUNS[name].get("secure_aggregation", True)]
Reports = list[dict[str, Any]]


@functools.cache
def _reports(folder: Path, ranks: int) -> Reports:
    write_keys(folder / "keys", ranks)
    write_keys(folder / "other keys", ranks)
    launch("secure_worker.py", folder, ranks=ranks)
    return [torch.load(folder / f"tensors{rank}.pt") for rank in range(ranks)]


@pytest.fixture(scope="module", params=[3, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    folder = tmp_path_factory.mktemp(f"secure{request.param}")
    return _reports(folder, request.param)


def data(sent: list[tuple[str, Tensor]]) -> list[Tensor]:
    """The buckets of gradients: votes and figures are shorter."""
    return [tensor for _, tensor in sent if tensor.dtype == torch.int32 and len(tensor) > 4]


def exact(tensors: list[list[Tensor]]) -> list[Tensor]:
    """Means over ranks, in float64."""
    return [torch.stack([t.double() for t in same]).mean(0) for same in zip(*tensors, strict=True)]


def assert_means(found: list[Tensor], own: list[list[Tensor]], bound: float) -> None:
    """To half a unit of the fixed point, and the rounding of the result's type."""
    unit = FixedPoint(bound, len(own), 32).unit
    for mean, expected in zip(found, exact(own), strict=True):
        rounding = 2 * torch.finfo(mean.dtype).eps * expected.abs()
        assert bool(((mean.double() - expected).abs() <= unit / 2 + rounding).all())
    assert max(float(expected.abs().max()) for expected in exact(own)) > 1e4 * unit


# It is the mean


@pytest.mark.parametrize("name", ["mean", "after all"])
def test_it_is_the_mean(ranks: Reports, name: str) -> None:
    for rank in ranks:
        assert_means(rank["direct"][name], [other["direct"]["own"] for other in ranks], BOUND)


@pytest.mark.parametrize("name", SECURE)
def test_it_is_the_mean_in_training(ranks: Reports, name: str) -> None:
    """float32, bf16, LoRA, a language model and one with batch statistics."""
    for step in range(2):
        own = [rank["runs"][name]["own"][step] for rank in ranks]
        assert not torch.equal(own[0][-1], own[1][-1])
        for rank in ranks:
            assert_means(rank["runs"][name]["means"][step], own, bound=16.0)
    dtypes = {tensor.dtype for tensor in ranks[0]["runs"][name]["own"][0]}
    assert dtypes == {torch.bfloat16 if name == "bf16" else torch.float32}


def test_it_is_the_mean_in_a_loop_of_ones_own(ranks: Reports) -> None:
    found = [rank["looped"] for rank in ranks]
    for one in found:
        assert_means(one["means"], [other["own"] for other in found], BOUND)
        assert {tensor.dtype for _, tensor in one["sent"]} == {torch.int32, torch.int64}
        assert "Pass the one that SecureAggregation was made with" in one["another"]


def test_the_sum_of_words_is_exact(ranks: Reports) -> None:
    """Not one unit is lost: added up modulo 2³², masked words are the words themselves."""
    point = FixedPoint(BOUND, len(ranks), 32)
    masked = [torch.cat(data(rank["direct"]["sent"])) for rank in ranks]
    words = [torch.cat([point.encode(t.flatten()) for t in r["direct"]["own"]]) for r in ranks]
    assert torch.equal(sum(masked), sum(words))
    assert len(words[0]) == 4908


def test_figures_are_means_too(ranks: Reports) -> None:
    last = len(ranks) - 1
    for rank in ranks:
        large, small = rank["direct"]["figure"]
        assert float(large) == 1e6 + last / 2
        assert float(small) == pytest.approx(1e-6 * last / 2, abs=2**-30)
    tokens = {rank["runs"]["gpt2_lm"]["tokens"] for rank in ranks}
    assert len(tokens) == 1
    assert tokens.pop() > 0
    for same in zip(*[rank["runs"]["resnet"]["statistics"] for rank in ranks], strict=True):
        assert all(torch.equal(same[0], other) for other in same[1:])
    assert [rank["stopped"] for rank in ranks] == [1] * len(ranks)


# What leaves a rank says nothing


def largest_correlation(words: Tensor, message: Tensor, tries: int = 10_000) -> float:
    """|correlation| · √N of a message with multiples, modulo 2³², of the words (the first one is
    1), and of its bits with theirs and with exclusive ors of two of theirs.
    """
    generator = np.random.default_rng(0)
    unsigned = words.numpy().view(np.uint32)
    target = _standard(message.double().numpy()[None])[0]
    factors = generator.integers(0, 2**32, tries, dtype=np.uint32) | np.uint32(1)
    factors[0] = 1
    largest = 0.0
    for start in range(0, tries, 500):
        multiples = (factors[start : start + 500, None] * unsigned).view(np.int32)
        largest = max(largest, float(np.abs(_standard(multiples.astype(float)) @ target).max()))
    point = FixedPoint(16.0, 3, 32)
    bits, own = _bits(unsigned), _bits(point.encode(message).numpy().view(np.uint32))
    pairs = np.stack([bits[i] ^ bits[j] for i, j in combinations(range(32), 2)])
    for patterns in (bits, pairs):
        products = _standard(patterns.astype(float)) @ _standard(own.astype(float)).T
        largest = max(largest, float(np.abs(products).max()))
    return largest * len(words) ** 0.5


def _bits(words: Any) -> Any:
    return (words[None] >> np.arange(32, dtype=np.uint32)[:, None]) & 1


def _standard(rows: Any) -> Any:
    """Rows of mean 0 and norm 1; constant ones are 0."""
    centered = rows - rows.mean(1, keepdims=True)
    norms = np.linalg.norm(centered, axis=1, keepdims=True)
    return np.divide(centered, norms, out=np.zeros_like(centered), where=norms > 0)


CHANCE = 6.5  # standard deviations: by chance once in 10¹⁰ tries, and there are some 10⁶


def seen(ranks: Reports, name: str) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Of each rank, its buckets and its messages, step by step."""
    found = []
    for rank in ranks:
        run = rank["runs"][name]
        own = [torch.cat([t.flatten().float() for t in step]) for step in run["own"]]
        buckets = data(run["sent"])
        assert [len(bucket) for bucket in buckets] == [len(message) for message in own]
        found.append((buckets, own))
    return found


def test_the_detector_finds_what_is_not_masked_or_masked_twice(ranks: Reports) -> None:
    """The controls of the next test."""
    point = FixedPoint(16.0, len(ranks), 32)
    buckets, own = seen(ranks, "bert")[0]
    words = [point.encode(message) for message in own]
    size = len(own[0]) ** 0.5
    assert largest_correlation(words[0], own[0], 2) > 0.99 * size
    odd = torch.tensor(3**17 % 2**32 - 2**32, dtype=torch.int64).to(torch.int32)
    inverse = pow(3**17, -1, 2**32)
    assert torch.equal((words[0] * odd).long() * inverse % 2**32, words[0].long() % 2**32)
    again = buckets[0] - words[0] + words[1]  # the same mask for another message
    assert largest_correlation(again - buckets[0], own[1] - own[0], 2) > 0.99 * size
    scattered = words[0].clone()  # one bit that says the sign
    noise = torch.randint(-(2**31), 2**31, (len(scattered),)).to(torch.int32)
    bit = (own[0] < 0).to(torch.int32)
    assert largest_correlation(noise & ~1 | bit, own[0], 2) > 0.5 * size


@pytest.mark.parametrize("name", ["bert", "bf16", "bert_lora"])
def test_what_leaves_a_rank_correlates_with_no_message(ranks: Reports, name: str) -> None:
    """Nor do sums of several ranks' words, as reach a neighbor, nor differences of two steps."""
    found = seen(ranks, name)
    for rank, (buckets, own) in enumerate(found):
        for step in range(2):
            assert largest_correlation(buckets[step], own[step]) < CHANCE
        assert largest_correlation(buckets[1] - buckets[0], own[1] - own[0]) < CHANCE
        others = [other for other in range(len(found)) if other != rank]
        for count in range(1, len(others)):
            for more in combinations(others, count):
                partial = buckets[0] + sum(found[other][0][0] for other in more)
                assert largest_correlation(partial, own[0], 100) < CHANCE
    whole = sum(buckets[0] for buckets, _ in found)
    assert largest_correlation(whole, found[0][1][0], 2) > CHANCE  # what the mean itself says


def test_words_are_uniform(ranks: Reports) -> None:
    words = torch.cat([bucket for rank in ranks for bucket in data(rank["runs"]["bert"]["sent"])])
    counts = np.bincount(words.numpy().view(np.uint8), minlength=256)
    expected = counts.sum() / 256
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert abs(statistic - 255) < 6 * (2 * 255) ** 0.5


def test_no_exchange_has_the_masks_of_another(ranks: Reports) -> None:
    """Zeros, three times, the last one after new keys, which a resumed run has."""
    everything = [words for rank in ranks for words in rank["direct"]["same"]]
    assert len(everything) == 3 * len(ranks)
    for one, two in combinations(everything, 2):
        assert int((one == two).sum()) < 3
        assert int((one == -two).sum()) < 3
    for exchange in range(3):
        assert not sum(rank["direct"]["same"][exchange] for rank in ranks).any()


def _shows(tensors: list[tuple[str, Tensor]], figure: float, size: int) -> bool:
    """Whether a figure is among tensors: as a number, to float32, or as a fixed point. The bytes
    of public keys are not looked at: a small count is among them by chance.
    """
    word = int(FixedPoint(2.0**32, size, 64).encode(torch.tensor([figure]).double()))
    values = torch.cat([t.double() for _, t in tensors if t.dtype != torch.uint8])
    near = (values - figure).abs() <= 1e-6 * abs(figure)
    return bool(near.any() or (values == float(word)).any())


@pytest.mark.parametrize("name", SECURE)
def test_no_loss_or_count_of_a_rank_leaves_it(ranks: Reports, name: str) -> None:
    for rank in ranks:
        run = rank["runs"][name]
        figures = {own: mean for own, mean in run["figures"] if own and own != mean}
        assert len(figures) >= 2  # losses at least
        for own in figures:
            assert not _shows(run["sent"], own, len(ranks))
            assert not any(_shows(r["runs"][name]["received"], own, len(ranks)) for r in ranks)
        # gathered by the stock Trainer, as a mean by then
        assert any(_shows(run["received"], mean, len(ranks)) for mean in figures.values())


def test_without_secure_aggregation_only_the_sum_arrives(ranks: Reports) -> None:
    """But who carries the parts of a sum sees them: there they leave the rank."""
    runs = [rank["runs"]["plain exchange"] for rank in ranks]
    for rank, run in enumerate(runs):
        figures = [own for own, mean in run["figures"] if own and own != mean]
        assert len({round(own, 9) for own in figures}) >= 4  # losses, labels, tokens, operations
        for own in figures:
            assert _shows(run["sent"], own, len(ranks))
            others = [other["received"] for other in runs[:rank] + runs[rank + 1 :]]
            if own != int(own):  # small whole numbers come by chance
                assert not any(_shows(received, own, len(ranks)) for received in others)


# What is refused


def test_what_has_no_room_is_refused_by_all_ranks(ranks: Reports) -> None:
    for index, rank in enumerate(ranks):
        found = rank["direct"]
        for refusal, (culprit, largest) in zip(
            found["refusals"], [(1, "4.04"), (2, "nan")], strict=True
        ):
            assert refusal.startswith(f"OverflowError: 1 of {len(ranks)} ranks have an entry that")
            assert "nothing was exchanged" in refusal
            assert "secure_aggregation_range" in refusal
            own = f"This rank's largest is {largest}" if index == culprit else "are within it"
            assert own in refusal
        assert found["sent when refused"] == [4, 4]  # how many refuse, masked, and no message
        assert f"OverflowError: {len(ranks)} of" in found["large figure"]
        assert "look for one that diverges" in found["large figure"]


def test_ranks_that_differ_are_refused(ranks: Reports) -> None:
    for rank in ranks:
        assert "ValueError: Ranks differ in secure_aggregation, so nothing" in rank["apart"]
        assert len(rank["direct"]["apart"]) == 2  # another shape, and another range
        for refusal in rank["direct"]["apart"]:
            assert refusal.startswith("RuntimeError: The masks of secure_aggregation are not gone")


def test_a_rank_with_another_key_is_refused(ranks: Reports) -> None:
    for index, rank in enumerate(ranks):
        other = 0 if index == 1 else 1
        assert f"ValueError: Rank {other} is not who rank{other}.pub" in rank["direct"]["wrong key"]


@pytest.mark.parametrize(
    ("how", "secure"),
    [
        ("SIGKILL", "secure"),
        pytest.param("SIGKILL", "plain", marks=pytest.mark.slow),
        pytest.param("SIGSTOP", "secure", marks=pytest.mark.slow),
        pytest.param("SIGSTOP", "plain", marks=pytest.mark.slow),
    ],
)
def test_a_dead_rank_ends_the_others(tmp_path: Path, how: str, secure: str) -> None:
    """Nothing but the exchange tells the others: what started the ranks ends none of them."""
    outputs, statuses = (
        [tmp_path / f"{what}{rank}" for rank in range(3)] for what in ("output", "status")
    )
    running = Running("dead_worker.py", tmp_path, how, secure, ranks=3, alone=True)
    try:
        _wait(lambda: "second step" in _text(outputs[1]), 90)
        start = time.monotonic()
        _wait(lambda: all(_text(statuses[rank]) for rank in (0, 2)), TIMEOUT + 20)
        seconds = time.monotonic() - start
    finally:
        running.kill()
    for rank in (0, 2):
        text = _text(outputs[rank])
        assert _text(statuses[rank]) not in ("0", ""), text[-2000:]
        assert f"RuntimeError: Rank {rank} could not exchange with the others" in text, text
        assert "the weights stay as they were" in text
    # the timeout, and for a process to end on a busy machine
    assert seconds < TIMEOUT + 10
    assert not list(tmp_path.glob("report*.json"))


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _wait(holds: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# Dropout


def _agreement(one: list[list[bool]], two: list[list[bool]]) -> float:
    return float((torch.tensor(one) == torch.tensor(two)).double().mean())


def test_no_rank_knows_the_dropout_of_another(ranks: Reports) -> None:
    """With defense none every rank draws the masks of all others, as in the stock Trainer."""
    runs = [rank["dropout"] for rank in ranks]
    for one, two in combinations(runs, 2):
        assert _agreement(one["none"], two["none"]) == 1
        for name in ("private", "private again", "seeded"):
            assert abs(_agreement(one[name], two[name]) - 0.5) < 0.125  # 800 units: 7 σ
    for run in runs:
        assert len(run["private"]) >= 4
        for one, two in combinations(run["private"], 2):
            assert abs(_agreement([one], [two]) - 0.5) < 0.25  # 200 units: 7 σ


def test_dropout_follows_no_seed_but_the_noises(ranks: Reports) -> None:
    """`args.seed` is the same in all runs; `noise_seed` is for tests."""
    for rank in ranks:
        run = rank["dropout"]
        for name in ("none", "private again", "seeded"):
            assert abs(_agreement(run["private"], run[name]) - 0.5) < 0.125
        assert run["seeded"] == run["seeded again"]
