"""The memory that `squared_sensitivity` takes beyond the graph it starts from, in gradients, by
probe chunk.

python recipes/benchmarks/memory.py --model MODEL --output docs/results/memory
"""

import torch
from measuring import classifier, parser_with_model, peak, random_batch, write

from hf_gradguard import GradientMap

BATCH, LENGTH, PROBES, CHUNKS = 16, 16, 10, [1, 2, 5, 10]


def main() -> None:
    args = parser_with_model(__doc__).parse_args()
    model = classifier(args.model)
    batch = random_batch(model, 2 if args.quick else BATCH, LENGTH)
    gradient = sum(
        p.numel() * p.element_size() for p in GradientMap(model, batch).parameters.values()
    )
    peaks = {}
    for chunk in CHUNKS:
        gmap = GradientMap(model, batch)
        gmap.jvp(
            torch.ones_like(gmap.input)
        )  # the graph of ∇_x L stands; what follows is the probes' own
        used = peak(
            lambda gmap=gmap, chunk=chunk: gmap.squared_sensitivity(PROBES, probe_chunk=chunk)
        )
        peaks[chunk] = round(used / gradient, 2)
    report = {
        "batch": list(batch["input_ids"].shape),
        "probes": PROBES,
        "gradient_bytes": gradient,
        "gradients": peaks,
    }
    write(args.output, report, *table(report))


def table(report: dict) -> tuple[list[str], list]:
    header = ["`probe_chunk`", f"peak, in gradients of {report['gradient_bytes'] / 2**20:.3g} MiB"]
    return header, [(chunk, f"{peak:.2f}") for chunk, peak in report["gradients"].items()]


if __name__ == "__main__":
    main()
