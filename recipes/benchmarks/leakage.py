"""What leakage estimates cost, each against its alternative in the same run.

1. λ_max(J Jᵀ) by Lanczos in input space, against the same eigenvalue of JᵀJ in parameter space by
   `scipy.sparse.linalg.eigsh`, whose workspace holds 20 vectors of all parameters (relative
   tolerance 1e-4 for both).
2. I_lb of one sentence, against 1,500 steps of TAG. A few steps are timed, setting up included, and
   scaled up.
3. dFIL of every sample of a batch, in plain gradients of that batch: by second derivatives, and by
   differences, where uniform noise has one variance and optimal noise one for every coordinate.
"""

import functools
import resource

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.gradient_map import by_differences
from hf_gradguard.leakage import (
    dfil,
    inversion_influence_lower_bound,
    largest_eigenvalue,
)
from recipes.studies.lib.device import DEVICE

from .measuring import RATIO, alternate, cells, classifier, plain_gradient, random_batch

LENGTH, BATCH, PROBES, FEW_PROBES, ROUNDS, TOLERANCE = 16, 16, 10, 2, 3, 1e-4
ATTACK_STEPS, TIMED_STEPS = 1500, 25


def measure(args) -> dict:
    torch.set_num_threads(1)
    size, timed, rounds = (2, 3, 1) if args.quick else (BATCH, TIMED_STEPS, ROUNDS)
    model = classifier(args.model).eval()
    sentence, batch = random_batch(model, 1, LENGTH), random_batch(model, size, LENGTH)
    gradient = GradientMap(model, sentence).gradient()
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    delta = {
        n: 1e-3 * torch.randn(g.shape, generator=generator, device=DEVICE)
        for n, g in gradient.items()
    }
    observation = Observation(model, gradient, input_shape=(1, LENGTH), labels=sentence["labels"])
    attack = make_attack("tag", steps=timed)
    eigenvalues: dict[str, dict[str, float]] = {}

    def record(side: str, start_mib: int, value: float, products: int) -> None:
        eigenvalues.setdefault(
            side,
            {
                "value": value,
                "products": products,
                "peak_memory_growth_mib": high_water() - start_mib,
            },
        )

    # Both sides build their own graphs.
    def input_space() -> None:
        start_mib, top = (
            high_water(),
            largest_eigenvalue(GradientMap(model, sentence), tolerance=TOLERANCE),
        )
        record("input space", start_mib, float(top), top.iterations)

    def parameter_space() -> None:
        record("parameter space", high_water(), *eigsh_eigenvalue(GradientMap(model, sentence)))

    def bound() -> None:
        inversion_influence_lower_bound(GradientMap(model, sentence), delta)

    def leakage() -> None:
        dfil(GradientMap(model, batch), 1e-6, PROBES, generator)

    def quick(variance) -> None:
        dfil(
            by_differences(GradientMap(model, batch, second_order=False)),
            variance,
            FEW_PROBES,
            generator,
        )

    plain = plain_gradient(model, batch)
    input_space()  # in this order, so that each side's growth of peak memory shows
    parameter_space()
    report = {
        "threads": 1,
        "length": LENGTH,
        "parameters": sum(g.numel() for g in gradient.values()),
    }
    report["eigenvalue"] = eigenvalues
    products = {side: sentence["products"] for side, sentence in eigenvalues.items()}
    report["ratios"] = {
        f"λ_max: `eigsh` in parameter space ({products['parameter space']} products) / Lanczos in "
        f"input space ({products['input space']} products)": alternate(
            parameter_space, input_space, rounds
        ),
        f"{ATTACK_STEPS:,} steps of TAG (scaled up from {timed}, setting up included) / I_lb of "
        "one sentence": alternate(lambda: attack(observation), bound, rounds, ATTACK_STEPS / timed),
        f"dFIL of each of {size} samples, {PROBES} probes / plain gradient of the batch": alternate(
            leakage, plain, rounds
        ),
    }
    gmap = GradientMap(model, batch, second_order=False)
    by_differences(gmap)  # tried out once per model
    for name in ("gaussian_noise", "optimal_noise"):
        variance = make_defense(name, scale=1e-3)(gmap).noise.variance
        label = (
            f"the same by differences, {FEW_PROBES} probes, `{name}` / plain gradient of the batch"
        )
        report["ratios"][label] = alternate(functools.partial(quick, variance), plain, rounds)
    return report


def eigsh_eigenvalue(gmap: GradientMap) -> tuple[float, int]:
    """λ_max(JᵀJ) from u ↦ Jᵀ(J u) on vectors of all parameters, and the products it took."""
    shapes = {name: p.shape for name, p in gmap.parameters.items()}
    sizes = [shape.numel() for shape in shapes.values()]
    count = 0

    def product(u: np.ndarray) -> np.ndarray:
        nonlocal count
        count += 1
        tensors = torch.from_numpy(u.reshape(-1)).to(gmap.input).split(sizes)
        delta = {
            name: tensor.view(shape)
            for (name, shape), tensor in zip(shapes.items(), tensors, strict=True)
        }
        result = gmap.jvp(gmap.vjp(delta))
        return torch.cat([tensor.flatten() for tensor in result.values()]).cpu().numpy()

    operator = LinearOperator((sum(sizes), sum(sizes)), matvec=product, dtype=np.float32)
    (value,) = eigsh(operator, k=1, which="LM", tol=TOLERANCE, return_eigenvectors=False)
    return float(value), count


def high_water() -> int:
    """The process's peak memory so far in MiB: only its growth means something."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def table(report: dict) -> tuple[list[str], list[list[str]]]:
    rows = [[label, *cells(ratio, 1)] for label, ratio in report["ratios"].items()]
    return ["", *RATIO], rows
