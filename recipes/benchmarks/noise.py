"""What a number of exact noise costs, in nanoseconds of one thread: by compiled loops and by
torch's operations, which draw the same, beside torch.randn, which anybody can compute backward, and
beside what other libraries draw that nobody can predict.

Numbers are as many as the model has without its words' table, in tensors of 2²⁰ or less, and are
added to a message's values on its grid; libraries' numbers are drawn alone. All take turns. The
loops are compiled before, once, and timed.

randomgen and OpenDP are no dependencies: `pip install --no-deps randomgen opendp deprecated wrapt`
into an environment of your own; `--without_others` leaves their rows out.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from unittest.mock import patch

import torch

from hf_gradguard import randomness
from hf_gradguard.randomness import Stream

from .measuring import classifier, clock

ARGUMENTS: dict[str, dict] = {
    "without_others": {"action": "store_true", "help": "leave other libraries' rows out"}
}
ROUNDS, CHUNK, OF_INTEGERS = 9, 2**20, 1000  # OpenDP's numbers take microseconds
COMPILED, BY_TORCH = "exact Gaussian noise, compiled", "exact Gaussian noise, by torch"
Draw = tuple[int, Callable[[], object]]  # how many numbers


def measure(args) -> dict:
    if find_spec("numba") is None:
        sys.exit("Compiled loops need the extra fast: pip install 'hf-gradguard[fast]'.")
    if not args.without_others and not (find_spec("randomgen") and find_spec("opendp")):
        sys.exit("randomgen and OpenDP are not installed: see --help, or give --without_others.")
    torch.set_num_threads(1)
    model = classifier(args.model)
    numbers = 1000 if args.quick else sum(p.numel() for p in model.parameters() if p.requires_grad)
    begin = time.perf_counter()
    with compiled(True):
        Stream().noisy(torch.zeros(9), torch.tensor(1.0), 9)
    compiling = time.perf_counter() - begin
    draws = ours(numbers) | ({} if args.without_others else others(numbers, args.quick))
    found: dict[str, list[float]] = {name: [] for name in draws}
    for turn in range(1 + (1 if args.quick else ROUNDS)):
        for name, (count, draw) in draws.items():
            nanoseconds = clock(draw, 1) / count * 1e9
            if turn:  # the first warms up
                found[name].append(nanoseconds)
    return {
        "threads": 1,
        "numbers": numbers,
        "seconds to compile": round(compiling, 1),
        "nanoseconds": {
            name: {
                "median": round(statistics.median(times), 1),
                "min": round(min(times), 1),
                "max": round(max(times), 1),
                "in torch.randn": round(
                    statistics.median(
                        one / unit for one, unit in zip(times, found["torch.randn"], strict=True)
                    ),
                    2,
                ),
            }
            for name, times in found.items()
        },
    }


def ours(numbers: int) -> dict[str, Draw]:
    stream, sizes = Stream(), [CHUNK] * (numbers // CHUNK) + [numbers % CHUNK]
    parts, alike = [torch.randn(size) for size in sizes if size], torch.tensor(1.3).double()
    each = [part.abs() + 0.5 for part in parts]

    def noisy(is_compiled: bool, noise: str = "gaussian", is_each: bool = False) -> Draw:
        def draw() -> None:
            with compiled(is_compiled):
                for part, std in zip(parts, each, strict=True):
                    stream.noisy(part, std if is_each else alike, numbers, noise)

        return numbers, draw

    return {
        COMPILED: noisy(True),
        "the same, each entry its deviation": noisy(True, is_each=True),
        "exact Laplace noise, compiled": noisy(True, "laplace"),
        BY_TORCH: noisy(False),
        "the same by torch, each entry its deviation": noisy(False, is_each=True),
        "exact Laplace noise, by torch": noisy(False, "laplace"),
        "torch.randn": (numbers, lambda: [torch.randn(len(part)) for part in parts]),
    }


def others(numbers: int, is_quick: bool) -> dict[str, Draw]:
    import opendp.prelude as dp
    from numpy.random import Generator
    from randomgen import ChaCha

    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T="i64")), dp.l2_distance(T="f64")
    discrete_gaussian, zeros = space >> dp.m.then_gaussian(scale=2.0**26), [0] * OF_INTEGERS
    generator, count = Generator(ChaCha(rounds=20)), min(numbers, CHUNK)
    return {
        "randomgen's ChaCha20, standard_normal": (
            count,
            lambda: generator.standard_normal(count),
        ),
        "OpenDP's discrete Gaussian": (OF_INTEGERS, lambda: discrete_gaussian(zeros)),
    }


def compiled(is_compiled: bool):
    """Noise is made by compiled loops, or by torch."""
    return patch.object(randomness, "_WORTH_COMPILING", 0 if is_compiled else math.inf)


def table(report: dict) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            name,
            f"{found['median']:.1f}",
            f"{found['min']:.1f} to {found['max']:.1f}",
            f"{found['in torch.randn']:.2f}",
        ]
        for name, found in report["nanoseconds"].items()
    ]
    compiling = f"{report['seconds to compile']:.1f} s"
    return ["", "nanoseconds a number, median", "range", "in torch.randn"], [
        *rows,
        ["compiling, once for each process", compiling, "", ""],
    ]
