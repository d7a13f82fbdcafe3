"""The stream that everything which protects is drawn from: published vectors, distributions,
independence.
"""

from __future__ import annotations

import copy
import math
import multiprocessing
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hf_gradguard.defenses.noise import add_noise
from hf_gradguard.randomness import Stream, chacha20_words, keystream, normal, signs

# RFC 8439: Section 2.3.2, and Appendix A.1, test vectors 1 to 5: key, nonce, block, keystream.
VECTORS = {
    "2.3.2": (
        bytes(range(32)).hex(), "000000090000004a00000000", 1,
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    "A.1 1": (
        "00" * 32, "00" * 12, 0,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    "A.1 2": (
        "00" * 32, "00" * 12, 1,
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    "A.1 3": (
        "00" * 31 + "01", "00" * 12, 1,
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
    "A.1 4": (
        "00ff" + "00" * 30, "00" * 12, 2,
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
    ),
    "A.1 5": (
        "00" * 32, "00" * 11 + "02", 0,
        "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
        "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d",
    ),
}  # fmt: skip


@pytest.mark.parametrize("vector", VECTORS)
def test_the_keystream_is_rfc_8439s(vector: str) -> None:
    key, nonce, block, expected = VECTORS[vector]
    words = chacha20_words(bytes.fromhex(key), bytes.fromhex(nonce), block, 1, "cpu")
    assert words.numpy().tobytes().hex() == expected
    parts = keystream(bytes.fromhex(key), bytes.fromhex(nonce), [16] * (block + 1))
    assert [part.numpy().tobytes().hex() for part in parts][block] == expected


@pytest.mark.parametrize("first", [0, 7, 2**31 - 2, 2**32 - 3])
def test_torchs_operations_and_the_library_agree(first: int) -> None:
    """Also where the block's number crosses a sign, which torch's integers have."""
    key, nonce = bytes(range(32)), bytes(range(12))
    words = chacha20_words(key, nonce, first, 3, "cpu")
    if first < 100:
        expected = torch.cat([p.clone() for p in keystream(key, nonce, [16] * (first + 3))])
        assert torch.equal(words, expected[16 * first :])
    each = [chacha20_words(key, nonce, first + k, 1, "cpu") for k in range(3)]
    assert torch.equal(words, torch.cat(each))
    assert len({tuple(one.tolist()) for one in each}) == 3


def test_an_accelerators_path_draws_from_the_same_keystream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In parts that end within a block: what was cut off is not used again."""
    key = bytes(range(1, 33))
    expected = Stream(key).uniform((1000,))
    monkeypatch.setattr("hf_gradguard.randomness._on_cpu", lambda device: False)
    for chunk in (16, 48, 2**20):
        monkeypatch.setattr("hf_gradguard.randomness._CHUNK_ELSEWHERE", chunk)
        assert torch.equal(Stream(key).uniform((1000,)), expected)


DRAWS: dict[str, tuple[Callable[[Stream, int], Tensor], stats.rv_continuous]] = {
    "normal": (lambda s, n: s.normal((n,)), stats.norm),
    "normal, float64": (lambda s, n: s.normal((n,), dtype=torch.float64), stats.norm),
    "exponential": (lambda s, n: s.exponential((n,)), stats.expon),
    "uniform": (lambda s, n: s.uniform((n,)), stats.uniform),
    "uniform, float64": (lambda s, n: s.uniform((n,), dtype=torch.float64), stats.uniform),
}


@pytest.mark.parametrize("what", DRAWS)
def test_distributions(what: str) -> None:
    """Kolmogorov and Smirnov's test on a million; seeds are fixed, so it cannot fail by chance."""
    draw, law = DRAWS[what]
    for seed in (1, 2, 3):
        found = draw(Stream.from_seeds(seed), 10**6).double().numpy()
        assert stats.kstest(found, law.cdf).pvalue > 0.01


@pytest.mark.slow
def test_distribution_of_a_hundred_million() -> None:
    """Histograms at 10⁸ draws against the exact law, with tails, moments and pairs."""
    stream, count, parts = Stream.from_seeds(4), 10**7, 10
    edges = np.concatenate([[-np.inf], np.linspace(-5.5, 5.5, 221), [np.inf]])
    seen, moments, lag = np.zeros(len(edges) - 1), np.zeros(4), 0.0
    for _ in range(parts):
        x = stream.normal((count,)).double().numpy()
        seen += np.histogram(x, edges)[0]
        moments += [(x**power).mean() / parts for power in (1, 2, 3, 4)]
        lag += float((x[1:] * x[:-1]).mean()) / parts
    total = count * parts
    expected = np.diff(stats.norm.cdf(edges)) * total
    assert stats.chisquare(seen, expected).pvalue > 0.01
    distance = np.abs(np.cumsum(seen) - np.cumsum(expected)).max() / total
    assert distance < 1.63 / math.sqrt(total)  # 1 % of Kolmogorov and Smirnov's
    assert np.abs(moments - [0, 1, 0, 3]).max() < 6 * math.sqrt(96 / total)
    assert abs(lag) < 6 / math.sqrt(total)


def test_tails_reach_beyond_eight_deviations() -> None:
    """The smallest u there is gives 9.4 σ; torch's own, of 24 bits, end at 5.8."""
    from hf_gradguard.randomness import _log_uniform

    extremes = torch.tensor([0, -(2**63), 2**63 - 1, 2**62, 1])
    largest, least, as_small, middle, second = (-2 * _log_uniform(extremes)).sqrt().tolist()
    assert 9.4 < largest < 9.45
    assert least == as_small == 0
    assert middle == pytest.approx(math.sqrt(2 * math.log(2)))
    assert largest - second < 0.15  # no gap in the tail is wide


def test_integers() -> None:
    found = Stream.from_seeds(1).integers(7, (70_000,))
    assert stats.chisquare(found.bincount(minlength=7).numpy()).pvalue > 0.01
    assert not Stream().integers(1, (5,)).any()
    assert Stream().integers(2**32, (1000,)).max() >= 2**31
    for high in (0, 2**32 + 1):
        with pytest.raises(ValueError, match=r"from 1 to 2\*\*32"):
            Stream().integers(high, (1,))


def test_signs_are_fair_and_independent() -> None:
    """Also of those that one word gives, and from one part of a draw to the next."""
    found = Stream.from_seeds(2).signs((2**21,))
    assert found.abs().unique().tolist() == [1.0]
    # Sums of signs and of neighbors' products: binomial, of deviation √n; 4 of them
    for far in (0, 1, 31, 32, 2**15, 2**16, 2**20):
        products = found[far:] * found[: len(found) - far] if far else found
        assert abs(float(products.double().sum())) < 4 * len(products) ** 0.5


@pytest.mark.parametrize("words", [1, 3, 2**10, 2**10 + 1, 2**15 + 5])
def test_signs_are_bits_of_the_stream(words: int) -> None:
    """The first bit of every word, then the next, however many are made together."""
    found = Stream.from_seeds(3).signs((32 * words,)).reshape(-1)
    parts = [part.clone() for part in Stream.from_seeds(3).words(words)]
    bits = [1 - 2 * (part >> (31 - bit) & 1).float() for part in parts for bit in range(32)]
    assert torch.equal(found, torch.cat(bits))


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 5), (2**16 + 1,), (2**17 + 3,)])
def test_shapes_and_types(shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        draws = (Stream().normal, Stream().uniform, Stream().exponential, Stream().signs)
        for draw in draws:
            found = draw(shape, dtype=dtype)
            assert (found.shape, found.dtype) == (torch.Size(shape), dtype)
            assert torch.isfinite(found).all()


@pytest.mark.parametrize("size", [1, 2**15 + 1, 2**17 - 2, 2**18 + 5, 10**6 + 3])
def test_threads_share_out_one_draw(size: int) -> None:
    """Whatever their number, the same numbers come out, and the next draw is the next."""
    draws: list[Callable[[Stream], Tensor]] = [
        lambda s: s.normal((size,)),
        lambda s: s.normal((size,), dtype=torch.float64),
        lambda s: s.exponential((size,)),
        lambda s: s.uniform((size,)),
        lambda s: s.integers(1000, (size,)),
        lambda s: s.signs((size,)),
    ]
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            stream = Stream.from_seeds(5)
            found.append([draw(stream) for draw in draws])
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert torch.equal(one, other)


def test_a_thread_goes_on_in_the_middle_of_the_keystream() -> None:
    """Block by block: what a thread encrypts from a later block is what one would have there."""
    key, nonce = bytes(range(32)), bytes(range(12))
    whole = torch.cat([part.clone() for part in keystream(key, nonce, [64] * 4)])
    (later,) = keystream(key, nonce, [64], block=4)
    assert torch.equal(later, whole[64:128])


@pytest.mark.parametrize("count", [0, 1, 3, 4, 64, 65, 2**18 + 5])
def test_bytes(count: int) -> None:
    """As many as asked for, from the beginning of the draw's keystream."""
    key = bytes(range(32))
    whole = chacha20_words(key, bytes(12), 0, count // 64 + 1, "cpu").numpy().tobytes()
    assert Stream(key).bytes(count) == whole[:count]


# Who can repeat it


def test_streams_are_the_systems() -> None:
    draws = [tuple(Stream().normal((8,)).tolist()) for _ in range(50)]
    draws += [tuple(Stream.from_seeds(seed).normal((8,)).tolist()) for seed in range(50)]
    torch.manual_seed(0)
    one = Stream().normal((8,))
    torch.manual_seed(0)
    assert not torch.equal(one, Stream().normal((8,)))
    assert len(set(draws)) == 100


def test_seeds_reproduce_and_differ_by_each() -> None:
    first = Stream.from_seeds(1, 2, 3)
    again = Stream.from_seeds(1, 2, 3)
    for _ in range(3):
        assert torch.equal(first.normal((9,)), again.normal((9,)))
    others = [(), (1,), (1, 2), (1, 2, 4), (12, 3), (1, 23), (123,), (3, 2, 1), (1, 2, 3, 0)]
    base = Stream.from_seeds(1, 2, 3).bytes(32)
    assert all(Stream.from_seeds(*seeds).bytes(32) != base for seeds in others)
    with pytest.raises(ValueError, match="at least 0"):
        Stream.from_seeds(1, -2)


def test_draws_of_one_stream_do_not_repeat() -> None:
    """Correlations of every two of a hundred draws are those of independent numbers."""
    stream = Stream.from_seeds(6)
    draws = torch.stack([stream.normal((10_000,)) for _ in range(100)])
    correlation = (draws @ draws.T / 10_000 - torch.eye(100)).abs()
    correlation.fill_diagonal_(0)
    assert correlation.max() < 6 / 100


def test_spawned_streams_are_independent_of_their_parent() -> None:
    parent = Stream.from_seeds(7)
    children = [parent.spawn() for _ in range(3)]
    several = torch.stack([s.normal((10_000,)) for s in (parent, *children)])
    assert (several @ several.T / 10_000 - torch.eye(4)).fill_diagonal_(0).abs().max() < 6 / 100
    again = Stream.from_seeds(7)
    assert torch.equal(again.spawn().normal((10_000,)), several[1])


def _draw_in_a_fork(queue: multiprocessing.Queue, stream: Stream, fixed: Stream) -> None:
    child = stream.spawn()
    queue.put((stream.bytes(16), child.bytes(16), fixed.bytes(16)))


def test_forks_draw_their_own() -> None:
    """As workers of a data loader are: a copy of the parent's memory. Seeds stay seeds."""
    context = multiprocessing.get_context("fork")
    queue, stream, fixed = context.Queue(), Stream(), Stream.from_seeds(8)
    workers = [
        context.Process(target=_draw_in_a_fork, args=(queue, stream, fixed)) for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    found = [queue.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    private = [stream.bytes(16), *(each for one in found for each in one[:2])]
    assert len(set(private)) == 7
    assert {one[2] for one in found} == {fixed.bytes(16)}


class _Noise(Dataset):
    """A data set that draws in the worker that reads it."""

    def __init__(self, draw: Callable[[], Tensor]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return self.draw()


def test_workers_of_a_data_loader_draw_their_own() -> None:
    """In every epoch anew, and not what the parent draws. The control: torch's generator repeats
    itself in every worker.
    """

    def drawn(draw: Callable[[], Tensor]) -> Tensor:
        loader = DataLoader(
            _Noise(draw), batch_size=None, num_workers=2, multiprocessing_context="fork"
        )
        found = torch.stack([*loader, *loader, draw()])
        correlation = torch.corrcoef(found).abs().fill_diagonal_(0)
        return correlation.max() * 2000**0.5

    generator, stream = torch.Generator().manual_seed(1), Stream()
    assert drawn(lambda: torch.randn(2000, generator=generator)) > 40
    assert drawn(lambda: stream.normal((2000,))) < 6


def test_small_tensors_share_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbors up to a size, of one type; larger ones alone. Deviations follow their tensors."""
    monkeypatch.setattr("hf_gradguard.defenses.noise._SHARED_DRAW", 10)
    sizes = {"a": (2, 3), "b": (4,), "c": (1,), "large": (11,), "d": (), "e": (0,), "f": (3, 3)}
    tensors = {name: torch.ones(shape) for name, shape in sizes.items()}
    tensors["g"] = torch.ones(1, dtype=torch.float64)
    deviations = {
        name: torch.full(t.shape, float(n)) for n, (name, t) in enumerate(tensors.items())
    }
    draws = []

    def noisy(_: Stream, values: Tensor, deviation: Tensor, entries: int, noise: str) -> Tensor:
        draws.append((len(values), values.dtype))
        assert (entries, noise) == (33, "laplace")
        return values + deviation

    monkeypatch.setattr(Stream, "noisy", noisy)
    shared = dict(add_noise(tensors, deviations.__getitem__, 33, Stream(), "laplace"))
    single, double = torch.float32, torch.float64
    assert draws == [(10, single), (1, single), (11, single), (10, single), (1, double)]
    assert [*shared] == [*tensors]
    for name, tensor in tensors.items():
        assert (shared[name].shape, shared[name].dtype) == (tensor.shape, tensor.dtype)
        assert bool((shared[name] == 1 + deviations[name]).all())
    assert dict(add_noise({}, deviations.__getitem__, 0, Stream())) == {}


def test_keys_are_not_copied_and_not_stored() -> None:
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="not copied and not stored"):
            copied(Stream())
    assert not any(character in repr(Stream(bytes(32))) for character in ("\\x00", "0000"))
    with pytest.raises(ValueError, match="A key has 32 bytes, but this one has 3"):
        Stream(b"abc")


def test_estimates_take_either_kind() -> None:
    cpu = torch.device("cpu")
    torch_s = normal(torch.Generator().manual_seed(1), (5,), cpu, torch.float32)
    assert torch.equal(torch_s, torch.randn(5, generator=torch.Generator().manual_seed(1)))
    ours = normal(Stream.from_seeds(1), (5,), cpu, torch.float64)
    assert torch.equal(ours, Stream.from_seeds(1).normal((5,), dtype=torch.float64))
    assert normal(None, (2, 3), cpu, torch.float32).shape == (2, 3)
    drawn = signs(torch.Generator().manual_seed(1), (999,), cpu, torch.float64)
    assert drawn.dtype == torch.float64
    assert drawn.abs().unique().tolist() == [1.0]
    assert abs(float(drawn.sum())) < 4 * 999**0.5
    ours = signs(Stream.from_seeds(1), (5,), cpu, torch.float32)
    assert torch.equal(ours, Stream.from_seeds(1).signs((5,)))
    assert signs(None, (2, 3), cpu, torch.float32).shape == (2, 3)


def test_what_is_no_seed_is_refused() -> None:
    for wrong in (1.5, "1"):
        with pytest.raises(TypeError, match="integer"):
            Stream.from_seeds(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"A key is bytes, not 5. From seeds: Stream.from_seeds"):
        Stream(5)  # type: ignore[arg-type]
    assert Stream.from_seeds(np.int64(3)).bytes(8) == Stream.from_seeds(3).bytes(8)
