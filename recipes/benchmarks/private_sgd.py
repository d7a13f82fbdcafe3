"""`dp_sgd` with `per_sample`: what a message costs in plain gradients, and the same beside Opacus,
where that is installed: time, memory, the clipped sum of one batch, and ε of one run.

Opacus is no dependency: `pip install --no-deps opacus opt-einsum` into an environment of your own.
Without it its rows are left out. Embeddings are frozen for all, since Opacus takes no positions
that rows share; no dropout, so that all clip the same gradients.
"""

import argparse
import importlib.util
from collections.abc import Callable

import torch
from torch import nn

from hf_gradguard import GradientMap, make_defense
from hf_gradguard.gradient_map.per_sample.clipping import SampleMap, clipped_sum
from hf_gradguard.leakage import dp_sgd_epsilon

from .measuring import (
    alternate,
    bytes_of,
    cells,
    classifier,
    peak,
    plain_gradient,
    random_batch,
)

BATCH, LENGTH, ROUNDS = 16, 32, 3
RUNS = {
    "256 of 60,000, noise 1.1, 14,062 messages": (1.1, 256 / 60_000, 14_062),
    "16 of 2,000, noise 0.6, 300 messages": (0.6, 16 / 2_000, 300),
    "256 of 67,349, noise 0.7, 800 messages": (0.7, 256 / 67_349, 800),
}
DELTA = 1e-5
Sum = dict[str, torch.Tensor]


def measure(args: argparse.Namespace) -> dict:
    model = _model(args.model)
    batch = random_batch(model, 4 if args.quick else BATCH, 8 if args.quick else LENGTH)
    clip = float(clipped_sum(_map(model, batch), 1.0).norms.median())
    private = make_defense("dp_sgd", per_sample=True, clip=clip, noise_multiplier=1.0)
    plain = plain_gradient(model, batch, needs_input=False)
    cases: dict[str, Callable[[], object]] = {
        "sum of clipped gradients": lambda: clipped_sum(_map(model, batch), clip).total,
        "a message, noise included": lambda: private(_map(model, batch)),
        "one sample after the other": lambda: looped(model, batch, clip),
    }
    if importlib.util.find_spec("opacus"):
        cases |= opacus_cases(args.model, batch, clip)
    expected = looped(model, batch, clip)
    rounds = 1 if args.quick else ROUNDS
    seconds = {name: alternate(case, plain, rounds) for name, case in cases.items()}
    gradient = bytes_of(expected.values())
    memory = {"plain gradient": round(peak(plain) / gradient, 2)}
    memory |= {name: round(peak(case) / gradient, 2) for name, case in cases.items()}
    errors = {
        name: _error(total, expected)
        for name, case in cases.items()
        if "message" not in name and isinstance(total := case(), dict)
    }
    return {
        "batch": list(batch["input_ids"].shape),
        "parameters": sum(g.numel() for g in expected.values()),
        "in plain gradients": seconds,
        "peak, in gradients": memory,
        "relative error of the clipped sum": errors,
        "epsilon": {run: epsilons(*RUNS[run]) for run in list(RUNS)[: 1 if args.quick else None]},
        "opacus": _version("opacus"),
    }


def _model(name: str) -> nn.Module:
    """In training mode, without which Opacus does nothing, and without dropout."""
    model = classifier(name)
    for module in model.modules():
        for setting in ("p", "dropout_prob"):
            if isinstance(getattr(module, setting, None), float):
                setattr(module, setting, 0.0)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_("embeddings" not in parameter_name)
    return model


def _map(model: nn.Module, batch: dict) -> GradientMap:
    return SampleMap(model, batch, second_order=False, needs_input=False)


def looped(model: nn.Module, batch: dict, clip: float) -> Sum:
    """The definition."""
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for row in range(len(batch["labels"])):
        loss = model(**{name: entry[row : row + 1] for name, entry in batch.items()}).loss
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        factor = min(1.0, clip / float(torch.nn.utils.get_total_norm(gradients)))
        for tensor, g in zip(total.values(), gradients, strict=True):
            tensor.add_(g, alpha=factor)
    return total


def opacus_cases(name: str, batch: dict, clip: float) -> dict[str, Callable[[], Sum]]:
    """Its gradients of every sample, and its ghost clipping."""
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping

    labels = batch["labels"]
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    sampled = GradSampleModule(_model(name), loss_reduction="mean")
    ghost = GradSampleModuleFastGradientClipping(
        _model(name), max_grad_norm=clip, use_ghost_clipping=True, loss_reduction="mean"
    )

    def parameters(module: nn.Module) -> Sum:
        named = module._module.named_parameters()
        return {name: p for name, p in named if p.requires_grad}

    def by_samples() -> Sum:
        sampled.zero_grad()
        nn.functional.cross_entropy(sampled(**inputs).logits, labels).backward()
        sample_gradients = {name: p.grad_sample for name, p in parameters(sampled).items()}
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in sample_gradients.values()]).norm(
            dim=0
        )
        factors = (clip / norms).clamp(max=1)
        named = {name: torch.tensordot(factors, g, 1) for name, g in sample_gradients.items()}
        for p in parameters(sampled).values():
            p.grad_sample = None
        return named

    def by_ghosts() -> Sum:
        ghost.zero_grad()
        losses = nn.functional.cross_entropy(ghost(**inputs).logits, labels, reduction="none")
        losses.mean().backward(retain_graph=True)
        ghost.zero_grad()
        factors = ghost.get_clipping_coef()
        ghost.disable_hooks()
        (factors * losses).sum().backward()
        ghost.enable_hooks()
        return {name: p.grad.clone() for name, p in parameters(ghost).items()}

    return {
        "Opacus, gradients of samples": by_samples,
        "Opacus, ghost clipping": by_ghosts,
    }


def epsilons(multiplier: float, rate: float, messages: int) -> dict[str, float]:
    """Of one run, by every accountant there is."""
    values = {"hf-gradguard": dp_sgd_epsilon(multiplier, rate, messages, DELTA)}
    if importlib.util.find_spec("opacus"):
        from opacus.accountants import PRVAccountant, RDPAccountant

        for name, kind in (("Opacus, PRV", PRVAccountant), ("Opacus, RDP", RDPAccountant)):
            accountant = kind()
            accountant.history = [(multiplier, rate, messages)]
            values[name] = float(accountant.get_epsilon(delta=DELTA))
    return {name: round(value, 4) for name, value in values.items()}


def _error(total: Sum, expected: Sum) -> float:
    off = torch.stack([(total[name] - g).norm() for name, g in expected.items()]).norm()
    size = torch.stack([g.norm() for g in expected.values()]).norm()
    return float(f"{float(off / size):.1e}")


def _version(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def table(report: dict) -> tuple[list[str], list]:
    header = ["", "time, in plain gradients", "range", "peak, in gradients", "error of the sum"]
    peaks, errors = report["peak, in gradients"], report["relative error of the clipped sum"]
    rows: list = [("plain gradient", "1", "", f"{peaks['plain gradient']:.2f}", "")]
    for name, ratio in report["in plain gradients"].items():
        error = f"{errors[name]:.0e}" if name in errors else ""
        rows.append((name, *cells(ratio), f"{peaks[name]:.2f}", error))
    for run, values in report["epsilon"].items():
        text = ", ".join(f"{name} {value:.3f}" for name, value in values.items())
        rows.append((f"ε: {run}", text, "", "", ""))
    return header, rows
