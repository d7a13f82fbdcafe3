"""What protection costs: sensitivities in plain gradients of the same batch, steps in plain steps (AdamW included).

    python recipes/benchmarks/defenses.py --model PATH_OR_NAME --batch_size 16 --length 16

Machines are noisy, so each figure is a ratio: the thing measured and plain gradients take turns, and the median of the
ratios over the rounds is reported with their range. The floor of a probe is 4/3: a plain gradient takes three matrix
products a weight (forward, and two backward), a probe four (two through the graph of ∇_x L, two through the forward
pass), so k probes cost at least 4k/3, plus 2/3 for the forward pass and ∇_x L that they start from.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification
from transformers.utils import logging

from hf_gradguard import GradientMap, make_defense

EVERY_TENTH = {"refresh_every": 10}
DEFENSES = [
    ("none", {}), ("gaussian_noise", {}), ("laplace_noise", {}), ("optimal_noise", {}), ("optimal_noise", EVERY_TENTH),
    ("pruning", {}), ("pruning", {"utility": 0.9}), ("optimal_pruning", {}), ("optimal_pruning", EVERY_TENTH),
    ("quantization", {}),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--num_probes", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", help="JSON file to write")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    logging.set_verbosity_error()

    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2).to(args.device).train()
    model.get_input_embeddings().requires_grad_(False)  # withheld by every defence, so left out of the plain steps too
    size = (args.batch_size, args.length)
    batch = {
        "input_ids": torch.randint(1000, model.config.vocab_size, size, device=args.device),
        "attention_mask": torch.ones(size, dtype=torch.long, device=args.device),
        "labels": torch.randint(0, 2, (args.batch_size,), device=args.device),
    }
    k = args.num_probes

    def plain() -> None:
        GradientMap(model, batch, second_order=False).gradient()

    def sensitivities(chunk: int) -> Callable[[], object]:
        return lambda: GradientMap(model, batch).squared_sensitivity(k, probe_chunk=chunk)

    def jvp_loop() -> None:
        for _ in range(k):
            functional_jvp(model, batch)

    # label: what runs, how many units' worth of work it stands for, its unit, and rounds
    cases: dict[str, tuple[Callable[[], object], int, Callable[[], object], int]] = {
        f"squared_sensitivity, k={k}, one probe at a time": (sensitivities(1), 1, plain, args.rounds),
        f"squared_sensitivity, k={k}, all probes at once": (sensitivities(k), 1, plain, args.rounds // 2),
        f"loop over torch.autograd.functional.jvp, k={k}": (jvp_loop, 1, plain, args.rounds // 2),
    }
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0)
    for name, settings in DEFENSES:
        steps = settings.get("refresh_every", 1)
        label = f"step with {name}" + "".join(f", {key}={value}" for key, value in settings.items())
        case = training_steps(model, batch, optimizer, steps, name, **settings)
        unit = training_steps(model, batch, optimizer, 1)
        cases[label] = (case, steps, unit, max(args.rounds // 2, 3) if steps > 1 else args.rounds)

    results = {}
    parameters = sum(p.numel() for p in GradientMap(model, batch).parameters.values())
    print(f"{parameters:,} shared parameters, batch {size}")
    for label, (case, steps, unit, rounds) in cases.items():
        ratios = [ratio / steps for ratio in alternate(case, unit, rounds)]
        row = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
        results[label] = {name: round(ratio, 2) for name, ratio in row.items()}
        print(f"{label:60} {row['median']:7.2f}  ({row['min']:.2f} to {row['max']:.2f})")
    if args.output:
        del args.model
        report = {"arguments": vars(args), "parameters": parameters, "torch": torch.__version__, "ratios": results}
        Path(args.output).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def training_steps(model, batch, optimizer, steps: int, name: str = "", **settings) -> Callable[[], object]:
    """Training steps with a defence; without a name, the stock forward and backward pass. AdamW updates in both."""
    generator = torch.Generator(device=batch["labels"].device).manual_seed(0)

    def run() -> None:
        defense = make_defense(name, **settings) if name else None
        for _ in range(steps):
            if defense is None:
                model(**batch).loss.backward()
            else:
                gmap = GradientMap(model, batch, second_order=defense.needs_jacobian)
                for parameter, shared in zip(gmap.parameters.values(), defense(gmap, generator).values(), strict=True):
                    parameter.grad = shared
            optimizer.step()
            optimizer.zero_grad()

    return run


def functional_jvp(model: torch.nn.Module, batch: dict) -> None:
    """One Jᵀv in the plainest way: the double-backward jvp of a function that returns all gradients."""
    parameters = [p for n, p in model.named_parameters() if p is not model.get_input_embeddings().weight]
    embeddings = model.get_input_embeddings()(batch["input_ids"]).detach()
    rest = {key: value for key, value in batch.items() if key != "input_ids"}

    def gradient(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return torch.autograd.grad(model(inputs_embeds=x, **rest).loss, parameters, create_graph=True)

    torch.autograd.functional.jvp(gradient, embeddings, torch.randn_like(embeddings))


def alternate(case: Callable[[], object], unit: Callable[[], object], rounds: int) -> list[float]:
    """`case` over `unit`, round by round, each against units run just before and just after it."""
    case(), unit()
    ratios = []
    for _ in range(rounds):
        before, own, after = clock(unit, 3), clock(case, 1), clock(unit, 3)
        ratios.append(own / ((before + after) / 2))
    return ratios


def clock(function: Callable[[], object], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


if __name__ == "__main__":
    main()
