"""What leakage estimates cost, each against its alternative in the same run.

    python recipes/benchmarks/leakage.py --model PATH_OR_NAME --output docs/results/leakage_speed.json

Three ratios, from rounds in which both sides take turns; the median is reported with the range.

1. λ_max(J Jᵀ) by Lanczos in input space, against the same eigenvalue of JᵀJ in parameter space by
   `scipy.sparse.linalg.eigsh`, whose workspace holds 20 vectors of all parameters (relative tolerance 1e-4 for both).
2. I_lb of one sentence, against 1,500 steps of TAG. A few steps are timed, setting up included, and scaled up.
3. dFIL of every sample of a batch, in plain gradients of that batch.
"""

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from transformers import AutoModelForSequenceClassification
from transformers.utils import logging

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.leakage import dfil, inversion_influence_lower_bound, largest_eigenvalue

TOLERANCE, ATTACK_STEPS = 1e-4, 1500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--batch_size", type=int, default=16, help="of dFIL; the other two take one sentence")
    parser.add_argument("--num_probes", type=int, default=10)
    parser.add_argument("--timed_attack_steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", help="JSON file to write")
    args = parser.parse_args()
    torch.manual_seed(0)
    logging.set_verbosity_error()

    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2).to(args.device).eval()
    model.get_input_embeddings().requires_grad_(False)  # withheld by every defence
    one, many = (random_batch(model, size, args.length) for size in (1, args.batch_size))
    report: dict[str, object] = {}
    parameters = sum(p.numel() for p in GradientMap(model, one).parameters.values())
    print(f"{parameters:,} shared parameters, {args.length} tokens")

    # 1. The largest eigenvalue. Both sides build their own graphs.
    found: dict[str, dict[str, float]] = {}

    def record(side: str, before: int, value: float, products: int) -> None:
        found.setdefault(side, {"value": value, "products": products, "peak_memory_growth_mib": peak() - before})

    def input_space() -> None:
        before, top = peak(), largest_eigenvalue(GradientMap(model, one), tolerance=TOLERANCE)
        record("input space", before, float(top), top.iterations)

    def parameter_space() -> None:
        record("parameter space", peak(), *eigsh_eigenvalue(GradientMap(model, one)))

    input_space(), parameter_space()  # in this order, so that each side's growth of peak memory shows
    ratios = alternate(parameter_space, input_space, args.rounds)
    show(report, "eigsh in parameter space / Lanczos in input space", ratios)
    print(f"    {found}")
    report["eigenvalue"] = found

    # 2. The lower bound for one sentence, graph and eigenvalue included.
    generator = torch.Generator(device=args.device).manual_seed(0)
    gradient = GradientMap(model, one).gradient()
    delta = {n: 1e-3 * torch.randn(g.shape, generator=generator, device=g.device) for n, g in gradient.items()}

    def bound() -> None:
        inversion_influence_lower_bound(GradientMap(model, one), delta)

    seen = Observation(model, gradient, input_shape=(1, args.length), labels=one["labels"])
    attack = make_attack("tag", steps=args.timed_attack_steps)
    factor = ATTACK_STEPS / args.timed_attack_steps
    ratios = [factor * ratio for ratio in alternate(lambda: attack(seen), bound, args.rounds)]
    show(report, f"{ATTACK_STEPS} steps of TAG / I_lb of one sentence", ratios)

    # 3. dFIL of every sample.
    def leakage() -> None:
        dfil(GradientMap(model, many), 1e-6, args.num_probes, generator)

    def plain() -> None:
        GradientMap(model, many, second_order=False).gradient()

    label = f"dFIL of {args.batch_size} samples, {args.num_probes} probes / plain gradient"
    show(report, label, alternate(leakage, plain, args.rounds))

    if args.output:
        arguments = {name: value for name, value in vars(args).items() if name not in ("model", "output")}
        header = {"arguments": arguments, "threads": torch.get_num_threads(), "parameters": parameters}
        Path(args.output).write_text(json.dumps(header | report, indent=2) + "\n", encoding="utf-8")


def random_batch(model, batch_size: int, length: int) -> dict[str, torch.Tensor]:
    device, size = model.device, (batch_size, length)
    return {
        "input_ids": torch.randint(1000, model.config.vocab_size, size, device=device),
        "attention_mask": torch.ones(size, dtype=torch.long, device=device),
        "labels": torch.randint(0, 2, (batch_size,), device=device),
    }


def eigsh_eigenvalue(gmap: GradientMap) -> tuple[float, int]:
    """λ_max(JᵀJ) from u ↦ Jᵀ(J u) on vectors of all parameters, and the products it took."""
    shapes = {name: p.shape for name, p in gmap.parameters.items()}
    sizes = [shape.numel() for shape in shapes.values()]
    count = 0

    def product(u: np.ndarray) -> np.ndarray:
        nonlocal count
        count += 1
        parts = torch.from_numpy(u.reshape(-1)).to(gmap.input).split(sizes)
        delta = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        result = gmap.jvp(gmap.vjp(delta))
        return torch.cat([tensor.flatten() for tensor in result.values()]).cpu().numpy()

    operator = LinearOperator((sum(sizes), sum(sizes)), matvec=product, dtype=np.float32)
    (value,) = eigsh(operator, k=1, which="LM", tol=TOLERANCE, return_eigenvectors=False)
    return float(value), count


def alternate(case: Callable[[], object], unit: Callable[[], object], rounds: int) -> list[float]:
    """`case` over `unit`, round by round, each against units run just before and just after it."""
    case(), unit()
    ratios = []
    for _ in range(rounds):
        before, own, after = clock(unit), clock(case), clock(unit)
        ratios.append(own / ((before + after) / 2))
    return ratios


def clock(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak() -> int:
    """The process's peak memory so far in MiB: a high-water mark, so only its growth means something."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def show(report: dict, label: str, ratios: list[float]) -> None:
    row = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
    report[label] = {name: round(ratio, 2) for name, ratio in row.items()}
    print(f"{label:60} {row['median']:7.2f}  ({row['min']:.2f} to {row['max']:.2f})")


if __name__ == "__main__":
    main()
