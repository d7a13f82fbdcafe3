"""What secure aggregation costs: seconds and bytes of an exchange of all of a model's gradients, in
those of the plain one, on ranks of this machine.

Plain and secure exchanges take turns on the same ranks. Bytes are those that a rank hands to
collectives. Ranks share this machine's processors, so what each computes by itself (masks, fixed
point) is also timed on one alone, in one thread's processor seconds: on machines of their own that
is all that is added.
"""

import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from accelerate import Accelerator

from hf_gradguard.secure.aggregation import FixedPoint, SecureAggregation
from hf_gradguard.training.exchange.gradients import average

from .measuring import cells, classifier, on_ranks, spread

RANKS, ROUNDS = (3, 4), 5


def measure(args) -> dict:
    torch.set_num_threads(1)
    sizes = [parameter.numel() for parameter in classifier(args.model).parameters()]
    rounds = 1 if args.quick else ROUNDS
    ranks = RANKS[:1] if args.quick else RANKS
    return {
        "entries": sum(sizes),
        "ranks": {count: on_ranks(count, _exchanges, sizes, rounds) for count in ranks},
        "alone": _alone(sum(sizes), rounds),
    }


def _exchanges(_rank: int, sizes: list[int], rounds: int) -> dict:
    accelerator = Accelerator(cpu=True)
    secure = SecureAggregation(accelerator)
    start = time.perf_counter()
    secure.agree()
    agreement = time.perf_counter() - start
    sent, reduce = [0], accelerator.reduce

    def counted(tensor: torch.Tensor, **how) -> torch.Tensor:
        sent[0] += tensor.numel() * tensor.element_size()
        return reduce(tensor, **how)

    accelerator.reduce = counted
    gradients = [1e-3 * torch.randn(size) for size in sizes]
    seconds_by_kind: dict[str, list[float]] = {"plain": [], "secure": []}
    bytes_sent = {}
    for number in range(rounds + 1):
        for name, how in (("plain", None), ("secure", secure)):
            torch.distributed.barrier()
            sent[0], start = 0, time.perf_counter()
            average(gradients, accelerator, how, bits=32)
            if number:  # the first round warms up
                seconds_by_kind[name].append(time.perf_counter() - start)
            bytes_sent[name] = sent[0]
    pairs = zip(seconds_by_kind["secure"], seconds_by_kind["plain"], strict=True)
    return {
        "seconds": {name: spread(values) for name, values in seconds_by_kind.items()},
        "bytes": bytes_sent,
        "ratio": spread([secure / plain for secure, plain in pairs]),
        "agreement": round(agreement, 3),
    }


def _alone(entries: int, rounds: int) -> dict:
    """Processor seconds that a rank computes by itself, for one peer."""
    secure = SecureAggregation(SimpleNamespace(process_index=0, num_processes=3))
    secure._keys = {1: bytes(32)}
    words, point = torch.zeros(entries, dtype=torch.int32), FixedPoint(16.0, 3, 32)
    chunks = (1e-3 * torch.randn(entries)).split(2**23)

    def fixed_point() -> None:
        point.largest(chunks)
        for chunk in chunks:
            point.mean(point.encode(chunk))

    cases = {"masks": lambda: secure.masks("").hide(words), "fixed point": fixed_point}
    seconds = {}
    for name, case in cases.items():
        case()
        seconds[name] = spread([_busy(case) for _ in range(rounds)], digits=3)
    return seconds


def _busy(case: Callable[[], object]) -> float:
    """Seconds of the processor, whoever else wants it."""
    start = time.process_time()
    case()
    return time.process_time() - start


def table(report: dict) -> tuple[list[str], list]:
    rows = []
    for count, report_of_ranks in report["ranks"].items():
        rows.append([f"**{count} ranks**", "", ""])
        rows += [
            [f"{name}, s", *cells(report_of_ranks["seconds"][name], 2)]
            for name in report_of_ranks["seconds"]
        ]
        rows.append(["secure in plain", *cells(report_of_ranks["ratio"], 1)])
        rows += [
            [f"{name}, bytes", f"{count:,}", ""] for name, count in report_of_ranks["bytes"].items()
        ]
        rows.append(["agreement on keys, once, s", f"{report_of_ranks['agreement']:.3f}", ""])
    rows.append(["**a rank alone**", "", ""])
    rows.append(["masks for each peer, s", *cells(report["alone"]["masks"], 3)])
    rows.append(["fixed point there and back, s", *cells(report["alone"]["fixed point"], 3)])
    return [f"{report['entries']:,} entries", "median", "range"], rows
