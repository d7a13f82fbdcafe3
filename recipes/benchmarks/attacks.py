"""How fast TAG runs, beside the plainest correct implementation: sentences attacked one by one, and several at once.

    python recipes/benchmarks/attacks.py --model PATH_OR_NAME --output docs/results/attack_speed.json

The plain implementation differentiates the loss by all parameters with `create_graph=True`, writes TAG's distance down as it is
printed, and differentiates again. Both take turns, a few steps each; the median of the ratios over the rounds is reported with
their range. Both start at the same input: their objectives after the first step are compared before anything is timed.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForSequenceClassification
from transformers.utils import logging

from hf_gradguard import GradientMap
from hf_gradguard.attacks import Observation, make_attack
from hf_gradguard.layers import layer_numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--sentences", type=int, default=8)
    parser.add_argument(
        "--steps", type=int, default=25, help="of an attack, each time; setting up and decoding count too"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    logging.set_verbosity_error()

    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2).eval()
    seen = []
    for _ in range(args.sentences):
        batch = {
            "input_ids": torch.randint(1000, model.config.vocab_size, (1, args.length)),
            "attention_mask": torch.ones(1, args.length, dtype=torch.long),
            "labels": torch.randint(0, 2, (1,)),
        }
        gradient = GradientMap(model, batch).gradient()
        seen.append(Observation(model, gradient, input_shape=(1, args.length), labels=batch["labels"]))
    start = torch.randn(1, args.length, model.config.hidden_size) * 0.05
    attack = make_attack("tag", steps=args.steps, start=start)
    ours, theirs = attack(seen[0]).history, plain_tag(model, seen[0], start, args.steps)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-3, atol=0)

    cases = {
        "one sentence": (lambda: attack(seen[0]), lambda: plain_tag(model, seen[0], start, args.steps), 1),
        f"{len(seen)} sentences together": (
            lambda: attack.together(seen),
            lambda: plain_tag(model, seen[0], start, args.steps),
            len(seen),
        ),
    }
    report = {"threads": args.threads, "length": args.length, "cases": {}}
    for label, (run, plain, count) in cases.items():
        run(), plain()
        pairs = [(seconds(plain) * count, seconds(run)) for _ in range(args.rounds)]
        ratios = [slow / fast for slow, fast in pairs]
        report["cases"][label] = {
            "times as fast as plain": round(statistics.median(ratios), 2),
            "range": [round(min(ratios), 2), round(max(ratios), 2)],
            "steps a second and sentence": round(args.steps * count / statistics.median(fast for _, fast in pairs), 2),
        }
        print(label, report["cases"][label])
    if args.output:
        args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def plain_tag(model: torch.nn.Module, seen: Observation, start: torch.Tensor, steps: int) -> list[float]:
    """TAG as it is printed, with Transformers' own `inputs_embeds`. Returns the objective at every step."""
    embedding = model.get_input_embeddings().weight
    named = {name: p for name, p in model.named_parameters() if p is not embedding}
    layers = layer_numbers(named)
    x = start.clone().requires_grad_()
    mask = torch.ones(x.shape[:2], dtype=torch.long)
    optimizer = torch.optim.AdamW([x], lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 51)
    history = []
    for _ in range(steps):
        with sdpa_kernel(SDPBackend.MATH):  # no fused kernel has second derivatives
            loss = model(inputs_embeds=x, attention_mask=mask, labels=seen.labels).loss
            gradients = torch.autograd.grad(loss, list(named.values()), create_graph=True, materialize_grads=True)
        value = torch.zeros(())
        for (name, layer), gradient in zip(layers.items(), gradients, strict=True):
            difference = gradient - seen.gradient[name]
            weight = 0.1 * (1 - (layer - 1) / max(layers.values()))
            value = value + 0.5 * difference.square().sum() + weight * difference.abs().sum()
        (x.grad,) = torch.autograd.grad(value, x)
        optimizer.step()
        schedule.step()
        history.append(float(value.detach()))
    return history


def seconds(run) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
