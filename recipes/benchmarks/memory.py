"""The memory that `squared_sensitivity` takes beyond the graph it starts from, in gradients, by
probe chunk.

    python -m recipes.benchmarks.memory --model MODEL --output docs/results/memory
"""

import torch

from hf_gradguard import GradientMap

from .measuring import classifier, main, peak, random_batch

BATCH, LENGTH, PROBES, CHUNKS = 16, 16, 10, [1, 2, 5, 10]


def measure(args) -> dict:
    model = classifier(args.model)
    batch = random_batch(model, 2 if args.quick else BATCH, LENGTH)
    gradient = sum(
        p.numel() * p.element_size() for p in GradientMap(model, batch).parameters.values()
    )
    peaks = {}
    for chunk in CHUNKS:
        gmap = GradientMap(model, batch)
        gmap.jvp(torch.ones_like(gmap.input))  # the graph of ∇_x L; the rest is the probes' own
        used = peak(
            lambda gmap=gmap, chunk=chunk: gmap.squared_sensitivity(PROBES, probe_chunk=chunk)
        )
        peaks[chunk] = round(used / gradient, 2)
    return {
        "batch": list(batch["input_ids"].shape),
        "probes": PROBES,
        "gradient_bytes": gradient,
        "gradients": peaks,
    }


def table(report: dict) -> tuple[list[str], list]:
    header = ["`probe_chunk`", f"peak, in gradients of {report['gradient_bytes'] / 2**20:.3g} MiB"]
    return header, [(chunk, f"{peak:.2f}") for chunk, peak in report["gradients"].items()]


if __name__ == "__main__":
    main(__doc__, measure, table)
