"""The memory that `squared_sensitivity` takes, in gradients, by method.

python -m recipes.benchmarks.memory --model MODEL --output docs/results/memory
"""

from hf_gradguard import GradientMap

from .measuring import classifier, main, peak, random_batch

BATCH, LENGTH, PROBES = 16, 16, 2
WAYS = {
    "differences, split by sample": {},
    "differences": {"split": False},
    "exact": {"method": "exact"},
}


def measure(args) -> dict:
    model = classifier(args.model)
    batch = random_batch(model, 2 if args.quick else BATCH, LENGTH)
    gradient = sum(
        p.numel() * p.element_size() for p in GradientMap(model, batch).parameters.values()
    )
    peaks = {}
    for way, settings in WAYS.items():
        gmap = GradientMap(model, batch, second_order=way == "exact")
        gmap.squared_sensitivity(1, **settings)  # trials, and graphs, come first
        used = peak(
            lambda gmap=gmap, settings=settings: gmap.squared_sensitivity(PROBES, **settings)
        )
        peaks[way] = round(used / gradient, 2)
    return {
        "batch": list(batch["input_ids"].shape),
        "probes": PROBES,
        "gradient_bytes": gradient,
        "gradients": peaks,
    }


def table(report: dict) -> tuple[list[str], list]:
    # Figures of an earlier version are by `probe_chunk`, its probes at once.
    first = "`probe_chunk`" if "1" in report["gradients"] else "`squared_sensitivity`"
    header = [first, f"peak, in gradients of {report['gradient_bytes'] / 2**20:.3g} MiB"]
    return header, [(way, f"{peak:.2f}") for way, peak in report["gradients"].items()]


if __name__ == "__main__":
    main(__doc__, measure, table)
