"""What refining a batch costs, in plain gradients of the same batch, and the memory it takes.

    python recipes/benchmarks/refiner.py --model MODEL --evaluation_network NETWORK

The floor: an iteration takes seven matrix products a weight (forward, two backward, and four back through both), where a
plain gradient takes three, so ι iterations cost 7ι/3 plain gradients; the true gradient and that of the robust data are
two more, and every iteration passes through the evaluation network and back.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForSequenceClassification
from transformers.utils import logging

from hf_gradguard import GradientMap, make_defense


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--evaluation_network", required=True)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", help="JSON file to write")
    args = parser.parse_args()
    torch.manual_seed(0)
    logging.set_verbosity_error()

    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2).to(args.device).train()
    model.get_input_embeddings().requires_grad_(
        False
    )  # withheld by every defence, so left out of the plain gradient too
    size = (args.batch_size, args.length)
    batch = {
        "input_ids": torch.randint(1000, model.config.vocab_size, size, device=args.device),
        "attention_mask": torch.ones(size, dtype=torch.long, device=args.device),
        "labels": torch.randint(0, 2, (args.batch_size,), device=args.device),
    }
    generator = torch.Generator(device=args.device).manual_seed(0)

    def plain() -> None:
        GradientMap(model, batch, second_order=False).gradient()

    def refined(**settings: int) -> Callable[[], object]:
        defense = make_defense("refiner", evaluation_network=args.evaluation_network, **settings)
        return lambda: defense(GradientMap(model, batch), generator)

    results = {}
    for label, case in (
        ("refiner, 10 iterations", refined(iterations=10)),
        ("refiner, 5 iterations", refined(iterations=5)),
        ("refiner, warm-started, 10 halved to 5 iterations", refined(iterations=10, warm_start=args.batch_size)),
    ):
        case(), plain()  # the first visit of the warm start is not timed
        ratios = []
        for _ in range(args.rounds):
            before, own, after = clock(plain, 3), clock(case, 1), clock(plain, 3)
            ratios.append(own / ((before + after) / 2))
        results[label] = [round(f(ratios), 2) for f in (statistics.median, min, max)]
        print(f"{label:50} {results[label][0]:7.2f}  ({results[label][1]} to {results[label][2]})")
    gradient = sum(p.numel() * p.element_size() for p in GradientMap(model, batch).parameters.values())
    memory = {"plain": peak(plain) / gradient, "refiner": peak(refined(iterations=2)) / gradient}
    print("peak memory in gradients:", {name: round(value, 2) for name, value in memory.items()})
    if args.output:
        report = {"batch": size, "gradient_bytes": gradient, "torch": torch.__version__, "device": args.device}
        report |= {"median, least, most plain gradients": results, "peak memory in gradients": memory}
        Path(args.output).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def clock(function: Callable[[], object], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


def peak(function: Callable[[], object]) -> int:
    """Bytes that `function` holds at its peak, beyond what was there before."""
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


if __name__ == "__main__":
    main()
