"""Exact noise is the same whatever makes it: torch's operations, its libraries' functions where
they are near enough, or compiled loops; on one thread or several; on processors of other kinds.

Digests are those of the specification, so a machine that draws other numbers fails here.
"""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

from hf_gradguard import randomness
from hf_gradguard.randomness import (
    ROOT_HALF,
    Distribution,
    Stream,
    exact_normal,
    minus_twice_log,
    quarter_sine,
)

needs_numba = pytest.mark.skipif(
    find_spec("numba") is None, reason="compiled loops need the extra fast: Numba"
)
KEY = bytes(range(32))
WAYS = {
    "nearly": (),
    "exactly": (),
    "compiled": needs_numba,
    "compiled, two threads": needs_numba,
    "nearly, two threads": (),
}
DIGESTS: dict[str, dict[int, str]] = {
    "gaussian": {100_001: "016f10d9119ed9ee", 10_000_000: "e62988eff326f16a"},
    "laplace": {100_001: "c908909e89e0d851", 10_000_000: "7a3f07f43e431680"},
    "each its own": {100_001: "cbbf8a1900a14049", 10_000_000: "a37f88b4c04e6bff"},
    "from tiny to large": {100_001: "d54bf2abc7443ea9", 10_000_000: "d019b8c8dd694bdd"},
    "float64": {100_001: "c6196d7e28dce310", 10_000_000: "93b5d5317a6e3403"},
    "normal": {100_001: "3e5685f8fcf0cedd", 10_000_000: "9a9b19a02285872a"},
}


@contextmanager
def drawn_by(way: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let noise be made in one of the ways that there are."""
    threads = torch.get_num_threads()
    with monkeypatch.context() as patch:
        is_compiled = way.startswith("compiled")
        patch.setattr(randomness, "_WORTH_COMPILING", 0 if is_compiled else math.inf)
        if way == "exactly":
            patch.setattr(randomness._Sums, "_near_adder", randomness._Sums._exact_adder)
        torch.set_num_threads(2 if way.endswith("two threads") else 1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def drawn_kinds(count: int) -> dict[str, Callable[[Stream], Tensor]]:
    """Draws of every kind that exact noise has."""
    source = Stream(bytes(32))
    values = source.uniform((count,)) * 4 - 2
    alike, each = torch.tensor(1.3), source.uniform((count,)) * 3 + 0.1
    wide = each * (1 << source.integers(18, (count,))) * 2.0**-9
    return {
        "gaussian": lambda stream: stream.noisy(values, alike, count),
        "laplace": lambda stream: stream.noisy(values, alike, count, "laplace"),
        "each its own": lambda stream: stream.noisy(values, each, count),
        "from tiny to large": lambda stream: stream.noisy(values, wide, count),
        "float64": lambda stream: stream.noisy(values.double(), each.double(), count),
        "normal": lambda stream: stream.normal((count,), dtype=torch.float64),
    }


def digest(numbers: Tensor) -> str:
    return hashlib.sha256(numbers.numpy().tobytes()).hexdigest()[:16]


@pytest.mark.parametrize(
    "count",
    [
        100_001,
        pytest.param(10_000_000, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("way", [pytest.param(way, marks=marks) for way, marks in WAYS.items()])
def test_every_way_draws_what_is_specified(
    way: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with drawn_by(way, monkeypatch):
        found = {kind: digest(draw(Stream(KEY))) for kind, draw in drawn_kinds(count).items()}
    assert found == {kind: DIGESTS[kind][count] for kind in found}


@pytest.mark.long
def test_numbers_do_not_hang_on_instruction_sets() -> None:
    """A process without vector instructions draws the same, by torch's libraries' functions."""
    program = (
        "import math, torch; from test_randomness_kernel import *; "
        "randomness._WORTH_COMPILING = math.inf; kinds = drawn_kinds(100_001); "
        "print(*(digest(kinds[kind](Stream(KEY))) for kind in ('gaussian', 'laplace', 'normal')))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True,
        env={**os.environ, "ATEN_CPU_CAPABILITY": "default", "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    kinds = ("gaussian", "laplace", "normal")
    assert run.stdout.split() == [DIGESTS[kind][100_001] for kind in kinds]


@pytest.mark.parametrize("way", [pytest.param(way, marks=marks) for way, marks in WAYS.items()])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 2**16 - 1, 2**16 + 1])
def test_sizes_strides_and_what_is_not_finite(
    way: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Odd sizes end within a pair; broken values and deviations show in the same places."""
    values = Stream(bytes(32)).uniform((2 * size,))[::2]
    deviations = values + 0.5
    if size > 2:
        values[0], values[1], deviations[2] = math.nan, math.inf, 0.0

    def drawn() -> list[Tensor]:
        stream = Stream(KEY)
        stds = (torch.tensor(0.7), deviations, deviations.bfloat16())
        return [
            stream.noisy(v, std, 10**7, noise)
            for noise in ("gaussian", "laplace")
            for std in stds
            for v in (values, values.double(), values.bfloat16())
        ]

    with drawn_by("exactly", monkeypatch):
        expected = drawn()
    with drawn_by(way, monkeypatch):
        found = drawn()
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


@pytest.mark.parametrize("size", [1e-290, 1e-30, 1e30, 1e290])
def test_noise_of_any_size_is_there(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is squared on the way."""
    values = Stream(bytes(32)).uniform((500,), dtype=torch.float64) * size
    stds = torch.tensor(size, dtype=torch.float64), values + size
    draws = [lambda s=s: Stream(KEY).noisy(values, s, 500) for s in stds]
    with drawn_by("exactly", monkeypatch):
        expected = [draw() for draw in draws]
    with drawn_by("nearly", monkeypatch):
        for draw, one in zip(draws, expected, strict=True):
            assert torch.equal(draw(), one)
            assert 0.5 < float((one - values).abs().mean() / size) < 2


EDGES = [0, 1, -1, 2**62, -(2**62), 2**63 - 1, -(2**63), 2**61, 3 * 2**61, 2**52 + 1]
"""Words of the largest and the smallest radius, and of angles at which a sine turns."""


def words(count: int) -> Tensor:
    """Words for pairs of numbers, with all pairs of `EDGES` among the first."""
    edges = torch.cartesian_prod(torch.tensor(EDGES), torch.tensor(EDGES))
    drawn = torch.cat([part.clone() for part in Stream(KEY).words(4 * count)]).view(torch.int64)
    radii, angles = drawn.chunk(2)
    return torch.cat([edges[:, 0], radii, edges[:, 1], angles])


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_libraries_functions_are_as_near_as_is_counted_on(noise: Distribution) -> None:
    drawn, scale = words(300_000), 2.0**26
    exact, nearly = (
        torch.stack(numbers)
        for numbers in (randomness._EXACT[noise](drawn), randomness._NEARLY[noise](drawn, scale))
    )
    distance = float((exact - nearly / scale).abs().max())
    assert 0 < distance < randomness._NEARNESS / 2


def test_polynomials_are_logarithms_and_sines() -> None:
    """To 3 units of the last bit, by 50 digits; sums cancel at a mantissa of 1, of exponent 0."""
    source = Stream.from_seeds(1)
    with mpmath.workdps(50):
        for mantissa in (
            math.sqrt(0.5) + source.uniform((300,), dtype=torch.float64) * 0.7
        ).tolist():
            for exponent in (0.0, -1.0, -63.0):
                expected = -2 * mpmath.log(mpmath.ldexp(mantissa, int(exponent)))
                error = abs(minus_twice_log(exponent, mantissa) - expected)
                assert error < 3 * 2.0**-53 * abs(expected) + 2.0**-54
        for turns in (source.uniform((300,), dtype=torch.float64) * 2 - 1).tolist():
            expected = mpmath.sin(mpmath.pi * turns / 2)
            assert abs(quarter_sine(turns) - expected) < 3 * 2.0**-53 * abs(expected)


def test_tensors_and_floats_go_through_the_same_operations() -> None:
    """As Python rounds them, which is IEEE 754's way: one pair at a time."""
    drawn = words(200)
    expected = torch.stack(exact_normal(drawn)).T.tolist()
    for radius, angle, pair in zip(*drawn.chunk(2), expected, strict=True):
        size = abs(float(radius)) * 2.0**-63 + 2.0**-64
        mantissa, exponent = math.frexp(size)
        if mantissa < np.array(ROOT_HALF).view(np.float64):
            mantissa, exponent = 2 * mantissa, exponent - 1
        length = math.sqrt(minus_twice_log(float(exponent), mantissa))
        turns = float(angle) * 2.0**-62
        aside = 1.0 - abs(turns)
        sine = quarter_sine(math.copysign(1.0 - abs(aside), turns))
        assert pair == [quarter_sine(aside) * length, sine * length]


def test_numbers_that_are_unclear_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a library's last bits are. The control errs by more than is counted on."""
    draw = drawn_kinds(100_001)["gaussian"]
    nearly = randomness._NEARLY["gaussian"]

    def off_by(error: float) -> Tensor:
        def other(drawn: Tensor, scale: float) -> tuple[Tensor, ...]:
            return tuple(numbers.add_(error * scale) for numbers in nearly(drawn, scale))

        monkeypatch.setitem(randomness._NEARLY, "gaussian", other)
        return draw(Stream(KEY))

    with drawn_by("nearly", monkeypatch):
        expected = draw(Stream(KEY))
        monkeypatch.setattr(randomness, "_NEARNESS", 2.0**-30)
        assert torch.equal(off_by(2.0**-31), expected)
        assert not torch.equal(off_by(2.0**-29), expected)


# Compiled loops


@needs_numba
def test_loops_read_and_write_no_compiled_code_on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    with drawn_by("compiled", monkeypatch):
        loops = randomness._loops("gaussian", 1, torch.device("cpu"))
    assert loops is not None
    for loop in loops.fill.values():
        assert type(loop._cache).__name__ == "NullCache"  # type: ignore[attr-defined]
        assert not loop.targetoptions.get("fastmath")  # type: ignore[attr-defined]


@needs_numba
@pytest.mark.parametrize("broken", [False, True])
def test_loops_that_round_otherwise_are_not_used(
    broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What draws then is torch, with a warning."""
    from hf_gradguard import randomness_kernel

    def compiled_kernel(log: Callable, sine: Callable, root: int) -> randomness_kernel.Kernel:
        if broken:
            raise ImportError("Numba needs NumPy 1.0 or less")
        return genuine(log, _nearly_sine, root)

    genuine = randomness_kernel.compiled_kernel
    monkeypatch.setattr(randomness_kernel, "compiled_kernel", compiled_kernel)
    monkeypatch.setattr(randomness, "_compiled_loops", randomness._compiled_loops.__wrapped__)
    with drawn_by("compiled", monkeypatch), pytest.warns(UserWarning, match="a third of the speed"):
        found = drawn_kinds(100_001)["gaussian"](Stream(KEY))
    assert digest(found) == DIGESTS["gaussian"][100_001]


def _nearly_sine(turns: float) -> float:
    return 1.5 * turns


def _draw_in_a_fork(queue: multiprocessing.Queue, stream: Stream, fixed: Stream) -> None:
    queue.put(
        [s.noisy(torch.zeros(1_000), torch.tensor(1.0), 1_000).tolist() for s in (stream, fixed)]
    )


@needs_numba
def test_forks_of_a_process_that_compiled_draw_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds stay seeds."""
    with drawn_by("compiled", monkeypatch):
        stream, fixed = Stream(), Stream.from_seeds(8)
        stream.noisy(torch.zeros(9), torch.tensor(1.0), 9)  # compiled before the fork
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        worker = context.Process(target=_draw_in_a_fork, args=(queue, stream, fixed))
        worker.start()
        private, seeded = queue.get(timeout=60)
        worker.join()
        ones = torch.zeros(1_000), torch.tensor(1.0), 1_000
        assert private != stream.noisy(*ones).tolist()
        assert seeded == fixed.noisy(*ones).tolist()


@pytest.mark.long
def test_small_draws_compile_nothing() -> None:
    """Neither does an import: what is drawn decides, once for each process."""
    program = (
        "import sys, torch; from hf_gradguard.randomness import Stream; "
        "Stream().noisy(torch.zeros(100), torch.tensor(1.0), 100); print('numba' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["False"]
