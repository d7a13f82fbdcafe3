"""The memory that `squared_sensitivity` takes beyond the graph it starts from, in gradients, by probe chunk.

    python recipes/benchmarks/memory.py --model PATH_OR_NAME --batch_size 16 --length 16

On a CPU the profiler's record of allocations is added up; on a GPU PyTorch keeps the peak itself.
"""

import argparse
import json
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForSequenceClassification

from hf_gradguard import GradientMap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--num_probes", type=int, default=10)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 5, 10])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", help="JSON file to write")
    args = parser.parse_args()
    torch.manual_seed(0)

    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2).to(args.device).train()
    size = (args.batch_size, args.length)
    batch = {
        "input_ids": torch.randint(1000, model.config.vocab_size, size, device=args.device),
        "attention_mask": torch.ones(size, dtype=torch.long, device=args.device),
        "labels": torch.randint(0, 2, (args.batch_size,), device=args.device),
    }
    gradient = sum(p.numel() * p.element_size() for p in GradientMap(model, batch).parameters.values())
    peaks = {}
    for chunk in args.chunks:
        gmap = GradientMap(model, batch)
        gmap.jvp(torch.ones_like(gmap.input))  # the graph of ∇_x L stands; what follows is the probes' own
        peaks[chunk] = round(peak_bytes(gmap, args.num_probes, chunk) / gradient, 2)
        print(f"probe_chunk={chunk}: {peaks[chunk]} gradients of {gradient / 2**20:.0f} MiB")
    if args.output:
        del args.model
        report = {"arguments": vars(args), "gradient_bytes": gradient, "torch": torch.__version__, "gradients": peaks}
        Path(args.output).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def peak_bytes(gmap: GradientMap, num_probes: int, chunk: int) -> int:
    if gmap.input.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        gmap.squared_sensitivity(num_probes, probe_chunk=chunk)
        return torch.cuda.max_memory_allocated() - start
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        gmap.squared_sensitivity(num_probes, probe_chunk=chunk)
    level = peak = 0
    for event in trace.profiler.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    return peak


if __name__ == "__main__":
    main()
