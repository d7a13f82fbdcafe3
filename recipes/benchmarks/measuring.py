"""What the benchmarks share. Nothing to run by itself.

Machines are noisy, so each figure is a ratio: what is measured and its unit take turns, and the
median of the ratios over the rounds stands with their range. Every benchmark is run as `python -m
recipes NAME --model MODEL --output OUTPUT`, measures anew, and writes OUTPUT.json and
OUTPUT.md; `--quick` takes seconds, and its figures mean nothing; `--tables` measures nothing.
"""

import importlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import get_context, spawn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from hf_gradguard import GradientMap
from hf_gradguard.defenses import Defense
from hf_gradguard.models import check_name
from hf_gradguard.randomness import Stream
from recipes.studies.lib.device import DEVICE
from recipes.studies.lib.results import named
from recipes.studies.lib.tables import write_table
from recipes.study import command_line

RATIO = ("median", "range")  # what `cells` holds


def run(name: str, argv: Sequence[str]) -> None:
    """A benchmark: its `measure` makes a report of the arguments, its `table` a header and rows of
    the report, its `plot`, if it has one, a picture. Its `ARGUMENTS` are further ones, as keywords
    of `add_argument`.
    """
    module = importlib.import_module(f"recipes.benchmarks.{name}")
    parser = command_line(module.__doc__)
    arguments = getattr(module, "ARGUMENTS", {})
    for flag, keywords in ({"model": {"help": "a text encoder"}} | arguments).items():
        parser.add_argument(f"--{flag}", **keywords)
    args = parser.parse_args(argv)
    path = named(args.output, ".json")
    if not args.tables:
        if args.model is None:
            parser.error("give --model, a text encoder")
        check_name(args.model)
        path.parent.mkdir(parents=True, exist_ok=True)
        report = module.measure(args) | {"torch": torch.__version__}
        text = json.dumps(report, indent=1, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")
    report = json.loads(path.read_text(encoding="utf-8"))
    write_table(args.output, *module.table(report))
    if hasattr(module, "plot"):
        module.plot(report, named(args.output, ".png"))


def classifier(name: str) -> PreTrainedModel:
    """A text classifier in training mode. Embeddings are withheld by every defense, so left out of
    plain gradients too.
    """
    torch.manual_seed(0)
    model = (
        AutoModelForSequenceClassification.from_pretrained(
            name, num_labels=2, trust_remote_code=False
        )
        .to(DEVICE)
        .train()
    )
    model.get_input_embeddings().requires_grad_(False)
    return model


def random_batch(model: PreTrainedModel, size: int, length: int) -> dict[str, torch.Tensor]:
    words = model.config.vocab_size
    return {
        "input_ids": torch.randint(words // 2, words, (size, length), device=DEVICE),
        "attention_mask": torch.ones(size, length, dtype=torch.long, device=DEVICE),
        "labels": torch.randint(0, 2, (size,), device=DEVICE),
    }


def plain_gradient(model: nn.Module, batch: dict, **settings: bool) -> Callable[[], object]:
    """The unit of most figures."""
    return lambda: GradientMap(model, batch, second_order=False, **settings).gradient()


def share(defense: Defense, gmap: GradientMap, stream: Stream | None = None) -> None:
    """Leaves what a defense shares as gradients."""
    for name, tensor in defense(gmap, stream).items():
        gmap.parameters[name].grad = tensor


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def row_title(name: str, settings: dict) -> str:
    return name + "".join(f", {key}={value}" for key, value in settings.items())


def alternate(
    case: Callable[[], object], unit: Callable[[], object], rounds: int, factor: float = 1
) -> dict:
    """`factor` times `case` over `unit`, round by round, each against units run just before and
    just after it.
    """
    case(), unit()
    ratios = []
    for _ in range(rounds):
        unit_before, taken, unit_after = clock(unit, 3), clock(case), clock(unit, 3)
        ratios.append(factor * taken / ((unit_before + unit_after) / 2))
    return spread(ratios)


def spread(values: Sequence[float], digits: int = 2) -> dict[str, float]:
    summary = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, digits) for name, value in summary.items()}


def clock(function: Callable[[], object], times: int = 1) -> float:
    """Seconds, as `now` counts them."""
    start = seconds_now()
    for _ in range(times):
        function()
    return (seconds_now() - start) / times


def seconds_now() -> float:
    """Seconds. On one thread of a CPU those that the process had of it, whoever else used the
    machine.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    alone = DEVICE == "cpu" and torch.get_num_threads() == 1
    return time.process_time() if alone else time.perf_counter()


def peak(function: Callable[[], object]) -> int:
    """Bytes that `function` holds at its peak, beyond what was there before. On a CPU, the
    profiler's record added up.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - start
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        function()
    level = highest = 0
    for event in trace.profiler.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            highest = max(highest, level)
    return highest


def on_ranks(count: int, work: Callable[..., Any], *args: Any) -> Any:
    """What rank 0 makes of `work(rank, *args)`, a function of a module, which so many processes of
    this machine run, one thread each. Raises what a rank raises.
    """
    queue = get_context("spawn").SimpleQueue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    spawn(_run_rank, (count, store.port, work, args, queue), count)
    return queue.get()


def _run_rank(
    rank: int, count: int, port: int, work: Callable[..., Any], args: tuple, queue: Any
) -> None:
    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    result = work(rank, *args)
    if not rank:
        queue.put(result)
    dist.destroy_process_group()


def cells(ratio: dict[str, float], digits: int = 2) -> list[str]:
    median, least, largest = (f"{ratio[name]:.{digits}f}" for name in ("median", "min", "max"))
    return [median, f"{least} to {largest}"]
